"""Sleeps: a clock that is set once, a parked run that costs nothing, a wake that is never lost (WF-100 to WF-115)."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec import Raw

import keiro
from keiro import waits
from keiro.decisions import Append, RefusedTerminal, new
from keiro.events import StateChanged, StepRecorded
from keiro.identity import StepIds
from tests.conformance.parking import clocks, evicted, ms, parked, reached, recorded, stopped_at_every_version
from tests.conformance.test_steps import calls, note, step_names, topics
from tests.conftest import MakeEngine

A_DAY = 86_400
SHORT = 0.5

entries: list[str] = []


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    calls.clear()
    entries.clear()
    monkeypatch.setattr(waits, "PARK_S", 0.01)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every wait parks the run at once, so that each is followed by a replay."""
    monkeypatch.setattr(waits, "PARK_S", 0)


@keiro.workflow
async def naps(run: keiro.WorkflowRun, seconds: float) -> list[Any]:
    entries.append(run.key)
    return [await run.step(note, "before"), await run.sleep(seconds), await run.step(note, "after")]


@keiro.workflow
async def sleeps_a_day(run: keiro.WorkflowRun) -> str:
    entries.append(run.key)
    await run.sleep(A_DAY)
    return str(await run.step(note, "woken"))


async def test_wf_103_a_sleep_is_armed_fires_and_the_run_goes_on(make_engine: MakeEngine) -> None:
    """WF-103, WF-111, P1: the clock is an event, the end of the sleep is a step whose result is null."""
    async with make_engine(naps) as engine:
        handle = await engine.start(naps, 0.01, id="a")
        assert await handle.result() == ["before", None, "after"]
        assert calls == ["before", "after"]
        assert await step_names(handle) == ["note", "sleep:sleep", "note#2"]
        assert "StateChanged" in await topics(handle)
        assert bytes((await recorded(handle, "sleep:sleep")).result) == b"null"


async def test_wf_104_and_107_a_sleeper_is_hidden_until_it_is_due(make_engine: MakeEngine) -> None:
    """WF-104, WF-107, WF-108, WF-34, F3, F26: parked it is found by its clock only, and nothing is run meanwhile."""
    async with make_engine(naps, sleeps_a_day) as engine:
        long = await engine.start(sleeps_a_day, id="long")
        short = await engine.start(naps, SHORT, id="short")
        day = await evicted(engine, long)
        row = await evicted(engine, short)
        [due] = [wait.due_at_ms for wait in await clocks(short)]
        assert (row.wake_at_ms, row.waiting_reason, row.waiting_token) == (due, "sleep", "sleep:sleep")
        assert await short.result() == ["before", None, "after"]
        assert ms(await recorded(short, "sleep:sleep")) >= due
        assert (await short.run()).wake_at_ms is None
        assert entries.count("short") == 2, "run once until it was parked, and once when it was due"
        assert entries.count("long") == 1, "whoever looked meanwhile did not run it"
        assert await long.run() == day
        assert await engine.store.next_due_ms(["sleeps_a_day"]) == day.wake_at_ms


@pytest.mark.usefixtures("at_once")
async def test_wf_105_and_106_a_replay_does_not_set_the_clock_again(make_engine: MakeEngine) -> None:
    """WF-105, WF-106, F1, F3: each wake for something else replays past the sleep, and its first deadline stays."""

    @keiro.workflow
    async def interrupted(run: keiro.WorkflowRun) -> list[Any]:
        async def asks() -> list[Any]:
            return [await run.deferred(f"d{n}", int).result() for n in range(4)]

        return await asyncio.gather(asks(), run.sleep(SHORT * 2))

    async with make_engine(interrupted) as engine:
        handle = await engine.start(interrupted, id="a")
        dues = set()
        for n in range(4):
            dues.add((await evicted(engine, handle)).wake_at_ms)
            await engine.complete(handle.run_id, f"d{n}", n)
            if n < 3:
                while (await handle.run()).waiting_token == f"awk:d{n}" or (await handle.run()).status != "suspended":
                    await asyncio.sleep(0.002)
        assert await handle.result() == [[0, 1, 2, 3], None]
        [clock] = await clocks(handle)
        assert dues == {clock.due_at_ms}
        assert ms(await recorded(handle, "sleep:sleep")) >= (clock.due_at_ms or 0)


