"""keiro itself, used through its public API as any application uses it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sqlite3
import uuid
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


class Keiro(Contestant):
    """An engine as shipped; `sqlite-normal` asks for it by durability="normal"."""

    async def prepare(self, place: Place) -> None:
        # On Postgres an engine only verifies the schema, unless told otherwise.
        if place.store == "postgres":
            ensure_postgres(place.at)

    async def open(self, place: Place) -> None:
        options: dict[str, Any] = {"durability": "normal"} if place.store == "sqlite-normal" else {}
        self._engine = keiro.Engine(place.url, workflows=[_steps, _bodies, _held], **options)
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
