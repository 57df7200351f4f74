"""Transactional steps: the SQL of a step and the record of it are committed together or not at all."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
import sqlalchemy as sa
from eventsourcing.application import Application
from eventsourcing.domain import Aggregate, event
from eventsourcing.utils import clear_topic_cache

import keiro
import keiro.transactions
from keiro.events import AttemptFailed, StepRecorded
from keiro.projections.base import Projection
from keiro.testing import replace_steps

booked = sa.Table("booked", sa.MetaData(), sa.Column("guest", sa.Text, primary_key=True))
calls: list[str] = []
before: dict[str, Callable[[Any], None]] = {}
"""What is done in the transaction of a guest, after the row."""


@keiro.step
def book(connection: sa.Connection, guest: str) -> str:
    calls.append(guest)
    connection.execute(booked.insert().values(guest=guest))
    before.get(guest, lambda connection: None)(connection)
    return f"{guest} is booked"


@keiro.workflow
async def books(run: keiro.WorkflowRun, guest: str) -> str:
    said: str = await run.transaction(book, guest)
    return said


@keiro.workflow
async def tries(run: keiro.WorkflowRun, guest: str) -> str:
    said: str = await run.transaction(book, guest, retry=keiro.Retry(attempts=3, initial=0.001))
    return said


@keiro.step
async def book_and_greet(connection: Any, guest: str) -> str:
    await connection.execute(booked.insert().values(guest=guest))
    await engine_of_today.start(greets, guest, id=guest, connection=connection)
    before.get(guest, lambda connection: None)(connection)
    return guest


@keiro.workflow
async def greets(run: keiro.WorkflowRun, guest: str) -> str:
    return f"hello {guest}"


@keiro.workflow
async def books_and_greets(run: keiro.WorkflowRun, guest: str) -> str:
    said: str = await run.transaction(book_and_greet, guest)
    return said


engine_of_today: keiro.Engine


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    found = f"sqlite:///{tmp_path}/keiro.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    database = sa.create_engine(found.replace("postgresql:", "postgresql+psycopg:"))
    booked.metadata.create_all(database)
    database.dispose()
    return found


@pytest.fixture(autouse=True)
def forgets() -> Iterator[None]:
    calls.clear()
    before.clear()
    return


@pytest.fixture
async def engine(url: str) -> AsyncIterator[keiro.Engine]:
    global engine_of_today
    workflows = [books, tries, greets, books_and_greets]
    async with keiro.Engine(url, workflows=workflows, migrate=True) as engine_of_today:
        yield engine_of_today


def guests(url: str) -> list[str]:
    """Who is booked, as others see it."""
    if url.startswith("sqlite"):
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as file:
            return [guest for (guest,) in file.execute("SELECT guest FROM booked ORDER BY guest")]
    with psycopg.connect(url) as server:
        return [guest for (guest,) in server.execute("SELECT guest FROM booked ORDER BY guest")]


async def journal(engine: keiro.Engine, run_id: str) -> list[Any]:
    return [event async for event in engine.handle(run_id).events()]


def once(fails: Exception) -> Callable[[Any], None]:
    """Raise `fails`, the first time."""
    left = [fails]

    def fail(connection: Any) -> None:
        if left:
            raise left.pop()

    return fail


# Together


async def test_the_rows_of_a_step_and_its_record_are_committed_together(engine: keiro.Engine, url: str) -> None:
    handle = await engine.start(books, "ada", id="a")

    assert await handle.result() == "ada is booked"
    assert guests(url) == ["ada"]
    (recorded,) = [event for event in await journal(engine, "wf:books-a") if isinstance(event, StepRecorded)]
    assert (recorded.step, recorded.attempt) == ("tx:book", 1)
    assert [event.originator_version for event in await journal(engine, "wf:books-a")] == [1, 2, 3]


async def test_a_replay_does_not_perform_it_again(url: str) -> None:
    @keiro.workflow(name="books")
    async def waits(run: keiro.WorkflowRun, guest: str) -> str:
        said: str = await run.transaction(book, guest)
        return said + str(await run.deferred("more").result())

    async with keiro.Engine(url, workflows=[waits], migrate=True) as first:
        handle = await first.start(waits, "ada", id="a")
        while await handle.status() != "suspended":
            await asyncio.sleep(0.002)
    async with keiro.Engine(url, workflows=[waits]) as second:
        await second.complete("wf:books-a", "more", "!")
        assert await second.handle("wf:books-a").result() == "ada is booked!"
    assert calls == guests(url) == ["ada"]


async def test_what_it_raises_rolls_its_rows_back(engine: keiro.Engine, url: str) -> None:
    before["ada"] = once(ValueError("full"))
    handle = await engine.start(books, "ada", id="a")
    with pytest.raises(keiro.WorkflowFailed) as failed:
        await handle.result()
    assert str(failed.value.__cause__) == "full"
    assert guests(url) == []

    before["bob"] = once(ValueError("full"))
    assert await engine.execute(tries, "bob", id="b") == "bob is booked"
    assert guests(url) == ["bob"]
    (attempt,) = [event for event in await journal(engine, "wf:tries-b") if isinstance(event, AttemptFailed)]
    assert (attempt.step, attempt.attempt) == ("tx:book", 1)


async def test_a_value_that_cannot_be_stored_rolls_its_rows_back(url: str) -> None:
    @keiro.step
    def books_nan(connection: sa.Connection) -> float:
        connection.execute(booked.insert().values(guest="ada"))
        return float("nan")

    @keiro.workflow
    async def unstorable(run: keiro.WorkflowRun) -> float:
        said: float = await run.transaction(books_nan, retry=keiro.Retry(attempts=5))
        return said

    async with keiro.Engine(url, workflows=[unstorable], migrate=True) as engine:
        with pytest.raises(keiro.WorkflowFailed) as failed:
            await engine.execute(unstorable)
    assert isinstance(failed.value.__cause__, keiro.PayloadRejected)
    assert guests(url) == []


async def test_a_violated_constraint_is_the_steps_own_failure(engine: keiro.Engine, url: str) -> None:
    await engine.execute(books, "ada", id="a")
    with pytest.raises(keiro.WorkflowFailed) as failed:
        await engine.execute(books, "ada", id="b")
    assert "booked" in str(failed.value.__cause__)
    assert calls == ["ada", "ada"]
    assert guests(url) == ["ada"]


async def test_a_constraint_that_is_checked_at_the_commit_is_too(postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as server:
        server.execute("CREATE TABLE booked (guest text UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    async with keiro.Engine(postgres_url, workflows=[books], migrate=True) as engine:
        await engine.execute(books, "ada", id="a")
        with pytest.raises(keiro.WorkflowFailed) as failed:
            await engine.execute(books, "ada", id="b")
        assert "duplicate key" in str(failed.value.__cause__)
        assert [one.status for one in await engine.runs()] == ["failed", "completed"]
    assert guests(postgres_url) == ["ada"]


async def test_many_at_once_and_steps_beside_them_are_each_recorded_once(url: str) -> None:
    @keiro.step
    async def nothing(n: int) -> int:
        return n

    @keiro.workflow
    async def crowd(run: keiro.WorkflowRun, size: int) -> int:
        async with asyncio.TaskGroup() as group:
            for n in range(size):
                scope = run.scope(f"{n}")
                group.create_task(scope.transaction(book, f"{run.key}-{n}"))
                group.create_task(run.step(nothing, n, key=f"nothing-{n}"))
        return size

    async with keiro.Engine(url, workflows=[crowd], migrate=True) as engine:
        handles = [await engine.start(crowd, 10, id=key) for key in "abc"]
        assert [await handle.result() for handle in handles] == [10] * 3
        for key in "abc":
            events = await journal(engine, f"wf:crowd-{key}")
            assert [event.originator_version for event in events] == [*range(1, 23)]
            names = {event.step for event in events if isinstance(event, StepRecorded)}
            assert names == {f"tx:{n}/book" for n in range(10)} | {f"nothing-{n}" for n in range(10)}
    assert guests(url) == sorted(f"{key}-{n}" for key in "abc" for n in range(10))


async def test_an_async_function_has_an_async_connection_and_may_start_runs_on_it(
    engine: keiro.Engine, url: str
) -> None:
    assert await engine.execute(books_and_greets, "ada", id="a") == "ada"
    assert await engine.handle("wf:greets-ada").result() == "hello ada"

    before["bob"] = once(ValueError("full"))
    with pytest.raises(keiro.WorkflowFailed):
        await engine.execute(books_and_greets, "bob", id="b")
    assert guests(url) == ["ada"]
    with pytest.raises(keiro.RunNotFound):
        await engine.handle("wf:greets-bob").status()


async def test_an_aggregate_of_the_library_is_saved_in_it(url: str) -> None:
    class Room(Aggregate):
        @event("Booked")
        def __init__(self, guest: str) -> None:
            self.guest = guest

    clear_topic_cache()
    if url.startswith("sqlite"):
        env = {"PERSISTENCE_MODULE": "keiro.stores.sqlite", "SQLITE_DBNAME": url.removeprefix("sqlite:///")}
    else:
        at = psycopg.conninfo.conninfo_to_dict(url)
        env = {"PERSISTENCE_MODULE": "keiro.stores.postgres", "POSTGRES_PASSWORD": str(at.get("password") or "x")}
        env |= {f"POSTGRES_{name.upper()}": str(at[name]) for name in ("dbname", "host", "port", "user")}
    rooms: Application[UUID] = Application(env=env)
    fails = [ValueError("full")]

    @keiro.step
    def save(connection: sa.Connection, guest: str) -> UUID:
        room = Room(guest)
        rooms.save(room, connection=connection)
        connection.execute(booked.insert().values(guest=guest))
        if fails:
            raise fails.pop()
        return room.id

    @keiro.workflow
    async def saves(run: keiro.WorkflowRun, guest: str) -> UUID:
        found: UUID = await run.transaction(save, guest, retry=keiro.Retry(attempts=2, initial=0.001))
        return found

    try:
        async with keiro.Engine(url, workflows=[saves], migrate=True) as engine:
            room: Room = rooms.repository.get(await engine.execute(saves, "ada"))
        assert room.guest == "ada"
        assert len(rooms.notification_log.select(start=1, limit=10)) == 1
    finally:
        rooms.close()
    assert guests(url) == ["ada"]


class Recorded(Projection):
    """How often each step was recorded."""

    name = "recorded"
    table = sa.Table(
        "recorded", sa.MetaData(), sa.Column("step", sa.Text, primary_key=True), sa.Column("n", sa.Integer)
    )
    topics = ("StepRecorded",)

    def keys(self, event: Any) -> list[str]:
        return [event.step]

    def fold(self, key: Any, row: Any, event: Any) -> dict[str, Any]:
        return {"n": 1 if row is None else row["n"] + 1}


class Remembered(Recorded):
    name = "remembered"
    table = Recorded.table.to_metadata(sa.MetaData(), name="remembered")
    store = "memory"


@pytest.mark.parametrize("projection", [Recorded, Remembered])
async def test_inline_projections_see_its_record(url: str, projection: type[Projection]) -> None:
    before["ada"] = once(ValueError("full"))
    async with keiro.Engine(url, workflows=[tries], projections=[projection], migrate=True) as engine:
        await engine.execute(tries, "ada")
        (row,) = await engine.rows(projection)
        assert (row.step, row.n) == ("tx:book", 1)


# Again


@pytest.mark.parametrize("kind", ["busy", "40001", "40P01"])
async def test_a_conflict_with_another_transaction_performs_all_of_it_again(
    engine: keiro.Engine, url: str, kind: str
) -> None:
    conflict: Exception
    if kind == "busy":
        conflict = sqlite3.OperationalError("database is locked")
        conflict.sqlite_errorcode = sqlite3.SQLITE_BUSY
    else:
        conflict = psycopg.errors.lookup(kind)("conflict")
    before["ada"] = once(conflict)

    assert await engine.execute(books, "ada", id="a") == "ada is booked"

    assert calls == ["ada", "ada"]
    assert guests(url) == ["ada"]
    assert len(await journal(engine, "wf:books-a")) == 3  # no attempt has failed


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("committed", [True, False])
async def test_an_answer_to_the_commit_that_is_lost_leads_to_one_effect(
    engine: keiro.Engine, url: str, monkeypatch: pytest.MonkeyPatch, committed: bool, asynchronous: bool
) -> None:
    """L: whether a commit happened is found out before anything is tried again."""
    commit = keiro.transactions._Ends.commit
    lost = [sa.exc.OperationalError("COMMIT", {}, Exception("the connection is lost"), connection_invalidated=True)]

    async def loses(self: Any) -> None:
        if lost and not committed:
            raise lost.pop()
        await commit(self)
        if lost:
            raise lost.pop()

    monkeypatch.setattr("keiro.transactions._Ends.commit", loses)
    workflow = books_and_greets if asynchronous else books

    said = await engine.execute(workflow, "ada", id="a")

    assert said == ("ada" if asynchronous else "ada is booked")
    assert guests(url) == ["ada"]
    if not asynchronous:
        assert calls == ["ada"] * (1 if committed else 2)
    events = await journal(engine, f"wf:{'books_and_greets' if asynchronous else 'books'}-a")
    assert [type(event).__name__ for event in events] == ["WorkflowStarted", "StepRecorded", "WorkflowCompleted"]


async def test_a_server_that_ends_the_connection_is_an_outage_and_no_failure(postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as server:
        server.execute("CREATE TABLE booked (guest text)")
    left = [True]

    def terminated(connection: sa.Connection) -> None:
        if left:
            left.pop()
            connection.execute(sa.text("SELECT pg_terminate_backend(pg_backend_pid())"))

    before["ada"] = terminated
    async with keiro.Engine(postgres_url, workflows=[books], migrate=True) as engine:
        assert await engine.execute(books, "ada", id="a") == "ada is booked"
        assert len(await journal(engine, "wf:books-a")) == 3
    assert guests(postgres_url) == ["ada"]


async def test_an_owner_that_has_lost_the_run_leaves_no_rows(engine: keiro.Engine, url: str) -> None:
    """Its fence is checked in the transaction, after its rows."""

    def taken_over(connection: sa.Connection) -> None:
        if url.startswith("sqlite"):  # where only who writes can write
            connection.execute(sa.text("UPDATE keiro_run_heads SET epoch = epoch + 1"))
        else:
            with psycopg.connect(url) as server:
                server.execute("UPDATE keiro.keiro_run_heads SET epoch = epoch + 1")

    before["ada"] = taken_over
    handle = await engine.start(books, "ada", id="a")
    while engine._resident.get("wf:books-a") is not None or not calls:
        await asyncio.sleep(0.002)

    assert guests(url) == []
    assert not [event for event in await journal(engine, "wf:books-a") if isinstance(event, StepRecorded)]
    assert await handle.status() == "running"


# Stopped


async def test_a_run_that_is_cancelled_meanwhile_leaves_no_rows(postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as server:
        server.execute("CREATE TABLE booked (guest text)")
    there = threading.Event()

    def hangs(connection: sa.Connection) -> None:
        there.set()
        connection.execute(sa.text("SELECT pg_sleep(600)"))

    before["ada"] = hangs
    async with keiro.Engine(postgres_url, workflows=[books], migrate=True) as engine:
        handle = await engine.start(books, "ada", id="a")
        await asyncio.to_thread(there.wait)
        assert await engine.cancel("wf:books-a", wait=True)
        with pytest.raises(keiro.WorkflowCancelled):
            await handle.result()
    assert guests(postgres_url) == []


LONG = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1000000000) SELECT count(*) FROM n"


async def test_its_timeout_interrupts_its_sql(url: str) -> None:
    @keiro.workflow
    async def limited(run: keiro.WorkflowRun, guest: str) -> str:
        said: str = await run.transaction(book, guest, timeout=0.05)
        return said

    before["ada"] = lambda connection: connection.execute(
        sa.text(LONG if url.startswith("sqlite") else "SELECT pg_sleep(600)")
    )
    async with keiro.Engine(url, workflows=[limited, books], migrate=True) as engine:
        with pytest.raises(keiro.WorkflowFailed) as failed:
            await engine.execute(limited, "ada")
        assert isinstance(failed.value.__cause__, TimeoutError)
        assert await engine.execute(books, "bob") == "bob is booked"  # the connection is as good as new
    assert guests(url) == ["bob"]


# Refused


async def test_in_memory_there_is_no_transaction_to_share() -> None:
    async with keiro.Engine("memory://", workflows=[books]) as engine:
        with pytest.raises(keiro.WorkflowFailed) as failed:
            await engine.execute(books, "ada")
    assert isinstance(failed.value.__cause__, keiro.InvalidCall)
    assert "replace_steps" in str(failed.value.__cause__)


async def test_one_that_is_replaced_in_a_test_has_no_connection() -> None:
    async with keiro.Engine("memory://", workflows=[books]) as engine:
        replace_steps(engine, {"book": lambda guest: f"{guest} pretends"})
        assert await engine.execute(books, "ada") == "ada pretends"


@pytest.mark.parametrize("missing", ["aiosqlite", "greenlet"])
async def test_a_package_that_async_functions_need_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    if missing == "greenlet":
        for name in [name for name in sys.modules if name.startswith(("sqlalchemy.ext.asyncio", "greenlet"))]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "sqlalchemy.ext.asyncio", None)
    else:
        monkeypatch.setitem(sys.modules, missing, None)
    async with keiro.Engine(f"sqlite:///{tmp_path}/keiro.db", workflows=[books_and_greets, greets]) as engine:
        with pytest.raises(keiro.WorkflowFailed) as failed:
            await engine.execute(books_and_greets, "ada")
    assert "pip install aiosqlite greenlet, or make it a plain function" in str(failed.value.__cause__)