async def test_clocks_of_parked_runs_fire_in_sets_although_there_is_no_room_to_drive_them(
    make_engine: MakeEngine, at_once: None
) -> None:
    """WF-103: all that are due are recorded while another run has the only slot; each goes on once that has ended."""
    gate = {"entered": asyncio.Event(), "go": asyncio.Event()}

    @keiro.workflow
    async def holds_the_slot(run: keiro.WorkflowRun) -> None:
        async def wait() -> None:
            gate["entered"].set()
            await gate["go"].wait()

        await run.step(wait)

    async with make_engine(naps, holds_the_slot, concurrency=1) as engine:
        sleepers = [await engine.start(naps, 0.3, id=str(n)) for n in range(7)]
        for handle in sleepers:
            await parked(handle)
        holder = await engine.start(holds_the_slot)
        await gate["entered"].wait()
        for handle in sleepers:
            await reached(handle, "sleep:sleep")
            assert await handle.status() == "pending"
            assert await step_names(handle) == ["note", "sleep:sleep"]
        gate["go"].set()
        await holder.result()
        assert [await handle.result() for handle in sleepers] == [["before", None, "after"]] * 7
        assert calls.count("after") == 7


async def test_wf_108_a_parked_sleeper_is_left_alone_by_every_engine(make_engine: MakeEngine) -> None:
    """WF-108, WF-33: engines that come and go find nothing to do, and write nothing."""
    async with make_engine(sleeps_a_day) as engine:
        handle = await engine.start(sleeps_a_day, id="a")
        await evicted(engine, handle)
        before = await topics(handle)
    for _ in range(2):
        async with make_engine(sleeps_a_day) as engine:
            again = engine.handle(handle.run_id)
            assert await engine.store.claim(1, ["sleeps_a_day"], 10) == []
            assert (await again.run()).status == "suspended"
            assert await topics(again) == before
    assert entries == ["a"]


async def test_wf_109_and_110_an_engine_that_starts_after_the_due_time_wakes_the_run(make_engine: MakeEngine) -> None:
    """WF-109, WF-110: what is due while no process is there is found by the next one, from the run's row alone."""
    async with make_engine(naps) as engine:
        handle = await engine.start(naps, SHORT, id="a")
        due = (await evicted(engine, handle)).wake_at_ms
    async with make_engine(worker=False) as client:
        while client.wall_ms() < due:
            await asyncio.sleep(0.01)
        assert (await client.handle(handle.run_id).run()).status == "suspended"
    async with make_engine(naps) as engine:
        assert await engine.handle(handle.run_id).result() == ["before", None, "after"]
    assert calls == ["before", "after"]


@pytest.mark.usefixtures("at_once")
async def test_wf_112_sleeps_of_rounds_are_clocks_of_their_own(make_engine: MakeEngine) -> None:
    """WF-112, WF-100, F2, F4, F5: the same name in each round, another clock and another record each time."""

    @keiro.workflow
    async def rounds(run: keiro.WorkflowRun, n: int) -> int:
        await run.sleep(0.01, key="nap")
        if n:
            run.continue_as_new(n - 1)
        return run.round

    async with make_engine(rounds) as engine:
        handle = await engine.start(rounds, 2, id="a")
        assert await handle.result() == 2
        ids = set()
        for name in ("wf:rounds-a", "wf:rounds-a#1", "wf:rounds-a#2"):
            found = await engine.store.head(name)
            assert found is not None
            rows = (await engine.store.history([found[0].run_key]))[found[0].run_key]
            ids |= {row.event_id for row in rows if row.topic in ("StateChanged", "StepRecorded")}
            assert len([row for row in rows if row.topic == "StepRecorded"]) == 1
        assert len(ids) >= 6, "a clock and its record in each round, and no two of them are the same"


