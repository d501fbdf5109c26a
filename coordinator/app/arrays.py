"""Token ids, logprobs and tokenizers as the core and the journal see them: a digest and a length instead of the bytes.

On the way in `strip` takes the arrays out of a message and keeps them; on the way out `fill` puts them back. What the core decides cannot
depend on what is in them. They are kept as long as the core may still send them: those of the open and of the last closed turn of an
episode that is being played. Tokenizers are kept by digest, and on disk, too, if there is a directory: after a restart they are needed.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from coordinator.core.tables import Table
from tinker.protocol.to_coordinator import Generated, Hello, OpenTurn, SeatRequest
from tinker.protocol.to_host import Admitted, Enlisted, SeatResult, TurnClosed
from tinker.protocol.to_taskserver import Generate
from tinker.protocol.values import EpisodeId, PackedFloats, PackedIds, RunId, TurnId

STUB = 20  # bytes: 16 of the digest, 4 of the length
_LENGTH = struct.Struct("<I")

Key = tuple[RunId, EpisodeId]


class Missing(Exception):
    """An array that a message needs is not there (any more)."""


def stub(array: bytes) -> bytes:
    """What stands for these bytes; nothing stands for nothing."""
    return hashlib.blake2b(array, digest_size=16).digest() + _LENGTH.pack(len(array)) if array else b""


class Arrays:
    """See the module. `directory`: where tokenizers lie (None: nowhere)."""

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._turns: dict[Key, dict[int, dict[bytes, bytes]]] = {}
        self._tokenizers: dict[bytes, bytes] = {}

    # --- in ---

    def strip(self, message: object) -> object:
        """The message without its arrays, which are kept."""
        match message:
            case Generated():
                kept = self._of(message.turn)
                ids, logprobs = self._keep(message.ids, kept), self._keep(message.logprobs, kept)
                if len(message.ids) != len(message.logprobs) and ids:
                    logprobs = b""  # they do not fit together, and neither do their stubs
                return Generated(
                    message.turn,
                    message.seat,
                    message.worker,
                    PackedIds(ids),
                    PackedFloats(logprobs),
                    message.finish,
                    message.version,
                    message.busy,
                    message.engine,
                )
            case OpenTurn():
                kept = self._of(message.turn)
                requests = tuple(
                    [
                        SeatRequest(each.seat, each.policy, PackedIds(self._keep(each.prompt, kept)), each.sampling)
                        for each in message.requests
                    ]
                )
                return OpenTurn(message.turn, requests, message.deadline)
            case Hello() if message.tokenizer:
                return replace(message, tokenizer=self._keep_tokenizer(message.tokenizer))
        return message

    def _of(self, turn: TurnId) -> dict[bytes, bytes]:
        return self._turns.setdefault((turn.run, turn.episode), {}).setdefault(turn.number, {})

    def _keep(self, array: bytes, kept: dict[bytes, bytes]) -> bytes:
        found = stub(array)
        kept[found] = array
        return found

    def _keep_tokenizer(self, bundle: bytes) -> bytes:
        """On disk only if the directory takes it: else it comes back with its task server."""
        found = stub(bundle)
        if found not in self._tokenizers and self._directory is not None:
            with suppress(OSError):
                part = self._path(found).with_suffix(".part")
                part.parent.mkdir(parents=True, exist_ok=True)
                part.write_bytes(bundle)
                part.rename(self._path(found))
        self._tokenizers[found] = bundle
        return found

    # --- out ---

    def fill(self, message: object) -> object:
        """The message with its arrays again. Missing if one of them is gone."""
        match message:
            case Generate():
                prompt = PackedIds(self._find(message.turn, message.prompt))
                return Generate(
                    message.turn,
                    message.seat,
                    message.worker,
                    message.policy,
                    prompt,
                    message.sampling,
                    message.deadline,
                )
            case TurnClosed():
                return TurnClosed(message.turn, tuple([self._result(message.turn, each) for each in message.results]))
            case Admitted() if message.tokenizer:
                bundle = self._tokenizer(message.tokenizer)
                return Admitted(message.run, message.model, bundle, message.data, message.machine)
            case Enlisted() if message.tokenizer:
                return replace(message, tokenizer=self._tokenizer(message.tokenizer))
        return message

    def _result(self, turn: TurnId, each: SeatResult) -> SeatResult:
        return SeatResult(
            each.seat,
            each.worker,
            PackedIds(self._find(turn, each.ids)),
            PackedFloats(self._find(turn, each.logprobs)),
            each.finish,
            each.version,
            each.busy,
            each.forfeit,
            each.engine,
        )

    def _find(self, turn: TurnId, stub: bytes) -> bytes:
        if not stub:
            return b""
        try:
            return self._turns[turn.run, turn.episode][turn.number][stub]
        except KeyError:
            raise Missing(f"an array of turn {turn.number} of episode {turn.episode}") from None

    def _tokenizer(self, stub: bytes) -> bytes:
        if stub not in self._tokenizers and self._directory is not None:
            with suppress(OSError):
                self._tokenizers[stub] = self._path(stub).read_bytes()
        if stub not in self._tokenizers:
            raise Missing(f"tokenizer {stub.hex()}; it comes back with the task server that has it")
        return self._tokenizers[stub]

    def _path(self, stub: bytes) -> Path:
        return (self._directory or Path()) / "tokenizers" / stub.hex()

    # --- bounds ---

    def settle(self, turn: TurnId, table: Table | None) -> None:
        """After a step about this turn: keep what its table may still send."""
        if table is None:
            self._turns.pop((turn.run, turn.episode), None)
            return
        kept = self._turns.get((turn.run, turn.episode))
        if kept is not None and len(kept) > 1:
            wanted = (table.turn.number if table.turn else -1, table.closed.turn.number if table.closed else -1)
            for number in [number for number in kept if number not in wanted]:
                del kept[number]

    def sweep(self, tables: Mapping[Key, Table]) -> None:
        """Forget the episodes that are no longer played."""
        for key in [key for key in self._turns if key not in tables]:
            del self._turns[key]

    def __len__(self) -> int:
        """Arrays of turns that are kept."""
        return sum(len(arrays) for turns in self._turns.values() for arrays in turns.values())
