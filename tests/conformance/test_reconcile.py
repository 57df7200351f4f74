"""The sweep over runs: damage that is made by hand is found, left alone, and mended when that is asked for."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import Any

import psycopg
import pytest
from msgspec.structs import replace

import keiro
from keiro.rows import Status
from keiro.stores.memory import MemoryStore
from tests.conformance.parking import evicted
from tests.conformance.test_steps import note
from tests.conftest import MakeEngine


@keiro.workflow
async def waiting(run: keiro.WorkflowRun) -> list[bool]:
    first = await run.deferred("first", bool).result()
    return [first, await run.deferred("second", bool).result(timeout=3600)]


@keiro.workflow
async def busy(run: keiro.WorkflowRun) -> int:
    for n in range(3):
        await run.step(note, n)
        await run.sleep(0.01)
    return 3


async def damage(engine: keiro.Engine, url: str, sql: str, by_hand: Callable[[Any], None]) -> None:
    """Change rows behind the engine's back: with SQL, or in the dicts of the store in memory."""
    if isinstance(engine.store, MemoryStore):
        by_hand(engine.store._db)
    elif url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection:
            connection.execute("PRAGMA foreign_keys = OFF")
            connection.execute(sql)
            connection.commit()
    else:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("SET search_path = keiro")
            connection.execute(sql.encode())


RUN = "wf:waiting-a"


def change_run(**values: Any) -> Callable[[Any], None]:
    return lambda db: db.keep(replace(db.runs[RUN], **values))


def change_head(**values: Any) -> Callable[[Any], None]:
    def change(db: Any) -> None:
        key = db.runs[RUN].run_key
        db.heads[key] = replace(db.heads[key], **values)

    return change


def change_rows(table: str, change: Callable[[dict[Any, Any]], None]) -> Callable[[Any], None]:
    return lambda db: change(db.rows[table])


def complete_all(rows: dict[Any, Any]) -> None:
    for row in rows.values():
        row["completed_at_ms"] = 5


OF_RUN = "(SELECT run_key FROM keiro_runs WHERE run_id = 'wf:waiting-a')"
DAMAGES = {
    "nobody looks at its due wake": (
        "run", "UPDATE keiro_runs SET wake_at_ms = NULL", change_run(wake_at_ms=None)),
    "the row says that it has failed": (
        "run",
        "UPDATE keiro_runs SET status = 'failed', finished_at_ms = 5",
        change_run(status=Status.FAILED, finished_at_ms=5),
    ),
    "head": (
        "head", f"UPDATE keiro_run_heads SET version = version - 1 WHERE run_key = {OF_RUN}",
        lambda db: change_head(version=db.heads[db.runs[RUN].run_key].version - 1)(db)),
    "owner": (
        "owner", f"UPDATE keiro_run_heads SET owner = 987654 WHERE run_key = {OF_RUN}", change_head(owner=987654)),
    "clock is completed": (
        "clock", "UPDATE keiro_clock_deadlines SET completed_at_ms = 5",
        change_rows("keiro_clock_deadlines", complete_all)),
    "clock is missing": (
        "clock", "DELETE FROM keiro_clock_deadlines", change_rows("keiro_clock_deadlines", lambda rows: rows.clear())),
    "deferred is missing": (
        "deferred", "DELETE FROM keiro_deferred_completions",
        change_rows("keiro_deferred_completions", lambda rows: rows.clear())),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGES)
async def test_damage_is_found_and_left_and_mended_when_asked(
    make_engine: MakeEngine, store_url: str, parks_at_once: None, what: str
) -> None:
    kind, sql, by_hand = DAMAGES[what]
    # Given: a run that waits for the second of two deferreds, and rows of it that are wrong.
    async with make_engine(waiting) as engine:
        handle = await engine.start(waiting, id="a")
        await evicted(engine, handle)
        await engine.complete(handle.run_id, "first", True)
        while (run := await handle.run()).waiting_token != "awk:second" and run.wake_at_ms is None:
            await asyncio.sleep(0.002)
        await evicted(engine, handle)
        assert await engine.reconcile() == []
    async with make_engine(worker=False) as client:
        await damage(client, store_url, sql, by_hand)
        # When it only looks: it is found each time, and nothing is changed.
        found = await client.reconcile()
        assert kind in {one.kind for one in found}
        assert {(one.run_id, one.fixed) for one in found} == {(RUN, False)}
        assert await client.reconcile() == found
        # When it mends: the same is found, and nothing is left to find.
        mended = await client.reconcile(fix=True)
        assert mended == [replace(one, fixed=True) for one in found]
        assert await client.reconcile() == []
    # Then: the run goes on to its end.
    async with make_engine(waiting) as engine:
        await engine.complete(RUN, "second", False)
        assert await engine.handle(RUN).result(timeout=30) == [True, False]
        assert await engine.reconcile() == []


