"""The journal itself, on every store: the lines L1 to L23 as far as they apply to a journal of events."""

from __future__ import annotations

import asyncio
import sqlite3
import uuid
from contextlib import closing
from typing import Any

import msgspec
import psycopg
import pytest
from msgspec import Raw

import keiro
from keiro.decisions import AlreadyPresent, Append, Appended, FenceLost, New, Outcome, Start, UnknownRun, new
from keiro.errors import DecodeFailed, StoreError, StoreUnavailable
from keiro.events import Event, StepRecorded, WorkflowStarted
from keiro.identity import StepIds
from keiro.stores.memory import MemoryStore
from keiro.stores.postgres import PostgresStore
from keiro.stores.sqlite import SQLiteStore
from tests.conformance.test_ownership import gate, held, held_workflow, worker_of
from tests.conformance.test_steps import calls, note, step_names, topics
from tests.conftest import MakeEngine

on_sql = pytest.mark.parametrize("store_url", ["sqlite", "postgres"], indirect=True)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    calls.clear()
    gate.clear()
    gate.update(entered=asyncio.Event(), go=asyncio.Event())


def sql(url: str, *statements: str) -> list[Any]:
    """Run plain SQL on the database, as anybody with a client can; the rows of the last statement."""
    rows: list[Any] = []
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as connection:
            for statement in statements:
                rows = connection.execute(statement).fetchall()
    else:
        with psycopg.connect(url, autocommit=True, options="-c search_path=keiro,public") as client:
            for statement in statements:
                found = client.execute(statement.encode())
                rows = found.fetchall() if found.description else []
    return rows


def unguard(url: str, trigger: str, table: str) -> str:
    """The statement that takes a trigger away, so that the damage it prevents can be done."""
    return f"DROP TRIGGER {trigger}" if url.startswith("sqlite") else f"DROP TRIGGER {trigger} ON {table}"


def step_event(workflow: str, key: str, step: str, value: bytes = b"1") -> New:
    return new(StepRecorded(step=step, result=Raw(value)), StepIds(workflow, key, 0)(step))


async def lose_event(engine: keiro.Engine, url: str, run_id: str, version: int) -> None:
    """Take one event out of the middle of a run, as a broken restore may."""
    run = await engine.store.run(run_id)
    assert run is not None
    if isinstance(engine.store, MemoryStore):
        rows = engine.store._by_run[run.run_key]
        rows[:] = [row for row in rows if row.version != version]
    else:
        where = f"run_key = {run.run_key} AND version = {version}"
        sql(url, unguard(url, "keiro_journal_no_delete", "keiro_journal"), f"DELETE FROM keiro_journal WHERE {where}")


async def damage_event(engine: keiro.Engine, url: str, run_id: str, version: int) -> None:
    """Make one event unreadable."""
    run = await engine.store.run(run_id)
    assert run is not None
    if isinstance(engine.store, MemoryStore):
        rows = engine.store._by_run[run.run_key]
        rows[:] = [msgspec.structs.replace(r, payload="{damaged") if r.version == version else r for r in rows]
    else:
        sql(
            url,
            unguard(url, "keiro_journal_no_update", "keiro_journal"),
            f"UPDATE keiro_journal SET payload = '{{damaged' WHERE run_key = {run.run_key} AND version = {version}",
        )


class Till(keiro.WorkflowRun, name="till"):
    def __init__(self) -> None:
        self.sums: list[int] = []

    @keiro.event("Paid")
    def pay(self, amount: int) -> None:
        self.sums.append(amount)

    async def execute(self) -> int:
        await self.step(note, "before")
        await self.step(held, "held")
        await self.step(note, "after")
        return len(self.sums)


async def test_l1_versions_are_contiguous_across_producers_and_restarts(make_engine: MakeEngine) -> None:
    """L1: seq per run became the version: 1, 2, 3 … without a gap, whoever appends, in whichever process."""
    async with make_engine(Till, grace=0) as engine, make_engine(worker=False) as client:
        handle = await engine.start(Till, id="a")
        await gate["entered"].wait()
        told = await asyncio.gather(*((client, engine)[n % 2].command(handle.run_id, Till.pay, n) for n in range(8)))
        assert sorted(told) == list(range(3, 11))
    gate["go"].set()
    async with make_engine(Till) as engine:
        handle = engine.handle(handle.run_id)
        assert await handle.result() == 8
        versions = [event.originator_version async for event in handle.events()]
        assert versions == list(range(1, 14))


