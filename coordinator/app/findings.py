"""What the metrics rows of a run say when read together: changes, counts, time per phase, and warnings.

Every key of a row may be missing or null. `seconds/*` belong to the round as a whole and are the same in each of its rows; everything
else belongs to the row's agent. Averages leave out the rounds that have no number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from statistics import fmean

from agents.report import WHY
from coordinator.app.progress import Change, Row

FIRST, LAST = 5, 10  # training rounds averaged before and after
LEFT_OUT = {f"count/{fate}": f"sequences that {why}" for fate, why in WHY.items()}
COUNTED = {
    "forfeits": "turns that the agent forfeited",
    "retries": "replies that did not parse and were asked for again",
    "cut": "sequences whose last reply was cut off by a limit",
    "failed": "episodes that failed",
    "groups_without_signal": "groups of equal scores, from which nothing can be learned",
    **LEFT_OUT,
    "count/masked_tokens": "sampled tokens that were not trained on",
    "count/missing_logprobs": "sampled tokens without a log-probability",
    "count/singleton_groups": "groups of one episode, which has nothing to be compared with",
    "count/duplicate_episodes": "episodes that came a second time",
    "count/refused_updates": "updates that were refused or ended early",
    "count/bad_scores": "scores that were None, NaN or infinite",
    "count/stale_tokens": "sampled tokens of sequences by a version outside the bound",
}  # what was dropped, masked, refused or failed: a row's key -> its meaning
PHASES = ("rollout", "update", "evaluate")
SILENT_ROUNDS = 3  # so many rounds in a row without any signal are worth a warning
NO_ENTROPY = 0.02  # nats per token
NO_SPREAD = 0.01  # standard deviation of the rewards of a round
HUGE = 1e100  # a number beyond this is as good as infinite
LARGE_GAP = 0.1  # nats: how far sampler and trainer may differ about one token


def number(row: Row, key: str) -> float | None:
    """The row's finite number under this key; None if there is none."""
    value = row.get(key)
    if not isinstance(value, Real):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if abs(found) < HUGE else None


def mean(rows: Iterable[Row], key: str) -> float | None:
    """The average of the numbers that are there; None if there are none."""
    found = [value for row in rows if (value := number(row, key)) is not None]
    return fmean(found) if found else None


def total(rows: Iterable[Row], key: str) -> float:
    return sum(number(row, key) or 0.0 for row in rows)


def round_of(row: Row) -> int:
    return int(number(row, "round") or 0)


def agents(rows: Iterable[Row]) -> tuple[str, ...]:
    """The agents in the order in which they come."""
    return tuple(dict.fromkeys(str(row["agent"]) for row in rows if row.get("agent") is not None))


def trained(rows: Iterable[Row], agent: str | None = None) -> list[Row]:
    """The rows of training rounds (of this agent), by round."""
    found = [row for row in rows if not evaluated(row) and (agent is None or row.get("agent") == agent)]
    return sorted(found, key=round_of)


def evaluated(row: Row) -> bool:
    return row.get("phase") == "evaluate" or "evaluation" in row


def evaluation_of(row: Row) -> tuple[str, str]:
    """Name and mode (sampled or greedy)."""
    return str(row.get("evaluation") or "evaluation"), str(row.get("mode") or "")


def value_of(row: Row) -> float | None:
    """What an evaluation measured: its headline value, else the reward."""
    value = number(row, "value")
    return value if value is not None else number(row, "reward_mean")


def changes(rows: Sequence[Row], headline: str = "") -> tuple[Change, ...]:
    """Before and after: first 5 against last 10 training rounds, first against last round of each evaluation.

    Forfeits are a line if there were any, because what they cost is part of the reward.
    Fewer than 15 rounds: the windows shrink so that none overlap. What is the same for every agent is one line.
    """
    found = [_training_change(f"reward of {agent}", trained(rows, agent), "reward_mean") for agent in agents(rows)]
    found += [
        _training_change(f"forfeits of {agent} per round", trained(rows, agent), "forfeits")
        for agent in agents(rows)
        if total(trained(rows, agent), "forfeits")
    ]
    if headline:
        found += _headline_changes(headline, trained(rows))
    found += [_evaluation_change(what, points) for what, points in evaluations(rows).items()]
    return tuple(each for each in found if each is not None and (each.before, each.after) != (None, None))


