"""Memory over a long time: what is recorded and what has ended is in the journal, not in the process."""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import keiro

pytestmark = pytest.mark.soak

# What may stay behind, in bytes: for each step or run less than any object takes, and what caches fill up with.
EACH = 16
CACHES = 100_000

# Steps or runs after which that would show.
ENOUGH = 5000


class Progress:
    """How far the endless run is, and whether it shall end."""

    steps = 0
    stopped = False


@keiro.step
async def count(n: int) -> int:
    return n + 1


@keiro.workflow
async def endless(run: keiro.WorkflowRun) -> int:
    while not Progress.stopped:
        Progress.steps = await run.step(count, Progress.steps)
    return Progress.steps


@keiro.workflow
async def short(run: keiro.WorkflowRun, n: int) -> int:
    return await run.step(count, n)


@pytest.fixture(params=["sqlite", "postgres"])
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[keiro.Engine]:
    url = f"sqlite:///{tmp_path}/keiro.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    Progress.steps, Progress.stopped = 0, False
    async with keiro.Engine(url, workflows=[endless, short], migrate=True) as engine:
        tracemalloc.start(1)
        yield engine
        tracemalloc.stop()


def memory() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


async def test_steps_of_a_run_that_goes_on_leave_nothing_in_memory(engine: keiro.Engine, soak_seconds: float) -> None:
    # given a run that has been going for a while
    handle = await engine.start(endless, id="one")
    while Progress.steps < 500:
        await asyncio.sleep(0.01)
    first, before = Progress.steps, memory()

    # when it goes on
    until = time.monotonic() + soak_seconds
    while time.monotonic() < until or Progress.steps < first + ENOUGH:
        await asyncio.sleep(0.01)
    last, after = Progress.steps, memory()
    Progress.stopped = True

    # then memory does not grow with its steps
    assert await handle.result() >= last
    assert after - before < CACHES + EACH * (last - first)


async def test_ended_runs_leave_nothing_in_memory(engine: keiro.Engine, soak_seconds: float) -> None:
    async def work(first: int) -> int:
        """Run 50 short workflows, and return the number that follows."""
        ids = range(first, first + 50)
        assert await asyncio.gather(*(engine.execute(short, n, id=str(n)) for n in ids)) == [n + 1 for n in ids]
        return ids.stop

    # given an engine that has run some workflows
    first = 0
    while first < 500:
        first = await work(first)
    before = memory()

    # when it runs many more
    last = first
    until = time.monotonic() + soak_seconds
    while time.monotonic() < until or last < first + ENOUGH:
        last = await work(last)

    # then memory does not grow with them
    assert memory() - before < CACHES + EACH * (last - first)
