"""The rows of a run, its clock and its values: what the journal says, on every store the same."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
import psycopg
import pytest
from msgspec import Raw

import keiro
from keiro.decisions import Append, Appended, new
from keiro.errors import StoreError
from keiro.events import AttemptFailed, StepRecorded, WorkflowCancelled, WorkflowRetried
from keiro.identity import StepIds
from tests.conformance.test_journal import on_sql, sql, step_event
from tests.conformance.test_ownership import gate, held, held_workflow, own_row, worker_of
from tests.conformance.test_steps import calls, note, topics
from tests.conftest import MakeEngine

CANCELLED = b"cancelled by hand"[:16]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    calls.clear()
    gate.clear()
    gate.update(entered=asyncio.Event(), go=asyncio.Event())


@keiro.workflow
async def noted(run: keiro.WorkflowRun, n: int) -> int:
    return int(await run.step(note, n))


async def cancel(engine: keiro.Engine, run_id: str) -> None:
    """Record the end of a run from outside."""
    command = Append(run_id, (new(WorkflowCancelled(reason="asked"), CANCELLED),), engine.wall_ms())
    assert isinstance(await engine.store.submit(command), Appended)


async def test_wf_20_rows_are_what_the_journal_says_at_every_moment(make_engine: MakeEngine) -> None:
    """WF-20: row and event are one transaction, so folding the journal again never finds a difference."""

    @keiro.workflow(retry=keiro.Retry(2, initial=0.0, jitter=0))
    async def varied(run: keiro.WorkflowRun, n: int) -> int:
        await run.step(note, n)
        if n % 3 == 0 and run.info.attempt == 1:
            raise ValueError("once")
        if n % 3 == 1:
            raise ValueError("always")
        return n

    async with make_engine(varied) as engine:
        handles = [await engine.start(varied, n, id=str(n)) for n in range(9)]
        waits = [asyncio.create_task(engine.wait_ended(handle.run_id)) for handle in handles]
        while not all(wait.done() for wait in waits):
            assert (await engine.rebuild("runs")).differences == 0
            await asyncio.sleep(0)
        report = await engine.rebuild("runs")
        assert (report.differences, report.verified) == (0, 9)
        assert sorted([run.status for run in await engine.runs()]) == ["completed"] * 6 + ["failed"] * 3


async def test_f31_a_body_that_fails_after_its_run_was_cancelled_records_nothing(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """F31, WF-66, WF-67, F15: the end from outside stands, the failure is no error of the engine's, others go on."""

    @keiro.workflow
    async def fails_late(run: keiro.WorkflowRun) -> None:
        gate["entered"].set()
        await gate["go"].wait()
        raise ValueError("too late")

    caplog.set_level(logging.ERROR)
    async with make_engine(fails_late, noted) as engine:
        handle = await engine.start(fails_late, id="a")
        await gate["entered"].wait()
        await cancel(engine, handle.run_id)
        driver = engine._resident[handle.run_id]
        gate["go"].set()
        assert driver.task is not None
        await asyncio.wait([driver.task])
        with pytest.raises(keiro.WorkflowCancelled):
            await handle.result()
        assert await topics(handle) == ["WorkflowStarted", "WorkflowCancelled"]
        run = await handle.run()
        assert (run.status, run.attempts, run.failure_json) == ("cancelled", 0, None)
        assert await engine.execute(noted, 1, id="b") == 1
        assert handle.run_id not in engine._resident
    assert caplog.text == ""


async def test_f14_a_step_does_not_record_into_a_run_that_was_ended_meanwhile(make_engine: MakeEngine) -> None:
    """F14, F39, WF-140: its effect has happened, its result is refused, and the body goes no further."""
    async with make_engine(held_workflow) as engine:
        handle = await engine.start(held_workflow, id="a")
        await gate["entered"].wait()
        driver = engine._resident[handle.run_id]
        await cancel(engine, handle.run_id)
        gate["go"].set()
        assert driver.task is not None
        await asyncio.wait([driver.task])
        assert calls == ["before", "held"]
        assert await topics(handle) == ["WorkflowStarted", "StepRecorded", "WorkflowCancelled"]


