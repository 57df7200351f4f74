"""What a worker finds to do, and what looking for it costs (WF-30 to WF-35)."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from msgspec import Raw
from msgspec.structs import replace

import keiro
from keiro.decisions import Append, Appended, new
from keiro.events import StepRecorded
from keiro.identity import StepIds
from tests.conformance.test_ownership import own_row, worker_of
from tests.conformance.test_steps import calls, note, topics
from tests.conftest import MakeEngine

FINISHED = 10_000


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


@keiro.workflow
async def noted(run: keiro.WorkflowRun, n: int) -> int:
    return int(await run.step(note, n))


async def look_and_take_over(engine: keiro.Engine) -> None:
    """Everything a worker asks of its store without being told what to look for."""
    store, worker = engine.store, worker_of(engine)
    await store.claim(worker.key, ["noted", "other"], 3)
    await store.next_due_ms(["noted"])
    await store.unregistered(["other"])
    await store.release(worker.key, list(await store.owned(worker.key))[:1])
    await store.adopt_orphans()
    await store.renew(worker.key)
    await store.ended(["wf:noted-1", "wf:noted-2"])
    await store.bury(await own_row(engine))


async def test_wf_30_looking_does_not_read_finished_runs_on_sqlite(tmp_path: Path) -> None:
    path = tmp_path / "keiro.db"
    async with keiro.Engine(f"sqlite:///{path}", worker=False) as engine:
        with closing(sqlite3.connect(path)) as filling:
            filling.executemany(
                "INSERT INTO keiro_runs (run_id, workflow, key, status, lineage_id, input_json, created_at_ms,"
                " finished_at_ms) VALUES ('wf:noted-' || ?1, 'noted', ?1, 'completed', 'wf:noted-' || ?1, '{}', 1, 2)",
                [(f"d{n}",) for n in range(FINISHED)],
            )
            filling.execute("INSERT INTO keiro_run_heads (run_key, version) SELECT run_key, 2 FROM keiro_runs")
            filling.commit()
        for n in range(5):
            await engine.start(noted, n, id=str(n))
        connection: sqlite3.Connection = engine.store._conn  # type: ignore[attr-defined]
        sent: list[str] = []
        connection.set_trace_callback(sent.append)
        await look_and_take_over(engine)
        connection.set_trace_callback(None)
        plans = {
            sql: [step[3] for step in connection.execute(f"EXPLAIN QUERY PLAN {sql}")]
            for sql in sent
            if sql.startswith(("SELECT", "UPDATE", "DELETE", "WITH"))
        }
    assert len(plans) > 12
    partial = re.compile(
        r"SCAN \w+ USING (COVERING )?INDEX (keiro_runs_(pending|paced|wake)_idx|keiro_run_heads_owner_idx)$"
    )
    few = ("SCAN CONSTANT ROW", *(f"SCAN {name}" for name in ("q", "a", "c", "dues", "pending", "paced", "parked")))
    for sql, plan in plans.items():
        scans = [step for step in plan if step.startswith("SCAN") and step not in few and not partial.match(step)]
        assert scans in ([], ["SCAN keiro_workers"]), f"{sql}\n{plan}"


@contextmanager
def sent_to(engine: keiro.Engine) -> Iterator[list[str]]:
    """The statements that an engine on Postgres sends."""
    sent: list[str] = []
    store: Any = engine.store

    def listening(send: Any) -> Any:
        async def pipeline(statements: Any) -> Any:
            sent.extend(sql for sql, _ in statements)
            return await send(statements)

        return pipeline

    for connection in (store._writer, store._reader):
        connection.pipeline = listening(connection.pipeline)
    yield sent
    for connection in (store._writer, store._reader):
        del connection.pipeline


def whole_tables(plan: dict[str, Any]) -> Iterator[str]:
    """The tables that a plan reads from one end to the other."""
    kind, table = plan["Node Type"], plan.get("Relation Name")
    index = plan.get("Index Name", "")
    partial = ("keiro_runs_pending_idx", "keiro_runs_paced_idx", "keiro_runs_wake_idx", "keiro_run_heads_owner_idx")
    few = index in partial or "Index Cond" in plan
    if kind == "Seq Scan" or (kind.startswith(("Index", "Bitmap Index")) and not few):
        yield str(table or index)
    for below in plan.get("Plans", ()):
        yield from whole_tables(below)


async def test_wf_30_looking_does_not_read_finished_runs_on_postgres(postgres_url: str) -> None:
    async with keiro.Engine(postgres_url, worker=False, migrate=True) as engine:
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            connection.execute(
                "INSERT INTO keiro.keiro_runs (run_id, workflow, key, status, lineage_id, input_json, created_at_ms,"
                " finished_at_ms) SELECT 'wf:noted-d' || n, 'noted', n, 'completed', 'wf:noted-d' || n, '{}', 1, 2"
                f" FROM generate_series(1, {FINISHED}) n"
            )
            # What looks like most of the table to a plan for any workflow, and is not looked for here.
            connection.execute(
                "INSERT INTO keiro.keiro_runs (run_id, workflow, key, status, lineage_id, input_json, created_at_ms)"
                " SELECT 'wf:crowd-' || n, 'crowd', n, 'pending', 'wf:crowd-' || n, '{}', 1"
                f" FROM generate_series(1, {FINISHED}) n"
            )
            connection.execute(
                "INSERT INTO keiro.keiro_run_heads (run_key, version) SELECT run_key, 2 FROM keiro.keiro_runs"
            )
            connection.execute("ANALYZE")  # as the server itself does after so many changes
            for n in range(5):
                await engine.start(noted, n, id=str(n))
            with sent_to(engine) as sent:
                await look_and_take_over(engine)
            # The plan for any parameters: the one that is kept.
            connection.execute("SET plan_cache_mode = force_generic_plan")
            plans = {}
            for n, sql in enumerate(dict.fromkeys(sent)):
                if sql.startswith(("SELECT", "UPDATE", "DELETE", "WITH")) and "keiro.keiro_" in sql:
                    connection.execute(f"PREPARE p{n} AS {sql}".encode())
                    count = max([int(found) for found in re.findall(r"\$(\d+)", sql)], default=0)
                    arguments = f"({', '.join(['NULL'] * count)})" if count else ""
                    ((found,),) = connection.execute(f"EXPLAIN (FORMAT JSON) EXECUTE p{n}{arguments}".encode())
                    plans[sql] = found[0]["Plan"]
    assert len(plans) > 12
    for sql, plan in plans.items():
        assert set(whole_tables(plan)) <= {"keiro_workers"}, f"{sql}\n{json.dumps(plan, indent=1)}"


async def test_wf_31_to_wf_35_a_claim_takes_what_can_go_on_and_nothing_else(make_engine: MakeEngine) -> None:
    """WF-31, WF-32, WF-34, WF-35, F9, E14: pending and due is claimed, whether it was never driven, handed back or
    crashed; owned, paced, completed, failed and cancelled is not."""

    @keiro.workflow(retry=keiro.Retry(2, initial=3600, maximum=3600, jitter=0))
    async def paced(run: keiro.WorkflowRun) -> None:
        raise RuntimeError("later")

    @keiro.workflow
    async def failing(run: keiro.WorkflowRun) -> None:
        raise RuntimeError("for good")

    names = ["noted", "paced", "failing"]
    async with make_engine(noted, paced, failing) as engine:
        store, worker = engine.store, worker_of(engine)
        await engine.execute(noted, 1, id="completed")
        waiting = await engine.start(paced, id="paced")
        with pytest.raises(keiro.WorkflowFailed):
            await engine.execute(failing, id="failed")
        while (await waiting.run()).status != "pending":
            await asyncio.sleep(0)
        await worker.stop_claiming()
        await asyncio.wait([task for task in worker._tasks if task.get_name() == "keiro claims"])
        fresh = await engine.start(noted, 2, id="fresh")
        cancelled = await engine.start(noted, 3, id="cancelled")
        event = new(keiro.events.WorkflowCancelled(), b"0123456789abcdef")
        assert isinstance(await store.submit(Append(cancelled.run_id, (event,), engine.wall_ms())), Appended)
        due = (await waiting.run()).next_attempt_at_ms
        assert due is not None and await store.next_due_ms(names) == due

        assert [run.key for run, _ in await store.claim(worker.key, names, 10)] == ["fresh"]
        assert await store.claim(worker.key, names, 10) == []
        await store.release(worker.key, [(await fresh.run()).run_key])
        store.now_ms = lambda: due - 1  # type: ignore[method-assign]
        assert [run.key for run, _ in await store.claim(worker.key, names, 10)] == ["fresh"]
        store.now_ms = lambda: due  # type: ignore[method-assign]
        taken = await store.claim(worker.key, names, 10)
        assert [(run.key, run.attempts, run.next_attempt_at_ms) for run, _ in taken] == [("paced", 1, None)]
        assert await store.next_due_ms(names) is None
        await store.release(worker.key, [run.run_key for run, _ in taken])


async def test_wf_33_an_idle_look_changes_nothing(make_engine: MakeEngine) -> None:
    """WF-33, WF-76: a store in which all has ended is not written to by a worker that looks."""
    async with make_engine(noted) as engine:
        await engine.execute(noted, 1, id="a")
        store, worker = engine.store, worker_of(engine)
        before = await engine.runs(), await store.head("wf:noted-a"), await store.read(0, 100)
        assert await store.claim(worker.key, ["noted"], 10) == []
        assert not await store.adopt_orphans()
        assert await store.owned(worker.key) == {}
        assert await store.unregistered(["noted"]) == []
        assert (await engine.runs(), await store.head("wf:noted-a"), await store.read(0, 100)) == before


async def test_wf_05_and_wf_61_what_others_recorded_is_found_when_the_run_goes_on(make_engine: MakeEngine) -> None:
    """WF-05, WF-61, E3: an entry appended from outside, here of a step, is what the next drive reads: the step does not
    run. WF-40 and WF-41 need no arbitration for it: an append never changes who may claim a run."""
    async with make_engine(worker=False) as client:
        handle = await client.start(noted, 1, id="a")
        entry = new(StepRecorded(step="note", result=Raw(b"41")), StepIds("noted", "a", 0)("note"))
        assert isinstance(await client.store.submit(Append(handle.run_id, (entry,), client.wall_ms())), Appended)
        assert await handle.status() == "pending"
    async with make_engine(noted) as engine:
        assert await engine.handle(handle.run_id).result() == 41
        assert calls == []
        assert await topics(engine.handle(handle.run_id)) == ["WorkflowStarted", "StepRecorded", "WorkflowCompleted"]


async def test_wf_65_a_mixed_lot_ends_the_same_one_at_a_time_and_all_at_once(make_engine: MakeEngine) -> None:
    """WF-65, WF-64, U12: the order and the number at once change nothing but the time it takes."""

    @keiro.workflow
    async def mixed(run: keiro.WorkflowRun, n: int) -> int:
        if n % 3 == 0:
            raise ValueError(n)
        return int(await run.step(note, n)) + int(await run.step(note, n))

    lots = []
    for lot, concurrency in (("one", 1), ("all", 100)):
        async with make_engine(worker=False) as client:
            for n in range(12):
                await client.start(mixed, n, id=f"{lot}-{n}")
        async with make_engine(mixed, concurrency=concurrency) as engine:
            for n in range(12):
                await engine.wait_ended(f"wf:mixed-{lot}-{n}")
            runs = sorted(
                (run for run in await engine.runs() if run.key.startswith(lot)), key=lambda run: run.created_at_ms
            )
            lots.append(sorted((run.key.partition("-")[2], run.status, run.result_json) for run in runs))
    assert lots[0] == lots[1]
    assert sum(status == "failed" for _, status, _ in lots[0]) == 4


async def test_u14_a_start_is_durable_and_keeps_its_input(make_engine: MakeEngine) -> None:
    """U14, WF-20: on return row, event and input are there, in one transaction, though nothing drives the run."""
    async with make_engine(worker=False) as client:
        handle = await client.start(noted, 7, id="a")
    async with make_engine(worker=False) as other:
        again = other.handle(handle.run_id)
        run = await again.run()
        assert (run.status, run.input_json, run.started_at_ms) == ("pending", '{"n":7}', None)
        assert await topics(again) == ["WorkflowStarted"]
        head = await other.store.head(handle.run_id)
        assert head is not None and (head[1].version, head[1].owner, head[1].epoch) == (1, None, 0)
        assert head[0] == replace(run)


async def test_u10_a_claim_creates_nothing(make_engine: MakeEngine) -> None:
    """U10: who looks for runs that do not exist finds none and leaves no trace."""
    async with make_engine(worker=False) as client:
        key = worker_of(client).key
        assert await client.store.claim(key, ["noted"], 10) == []
        await client.store.release(key, [])
        assert await client.store.head("wf:noted-a") is None
        assert await client.runs() == [] and await client.store.read(0, 10) == []
