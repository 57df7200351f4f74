"""DBOS, as shipped and tuned.

The library keeps one instance for the process and registers workflows when they are decorated, so the
workflows are module level and an instance is launched and destroyed for every place.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import sqlalchemy
from dbos import DBOS, DBOSConfig

from benchmarks.contestant import GATE, Contestant, Place, body_seconds

_QUEUE = "bench"
_bodies = False
_first_body_at = 0.0


@DBOS.step()
async def _step(index: int) -> int:
    if _bodies:
        await asyncio.sleep(body_seconds(index))
    return index


@DBOS.step()
async def _hold() -> int:
    return await GATE()


@DBOS.workflow()
async def _steps(steps: int) -> int:
    for index in range(steps):
        await _step(index)
    return steps


@DBOS.workflow()
async def _held(steps: int) -> int:
    global _first_body_at
    _first_body_at = _first_body_at or time.perf_counter()
    for index in range(steps):
        await _step(index)
    return await _hold()


@DBOS.step()
def _sync_step(index: int) -> int:
    if _bodies:
        time.sleep(body_seconds(index))
    return index


@DBOS.workflow()
def _sync_steps(steps: int) -> int:
    for index in range(steps):
        _sync_step(index)
    return steps


class DbosShipped(Contestant):
    """The asynchronous API with the configuration that the documentation's first page gives."""

    async def open(self, place: Place) -> None:
        config = DBOSConfig(name="bench-app", system_database_url=place.url, log_level="ERROR")
        self._configure(config, place)
        DBOS(config=config)
        DBOS.launch()
        self._place = place
        self._engine = config.get("system_database_engine")
        self._queue: Any = None

    def _configure(self, config: DBOSConfig, place: Place) -> None:
        """Nothing: as shipped."""

    async def close(self) -> None:
        await asyncio.to_thread(DBOS.destroy)
        if self._engine is not None:
            self._engine.dispose()

    async def run_one(self, steps: int) -> None:
        await _steps(steps)

    async def run_many(self, runs: int, steps: int, bodies: bool) -> None:
        _set_bodies(bodies)
        await asyncio.gather(*(_steps(steps) for _ in range(runs)))

    async def enqueue(self, runs: int) -> None:
        if self._queue is None:
            self._queue = await DBOS.register_queue_async(_QUEUE)
        handles = [await self._queue.enqueue_async(_steps, 1) for _ in range(runs)]
        await asyncio.gather(*(handle.get_result() for handle in handles))

    async def begin_held(self, runs: int, steps: int) -> None:
        for _ in range(runs):
            await DBOS.start_workflow_async(_held, steps)
        await GATE.all_arrived()

    async def finish_held(self, runs: int) -> None:
        await GATE.all_arrived()
        while await DBOS.list_workflows_async(status=["PENDING", "ENQUEUED"], load_input=False, limit=1):
            await asyncio.sleep(0.005)

    async def reach_gate(self, runs: int) -> float:
        began = time.perf_counter()
        await GATE.all_arrived()
        # The run lay in the queue until a poll took it; only what follows its first line is replay.
        return _first_body_at - began


class DbosTuned(DbosShipped):
    """The synchronous API, which is the faster one, and the settings that its configuration offers."""

    def _configure(self, config: DBOSConfig, place: Place) -> None:
        if place.is_sqlite:
            config["system_database_engine"] = _wal_engine(place)
        else:
            config["sys_db_pool_size"] = 50
            config["db_engine_kwargs"] = {"pool_pre_ping": False}

    async def run_one(self, steps: int) -> None:
        await asyncio.to_thread(_sync_steps, steps)

    async def run_many(self, runs: int, steps: int, bodies: bool) -> None:
        _set_bodies(bodies)
        await asyncio.to_thread(_start_and_wait, runs, steps)

    async def enqueue(self, runs: int) -> None:
        await asyncio.to_thread(_start_and_wait, runs, 1)


def _start_and_wait(runs: int, steps: int) -> None:
    handles = [DBOS.start_workflow(_sync_steps, steps) for _ in range(runs)]
    for handle in handles:
        handle.get_result()


def _wal_engine(place: Place) -> sqlalchemy.Engine:
    """What the library's own engine does on connecting, and WAL with the place's durability besides."""
    engine = sqlalchemy.create_engine(place.url, pool_size=20, max_overflow=0)
    synchronous = "FULL" if place.store == "sqlite-full" else "NORMAL"

    @sqlalchemy.event.listens_for(engine, "connect")
    def connected(connection: Any, _record: Any) -> None:
        connection.isolation_level = "IMMEDIATE"
        connection.execute("PRAGMA busy_timeout=30000")
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={synchronous}")

    return engine


def _set_bodies(bodies: bool) -> None:
    global _bodies
    _bodies = bodies
