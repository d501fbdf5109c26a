"""The torch engine: one thread owns the model; callers on the event loop await futures.

The thread's life is one loop: take what arrived, do one update operation if one is queued, run one tick of the batch, post all answers
to the event loop at once. So an update and generation never overlap, and nothing about the model needs a lock.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from tinker.engines.checks import CLOSED, digest_of, not_loaded, other_weights
from tinker.engines.engine import EngineError, Files, GenerateRequest, Generation
from tinker.engines.torch.adapters import read_adapter
from tinker.engines.torch.cutting import PADDED_TOKENS
from tinker.engines.torch.generate import Batch, Served
from tinker.engines.torch.lora import One
from tinker.engines.torch.model import Model, load_model
from tinker.engines.torch.scoring import score
from tinker.engines.torch.train import Trainer
from tinker.protocol.batches import Row
from tinker.protocol.values import BASE, AdamSpec, LoraSpec, LossSpec, ModelCard, PolicyName, PolicyVersion

T = TypeVar("T")
Future = asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class Call:
    """Something for the model's thread to do. `heavy` calls run one between two ticks; `later` ones post their answer themselves."""

    run: Callable[[], object]
    future: Future
    heavy: bool = False
    later: bool = False


class TorchEngine:
    """Serves and trains LoRA adapters on one base model; see `tinker.engines.engine.Engine` for the contract.

    `slots`: rows that run at once. `max_context`: tokens per context, if less than the model's own. `threads`: of torch. `adapter_slots`:
    versions served at once. `cache_bytes`: bound on keys and values kept between requests. `padded_tokens`: bound on a micro-batch of
    updates and scores. `linger`: seconds that an idle engine waits for more requests after the first, so that a burst starts as one batch.
    `deterministic`: one thread, every row by itself, nothing kept between requests: the same bits whenever a request arrives and whatever
    else is asked (slower; see `generate`). `device`: cpu, cuda, cuda:1, ...; auto is the first GPU, if there is one. `dtype`: float32 or
    bfloat16; auto is float32 on the CPU.
    """

    name = "torch"

    def __init__(
        self,
        model: str,
        *,
        slots: int = 64,
        max_context: int | None = None,
        threads: int = 1,
        adapter_slots: int = 64,
        cache_bytes: int = 1 << 29,
        padded_tokens: int = PADDED_TOKENS,
        linger: float = 0.0005,
        deterministic: bool = False,
        device: str = "auto",
        dtype: str = "auto",
    ) -> None:
        self._source = model
        self._slots, self._max_context, self._threads = slots, max_context, 1 if deterministic else threads
        self._deterministic, self._device, self._dtype = deterministic, device, dtype
        self._adapter_slots, self._cache_bytes = adapter_slots, cache_bytes
        self._padded, self._linger = padded_tokens, linger
        self._inbox: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._posts: list[tuple[Future, object]] = []
        self._heavy: deque[Call] = deque()
        self._served: dict[PolicyVersion, Served] = {}
        self._retiring: list[tuple[Served, Future]] = []
        self._model: Model | None = None
        self._open = False
        self.busy_seconds = 0.0

    @property
    def card(self) -> ModelCard:
        """Known once the engine was entered."""
        return self._ready.card

    @property
    def running(self) -> int:
        """Requests waiting for or in the batch."""
        return len(self._batch)

    @property
    def prefilled(self) -> int:
        """Prompt tokens that went through the model so far; those found in the cache did not."""
        return self._batch.prefilled

    async def __aenter__(self) -> TorchEngine:
        self._loop = asyncio.get_running_loop()
        started: Future = self._loop.create_future()
        self._stopped: Future = self._loop.create_future()
        self._thread = threading.Thread(
            target=self._live, args=(started,), name=f"torch engine {self._source}", daemon=True
        )
        self._thread.start()
        await started
        self._open = True
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._open = False
        self._inbox.put(None)
        await self._stopped
        self._thread.join()

    # --- rollout ---

    async def load(self, version: PolicyVersion, adapter: Files) -> None:
        await self._call(lambda: self._load(version, adapter))

    async def unload(self, version: PolicyVersion) -> None:
        future = self._future()
        await self._put(Call(lambda: self._unload(version, future), future, later=True))

    async def generate(self, request: GenerateRequest) -> Generation:
        future = self._future()
        answer: Generation = await self._put(Call(lambda: self._generate(request, future), future, later=True))
        return answer

    async def forget(self, cache_key_prefix: str) -> None:
        await self._call(lambda: self._batch.kept.forget(cache_key_prefix))

    # --- forward ---

    async def score(self, under: PolicyVersion, rows: Sequence[Row]) -> list[list[float]]:
        return await self._call(lambda: self._score(under, rows), heavy=True)

    # --- update ---

    async def attach(self, policy: PolicyName, lora: LoraSpec) -> Files:
        return await self._call(lambda: self._trainer.attach(policy, lora), heavy=True)

    async def forward_backward(self, policy: PolicyName, rows: Sequence[Row], loss: LossSpec) -> dict[str, float]:
        return await self._call(lambda: self._trainer.forward_backward(policy, rows, loss), heavy=True)

    async def optim_step(self, policy: PolicyName, adam: AdamSpec) -> dict[str, float]:
        return await self._call(lambda: self._trainer.optim_step(policy, adam), heavy=True)

    async def publish(self, policy: PolicyName) -> Files:
        return await self._call(lambda: self._trainer.publish(policy), heavy=True)

    async def rewind(self, policy: PolicyName, adapter: Files) -> None:
        await self._call(lambda: self._trainer.rewind(policy, adapter), heavy=True)

    async def save_state(self, policy: PolicyName) -> Files:
        return await self._call(lambda: self._trainer.save_state(policy), heavy=True)

    async def load_state(self, policy: PolicyName, state: Files) -> None:
        await self._call(lambda: self._trainer.load_state(policy, state), heavy=True)

    async def detach(self, policy: PolicyName) -> None:
        await self._call(lambda: self._trainer.detach(policy), heavy=True)

    # --- on the event loop ---

    @property
    def _ready(self) -> Model:
        if self._model is None:
            raise EngineError("the engine was not entered: use `async with`")
        return self._model

    def _future(self) -> Future:
        return asyncio.get_running_loop().create_future()

    async def _call(self, run: Callable[[], T], *, heavy: bool = False) -> T:
        result: T = await self._put(Call(run, self._future(), heavy))
        return result

    async def _put(self, call: Call) -> Any:
        if not self._open:
            raise EngineError(CLOSED)
        self._inbox.put(call)
        return await call.future

    # --- on the model's thread ---

    def _live(self, started: Future) -> None:
        """The thread: load, serve until told to stop, answer everyone who still waits."""
        try:
            torch.set_num_threads(self._threads)
            self._model = load_model(self._source, self._max_context, self._device, self._dtype)
            self._batch = Batch(self._model, self._slots, self._cache_bytes, self._deterministic)
            self._trainer = Trainer(self._model, self._padded)
            self._served[BASE] = Served("", None)
            self._post(started, None)
        except Exception as reason:
            self._post(
                started, reason if isinstance(reason, EngineError) else _wrapped(f"loading {self._source}", reason)
            )
            self._flush()
            return
        closed = EngineError(CLOSED)
        try:
            self._serve()
        except Exception as reason:
            logging.getLogger(__name__).exception("the torch engine's thread failed")
            closed = _wrapped("the torch engine's thread", reason)
        self._close(closed)

    def _serve(self) -> None:
        """Until told to stop."""
        self._flush()
        while self._take():
            began = time.perf_counter()
            if self._heavy:
                self._run(self._heavy.popleft())
            if len(self._batch):
                with torch.inference_mode():
                    self._batch.tick(self._flush)
            self.busy_seconds += time.perf_counter() - began
            self._release()
            self._flush()

    def _take(self) -> bool:
        """Accept everything that arrived; wait for something if there is nothing else to do. False: it is time to stop."""
        idle = not len(self._batch) and not self._heavy
        while True:
            try:
                call = self._inbox.get(block=idle)
            except queue.Empty:
                return True
            if call is None:
                return False
            if idle and call.later and self._linger > 0.0:
                time.sleep(self._linger)
            idle = False
            if call.heavy:
                self._heavy.append(call)
            else:
                self._run(call)

    def _run(self, call: Call) -> None:
        """Do one call; whatever goes wrong is the caller's answer, and the thread lives on."""
        if call.future.cancelled() and not call.heavy:
            return
        try:
            result = call.run()
        except EngineError as refused:
            self._post(call.future, refused)
        except Exception as reason:
            logging.getLogger(__name__).exception("an operation failed")
            self._post(call.future, _wrapped("the operation", reason))
        else:
            if not call.later:
                self._post(call.future, result)

    def _generate(self, request: GenerateRequest, future: Future) -> None:
        served = self._holds(request.policy)
        self._batch.add(request, served, lambda answer: self._post(future, answer), future.cancelled)

    def _score(self, under: PolicyVersion, rows: Sequence[Row]) -> list[list[float]]:
        adapter = self._holds(under).adapter
        return score(self._ready, None if adapter is None else One(adapter), rows, self._padded)

    def _holds(self, version: PolicyVersion) -> Served:
        if version not in self._served:
            raise not_loaded(self._served, version)
        return self._served[version]

    def _load(self, version: PolicyVersion, adapter: Files) -> None:
        digest = digest_of(adapter)
        held = self._served.get(version)
        if held is not None and held.digest == digest:
            return
        if held is not None or not version.policy:
            raise other_weights(version)
        if len(self._served) > self._adapter_slots:
            raise EngineError(
                f"all {self._adapter_slots} adapter slots are taken: unload a version, or give the engine more adapter_slots"
            )
        model = self._ready
        read = read_adapter(adapter, model.router.sites, model.card.name)
        self._served[version] = Served(digest, read.to(model.device, model.dtype))

    def _unload(self, version: PolicyVersion, future: Future) -> None:
        served = self._served.pop(version, None) if version != BASE else None
        if served is None:
            self._post(future, None)
        else:
            self._retiring.append((served, future))

    def _release(self) -> None:
        """Free unloaded versions whose last request is answered."""
        for served, future in [pair for pair in self._retiring if pair[0].open == 0]:
            self._retiring.remove((served, future))
            self._batch.kept.disown(served)
            if served.adapter is not None:
                self._ready.router.dropped(served.adapter)
            self._post(future, None)

    def _post(self, future: Future, result: object) -> None:
        self._posts.append((future, result))

    def _flush(self) -> None:
        """All answers so far go to the event loop in one call."""
        posts, self._posts = self._posts, []
        if posts and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_settle, posts)

    def _close(self, closed: EngineError) -> None:
        """Answer everyone who still waits, then let go of the weights."""
        self._open = False
        self._batch.fail(closed)
        waiting = [*self._heavy, *(call for call in iter(self._next, None))]
        for future in [*(call.future for call in waiting), *(future for _, future in self._retiring)]:
            self._post(future, closed)
        del self._batch, self._trainer
        self._post(self._stopped, None)
        self._flush()

    def _next(self) -> Call | None:
        return None if self._inbox.empty() else self._inbox.get()


def _settle(posts: Sequence[tuple[Future, object]]) -> None:
    for future, result in posts:
        if future.done():
            continue
        if isinstance(result, EngineError):
            future.set_exception(result)
        else:
            future.set_result(result)


def _wrapped(what: str, reason: Exception) -> EngineError:
    error = EngineError(f"{what} failed: {type(reason).__name__}: {reason}; see the task server's log")
    error.__cause__ = reason
    return error
