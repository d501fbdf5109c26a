"""Actors: one message at a time, one outcome per ask, and deaths that everyone hears of."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinker.runtime.actor import Actor, ActorDead, ActorError, ActorSystem, AskTimeout, MailboxFull
from tinker.runtime.clock import ManualClock
from tinker.runtime.supervision import Death, Intensity, Restart

FOREVER = 60.0  # a deadline no test waits for
SOON = Restart(times=1000, within=60.0, backoff=0.0)


class Oven(Actor[str, str]):
    """Does what it is told: "hold" waits for `door`, "burn" raises, "cancel" raises CancelledError; anything else comes back hot."""

    def __init__(self, log: list[str] | None = None) -> None:
        self.log = log if log is not None else []
        self.door = anyio.Event()

    async def started(self) -> None:
        self.log.append("started")

    async def receive(self, message: str) -> str:
        self.log.append(message)
        if message == "hold":
            await self.door.wait()
        if message == "burn":
            raise ValueError("burnt")
        if message == "cancel":
            raise asyncio.CancelledError
        return f"hot {message}"

    async def stopped(self) -> None:
        self.log.append("stopped")


class Never(Actor[str, str]):
    async def receive(self, message: str) -> str:
        return await asyncio.get_running_loop().create_future()


async def test_an_ask_gets_its_reply() -> None:
    async with ActorSystem() as system:
        ref = system.spawn("oven", Oven)
        assert await ref.ask("bread", deadline=FOREVER) == "hot bread"


async def test_messages_are_handled_one_at_a_time_in_order() -> None:
    log: list[str] = []
    oven = Oven(log)
    async with ActorSystem() as system:
        ref = system.spawn("oven", lambda: oven)
        for message in ("hold", "a", "b"):
            ref.tell(message)
        await anyio.wait_all_tasks_blocked()
        assert log == ["started", "hold"] and ref.waiting == 2
        oven.door.set()
        await ref.ask("c", deadline=FOREVER)
    assert log == ["started", "hold", "a", "b", "c", "stopped"]


async def test_a_full_mailbox_refuses_tell_and_ask() -> None:
    async with ActorSystem(grace=0) as system:
        ref = system.spawn("oven", Oven, mailbox=2)
        ref.tell("hold")
        await anyio.wait_all_tasks_blocked()
        ref.tell("a")
        ref.tell("b")
        with pytest.raises(MailboxFull, match="2 messages wait for actor 'oven'"):
            ref.tell("c")
        with pytest.raises(MailboxFull):
            await ref.ask("c", deadline=FOREVER)


async def test_a_constructor_that_raises_is_an_error_at_spawn() -> None:
    def broken() -> Oven:
        raise ImportError("no such engine")

    async with ActorSystem() as system:
        with pytest.raises(ImportError, match="no such engine"):
            system.spawn("oven", broken)
        system.spawn("oven", Oven)  # the name is still free


async def test_two_living_actors_cannot_share_a_name() -> None:
    async with ActorSystem() as system:
        ref = system.spawn("oven", Oven)
        with pytest.raises(ActorError, match="an actor named 'oven' is alive"):
            system.spawn("oven", Oven)
        ref.stop()
        await ref.dead()
        system.spawn("oven", Oven)


async def test_a_failure_answers_its_ask_and_without_restarts_ends_the_actor() -> None:
    async with ActorSystem() as system:
        ref = system.spawn("oven", Oven)
        with pytest.raises(ValueError, match="burnt"):
            await ref.ask("burn", deadline=FOREVER)
        death = await ref.dead()
        assert str(death) == "actor 'oven' failed and was given up: ValueError: burnt"
        with pytest.raises(ActorDead, match="actor 'oven' failed and was given up: ValueError: burnt"):
            await ref.ask("bread", deadline=FOREVER)
        with pytest.raises(ActorDead):
            ref.tell("bread")


async def test_a_death_answers_everyone_in_the_mailbox() -> None:
    errors: list[Exception] = []
    async with ActorSystem() as system, anyio.create_task_group() as group:
        oven = Oven()
        ref = system.spawn("oven", lambda: oven)

        async def ask(message: str) -> None:
            try:
                await ref.ask(message, deadline=FOREVER)
            except Exception as error:
                errors.append(error)

        for message in ("hold", "burn", "a", "b"):
            group.start_soon(ask, message)
        await anyio.wait_all_tasks_blocked()
        oven.door.set()
    assert [type(error) for error in errors] == [ValueError, ActorDead, ActorDead]


@pytest.mark.parametrize("end", ["kill", "stop"])
async def test_however_it_ends_everyone_is_answered(end: str) -> None:
    errors: list[Exception] = []
    oven = Oven()
    async with ActorSystem() as system, anyio.create_task_group() as group:
        ref = system.spawn("oven", lambda: oven)

        async def ask(message: str) -> None:
            try:
                await ref.ask(message, deadline=FOREVER)
            except Exception as error:
                errors.append(error)

        for message in ("hold", "a", "b"):
            group.start_soon(ask, message)
        await anyio.wait_all_tasks_blocked()
        ref.kill() if end == "kill" else ref.stop()
        oven.door.set()
        await ref.dead()
    assert {type(error) for error in errors} == {ActorDead}
    assert len(errors) == (2 if end == "stop" else 3)


async def test_awaiting_something_cancelled_is_a_failure_of_that_actor_alone() -> None:
    async with ActorSystem() as system:
        other = system.spawn("other", Oven)
        ref = system.spawn("oven", Oven)
        with pytest.raises(ActorError, match="awaited something that was cancelled"):
            await ref.ask("cancel", deadline=FOREVER)
        assert (await ref.dead()).reason == "failed and was given up"
        assert await other.ask("bread", deadline=FOREVER) == "hot bread"


async def test_a_failed_actor_is_built_again_and_keeps_its_mailbox() -> None:
    log: list[str] = []
    async with ActorSystem() as system:
        ref = system.spawn("oven", lambda: Oven(log), restart=SOON)
        ref.tell("burn")
        assert await ref.ask("bread", deadline=FOREVER) == "hot bread"
        assert ref.counts.restarts == 1 and ref.counts.failed == 1
    assert log == ["started", "burn", "stopped", "started", "bread", "stopped"]


async def test_restarts_wait_for_their_backoff() -> None:
    clock = ManualClock()
    async with ActorSystem(clock=clock) as system:
        ref = system.spawn("oven", Oven, restart=Restart(times=3, within=60.0, backoff=1.0))
        for failures, pause in ((1, 1.0), (2, 2.0)):
            ref.tell("burn")
            await anyio.wait_all_tasks_blocked()
            assert clock.next_due() == clock.now() + pause
            clock.advance(pause)
            await anyio.wait_all_tasks_blocked()
            assert ref.counts.restarts == failures


async def test_an_actor_that_fails_too_often_is_given_up() -> None:
    async with ActorSystem(clock=ManualClock()) as system:
        ref = system.spawn("oven", Oven, restart=Restart(times=2, within=60.0, backoff=0.0))
        for _ in range(3):
            with pytest.raises(ValueError):
                await ref.ask("burn", deadline=FOREVER)
        assert (await ref.dead()).reason == "failed and was given up"


def test_old_failures_are_forgiven() -> None:
    intensity = Intensity(Restart(times=1, within=10.0, backoff=1.0))
    assert intensity.failed(0.0) == 1.0
    assert intensity.failed(10.0) == 1.0
    assert intensity.failed(15.0) is None


def test_the_backoff_doubles_up_to_its_longest() -> None:
    intensity = Intensity(Restart(times=100, within=10.0, backoff=1.0, longest=5.0))
    assert [intensity.failed(0.0) for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]


@pytest.mark.parametrize("hook", ["started", "stopped"])
async def test_a_hook_that_raises_is_a_failure_and_nobody_waits_for_ever(hook: str) -> None:
    class Broken(Oven):
        pass

    async def fail(self: Broken) -> None:
        raise OSError("disk gone")

    setattr(Broken, hook, fail)
    heard: list[str] = []
    async with ActorSystem(on_failure=lambda name, error: heard.append(f"{name}: {error}")) as system:
        ref = system.spawn("oven", Broken)
        if hook == "stopped":
            ref.stop()
        death = await ref.dead()
        assert isinstance(death.cause, OSError)
    assert heard == ["oven: disk gone"]


async def test_a_factory_that_fails_at_restart_counts_as_a_failure() -> None:
    built = 0

    def build() -> Oven:
        nonlocal built
        built += 1
        if built == 2:
            raise ImportError("gone")
        return Oven()

    async with ActorSystem() as system:
        ref = system.spawn("oven", build, restart=SOON)
        ref.tell("burn")
        assert await ref.ask("bread", deadline=FOREVER) == "hot bread"
        assert built == 3


async def test_an_ask_past_its_deadline_raises_and_the_late_reply_is_dropped_and_counted() -> None:
    oven = Oven()
    async with ActorSystem() as system:
        ref = system.spawn("oven", lambda: oven)
        with pytest.raises(AskTimeout, match=r"actor 'oven' did not answer str within 0.001 s"):
            await ref.ask("hold", deadline=0.001)
        oven.door.set()
        await ref.ask("bread", deadline=FOREVER)
        assert ref.counts.late == 1


async def test_an_ask_given_up_before_its_turn_is_not_handled() -> None:
    oven = Oven()
    async with ActorSystem() as system:
        ref = system.spawn("oven", lambda: oven)
        ref.tell("hold")
        with pytest.raises(AskTimeout):
            await ref.ask("forgotten", deadline=0.001)
        oven.door.set()
        await ref.ask("bread", deadline=FOREVER)
        assert "forgotten" not in oven.log and ref.counts.abandoned == 1


async def test_watchers_hear_of_a_death_once_even_afterwards() -> None:
    deaths: list[Death] = []
    async with ActorSystem() as system:
        ref = system.spawn("oven", Oven)
        ref.watch(deaths.append)
        ref.stop()
        await ref.dead()
        assert [death.reason for death in deaths] == ["was stopped"] and not ref.alive
        ref.watch(deaths.append)
        assert len(deaths) == 2


async def test_leaving_the_system_lets_the_message_at_hand_finish() -> None:
    oven = Oven()
    answers: list[str] = []
    async with anyio.create_task_group() as group, ActorSystem() as system:
        ref = system.spawn("oven", lambda: oven)

        async def ask() -> None:
            answers.append(await ref.ask("hold", deadline=FOREVER))

        group.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        asyncio.get_running_loop().call_soon(oven.door.set)
    assert answers == ["hot hold"]


async def test_leaving_the_system_cancels_what_does_not_finish_within_the_grace() -> None:
    async with ActorSystem(grace=0.01) as system:
        ref = system.spawn("never", Never)
        ref.tell("x")
        await anyio.wait_all_tasks_blocked()
    assert not ref.alive


async def test_an_error_in_the_body_goes_on_as_it_is() -> None:
    with pytest.raises(KeyError, match="mine"):
        async with ActorSystem() as system:
            system.spawn("never", Never).tell("x")
            raise KeyError("mine")


async def test_a_stop_interrupts_the_pause_before_a_restart() -> None:
    async with ActorSystem(clock=ManualClock()) as system:
        ref = system.spawn("oven", Oven, restart=Restart(times=3, backoff=1.0))
        ref.tell("burn")
        await anyio.wait_all_tasks_blocked()
        ref.stop()
        assert (await ref.dead()).reason == "was stopped"


async def test_two_hundred_jobs_reach_two_hundred_ends() -> None:
    unhandled: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))

    class Jobs(Actor[int, int]):
        async def receive(self, message: int) -> int:
            await anyio.lowlevel.checkpoint()
            if message % 10 == 0:
                raise ValueError(f"job {message}")
            return message

    ends: list[str] = []
    async with ActorSystem() as system, anyio.create_task_group() as group:
        ref = system.spawn("jobs", Jobs, mailbox=200, restart=SOON)

        async def job(number: int) -> None:
            try:
                await ref.ask(number, deadline=FOREVER)
                ends.append("ok")
            except ValueError as error:
                ends.append(str(error)[:3])

        for number in range(200):
            group.start_soon(job, number)
        await anyio.lowlevel.checkpoint()
        gc.collect()
    gc.collect()
    assert Counter(ends) == {"ok": 180, "job": 20} and unhandled == []


# --- random histories ---

_steps = st.lists(
    st.sampled_from(
        [
            "ask",
            "ask hold",
            "ask burn",
            "ask impatient",
            "tell",
            "tell burn",
            "open",
            "let run",
            "cancel asker",
            "kill",
            "stop",
        ]
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(_steps, st.sampled_from([0, 1, 3]), st.integers(1, 5))
def test_every_ask_has_exactly_one_outcome(steps: list[str], restarts: int, mailbox: int) -> None:
    outcomes: Counter[int] = Counter()
    asked = asyncio.run(_history(steps, restarts, mailbox, outcomes))
    assert outcomes == Counter(range(asked))


async def _history(steps: list[str], restarts: int, mailbox: int, outcomes: Counter[int]) -> int:
    """Play the steps and leave; how many asks were made. Each records what became of it."""
    ovens: list[Oven] = []

    def build() -> Oven:
        ovens.append(Oven())
        return ovens[-1]

    asked = 0
    scopes: list[anyio.CancelScope] = []
    async with anyio.create_task_group() as group, ActorSystem(grace=0) as system:
        ref = system.spawn("oven", build, mailbox=mailbox, restart=Restart(times=restarts, backoff=0.0))

        async def ask(number: int, message: str, deadline: float, scope: anyio.CancelScope) -> None:
            with scope:
                try:
                    assert await ref.ask(message, deadline=deadline) == f"hot {message}"
                except (ValueError, ActorError):
                    pass
                except asyncio.CancelledError:
                    outcomes[number] += 1
                    raise
                outcomes[number] += 1

        actions: dict[str, Callable[[], object]] = {
            "open": lambda: ovens[-1].door.set(),
            "cancel asker": lambda: scopes[-1].cancel() if scopes else None,
            "kill": ref.kill,
            "stop": ref.stop,
        }
        for step in steps:
            if step.startswith("ask"):
                scopes.append(anyio.CancelScope())
                message = step.removeprefix("ask").strip() or "bread"
                group.start_soon(ask, asked, message, 0.0 if message == "impatient" else FOREVER, scopes[-1])
                asked += 1
            elif step.startswith("tell"):
                try:
                    ref.tell(step.removeprefix("tell").strip() or "bread")
                except (ActorDead, MailboxFull):
                    continue
            elif step == "let run":
                await anyio.wait_all_tasks_blocked()
            else:
                actions[step]()
    return asked
