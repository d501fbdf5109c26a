"""One SGLang server over HTTP: every route that we use, each with a deadline, and its refusals as `ServerFault`s."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio

from tinker.engines.sglang.api import (
    AdapterMissing,
    Answer,
    Asked,
    Malformed,
    Rejected,
    ServerFault,
    Unavailable,
    generate_body,
    read_answer,
    read_scores,
    score_body,
)
from tinker.engines.sglang.settings import ServerKeys

if TYPE_CHECKING:
    import httpx

QUICK = 20.0  # seconds for what a healthy server does at once
SLOW = 600.0  # seconds for what may move gigabytes
CONNECT = 5.0
TAKE_BACK = 3.0  # for telling a server that nobody waits any more


@dataclass(frozen=True, slots=True)
class Facts:
    """What a server says of itself once. `context`: ids that a prompt and its answer may have together. `adapters`: how many may be
    loaded at once (0: it serves none); `loaded`: which are now, ours and others."""

    version: str
    model_path: str
    label: str
    context: int
    adapters: int
    batch_adapters: int
    max_rank: int
    loaded: tuple[str, ...]


class Server:
    """Must be closed. Used from one event loop; any number of calls at once."""

    def __init__(self, url: str, keys: ServerKeys = ServerKeys()) -> None:  # noqa: B008 (it is frozen)
        import httpx

        self.url = url.rstrip("/")
        self._keys = keys
        self._network = httpx.HTTPError
        self._client = httpx.AsyncClient(
            base_url=self.url,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            timeout=httpx.Timeout(None, connect=CONNECT),
            trust_env=False,
            verify=self.url.startswith("https:"),  # certificates take long to read
        )

    async def aclose(self) -> None:
        await self._client.aclose()

    # --- what it is ---

    async def ready(self) -> bool:
        """Whether it serves: it answers a request of one token, or 503."""
        try:
            answer = await self._send("GET", "/health", None, self._keys.api, QUICK + CONNECT)
        except Unavailable:
            return False
        return answer.status_code == 200

    async def label(self) -> str:
        """What it calls its base weights now."""
        return str((await self._get("/model_info")).get("weight_version"))

    async def facts(self) -> Facts:
        info, models = await self._get("/server_info"), await self._get("/v1/models")
        model = await self._get("/model_info")
        adapters = tuple(each["id"] for each in models["data"] if each.get("parent"))
        try:
            limit = info["max_loaded_loras"] or (1 << 30)
            return Facts(
                str(info.get("version", "")),
                str(model["model_path"]),
                str(model["weight_version"]),
                int(info["max_req_input_len"]),
                int(limit) if info["enable_lora"] else 0,
                int(info["max_loras_per_batch"] or 0),
                int(info["max_lora_rank"] or 0),
                adapters,
            )
        except KeyError as error:
            raise Malformed(
                f"{self.url} says nothing of {error}; expected an SGLang server of 0.5.22 or 0.5.23"
            ) from error

    # --- generating ---

    async def generate(self, asked: Asked) -> Answer:
        """However long it takes: the caller has the deadline. Cancelled, or at a fault, it aborts the request there."""
        try:
            answer = await self._send("POST", "/generate", generate_body(asked), self._keys.api, None)
            if answer.status_code == 400:
                told = _message(answer)
                raise AdapterMissing(told) if "LoRA adapter" in told else Rejected(told)
            if answer.status_code != 200:
                raise Unavailable(f"{self.url} answered {answer.status_code}: {_message(answer)}")
            return read_answer(asked, _mapping(answer))
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True), anyio.move_on_after(TAKE_BACK), suppress(ServerFault):
                await self.abort(asked.rid)
            raise

    async def score(self, ids: Sequence[int], adapter: str = "") -> list[float]:
        """The logprob of every id but the first, at temperature 1."""
        return read_scores(ids, await self._post("/generate", score_body(ids, adapter), self._keys.api))

    async def abort(self, rid: str) -> None:
        """Nobody waits for this request any more. Unknown ones are ignored."""
        await self._admin("/abort_request", {"rid": rid, "abort_all": False})

    # --- adapters ---

    async def load_adapter(self, name: str, path: str) -> None:
        """By path. A name that is loaded already is fine: names are never used twice."""
        await self._loaded("/load_lora_adapter", {"lora_name": name, "lora_path": path, "pinned": False}, name)

    async def load_adapter_tensors(self, name: str, config: Mapping[str, Any], tensors: bytes) -> None:
        """Over the wire; `tensors` as made by `wire.pickled`."""
        body = {
            "lora_name": name,
            "config_dict": dict(config),
            "serialized_named_tensors": [base64.b64encode(tensors).decode()],
            "pinned": False,
        }
        await self._loaded("/load_lora_adapter_from_tensors", body, name)

    async def unload_adapter(self, name: str) -> None:
        """It must not be in use: the server waits for its users, and loads nothing meanwhile. One that is not there is fine."""
        try:
            await self._admin("/unload_lora_adapter", {"lora_name": name}, SLOW)
        except Rejected as refused:
            if "does not exist" not in str(refused):
                raise

    # --- base weights ---

    async def name_weights(self, label: str) -> None:
        """Call the base weights so from now on. Requests under way go on."""
        await self._admin("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def pause(self) -> None:
        """Requests under way are put back and wait, without their cache; new ones wait too."""
        await self._admin("/pause_generation", {"mode": "retract"})

    async def resume(self) -> None:
        await self._admin("/continue_generation", {})

    async def flush(self) -> bool:
        """Forget all cached context. False while it is too busy for that."""
        answer = await self._send("POST", "/flush_cache", None, self._keys.admin or self._keys.api, QUICK)
        if answer.status_code not in (200, 400):
            raise Unavailable(f"{self.url}/flush_cache answered {answer.status_code}: {_message(answer)}")
        return answer.status_code == 200

    async def update_from_disk(self, path: str, label: str) -> None:
        """Its base weights are those of this directory from now on."""
        body = {
            "model_path": path,
            "weight_version": label,
            "abort_all_requests": False,
            "flush_cache": False,
            "keep_pause": True,
        }
        await self._admin("/update_weights_from_disk", body, SLOW)

    async def begin_update(self) -> None:
        await self._admin("/begin_weight_update", {}, SLOW)

    async def update_from_tensors(self, tensors: bytes) -> None:
        """Some of its base weights; between `begin_update` and `end_update`."""
        body = {
            "serialized_named_tensors": [base64.b64encode(tensors).decode()],
            "flush_cache": False,
            "abort_all_requests": False,
        }
        await self._admin("/update_weights_from_tensor", body, SLOW)

    async def end_update(self) -> None:
        await self._admin("/end_weight_update", {}, SLOW)

    # --- inside ---

    async def _loaded(self, route: str, body: Mapping[str, Any], name: str) -> None:
        try:
            answer = await self._admin(route, body, SLOW)
        except Rejected as refused:
            if "already loaded" not in str(refused) and "already exists" not in str(refused):
                raise
            return
        there = answer.get("loaded_adapters")
        if isinstance(there, dict) and name not in there:
            raise Malformed(f"{self.url} says that it loaded {name} but lists {', '.join(there) or 'nothing'}")

    async def _admin(self, route: str, body: Mapping[str, Any], patience: float = QUICK) -> Mapping[str, Any]:
        return await self._post(route, body, self._keys.admin or self._keys.api, patience)

    async def _post(self, route: str, body: Mapping[str, Any], key: str, patience: float = QUICK) -> Mapping[str, Any]:
        answer = await self._send("POST", route, body, key, patience)
        if answer.status_code == 400:
            raise Rejected(f"{self.url}{route} refused: {_message(answer)}")
        if answer.status_code != 200:
            raise Unavailable(f"{self.url}{route} answered {answer.status_code}: {_message(answer)}")
        return _mapping(answer) if answer.content.strip() else {}

    async def _get(self, route: str) -> Mapping[str, Any]:
        answer = await self._send("GET", route, None, self._keys.api, QUICK)
        if answer.status_code != 200:
            raise Unavailable(f"{self.url}{route} answered {answer.status_code}: {_message(answer)}")
        return _mapping(answer)

    async def _send(
        self, method: str, route: str, body: Mapping[str, Any] | None, key: str, patience: float | None
    ) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        content = None
        if body is not None:
            content = json.dumps(body).encode()
            headers["Content-Type"] = "application/json"
        try:
            with anyio.fail_after(patience):
                return await self._client.request(method, route, content=content, headers=headers)
        except TimeoutError:
            raise Unavailable(f"{self.url}{route} said nothing for {patience:g} s") from None
        except self._network as error:
            raise Unavailable(f"{self.url}{route}: {type(error).__name__}: {error}") from error


def _mapping(answer: httpx.Response) -> Mapping[str, Any]:
    try:
        body = answer.json()
    except ValueError as error:
        raise Malformed(f"{answer.url} answered with no JSON: {error}") from error
    if not isinstance(body, dict):
        raise Malformed(f"{answer.url} answered with a {type(body).__name__}, expected an object")
    return body


def _message(answer: httpx.Response) -> str:
    """The reason that an error's body gives, whichever of SGLang's shapes it has."""
    try:
        body = answer.json()
    except ValueError:
        return answer.text.strip()[:500]
    if not isinstance(body, dict):
        return str(body)[:500]
    inner = body.get("error")
    told = inner.get("message") if isinstance(inner, dict) else None
    return str(told or body.get("error_message") or body.get("message") or body.get("detail") or body)[:500]
