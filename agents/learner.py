"""From the episodes of one agent to its training rows: numbers only, no model.

A row is one (episode, seat) context. Its trained tokens are those the player marked, each with the sequence's advantage (a terminal
reward's; `discount` below 1 lets it fade towards earlier own tokens) and the weight 1 / sequences (or 1 / trained tokens) of this agent in
this batch. The denominator is counted before rows with an advantage of zero are left out: leaving them out changes no gradient, only
the time it takes (as long as the loss has no entropy or KL term: then set `drop_zero=False`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from agents.report import BatchReport, Fate, why_empty
from tinker.algorithms.credit import Algorithm, Sample, Signal, along, is_good, signal_in
from tinker.protocol.batches import Row
from tinker.protocol.episodes import Episode, Trajectory
from tinker.protocol.values import AgentName, Ended, EpisodeId, Phase


@dataclass(frozen=True, slots=True)
class LearnerOptions:
    """`max_lag`: by how many updates a token may be older than the version to be trained. `max_row`: tokens of a row, 0 for no cap.
    `ignore_cut`: sequences whose last answer was cut off count in the statistics but are not trained on. `frozen`: never learns."""

    denominator: Literal["sequences", "tokens"] = "sequences"
    drop_zero: bool = True
    ignore_cut: bool = False
    max_row: int = 0
    max_lag: int = 0
    discount: float = 1.0
    frozen: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows in the order of episodes and seats, whatever order the episodes came in."""

    rows: list[Row]
    report: BatchReport


@dataclass(slots=True)
class _Sequence:
    """One of the agent's sequences on its way to a row."""

    trajectory: Trajectory
    group: int
    score: float | None
    mask: npt.NDArray[np.bool_] = field(init=False)
    logprobs: npt.NDArray[np.float32] = field(init=False)
    advantage: float | None = None
    capped: int = 0  # trained tokens beyond the row cap
    fate: Fate = Fate.TRAINED
    lags: list[int] = field(default_factory=list)  # of each span: by how many updates it is older than what is trained

    def __post_init__(self) -> None:
        self.logprobs = np.frombuffer(self.trajectory.logprobs, "<f4").astype(np.float32)
        self.mask = np.frombuffer(self.trajectory.mask, np.uint8).astype(np.bool_)
        self.mask &= np.isfinite(self.logprobs)


