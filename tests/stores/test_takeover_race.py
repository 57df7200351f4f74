"""An append of the old owner that is under way while the run is taken over: refused, whatever its snapshot says."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

import keiro
from keiro.decisions import Append, FenceLost, New, new
from keiro.events import StepRecorded, WorkflowCompleted
from keiro.identity import StepIds
from keiro.projections.runs import project
from keiro.stores.postgres import FEW, LOCK_KEY


@keiro.workflow
async def taken(run: keiro.WorkflowRun) -> None:
    await asyncio.Event().wait()


async def owned_append(engine: keiro.Engine, handle: keiro.Handle, shape: str) -> list[Append]:
    """What the owner would send in one tick: a step, an end, a few steps, or so many that they go as arrays."""
    found = await engine.store.head(handle.run_id)
    assert found is not None
    run, head = found
    assert head.owner is not None

    def append(one: New, expected: int, row: Any = None) -> Append:
        return Append(run.run_id, (one,), engine.wall_ms(), run.run_key, head.owner, head.epoch, expected, row)

    def step(name: str) -> New:
        return new(StepRecorded(step=name, result=msgspec.Raw(b"1")), StepIds("taken", "a", 0)(name))

    match shape:
        case "step":
            return [append(step("x"), head.version)]
        case "end":
            ended = WorkflowCompleted(result=msgspec.Raw(b"null"))
            one = new(ended, StepIds("taken", "a", 0)("__workflow_completed__"))
            return [append(one, head.version, project(run, ended, engine.wall_ms()))]
        case _:
            many = FEW + 1 if shape == "batch" else 2
            return [append(step(f"s{n}"), head.version + n) for n in range(many)]


@pytest.mark.parametrize("shape", ["step", "end", "few", "batch"])
async def test_postgres_refuses_an_append_that_waited_while_its_run_was_taken(postgres_url: str, shape: str) -> None:
    """A statement takes its snapshot before the lock is granted, so the fence must not be read in it."""
    async with keiro.Engine(postgres_url, workflows=[taken], migrate=True, grace=0) as engine:
        handle = await engine.start(taken, id="a")
        commands = await owned_append(engine, handle, shape)
        with psycopg.connect(postgres_url) as thief, psycopg.connect(postgres_url, autocommit=True) as watcher:
            thief.execute("SELECT pg_advisory_xact_lock(%s)", (LOCK_KEY,))
            under_way = [engine.store.submit(command) for command in commands]
            waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            while watcher.execute(waiting).fetchone() != (1,):
                await asyncio.sleep(0.001)
            thief.execute("UPDATE keiro.keiro_run_heads SET owner = owner + 1, epoch = epoch + 1")
            thief.commit()
            assert await asyncio.gather(*under_way) == [FenceLost()] * len(commands)
        assert [type(event).__name__ async for event in handle.events()] == ["WorkflowStarted"]
        assert await handle.status() == "running"


@pytest.mark.parametrize("shape", ["step", "end", "few", "batch"])
async def test_sqlite_refuses_an_append_that_waited_while_its_run_was_taken(tmp_path: Path, shape: str) -> None:
    path = tmp_path / "keiro.db"
    async with keiro.Engine(f"sqlite:///{path}", workflows=[taken], grace=0) as engine:
        handle = await engine.start(taken, id="a")
        commands = await owned_append(engine, handle, shape)
        thief = sqlite3.connect(path, isolation_level=None)
        thief.execute("BEGIN IMMEDIATE")
        under_way = [engine.store.submit(command) for command in commands]
        for _ in range(20):
            await asyncio.sleep(0)
        assert not any(one.done() for one in under_way)
        thief.execute("UPDATE keiro_run_heads SET owner = owner + 1, epoch = epoch + 1")
        thief.execute("COMMIT")
        thief.close()
        assert await asyncio.gather(*under_way) == [FenceLost()] * len(commands)
        assert [type(event).__name__ async for event in handle.events()] == ["WorkflowStarted"]