async def test_wf_113_and_114_a_late_record_of_an_ended_round_changes_nothing(make_engine: MakeEngine) -> None:
    """WF-113, WF-114, F4, F5: a sleep of round 0 that somebody records late is refused, and round 1 sleeps on."""

    @keiro.workflow
    async def two_rounds(run: keiro.WorkflowRun, n: int) -> int:
        if n:
            run.continue_as_new(n - 1)
        await run.sleep(A_DAY, key="nap")
        return run.round

    async with make_engine(two_rounds) as engine:
        handle = await engine.start(two_rounds, 1, id="a")
        row = await evicted(engine, handle)
        assert row.run_id == "wf:two_rounds-a#1"
        late = new(StepRecorded(step="sleep:nap", result=Raw(b"null")), StepIds("two_rounds", "a", 0)("sleep:nap"))
        outcome = await engine.store.submit(Append("wf:two_rounds-a", (late,), engine.wall_ms()))
        assert isinstance(outcome, RefusedTerminal)
        assert await handle.run() == row


async def test_wf_115_a_backlog_of_due_sleepers_is_drained_within_the_limit(make_engine: MakeEngine) -> None:
    """WF-115, WF-111: more of them are due than may be resident at once; those that are not due stay."""
    async with make_engine(naps, sleeps_a_day) as engine:
        long = await engine.start(sleeps_a_day, id="long")
        handles = [await engine.start(naps, SHORT, id=str(n)) for n in range(12)]
        for handle in handles:
            await parked(handle)
    async with make_engine(naps, sleeps_a_day, concurrency=3) as engine:
        for handle in handles:
            assert await engine.handle(handle.run_id).result() == ["before", None, "after"]
        assert (await engine.handle(long.run_id).run()).status == "suspended"
    assert len(calls) == 24


async def test_wf_101_a_clock_comes_back_from_the_journal(make_engine: MakeEngine) -> None:
    """WF-101: kind, step and deadline, of `sleep_until` as it was given; one in the past is over at once."""
    time = datetime(2100, 1, 1, tzinfo=UTC)

    @keiro.workflow
    async def until_2100(run: keiro.WorkflowRun) -> None:
        await run.sleep_until(datetime(2000, 1, 1, tzinfo=UTC), key="past")
        await run.sleep_until(time, key="future")

    async with make_engine(until_2100) as engine:
        handle = await engine.start(until_2100, id="a")
        row = await parked(handle)
        due = round(time.timestamp() * 1000)
        past, future = await clocks(handle)
        assert (past.step, future.kind, future.step, future.due_at_ms) == ("sleep:past", "sleep", "sleep:future", due)
        assert row.wake_at_ms == due
        assert await step_names(handle) == ["sleep:past"]


async def test_names_of_sleeps_are_reserved_like_those_of_steps(make_engine: MakeEngine) -> None:
    """WF-100: repeated ones count up; in a scope they carry its prefix; two tasks may not share one."""

    @keiro.workflow
    async def many(run: keiro.WorkflowRun) -> None:
        await run.sleep(0)
        await run.sleep(timedelta(0))
        await run.sleep(0, key="own")
        await run.scope("s").sleep(0)

        async def helper() -> None:
            await run.sleep(0, key="both")

        await asyncio.gather(helper(), helper())

    async with make_engine(many) as engine:
        handle = await engine.start(many, id="a")
        with pytest.raises(keiro.WorkflowFailed) as failed:
            await handle.result()
        assert isinstance(failed.value.__cause__, keiro.StepNameClash)
        assert (await step_names(handle))[:4] == ["sleep:sleep", "sleep:sleep#2", "sleep:own", "sleep:s/sleep"]


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf"), True, "1"])
async def test_a_sleep_of_no_length_is_refused(make_engine: MakeEngine, bad: Any) -> None:
    """F53: what is no finite number of seconds sets no clock."""

    @keiro.workflow
    async def wrong(run: keiro.WorkflowRun) -> str:
        try:
            await run.sleep(bad)
        except keiro.InvalidCall:
            return "refused"
        return "slept"

    async with make_engine(wrong) as engine:
        handle = await engine.start(wrong, id="a")
        assert await handle.result() == "refused"
        assert await clocks(handle) == []