@keiro.workflow
async def parent(run: keiro.WorkflowRun) -> list[Any]:
    child = await run.spawn(leaf, id="c")
    await run.deferred("go").result()
    return [await child.status(), await child.result()]


@keiro.workflow
async def leaf(run: keiro.WorkflowRun, round_: int = 0) -> dict[str, int]:
    if round_ < 1:
        run.continue_as_new(round_ + 1)
    return {"b": 1, "a": 2}


def change_child(**values: Any) -> Callable[[Any], None]:
    return lambda db: db.rows["keiro_workflow_children"]["c", "leaf"].update(values)


CHILD_DAMAGES = {
    "still running": (
        "UPDATE keiro_workflow_children SET status = 'running', result = NULL, completed_at = NULL",
        change_child(status="running", result=None, completed_at=None),
    ),
    "failed": (
        "UPDATE keiro_workflow_children SET status = 'failed', failed = true, failure_reason = 'x', result = NULL",
        change_child(status="failed", failed=True, failure_reason="x", result=None),
    ),
    "another result": ("UPDATE keiro_workflow_children SET result = '\"hush\"'", change_child(result='"hush"')),
    "another parent": ("UPDATE keiro_workflow_children SET parent_id = 'b'", change_child(parent_id="b")),
    "missing": (
        "DELETE FROM keiro_workflow_children",
        change_rows("keiro_workflow_children", lambda rows: rows.clear()),
    ),
}


@pytest.mark.parametrize("what", CHILD_DAMAGES)
async def test_the_row_that_a_parent_has_of_a_child_is_held_to_the_child(
    make_engine: MakeEngine, store_url: str, parks_at_once: None, what: str
) -> None:
    sql, by_hand = CHILD_DAMAGES[what]
    async with make_engine(parent, leaf) as engine:
        handle = await engine.start(parent, id="a")
        while await engine.store.run("wf:leaf-c") is None:
            await asyncio.sleep(0.002)
        await engine.handle("wf:leaf-c").result()
        await evicted(engine, handle)
        assert await engine.reconcile() == []
        before = await engine.children.of(handle.run_id)
    async with make_engine(worker=False) as client:
        await damage(client, store_url, sql, by_hand)

        (found,) = await client.reconcile()

        assert (found.kind, found.run_id, found.fixed) == ("child", "wf:leaf-c#1", False)
        assert "hush" not in found.what and "'a'" not in found.what  # what users stored is not shown
        assert await client.reconcile(fix=True) == [replace(found, fixed=True)]
        assert await client.reconcile() == []
        (row,) = await client.children.of(handle.run_id)
        assert replace(row, created_at="", updated_at="", completed_at="") == replace(
            before[0], created_at="", updated_at="", completed_at=""
        )
    async with make_engine(parent, leaf) as engine:
        await engine.complete("wf:parent-a", "go", None)
        assert await engine.handle("wf:parent-a").result(timeout=30) == ["completed", {"b": 1, "a": 2}]


async def test_what_was_under_way_when_it_was_looked_at_is_no_finding(
    make_engine: MakeEngine, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is looked at again under the lock: what was read before may have been written to in between."""
    if store_url.startswith("memory"):
        pytest.skip("one lock is held from the first look on")
    async with make_engine(waiting, worker=False) as engine:
        await engine.start(waiting, id="a")
        kept = engine._read_models.kept
        transact = kept._store.transact  # type: ignore[attr-defined]
        await damage(engine, store_url, "UPDATE keiro_runs SET status = 'failed', finished_at_ms = 5", lambda db: None)

        async def mended_meanwhile(*args: Any, **kwargs: Any) -> Any:
            sql = "UPDATE keiro_runs SET status = 'pending', finished_at_ms = NULL"
            await damage(engine, store_url, sql, lambda db: None)
            return await transact(*args, **kwargs)

        monkeypatch.setattr(kept._store, "transact", mended_meanwhile)  # type: ignore[attr-defined]
        assert await engine.reconcile(fix=True) == []


async def test_nothing_is_found_in_a_store_in_which_others_work(make_engine: MakeEngine, parks_at_once: None) -> None:
    async with make_engine(busy) as one, make_engine(busy) as other:
        handles = [
            await engine.start(busy, id=f"{n}-{name}") for n in range(20) for name, engine in (("a", one), ("b", other))
        ]
        ends = asyncio.gather(*(handle.result() for handle in handles))
        looks = 0
        while not ends.done():
            assert await one.reconcile(fix=looks % 2 == 1) == []
            looks += 1
        assert await ends == [3] * 40
        assert looks > 1