@on_sql
async def test_f51_a_status_this_version_does_not_know_never_looks_runnable(
    make_engine: MakeEngine, store_url: str
) -> None:
    """F51: it is not claimed, takes no append, and reading it says what is wrong; the others go on."""
    async with make_engine(noted) as engine:
        await worker_of(engine).stop_claiming()
        odd = await engine.start(noted, 1, id="odd")
        fine = await engine.start(noted, 2, id="fine")
        if store_url.startswith("sqlite"):
            sql(
                store_url,
                "PRAGMA ignore_check_constraints = ON",
                "UPDATE keiro_runs SET status = 'paused' WHERE key = 'odd'",
            )
        else:
            sql(
                store_url,
                "ALTER TABLE keiro_runs DROP CONSTRAINT keiro_runs_status_chk",
                "UPDATE keiro_runs SET status = 'paused' WHERE key = 'odd'",
            )
        taken = await engine.store.claim(worker_of(engine).key, ["noted"], 10)
        assert [run.run_id for run, _ in taken] == [fine.run_id]
        for read in (odd.status, odd.result, lambda: engine.store.head(odd.run_id)):
            with pytest.raises(StoreError, match="'paused'"):
                await read()
        command = Append(odd.run_id, (step_event("noted", "odd", "x"),), 1)
        other = Append(fine.run_id, (step_event("noted", "fine", "x"),), 1)
        outcomes = await asyncio.gather(*map(engine.store.submit, (command, other)), return_exceptions=True)
        assert isinstance(outcomes[0], StoreError) and outcomes[1] == Appended(2)
        assert await topics(fine) == ["WorkflowStarted", "StepRecorded"]
        assert len(await engine.store.read(0, 10)) == 3
        await engine.store.release(worker_of(engine).key, [run.run_key for run, _ in taken])


async def test_f51_an_event_of_an_unknown_kind_is_kept_and_stops_nothing(
    make_engine: MakeEngine, store_url: str
) -> None:
    """F51: a newer keiro's event in the history is read as what it is, and the run goes on around it."""
    async with make_engine(held_workflow, grace=0) as engine:
        handle = await engine.start(held_workflow, id="a")
        await gate["entered"].wait()
        unknown = keiro.events.OpaqueEvent(topic="FromTheFuture", data=Raw(b'{"x":1}'))
        found = keiro.decisions.New(unknown, b"fedcba9876543210", '{"x":1}')
        type(unknown).TOPIC = "FromTheFuture"  # type: ignore[misc]
        try:
            assert await engine.store.submit(Append(handle.run_id, (found,), 1)) == Appended(3)
        finally:
            type(unknown).TOPIC = ""  # type: ignore[misc]
    gate["go"].set()
    async with make_engine(held_workflow) as engine:
        handle = engine.handle(handle.run_id)
        assert await handle.result() == ["before", "held", "after"]
        assert (await topics(handle))[2] == "OpaqueEvent"


# One clock


async def test_u18_every_time_of_a_run_and_its_worker_is_the_stores(make_engine: MakeEngine) -> None:
    """U18: leases, pacing, discovery and what is recorded read one clock, which may be any."""
    at = 2_000_000_000_000

    async def fails() -> None:
        raise ValueError("always")

    @keiro.workflow(retry=keiro.Retry(2, initial=100, maximum=100, jitter=0))
    async def timed(run: keiro.WorkflowRun) -> None:
        await run.step(note, run.now().isoformat())
        await run.step(fails)

    engine = make_engine(timed)
    async with engine:
        engine.store.now_ms = lambda: at  # type: ignore[method-assign]
        await worker_of(engine)._renew()
        assert (await own_row(engine)).lease_expires_at_ms == at + 30_000
        handle = await engine.start(timed, id="a")
        while (await handle.run()).attempts == 0:
            await asyncio.sleep(0)
        run = await handle.run()
        assert (run.created_at_ms, run.started_at_ms, run.next_attempt_at_ms) == (at, at, at + 100_000)
        assert calls == [datetime.fromtimestamp(at / 1000, UTC).isoformat()]
        events = [event async for event in handle.events()]
        assert {event.timestamp for event in events} == {datetime.fromtimestamp(at / 1000, UTC)}
        times = [e.started_at_ms for e in events if isinstance(e, StepRecorded | AttemptFailed)]
        times += [e.next_attempt_at_ms - 100_000 for e in events if isinstance(e, WorkflowRetried)]
        assert times == [at] * 3
        engine.store.now_ms = lambda: at + 100_000  # type: ignore[method-assign]
        worker_of(engine).wake()
        ended = await engine.wait_ended(handle.run_id)
        assert (ended.status, ended.finished_at_ms) == ("failed", at + 100_000)


