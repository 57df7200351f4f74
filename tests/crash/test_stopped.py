"""Worker processes that are stopped past their lease, and ones whose clocks are minutes apart."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import keiro
from keiro.events import StateChanged, StepRecorded, ms_of
from keiro.stores.base import WorkerRow
from tests.crash import skewed

pytestmark = pytest.mark.crash

LIMIT_S = 60
Hire = Callable[[str, float], subprocess.Popen[bytes]]


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/keiro.db"
    found: str = request.getfixturevalue("postgres_url")
    return found


@pytest.fixture
def hire(url: str, tmp_path: Path) -> Iterator[Hire]:
    """Starts worker processes by name, with clocks that many seconds fast; all are gone in the end."""
    hired: list[subprocess.Popen[bytes]] = []

    def start(name: str, skew: float = 0.0) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.crash.skewed", url, str(tmp_path), name, str(skew)]
        hired.append(subprocess.Popen(command))
        return hired[-1]

    yield start
    for process in hired:
        process.kill()
        process.wait()


def effects(folder: Path) -> list[str]:
    found = folder / "effects"
    return found.read_text().splitlines() if found.exists() else []


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.01)


def end_lease(url: str, worker: WorkerRow) -> None:
    """As if thirty seconds had gone by since its last renewal."""
    if url.startswith("sqlite"):
        with sqlite3.connect(url.removeprefix("sqlite:///")) as connection:
            sql = "UPDATE keiro_workers SET lease_expires_at_ms = 1 WHERE worker_key = ?"
            connection.execute(sql, (worker.worker_key,))
    else:
        import psycopg

        with psycopg.connect(url) as server:
            server.execute(
                "UPDATE keiro.keiro_workers SET lease_expires_at_ms = 1 WHERE worker_key = %s", (worker.worker_key,)
            )


async def test_a_worker_that_was_stopped_past_its_lease_writes_nothing_more(
    url: str, hire: Hire, tmp_path: Path
) -> None:
    """SIGSTOP in the middle of a step, takeover, SIGCONT: what it writes is refused, it begins no effect of a run that
    is another's, and goes on as a new worker."""
    async with keiro.Engine(url, workflows=skewed.WORKFLOWS, worker=False, migrate=True) as client:
        stopped = hire("one", 0.0)
        await until(lambda: "one is ready" in effects(tmp_path))
        handle = await client.start(skewed.held, id="a")
        await until(lambda: "one a holds" in effects(tmp_path))
        stopped.send_signal(signal.SIGSTOP)
        [worker] = [row for row in await client.store.workers() if row.pid == stopped.pid]
        end_lease(url, worker)

        heir = hire("two", 0.0)
        await until(lambda: "two a holds" in effects(tmp_path))
        (tmp_path / "go").touch()
        await client.complete("wf:kid-a-kid", "word", "yes")
        assert await handle.result(LIMIT_S) == ["yes", "done"]
        recorded = [event async for event in handle.events()]

        stopped.send_signal(signal.SIGCONT)
        await until(lambda: "driven by another worker" in (tmp_path / "one.log").read_text())
        assert [event async for event in handle.events()] == recorded
        assert effects(tmp_path) == [
            "one is ready", "one a begins", "one a holds", "two is ready", "two a holds", "two a ends"
        ]  # fmt: skip

        heir.terminate()
        assert heir.wait(LIMIT_S) == 0
        again = await client.start(skewed.held, id="b")
        await until(lambda: "one b holds" in effects(tmp_path))
        await client.complete("wf:kid-b-kid", "word", "again")
        assert await again.result(LIMIT_S) == ["again", "done"]


async def test_clocks_that_are_minutes_apart_change_nothing_on_postgres(postgres_url: str, tmp_path: Path) -> None:
    """U18: sleeps, timeouts, pauses, delays and leases are told by the database's clock, whatever the processes say."""
    hired = []
    async with keiro.Engine(postgres_url, workflows=skewed.WORKFLOWS, worker=False, migrate=True) as client:
        try:
            for name, skew in (("fast", 120.0), ("slow", -120.0)):
                command = [sys.executable, "-m", "tests.crash.skewed", postgres_url, str(tmp_path), name, str(skew)]
                hired.append(subprocess.Popen(command))
            await until(lambda: {"fast is ready", "slow is ready"} <= set(effects(tmp_path)))
            began = client.store.now_ms()
            holding = [await client.start(skewed.held, id=f"h{n}") for n in range(4)]
            timed = [await client.start(skewed.timed, id=f"t{n}", delay=0.2 * (n % 2)) for n in range(20)]
            for handle in timed:
                assert await handle.result(LIMIT_S) == "done"
            for n in range(len(holding)):
                await client.complete(f"wf:kid-h{n}-kid", "word", "yes")
            (tmp_path / "go").touch()
            for handle in holding:
                assert await handle.result(LIMIT_S) == ["yes", "done"]
            ended = client.store.now_ms()

            # Nobody took a living worker for dead, or it would have held again.
            counted = effects(tmp_path)
            assert all(sum(line.endswith(f"h{n} holds") for line in counted) == 1 for n in range(4))
            assert {line.split()[0] for line in counted} == {"fast", "slow"}
            for handle in timed:
                events = [event async for event in handle.events()]
                assert all(began <= ms_of(event.timestamp) <= ended for event in events)
                dues = {
                    wait.step: wait.due_at_ms
                    for event in events
                    if isinstance(event, StateChanged) and event.state == "clock_scheduled"
                    for wait in event.waits
                }
                fired = {event.step: ms_of(event.timestamp) for event in events if isinstance(event, StepRecorded)}
                assert set(dues) == {"sleep:sleep", "timeout:awk:never"}
                assert all(fired[step] >= (due or 0) for step, due in dues.items())
        finally:
            for process in hired:
                process.kill()
                process.wait()