@on_sql
async def test_l1_a_run_whose_versions_are_used_up_takes_nothing_more(make_engine: MakeEngine, store_url: str) -> None:
    """L1, exhausted is refused: a version has 31 bits, and the next one is an error and not a negative number."""
    async with make_engine(worker=False) as engine:
        handle = await engine.start(held_workflow, id="a")
        sql(store_url, f"UPDATE keiro_run_heads SET version = {2**31 - 1}")
        before = await engine.store.read(0, 10)
        with pytest.raises(StoreError):
            await engine.store.submit(Append(handle.run_id, (step_event("held_workflow", "a", "x"),), 1))
        assert await engine.store.read(0, 10) == before
        found = await engine.store.head(handle.run_id)
        assert found is not None and found[1].version == 2**31 - 1


async def test_l2_an_exact_repeat_finds_the_first_and_other_content_does_not_replace_it(
    make_engine: MakeEngine,
) -> None:
    """L2, WF-06: a duplicate is answered with what is there, also after a restart. Content that differs is no conflict
    in this design: the first writer of a step wins, and the loser is told the winner's value."""
    first = step_event("held_workflow", "a", "x", b'"first"')
    other = step_event("held_workflow", "a", "x", b'"other"')
    async with make_engine(worker=False) as engine:
        handle = await engine.start(held_workflow, id="a")
        assert await engine.store.submit(Append(handle.run_id, (first,), 5)) == Appended(2)
    async with make_engine(worker=False) as engine:
        for again in (first, other):
            outcome = await engine.store.submit(Append(handle.run_id, (again,), 9))
            assert isinstance(outcome, AlreadyPresent)
            assert (outcome.stored.version, outcome.stored.payload) == (2, first.payload)
            assert outcome.stored.recorded_at_ms == 5
        assert await topics(engine.handle(handle.run_id)) == ["WorkflowStarted", "StepRecorded"]


@pytest.mark.parametrize("owner", [0, -1, 2**40, None], ids=str)
async def test_l4_and_l22_an_owner_that_is_none_is_refused_before_anything_else(
    make_engine: MakeEngine, owner: int | None
) -> None:
    """L4, L22: a malformed owner has lost its fence, whatever it sends, also what is recorded already."""
    async with make_engine(held_workflow) as engine:
        handle = await engine.start(held_workflow, id="a")
        await gate["entered"].wait()
        found = await engine.store.head(handle.run_id)
        assert found is not None
        run, head = found
        epoch = head.epoch if owner is not None else head.epoch + 1
        for name in ("note", "new"):
            one = step_event("held_workflow", "a", name)
            stranger = Append(run.run_id, (one,), 1, run.run_key, owner or head.owner, epoch, head.version)
            if owner == 0:
                stranger = msgspec.structs.replace(stranger, owner=0)
            assert await engine.store.submit(stranger) == FenceLost()
        assert await topics(handle) == ["WorkflowStarted", "StepRecorded"]
        gate["go"].set()
        await handle.result()


async def test_l8_pages_and_cursors_are_exact(make_engine: MakeEngine) -> None:
    """L8: any page size from any cursor gives the same events, and the end is an empty page."""
    async with make_engine(worker=False) as engine:
        for n in range(7):
            await engine.start(held_workflow, id=str(n))
            one = step_event("held_workflow", str(n), "x")
            await engine.store.submit(Append(f"wf:held_workflow-{n}", (one,), 1))
        everything = await engine.store.read(0, 100)
        assert len(everything) == 14
        for size in (1, 3, 14, 15):
            pages: list[Any] = []
            while page := await engine.store.read(pages[-1].position if pages else 0, size):
                assert len(page) <= size
                pages += page
            assert pages == everything
        handle = engine.handle("wf:held_workflow-3")
        assert [event.originator_version async for event in handle.events(after=1)] == [2]
        assert [event async for event in handle.events(after=2)] == []


