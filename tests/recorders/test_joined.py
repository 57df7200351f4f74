"""`save(…, connection=…)` records in the caller's transaction: with its commit, or not at all."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest
import sqlalchemy as sa
from eventsourcing.application import AggregateNotFoundError
from eventsourcing.persistence import IntegrityError, Tracking
from psycopg.rows import dict_row

from keiro.errors import KeiroError
from keiro.stores.recorders import sqlite
from keiro.stores.recorders.common import UnusableConnection
from tests.recorders.accounts import Account, Accounts, SnapshottingAccounts, stored, tailing, wait_for_listener
from tests.recorders.conftest import MEMORY_SETTINGS, Settings, closing_factory, postgres_settings, sqlite_settings

ORDERS = sa.Table("orders", sa.MetaData(), sa.Column("number", sa.Integer, primary_key=True))


class Caller:
    """A transaction on a connection that the application did not open, seen through one interface."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    def order(self, number: int) -> None:
        """Write a row that has nothing to do with events."""
        if isinstance(self.connection, sa.Connection):
            self.connection.execute(sa.insert(ORDERS).values(number=number))
        else:
            self.connection.execute(f"INSERT INTO orders VALUES ({number})")

    def commit(self) -> None:
        self.connection.commit()

    def rollback(self) -> None:
        self.connection.rollback()


def driver_url(settings: Settings) -> sa.URL:
    """Where SQLAlchemy finds the database."""
    if "SQLITE_DBNAME" in settings:
        return sa.URL.create("sqlite", database=settings["SQLITE_DBNAME"])
    return sa.URL.create(
        "postgresql+psycopg",
        username=settings["POSTGRES_USER"],
        host=settings["POSTGRES_HOST"],
        port=int(settings["POSTGRES_PORT"]),
        database=settings["POSTGRES_DBNAME"],
    )


def connect_raw(settings: Settings, **kwargs: Any) -> Any:
    """A connection of the driver."""
    if "SQLITE_DBNAME" in settings:
        return sqlite3.connect(settings["SQLITE_DBNAME"], timeout=0.1, **kwargs)
    url = driver_url(settings).set(drivername="postgresql")
    return psycopg.connect(url.render_as_string(), **kwargs)


@pytest.fixture
def engine(sql_settings: Settings) -> Iterator[sa.Engine]:
    engine = sa.create_engine(driver_url(sql_settings))
    ORDERS.metadata.create_all(engine)
    yield engine
    engine.dispose()


# sqlite3 has a mode, since Python 3.12, in which a transaction is open at all times.
CALLERS = ["sqlalchemy", "driver", *(["driver, always in a transaction"] if sys.version_info >= (3, 12) else [])]


@pytest.fixture(params=CALLERS)
def caller(request: pytest.FixtureRequest, sql_settings: Settings, engine: sa.Engine) -> Iterator[Caller]:
    """A caller with nothing begun yet."""
    mode = {"autocommit": False} if "always" in request.param else {}
    with (
        engine.connect() if request.param == "sqlalchemy" else closing(connect_raw(sql_settings, **mode)) as connection
    ):
        yield Caller(connection)


@pytest.fixture
def elsewhere(request: pytest.FixtureRequest, sql_settings: Settings, tmp_path: Path) -> Iterator[Settings]:
    """Another database of the same kind."""
    if "SQLITE_DBNAME" in sql_settings:
        yield sqlite_settings(tmp_path / "elsewhere.db")
    else:
        with request.getfixturevalue("postgres_server").database() as url:
            yield postgres_settings(url)


@pytest.fixture
def app(sql_settings: Settings) -> Iterator[Accounts]:
    app = Accounts(sql_settings)
    yield app
    app.close()


def orders(engine: sa.Engine) -> list[int]:
    with engine.connect() as connection:
        return list(connection.scalars(sa.select(ORDERS.c.number).order_by(ORDERS.c.number)))