class Learner:
    """Turns one agent's episodes into a batch; keeps what its algorithm remembers (`state`), which commits with the update."""

    def __init__(self, agent: AgentName, algorithm: Algorithm, options: LearnerOptions | None = None) -> None:
        self.agent = agent
        self._algorithm = algorithm
        self._options = options or LearnerOptions()

    def batch(self, episodes: Sequence[Episode], version: int, published: Sequence[int] = ()) -> Batch:
        """Rows for the update of `version`. Failed, dropped and evaluation episodes are never trained on, an episode counts once.
        `published`: every version so far, in order, if their numbers may have gaps: lag counts updates, not numbers."""
        played, duplicates = _once(episodes)
        usable = [episode for episode in played if episode.ended in (Ended.FINISHED, Ended.FORFEITED)]
        sequences = [
            _Sequence(trajectory, episode.group, dict(episode.scores).get(trajectory.seat))
            for episode in usable
            for trajectory in episode.trajectories
            if trajectory.agent == self.agent
        ]
        signal = Signal(0, 0, 0, 0)
        rows: list[Row] = []
        if not self._options.frozen:
            signal = self._credit(sequences, _ages(version, published))
            rows = self._rows(sequences)
        failed = len(played) - len(usable)
        return Batch(rows, self._report(sequences, rows, signal, (len(played), failed, duplicates)))

    def state(self) -> dict[str, Any]:
        """Plain data for `restore`."""
        return {"algorithm": self._algorithm.name, "state": self._algorithm.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state. ValueError if it is another algorithm's."""
        if state["algorithm"] != self._algorithm.name:
            raise ValueError(
                f"agent {self.agent} learns with {self._algorithm.name} but its saved state is {state['algorithm']}'s; "
                "resume with the algorithm the run began with"
            )
        self._algorithm.restore(state["state"])

    # --- steps ---

    def _credit(self, sequences: Sequence[_Sequence], age: Callable[[int], int]) -> Signal:
        """Fill in every sequence's lags, advantage and fate."""
        fresh = []
        for sequence in sequences:
            sequence.lags = [age(span.version) for span in sequence.trajectory.spans]
            if any(lag < 0 or lag > self._options.max_lag for lag in sequence.lags):
                sequence.fate = Fate.STALE
            else:
                fresh.append(sequence)
        samples = [Sample(self.agent, sequence.trajectory.seat, sequence.group, sequence.score) for sequence in fresh]
        for sequence, advantage in zip(fresh, self._algorithm.advantages(samples), strict=True):
            sequence.advantage = advantage
            sequence.fate = self._fate(sequence)
        return signal_in(samples)

    def _fate(self, sequence: _Sequence) -> Fate:
        trajectory = sequence.trajectory
        if sequence.advantage is None:
            return Fate.BAD_SCORE
        if self._options.ignore_cut and trajectory.cut:
            return Fate.CUT
        if trajectory.sampled == 0:
            return Fate.SILENT
        if not sequence.mask.any():
            return Fate.REJECTED if np.isfinite(sequence.logprobs).all() else Fate.NO_LOGPROBS
        if self._options.max_row:
            sequence.capped = int(sequence.mask[self._options.max_row :].sum())
            if not sequence.mask[: self._options.max_row].any():
                return Fate.CAPPED
        if self._options.drop_zero and sequence.advantage == 0.0:
            return Fate.EQUAL
        return Fate.TRAINED

    def _rows(self, sequences: Sequence[_Sequence]) -> list[Row]:
        cap = slice(self._options.max_row or None)
        counted = [sequence for sequence in sequences if sequence.fate in (Fate.TRAINED, Fate.EQUAL)]
        tokens = sum(int(sequence.mask[cap].sum()) for sequence in counted)
        denominator = tokens if self._options.denominator == "tokens" else len(counted)
        return [self._row(sequence, cap, denominator) for sequence in counted if sequence.fate is Fate.TRAINED]

    def _row(self, sequence: _Sequence, cap: slice, denominator: int) -> Row:
        assert sequence.advantage is not None  # its fate would be BAD_SCORE
        mask = sequence.mask[cap]
        zero = np.float32(0)
        return Row(
            ids=np.frombuffer(sequence.trajectory.ids, "<i4").astype(np.int32)[cap],
            mask=mask,
            logprobs=np.where(mask, sequence.logprobs[cap], zero),
            advantages=along(mask, sequence.advantage, self._options.discount),
            weights=np.where(mask, np.float32(1 / denominator), zero),
            temperature=sequence.trajectory.temperature
            or 1.0,  # greedy answers come with the logprobs of temperature 1
        )

    def _report(
        self, sequences: Sequence[_Sequence], rows: Sequence[Row], signal: Signal, counts: tuple[int, int, int]
    ) -> BatchReport:
        episodes, failed, duplicates = counts
        trajectories = [sequence.trajectory for sequence in sequences]
        fates = Counter(sequence.fate for sequence in sequences) if not self._options.frozen else Counter[Fate]()
        scores = [sequence.score for sequence in sequences if sequence.score is not None and is_good(sequence.score)]
        trained = sum(int(row.mask.sum()) for row in rows)
        lags = self._lags(sequences)
        tokens = sum(lags.values())
        reason = "" if rows else why_empty(episodes, failed, fates)
        if self._options.frozen:
            reason = f"nothing to train on: agent {self.agent} is frozen"
        return BatchReport(
            episodes=episodes,
            failed=failed,
            duplicates=duplicates,
            sequences=len(sequences),
            fates=dict(fates),
            rows=len(rows),
            trained_tokens=trained,
            masked_tokens=sum(trajectory.sampled for trajectory in trajectories) - trained,
            missing_logprobs=sum(int((~np.isfinite(sequence.logprobs)).sum()) for sequence in sequences),
            retries=sum(trajectory.retries for trajectory in trajectories),
            forfeits=sum(trajectory.forfeits for trajectory in trajectories),
            cut=dict(Counter(trajectory.cut for trajectory in trajectories if trajectory.cut)),
            capped_rows=sum(sequence.capped > 0 for sequence in sequences),
            capped_tokens=sum(sequence.capped for sequence in sequences),
            groups=signal.groups,
            no_signal=signal.no_signal,
            singletons=signal.singletons,
            bad_scores=signal.bad_scores,
            score_mean=sum(scores) / len(scores) if scores else None,
            score_count=len(scores),
            reason=reason,
            stale_tokens=sum(each.trajectory.sampled for each in sequences if each.fate is Fate.STALE),
            lag_mean=sum(lag * count for lag, count in lags.items()) / tokens if tokens else None,
            lag_max=max(lags, default=0),
        )

    def _lags(self, sequences: Sequence[_Sequence]) -> Counter[int]:
        """How many trained tokens are how many updates old."""
        found: Counter[int] = Counter()
        for sequence in sequences:
            mask = sequence.mask[: self._options.max_row or None]
            if sequence.fate is Fate.TRAINED and not self._options.frozen:
                for span, lag in zip(sequence.trajectory.spans, sequence.lags, strict=True):
                    found[lag] += int(mask[span.start : span.end].sum())
        return +found


def _ages(version: int, published: Sequence[int]) -> Callable[[int], int]:
    """By how many updates a version is older than this one."""
    if not published:
        return lambda sampled: version - sampled
    places = {number: place for place, number in enumerate(published)}
    return lambda sampled: places[version] - places[sampled] if sampled in places else -1


def _once(episodes: Sequence[Episode]) -> tuple[list[Episode], int]:
    """Every training episode once, in the order of their ids, and how many came again."""
    found: dict[EpisodeId, Episode] = {}
    training = [one for one in episodes if not one.evaluation and one.episode.phase is not Phase.EVALUATE]
    for episode in training:
        found.setdefault(episode.episode, episode)
    return [found[key] for key in sorted(found)], len(training) - len(found)
