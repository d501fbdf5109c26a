"""What we say to an SGLang server and what its answers mean, as plain values; `server` sends and receives them.

Written for SGLang 0.5.22 to 0.5.23. Two things are never left to the server's defaults: every sampling parameter that would change the
distribution, and `abort_all_requests`, which some routes set.

Logprobs: SGLang reports log softmax(logits / temperature), and for greedy requests those of temperature 1. That is this project's own
definition (`tinker.protocol.values.Sampling`), so they are taken as they are. A server that was started with
SGLANG_RETURN_ORIGINAL_LOGPROB answers otherwise, and must not be.
"""

from __future__ import annotations

import hashlib
import math
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinker.protocol.values import PolicyVersion

_PLAIN = re.compile(r"[^A-Za-z0-9_.=+-]")


class ServerFault(Exception):
    """Base of what goes wrong with one server: the message says what was found. Another server may do better."""


class Unavailable(ServerFault):
    """It did not answer, or answered that it cannot now."""


class Rejected(ServerFault):
    """It understood and refused: the request is at fault, and any other server would say the same."""


class AdapterMissing(ServerFault):
    """It does not have an adapter that it was given."""


class Aborted(ServerFault):
    """It gave up on the request. What it had sampled is no answer."""


class WrongVersion(ServerFault):
    """It answered with other weights than were asked for. Such tokens are never data."""


class Malformed(ServerFault):
    """Its answer cannot be what it says."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: `adapter` by its name ("" for the base weights), `label` of the base weights under it, `stops` that end the answer."""

    rid: str
    prompt: Sequence[int]
    adapter: str
    label: str
    budget: int
    temperature: float
    stops: frozenset[int]
    vocab: int


@dataclass(frozen=True, slots=True)
class Answer:
    """`stopped`: by one of the stops, else by its budget. `seconds`: how long the server took."""

    ids: list[int]
    logprobs: list[float]
    stopped: bool
    seconds: float


def new_rid() -> str:
    """Always 32 characters: servers abort by prefix, so no id may begin another."""
    return uuid.uuid4().hex


def weights_name(version: PolicyVersion, digest: str) -> str:
    """The one name of these weights on every server: `run-agent@v000012-1f0c9a3b`. Other weights have another name, for ever."""
    plain = _PLAIN.sub("-", version.policy) or "base"
    key = hashlib.sha256(f"{version.policy} {version.version} {digest}".encode()).hexdigest()
    return f"{plain}@v{version.version:06d}-{key[:8]}"


def generate_body(asked: Asked) -> dict[str, Any]:
    """The body of POST /generate."""
    return {
        "rid": asked.rid,
        "input_ids": list(asked.prompt),
        "lora_path": asked.adapter or None,
        "return_logprob": True,
        "logprob_start_len": -1,
        "return_text_in_logprobs": False,
        "stream": False,
        "sampling_params": {
            "max_new_tokens": asked.budget,
            "temperature": asked.temperature,
            "stop_token_ids": sorted(asked.stops),
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "min_new_tokens": 0,
            "n": 1,
            "ignore_eos": False,
            "skip_special_tokens": False,
        },
    }


def score_body(ids: Sequence[int], adapter: str = "") -> dict[str, Any]:
    """The body of POST /generate that samples nothing and asks for the logprob of every id but the first."""
    return {
        "rid": new_rid(),
        "input_ids": list(ids),
        "lora_path": adapter or None,
        "return_logprob": True,
        "logprob_start_len": 0,
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
    }


def read_scores(ids: Sequence[int], body: Mapping[str, Any]) -> list[float]:
    """What `score_body` asked for; Malformed if it is not about these ids."""
    try:
        entries = body["meta_info"]["input_token_logprobs"]
        if [entry[1] for entry in entries] != list(ids):
            raise Malformed("it scored other ids than it was given")
        return [float(entry[0]) for entry in entries[1:]]
    except (KeyError, TypeError, IndexError) as error:
        raise Malformed(f"its scores have no {error}") from error


def read_answer(asked: Asked, body: Mapping[str, Any]) -> Answer:
    """The checked answer. Aborted, WrongVersion or Malformed if it is none: then nothing of it may be used."""
    try:
        return _read(asked, body, body["meta_info"])
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise Malformed(f"its answer is not as expected: {type(error).__name__}: {error}") from error


def _read(asked: Asked, body: Mapping[str, Any], meta: Mapping[str, Any]) -> Answer:
    reason = meta["finish_reason"] or {}
    if reason.get("type") == "abort":
        raise Aborted(f"the server aborted it: {reason.get('message') or 'no reason given'}")
    if meta["id"] != asked.rid:
        raise Malformed(f"it answered request {meta['id']}, asked was {asked.rid}")
    ids = [int(token) for token in body["output_ids"]]
    check_spans(asked.label, meta, len(ids))
    entries = meta["output_token_logprobs"]
    if [entry[1] for entry in entries] != ids:
        raise Malformed(f"its logprobs are of {len(entries)} other ids than the {len(ids)} of its answer")
    logprobs = [float(entry[0]) for entry in entries]
    if not all(map(math.isfinite, logprobs)):
        raise Malformed("a logprob is not finite: these weights are broken")
    if any(not 0 <= token < asked.vocab for token in ids):
        raise Malformed(f"it answered with an id beyond 0..{asked.vocab - 1}: it serves another model")
    return Answer(ids, logprobs, _stopped(asked, reason, ids), float(meta.get("e2e_latency") or 0.0))


def _stopped(asked: Asked, reason: Mapping[str, Any], ids: Sequence[int]) -> bool:
    """Why it ended, which the ids must bear out: a partial answer is no answer."""
    if reason.get("type") == "stop":
        if not ids or ids[-1] not in asked.stops:
            raise Malformed(
                f"it stopped at {ids[-1] if ids else 'nothing'}, which ends no answer of this model "
                f"({sorted(asked.stops)} do): its tokenizer is another"
            )
        return True
    if reason.get("type") != "length" or len(ids) != asked.budget:
        raise Malformed(f"{len(ids)} of {asked.budget} ids came, and it says it ended by {reason.get('type')!r}")
    return False


def check_spans(label: str, meta: Mapping[str, Any], count: int) -> None:
    """WrongVersion unless every one of `count` tokens was sampled from the base weights of that label."""
    spans = meta.get("weight_versions")
    if spans is None:  # only the final label is known then: good enough only if nothing changed in between
        spans = [{"version": meta["weight_version"], "start": 0, "end": count}]
    foreign = {span["version"]: span["end"] - span["start"] for span in spans if span["version"] != label}
    if foreign or meta["weight_version"] != label:
        told = ", ".join(f"{tokens} from {version!r}" for version, tokens in foreign.items())
        raise WrongVersion(
            f"of {count} tokens sampled under {meta['weight_version']!r}, {told or 'none'} are not from {label!r}"
        )
    ends = [0, *(span["end"] for span in spans)]
    if [span["start"] for span in spans] != ends[:-1] or ends[-1] != count:
        raise Malformed(f"its versions account for {ends[-1]} of {count} tokens")
