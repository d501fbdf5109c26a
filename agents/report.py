"""What became of one agent's sequences in one round: nothing is left out of a batch without being counted and named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Fate(StrEnum):
    """What became of one sequence. Exactly one applies: the first of this list whose condition holds."""

    STALE = "stale"  # sampled by a version outside the bound
    BAD_SCORE = "bad_score"
    CUT = "cut"  # cut off, and cut sequences are ignored
    SILENT = "silent"  # nothing was sampled
    NO_LOGPROBS = "no_logprobs"  # the engine gave none for anything that could be trained on
    REJECTED = "rejected"  # no reply was accepted
    CAPPED = "capped"  # everything to be trained on lies beyond the row cap
    EQUAL = "equal"  # its advantage is zero, and such rows are left out
    TRAINED = "trained"


WHY = MappingProxyType(
    {
        Fate.STALE: "were sampled by a version outside the bound",
        Fate.BAD_SCORE: "have no usable score (None, NaN or infinite)",
        Fate.CUT: "were cut off, and cut rows are ignored",
        Fate.SILENT: "hold no sampled token",
        Fate.NO_LOGPROBS: "have no log-probabilities from the engine",
        Fate.REJECTED: "hold no reply that parsed",
        Fate.CAPPED: "have all their answers beyond the row cap",
        Fate.EQUAL: "have an advantage of zero (equal scores in their group)",
    }
)


@dataclass(frozen=True, slots=True)
class BatchReport:
    """Counts of one batch. `episodes` are those of the rollout, `failed` (or dropped) ones among them; `sequences` are this agent's in the
    others, by `fates`. `trained_tokens` are in the rows; `masked_tokens` were sampled and are not. `cut` counts last answers by the limit
    that cut them. `capped_rows` and `capped_tokens` lost their end to the row cap. `score_mean` is over `score_count` good scores, None
    if there are none. `reason` says why there is nothing to train on; "" if there is something. `stale_tokens` are the sampled tokens of
    stale sequences; `lag_mean` and `lag_max` say by how many updates the trained tokens are older than the version they train (None: there
    are none).
    """

    episodes: int
    failed: int
    duplicates: int
    sequences: int
    fates: Mapping[Fate, int]
    rows: int
    trained_tokens: int
    masked_tokens: int
    missing_logprobs: int
    retries: int
    forfeits: int
    cut: Mapping[str, int]
    capped_rows: int
    capped_tokens: int
    groups: int
    no_signal: int
    singletons: int
    bad_scores: int
    score_mean: float | None
    score_count: int
    reason: str
    stale_tokens: int = 0
    lag_mean: float | None = None
    lag_max: int = 0

    @property
    def dropped_zero(self) -> int:
        return self.fates.get(Fate.EQUAL, 0)

    @property
    def stale(self) -> int:
        return self.fates.get(Fate.STALE, 0)


def why_empty(episodes: int, failed: int, fates: Mapping[Fate, int]) -> str:
    """One sentence with every reason that applies, and how often."""
    if episodes == 0:
        return "nothing to train on: no episode was played"
    reasons = [f"{failed} of {episodes} episodes failed or were dropped"] if failed else []
    total = sum(fates.values())
    reasons += [f"{fates[fate]} of {total} rows {why}" for fate, why in WHY.items() if fates.get(fate)]
    if not reasons:
        return f"nothing to train on: the agent sat at no table in {episodes} episodes"
    return f"nothing to train on: {', '.join(reasons)}"
