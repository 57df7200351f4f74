"""SIGKILL at every write boundary of a run, then a start in a new process: nothing lost, nothing done twice."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import keiro
from keiro.testing.crash import CrashPoints
from tests.crash import forks, workload

pytestmark = pytest.mark.crash


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/keiro.db"
    found: str = request.getfixturevalue("postgres_url")
    return found


def engine_at(url: str) -> keiro.Engine:
    return keiro.Engine(url, workflows=workload.WORKFLOWS, migrate=True)


def test_a_kill_at_any_boundary_loses_nothing_and_repeats_nothing(
    url: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """F54: a real SIGKILL each time. Every sixth boundary, and with --soak every one."""
    workload.use_log(tmp_path)
    boundaries = 0

    async def count() -> None:
        engine = engine_at(url)
        points = CrashPoints(engine, 0)
        async with engine:
            await workload.start_all(engine)
        workload.note("boundaries", str(points.passed))

    assert forks.run(count) == 0
    boundaries = int(workload.notes(tmp_path, "boundaries")[0])
    assert boundaries > 40
    stride = 6 if request.config.getoption("--soak") is None else 1
    for at in range(1, boundaries + 1, stride):
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
            await workload.start_all(engine)

    async def recovering() -> None:
        async with keiro.Engine(url, worker=False) as client:
            before = await workload.recorded(client)
        missing = set(workload.notes(folder, "acknowledged")) - set(before)
        assert not missing, f"acknowledged starts are lost: {missing}"
        effects = len(workload.notes(folder, "effects"))
        async with engine_at(url) as engine:
            await workload.start_all(engine)
            await workload.check_ended(engine)
        for line in workload.notes(folder, "effects")[effects:]:
            _, run_id, name = line.split(" ", 2)
            assert name not in before.get(run_id, ()), f"{line!r} ran again though it was recorded"

    code = forks.run(crashing)
    # Whether a wait is entered at all depends on timing, so the last boundaries may not be reached again.
    assert code in (-signal.SIGKILL, 0), f"boundary {at}: exit {code}"
    assert forks.run(recovering) == 0, f"recovery after boundary {at} failed"


def forget(url: str) -> None:
    """Remove all runs, as retention does, so that the next round starts its own."""

    async def wipe() -> None:
        if url.startswith("sqlite"):
            import sqlite3

            with sqlite3.connect(url.removeprefix("sqlite:///")) as conn:
                conn.execute("DELETE FROM keiro_runs")
                conn.execute("DELETE FROM keiro_workers")
            conn.close()
        else:
            import psycopg

            with psycopg.connect(url) as conn:
                conn.execute("DELETE FROM keiro.keiro_runs")
                conn.execute("DELETE FROM keiro.keiro_workers")

    assert forks.run(wipe) == 0