async def test_l9_what_was_accepted_before_the_close_is_kept_and_nothing_is_accepted_after(
    make_engine: MakeEngine,
) -> None:
    """L9: closing drains what was queued; a command that comes later is refused at once and not left hanging."""
    engine = make_engine(worker=False)
    async with engine:
        await engine.start(held_workflow, id="a")
        queued = [
            engine.store.submit(Append("wf:held_workflow-a", (step_event("held_workflow", "a", f"s{n}"),), 1))
            for n in range(5)
        ]
    assert [await one for one in queued] == [Appended(n + 2) for n in range(5)]
    with pytest.raises(StoreUnavailable, match="closed"):
        await engine.store.submit(Append("wf:held_workflow-a", (step_event("held_workflow", "a", "late"),), 1))
    async with make_engine(worker=False) as engine:
        assert await step_names(engine.handle("wf:held_workflow-a")) == [f"s{n}" for n in range(5)]


@on_sql
async def test_l10_a_rollback_takes_the_entry_its_identity_and_its_news_along(
    make_engine: MakeEngine, store_url: str
) -> None:
    """L10: on a caller's connection; afterwards the same event is new again, and so is the same key."""

    def connect() -> Any:
        if store_url.startswith("sqlite"):
            return sqlite3.connect(store_url.removeprefix("sqlite:///"), isolation_level=None)
        return psycopg.connect(store_url, autocommit=True)

    async with make_engine(worker=False) as engine:
        handle = await engine.start(held_workflow, id="a")
        told: list[Any] = []
        engine.committed = lambda changed, *others: told.append(changed)  # type: ignore[method-assign]
        one = step_event("held_workflow", "a", "x", b'"undone"')
        with closing(connect()) as connection:
            connection.execute("BEGIN IMMEDIATE" if store_url.startswith("sqlite") else "BEGIN")
            assert (await engine.store.join(connection).submit(Append(handle.run_id, (one,), 1))).outcome == Appended(2)
            await engine.start(held_workflow, id="b", connection=connection)
            connection.execute("ROLLBACK")
        assert told == [] and await engine.store.run("wf:held_workflow-b") is None
        again = step_event("held_workflow", "a", "x", b'"kept"')
        assert await engine.store.submit(Append(handle.run_id, (again,), 1)) == Appended(2)
        (kept,) = [event async for event in handle.events(after=1)]
        assert isinstance(kept, StepRecorded) and bytes(kept.result) == b'"kept"'