async def test_wf_144_and_f6_a_sleeper_that_was_cancelled_never_wakes(make_engine: MakeEngine) -> None:
    """WF-144, F6: its due time passes and nothing is recorded; no look finds it."""
    async with make_engine(naps) as engine:
        handle = await engine.start(naps, SHORT, id="a")
        due = (await parked(handle)).wake_at_ms
        assert await engine.cancel(handle.run_id)
        before = await topics(handle)
        while engine.wall_ms() <= due:
            await asyncio.sleep(0.01)
        assert await engine.execute(naps, 0, id="b") == ["before", None, "after"]
        assert await engine.store.next_due_ms(["naps"]) is None
        row = await handle.run()
        assert (row.status, row.wake_at_ms) == ("cancelled", None)
        assert await topics(handle) == before
        assert entries.count("a") == 1


async def test_u3_a_sleep_that_was_due_while_the_run_had_failed_is_over_after_its_resurrection(
    make_engine: MakeEngine,
) -> None:
    """U3: its clock is in the journal, and no row of it was settled by the failure."""
    broken = True

    @keiro.workflow
    async def fails_beside_a_sleep(run: keiro.WorkflowRun) -> Any:
        async def fails() -> str:
            if broken:
                raise ValueError("not today")
            return "mended"

        sleeping = asyncio.create_task(run.sleep(SHORT))
        await asyncio.sleep(0)
        value = await run.step(fails)
        return [value, await sleeping, await run.step(note, "after")]

    async with make_engine(fails_beside_a_sleep) as engine:
        handle = await engine.start(fails_beside_a_sleep, id="a")
        with pytest.raises(keiro.WorkflowFailed):
            await handle.result()
        [clock] = await clocks(handle)
        while engine.wall_ms() <= (clock.due_at_ms or 0):
            await asyncio.sleep(0.01)
        broken = False
        assert await engine.resurrect(handle.run_id)
        assert await engine.handle(handle.run_id).result() == ["mended", None, "after"]
        assert await clocks(handle) == [clock]


async def test_u3_a_retracted_sleep_is_slept_again(make_engine: MakeEngine) -> None:
    """U3: what an operator takes back sets a clock of its own, and not the one that has rung."""

    @keiro.workflow
    async def naps_then_asks(run: keiro.WorkflowRun) -> Any:
        await run.sleep(SHORT)
        return await run.deferred("d", int).result()

    async with make_engine(naps_then_asks) as engine:
        handle = await engine.start(naps_then_asks, id="a")
        await reached(handle, "sleep:sleep")
        await evicted(engine, handle)
        at = engine.wall_ms()
        assert await engine.retract_step(handle.run_id, "sleep:sleep")
        while len(await step_names(handle)) < 2:
            await asyncio.sleep(0.002)
        first, second = await clocks(handle)
        assert (second.due_at_ms or 0) >= at + SHORT * 1000 > (first.due_at_ms or 0)
        await engine.complete(handle.run_id, "d", 1)
        assert await handle.result() == 1


