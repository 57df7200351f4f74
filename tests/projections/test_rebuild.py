"""Rebuilding: rows computed from the journal equal those that were kept, and mend those that were tampered with."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from typing import Any

import psycopg
import pytest

import keiro
from keiro.projections.base import Projection
from keiro.projections.rebuilt import mended
from keiro.rows import Run, Status
from keiro.stores.memory import MemoryStore
from tests.conftest import MakeEngine
from tests.projections.orders import (
    FollowedLedger,
    FollowedTotals,
    Ledger,
    RememberedTotals,
    Totals,
    expected_totals,
    order,
    values,
)

KEPT: list[type[Projection]] = [Totals, FollowedTotals, RememberedTotals]


def tamper(engine: keiro.Engine, sql: str) -> None:
    """Change rows in a database behind the engine's back. Tables are named as on Postgres."""
    if engine.url.startswith("sqlite"):
        with closing(sqlite3.connect(engine.url.removeprefix("sqlite:///"))) as connection, connection:
            connection.execute(sql.replace("keiro.", ""))
    else:
        with psycopg.connect(engine.url) as pg:
            pg.execute(sql.encode())


def rows_in_memory(engine: keiro.Engine, projection: type[Projection]) -> Any:
    """The dict of a projection's rows, where they are in one."""
    kept: Any = engine._read_models.kept
    return (kept._rows if isinstance(engine.store, MemoryStore) else kept._memory)[projection.name].rows


@pytest.mark.parametrize("projection", KEPT)
async def test_tampered_rows_are_mended_and_others_left(make_engine: MakeEngine, projection: type[Projection]) -> None:
    async with make_engine(order, projections=[projection]) as engine:
        await asyncio.gather(*(engine.start(order, name, 2) for name in "abcdab"))
        await engine.caught_up(projection, timeout=30)
        before = values(await engine.rows(projection))
        if isinstance(engine.store, MemoryStore) or projection is RememberedTotals:
            rows = rows_in_memory(engine, projection)
            rows["a",] = {"customer": "a", "orders": 99, "amount": 0}
            del rows["b",]
            rows["ghost",] = {"customer": "ghost", "orders": 1, "amount": 1}
        else:
            table = projection.table.name
            tamper(engine, f"UPDATE {table} SET orders = 99, amount = 0 WHERE customer = 'a'")
            tamper(engine, f"DELETE FROM {table} WHERE customer = 'b'")
            tamper(engine, f"INSERT INTO {table} (customer, orders, amount) VALUES ('ghost', 1, 1)")
        assert values(await engine.rows(projection)) != before

        report = await engine.rebuild(projection)

        assert (report.inserted, report.updated, report.deleted, report.verified) == (1, 1, 1, 2)
        assert values(await engine.rows(projection)) == before
        report = await engine.rebuild(projection)
        assert (report.differences, report.verified) == (0, 4)


@pytest.mark.parametrize("projection", KEPT)
async def test_a_rebuild_races_writers_and_the_rows_come_out_right(
    make_engine: MakeEngine, projection: type[Projection]
) -> None:
    async with make_engine(order, projections=[projection]) as engine:
        await asyncio.gather(*(engine.start(order, f"c{n % 5}") for n in range(50)))
        await engine.caught_up(projection, timeout=30)
        writing = True

        async def write(who: int) -> None:
            n = 0
            while writing:
                await engine.start(order, f"c{(n + who) % 7}", -1 if n % 9 == 8 else n)
                n += 1

        writers = [asyncio.create_task(write(n)) for n in range(4)]
        reports = []
        for _ in range(5):
            reports.append(await engine.rebuild(projection))
            await engine.start(order, "between")
        writing = False
        await asyncio.gather(*writers)
        await engine.caught_up(projection, timeout=30)

        assert [report.differences for report in reports] == [0] * 5, "writers were taken for tampering"
        assert values(await engine.rows(projection)) == await expected_totals(engine)
        assert (await engine.rebuild(projection)).differences == 0