@pytest.mark.parametrize("damage", [lose_event, damage_event], ids=["gap", "damaged"])
async def test_f50_and_l19_a_history_with_a_hole_is_not_driven_and_stops_no_other(
    make_engine: MakeEngine, store_url: str, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """F50, L19, WF-63: a missing or unreadable event fails the replay before the body has done anything. The run has
    not failed: it stays as it is, an operator is told, and those claimed with it are driven."""
    async with make_engine(held_workflow, grace=0) as engine:
        handle = await engine.start(held_workflow, id="broken")
        await gate["entered"].wait()
        one = step_event("held_workflow", "broken", "other")
        await engine.store.submit(Append(handle.run_id, (one,), 1))
    calls.clear()
    gate["go"].set()
    async with make_engine(worker=False) as client:
        await damage(client, store_url, handle.run_id, 2)
        for name in ("a", "b"):
            await client.start(held_workflow, id=name)
        before = await client.store.read(0, 3)
    async with make_engine(held_workflow) as engine:
        for name in ("a", "b"):
            assert await engine.handle(f"wf:held_workflow-{name}").result() == ["before", "held", "after"]
        while "could not be driven on" not in caplog.text:
            await asyncio.sleep(0)
        assert sorted(calls) == sorted(["before", "held", "after"] * 2)
        broken = engine.handle(handle.run_id)
        assert not (await broken.run()).terminal and (await broken.run()).attempts == 0
        assert await engine.store.read(0, 3) == before
        if damage is damage_event:
            with pytest.raises(DecodeFailed, match="event 2"):
                await topics(broken)


@on_sql
async def test_l20_opening_reads_nothing_of_the_journal(
    make_engine: MakeEngine, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L20: a start costs the same however long the journal is; only runs that are claimed have their history read."""
    async with make_engine(worker=False) as engine:
        for n in range(3):
            await engine.start(held_workflow, id=str(n))
    sent: list[str] = []
    connect: Any
    if store_url.startswith("sqlite"):
        connect = SQLiteStore._connect

        def traced(store: Any) -> Any:
            connection = connect(store)
            connection.set_trace_callback(sent.append)
            return connection

        monkeypatch.setattr(SQLiteStore, "_connect", traced)
    else:
        connect = PostgresStore._connect

        async def listening(store: Any, **options: Any) -> Any:
            connection = await connect(store, **options)
            pipeline = connection.pipeline

            async def send(statements: Any) -> Any:
                sent.extend(text for text, _ in statements)
                return await pipeline(statements)

            connection.pipeline = send
            return connection

        monkeypatch.setattr(PostgresStore, "_connect", listening)
    async with make_engine(Till) as engine:
        await worker_of(engine)._claim_all()
    assert any("keiro_workers" in text for text in sent)
    assert [text for text in sent if "keiro_journal" in text] == []


async def test_l21_payloads_of_several_megabytes_go_through(make_engine: MakeEngine) -> None:
    """L21, E28: in, through a step, and out again, on the first run and on a replay."""
    large = "é" * 1_500_000 + "\U0001f600"

    @keiro.workflow
    async def echo(run: keiro.WorkflowRun, text: str) -> str:
        return str(await run.step(note, text))

    async with make_engine(echo) as engine:
        assert await engine.execute(echo, large, id="a") == large
    async with make_engine(echo) as engine:
        assert await engine.handle("wf:echo-a").result() == large
        assert len(calls) == 1


async def sent_together(store: Any, *commands: Any) -> list[Outcome | BaseException]:
    return list(await asyncio.gather(*map(store.submit, commands), return_exceptions=True))


@on_sql
async def test_one_bad_command_takes_no_other_of_its_batch_down(make_engine: MakeEngine) -> None:
    """Trap 7, L7: a value no column takes refuses its own command; the others of the same tick are written."""

    def start(key: str, value: bytes) -> Start:
        event = WorkflowStarted(workflow="w", key=key, input=Raw(value))
        return Start(f"wf:w-{key}", new(event, uuid.uuid4().bytes), 1, None)

    async with make_engine(worker=False) as engine:
        handle = await engine.start(held_workflow, id="a")
        step = Append(handle.run_id, (step_event("held_workflow", "a", "x"),), 1)
        outcomes = await sent_together(
            engine.store, start("one", b"{}"), start("bad", b"{damaged"), step, start("two", b"{}")
        )
        assert [type(outcome) for outcome in outcomes] == [Appended, StoreError, Appended, Appended]
        assert {run.key for run in await engine.runs()} == {"a", "one", "two"}
        assert await step_names(handle) == ["x"]


@on_sql
async def test_a_value_the_driver_cannot_even_send_takes_no_other_down(make_engine: MakeEngine) -> None:
    async with make_engine(worker=False) as engine:
        handle = await engine.start(held_workflow, id="a")
        good = [Append(handle.run_id, (step_event("held_workflow", "a", f"s{n}"),), 1) for n in range(2)]
        bad = Append(handle.run_id, (step_event("held_workflow", "a", "bad"),), 2**70)
        outcomes = await sent_together(engine.store, good[0], bad, good[1])
        assert outcomes[0] == Appended(2) and outcomes[2] == Appended(3)
        assert isinstance(outcomes[1], Exception)
        assert await step_names(handle) == ["s0", "s1"]


async def test_an_error_of_who_is_told_stops_no_writer(make_engine: MakeEngine) -> None:
    """F8: what a commit is followed by has failed, not the commit, and the next one comes all the same."""

    def raises(changed: Any) -> None:
        raise RuntimeError("a bug")

    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    async with make_engine(worker=False) as engine:
        handle = await engine.start(held_workflow, id="a")
        engine.committed = raises  # type: ignore[method-assign]
        for n in range(3):
            one = step_event("held_workflow", "a", f"s{n}")
            assert await engine.store.submit(Append(handle.run_id, (one,), 1)) == Appended(n + 2)


async def test_commands_on_one_run_keep_their_order_within_a_batch(make_engine: MakeEngine) -> None:
    """L5: what an owner knows and what has to be decided, sent in one tick, are written in the order they came."""
    async with make_engine(held_workflow) as engine:
        handle = await engine.start(held_workflow, id="a")
        await gate["entered"].wait()
        found = await engine.store.head(handle.run_id)
        assert found is not None
        run, head = found

        def owners(name: str, expected: int) -> Append:
            one = step_event("held_workflow", "a", name)
            return Append(run.run_id, (one,), 1, run.run_key, head.owner, head.epoch, expected)

        def strangers(name: str) -> Append:
            return Append(run.run_id, (step_event("held_workflow", "a", name),), 1)

        born = WorkflowStarted(workflow="held_workflow", key="b", input=Raw(b"{}"))
        outcomes = await sent_together(
            engine.store,
            owners("one", 2),
            strangers("two"),
            owners("three", 3),
            strangers("four"),
            Append("wf:held_workflow-b", (step_event("held_workflow", "b", "x"),), 1),
            Start("wf:held_workflow-b", new(born, uuid.uuid4().bytes), 1, None),
        )
        assert outcomes[:5] == [Appended(3), Appended(4), Appended(5), Appended(6), UnknownRun()]
        assert isinstance(outcomes[5], Appended)
        assert await step_names(handle) == ["note", "one", "two", "three", "four"]
        gate["go"].set()
        await handle.result()


async def test_wf_11_every_event_comes_back_from_the_journal_as_it_went(make_engine: MakeEngine) -> None:
    """WF-11: through the store's own columns and text; tests/test_events.py says the same of the codec alone."""
    from tests.test_events import EXAMPLES

    async with make_engine(worker=False) as engine:
        for n, event in enumerate(EXAMPLES):
            handle = await engine.start(held_workflow, id=str(n))
            written: Event = event
            if isinstance(event, WorkflowStarted):
                read = [e async for e in handle.events()]
                assert isinstance(read[0], WorkflowStarted)
                continue
            outcome = await engine.store.submit(Append(handle.run_id, (new(written, uuid.uuid4().bytes),), 1_700_000))
            assert outcome == Appended(2)
            (read_back,) = [e async for e in handle.events(after=1)]
            assert type(read_back) is type(event)
            assert (read_back.originator_id, read_back.originator_version) == (handle.run_id, 2)
            assert keiro.events.blank(read_back) == keiro.events.blank(event)


class Purse(keiro.WorkflowRun, name="purse"):
    def __init__(self) -> None:
        self.coins = 3

    @keiro.event("Taken")
    def _taken(self) -> None:
        self.coins -= 1

    def take(self) -> None:
        if self.coins == 0:
            raise ValueError("empty")
        self._taken()

    async def execute(self) -> None:
        await self.step(held, "held")


async def test_r8_a_command_decides_on_what_is_there_when_it_is_written(make_engine: MakeEngine) -> None:
    """R8, lost updates are impossible: ten at once from two processes take what there is, and no more. Steps that the
    run records meanwhile are in nobody's way."""
    async with make_engine(Purse) as engine, make_engine(Purse, worker=False) as other:
        handle = await engine.start(Purse, id="a")
        await gate["entered"].wait()
        takers = [(engine, other)[n % 2].command(handle.run_id, Purse.take) for n in range(10)]
        steps = [engine.store.submit(Append(handle.run_id, (step_event("purse", "a", f"s{n}"),), 1)) for n in range(5)]
        outcomes = await asyncio.gather(*takers, *steps, return_exceptions=True)
        assert sum(isinstance(outcome, int) for outcome in outcomes[:10]) == 3
        assert sum(isinstance(outcome, ValueError) for outcome in outcomes[:10]) == 7
        assert (await topics(handle)).count("Taken") == 3
        gate["go"].set()
        await handle.result()