@pytest.mark.usefixtures("at_once")
async def test_a_run_that_parks_while_the_worker_looks_is_woken_in_time(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WF-34, WF-111: parked after the look for the next due time and before the worker waits for it."""
    from keiro import worker as workers

    monkeypatch.setattr(workers, "SAFETY_POLL_S", 3600.0)
    async with make_engine(naps) as engine:
        looked, go_on = asyncio.Event(), asyncio.Event()
        next_due = engine.store.next_due_ms

        async def slow(names: Any) -> Any:
            due = await next_due(names)
            looked.set()
            await go_on.wait()
            return due

        engine.store.next_due_ms = slow  # type: ignore[method-assign]
        worker = engine._worker
        assert worker is not None
        worker.wake()
        await looked.wait()
        handle = await engine.start(naps, SHORT, id="a")
        await parked(handle)
        go_on.set()
        assert await handle.result(timeout=20) == ["before", None, "after"]


@pytest.mark.parametrize("park_s", [0, 0.02])
async def test_sleeps_survive_a_stop_at_every_version(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, park_s: float
) -> None:
    """WF-103, WF-105, WF-61: closed without grace after each event; the same result, and each effect once."""
    monkeypatch.setattr(waits, "PARK_S", park_s)

    @keiro.workflow
    async def tour(run: keiro.WorkflowRun) -> list[Any]:
        first = await run.step(note, 1)
        await run.sleep(0.02)
        both = await asyncio.gather(run.sleep(0.03, key="x"), run.sleep(0.01, key="y"))
        return [first, both, await run.step(note, 2)]

    async def nobody(engine: keiro.Engine, handle: keiro.Handle) -> None:
        pass

    result, stops = await stopped_at_every_version(
        lambda: make_engine(tour, strict=True), lambda engine: engine.start(tour, id="a"), nobody
    )
    assert result == [1, [None, None], 2]
    assert stops > 3
    assert set(calls) == {1, 2}
    async with make_engine(tour) as engine:
        handle = engine.handle("wf:tour-a")
        assert [wait.step for wait in await clocks(handle)] == ["sleep:sleep", "sleep:x", "sleep:y"]
        assert sorted(await step_names(handle)) == ["note", "note#2", "sleep:sleep", "sleep:x", "sleep:y"]


async def test_wf_21_a_parked_run_says_what_it_waits_for(make_engine: MakeEngine) -> None:
    """WF-21, WF-04: its first event after the start may be that it waits; all its waits are in it, once each."""

    @keiro.workflow
    async def waits_at_once(run: keiro.WorkflowRun) -> None:
        await asyncio.gather(run.deferred("d", int).result(), run.sleep(A_DAY))

    async with make_engine(waits_at_once) as engine:
        handle = await engine.start(waits_at_once, id="a")
        row = await evicted(engine, handle)
        found = await engine.store.head(handle.run_id)
        assert found is not None and found[1].owner is None
        *_, last = [event async for event in handle.events() if isinstance(event, StateChanged)]
        assert (last.state, [wait.kind for wait in last.waits]) == ("suspended", ["deferred", "sleep"])
        assert (row.status, row.waiting_reason, row.waiting_token) == ("suspended", "deferred", "awk:d")
        assert row.wake_at_ms == last.waits[1].due_at_ms
        assert await step_names(handle) == []


async def test_a_sleep_that_was_retracted_is_fired_anew_for_a_parked_run(
    make_engine: MakeEngine, parks_at_once: None
) -> None:
    """Its record has an id of its own, which is told by the event that parked the run."""
    fails = [True]

    @keiro.workflow
    async def naps(run: keiro.WorkflowRun) -> str:
        await run.sleep(0.05, key="nap")
        if fails:
            raise ValueError("not yet")
        return "rested"

    async with make_engine(naps) as engine:
        handle = await engine.start(naps, id="a")
        with pytest.raises(keiro.WorkflowFailed):
            await handle.result()
        fails.clear()
        await engine.retract_step(handle.run_id, "sleep:nap")
        await engine.resurrect(handle.run_id)
        await evicted(engine, handle)
        assert await handle.result(timeout=20) == "rested"
        assert await engine.reconcile() == []
        naps_recorded = [
            event async for event in handle.events() if isinstance(event, StepRecorded) and event.step == "sleep:nap"
        ]
        assert len(naps_recorded) == 2