def committed(app: Accounts) -> list[int]:
    return [n.id for n in app.recorder.select_notifications(None, 100)]


def in_another_thread(function: Callable[[], Any]) -> Any:
    """What a function returns or raises in a thread that has joined nothing."""
    result: list[Any] = []
    error: list[BaseException] = []

    def run() -> None:
        try:
            result.append(function())
        except BaseException as raised:
            error.append(raised)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    if error:
        raise error[0]
    return result[0]


def test_events_are_there_when_the_caller_commits_and_not_before(
    app: Accounts, caller: Caller, engine: sa.Engine
) -> None:
    caller.order(1)
    account = Account("ann")
    account.deposit(5)
    recordings = app.save(account, connection=caller.connection)
    assert [r.notification.id for r in recordings] == [1, 2]
    assert committed(app) == []
    caller.commit()
    assert committed(app) == [1, 2]
    assert orders(engine) == [1]
    assert app.balance(account.id) == 5


def test_a_rollback_takes_the_events_with_it(app: Accounts, caller: Caller, engine: sa.Engine) -> None:
    caller.order(1)
    account_id = app.open("ann", connection=caller.connection)
    caller.rollback()
    assert committed(app) == []
    assert orders(engine) == []
    with pytest.raises(AggregateNotFoundError):
        app.repository.get(account_id)


def test_save_alone_begins_what_the_caller_then_commits_or_rolls_back(app: Accounts, caller: Caller) -> None:
    for _ in range(2):
        app.open("ann", connection=caller.connection)
        caller.rollback()
        assert committed(app) == []
    app.open("bob", connection=caller.connection)
    caller.commit()
    assert len(committed(app)) == 1


def test_subscribers_are_woken_after_the_commit(app: Accounts, caller: Caller) -> None:
    with tailing(app.recorder) as tail:
        app.open("ann", connection=caller.connection)
        assert tail.ids == []
        caller.commit()
        tail.wait_for(lambda ids: len(ids) == 1)


def test_sqlalchemy_wakes_subscribers_without_their_poll(
    app: Accounts, sql_settings: Settings, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "_POLL_INTERVAL_S", 3600.0)
    monkeypatch.setattr("keiro.stores.recorders.postgres._POLL_INTERVAL_S", 3600.0)
    with tailing(app.recorder) as tail:
        in_another_thread(lambda: app.open("first"))
        tail.wait_for(lambda ids: len(ids) == 1)
        if "POSTGRES_DBNAME" in sql_settings:
            wait_for_listener(driver_url(sql_settings).set(drivername="postgresql").render_as_string())
        with engine.begin() as connection:
            app.open("ann", connection=connection)
        tail.wait_for(lambda ids: len(ids) == 2)


def test_a_refused_save_undoes_its_own_writes_and_leaves_the_transaction_usable(
    app: Accounts, caller: Caller, engine: sa.Engine
) -> None:
    first, second = stored(3)[0], stored(3)
    app.recorder.insert_events([first])
    duplicate = [*second, first]
    caller.order(1)
    with pytest.raises(IntegrityError):
        app.recorder.insert_events(duplicate, connection=caller.connection)
    caller.order(2)
    caller.commit()
    assert orders(engine) == [1, 2]
    assert len(committed(app)) == 1


def test_the_thread_that_saved_sees_its_uncommitted_events_and_others_do_not(app: Accounts, caller: Caller) -> None:
    account_id = app.open("ann", connection=caller.connection)
    app.deposit(account_id, 5, connection=caller.connection)
    app.deposit(account_id, 6, connection=caller.connection)
    assert app.balance(account_id) == 11
    with pytest.raises(AggregateNotFoundError):
        in_another_thread(lambda: app.balance(account_id))
    caller.commit()
    assert in_another_thread(lambda: app.balance(account_id)) == 11


