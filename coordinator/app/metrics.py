"""The rows of `metrics.jsonl`: one for each round and agent, and one for each evaluation, mode and agent.

Means are over the values that are there; their number is beside them (`episodes`, `n`), and a row without any has no mean (never 0).
`seconds/round` is the wall time from the end of the round (or evaluation) before; `seconds/coordination` is what of it was neither model
nor scenario: less the engine's busy time, less the time that scenario code kept the host from playing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev

from agents.report import BatchReport, Fate
from coordinator.app.cast import Role
from scenarios import Scenario
from tinker.protocol.episodes import Episode, Trajectory
from tinker.protocol.to_host import CoordinatorLoad
from tinker.protocol.values import Ended, Phase

Row = Mapping[str, object]


@dataclass(slots=True)
class Clocked:
    """Where the time of a round went: seconds per phase, waits per barrier and member, seconds in all and of the engine's work."""

    phases: dict[str, float] = field(default_factory=dict)
    waits: dict[str, dict[str, float]] = field(default_factory=dict)
    engine: float = 0.0
    round: float = 0.0


@dataclass(frozen=True, slots=True)
class Trained:
    """What one agent's update of a round was: the version that played, the batch's report, what the workers measured."""

    role: Role
    version: int
    report: BatchReport
    measured: Mapping[str, float]


def training_row(
    round: int, trained: Trained, episodes: Sequence[Episode], clocked: Clocked, load: CoordinatorLoad | None
) -> Row:
    """One agent's row of one training round."""
    role = trained.role
    own = _trajectories(episodes, role)
    ours = ("engine_seconds", "tokens")  # `tokens` are all the agent sampled; those it trained on are `tokens_trained`
    measured = {key: value for key, value in trained.measured.items() if key not in ours}
    return {
        "round": round,
        "agent": role.name,
        **_rewards(episodes, role),
        "phase": "train",
        "version": trained.version,
        "episodes": len(episodes),
        "tokens": sum(trajectory.sampled for trajectory in own),
        **measured,
        **_incidents(episodes, own),
        **_measures(episodes),
        **_counts(trained.report),
        **_lag(role, trained.report),
        **{f"wait/{at}": waits[role.name] for at, waits in clocked.waits.items() if role.name in waits},
        **_seconds(episodes, clocked, load),
    }


def evaluation_rows(
    round: int,
    episodes: Sequence[Episode],
    scenario: Scenario,
    versions: Sequence[tuple[Role, int]],
    clocked: Clocked,
) -> list[Row]:
    """A row for each evaluation, mode and agent that plays in it."""
    rows: list[Row] = []
    for evaluation in scenario.evaluations:
        for mode in ("sampled", "greedy"):
            played = [each for each in episodes if each.evaluation == f"{evaluation.name}/{mode}"]
            values = [value for each in played for name, value in each.measures if name == evaluation.measure]
            for role, version in versions:
                if set(role.seats) <= set(evaluation.opponents):
                    continue
                own = _trajectories(played, role)
                rows.append(
                    {
                        "round": round,
                        "agent": role.name,
                        **_rewards(played, role),
                        "phase": "evaluate",
                        "evaluation": evaluation.name,
                        "mode": mode,
                        "measure": evaluation.measure,
                        "value": fmean(values) if values else None,
                        "n": len(values),
                        "version": version,
                        "episodes": len(played),
                        "tokens": sum(trajectory.sampled for trajectory in own),
                        **_incidents(played, own),
                        **_measures(played),
                        "seconds/evaluate": clocked.phases.get(Phase.EVALUATE, 0.0),
                    }
                )
    return rows


def _counts(report: BatchReport) -> dict[str, int]:
    """What became of the agent's sequences and tokens; every reason for leaving something out is a `count/`."""
    left_out = {f"count/{fate}": count for fate, count in report.fates.items() if fate != Fate.TRAINED}
    return {
        "rows": report.sequences,
        "rows_trained": report.rows,
        "tokens_trained": report.trained_tokens,
        "groups": report.groups,
        "groups_without_signal": report.no_signal,
        **left_out,
        "count/masked_tokens": report.masked_tokens,
        "count/missing_logprobs": report.missing_logprobs,
        "count/singleton_groups": report.singletons,
        "count/duplicate_episodes": report.duplicates,
    }


def _lag(role: Role, report: BatchReport) -> dict[str, float | None]:
    """By how many updates what an agent that may lag trained on is older than its weights."""
    if not role.learning.lags:
        return {}
    return {"lag_mean": report.lag_mean, "lag_max": report.lag_max, "count/stale_tokens": report.stale_tokens}


def _trajectories(episodes: Iterable[Episode], role: Role) -> list[Trajectory]:
    return [trajectory for episode in episodes for trajectory in episode.trajectories if trajectory.agent == role.name]


def _rewards(episodes: Iterable[Episode], role: Role) -> dict[str, float | None]:
    scores = [score for episode in episodes for seat, score in episode.scores if seat in role.seats]
    return {
        "reward_mean": fmean(scores) if scores else None,
        "reward_std": pstdev(scores) if scores else None,
    }


def _incidents(episodes: Sequence[Episode], own: Sequence[Trajectory]) -> dict[str, int]:
    return {
        "forfeits": sum(trajectory.forfeits for trajectory in own),
        "retries": sum(trajectory.retries for trajectory in own),
        "cut": sum(bool(trajectory.cut) for trajectory in own),
        "failed": sum(episode.ended == Ended.FAILED for episode in episodes),
        "count/bad_scores": sum(episode.bad_scores for episode in episodes),
    }


def _measures(episodes: Iterable[Episode]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.measures:
            values.setdefault(name, []).append(value)
    return {f"measure/{name}": fmean(each) for name, each in sorted(values.items())}


def _seconds(episodes: Sequence[Episode], clocked: Clocked, load: CoordinatorLoad | None) -> dict[str, float]:
    rollout, update = (clocked.phases.get(phase, 0.0) for phase in (Phase.ROLLOUT, Phase.UPDATE))
    sampled = sum(trajectory.sampled for episode in episodes for trajectory in episode.trajectories)
    scenario = sum(episode.scenario_seconds for episode in episodes)
    seconds = {
        "seconds/round": clocked.round,
        "seconds/rollout": rollout,
        "seconds/update": update,
        "seconds/scenario": scenario,
        "tokens_per_second": sampled / rollout if rollout else 0.0,
    }
    if clocked.engine:
        seconds["seconds/engine"] = clocked.engine
        seconds["seconds/coordination"] = max(0.0, clocked.round - clocked.engine - scenario)
    if load is not None and load.turns:
        seconds["coordinator_cpu_per_turn"] = load.cpu_seconds / load.turns
    return seconds
