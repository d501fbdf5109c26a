"""Chats as token ids that only ever grow: how an episode's context opens, and what to append after each sampled answer.

A fragment is never rendered alone (a template may put a default system prompt, a BOS or a date in front of whatever comes first).
Instead a whole conversation [user, assistant, user] is rendered with a sentinel as the answer, and what follows the sentinel up to the
next generation prompt is the continuation. So the ids of turn k + 1 always begin with the prompt and the answer of turn k, also under
templates that would drop old reasoning from the history, and what was sampled is never decoded and encoded again.

Whatever was said stays text: if it contains the text of a control token ("<|im_end|>"), it is encoded apart from the template's frame
with special tokens off. Otherwise the rendered text is encoded as a whole, which gives the ids of `apply_chat_template`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from tinker.tokens.errors import TokenizerError
from tinker.tokens.rendering import compile_template
from tinker.tokens.tokenizer import Tokenizer

_MARK = "\ue000{}\ue001"  # private-use characters: no template looks for them, and they are never encoded
_SENTINEL, _SYSTEM, _USER = _MARK.format("answer"), _MARK.format(0), _MARK.format(1)
_MARKS = re.compile("\ue000([01])\ue001")
_CACHED_TEXTS, _CACHED_LENGTH = 4096, 4096  # entries, and the longest text (characters) worth keeping


class ChatTemplate:
    """See the module. `options` are the template's own variables (`enable_thinking=False`); `now` is the date it may print.

    `end_id` is the token with which the template closes an answer (None: it has none, or it is plain text); `end_ids` are all ids that
    end an answer: pass them as stop ids. Raises TokenizerError at once if the template cannot render our chats. A template without a
    system role gets the system text in front of the first user message.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, options: Mapping[str, Any] | None = None, now: datetime | None = None
    ) -> None:
        if not tokenizer.template.strip():
            raise TokenizerError(
                "the model has no chat template (no chat_template.jinja, none in tokenizer_config.json); "
                "put the chat_template.jinja of its instruct version into the model directory"
            )
        self.tokenizer = tokenizer
        variables = {**tokenizer.special, **(options or {})}
        self._render = compile_template(tokenizer.template, variables, now or datetime.now().astimezone())
        self._wrap: Callable[[str], Any] = _as_text
        self._probe_contents()
        self.system_role = self._probe_system()
        self.end_id = self._probe_end()
        self.end_ids = frozenset(tokenizer.eos_ids) | ({self.end_id} if self.end_id is not None else set())
        tail = tokenizer.encode_frame(self._tail("a"))
        plain = tokenizer.encode_frame(self._rendered(None, "a"))
        briefed = tokenizer.encode_frame(self._rendered("a", "a"))
        self._control = tokenizer.control_ids | tokenizer.added_ids([*tail, *plain, *briefed])
        self._expected = {
            "tail": self._controls(tail),
            "plain": self._controls(plain),
            "briefed": self._controls(briefed),
        }
        self._opening = lru_cache(_CACHED_TEXTS)(self._encode_opening)
        self._continuation = lru_cache(_CACHED_TEXTS)(self._encode_continuation)

    def opening(self, system: str | None, user: str) -> list[int]:
        """Ids of the first prompt: [system?, user] and the generation prompt."""
        short = len(user) + len(system or "") <= _CACHED_LENGTH
        return list(self._opening(system, user) if short else self._encode_opening(system, user))

    def continuation(self, user: str, closed: bool, end: int | None = None) -> list[int]:
        """Ids to append after a sampled answer: its end of turn unless `closed` (the sample's last id was in `end_ids`), the user
        message, the generation prompt. `end` is that last id; it matters only under templates without an `end_id`."""
        short = len(user) <= _CACHED_LENGTH
        whole = list(self._continuation(user) if short else self._encode_continuation(user))
        if not closed:
            return whole
        if self.end_id is not None:
            return whole[whole.index(self.end_id) + 1 :]
        return whole[1:] if whole and whole[0] == end else whole

    def answer(self, text: str) -> list[int]:
        """Ids of an answer that somebody wrote, with its end token: what a model would have sampled. TokenizerError if there is none."""
        end = self.end_id if self.end_id is not None else next(iter(self.tokenizer.eos_ids), None)
        if end is None:
            raise TokenizerError(
                "the tokenizer has no end-of-sequence id, so nobody could learn to stop; set it in generation_config.json"
            )
        before = self._rendered(None, "a")  # some tokenizers encode a text differently at the very start
        frame, whole = self.tokenizer.encode_frame(before), self.tokenizer.encode_frame(before + text)
        said = whole[len(frame) :]
        if whole[: len(frame)] != frame or any(index in self.tokenizer.control_ids for index in said):
            said = self.tokenizer.encode(text)
        return [*said, end]

    # --- encoding ---

    def _encode_opening(self, system: str | None, user: str) -> tuple[int, ...]:
        kind = "plain" if system is None else "briefed"
        return self._encode(
            self._rendered(system, user), kind, lambda: self._rendered(system and _SYSTEM, _USER), (system or "", user)
        )

    def _encode_continuation(self, user: str) -> tuple[int, ...]:
        return self._encode(self._tail(user), "tail", lambda: self._tail(_USER), ("", user))

    def _encode(self, text: str, kind: str, marked: Callable[[], str], said: tuple[str, str]) -> tuple[int, ...]:
        ids = self.tokenizer.encode_frame(text)
        if self._controls(ids) == self._expected[kind]:
            return tuple(ids)
        ids = []
        for number, piece in enumerate(_MARKS.split(marked())):  # odd pieces are the numbers of the marks
            if number % 2:
                ids += self.tokenizer.encode(said[int(piece)], never=self._control)
            elif piece:
                ids += self.tokenizer.encode_frame(piece)
        return tuple(ids)

    def _controls(self, ids: list[int]) -> int:
        return sum(index in self._control for index in ids)

    # --- rendering ---

    def _message(self, role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": self._wrap(text)}

    def _rendered(self, system: str | None, user: str) -> str:
        messages = []
        if system is not None and self.system_role:
            messages.append(self._message("system", system))
        elif system is not None:
            user = f"{system}\n\n{user}"
        messages.append(self._message("user", user))
        return self._render(messages, True)

    def _tail(self, user: str) -> str:
        messages = [self._message("user", "a"), self._message("assistant", _SENTINEL), self._message("user", user)]
        return self._render(messages, True).partition(_SENTINEL)[2]

    # --- what kind of template this is ---

    def _probe_contents(self) -> None:
        """Find whether contents are strings or lists of parts; TokenizerError if neither gives the chats we need."""
        messages = (("user", _SYSTEM), ("assistant", _SENTINEL), ("user", _USER))
        refusal: TokenizerError | None = None
        for self._wrap in (_as_text, _as_parts):
            try:
                text = self._render([self._message(role, mark) for role, mark in messages], True)
            except TokenizerError as error:
                refusal = refusal or error
                continue
            if [text.count(mark) for _, mark in messages] == [1, 1, 1]:
                return
        found = (
            str(refusal) if refusal else "the chat template does not show each of [user, assistant, user] exactly once"
        )
        raise TokenizerError(
            f"{found}; multi-turn play needs that: use the template of the model's instruct version"
        ) from refusal

    def _probe_system(self) -> bool:
        try:
            text = self._render([self._message("system", _SYSTEM), self._message("user", _USER)], True)
        except TokenizerError:
            return False
        return text.count(_SYSTEM) == 1 and text.count(_USER) == 1

    def _probe_end(self) -> int | None:
        messages = [self._message("user", "a"), self._message("assistant", _SENTINEL)]
        after = self.tokenizer.encode_frame(self._render(messages, False).partition(_SENTINEL)[2])
        known = self.tokenizer.control_ids | self.tokenizer.added_ids(after)
        end = next((index for index in after if index in known), None)
        return end if end in self.tokenizer.encode_frame(self._tail("a")) else None


def _as_text(text: str) -> Any:
    return text


def _as_parts(text: str) -> Any:
    return [{"type": "text", "text": text}]
