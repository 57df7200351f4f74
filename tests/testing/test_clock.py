"""Time that skips: deadlines of days come at once, in order, and all that asks for the time agrees."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import keiro
from keiro.testing import SkippingClock
from keiro.testing.plugin import EngineFactory

DAY = 86_400
START = datetime(2030, 1, 1, tzinfo=UTC)


@keiro.workflow
async def remind(run: keiro.WorkflowRun, days: list[int]) -> list[datetime]:
    times = [run.now()]
    for day in days:
        await run.sleep(timedelta(days=day))
        times.append(run.now())
    return times


@keiro.workflow
async def until_noon(run: keiro.WorkflowRun, noon: datetime) -> datetime:
    await run.sleep_until(noon)
    return run.now()


@keiro.workflow
async def approval(run: keiro.WorkflowRun) -> str:
    try:
        return await run.deferred("approved", str).result(timeout=30 * DAY)
    except TimeoutError:
        return f"nobody until {run.now():%Y-%m-%d}"


async def test_sleeps_of_days_end_at_once_and_the_time_agrees(keiro_engine: EngineFactory) -> None:
    engine = await keiro_engine(remind)
    clock = SkippingClock(engine, start=START)

    times = await engine.execute(remind, [1, 30, 365])

    assert times == [START + timedelta(days=days) for days in (0, 1, 31, 396)]
    assert clock.now() == START + timedelta(days=396)


async def test_time_skips_on_sqlite_too(keiro_engine: EngineFactory, tmp_path: Path) -> None:
    engine = await keiro_engine(remind, url=f"sqlite:///{tmp_path}/keiro.db")
    SkippingClock(engine, start=START)
    assert (await engine.execute(remind, [1, 30]))[-1] == START + timedelta(days=31)


async def test_runs_wake_in_the_order_of_their_deadlines(keiro_engine: EngineFactory) -> None:
    engine = await keiro_engine(remind)
    SkippingClock(engine, start=START)

    handles = [await engine.start(remind, [days]) for days in (3, 1, 2)]
    ends = await asyncio.gather(*(handle.result() for handle in handles))

    assert [end[-1] - START for end in ends] == [timedelta(days=days) for days in (3, 1, 2)]
    finished = sorted((await engine.runs()), key=lambda run: run.finished_at_ms or 0)
    assert [run.run_id for run in finished] == [handles[at].run_id for at in (1, 2, 0)]


async def test_sleep_until_ends_at_its_time(keiro_engine: EngineFactory) -> None:
    engine = await keiro_engine(until_noon)
    SkippingClock(engine, start=START)
    noon = START + timedelta(days=99, hours=12)
    assert await engine.execute(until_noon, noon) == noon


async def test_a_timeout_comes_after_its_time_and_not_before_somebody_waits(keiro_engine: EngineFactory) -> None:
    engine = await keiro_engine(approval)
    clock = SkippingClock(engine, start=START)

    # given a run that waits for what a test is about to give it
    early, late = await engine.start(approval), await engine.start(approval)
    await clock.advance(timedelta(days=29))
    assert not (await early.run()).terminal
    await engine.complete(early.run_id, "approved", "yes")

    assert await early.result() == "yes"
    assert await late.result() == "nobody until 2030-01-31"


async def test_pauses_of_retries_are_skipped(keiro_engine: EngineFactory) -> None:
    tries: list[int] = []

    @keiro.step(retry=keiro.Retry(attempts=4, initial=DAY, factor=2, maximum=100 * DAY, jitter=0))
    async def stubborn() -> int:
        tries.append(1)
        if len(tries) < 4:
            raise ConnectionError("not yet")
        return len(tries)

    @keiro.workflow
    async def persistent(run: keiro.WorkflowRun) -> datetime:
        assert await run.step(stubborn) == 4
        return run.now()

    engine = await keiro_engine(persistent)
    SkippingClock(engine, start=START)
    assert await engine.execute(persistent) == START + timedelta(days=1 + 2 + 4)


async def test_the_workflows_own_retries_are_skipped(keiro_engine: EngineFactory) -> None:
    tries: list[int] = []

    @keiro.workflow(retry=keiro.Retry(attempts=3, initial=DAY, factor=1, maximum=DAY, jitter=0))
    async def shaky(run: keiro.WorkflowRun) -> int:
        tries.append(1)
        if len(tries) < 3:
            raise ConnectionError
        return len(tries)

    engine = await keiro_engine(shaky)
    clock = SkippingClock(engine, start=START)
    assert await engine.execute(shaky) == 3
    assert clock.now() == START + timedelta(days=2)


async def test_time_stands_still_while_a_step_runs(keiro_engine: EngineFactory) -> None:
    go = asyncio.Event()
    begun = asyncio.Event()

    @keiro.step
    async def slow() -> str:
        begun.set()
        await go.wait()
        return "step"

    @keiro.workflow
    async def race(run: keiro.WorkflowRun) -> int:
        return (await run.first(run.step(slow), run.sleep(DAY))).winner

    engine = await keiro_engine(race)
    clock = SkippingClock(engine, start=START)
    handle = await engine.start(race)
    result = asyncio.create_task(handle.result())
    await begun.wait()
    await asyncio.sleep(0.05)  # time enough for fifty looks

    assert clock.now() == START
    go.set()
    assert await result == 0


async def test_advance_lets_pass_what_it_is_told(keiro_engine: EngineFactory) -> None:
    engine = await keiro_engine(remind)
    clock = SkippingClock(engine, start=START)
    handle = await engine.start(remind, [1, 1, 1])

    assert await clock.advance(1.5 * DAY) == START + timedelta(days=1.5)

    recorded = [row.step for row in await engine.steps(handle.run_id) if row.status == "succeeded"]
    assert recorded == ["sleep:sleep"]
    assert clock.now() == START + timedelta(days=1.5)
    await clock.advance(timedelta(days=2))
    assert await handle.status() == keiro.Status.COMPLETED


async def test_children_and_their_parents_skip_together(keiro_engine: EngineFactory) -> None:
    @keiro.workflow
    async def parent(run: keiro.WorkflowRun) -> list[datetime]:
        child = await run.spawn(remind, [10])
        await run.sleep(DAY)
        times: list[datetime] = await child.result(timeout=20 * DAY)
        return [*times, run.now()]

    engine = await keiro_engine(parent, remind)
    SkippingClock(engine, start=START)
    times = await engine.execute(parent)
    assert times[-1] == START + timedelta(days=10)


async def test_a_long_skip_costs_no_lease(keiro_engine: EngineFactory, tmp_path: Path) -> None:
    # given two engines on one database, who would bury each other when the time jumps
    url = f"memory://{tmp_path}"
    one, other = await keiro_engine(remind, url=url), await keiro_engine(url=url)
    SkippingClock(one, other, start=START)
    began = time.monotonic()
    while time.monotonic() - began < 1.3:  # the other one looks for dead workers once a second
        await one.execute(remind, [3])
    assert len(await one.store.workers()) == 2
    assert (await one.store.workers())[0].lease_expires_at_ms > one.wall_ms()


async def test_a_clock_needs_an_open_engine_whose_time_is_its_own() -> None:
    with pytest.raises(keiro.InvalidCall, match="not open"):
        SkippingClock(keiro.Engine("memory://"))
    with pytest.raises(keiro.InvalidCall, match="pass the engines"):
        SkippingClock()
    with pytest.raises(keiro.InvalidCall, match="its own clock"):
        SkippingClock(keiro.Engine("postgresql://localhost/none"))
