"""keiro itself, used through its public API as any application uses it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sqlite3
import time
import uuid
from datetime import UTC, datetime
from typing import Any

import psycopg

import keiro
from benchmarks.contestant import GATE, Contestant, Place, body_seconds
from keiro import WorkflowRun
from keiro.stores.migrate import ensure_postgres


async def _step(index: int) -> int:
    return index


async def _waiting_step(index: int) -> int:
    await asyncio.sleep(body_seconds(index))
    return index


async def _hold() -> int:
    return await GATE()


@keiro.workflow(name="bench.steps")
async def _steps(run: WorkflowRun, steps: int) -> int:
    for index in range(steps):
        await run.step(_step, index)
    return steps


@keiro.workflow(name="bench.bodies")
async def _bodies(run: WorkflowRun, steps: int) -> int:
    for index in range(steps):
        await run.step(_waiting_step, index)
    return steps


@keiro.workflow(name="bench.held")
async def _held(run: WorkflowRun, steps: int) -> int:
    for index in range(steps):
        await run.step(_step, index)
    return await run.step(_hold)


_WENT_ON: dict[str, float] = {}


async def _go_on(key: str) -> None:
    _WENT_ON[key] = time.perf_counter()


@keiro.workflow(name="bench.waits")
async def _waits(run: WorkflowRun) -> None:
    await run.deferred("go").result()
    await run.step(_go_on, run.key)


@keiro.workflow(name="bench.family")
async def _family(run: WorkflowRun, children: int) -> int:
    spawned = await asyncio.gather(*(run.spawn(_steps, 1, id=f"{run.key}-{n}") for n in range(children)))
    return sum(await asyncio.gather(*(child.result() for child in spawned)))


@keiro.workflow(name="bench.sleeps")
async def _sleeps(run: WorkflowRun, due_ms: int) -> None:
    await run.sleep_until(datetime.fromtimestamp(due_ms / 1000, UTC))


_WORKFLOWS = [_steps, _bodies, _held, _waits, _family, _sleeps]


class Keiro(Contestant):
    """An engine as shipped; `sqlite-normal` asks for it by durability="normal"."""

    async def prepare(self, place: Place) -> None:
        # On Postgres an engine only verifies the schema, unless told otherwise.
        if place.store == "postgres":
            ensure_postgres(place.at)

    async def open(self, place: Place) -> None:
        options: dict[str, Any] = {"durability": "normal"} if place.store == "sqlite-normal" else {}
        await self._open(place, options)

    async def open_client(self, place: Place) -> None:
        await self._open(place, {"worker": False})

    async def _open(self, place: Place, options: dict[str, Any]) -> None:
        self._engine = keiro.Engine(place.url, workflows=_WORKFLOWS, **options)
        await self._engine.__aenter__()
        # New keys at each open: starting a key that exists does nothing, which is quick.
        opened = uuid.uuid4().hex[:8]
        self._keys = (f"{opened}-{number}" for number in itertools.count())
        self._place = place

    async def close(self) -> None:
        await self._engine.__aexit__(None, None, None)

    async def run_one(self, steps: int) -> None:
        handle = await self._engine.start(_steps, steps, id=f"one-{next(self._keys)}")
        await handle.result()

    async def run_many(self, runs: int, steps: int, bodies: bool) -> None:
        workflow = _bodies if bodies else _steps
        handles = await asyncio.gather(
            *(self._engine.start(workflow, steps, id=f"many-{next(self._keys)}") for _ in range(runs))
        )
        await asyncio.gather(*(handle.result() for handle in handles))

    async def enqueue(self, runs: int) -> None:
        handles = [await self._engine.start(_steps, 1, id=f"queued-{next(self._keys)}") for _ in range(runs)]
        for handle in handles:
            await handle.result()

    async def fill_finished(self, place: Place, runs: int) -> None:
        await self.prepare(place)
        await self.open(place)
        await self.run_one(1)
        await self.close()
        _multiply(place, runs)

    async def begin_waits(self, runs: int) -> None:
        _WENT_ON.clear()
        handles = await self._engine.start_many(_waits, [()] * runs, ids=[f"waits-{n}" for n in range(runs)])
        for handle in handles:
            while await handle.status() != "suspended":
                await asyncio.sleep(0.01)

    async def complete_waits(self, runs: int, in_turn: bool) -> list[float]:
        given = []
        for number in range(runs):
            run_id = f"wf:bench.waits-waits-{number}"
            given.append(time.perf_counter())
            await self._engine.complete(run_id, "go", None)
            if in_turn:
                await self._engine.handle(run_id).result()
            else:
                await asyncio.sleep(0.02)
        return given

    async def end_waits(self, runs: int) -> list[float]:
        for number in range(runs):
            await self._engine.handle(f"wf:bench.waits-waits-{number}").result()
        return [_WENT_ON[f"waits-{number}"] for number in range(runs)]

    async def family(self, children: int) -> None:
        handle = await self._engine.start(_family, children, id=f"family-{next(self._keys)}")
        assert await handle.result() == children

    async def clocks(self, runs: int, seconds: float) -> float:
        due = time.time() + seconds
        handles = await self._engine.start_many(_sleeps, [round(due * 1000)] * runs)
        for handle in handles:
            while await handle.status() != "suspended":
                await asyncio.sleep(0.01)
        assert time.time() < due, "not all were parked before they were due"
        await asyncio.sleep(due - time.time())
        # Another thread looks: what is asked here would wait for what is measured.
        fired_at = await asyncio.to_thread(_all_fired, self._place)
        await asyncio.gather(*(handle.result() for handle in handles))
        return fired_at - due

    async def fill_parked(self, place: Place, runs: int) -> None:
        await self.prepare(place)
        await self.open(place)
        await self.begin_waits(1)
        await self.close()
        _multiply(place, runs)

    async def begin_held(self, runs: int, steps: int) -> None:
        # Not all at once: what so many starts under way take for a moment is no memory of resident runs.
        for first in range(0, runs, 50):
            numbers = range(first, min(first + 50, runs))
            await asyncio.gather(*(self._engine.start(_held, steps, id=f"held-{number}") for number in numbers))
        await GATE.all_arrived()

    async def finish_held(self, runs: int) -> None:
        handles = [self._engine.handle(f"wf:bench.held-held-{number}") for number in range(runs)]
        await asyncio.gather(*(handle.result() for handle in handles))

    async def reach_gate(self, runs: int) -> float:
        await GATE.all_arrived()
        return 0.0


def _all_fired(place: Place) -> float:
    """When no clock is open any more, looked at each hundredth of a second."""
    count = "SELECT count(*) FROM {} WHERE completed_at_ms IS NULL"
    with contextlib.ExitStack() as stack:
        if place.is_sqlite:
            connection = stack.enter_context(contextlib.closing(sqlite3.connect(place.at)))
            statement = count.format("keiro_clock_deadlines")
            while connection.execute(statement).fetchone() != (0,):
                time.sleep(0.01)
        else:
            server = stack.enter_context(psycopg.connect(place.at, autocommit=True))
            on_server = count.format("keiro.keiro_clock_deadlines").encode()
            while server.execute(on_server).fetchone() != (0,):
                time.sleep(0.01)
    return time.time()


def _multiply(place: Place, runs: int) -> None:
    """Copy the one finished run of a database `runs` times, in every table that has rows of it."""
    if place.is_sqlite:
        with contextlib.closing(sqlite3.connect(place.at)) as connection, connection:
            tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            for table in _ordered(tables):
                columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
                connection.execute(_SQLITE_COPY.format(runs=runs, **_copied(table, columns, "randomblob(16)")))
    else:
        with psycopg.connect(place.at, autocommit=True) as server:
            found = server.execute("SELECT table_name FROM information_schema.tables WHERE table_schema = 'keiro'")
            for table in _ordered([name for (name,) in found]):
                query = (
                    "SELECT column_name FROM information_schema.columns WHERE table_schema = 'keiro'"
                    " AND table_name = %s AND is_generated = 'NEVER' ORDER BY ordinal_position"
                )
                columns = [name for (name,) in server.execute(query, [table])]
                copied = _copied(table, columns, "md5(i::text || t.event_id::text)::uuid")
                server.execute(_POSTGRES_COPY.format(runs=runs, **copied).encode())
            server.execute("SELECT setval(pg_get_serial_sequence('keiro.keiro_runs', 'run_key'), %s)", [runs + 10])
            server.execute("VACUUM ANALYZE")


_SQLITE_COPY = (
    "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {runs})"
    " INSERT INTO {table} ({columns}) SELECT {values} FROM n, {table} t"
)
_POSTGRES_COPY = (
    "INSERT INTO keiro.{table} ({columns}) OVERRIDING SYSTEM VALUE"
    " SELECT {values} FROM generate_series(1, {runs}) n(i), keiro.{table} t"
)


def _ordered(tables: list[str]) -> list[str]:
    """The tables that have rows of a finished run, what is referred to first."""
    wanted = ["keiro_runs", "keiro_run_heads", "keiro_journal", "keiro_executions"]
    return [table for table in wanted if table in tables]


def _copied(table: str, columns: list[str], event_id: str) -> dict[str, str]:
    replaced = {
        "run_key": "t.run_key + i",
        "run_id": "t.run_id || '-' || i",
        "lineage_id": "t.lineage_id || '-' || i",
        "key": "t.key || '-' || i",
        "event_id": event_id,
    }
    kept = [column for column in columns if column != "position"]
    values = [replaced.get(column, f"t.{column}") for column in kept]
    return {"table": table, "columns": ", ".join(kept), "values": ", ".join(values)}
