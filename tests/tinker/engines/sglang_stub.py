"""A server that speaks SGLang's HTTP and has no model: what it answers can be told beforehand, and it misbehaves when it is told to.

It keeps what matters of the real one: adapters by name with users that an unload waits for, a label of the base weights that every token is
stamped with, pausing, a cache that only an idle or retracted server empties, and real sockets. In a test: `async with Stub() as stub`. As a
program (`python sglang_stub.py --port N ...`) it stands in for SGLang's own launcher.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Replies = list[list[int]] | Callable[[list[int]], list[int]]
REPLIES: Replies = [[7, 8, 9, 2], [6, 6, 6, 6, 6, 6, 6, 2], [5, 2]]
EOS = 2


@dataclass
class Faults:
    """What it does wrong, from now on; numbers count down."""

    refuse_load: str = ""
    broken_load: int = 0  # answers 500
    lose_load: int = 0  # says yes and has not
    refuse_unload: int = 0
    flush_fails: int = 0
    abort: int = 0  # answers "abort" with the ids it has so far
    partial: int = 0  # cuts the answer and says it is whole
    lie: str = ""  # stamps tokens with this label
    other_request: int = 0  # answers with somebody else's id
    other_logprobs: int = 0
    broken: int = 0  # answers 500
    nonsense: int = 0  # answers with no JSON
    refuse_update: int = 0
    forget_label: int = 0  # updates its weights and keeps their label
    refuse: str = ""  # 400 to every generation


@dataclass
class Stub:
    replies: Replies = field(default_factory=lambda: REPLIES)
    port: int = 0
    context: int = 1024
    max_loaded: int = 64
    per_batch: int = 8
    label: str = "default"
    model_path: str = "/models/base"
    key: str = ""
    admin_key: str = ""
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.responses: list[tuple[str, int, Any]] = []
        self.adapters: dict[str, str] = {}
        self.users: Counter[str] = Counter()
        self.answered = asyncio.Event()
        self.running: dict[str, asyncio.Event] = {}
        self.aborted: set[str] = set()
        self.cached: set[tuple[str, tuple[int, ...]]] = set()  # (label, prompt): what the prefix cache was made with
        self.stale_hits = 0
        self.updating = False
        self.tensors: list[bytes] = []
        self.healthy = True
        self.go = asyncio.Event()  # tokens come while it is set
        self.go.set()
        self.loading = asyncio.Event()  # loads end while it is set
        self.loading.set()
        self.paused: asyncio.Event | None = None
        self.tokens_before_go = 0  # of each answer, that come although `go` is not set
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def seen(self, route: str) -> list[dict[str, Any]]:
        return [body for path, body in self.requests if path == route]

    async def __aenter__(self) -> Stub:
        await self.listen()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.die()

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def die(self) -> None:
        """Every connection is cut, and nobody listens."""
        if self._server is not None:
            self._server.close()
        await asyncio.sleep(0)  # whoever was accepted just now begins to be served, so that it is found below
        for writer in tuple(self._writers):
            writer.transport.abort()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # an aborted connection closes its socket when the loop comes round
        self._server = None

    async def start_again(self) -> None:
        """A new process on the same port: it has forgotten everything."""
        await self.die()
        self.adapters.clear()
        self.users.clear()
        self.cached.clear()
        self.label, self.paused, self.model_path = "default", None, "/models/base"
        await self.listen()

    # --- HTTP ---

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            while line := await reader.readline():
                method, path, _ = line.decode().split(" ", 2)
                headers = {}
                while (header := await reader.readline()).strip():
                    name, _, value = header.decode().partition(":")
                    headers[name.lower()] = value.strip()
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                status, body = await self._routed(method, path, json.loads(raw) if raw else {}, headers)
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                writer.write(
                    f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode()
                    + data
                )
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.close()

    async def _routed(self, method: str, path: str, body: Any, headers: dict[str, str]) -> tuple[int, Any]:
        route = path.partition("?")[0]
        self.requests.append((route, body))
        if not self._allowed(route, headers.get("authorization", "").removeprefix("Bearer ")):
            return 401, {"error": "Unauthorized"}
        handler = getattr(self, "on" + route.replace("/", "_"), None)
        if handler is None:
            return 404, {"detail": "Not Found"}
        status, answer = await handler(body)
        self.responses.append((route, status, answer))
        return status, answer

    def _allowed(self, route: str, key: str) -> bool:
        if route in ("/health", "/ready") or not self.key:
            return True
        admin = route not in ("/generate", "/model_info", "/server_info", "/v1/models")
        return key == (self.admin_key if admin and self.admin_key else self.key)

    # --- what it is ---

    async def on_health(self, body: Any) -> tuple[int, Any]:
        return (200 if self.healthy and self.paused is None else 503), b""

    async def on_model_info(self, body: Any) -> tuple[int, Any]:
        return 200, {"model_path": self.model_path, "served_model_name": "stub", "weight_version": self.label}

    async def on_server_info(self, body: Any) -> tuple[int, Any]:
        return 200, {
            "version": "0.5.23",
            "enable_lora": True,
            "max_loaded_loras": self.max_loaded,
            "max_loras_per_batch": self.per_batch,
            "max_lora_rank": 16,
            "max_req_input_len": self.context,
            "weight_version": "default",
        }

    async def on_v1_models(self, body: Any) -> tuple[int, Any]:
        base = {"id": "stub", "object": "model", "parent": None}
        return 200, {"object": "list", "data": [base, *({"id": n, "parent": "stub"} for n in self.adapters)]}

    # --- generating ---

    async def on_generate(self, body: Any) -> tuple[int, Any]:
        faults = self.faults
        if faults.refuse:
            return 400, {"error": {"message": faults.refuse}}
        if faults.broken:
            faults.broken -= 1
            return 500, {"error": {"message": "the scheduler is gone"}}
        if faults.nonsense:
            faults.nonsense -= 1
            return 200, b"<html>"
        adapter = body.get("lora_path")
        if adapter is not None and adapter not in self.adapters:
            return 400, {"error": {"message": f"Got LoRA adapter that has never been loaded: {adapter}"}}
        prompt = list(body["input_ids"])
        if not body["sampling_params"]["max_new_tokens"]:
            return 200, self._scored(body, prompt)
        if adapter:
            self.users[adapter] += 1
        self.running[body["rid"]] = asyncio.Event()
        try:
            return 200, await self._sampled(body, prompt)
        finally:
            del self.running[body["rid"]]
            if adapter:
                self.users[adapter] -= 1
            self.answered.set()
            self.answered = asyncio.Event()

    def _scored(self, body: Any, prompt: list[int]) -> dict[str, Any]:
        entries = [[None if place == 0 else -1.0 - token / 1000, token, None] for place, token in enumerate(prompt)]
        return {"text": "", "output_ids": [], "meta_info": {"id": body["rid"], "input_token_logprobs": entries}}

    async def _sampled(self, body: Any, prompt: list[int]) -> dict[str, Any]:
        sampling, faults = body["sampling_params"], self.faults
        stops = {EOS, *(sampling.get("stop_token_ids") or ())}
        ids: list[int] = []
        labels: list[str] = []
        reason: dict[str, Any] = {"type": "length", "length": sampling["max_new_tokens"]}
        self._prefill(prompt)
        for token in self._reply(prompt):
            if len(ids) >= self.tokens_before_go:
                await self._until(self.go, body["rid"])
            if self.paused is not None:
                await self._until(self.paused, body["rid"])
                self._prefill(prompt)
            if body["rid"] in self.aborted or (faults.abort and ids):
                faults.abort -= body["rid"] not in self.aborted
                reason = {"type": "abort", "message": "Abort in flight", "status_code": None, "err_type": None}
                break
            ids.append(token)
            labels.append(faults.lie or self.label)
            if token in stops:
                reason = {"type": "stop", "matched": token}
                break
            if len(ids) == sampling["max_new_tokens"]:
                break
        if faults.partial and len(ids) > 1:
            faults.partial -= 1
            ids, labels, reason = ids[:-1], labels[:-1], {"type": "length", "length": sampling["max_new_tokens"]}
        return self._answer(body["rid"], prompt, ids, labels, reason)

    def _answer(self, rid: str, prompt: list[int], ids: list[int], labels: list[str], reason: Any) -> dict[str, Any]:
        faults = self.faults
        if faults.other_request:
            faults.other_request -= 1
            rid = rid[::-1]
        logprobs = [[-0.5, token, None] for token in ids]
        if faults.other_logprobs:
            faults.other_logprobs -= 1
            logprobs = logprobs[1:]
        spans: list[dict[str, Any]] = []
        for place, label in enumerate(labels):
            if spans and spans[-1]["version"] == label:
                spans[-1]["end"] = place + 1
            else:
                spans.append({"version": label, "start": place, "end": place + 1})
        meta = {
            "id": rid,
            "finish_reason": reason,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "cached_tokens_details": None,
            "reasoning_tokens": 0,
            "num_retractions": 0,
            "weight_version": labels[-1] if labels else self.label,
            "weight_versions": spans,
            "input_token_logprobs": [],
            "output_token_logprobs": logprobs,
            "output_token_logprobs_length": len(logprobs),
            "dp_rank": None,
            "e2e_latency": 0.01,
            "response_sent_to_client_ts": 1.0,
        }
        return {"text": "", "output_ids": ids, "meta_info": meta}

    def _prefill(self, prompt: list[int]) -> None:
        """Cached context of other weights is what must never be found."""
        self.stale_hits += any(label != self.label and known == tuple(prompt) for label, known in self.cached)
        self.cached.add((self.label, tuple(prompt)))

    def _reply(self, prompt: list[int]) -> list[int]:
        if callable(self.replies):
            return self.replies(prompt)
        digest = hashlib.sha256(repr(prompt).encode()).digest()
        reply = self.replies[digest[0] % len(self.replies)]
        return reply + [EOS] * 4096

    async def _until(self, event: asyncio.Event, rid: str) -> None:
        """The event, or the request is aborted."""
        if event.is_set():
            return
        waits = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(self.running[rid].wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def on_abort_request(self, body: Any) -> tuple[int, Any]:
        for rid, event in self.running.items():
            if body.get("abort_all") or (body.get("rid") and rid.startswith(body["rid"])):
                self.aborted.add(rid)
                event.set()
        return 200, b""

    # --- adapters ---

    async def on_load_lora_adapter(self, body: Any) -> tuple[int, Any]:
        return await self._load(body["lora_name"], body["lora_path"])

    async def on_load_lora_adapter_from_tensors(self, body: Any) -> tuple[int, Any]:
        return await self._load(body["lora_name"], "__tensor__")

    async def _load(self, name: str, path: str) -> tuple[int, Any]:
        await self.loading.wait()
        if self.faults.broken_load:
            self.faults.broken_load -= 1
            return 500, {"error": {"message": "out of memory"}}
        if self.faults.refuse_load:
            return 400, {"success": False, "error_message": self.faults.refuse_load, "loaded_adapters": {}}
        if name in self.adapters:
            told = f"LoRA with name {name} already exists. Loaded LoRAs: {list(self.adapters)}"
            return 400, {"success": False, "error_message": told, "loaded_adapters": None}
        if self.faults.lose_load:
            self.faults.lose_load -= 1
            return 200, {"success": True, "error_message": None, "loaded_adapters": dict(self.adapters)}
        self.adapters[name] = path
        while len(self.adapters) > self.max_loaded:
            del self.adapters[next(iter(self.adapters))]
        return 200, {"success": True, "error_message": None, "loaded_adapters": dict(self.adapters)}

    async def on_unload_lora_adapter(self, body: Any) -> tuple[int, Any]:
        name = body["lora_name"]
        if self.faults.refuse_unload:
            self.faults.refuse_unload -= 1
            return 400, {"success": False, "error_message": "not now", "loaded_adapters": None}
        if name not in self.adapters:
            told = f"LoRA with name {name} does not exist. Loaded LoRAs: {list(self.adapters)}"
            return 400, {"success": False, "error_message": told, "loaded_adapters": None}
        del self.adapters[name]
        while self.users[name]:
            await self.answered.wait()
        return 200, {"success": True, "error_message": None, "loaded_adapters": dict(self.adapters)}

    # --- weights ---

    async def on_update_weight_version(self, body: Any) -> tuple[int, Any]:
        if body.get("abort_all_requests", True):
            await self.on_abort_request({"abort_all": True})
        self.label = body["new_version"]
        return 200, {"success": True, "message": "", "new_version": self.label}

    async def on_pause_generation(self, body: Any) -> tuple[int, Any]:
        mode = body.get("mode", "abort")
        if mode == "abort":
            await self.on_abort_request({"abort_all": True})
        self.paused = self.paused or asyncio.Event()
        return 200, {"message": "Generation paused successfully.", "status": "ok"}

    async def on_continue_generation(self, body: Any) -> tuple[int, Any]:
        if self.paused is not None:
            self.paused.set()
        self.paused = None
        return 200, {"message": "Generation continued successfully.", "status": "ok"}

    async def on_flush_cache(self, body: Any) -> tuple[int, Any]:
        if self.faults.flush_fails:
            self.faults.flush_fails -= 1
            return 400, b"Flush cache failed: pending requests\n"
        if self.running and self.paused is None:
            return 400, b"Flush cache failed: running requests\n"
        self.cached.clear()
        return 200, b"Cache flushed.\n"

    async def on_update_weights_from_disk(self, body: Any) -> tuple[int, Any]:
        if self.faults.refuse_update:
            self.faults.refuse_update -= 1
            return 400, {"success": False, "message": "no such model", "num_paused_requests": 0}
        if body.get("abort_all_requests"):
            await self.on_abort_request({"abort_all": True})
        self.model_path = body["model_path"]
        self._labelled(body.get("weight_version"))
        return 200, {"success": True, "message": "", "num_paused_requests": len(self.running)}

    async def on_begin_weight_update(self, body: Any) -> tuple[int, Any]:
        self.updating = True
        return 200, {"success": True, "message": "Success"}

    async def on_end_weight_update(self, body: Any) -> tuple[int, Any]:
        self.updating = False
        return 200, {"success": True, "message": "Success"}

    async def on_update_weights_from_tensor(self, body: Any) -> tuple[int, Any]:
        if not self.updating or self.faults.refuse_update:
            self.faults.refuse_update -= self.updating
            return 400, {"success": False, "message": "no weight update session is open"}
        self.tensors += [item.encode() for item in body["serialized_named_tensors"]]
        self._labelled(body.get("weight_version"))
        return 200, {"success": True, "message": "Success"}

    def _labelled(self, label: str | None) -> None:
        if label is not None and self.faults.forget_label:
            self.faults.forget_label -= 1
        elif label is not None:
            self.label = label


async def _main(arguments: list[str]) -> None:
    options = dict(zip(arguments[::2], arguments[1::2], strict=False))
    async with Stub(port=int(options["--port"]), label=options.get("--weight-version", "default")):
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word not in ("--enable-lora", "--sleep-on-idle")]
    asyncio.run(_main(words))