async def test_another_task_does_not_see_uncommitted_events(sql_settings: Settings, engine: sa.Engine) -> None:
    app = Accounts(sql_settings)
    saved, looked = asyncio.Event(), asyncio.Event()
    ids: list[UUID] = []

    async def saving() -> None:
        with engine.connect() as connection:
            ids.append(app.open("ann", connection=connection))
            saved.set()
            await looked.wait()
            connection.rollback()

    async def looking() -> None:
        await saved.wait()
        with pytest.raises(AggregateNotFoundError):
            app.balance(ids[0])
        looked.set()

    await asyncio.gather(saving(), looking())
    app.close()


def test_snapshots_taken_by_save_join_too(sql_settings: Settings, caller: Caller) -> None:
    app = SnapshottingAccounts(sql_settings)
    account = Account("ann")
    account.deposit(5)
    app.save(account, connection=caller.connection)
    assert app.snapshots is not None
    assert in_another_thread(lambda: list(app.snapshots.get(account.id))) == []
    caller.rollback()
    assert list(app.snapshots.get(account.id)) == []

    account = Account("bob")
    account.deposit(6)
    app.save(account, connection=caller.connection)
    caller.commit()
    assert [s.originator_version for s in app.snapshots.get(account.id)] == [2]
    assert app.balance(account.id) == 6
    app.close()


def test_a_save_beside_the_joined_transaction_is_refused_where_it_would_wait_for_ever(
    app: Accounts, caller: Caller
) -> None:
    app.open("ann", connection=caller.connection)
    with pytest.raises(UnusableConnection, match="connection="):
        app.open("bob")
    caller.commit()
    # Open again, but no longer the transaction that holds the lock.
    caller.connection.execute(sa.select(1) if isinstance(caller.connection, sa.Connection) else "SELECT 1")
    app.open("bob")
    assert len(committed(app)) == 2


def test_another_database_is_none_of_the_transactions_business(
    app: Accounts, engine: sa.Engine, elsewhere: Settings
) -> None:
    other = Accounts(elsewhere)
    with engine.connect() as connection:
        app.open("ann", connection=connection)
        account_id = other.open("bob")
        assert other.balance(account_id) == 0
        connection.rollback()
    assert len(committed(other)) == 1
    assert committed(app) == []
    other.close()


def test_after_the_commit_the_same_connection_is_no_longer_joined(app: Accounts, caller: Caller) -> None:
    app.open("ann", connection=caller.connection)
    caller.commit()
    app.open("bob")
    app.open("carl", connection=caller.connection)
    caller.commit()
    assert len(committed(app)) == 3


def test_events_and_tracking_join_together(sql_settings: Settings, caller: Caller) -> None:
    with closing_factory(sql_settings) as factory:
        recorder = factory.process_recorder()
        recorder.insert_events(stored(2), tracking=Tracking("up", 1), connection=caller.connection)
        assert recorder.max_tracking_id("up") is None
        caller.rollback()
        assert recorder.max_tracking_id("up") is None
        recorder.insert_events(stored(2), tracking=Tracking("up", 2), connection=caller.connection)
        caller.commit()
        assert recorder.max_tracking_id("up") == 2
        before = recorder.max_notification_id()
        with pytest.raises(IntegrityError):
            recorder.insert_events(stored(2), tracking=Tracking("up", 2), connection=caller.connection)
        recorder.insert_events([], tracking=Tracking("up", 3), connection=caller.connection)
        caller.commit()
        assert recorder.max_notification_id() == before
        assert recorder.max_tracking_id("up") == 3


def test_positions_follow_commits_although_a_caller_waits_before_its_own(
    app: Accounts, caller: Caller, sql_settings: Settings
) -> None:
    app.open("ann", connection=caller.connection)
    other = Accounts({**sql_settings, "SQLITE_LOCK_TIMEOUT": "30"})
    waiting = threading.Thread(target=other.open, args=("bob",))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    assert committed(app) == []
    caller.commit()
    waiting.join(30)
    assert committed(app) == [1, 2]
    assert [n.originator_version for n in app.recorder.select_notifications(None, 9)] == [1, 1]
    other.close()