async def test_u18_postgres_tells_the_time_to_processes_whose_clock_is_wrong(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U18: the lease of a machine an hour ahead ends when everybody else's would."""
    right = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: right() + 3_600_000_000_000)
    monkeypatch.setattr(time, "time", lambda: right() / 1e9 + 3600)
    async with keiro.Engine(postgres_url, worker=False, migrate=True) as engine:
        row = await own_row(engine)
        with psycopg.connect(postgres_url) as connection:
            found = connection.execute("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint").fetchone()
        assert found is not None
        assert row.started_at_ms <= found[0] <= row.lease_expires_at_ms
        assert abs(engine.wall_ms() - found[0]) < 600_000


# Values


TRICKY: list[Any] = [
    {"b": 1, "a": {"": None}, "ключ": "\u2028\u00e9\U0001f600"},
    [1, 1.0, -0.0, 1e300, 5e-324, 2**63 - 1, -(2**63), 2**64 - 1],
    "\\u0000 is text here, and so is \\",
    [None, True, False, "", [], {}],
    '{"b" : 1,  "a":2}',
]


async def test_p2_values_are_stored_and_come_back_the_same_on_every_store(make_engine: MakeEngine) -> None:
    """P2: neither the order of keys nor the form of a number nor a character is changed by what a database thinks of
    JSON: the text is kept."""
    async with make_engine(noted_any) as engine:
        for n, value in enumerate(TRICKY):
            handle = await engine.start(noted_any, value, id=str(n))
            result = await handle.result()
            assert result == value and repr(result) == repr(value)
            run = await handle.run()
            assert run.result_json == msgspec.json.encode(value).decode()
            assert run.input_json == msgspec.json.encode({"value": value}).decode()
            recorded = [e async for e in handle.events() if isinstance(e, StepRecorded)]
            assert bytes(recorded[0].result) == msgspec.json.encode(value)
        for bad in ("nul \0", "surrogate \ud800", float("nan")):
            with pytest.raises(keiro.PayloadRejected):
                await engine.start(noted_any, bad, id="bad")


@keiro.workflow
async def noted_any(run: keiro.WorkflowRun, value: Any) -> Any:
    return await run.step(note, value)


async def test_p1_null_absent_and_nothing_are_three_things(make_engine: MakeEngine) -> None:
    """P1: a run that returned None has the result null; one that has not returned has none."""
    async with make_engine(held_workflow, noted_any) as engine:
        done = await engine.start(noted_any, None, id="a")
        assert await done.result() is None
        handle = await engine.start(held_workflow, id="b")
        await gate["entered"].wait()
        assert ((await done.run()).result_json, (await handle.run()).result_json) == ("null", None)
        assert (await done.run()).input_json == '{"value":null}'
        gate["go"].set()
        await handle.result()


async def test_p7_times_keep_their_zone_or_their_lack_of_one(make_engine: MakeEngine) -> None:
    """P7: a naive datetime stays naive and an aware one aware; what the engine itself gives out is aware and UTC."""
    naive = datetime(2026, 3, 29, 2, 30, 0, 1)  # noqa: DTZ001
    aware = datetime(2026, 3, 29, 2, 30, tzinfo=timezone(timedelta(hours=5, minutes=30)))

    async def same(value: datetime) -> datetime:
        return value

    @keiro.workflow
    async def clocked(run: keiro.WorkflowRun, first: datetime, second: datetime) -> list[datetime]:
        return [await run.step(same, first), await run.step(same, second), run.now()]

    async with make_engine(clocked) as engine:
        handle = await engine.start(clocked, naive, aware, id="a")
        back, zoned, now = await handle.result()
        assert back == naive and back.tzinfo is None
        assert zoned == aware and zoned.utcoffset() == aware.utcoffset()
        assert now.utcoffset() == timedelta(0)
        assert {e.timestamp.utcoffset() async for e in handle.events()} == {timedelta(0)}