async def test_a_rebuild_mends_rows_that_are_written_meanwhile(make_engine: MakeEngine, store_url: str) -> None:
    if store_url.startswith("memory"):
        pytest.skip("one thread: nothing happens meanwhile")
    async with make_engine(order, projections=[Totals], worker=False) as engine:
        await asyncio.gather(*(engine.start(order, f"c{n}") for n in range(30)))
        tamper(engine, "UPDATE order_totals SET orders = orders + 1000")
        done = False

        async def write() -> None:
            while not done:
                await engine.start(order, "c3")
                await engine.start(order, "new")

        writer = asyncio.create_task(write())
        report = await engine.rebuild(Totals)
        done = True
        await writer
        assert report.updated >= 30
        assert values(await engine.rows(Totals)) == await expected_totals(engine)


@pytest.mark.parametrize("projection", [Totals, FollowedTotals])
async def test_a_rebuild_has_what_others_append_until_its_end(
    make_engine: MakeEngine, projection: type[Projection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a process without the projection, whose events no inline row has seen."""
    engine, other = make_engine(order, projections=[projection], worker=False), make_engine(order, worker=False)
    async with engine, other:
        await asyncio.gather(*(engine.start(order, name) for name in "aab"))
        await engine.caught_up(projection, timeout=30)
        kept: Any = engine._read_models.kept
        if not isinstance(engine.store, MemoryStore):
            fold_bulk = kept._fold_bulk

            async def and_then_others_write(*arguments: Any) -> None:
                await fold_bulk(*arguments)
                await other.start(order, "a", 5)
                await other.start(order, "c", 7)

            monkeypatch.setattr(kept, "_fold_bulk", and_then_others_write)
        await engine.rebuild(projection)
        await engine.caught_up(projection, timeout=30)
        assert values(await engine.rows(projection)) == await expected_totals(engine)


async def test_an_append_only_table_gets_what_it_lacks_and_keeps_what_differs(
    make_engine: MakeEngine, store_url: str
) -> None:
    async with make_engine(order, projections=[Ledger, FollowedLedger], worker=False) as engine:
        runs = [await engine.start(order, "ada") for _ in range(3)]
        await engine.caught_up(FollowedLedger, timeout=30)
        for projection in (Ledger, FollowedLedger):
            if store_url.startswith("memory"):
                rows = rows_in_memory(engine, projection)
                del rows[2,]
                rows[3,] = {**rows[3,], "run_id": "wf:other"}
            else:
                tamper(engine, f"DELETE FROM {projection.table.name} WHERE position = 2")
                tamper(engine, f"UPDATE {projection.table.name} SET run_id = 'wf:other' WHERE position = 3")
            report = await engine.rebuild(projection)
            assert (report.inserted, report.unmended, report.verified) == (1, 1, 1)
            expected = [(1, runs[0].run_id, 1), (2, runs[1].run_id, 1), (3, "wf:other", 1)]
            assert values(await engine.rows(projection)) == expected


# The rows of runs


async def fine(n: int) -> int:
    return n


@keiro.workflow
async def stepping(run: keiro.WorkflowRun, steps: int) -> int:
    return sum([await run.step(fine, n) for n in range(steps)])


@keiro.workflow
async def failing(run: keiro.WorkflowRun) -> None:
    raise RuntimeError("as it should")


@keiro.workflow
async def waiting(run: keiro.WorkflowRun) -> None:
    await asyncio.Event().wait()


@keiro.workflow(retry=keiro.Retry(attempts=5, initial=0.001))
async def retried(run: keiro.WorkflowRun, times: int) -> int:
    if (await run_of(run)).attempts < times:
        raise RuntimeError("again")
    return times


engines: list[keiro.Engine] = []


async def run_of(run: keiro.WorkflowRun) -> Run:
    found = await engines[-1].store.run(run.id)
    assert found is not None
    return found


async def any_history(engine: keiro.Engine) -> None:
    """Runs that ended in every way, one that is driven and one that nobody drives."""
    engines.append(engine)
    for n in range(3):
        await engine.execute(stepping, n)
    for _ in range(2):
        with pytest.raises(keiro.WorkflowFailed):
            await engine.execute(failing)
    assert await engine.execute(retried, 2) == 2
    await engine.start(waiting, id="driven")


async def test_rows_of_runs_are_what_the_journal_says_after_any_history(make_engine: MakeEngine) -> None:
    async with make_engine(stepping, failing, retried, waiting, grace=0) as engine:
        await any_history(engine)
        report = await engine.rebuild("runs")
        assert (report.differences, report.verified) == (0, 7)
        assert await engine.handle("wf:waiting-driven").status() is Status.RUNNING
    async with make_engine(worker=False) as client:
        assert await client.handle("wf:waiting-driven").status() is Status.PENDING
        report = await client.rebuild("runs")
        assert (report.differences, report.verified) == (0, 7)


async def test_tampered_rows_of_runs_are_mended(make_engine: MakeEngine) -> None:
    async with make_engine(stepping, failing, retried, waiting, grace=0) as engine:
        await any_history(engine)
        before = await engine.runs()
        done = next(run for run in before if run.workflow == "stepping")
        failed = next(run for run in before if run.workflow == "failing")
        driven = next(run for run in before if run.workflow == "waiting")
        if isinstance(engine.store, MemoryStore):
            runs = engine.store._db.runs
            for run, changes in (
                (done, {"result_json": "666"}),
                (failed, {"status": Status.PENDING, "finished_at_ms": None, "failure_json": None}),
                (driven, {"status": Status.SUSPENDED}),
            ):
                runs[run.run_id] = type(run)(**{**{f: getattr(run, f) for f in run.__struct_fields__}, **changes})
        else:
            tamper(engine, f"UPDATE keiro.keiro_runs SET result_json = '666' WHERE run_id = '{done.run_id}'")
            tamper(
                engine,
                "UPDATE keiro.keiro_runs SET status = 'suspended', finished_at_ms = NULL, failure_json = NULL"
                f" WHERE run_id = '{failed.run_id}'",
            )
            tamper(engine, f"UPDATE keiro.keiro_runs SET status = 'suspended' WHERE run_id = '{driven.run_id}'")

        report = await engine.rebuild("runs")

        assert (report.updated, report.verified, report.unmended) == (3, 4, 0)
        assert await engine.runs() == before
        assert (await engine.rebuild("runs")).differences == 0


async def test_rows_of_runs_are_rebuilt_while_runs_go_on(make_engine: MakeEngine) -> None:
    async with make_engine(stepping) as engine:
        handles = [await engine.start(stepping, 20) for _ in range(30)]
        reports = [await engine.rebuild("runs") for _ in range(3)]
        await asyncio.gather(*(handle.result() for handle in handles))
        assert [report.differences for report in reports] == [0, 0, 0]
        assert (await engine.rebuild("runs")).verified == 30


def a_run(**changes: Any) -> Run:
    fields = {
        "run_id": "wf:w-1",
        "workflow": "w",
        "key": "1",
        "status": Status.PENDING,
        "lineage_id": "wf:w-1",
        "input_json": "{}",
        "created_at_ms": 1,
    }
    return Run(**{**fields, **changes})


def test_what_workers_decide_is_no_difference() -> None:
    folded = a_run(next_attempt_at_ms=500)
    claimed = a_run(run_key=3, status=Status.RUNNING, started_at_ms=9)
    assert mended(claimed, folded, owned=True) == claimed
    released = a_run(run_key=3, started_at_ms=9)
    assert mended(released, folded, owned=False) == released
    waiting = a_run(run_key=3, next_attempt_at_ms=500)
    assert mended(waiting, folded, owned=False) == waiting


def test_what_the_journal_decides_is_a_difference() -> None:
    ended = a_run(status=Status.COMPLETED, finished_at_ms=7, result_json="1")
    for wrong in (
        a_run(status=Status.RUNNING, started_at_ms=9),
        a_run(status=Status.COMPLETED, finished_at_ms=7, result_json="2"),
        a_run(status=Status.COMPLETED, finished_at_ms=8, result_json="1"),
        a_run(status=Status.COMPLETED, finished_at_ms=7, result_json="1", input_json="[]"),
    ):
        assert mended(wrong, ended, owned=False) != wrong
    nobody = a_run(status=Status.RUNNING)
    assert mended(nobody, a_run(), owned=False).status is Status.PENDING, "running means that a worker owns it"
    assert mended(a_run(next_attempt_at_ms=3), a_run(next_attempt_at_ms=500), owned=False).next_attempt_at_ms == 500