def test_two_applications_record_in_one_transaction(sql_settings: Settings, caller: Caller) -> None:
    class Ledgers(Accounts):
        name = "ledgers"

    first, second = Accounts(sql_settings), Ledgers(sql_settings)
    one = first.open("ann", connection=caller.connection)
    two = second.open("bob", connection=caller.connection)
    first.deposit(one, 5, connection=caller.connection)
    caller.commit()
    assert (first.balance(one), second.balance(two)) == (5, 0)
    first.close()
    second.close()


def test_a_view_and_an_application_share_a_transaction(sql_settings: Settings, app: Accounts) -> None:
    with closing_factory(sql_settings) as factory:
        view: Any = factory.tracking_recorder()
        with view.transaction(Tracking("up", 1)) as connection:
            account_id = app.open("ann", connection=connection)
        assert app.balance(account_id) == 0
        assert view.max_tracking_id("up") == 1
        with pytest.raises(ValueError, match="changed my mind"), view.transaction(Tracking("up", 2)) as connection:
            app.open("bob", connection=connection)
            raise ValueError("changed my mind")
        assert len(committed(app)) == 1


def test_connections_in_autocommit_mode_are_refused(app: Accounts, sql_settings: Settings, engine: sa.Engine) -> None:
    mode = {"isolation_level": None} if "SQLITE_DBNAME" in sql_settings else {"autocommit": True}
    with (
        closing(connect_raw(sql_settings, **mode)) as raw,
        engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
    ):
        for refused in (raw, connection):
            with pytest.raises(UnusableConnection, match="autocommit"):
                app.open("ann", connection=refused)
    assert committed(app) == []


def test_an_explicit_transaction_on_a_connection_in_autocommit_mode_can_be_joined(
    app: Accounts, sql_settings: Settings
) -> None:
    mode = {"isolation_level": None} if "SQLITE_DBNAME" in sql_settings else {"autocommit": True}
    with closing(connect_raw(sql_settings, **mode)) as raw:
        for end in ("ROLLBACK", "COMMIT"):
            raw.execute("BEGIN")
            app.open("ann", connection=raw)
            raw.execute(end)
    assert len(committed(app)) == 1


def test_rows_of_another_shape_on_the_callers_connection_do_not_matter(app: Accounts, sql_settings: Settings) -> None:
    with closing(connect_raw(sql_settings)) as raw:
        raw.row_factory = sqlite3.Row if "SQLITE_DBNAME" in sql_settings else dict_row
        account_id = app.open("ann", connection=raw)
        app.deposit(account_id, 5, connection=raw)
        raw.commit()
    assert app.balance(account_id) == 5


def test_connections_to_elsewhere_are_refused(app: Accounts, elsewhere: Settings) -> None:
    name = elsewhere.get("SQLITE_DBNAME") or elsewhere["POSTGRES_DBNAME"]
    with closing(connect_raw(elsewhere)) as raw, pytest.raises(UnusableConnection, match=name):
        app.open("ann", connection=raw)
    for nonsense in (object(), sa.create_engine("sqlite://")):
        with pytest.raises(UnusableConnection, match=r"sqlalchemy\.Connection"):
            app.open("ann", connection=nonsense)
    assert committed(app) == []


def test_memory_has_no_transaction_to_join() -> None:
    with closing(sqlite3.connect(":memory:")) as raw:
        for recorder in ("application_recorder", "process_recorder", "aggregate_recorder"):
            with closing_factory(MEMORY_SETTINGS) as factory:
                with pytest.raises(UnusableConnection, match="connection=") as raised:
                    getattr(factory, recorder)().insert_events(stored(), connection=raw)
                assert isinstance(raised.value, KeiroError)
