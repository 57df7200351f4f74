"""`until` and `first`: what a run waited for and what was first are recorded, so every replay sees the same."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import keiro
from keiro import waits
from tests.conformance.parking import (
    before_parking,
    clocks,
    evicted,
    is_park,
    is_timeout,
    parked,
    reached,
    recorded,
    stopped_at_every_version,
)
from tests.conformance.test_steps import calls, note, step_names, topics
from tests.conftest import MakeEngine

entries: list[str] = []


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    calls.clear()
    entries.clear()
    monkeypatch.setattr(waits, "PARK_S", 0.01)


class Cart(keiro.WorkflowRun, name="until_cart"):
    """Waits for three items, asks a step, and waits for it to be emptied."""

    def __init__(self) -> None:
        self.items: list[str] = []

    @keiro.event("Added")
    def add(self, sku: str) -> None:
        self.items.append(sku)

    async def execute(self) -> list[Any]:
        entries.append(self.key)
        await self.until(lambda: len(self.items) >= 2)
        seen = list(self.items)
        await self.step(note, seen)
        await self.until(lambda: len(self.items) >= 4)
        return [seen, list(self.items)]


class Patient(keiro.WorkflowRun, name="patient"):
    """Waits for a command, not for ever."""

    def __init__(self) -> None:
        self.said: list[str] = []

    @keiro.event("Said")
    def say(self, word: str) -> None:
        self.said.append(word)

    async def execute(self, seconds: float) -> list[Any]:
        entries.append(self.key)
        try:
            await self.until(lambda: "go" in self.said, timeout=seconds)
            came = "came"
        except TimeoutError:
            came = "too late"
        before = list(self.said)
        await self.until(lambda: "end" in self.said)
        return [came, before, list(self.said)]


# until


@pytest.mark.parametrize("park_s", [0, 0.01, 3600.0])
async def test_until_goes_on_when_commands_have_made_it_true(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, park_s: float
) -> None:
    """WF-04, WF-05 for commands: what the body sees at each point is the same whether it was parked or not."""
    monkeypatch.setattr(waits, "PARK_S", park_s)
    async with make_engine(Cart, strict=True) as engine:
        handle = await engine.start(Cart, id="a")
        for sku in "abc":
            await engine.command(handle.run_id, Cart.add, sku)
        await reached(handle, "until:until", "note")
        await engine.command(handle.run_id, Cart.add, "d")
        seen, items = await handle.result(timeout=30)
        assert items == ["a", "b", "c", "d"]
        assert seen == items[: len(seen)] and len(seen) >= 2
        assert calls == [seen]
        assert await step_names(handle) == ["until:until", "note", "until:until#2"]


async def test_a_command_wakes_a_run_that_is_parked_in_until(make_engine: MakeEngine) -> None:
    """WF-05, WF-33: parked it says that it waits for commands; one that is not enough parks it again."""
    async with make_engine(Cart, strict=True) as engine:
        handle = await engine.start(Cart, id="a")
        row = await evicted(engine, handle)
        assert (row.waiting_reason, row.waiting_token, row.wake_at_ms) == ("until", "until:until", None)
        assert await step_names(handle) == []
        await engine.command(handle.run_id, Cart.add, "a")
        while entries != ["a", "a"]:
            await asyncio.sleep(0.002)
        await evicted(engine, handle)
        await engine.command(handle.run_id, Cart.add, "b")
        await reached(handle, "note")
        assert calls == [["a", "b"]]
    async with make_engine(Cart, worker=False) as client:
        for sku in "cd":
            await client.command(handle.run_id, Cart.add, sku)
    async with make_engine(Cart, strict=True) as engine:
        assert await engine.handle(handle.run_id).result() == [["a", "b"], ["a", "b", "c", "d"]]


@pytest.mark.parametrize("who", ["self", "other"])
async def test_a_command_at_the_moment_of_parking_is_not_lost(make_engine: MakeEngine, who: str) -> None:
    """Field reports, "Lost wake-ups", F21, F27, F28: after the last look, before the event that parks is written."""
    async with make_engine(Cart) as engine, make_engine(Cart, worker=False) as other:
        sender = engine if who == "self" else other

        async def tell() -> None:
            for sku in "ab":
                await sender.command("wf:until_cart-a", Cart.add, sku)

        before_parking(engine, tell)
        handle = await engine.start(Cart, id="a")
        async with asyncio.timeout(20):
            await reached(handle, "note")
        assert entries[:1] == ["a"] and len(set(entries)) == 1
        for sku in "cd":
            await engine.command(handle.run_id, Cart.add, sku)
        assert (await handle.result())[1] == ["a", "b", "c", "d"]


@pytest.mark.parametrize("park_s", [0, 0.002])
async def test_lost_wake_ups_of_commands_at_any_moment(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, park_s: float
) -> None:
    """Field reports, "Lost wake-ups": commands that come at whatever moment of the parking of many runs."""
    monkeypatch.setattr(waits, "PARK_S", park_s)
    async with make_engine(Cart, strict=True) as engine:

        async def one(n: int) -> list[Any]:
            handle = await engine.start(Cart, id=str(n))
            for k in range(4):
                for _ in range((n * 5 + k * 3) % 40):
                    await asyncio.sleep(0)
                await engine.command(handle.run_id, Cart.add, str(k))
            return list((await handle.result(timeout=60))[1])

        assert await asyncio.gather(*map(one, range(25))) == [["0", "1", "2", "3"]] * 25


@pytest.mark.parametrize("park_s", [0, 0.01, 3600.0])
async def test_u24_until_times_out_and_a_later_command_does_not_change_that(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, park_s: float
) -> None:
    """U24: what the body had seen when the time was over is what every replay shows it there."""
    monkeypatch.setattr(waits, "PARK_S", park_s)
    async with make_engine(Patient, strict=True) as engine:
        handle = await engine.start(Patient, 0.2, id="a")
        await engine.command(handle.run_id, Patient.say, "hello")
        await reached(handle, "timeout:until:until")
        await engine.command(handle.run_id, Patient.say, "go")
        await engine.command(handle.run_id, Patient.say, "end")
        assert await handle.result(timeout=30) == ["too late", ["hello"], ["hello", "go", "end"]]
        [clock] = await clocks(handle)
        assert clock.kind == "timeout"


async def test_a_command_that_came_before_the_timeout_is_recorded_wins(make_engine: MakeEngine) -> None:
    """U24, F24: committed while the record of the timeout is under way."""
    async with make_engine(Patient) as engine:
        submit = engine.store.submit
        held: list[Any] = []

        def held_back(command: Any) -> Any:
            if is_timeout(command) and not held:
                held.append(command)

                async def send() -> Any:
                    await engine.command(handle.run_id, Patient.say, "go")
                    return await submit(command)

                return asyncio.ensure_future(send())
            return submit(command)

        engine.store.submit = held_back  # type: ignore[method-assign]
        handle = await engine.start(Patient, 0.03, id="a")
        await reached(handle, "until:until")
        await engine.command(handle.run_id, Patient.say, "end")
        assert await handle.result() == ["came", ["go"], ["go", "end"]]
        assert held


async def test_until_holds_at_once_and_records_that(make_engine: MakeEngine) -> None:
    """WF-130: commands that came before the body asked; and a predicate that raises fails the run."""

    class Ready(keiro.WorkflowRun, name="ready"):
        async def execute(self, fails: bool) -> str:
            await self.until(lambda: True, timeout=0)
            if fails:
                await self.until(lambda: 1 / 0 > 0)
            return "went on"

    async with make_engine(Ready, strict=True) as engine:
        assert await engine.execute(Ready, False, id="a") == "went on"
        with pytest.raises(keiro.WorkflowFailed) as failed:
            await engine.execute(Ready, True, id="b")
        assert isinstance(failed.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("park_s", [0, 0.02])
async def test_until_survives_a_stop_at_every_version(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, park_s: float
) -> None:
    """WF-61: closed without grace after each event; the step sees what it saw, and runs with nothing else."""
    monkeypatch.setattr(waits, "PARK_S", park_s)

    async def others(engine: keiro.Engine, handle: keiro.Handle) -> None:
        for sku in "abcd":
            await engine.command(handle.run_id, Cart.add, sku, id=sku)
            await asyncio.sleep(0)

    result, stops = await stopped_at_every_version(
        lambda: make_engine(Cart, strict=True), lambda engine: engine.start(Cart, id="a"), others
    )
    assert result[1] == ["a", "b", "c", "d"]
    assert stops > 4
    assert all(call == result[0] for call in calls)


# first


@keiro.workflow
async def races(run: keiro.WorkflowRun) -> list[Any]:
    entries.append(run.key)
    won = await run.first(run.deferred("d").result(), run.sleep(3600), run.deferred("e").result())
    return [won.winner, won.value, run.now().isoformat(), run.random(), await run.deferred("end").result()]


@pytest.mark.parametrize("park_s", [0, 0.01, 3600.0])
async def test_u24_the_first_of_several_wins_for_every_replay(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, park_s: float
) -> None:
    """U24, P1: null may win; the winner is recorded, and what comes later changes nothing."""
    monkeypatch.setattr(waits, "PARK_S", park_s)
    async with make_engine(races, strict=True) as engine:
        handle = await engine.start(races, id="a")
        while not await clocks(handle):
            await asyncio.sleep(0.002)
        assert await engine.complete(handle.run_id, "e", None)
        await reached(handle, "first:first")
        assert await engine.complete(handle.run_id, "d", "late")
        assert await engine.complete(handle.run_id, "end", "end")
        winner, value, now, _, end = await handle.result(timeout=30)
        assert (winner, value, end) == (2, None, "end")
        assert bytes((await recorded(handle, "first:first")).result) == b"2"
        assert now == (await recorded(handle, "first:first")).timestamp.isoformat()


async def test_a_replay_of_a_race_is_the_race(make_engine: MakeEngine) -> None:
    """WF-59: time, random numbers, names of children and of steps after a race are those of the first run, whatever
    the losers had done before they lost."""

    @keiro.workflow
    async def child(run: keiro.WorkflowRun) -> str:
        return run.key

    @keiro.workflow
    async def race(run: keiro.WorkflowRun) -> list[Any]:
        entries.append(run.key)

        async def loses() -> None:
            await run.step(note, "loser began")
            await run.step(asyncio.sleep, 3600, key="too long")

        async def wins() -> list[Any]:
            return [run.random(), await run.call(child), await run.scope("w").step(note, "winner"), run.random()]

        async def after() -> list[Any]:
            return [run.random(), run.now().isoformat(), await run.call(child)]

        won = await run.first(loses(), run.deferred("never").result(), wins(), run.step(asyncio.sleep, 3600, key="z"))
        said = [list(won), run.now().isoformat(), run.random(), await asyncio.create_task(after())]
        calls.append(said)
        await run.deferred("end").result()
        return said

    async with make_engine(race, child, strict=True) as engine:
        handle = await engine.start(race, id="a")
        while (await parked(handle)).waiting_token != "awk:end":
            await asyncio.sleep(0.002)
        await evicted(engine, handle)
        assert await engine.complete(handle.run_id, "end", 1)
        result = await handle.result()
        assert len(entries) >= 2
        said = [one for one in calls if isinstance(one, list)]
        assert said == [result] * len(said) and len(said) == 2
        assert len(await handle.children()) == 2
        assert [one for one in calls if isinstance(one, str)] == ["loser began", "winner"]


async def test_a_winner_that_raises_raises_in_every_replay(make_engine: MakeEngine) -> None:
    """WF-124 in a race: failed, cancelled and late deferreds win like others."""

    @keiro.workflow
    async def race(run: keiro.WorkflowRun) -> list[str]:
        said = []
        for n in range(3):
            try:
                await run.first(run.deferred(f"d{n}").result(timeout=0.05 if n == 2 else None), run.sleep(3600))
            except (keiro.DeferredCancelled, ValueError, TimeoutError) as error:
                said.append(type(error).__name__)
        await run.deferred("end").result()
        return said

    async with make_engine(race, strict=True) as engine:
        handle = await engine.start(race, id="a")
        await engine.cancel_deferred(handle.run_id, "d0")
        await engine.fail(handle.run_id, "d1", ValueError("no"))
        await reached(handle, "first:first#3")
        await evicted(engine, handle)
        await engine.complete(handle.run_id, "end")
        assert await handle.result() == ["DeferredCancelled", "ValueError", "TimeoutError"]


async def test_a_loser_leaves_no_record_and_is_cancelled(make_engine: MakeEngine) -> None:
    """U24: of two steps one wins, the other is interrupted, and the run does not wait for it."""
    ended: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("slow")

    @keiro.workflow
    async def race(run: keiro.WorkflowRun) -> int:
        won = await run.first(run.step(slow), run.step(note, "quick"))
        await run.sleep(0.05)
        return won.winner

    async with make_engine(race, strict=True) as engine:
        handle = await engine.start(race, id="a")
        assert await handle.result(timeout=30) == 1
        assert ended == ["slow"]
        assert await step_names(handle) == ["note", "first:first", "sleep:sleep"]


async def test_a_race_in_a_race_replays(make_engine: MakeEngine) -> None:
    """The inner one loses, wins, and is left out by a replay without a warning."""

    @keiro.workflow
    async def nested(run: keiro.WorkflowRun) -> list[Any]:
        inner = run.first(run.deferred("a").result(), run.deferred("b").result(), key="inner")
        outer = await run.first(inner, run.deferred("c").result(), key="outer")
        again = run.first(run.deferred("a").result(), run.deferred("c").result(), key="again")
        second = await run.first(run.deferred("x").result(), again, key="second")
        await run.deferred("end").result()
        return [list(outer), [second.winner, list(second.value)]]

    async with make_engine(nested, strict=True) as engine:
        handle = await engine.start(nested, id="n")
        await evicted(engine, handle)
        await engine.complete(handle.run_id, "c", "c")
        await reached(handle, "first:second")
        await evicted(engine, handle)
        await engine.complete(handle.run_id, "end")
        assert await handle.result() == [[1, "c"], [1, [1, "c"]]]


@pytest.mark.parametrize("park_s", [0, 0.02])
async def test_a_race_survives_a_stop_at_every_version(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, park_s: float
) -> None:
    """WF-61: closed without grace after each event; whoever has won once has won."""
    monkeypatch.setattr(waits, "PARK_S", park_s)

    @keiro.workflow
    async def tour(run: keiro.WorkflowRun) -> list[Any]:
        one = await run.first(run.sleep(0.02), run.deferred("d").result())
        calls.append(one.winner)
        two = await run.first(run.step(note, "s"), run.sleep(3600))
        three = await run.first(run.deferred("d").result(), run.sleep(3600))
        return [one.winner, two, three]

    async def others(engine: keiro.Engine, handle: keiro.Handle) -> None:
        await reached(handle, "first:first")
        await engine.complete(handle.run_id, "d", "d")

    result, stops = await stopped_at_every_version(
        lambda: make_engine(tour, strict=True), lambda engine: engine.start(tour, id="a"), others
    )
    assert result == [0, [0, "s"], [0, "d"]]
    assert stops >= 3
    assert set(calls) == {0, "s"}


async def test_a_completion_at_the_moment_of_parking_wins_the_race(make_engine: MakeEngine) -> None:
    """F21, F27: the run would park with all waits of the race; the one that comes is not lost."""
    async with make_engine(races) as engine:
        before_parking(engine, lambda: engine.complete("wf:races-a", "d", 1))
        submit, parks = engine.store.submit, []

        def counted(command: Any) -> Any:
            if is_park(command):
                parks.append(command)
            return submit(command)

        engine.store.submit = counted  # type: ignore[method-assign]
        handle = await engine.start(races, id="a")
        async with asyncio.timeout(20):
            await reached(handle, "first:first")
        await engine.complete(handle.run_id, "end", 2)
        result = await handle.result()
        assert (result[0], result[1], result[-1]) == (0, 1, 2)
        assert parks
        assert "WorkflowCompleted" in await topics(handle)
