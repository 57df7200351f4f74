"""SIGKILL at every write boundary of a collection: each run is whole or gone, and the next collection ends it."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

import keiro
import keiro.retention
from keiro.testing.crash import CrashPoints
from tests.conformance.retained import rows_left
from tests.crash import forks, workload

pytestmark = pytest.mark.crash


@keiro.workflow
async def leaf(run: keiro.WorkflowRun, n: int) -> int:
    await run.sleep(0.001)
    return n


@keiro.workflow
async def tree(run: keiro.WorkflowRun, n: int) -> int:
    """A child in each of five rounds."""
    await run.call(leaf, n, id=f"{run.key}-{n}")
    if n:
        run.continue_as_new(n - 1)
    return n


EVERY = {*(f"wf:tree-{n}" for n in range(3)), *(f"wf:leaf-{n}-{k}" for n in range(3) for k in range(5))}


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/keiro.db"
    found: str = request.getfixturevalue("postgres_url")
    return found


def in_small_parts() -> None:
    keiro.retention.AT_ONCE = 4  # type: ignore[misc]


async def filled(url: str) -> None:
    async with keiro.Engine(url, workflows=[tree, leaf], migrate=True) as engine:
        await asyncio.gather(*(engine.execute(tree, 4, id=str(n)) for n in range(3)))


def test_a_kill_at_any_boundary_of_a_collection_is_made_whole_by_the_next(url: str, tmp_path: Path) -> None:
    """WF-153, CH-65: partial cleanup converges; what is left is whole and can be read, and then nothing is left."""
    workload.use_log(tmp_path)

    def collecting(at: int) -> forks.Program:
        async def program() -> None:
            in_small_parts()
            engine = keiro.Engine(url, worker=False)
            points = CrashPoints(engine, 0)
            async with engine:
                points.passed, points.at = 0, at  # opening is not what is killed here
                await engine.gc(older_than=0)
                workload.note("boundaries", str(points.passed))

        return program

    async def rest() -> None:
        async with keiro.Engine(url, worker=False) as engine:
            for run in await engine.runs(limit=1000):
                versions = [row.version for row in (await engine.store.history([run.run_key]))[run.run_key]]
                assert versions and versions == list(range(1, len(versions) + 1))
            for name in sorted(EVERY):
                if await engine.store.run(name) is not None:
                    await engine.handle(name).result(30)
            found = await engine.gc(older_than=0)
            assert found.failed == () and found.scanned == len(found.collected)
            assert rows_left(engine) == {}

    assert forks.run(lambda: filled(url)) == 0
    assert forks.run(collecting(0)) == 0
    assert forks.run(rest) == 0
    boundaries = int(workload.notes(tmp_path, "boundaries")[0])
    assert boundaries > 15
    for at in range(1, boundaries, max(1, boundaries // 12)):
        assert forks.run(lambda: filled(url)) == 0
        assert forks.run(collecting(at)) == -signal.SIGKILL, f"boundary {at}"
        assert forks.run(rest) == 0, f"after boundary {at}"
