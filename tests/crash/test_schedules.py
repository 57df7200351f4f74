"""SIGKILL around the ticks of a schedule: each tick that a living worker fired has one run, and none has two."""

from __future__ import annotations

import asyncio
import signal
from datetime import UTC, datetime
from pathlib import Path

import pytest

import keiro
from keiro import schedule
from keiro.testing.crash import CrashPoints
from tests.crash import forks, workload
from tests.crash.test_boundaries import forget, url

pytestmark = pytest.mark.crash
__all__ = ("url",)  # the fixture

ROUND = 3
"""So that rounds end too while there are kills."""


@keiro.workflow
async def ticking(run: keiro.WorkflowRun, at: datetime) -> str:
    return await run.step(workload.effect, run.key, at.isoformat())


def engine_at(url: str) -> keiro.Engine:
    schedule.ROUND = ROUND  # type: ignore[misc]
    return keiro.Engine(url, workflows=[ticking], migrate=True)


async def put(engine: keiro.Engine) -> None:
    # The backfill lets no tick be left out, however long a restart takes.
    await engine.schedules.put("s", ticking, keiro.TICK, cron="* * * * * *", overlap="allow", backfill=True)
    workload.note("acknowledged", "put")


async def completed(engine: keiro.Engine, least: int) -> list[str]:
    """The keys of the runs, in order, once there are so many and all have ended."""
    while True:
        runs = await engine.runs(workflow="ticking", limit=1000)
        if len(runs) >= least and all(run.terminal for run in runs):
            assert {run.status for run in runs} == {"completed"}
            return [run.key for run in reversed(runs)]
        await asyncio.sleep(0.02)


def test_a_kill_around_a_tick_leaves_each_tick_with_one_run(url: str, tmp_path: Path) -> None:
    """SC-2: Seven boundaries of three ticks and a change of rounds; the ticks are real seconds."""
    workload.use_log(tmp_path)

    async def count() -> None:
        engine = engine_at(url)
        points = CrashPoints(engine, 0)
        async with engine:
            await put(engine)
            await completed(engine, 3)
            workload.note("boundaries", str(points.passed))

    assert forks.run(count) == 0
    boundaries = int(workload.notes(tmp_path, "boundaries")[0])
    assert boundaries > 20
    for at in range(1, boundaries + 1, boundaries // 6):
        folder = tmp_path / str(at)
        folder.mkdir()
        workload.use_log(folder)
        forget(url)
        crash_and_recover(url, folder, at)


def crash_and_recover(url: str, folder: Path, at: int) -> None:
    async def crashing() -> None:
        engine = engine_at(url)
        CrashPoints(engine, at)
        async with engine:
            await put(engine)
            await completed(engine, 3)

    async def recovering() -> None:
        async with engine_at(url) as engine:
            if workload.notes(folder, "acknowledged"):
                assert [row.name for row in await engine.schedules.list()] == ["s"], "an acknowledged put is lost"
            await put(engine)
            before = len(await engine.runs(workflow="ticking", limit=1000))
            await completed(engine, before + 1)
            await engine.schedules.delete("s")
            keys = await completed(engine, before + 1)
        times = [datetime.strptime(key, "s-%Y%m%dT%H%M%SZ").replace(tzinfo=UTC) for key in sorted(keys)]
        seconds = [round((one - times[0]).total_seconds()) for one in times]
        assert seconds == list(range(len(times))), "a tick is missing, or there twice"

    code = forks.run(crashing)
    assert code in (-signal.SIGKILL, 0), f"boundary {at}: exit {code}"
    assert forks.run(recovering) == 0, f"recovery after boundary {at} failed"