def evaluations(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Name, mode, and agent (if the agents' values differ) of each evaluation -> its value per round, by round."""
    return {", ".join(filter(None, line)): points for line, points in evaluation_lines(rows).items()}


def evaluation_lines(rows: Sequence[Row]) -> dict[tuple[str, str, str], dict[int, float]]:
    """The same by (name, mode, agent); agent "": its values are those of everybody."""
    found: dict[tuple[str, str, str], dict[int, float]] = {}
    here = [row for row in rows if evaluated(row) and value_of(row) is not None]
    for name, mode in dict.fromkeys(map(evaluation_of, here)):
        per_agent: dict[str, dict[int, float]] = {}
        for row in sorted((row for row in here if evaluation_of(row) == (name, mode)), key=round_of):
            per_agent.setdefault(str(row.get("agent") or ""), {})[round_of(row)] = value_of(row) or 0.0
        if all(each == next(iter(per_agent.values())) for each in per_agent.values()):
            found[name, mode, ""] = next(iter(per_agent.values()))
        else:
            found.update({(name, mode, agent): points for agent, points in per_agent.items()})
    return found


def counts(rows: Iterable[Row]) -> dict[str, dict[str, int]]:
    """How often what was dropped, masked, refused or failed: a row's key -> agent -> times. Keys without any are left out."""
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        for key in row:
            if key in COUNTED or key.startswith("count/"):
                times = found.setdefault(key, {})
                agent = str(row.get("agent", ""))
                times[agent] = times.get(agent, 0) + int(number(row, key) or 0)
    return {key: times for key, times in found.items() if any(times.values())}


def seconds(rows: Iterable[Row]) -> dict[str, float]:
    """Seconds of the whole run per part (rollout, update, evaluate, engine, scenario, coordination, ...)."""
    per_round: dict[tuple[int, bool], dict[str, float]] = {}
    for row in rows:
        here = per_round.setdefault((round_of(row), evaluated(row)), {})
        for key in row:
            if key.startswith("seconds/"):
                part = key.removeprefix("seconds/")
                here[part] = max(here.get(part, 0.0), number(row, key) or 0.0)
    parts = dict.fromkeys(part for here in per_round.values() for part in here)
    return {part: sum(here.get(part, 0.0) for here in per_round.values()) for part in parts}


def work(spent: Mapping[str, float]) -> dict[str, float]:
    """What the training rounds were spent on, in seconds that add up to theirs; empty if that is not known."""
    if not spent.get("round") or "engine" not in spent:
        return {}
    parts = {"engine (the model)": spent["engine"], "scenario code": spent.get("scenario", 0.0)}
    rest = spent["round"] - sum(parts.values())
    return parts | ({"coordination": rest} if rest >= 0 else {"engine and scenario at once": rest})


def phases(spent: Mapping[str, float], whole: float) -> dict[str, float]:
    """What the run was spent on, phase by phase, in seconds that add up to `whole` (or to the phases, should they be longer)."""
    parts = {phase: spent[phase] for phase in PHASES if phase in spent}
    return parts | {"everything else": max(0.0, whole - sum(parts.values()))}


def coordination_share(spent: Mapping[str, float]) -> float | None:
    """Which part of the training rounds' time was coordination; None without both numbers."""
    whole = spent.get("round") or sum(spent.get(phase, 0.0) for phase in PHASES)
    return spent["coordination"] / whole if whole and "coordination" in spent else None


def warnings(rows: Sequence[Row], groups: int = 0) -> tuple[str, ...]:
    """What the user should know before trusting the run, each in a sentence. `groups`: per round (0: not known)."""
    found = [text for agent in agents(rows) for text in _warnings(agent, trained(rows, agent), groups)]
    return tuple(found)


def _warnings(agent: str, rows: Sequence[Row], groups: int) -> Iterable[str]:
    sequences = total(rows, "rows") or total(rows, "episodes")
    if sequences and (share := total(rows, "cut") / sequences) > 0.01:
        yield f"{agent}: {share:.1%} of its episodes have an answer cut off by a limit; raise max_tokens or ask for shorter answers"
    episodes = total(rows, "episodes")
    if episodes and (share := total(rows, "failed") / episodes) > 0.01:
        yield f"{agent}: {share:.1%} of the episodes failed; their tracebacks are in the recordings"
    if episodes and (share := total(rows[-LAST:], "forfeits") / (total(rows[-LAST:], "episodes") or 1)) > 0.1:
        yield f"{agent}: {share:.2g} forfeits per episode in the last rounds; its answers often do not parse"
    entropy = mean(rows[-FIRST:], "entropy")
    if entropy is not None and entropy < NO_ENTROPY:
        yield f"{agent}: entropy is {entropy:.3f} nats per token in the last rounds; it has all but stopped exploring"
    if silent := _longest(rows, groups):
        yield (
            f"{agent}: every group had equal rewards in rounds {round_of(silent[0])}-{round_of(silent[-1])}; "
            "nothing was learned there (larger groups, or a scenario whose scores differ)"
        )
    spread = mean(rows[-FIRST:], "reward_std")
    if not silent and len(rows) >= SILENT_ROUNDS and spread is not None and spread < NO_SPREAD:
        yield f"{agent}: its rewards all but stopped differing in the last rounds (spread {spread:.3f}); there is little to learn from"
    in_step = [row for row in rows if not number(row, "lag_max")]  # older weights differ, and should
    gap = max((number(row, "logprob_gap_max") or 0.0 for row in in_step), default=0.0)
    if gap > LARGE_GAP:
        yield f"{agent}: sampler and trainer differ by up to {gap:.2g} nats about a token; they should agree"
    broken = [row for row in rows if _infinite(row.get("grad_norm"))]
    if broken:
        yield f"{agent}: the gradient was not finite in {len(broken)} rounds (first: {round_of(broken[0])})"


def _infinite(value: object) -> bool:
    """NaN or infinite. A missing or null gradient norm only says that there was no update."""
    return isinstance(value, float) and not math.isfinite(value)


def _longest(rows: Sequence[Row], groups: int) -> list[Row]:
    """The longest stretch of rounds in which no group had a signal; empty if it is short."""
    longest: list[Row] = []
    here: list[Row] = []
    for row in rows:
        without, of = number(row, "groups_without_signal"), number(row, "groups") or groups
        equal = without is not None and (without >= of if of else number(row, "reward_std") == 0.0)
        here = [*here, row] if equal and without else []
        longest = here if len(here) > len(longest) else longest
    return longest if len(longest) >= SILENT_ROUNDS else []


def _headline_changes(headline: str, rows: Sequence[Row]) -> list[Change | None]:
    """One line per agent, or one in all if the agents do not differ (a measure of the whole table)."""
    key = f"measure/{headline}"
    found = {agent: _training_change(headline, trained(rows, agent), key) for agent in agents(rows)}
    if len(set(found.values())) == 1:
        return list(found.values())[:1]
    return [each and replace(each, what=f"{headline}, {agent}") for agent, each in found.items()]


def _training_change(what: str, rows: Sequence[Row], key: str) -> Change | None:
    having = [row for row in rows if number(row, key) is not None]
    first = min(FIRST, max(1, len(having) // 2))
    before, after = having[:first], having[first:][-LAST:] or having[:1]
    if not having:
        return None
    return Change(what, mean(before, key), mean(after, key), _rounds(before), _rounds(after))


def _evaluation_change(what: str, points: Mapping[int, float]) -> Change:
    first, last = min(points), max(points)
    return Change(what, points[first], points[last], str(first), str(last))


def _rounds(rows: Sequence[Row]) -> str:
    first, last = round_of(rows[0]), round_of(rows[-1])
    return str(first) if first == last else f"{first}-{last}"