async def test_p3_and_p4_one_of_two_processes_that_start_a_key_at_once_wins(make_engine: MakeEngine) -> None:
    """P3, P4, R8: the check and the insert are one transaction under one lock on every store; the loser finds the
    winner's run, or learns that its input differs."""
    async with make_engine(noted) as one, make_engine(noted) as other:
        for n in range(10):
            starts = [engine.start(noted, n, id=f"same-{n}") for engine in (one, other)]
            starts += [engine.start(noted, n + 100, id=f"same-{n}") for engine in (other, one)]
            found = await asyncio.gather(*starts, return_exceptions=True)
            handles = [handle for handle in found if isinstance(handle, keiro.Handle)]
            assert len(handles) == 2 and sum(isinstance(f, keiro.RunConflict) for f in found) == 2
            assert len({await handle.result() for handle in handles}) == 1
        assert len(calls) == 10


async def test_p3_a_transaction_that_reads_before_it_writes_takes_the_write_lock_first(
    make_engine: MakeEngine, tmp_path: Any
) -> None:
    """P3: on SQLite what was read under a shared lock may be old by the time of the write, and SQLite then refuses."""
    path = tmp_path / "keiro.db"
    async with keiro.Engine(f"sqlite:///{path}", workflows=[noted]) as engine:
        connection: sqlite3.Connection = engine.store._conn  # type: ignore[attr-defined]
        sent: list[str] = []
        connection.set_trace_callback(sent.append)
        handle = await engine.start(noted, 1, id="a")
        await handle.result()
        await engine.store.submit(Append(handle.run_id, (step_event("noted", "a", "x"),), 1))
        await worker_of(engine)._renew()
        with closing(sqlite3.connect(path, isolation_level=None)) as callers:
            joined = engine.store.join(callers)
            callers.execute("BEGIN IMMEDIATE")
            await joined.submit(Append(handle.run_id, (step_event("noted", "a", "x"),), 1))
            callers.execute("ROLLBACK")
        connection.set_trace_callback(None)
        begun = [statement for statement in sent if statement.startswith("BEGIN")]
        assert len(begun) > 4 and set(begun) == {"BEGIN IMMEDIATE"}


async def test_wf_170_to_172_the_id_of_a_recorded_step_is_the_derived_one(make_engine: MakeEngine) -> None:
    """WF-170, WF-172, F37: workflow, key, round and step, in this order, in UTF-8; tests/test_events.py has the golden
    ids. So any process finds what another one recorded, and no two steps share an id."""

    @keiro.workflow
    async def named(run: keiro.WorkflowRun) -> int:
        for key in ("Ā", "Ȁ", "charge-card"):
            await run.step(note, key, key=key)
        return 1

    async with make_engine(named) as engine:
        handle = await engine.start(named, id="ключ")
        await handle.result()
        rows = await engine.store.read(0, 10)
        ids = [row.event_id for row in rows if row.topic == "StepRecorded"]
        assert ids == [StepIds("named", "ключ", 0)(key) for key in ("Ā", "Ȁ", "charge-card")]
        assert rows[-1].event_id == StepIds("named", "ключ", 0)("__workflow_completed__")
        assert len(set(ids)) == 3
        assert StepIds("ключ", "named", 0)("x") != StepIds("named", "ключ", 0)("x")


class Point(msgspec.Struct):
    x: int
    y: float = 0.5


async def test_f19_what_a_replay_reads_is_what_the_first_run_saw(make_engine: MakeEngine) -> None:
    """F19, WF-08: the round trip through JSON and the annotation happens before the body sees a value, also when the
    step is decoded by another process from the stored text."""

    seen: list[Any] = []

    async def point(value: int) -> Point:
        return {"x": value}  # type: ignore[return-value]

    @keiro.workflow
    async def typed(run: keiro.WorkflowRun) -> float:
        found = await run.step(point, 3)
        seen.append(found)
        await run.step(held, "held")
        return found.y

    async with make_engine(typed, grace=0) as engine:
        handle = await engine.start(typed, id="a")
        await gate["entered"].wait()
    gate["go"].set()
    async with make_engine(typed) as engine:
        assert await engine.handle(handle.run_id).result() == 0.5
    assert seen == [Point(3), Point(3)]
