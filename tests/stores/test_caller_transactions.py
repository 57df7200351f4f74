"""Commands in the transaction of a caller: their rows, their commit, their savepoints, on every kind of connection."""

from __future__ import annotations

import asyncio
import inspect
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

import keiro
from keiro.errors import InvalidCall, ProjectionFailed, StoreBusy
from keiro.transactions import Transaction
from tests.projections.orders import Totals, expected_totals, order, values


class Caller:
    """A caller's connection, used alike whatever it is."""

    def __init__(self, connection: Any, execute: Callable[[str], Any], close: Callable[[], Any]) -> None:
        self.connection = connection
        self._execute = execute
        self._close = close

    async def execute(self, sql: str) -> Any:
        return await settled(self._execute(sql))

    async def commit(self) -> None:
        await settled(self.connection.commit())

    async def rollback(self) -> None:
        await settled(self.connection.rollback())

    async def close(self) -> None:
        await settled(self._close())


async def settled(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def sqlalchemy_url(url: str) -> str:
    return url.replace("postgresql:", "postgresql+psycopg:")


async def raw_sqlite(url: str) -> Caller:
    connection = sqlite3.connect(url.removeprefix("sqlite:///"))
    return Caller(connection, connection.execute, connection.close)


async def raw_psycopg(url: str) -> Caller:
    connection = psycopg.connect(url)
    return Caller(connection, lambda sql: connection.execute(sql.encode()), connection.close)


async def async_psycopg(url: str) -> Caller:
    connection = await psycopg.AsyncConnection.connect(url)
    return Caller(connection, lambda sql: connection.execute(sql.encode()), connection.close)


async def sqlalchemy(url: str) -> Caller:
    engine = sa.create_engine(sqlalchemy_url(url))
    connection = engine.connect()

    def close() -> None:
        connection.close()
        engine.dispose()

    return Caller(connection, connection.exec_driver_sql, close)


async def async_sqlalchemy(url: str) -> Caller:
    pytest.importorskip("greenlet", reason="AsyncConnection needs greenlet")
    if url.startswith("sqlite"):
        pytest.importorskip("aiosqlite")
    from sqlalchemy.ext.asyncio import create_async_engine

    engine = create_async_engine(sqlalchemy_url(url).replace("sqlite:", "sqlite+aiosqlite:"))
    connection = await engine.connect()

    async def close() -> None:
        await connection.close()
        await engine.dispose()

    return Caller(connection, connection.exec_driver_sql, close)


KINDS: list[tuple[str, Any]] = [
    ("sqlite", raw_sqlite),
    ("sqlite", sqlalchemy),
    ("sqlite", async_sqlalchemy),
    ("postgres", raw_psycopg),
    ("postgres", async_psycopg),
    ("postgres", sqlalchemy),
    ("postgres", async_sqlalchemy),
]


@pytest.fixture(params=KINDS, ids=[f"{store}-{kind.__name__}" for store, kind in KINDS])
def kind(request: pytest.FixtureRequest) -> tuple[str, Any]:
    found: tuple[str, Any] = request.param
    return found


@pytest.fixture
def url(kind: tuple[str, Any], request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if kind[0] == "sqlite":
        return f"sqlite:///{tmp_path}/keiro.db"
    found: str = request.getfixturevalue("postgres_url")
    return found


@pytest.fixture
async def engine(url: str) -> AsyncIterator[keiro.Engine]:
    async with keiro.Engine(url, workflows=[order], projections=[Totals], migrate=True) as engine:
        yield engine


@pytest.fixture
async def caller(kind: tuple[str, Any], url: str, engine: keiro.Engine) -> AsyncIterator[Caller]:
    """A connection of the application's, which has a table of its own and a row in it that is not committed."""
    caller: Caller = await kind[1](url)
    await caller.execute("CREATE TABLE application (id INTEGER)")
    await caller.commit()
    await caller.execute("INSERT INTO application VALUES (1)")
    yield caller
    await caller.close()


async def applied(caller: Caller) -> int:
    cursor = await caller.execute("SELECT count(*) FROM application")
    return int((await settled(cursor.fetchone()))[0])


async def nothing_written(engine: keiro.Engine) -> None:
    assert await engine.runs() == []
    assert await engine.store.read(0, 10) == []
    assert await engine.rows(Totals) == []


async def test_a_run_is_there_once_the_caller_commits_and_is_driven_to_its_end(
    engine: keiro.Engine, caller: Caller
) -> None:
    handle = await engine.start(order, "ada", 3, id="o-1", connection=caller.connection)
    await nothing_written(engine)
    await caller.commit()
    assert await handle.result(timeout=30) == 3
    assert await applied(caller) == 1
    assert values(await engine.rows(Totals)) == [("ada", 1, 3)]
    assert (await engine.rebuild(Totals)).differences == (await engine.rebuild("runs")).differences == 0


async def test_nothing_is_left_when_the_caller_rolls_back(engine: keiro.Engine, caller: Caller) -> None:
    await engine.start(order, "ada", 3, id="o-1", connection=caller.connection)
    await caller.rollback()
    await nothing_written(engine)
    assert await applied(caller) == 0
    assert await engine.execute(order, "ada", 4, id="o-1") == 4, "the key is free, and so is the lock"


async def test_a_savepoint_of_the_callers_takes_a_run_back(engine: keiro.Engine, caller: Caller) -> None:
    await caller.execute("SAVEPOINT mine")
    await engine.start(order, "ada", 3, connection=caller.connection)
    await caller.execute("ROLLBACK TO SAVEPOINT mine")
    second = await engine.start(order, "bob", 4, connection=caller.connection)
    await caller.commit()
    assert await second.result(timeout=30) == 4
    assert [run.run_id for run in await engine.runs()] == [second.run_id]
    assert values(await engine.rows(Totals)) == [("bob", 1, 4)]
    assert await applied(caller) == 1


async def test_a_run_started_so_is_owned_by_nobody(kind: tuple[str, Any], url: str) -> None:
    async with keiro.Engine(url, workflows=[order], migrate=True, worker=False) as client:
        caller: Caller = await kind[1](url)
        await caller.execute("CREATE TABLE application (id INTEGER)")
        handle = await client.start(order, "ada", connection=caller.connection)
        await caller.commit()
        await caller.close()
        assert await handle.status() is keiro.Status.PENDING
        async with keiro.Engine(url, workflows=[order]):
            assert await handle.result(timeout=30) == 1


async def test_a_key_that_exists_is_found_or_refused_and_the_caller_goes_on(
    engine: keiro.Engine, caller: Caller
) -> None:
    connection = caller.connection
    first = await engine.start(order, "ada", 3, id="o-1", connection=connection)
    again = await engine.start(order, "ada", 3, id="o-1", connection=connection)
    assert again.run_id == first.run_id
    with pytest.raises(keiro.RunConflict):
        await engine.start(order, "ada", 4, id="o-1", connection=connection)
    await caller.commit()
    assert await first.result(timeout=30) == 3
    assert len(await engine.runs()) == 1
    assert await applied(caller) == 1


async def test_a_command_that_a_projection_rejects_leaves_nothing_behind_whatever_the_caller_does(
    engine: keiro.Engine, caller: Caller
) -> None:
    with pytest.raises(ProjectionFailed, match="666 brings bad luck"):
        await engine.start(order, "ada", 666, connection=caller.connection)
    await caller.commit()
    await nothing_written(engine)
    assert await applied(caller) == 1


class Basket(keiro.WorkflowRun, name="caller_basket"):
    def __init__(self) -> None:
        self.items: list[str] = []

    @keiro.event("ItemAdded")
    def add(self, sku: str) -> None:
        if sku in self.items:
            raise ValueError("have it")
        self.items.append(sku)

    async def execute(self, customer: str) -> str:
        return customer


async def test_commands_see_what_the_transaction_has_written(kind: tuple[str, Any], url: str) -> None:
    async with keiro.Engine(url, workflows=[Basket], migrate=True, worker=False) as engine:
        caller: Caller = await kind[1](url)
        await caller.execute("CREATE TABLE application (id INTEGER)")
        handle = await engine.start(Basket, "ada", connection=caller.connection)
        assert await engine.command(handle.run_id, Basket.add, "a", connection=caller.connection) == 2
        with pytest.raises(ValueError, match="have it"):
            await engine.command(handle.run_id, Basket.add, "a", connection=caller.connection)
        assert await engine.command(handle.run_id, Basket.add, "b", id="once", connection=caller.connection) == 3
        assert await engine.command(handle.run_id, Basket.add, "b", id="once", connection=caller.connection) == 3
        with pytest.raises(keiro.RunNotFound):
            await engine.command(handle.run_id, Basket.add, "c")
        await caller.commit()
        await caller.close()
        assert await engine.command(handle.run_id, Basket.add, "c") == 4
        assert [stored.topic for stored in await engine.store.read(0, 10)] == [
            "WorkflowStarted",
            *["caller_basket:ItemAdded"] * 3,
        ]


async def test_many_callers_and_the_engine_itself_take_turns(kind: tuple[str, Any], url: str) -> None:
    """Whose lock it is, our own writer's too, nobody waits for it on the event loop."""
    async with keiro.Engine(url, workflows=[order], projections=[Totals], migrate=True) as engine:

        async def one(n: int) -> None:
            caller: Caller = await kind[1](url)
            for i in range(4):
                await engine.start(order, f"caller-{n}", i, connection=caller.connection)
                await asyncio.sleep(0)
                await (caller.rollback() if i == 2 else caller.commit())
            await caller.close()

        async with asyncio.timeout(120):
            await asyncio.gather(*(one(n) for n in range(5)), *(engine.execute(order, "direct", n) for n in range(40)))
        assert sorted(await expected_totals(engine)) == values(await engine.rows(Totals))
        assert sum(row.orders for row in await engine.rows(Totals)) == 40 + 5 * 3
        assert (await engine.rebuild(Totals)).differences == 0


# Wake-ups


@pytest.mark.parametrize("connect", [sqlalchemy, async_sqlalchemy])
async def test_a_commit_through_sqlalchemy_is_seen_at_once(
    connect: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keiro.worker.SAFETY_POLL_S", 3600.0)
    url = f"sqlite:///{tmp_path}/keiro.db"
    async with keiro.Engine(url, workflows=[order]) as engine:
        engine.store._poll.cancel()  # type: ignore[attr-defined]
        caller: Caller = await connect(url)
        for how in ("commit", "rollback", "commit"):
            handle = await engine.start(order, "ada", connection=caller.connection)
            if how == "commit":
                await caller.commit()
                assert await handle.result(timeout=30) == 1
            else:
                await caller.rollback()
        await caller.close()
        assert len(await engine.runs()) == 2


async def test_a_commit_on_another_thread_is_seen_once_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keiro.worker.SAFETY_POLL_S", 3600.0)
    url = f"sqlite:///{tmp_path}/keiro.db"
    async with keiro.Engine(url, workflows=[order]) as engine:
        engine.store._poll.cancel()  # type: ignore[attr-defined]
        caller = await sqlalchemy(url)
        handle = await engine.start(order, "ada", connection=caller.connection)
        await asyncio.to_thread(caller.connection.commit)
        assert await handle.result(timeout=30) == 1
        await caller.close()


# What is no connection to this journal


async def test_a_connection_elsewhere_is_refused(engine: keiro.Engine, kind: tuple[str, Any], tmp_path: Path) -> None:
    elsewhere = await sqlalchemy(f"sqlite:///{tmp_path}/elsewhere.db")
    with pytest.raises(InvalidCall, match="connection= "):
        await engine.start(order, "ada", connection=elsewhere.connection)
    with pytest.raises(InvalidCall, match="connection= "):
        await engine.start(order, "ada", connection=sqlite3.connect(":memory:"))
    for nonsense in ("sqlite://", object()):
        with pytest.raises(InvalidCall, match="connection= takes a SQLAlchemy"):
            await engine.start(order, "ada", connection=nonsense)
    await elsewhere.close()
    await nothing_written(engine)


async def test_another_database_of_the_same_server_is_refused(postgres_server: Any) -> None:
    with postgres_server.database() as url, postgres_server.database() as other:
        async with keiro.Engine(url, workflows=[order], migrate=True) as engine, keiro.Engine(other, migrate=True):
            for connect in (raw_psycopg, async_psycopg, sqlalchemy):
                caller = await connect(other)
                with pytest.raises(InvalidCall, match="another database"):
                    await engine.start(order, "ada", connection=caller.connection)
                await caller.close()


async def test_a_journal_in_memory_has_no_connections() -> None:
    async with keiro.Engine("memory://", workflows=[order]) as engine:
        with pytest.raises(InvalidCall, match="the journal is in memory"):
            await engine.start(order, "ada", connection=sqlite3.connect(":memory:"))


async def test_a_connection_without_a_transaction_is_refused(engine: keiro.Engine, url: str) -> None:
    connections: list[Any] = []
    if url.startswith("sqlite"):
        connections.append(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None))
    else:
        connections.append(psycopg.connect(url, autocommit=True))
    database = sa.create_engine(sqlalchemy_url(url), isolation_level="AUTOCOMMIT")
    connections.append(database.connect())
    for connection in connections:
        with pytest.raises(InvalidCall, match="no transaction is open"):
            await engine.start(order, "ada", connection=connection)
        connection.close()
    database.dispose()
    await nothing_written(engine)


# SQLite's one write lock


async def test_an_open_write_transaction_holds_up_the_engine_but_not_the_loop(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/keiro.db"
    async with keiro.Engine(url, workflows=[order]) as engine:
        caller = await raw_sqlite(url)
        await engine.start(order, "ada", 1, connection=caller.connection)
        waiting = asyncio.create_task(engine.execute(order, "bob", 2))
        for _ in range(200):
            await asyncio.sleep(0.001)  # each of these would take seconds if the loop waited for the lock
        assert not waiting.done()
        await caller.commit()
        assert await waiting == 2
        await caller.close()


async def test_a_caller_waits_for_the_lock_without_holding_up_the_loop(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/keiro.db"
    async with keiro.Engine(url, workflows=[order]) as engine:
        other = await raw_sqlite(url)
        await other.execute("CREATE TABLE application (id INTEGER)")
        await other.execute("INSERT INTO application VALUES (1)")
        caller = await raw_sqlite(url)
        waiting = asyncio.create_task(engine.start(order, "ada", connection=caller.connection))
        for _ in range(200):
            await asyncio.sleep(0.001)
        assert not waiting.done()
        assert caller.connection.execute("PRAGMA busy_timeout").fetchone() == (5000,), "the caller's own patience"
        await other.commit()
        handle = await waiting
        await caller.commit()
        assert await handle.result(timeout=30) == 1
        await other.close()
        await caller.close()


async def test_a_transaction_that_read_what_has_changed_since_is_told_to_begin_again(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/keiro.db"
    async with keiro.Engine(url, workflows=[order]) as engine:
        caller = await raw_sqlite(url)
        await caller.execute("BEGIN")
        await caller.execute("SELECT count(*) FROM keiro_runs")
        await engine.start(order, "bob")
        with pytest.raises(StoreBusy, match="BEGIN IMMEDIATE"):
            await engine.start(order, "ada", connection=caller.connection)
        await caller.rollback()
        await engine.start(order, "ada", connection=caller.connection)
        await caller.commit()
        assert len(await engine.runs()) == 2
        await caller.close()


# Postgres: snapshots, and waiting for the lock


async def test_a_snapshot_that_is_too_old_is_busy_and_not_a_broken_journal(postgres_url: str) -> None:
    async with keiro.Engine(postgres_url, workflows=[order], migrate=True, worker=False) as engine:
        caller = await raw_psycopg(postgres_url)
        caller.connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        await caller.execute("SELECT 1 FROM keiro.keiro_runs")
        await engine.start(order, "bob", id="o-1")
        with pytest.raises(StoreBusy):
            await engine.start(order, "ada", id="o-1", connection=caller.connection)
        await caller.rollback()
        with pytest.raises(keiro.RunConflict):
            await engine.start(order, "ada", id="o-1", connection=caller.connection)
        await caller.close()


@pytest.mark.parametrize("connect", [raw_psycopg, async_psycopg, sqlalchemy])
async def test_waiting_for_the_journal_can_be_cancelled(connect: Any, postgres_url: str) -> None:
    async with keiro.Engine(postgres_url, workflows=[order], migrate=True, worker=False) as engine:
        first, second = await raw_psycopg(postgres_url), await connect(postgres_url)
        await engine.start(order, "ada", connection=first.connection)
        waiting = asyncio.create_task(engine.start(order, "bob", connection=second.connection))
        while not (await first.execute("SELECT 1 FROM pg_locks WHERE NOT granted")).fetchall():
            await asyncio.sleep(0.001)
        waiting.cancel()
        async with asyncio.timeout(30):
            with pytest.raises(asyncio.CancelledError):
                await waiting
        await second.rollback()
        await first.commit()
        assert len(await engine.runs()) == 1
        await first.close()
        await second.close()


# Engine.transact


@pytest.fixture(params=["sqlite", "postgres"])
def any_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/keiro.db"
    found: str = request.getfixturevalue("postgres_url")
    return found


async def test_transact_is_for_sqlalchemy_connections_without_a_transaction(any_url: str) -> None:
    async with keiro.Engine(any_url, workflows=[order], migrate=True) as engine:
        raw = await (raw_sqlite if any_url.startswith("sqlite") else raw_psycopg)(any_url)
        with pytest.raises(InvalidCall, match="takes a SQLAlchemy connection"):
            await engine.transact(lambda _: None, connection=raw.connection)
        await raw.close()
        caller = await sqlalchemy(any_url)
        await caller.execute("SELECT 1")
        with pytest.raises(InvalidCall, match="open on this connection already"):
            await engine.transact(lambda _: None, connection=caller.connection)
        await caller.rollback()
        assert await engine.transact(lambda _: 7, connection=caller.connection) == 7
        await caller.close()


async def test_a_transaction_belongs_to_the_task_that_opened_it_and_ends_with_its_body(any_url: str) -> None:
    async with keiro.Engine(any_url, workflows=[order], migrate=True) as engine:
        caller = await sqlalchemy(any_url)

        async def body(transaction: Transaction) -> Transaction:
            for connection in (transaction, transaction.connection):
                child = asyncio.create_task(engine.start(order, "ada", connection=connection))
                with pytest.raises(InvalidCall, match="belongs to the task that opened it"):
                    await child
            return transaction

        ended = await engine.transact(body, connection=caller.connection)
        with pytest.raises(InvalidCall, match="has ended"):
            await engine.start(order, "ada", connection=ended)
        assert await engine.runs() == []
        await caller.close()


async def test_callbacks_run_in_order_after_the_commit_and_one_that_raises_is_logged(
    any_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with keiro.Engine(any_url, workflows=[order], migrate=True, worker=False) as engine:
        caller = await sqlalchemy(any_url)
        called: list[str] = []

        def broken() -> None:
            raise RuntimeError("nobody listens")

        async def body(transaction: Transaction) -> None:
            transaction.on_commit(lambda: called.append("first"))
            transaction.on_commit(broken)
            await engine.start(order, "ada", connection=transaction)
            transaction.on_commit(lambda: called.append("last"))
            assert called == []

        await engine.transact(body, connection=caller.connection)
        assert called == ["first", "last"]
        assert "nobody listens" in caplog.text
        assert len(await engine.runs()) == 1
        await caller.close()


async def test_more_transactions_at_once_than_there_are_threads_all_commit(postgres_url: str) -> None:
    """Whoever waits for the journal's lock waits in a thread, and who holds it needs one to commit."""
    database = sa.create_engine(sqlalchemy_url(postgres_url), pool_size=30)
    async with keiro.Engine(postgres_url, workflows=[order], migrate=True, worker=False) as engine:

        async def place(n: int) -> None:
            async def body(transaction: Transaction) -> None:
                await engine.start(order, "ada", id=str(n), connection=transaction)

            connection = await asyncio.to_thread(database.connect)
            await engine.transact(body, connection=connection)
            await asyncio.to_thread(connection.close)

        await asyncio.gather(*(place(n) for n in range(30)))
        assert len(await engine.runs(limit=100)) == 30
    database.dispose()
