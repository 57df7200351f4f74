"""SIGKILL at every write boundary of a collection: each run is whole or gone or has lost old rounds only, and the next
collection goes on."""

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


@keiro.workflow
async def turns(run: keiro.WorkflowRun, n: int, until: int) -> str:
    """A child that goes on from round 0 on, and one that ends in each of many rounds; the last one waits."""
    if n == 0:
        await run.spawn(waits, id=f"{run.key}-waits")
    await run.call(leaf, n, id=f"{run.key}-{n}")
    if n < until:
        run.continue_as_new(n + 1, until)
    child = await run.spawn(waits, id=f"{run.key}-waits")
    return str(await child.result())


@keiro.workflow
async def waits(run: keiro.WorkflowRun) -> str:
    return str(await run.deferred("said").result())


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
        ended = forks.run(collecting(at))
        # How many boundaries there are differs, with how often the runs were parked.
        assert ended == -signal.SIGKILL or (ended == 0 and at > boundaries // 2), f"boundary {at}"
        assert forks.run(rest) == 0, f"after boundary {at}"


LONG = 11
KEYS = ("ends", "lives", "other")


def test_a_kill_at_any_boundary_leaves_a_run_of_many_rounds_that_goes_on(url: str, tmp_path: Path) -> None:
    """U22, WF-153: one has ended and two have not; each can be asked for as if no round had gone, and goes to its
    end; its key is taken until then. The next collection goes on where the kill was."""
    workload.use_log(tmp_path)

    async def filled() -> None:
        async with keiro.Engine(url, workflows=[turns, waits, leaf], migrate=True) as engine:
            handles = [await engine.start(turns, 0, LONG, id=key) for key in KEYS]
            for key, _handle in zip(KEYS, handles, strict=True):
                while await engine.store.run(f"wf:leaf-{key}-{LONG}") is None:
                    await asyncio.sleep(0.002)
                await engine.handle(f"wf:leaf-{key}-{LONG}").result(30)
            await engine.complete("wf:waits-ends-waits", "said", "ended")
            assert await handles[0].result(30) == "ended"

    def collecting(at: int) -> forks.Program:
        async def program() -> None:
            in_small_parts()
            engine = keiro.Engine(url, worker=False)
            points = CrashPoints(engine, 0)
            async with engine:
                points.passed, points.at = 0, at  # opening is not what is killed here
                await engine.gc(older_than=0)
                workload.note("long", str(points.passed))

        return program

    async def rest() -> None:
        async with keiro.Engine(url, workflows=[turns, waits, leaf]) as engine:
            assert await engine.reconcile() == []
            assert (await engine.rebuild("runs")).differences == 0
            for run in await engine.runs(limit=1000):
                versions = [row.version for row in (await engine.store.history([run.run_key]))[run.run_key]]
                assert versions and versions == list(range(1, len(versions) + 1))
            for key in KEYS[1:]:
                again = await engine.start(turns, 0, LONG, id=key)
                assert (await again.run()).round_ordinal == LONG
                await engine.complete(f"wf:waits-{key}-waits", "said", key)
                assert await again.result(30) == key
            if await engine.store.run("wf:turns-ends") is not None:
                assert await engine.handle("wf:turns-ends").result(30) == "ended"
            found = await engine.gc(older_than=0)
            assert found.failed == () and found.scanned == len(found.collected) and found.shortened == ()
            assert rows_left(engine) == {}

    assert forks.run(filled) == 0
    assert forks.run(collecting(0)) == 0
    assert forks.run(rest) == 0
    boundaries = int(workload.notes(tmp_path, "long")[0])
    assert boundaries > 30
    for at in range(1, boundaries, max(1, boundaries // 12)):
        assert forks.run(filled) == 0
        ended = forks.run(collecting(at))
        # How many boundaries there are differs, with how often the runs were parked.
        assert ended == -signal.SIGKILL or (ended == 0 and at > boundaries // 2), f"boundary {at}"
        assert forks.run(rest) == 0, f"after boundary {at}"
