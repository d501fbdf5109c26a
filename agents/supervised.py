"""Rows for supervised fine-tuning: chats assembled token by token, so that the mask needs no search and no markers in the template.

An answer's tokens are exactly what a policy would have had to sample there: its words and its end token. They follow the same openings
and continuations as in play, so that training and playing see the same contexts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tinker.protocol.batches import Row
from tinker.tokens import ChatTemplate

Message = Mapping[str, str]  # {"role": "system" | "user" | "assistant", "content": ...}


def supervised_row(template: ChatTemplate, messages: Sequence[Message], *, max_row: int = 0) -> Row:
    """[system?, user, assistant, user, assistant, ...] -> one row; the mask is 1 on every answer and its end token.

    Its weights add up to 1 (see `supervised_rows` for a batch). ValueError if the roles are in another order, if an answer is missing, or
    if nothing is left to train on within `max_row` tokens (0: no cap).
    """
    system, spoken = _spoken(messages)
    ids = template.opening(system, spoken[0])
    mask = [False] * len(ids)
    for said in range(1, len(spoken), 2):
        answer = template.answer(spoken[said])
        after = template.continuation(spoken[said + 1], closed=True, end=answer[-1]) if said + 1 < len(spoken) else []
        ids += [*answer, *after]
        mask += [True] * len(answer) + [False] * len(after)
    end = max_row or len(ids)
    kept = np.array(mask[:end], np.bool_)
    if not kept.any():
        raise ValueError(
            f"a chat of {len(ids)} tokens has no answer within {max_row} tokens; raise the row cap or leave the chat out"
        )
    trained = kept.astype(np.float32)
    return Row(
        ids=np.array(ids[:end], np.int32),
        mask=kept,
        logprobs=np.zeros(kept.shape, np.float32),
        advantages=trained,
        weights=trained / trained.sum(),
    )


def supervised_rows(template: ChatTemplate, chats: Sequence[Sequence[Message]], *, max_row: int = 0) -> list[Row]:
    """A batch in which every trained token counts the same: weights add up to 1 over all rows."""
    rows = [supervised_row(template, messages, max_row=max_row) for messages in chats]
    tokens = sum(int(row.mask.sum()) for row in rows)
    return [
        Row(row.ids, row.mask, row.logprobs, row.advantages, row.mask.astype(np.float32) / np.float32(tokens))
        for row in rows
    ]


def _spoken(messages: Sequence[Message]) -> tuple[str | None, list[str]]:
    """The system text, and the contents of user and assistant in turn; ValueError if they do not alternate."""
    roles = [message["role"] for message in messages]
    first = 1 if roles[:1] == ["system"] else 0
    spoken = [message["content"] for message in messages[first:]]
    expected = ["user", "assistant"] * (len(spoken) // 2)
    if not spoken or roles[first:] != expected:
        raise ValueError(
            f"a chat has roles {roles}; expected [system?, user, assistant, user, assistant, ...], ending with an answer"
        )
    return (messages[0]["content"] if first else None), spoken
