"""Worker processes killed at random under load; the server's connections and the server itself too."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import keiro
from keiro.decisions import Stored
from keiro.errors import StoreError
from keiro.testing.postgres import PostgresServer
from tests.crash import workload

pytestmark = pytest.mark.crash

RUNS = 150
STEPS = 8


class Crew:
    """Worker processes on one store."""

    def __init__(self, url: str, folder: Path) -> None:
        self._command = [sys.executable, "-m", "tests.crash.worker", url, str(folder)]
        self._workers: list[subprocess.Popen[bytes]] = []

    def hire(self, n: int) -> None:
        self._workers += [subprocess.Popen(self._command) for _ in range(n)]

    def check(self) -> None:
        """Fail where one has ended by itself: nobody would ever hear of it."""
        assert {worker.poll() for worker in self._workers} == {None}

    def kill_one(self) -> None:
        victim = self._workers.pop(random.randrange(len(self._workers)))
        victim.send_signal(signal.SIGKILL)
        victim.wait()

    def dismiss(self) -> None:
        """Tell all to stop: each drains and exits, or was not yet so far as to hear it."""
        for worker in self._workers:
            worker.terminate()
        assert {worker.wait(30) for worker in self._workers} <= {0, -signal.SIGTERM}

    def kill_all(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.wait()


class Tail:
    """Reads the journal by position the whole time, as a projection in another process would."""

    def __init__(self) -> None:
        self.events: list[Stored] = []

    @asynccontextmanager
    async def reading(self, engine: keiro.Engine) -> AsyncIterator[None]:
        task = asyncio.create_task(self._read(engine))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _read(self, engine: keiro.Engine) -> None:
        while True:
            try:
                await self.catch_up(engine)
            except StoreError:
                pass
            await asyncio.sleep(0.001)

    async def catch_up(self, engine: keiro.Engine) -> None:
        while page := await engine.store.read(self.events[-1].position if self.events else 0, 500):
            self.events += page


async def start_runs(engine: keiro.Engine) -> list[keiro.Handle]:
    handles = []
    for n in range(RUNS):
        while True:
            try:
                handles.append(await engine.start(workload.chain, STEPS, id=str(n)))
                break
            except StoreError:
                # Not acknowledged: started again, under the same id, which is safe whatever became of it.
                await asyncio.sleep(0.05)
    return handles


async def check(engine: keiro.Engine, tail: Tail, folder: Path) -> None:
    """Every run ended with its result; nothing was recorded twice; no step began after its record was committed; a
    reader by position saw every event, in the order of each run's versions."""
    stored = await workload.all_events(engine)
    await tail.catch_up(engine)
    assert [e.position for e in tail.events] == [e.position for e in stored]
    by_run: dict[str, list[Stored]] = {}
    for event in tail.events:
        by_run.setdefault(event.run_id, []).append(event)
    assert len(by_run) == RUNS
    for run_id, events in by_run.items():
        assert [e.version for e in events] == list(range(1, STEPS + 3)), run_id
        assert Counter(e.topic for e in events) == {
            "WorkflowStarted": 1,
            "StepRecorded": STEPS,
            "WorkflowCompleted": 1,
        }
        run = await engine.handle(run_id).run()
        assert (run.status, run.result_json) == ("completed", str(STEPS))


async def wait_all(engine: keiro.Engine, handles: list[keiro.Handle], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        for handle in handles:
            while True:
                try:
                    assert await handle.result() == STEPS
                    break
                except StoreError:
                    await asyncio.sleep(0.05)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_workers_killed_under_load_lose_nothing(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Field reports dbos#742, dbos#453, procrastinate#1518: kill node A, node B finishes, with no manual call."""
    url = f"sqlite:///{tmp_path}/keiro.db" if kind == "sqlite" else request.getfixturevalue("postgres_url")
    seconds = request.config.getoption("--soak") or 4
    crew, tail = Crew(url, tmp_path), Tail()
    async with keiro.Engine(url, worker=False, migrate=True) as client:
        try:
            async with tail.reading(client):
                crew.hire(3)
                handles = await start_runs(client)
                until = time.monotonic() + seconds
                while time.monotonic() < until:
                    await asyncio.sleep(random.uniform(0.1, 0.6))
                    crew.kill_one()
                    crew.hire(1)
                await wait_all(client, handles, 120)
            crew.dismiss()
        finally:
            crew.kill_all()
        await check(client, tail, tmp_path)
        repeats = Counter(line.rsplit(" ", 1)[0].split(" ", 1)[1] for line in workload.notes(tmp_path, "effects"))
        assert len(repeats) == RUNS * STEPS
        assert await client.store.adopt_orphans() is False


async def test_a_server_that_drops_connections_and_restarts_loses_nothing(
    restartable_postgres: PostgresServer, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Field reports dbos#139, pgqueuer#224, wolverine#2602: the engine recovers by itself, in every process."""
    server = restartable_postgres
    url = server.url()
    seconds = request.config.getoption("--soak") or 4
    crew, tail = Crew(url, tmp_path), Tail()
    async with keiro.Engine(url, worker=False, migrate=True) as client:
        try:
            async with tail.reading(client):
                crew.hire(2)
                # An engine that is opening tells its caller that the server is gone; one that is open waits for it.
                while len(workload.notes(tmp_path, "workers")) < 2:
                    crew.check()
                    await asyncio.sleep(0.01)
                starting = asyncio.create_task(start_runs(client))
                until = time.monotonic() + seconds
                while time.monotonic() < until:
                    await asyncio.sleep(random.uniform(0.05, 0.3))
                    server.terminate_backends()
                server.restart(immediate=True)
                handles = await starting
                await asyncio.sleep(0.2)
                server.restart(immediate=True)
                await wait_all(client, handles, 120)
            crew.dismiss()
        finally:
            crew.kill_all()
        await check(client, tail, tmp_path)
        repeats = Counter(line.rsplit(" ", 1)[0].split(" ", 1)[1] for line in workload.notes(tmp_path, "effects"))
        assert set(repeats.values()) == {1}, "no process died, so no step may have run twice"
