"""Continuous batching: requests join and leave the running batch at any step; every step samples one token for every row in it.

A tick first takes in what waits (all its prompts in one right-padded forward, or a few if their lengths differ widely; equal prompts
under equal weights once), then decodes one token for all live rows, whatever their adapters.

The shape of a batch decides in which order a processor adds, so a row's numbers differ in their last bits with its company. A batch that
is `alone` computes every row by itself and keeps no context between requests: an answer is then a function of its request and its weights
only, bit for bit, whenever it arrives and whatever was asked before.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from tinker.engines.checks import check_request
from tinker.engines.engine import EngineError, GenerateRequest, Generation
from tinker.engines.torch.cache import Kept, KeptContexts, common_prefix
from tinker.engines.torch.cutting import cut
from tinker.engines.torch.forward import Live, Own
from tinker.engines.torch.lora import Adapter, Use
from tinker.engines.torch.model import Model
from tinker.engines.torch.sampling import Plan, plan, sample, sample_alone
from tinker.protocol.values import Finish


@dataclass(slots=True, eq=False)
class Served:
    """Weights that answer requests; `adapter` None is the base model. `open` counts the requests waiting for or in the batch."""

    digest: str
    adapter: Adapter | None
    open: int = 0


@dataclass(slots=True, eq=False)
class Stream:
    """One request on its way to its answer."""

    request: GenerateRequest
    served: Served
    answer: Callable[[Generation | EngineError], None]
    cancelled: Callable[[], bool]
    prompt: list[int]
    budget: int
    limit: Finish
    stops: frozenset[int]
    random: Callable[[], float]
    cached: int = 0  # how many of prompt + ids have their keys and values in the live cache
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    started: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.request.cache_key} under {self.request.policy}"

    @property
    def weights_and_prompt(self) -> tuple[int, tuple[int, ...]]:
        """Streams in which this is equal have equal logits after their prompts."""
        return id(self.served), tuple(self.prompt)


class Batch:
    """The rows running now and the requests waiting for a place; at most `rows` run at once. `alone`: see the module. Used from one
    thread."""

    def __init__(self, model: Model, rows: int, cache_bytes: int, alone: bool = False) -> None:
        self._alone = alone or not model.batched
        self.kept = KeptContexts(0 if self._alone else cache_bytes)
        self.prefilled = 0  # prompt tokens that went through the model
        self._model = model
        self._rows = rows
        self._live: list[Stream] = []
        self._joining: dict[Stream, None] = {}  # out of `_waiting`, not yet in `_live`
        self._waiting: deque[Stream] = deque()
        self._cache = Live(model, rows) if model.batched else Own(model)
        self._stops = frozenset(model.card.eos_ids)
        self._decode: tuple[Use | None, Plan] | None = None

    def __len__(self) -> int:
        return len(self._live) + len(self._waiting)

    def add(
        self,
        request: GenerateRequest,
        served: Served,
        answer: Callable[[Generation | EngineError], None],
        cancelled: Callable[[], bool],
    ) -> None:
        """Queue a request; `answer` is called exactly once unless it is cancelled. EngineError if it can never be answered."""
        check_request(request, self._model.card)
        prompt, sampling = list(request.prompt), request.sampling
        room = self._model.card.context - len(prompt)
        if room <= 0:
            answer(Generation([], [], Finish.CONTEXT, request.policy))
            return
        served.open += 1
        self._waiting.append(
            Stream(
                request=request,
                served=served,
                answer=answer,
                cancelled=cancelled,
                prompt=prompt,
                budget=min(room, sampling.max_tokens),
                limit=Finish.LENGTH if sampling.max_tokens <= room else Finish.CONTEXT,
                stops=self._stops.union(sampling.stop_ids) if sampling.stop_ids else self._stops,
                random=random.Random(sampling.seed).random,
            )
        )

    def tick(self, joined: Callable[[], None] = lambda: None) -> None:
        """One step; answers whoever is done. `joined` is called when those who joined have their first tokens: who wanted no more should
        not have to wait for the others' next."""
        self._leave_cancelled()
        try:
            self._take_in()
            joined()
            self._decode_once()
        except Exception as reason:
            logging.getLogger(__name__).exception("a tick failed")
            broken = f"the model failed on a batch of {len(self)}: {reason!r}; the task server's log has the traceback"
            self.fail(EngineError(broken), waiting=False)

    def fail(self, error: EngineError, *, waiting: bool = True) -> None:
        """Answer everyone (or only those running) with the error."""
        leaving = [*self._live, *self._joining, *(self._waiting if waiting else ())]
        self._live.clear()
        self._joining.clear()
        self._decode = None
        if waiting:
            self._waiting.clear()
        for stream in leaving:
            self._answer(stream, error)

    # --- joining ---

    def _take_in(self) -> None:
        free = self._rows - len(self._live)
        if not self._waiting or free <= 0:
            return
        joining = [self._waiting.popleft() for _ in range(min(free, len(self._waiting)))]
        self._joining = dict.fromkeys(joining)
        known = [self._known(stream) for stream in joining]
        for batch in self._batches(joining, [shared for shared, _ in known]):
            self._prefill([joining[index] for index in batch], [known[index] for index in batch])

    def _known(self, stream: Stream) -> tuple[int, Tensor | None]:
        """How many leading tokens of the prompt need not be computed, and their keys and values: those of the stream's own context, of the
        kept one that begins alike longest, or of a row that runs."""
        best = self.kept.prefix(stream.request.cache_key, stream.served, stream.prompt)
        if 2 * best[0] >= len(stream.prompt) or self._alone:
            return best
        best = max(best, self.kept.longest(stream.served, stream.prompt), key=lambda found: found[0])
        for row, other in enumerate(self._live):
            if other.served is stream.served and other.prompt[0] == stream.prompt[0]:
                ids = (other.prompt + other.ids)[: other.cached]
                shared = min(common_prefix(ids, stream.prompt), len(stream.prompt) - 1)
                if shared > best[0]:
                    best = shared, self._cache.copied(row, shared)
        return best

    def _batches(self, joining: Sequence[Stream], known: Sequence[int]) -> list[list[int]]:
        """Indices of those whose prompts go through the model together, `known` tokens of each left out."""
        if not self._model.batched:
            return [[index] for index in range(len(joining))]
        if not self._alone:
            return cut([len(stream.prompt) - shared for stream, shared in zip(joining, known, strict=True)])
        equal: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for index, stream in enumerate(joining):
            equal.setdefault(stream.weights_and_prompt, []).append(index)
        return list(equal.values())

    def _prefill(self, joining: list[Stream], known: list[tuple[int, Tensor | None]]) -> None:
        """Run the unknown part of these prompts and sample their first tokens. Equal prompts under equal weights run once."""
        firsts: dict[tuple[int, tuple[int, ...]], int] = {}
        place_of = [firsts.setdefault(stream.weights_and_prompt, len(firsts)) for stream in joining]
        leaders = [place_of.index(place) for place in range(len(firsts))]
        followers = [index for index in range(len(joining)) if index not in set(leaders)]
        begin, now = len(self._live), perf_counter()
        self._cache.reserve(begin + len(joining), max(len(stream.prompt) for stream in joining))
        for offset, index in enumerate(leaders):
            shared, kv = known[index]
            joining[index].cached = shared
            if kv is not None:
                self._cache.restore(begin + offset, kv, shared)
        ordered = [joining[index] for index in (*leaders, *followers)]
        for stream in ordered:
            stream.started = now
            del self._joining[stream]
        self._live += ordered
        self._decode = None
        leading = ordered[: len(leaders)]
        self.prefilled += sum(len(stream.prompt) - stream.cached for stream in leading)
        logits = self._forward(
            begin, leading, [stream.prompt[stream.cached :] for stream in leading], self._use(leading)
        )
        for offset, index in enumerate(followers, start=begin + len(leaders)):
            self._cache.move(begin + place_of[index], offset, len(joining[index].prompt))
            joining[index].cached = len(joining[index].prompt)
        if followers:
            logits = logits[[place_of[index] for index in (*leaders, *followers)]]
        self._sample(begin, logits, self._wanted(ordered))

    # --- stepping ---

    def _decode_once(self) -> None:
        if not self._live:
            return
        live = self._live
        self._cache.reserve(len(live), max(stream.cached for stream in live) + 1)
        if self._decode is None:
            use = None if self._alone else self._use(live)
            self._decode = use, self._wanted(live)
        use, wanted = self._decode
        if self._alone:
            rows = [
                self._forward(row, [stream], [stream.ids[-1:]], self._use([stream])) for row, stream in enumerate(live)
            ]
            self._sample(0, torch.cat(rows), wanted)
            return
        logits = self._forward(0, live, [stream.ids[-1:] for stream in live], use)
        self._sample(0, logits, wanted)

    def _use(self, streams: Sequence[Stream]) -> Use | None:
        return self._model.router.rows([stream.served.adapter for stream in streams])

    def _wanted(self, streams: Sequence[Stream]) -> Plan:
        return plan([stream.request.sampling.temperature for stream in streams], self._model.device)

    def _forward(self, begin: int, streams: Sequence[Stream], new: Sequence[Sequence[int]], use: Use | None) -> Tensor:
        """Append `new` ids to these rows' caches; logits [rows, vocab] after each row's last id."""
        cached = [stream.cached for stream in streams]
        for stream, ids in zip(streams, new, strict=True):
            stream.cached += len(ids)
        self._model.router.use = use
        return self._cache.extend(begin, cached, new)

    def _sample(self, begin: int, logits: Tensor, wanted: Plan) -> None:
        """Give each row from `begin` on its next token, and let those that are done leave."""
        streams = self._live[begin:]
        uniforms = [1.0 - stream.random() for stream in streams]
        ids, logprobs = (sample_alone if self._alone else sample)(logits, wanted, uniforms)
        done: list[tuple[int, Finish | EngineError]] = []
        for row, (stream, token, logprob) in enumerate(zip(streams, ids, logprobs, strict=True), start=begin):
            if logprob != logprob:
                done.append(
                    (row, EngineError(f"the model's logits for {stream.name} are not finite: these weights are broken"))
                )
                continue
            stream.ids.append(token)
            stream.logprobs.append(logprob)
            if token in stream.stops:
                done.append((row, Finish.STOP))
            elif len(stream.ids) >= stream.budget:
                done.append((row, stream.limit))
        now = perf_counter()
        for row, how in reversed(done):
            stream = self._live[row]
            if isinstance(how, EngineError):
                self._cache.wipe(row)
                self._answer(stream, how)
            else:
                self._keep(row)
                self._answer(
                    stream, Generation(stream.ids, stream.logprobs, how, stream.request.policy, now - stream.started)
                )
            self._leave(row)

    # --- leaving ---

    def _keep(self, row: int) -> None:
        if self._alone:
            return
        stream = self._live[row]
        ids = (stream.prompt + stream.ids)[: stream.cached]
        self.kept.keep(stream.request.cache_key, Kept(stream.served, ids, self._cache.copied(row, stream.cached)))

    def _leave(self, row: int) -> None:
        """Take a row out; the last one moves into its place."""
        self._decode = None
        moved = self._live.pop()
        if row < len(self._live):
            self._live[row] = moved
            self._cache.move(len(self._live), row, moved.cached)

    def _leave_cancelled(self) -> None:
        for row in reversed(range(len(self._live))):
            if self._live[row].cancelled():
                self._live[row].served.open -= 1
                self._leave(row)
        if any(stream.cancelled() for stream in self._waiting):
            for stream in self._waiting:
                stream.served.open -= stream.cancelled()
            self._waiting = deque(stream for stream in self._waiting if not stream.cancelled())

    def _answer(self, stream: Stream, result: Generation | EngineError) -> None:
        stream.served.open -= 1
        stream.answer(result)
