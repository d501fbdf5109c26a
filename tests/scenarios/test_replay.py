"""A recorded episode can be played again, exactly; and where it cannot, the first difference is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scenario_fakes import ScriptedTurns, auction, bidder, bracketed, crowd, play, play_crowd, scripted, writers

from agents.players.player import Answer, Need
from agents.players.recorded import ReplayMismatch
from scenarios import Dropped, Forfeited, Limits, RecordingError, Scenario, Scores, Table, replay, scenario
from tinker.protocol.episodes import Recording
from tinker.protocol.values import Ended, Finish, SeatName


@scenario("ann", "bob", version=1)
async def tooled(table: Table, *, tool: str = "sunny") -> Scores:
    """Four turns, the second after a tool's result; then it may fail."""
    await table["ann"].act("Ask the tool.", str)
    table["bob"].hear(f"The tool says {tool}.")
    await table["bob"].act("Go on.", str)
    moves = await table.act_all("A number:", bracketed)
    return {seat: move or 0 for seat, move in moves.items()}


def changed(recording: Recording, kind: str, text: str) -> Recording:
    """The first line of this kind says something else."""
    index = next(index for index, line in enumerate(recording.lines) if line.kind == kind)
    lines = [*recording.lines]
    lines[index] = replace(lines[index], text=text)
    return replace(recording, lines=tuple(lines))


@settings(deadline=None)
@given(st.integers(0, 2**63 - 1), st.integers(1, 1000))
def test_scripted_play_replays_exactly(seed: int, highest: int) -> None:
    async def both() -> None:
        episode = await play(auction, scripted(ann=bidder, bob=bidder), seed=seed, highest=highest)
        again = await replay(episode.recording, auction)
        assert (again.recording, again.scores, again.ended) == (episode.recording, episode.scores, episode.ended)
        assert again.measures == episode.measures

    anyio.run(both)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 5), max_size=48))
def test_generated_play_with_retries_and_passed_deadlines_replays_exactly(seed: int, delays: list[int]) -> None:
    async def both() -> None:
        episode = await play_crowd(delays, seed)
        again = await replay(episode.recording, crowd)
        assert (again.recording, again.scores) == (episode.recording, episode.scores)

    anyio.run(both)


async def record(scripts: Mapping[str, str | Finish] | None = None, **params: object) -> Recording:
    made = scripts or {"ann": "[1]", "bob": "[2]"}
    turns = ScriptedTurns({seat: lambda context, seat=seat: made[seat] for seat in made})
    return (await play(tooled, writers("ann", "bob"), turns, **params)).recording


@pytest.mark.parametrize("made", ["[1]", "nothing", Finish.LENGTH, Finish.CONTEXT])
async def test_an_episode_replays_however_its_replies_ended(made: str | Finish) -> None:
    recording = await record({"ann": "[1]", "bob": made}, tool="rainy")
    again = await replay(recording, tooled)
    assert again.recording == recording
    assert again.ended is recording.ended


async def test_a_changed_tool_result_is_named_with_seat_turn_and_difference() -> None:
    recording = changed(await record(), "hear", "The tool says rainy.")
    with pytest.raises(ReplayMismatch, match=r"seat bob, turn 1: .*'The tool says rainy.'.*'The tool says sunny.'"):
        await replay(recording, tooled)


async def test_a_changed_prompt_is_named() -> None:
    recording = changed(await record(), "ask", "Ask the tool nicely.")
    with pytest.raises(ReplayMismatch, match=r"seat ann, turn 0: .*Ask the tool nicely"):
        await replay(recording, tooled)


async def test_a_changed_score_is_named() -> None:
    recording = replace(await record(), scores=((SeatName("ann"), 1.0), (SeatName("bob"), 7.0)))
    with pytest.raises(ReplayMismatch, match=r"seat bob, turn 2: .*score 7.0, the replay score 2.0"):
        await replay(recording, tooled)


async def test_another_ending_is_named() -> None:
    recording = replace(await record(), ended=Ended.FORFEITED, reason="bob: lost")
    with pytest.raises(ReplayMismatch, match=r"an episode that forfeited, 'bob: lost', the replay one that finished"):
        await replay(recording, tooled)


async def test_a_recording_that_goes_on_after_the_end_is_named() -> None:
    recording = await record()
    longer = replace(recording, lines=(*recording.lines, replace(recording.lines[0], text="And then?", turn=3)))
    with pytest.raises(ReplayMismatch, match=r"And then"):
        await replay(longer, tooled)


async def test_lines_in_another_order_of_seats_are_a_mismatch() -> None:
    recording = await record()
    swapped = replace(recording, lines=(*recording.lines[:-2], recording.lines[-1], recording.lines[-2]))
    with pytest.raises(ReplayMismatch):
        await replay(swapped, tooled)


def other_rules(version: int, name: str) -> Scenario:
    return scenario("ann", "bob", version=version, name=name)(tooled.function)


@pytest.mark.parametrize(("version", "name"), [(2, "tooled"), (1, "untooled")])
async def test_a_recording_of_other_rules_is_refused(version: int, name: str) -> None:
    with pytest.raises(RecordingError, match=rf"'tooled' version 1, but this is '{name}' version {version}"):
        await replay(await record(), other_rules(version, name))


def broken(text: str) -> str:
    raise RuntimeError("broken")


@scenario("ann", "bob", version=1, retries=1)
async def failing(table: Table, *, how: str = "raise") -> Scores:
    """Fails in different ways."""
    await table["ann"].act("?", str)
    if how == "raise":
        raise LookupError("lost")
    if how == "parser":
        await table.act_all("?", broken)
    while how == "loop":
        await table["bob"].act("?", str)
    return {"ann": 0.0}


@pytest.mark.parametrize("how", ["raise", "parser", "loop", "scores"])
async def test_a_failed_episode_fails_again(how: str) -> None:
    turns = ScriptedTurns(dict.fromkeys(("ann", "bob"), lambda context: "yes"))
    players = writers("ann", "bob")
    recording = (await play(failing, players, turns, limits=Limits(max_turns=5), how=how)).recording
    assert recording.ended is Ended.FAILED
    assert (await replay(recording, failing)).recording == recording


class Breaking:
    """Answers the first turn and gives up in the second."""

    async def open(self, number: int, needs: Mapping[SeatName, Need]) -> Mapping[SeatName, Answer | Forfeited]:
        if number:
            raise Dropped("draining")
        return {seat: Answer([ord("x")], [0.0], Finish.STOP, need.policy) for seat, need in needs.items()}


async def test_a_recording_that_breaks_off_in_a_turn_is_verified_up_to_there() -> None:
    recording = (await play(tooled, writers("ann", "bob"), Breaking())).recording  # type: ignore[arg-type]
    again = await replay(recording, tooled)
    assert (again.ended, again.recording) == (Ended.DROPPED, recording)
    with pytest.raises(ReplayMismatch, match=r"rainy"):
        await replay(changed(recording, "hear", "The tool says rainy."), tooled)


async def test_a_scenario_with_other_randomness_than_its_tables_is_found_out() -> None:
    counter = iter(range(10))

    async def careless(table: Table) -> Scores:
        """Counts across episodes."""
        await table["ann"].act(f"Episode {next(counter)}?", str)
        return {"ann": 0.0, "bob": 0.0}

    played = scenario("ann", "bob", version=1)(careless)
    episode = await play(played, scripted(ann=bidder, bob=bidder))
    with pytest.raises(ReplayMismatch, match=r"Episode 0.*Episode 1"):
        await replay(episode.recording, played)
