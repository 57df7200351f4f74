"""Settings mean what they mean in the library's own persistence modules."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from eventsourcing.cipher import AESCipher
from eventsourcing.persistence import (
    DataError,
    InfrastructureFactory,
    IntegrityError,
    JSONTranscoder,
    Mapper,
    OperationalError,
    ProgrammingError,
    Tracking,
)
from eventsourcing.utils import Environment, get_topic

from keiro.errors import KeiroError
from keiro.stores.recorders.common import InvalidSetting, UnsupportedRecorder
from keiro.stores.recorders.mapping import FlatEventMapper
from keiro.stores.recorders.memory import MemoryApplicationRecorder, MemoryProcessRecorder
from keiro.stores.recorders.postgres import PostgresApplicationRecorder, PostgresProcessRecorder
from keiro.stores.recorders.sqlite import SQLiteApplicationRecorder, SQLiteProcessRecorder
from tests.recorders.accounts import Accounts, SnapshottingAccounts, stored
from tests.recorders.conftest import Settings, closing_factory, postgres_settings, sqlite_settings


class OwnMapper(Mapper[UUID]):
    """A mapper of the user's own."""


class OwnTranscoder(JSONTranscoder):
    """A transcoder of the user's own."""


class OwnMemoryApplication(MemoryApplicationRecorder):
    pass


class OwnMemoryProcess(MemoryProcessRecorder):
    pass


class OwnSQLiteApplication(SQLiteApplicationRecorder):
    pass


class OwnSQLiteProcess(SQLiteProcessRecorder):
    pass


class OwnPostgresApplication(PostgresApplicationRecorder):
    pass


class OwnPostgresProcess(PostgresProcessRecorder):
    pass


def tables(settings: Settings) -> set[str]:
    """The names of all tables in the database."""
    with closing_factory(settings) as factory:
        datastore: Any = factory.datastore  # type: ignore[attr-defined]
        if "SQLITE_DBNAME" in settings:
            return {name for (name,) in datastore.read("SELECT name FROM sqlite_master WHERE type = 'table'")}
        found = datastore.execute(
            b"SELECT schemaname, tablename FROM pg_tables WHERE schemaname NOT LIKE 'pg|_%%' ESCAPE '|'"
            b" AND schemaname <> 'information_schema' AND %b",
            (True,),
        )
        return {name if schema == "public" else f"{schema}.{name}" for schema, name in found}


def store_of(settings: Settings) -> str:
    return settings["PERSISTENCE_MODULE"].rpartition(".")[2]


@pytest.mark.parametrize("name", ["memory", "sqlite", "postgres"])
def test_a_persistence_module_shows_exactly_one_factory(name: str) -> None:
    module: ModuleType = importlib.import_module(f"keiro.stores.recorders.{name}")
    factories = {
        member
        for member in vars(module).values()
        if isinstance(member, type)
        and issubclass(member, InfrastructureFactory)
        and not getattr(member, "__parameters__", None)
    }
    assert factories == {module.Factory}


def test_tables_have_the_names_the_library_gives_them(sql_settings: Settings) -> None:
    SnapshottingAccounts(sql_settings).close()
    with closing_factory(sql_settings) as factory:
        factory.process_recorder()
    if store_of(sql_settings) == "sqlite":
        assert tables(sql_settings) == {"stored_events", "stored_snapshots", "tracking"}
    else:
        expected = {"accounts_events", "accounts_snapshots", "stored_events", "notification_tracking"}
        assert tables(sql_settings) == expected


def test_a_setting_with_the_applications_name_wins(sql_settings: Settings, tmp_path: Path) -> None:
    if store_of(sql_settings) == "sqlite":
        wrong = sqlite_settings(tmp_path / "wrong.db")
        settings = {**wrong, "ACCOUNTS_SQLITE_DBNAME": sql_settings["SQLITE_DBNAME"]}
    else:
        settings = {**sql_settings, "ACCOUNTS_POSTGRES_SCHEMA": "other", "POSTGRES_SCHEMA": "missing"}
        with closing_factory(sql_settings) as factory:
            factory.datastore.execute(b"CREATE SCHEMA other")  # type: ignore[attr-defined]
    app = Accounts(settings)
    app.open("ann")
    app.close()
    assert {"stored_events", "other.accounts_events"} & tables(sql_settings)


def test_without_create_table_nothing_is_created(sql_settings: Settings) -> None:
    with closing_factory({**sql_settings, "CREATE_TABLE": "n"}) as factory:
        recorder = factory.application_recorder()
        factory.tracking_recorder()
        with pytest.raises((ProgrammingError, OperationalError), match="stored_events"):
            recorder.insert_events(stored())
    assert tables(sql_settings) == set()


def test_text_ids_are_stored_as_they_are(settings: Settings) -> None:
    with closing_factory({**settings, "ORIGINATOR_ID_TYPE": "TEXT"}) as factory:
        recorder = factory.application_recorder()
        for key in ("account:ä/1", str(uuid4())):
            recorder.insert_events([*stored(1, originator_id=key)])  # type: ignore[arg-type]
            assert [e.originator_id for e in recorder.select_events(key)] == [key]
        notifications = recorder.select_notifications(None, 9)
    assert [type(n.originator_id) for n in notifications] == [str, str]


def test_uuids_stay_uuids(settings: Settings) -> None:
    with closing_factory(settings) as factory:
        recorder = factory.application_recorder()
        event = stored()[0]
        recorder.insert_events([event])
        assert recorder.select_events(event.originator_id) == [event]
        assert recorder.select_notifications(None, 1)[0].originator_id == event.originator_id


def test_an_id_that_is_no_uuid_is_refused_where_ids_are_uuids(sql_settings: Settings) -> None:
    with closing_factory(sql_settings) as factory:
        for recorder in (factory.application_recorder(), factory.aggregate_recorder("snapshots")):
            with pytest.raises(DataError, match="ORIGINATOR_ID_TYPE=text"):
                recorder.insert_events(stored(originator_id="account-1"))  # type: ignore[arg-type]


def test_cipher_and_compressor_change_what_is_stored_and_not_what_is_read(settings: Settings) -> None:
    secret = {
        **settings,
        "COMPRESSOR_TOPIC": "zlib",
        "ACCOUNTS_CIPHER_KEY": AESCipher.create_key(16),
        "CIPHER_TOPIC": "eventsourcing.cipher:AESCipher",
    }
    app = SnapshottingAccounts(secret)
    account_id = app.open("a very particular owner")
    app.deposit(account_id, 5)
    assert app.balance(account_id) == 5
    assert app.snapshots is not None
    states = [n.state for n in app.recorder.select_notifications(None, 9)]
    states += [e.state for e in app.snapshots.recorder.select_events(account_id)]
    assert len(states) == 3
    assert not any(b"particular" in state or state.startswith(b"{") for state in states)
    app.close()


def test_transcoder_and_mapper_topics_are_obeyed(factory: InfrastructureFactory) -> None:
    assert type(factory.transcoder()) is JSONTranscoder
    assert type(factory.mapper()) is FlatEventMapper
    factory.env["TRANSCODER_TOPIC"] = get_topic(OwnTranscoder)
    assert type(factory.mapper().transcoder) is OwnTranscoder
    factory.env["MAPPER_TOPIC"] = get_topic(OwnMapper)
    assert type(factory.mapper()) is OwnMapper


def test_recorder_topics_are_obeyed(settings: Settings, factory: InfrastructureFactory) -> None:
    name = {"memory": "Memory", "sqlite": "SQLite", "postgres": "Postgres"}[store_of(settings)]
    own = globals()[f"Own{name}Application"], globals()[f"Own{name}Process"]
    factory.env["APPLICATION_RECORDER_TOPIC"], factory.env["PROCESS_RECORDER_TOPIC"] = map(get_topic, own)
    assert (type(factory.application_recorder()), type(factory.process_recorder())) == own
    factory.env["APPLICATION_RECORDER_TOPIC"] = "eventsourcing.sqlite:SQLiteApplicationRecorder"
    with pytest.raises(UnsupportedRecorder, match="SQLiteApplicationRecorder"):
        factory.application_recorder()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CREATE_TABLE", "perhaps"),
        ("ORIGINATOR_ID_TYPE", "int"),
        ("SINGLE_ROW_TRACKING", "perhaps"),
        ("SQLITE_LOCK_TIMEOUT", "soon"),
        ("SQLITE_LOCK_TIMEOUT", "-1"),
        ("SQLITE_LOCK_TIMEOUT", "nan"),
        ("SQLITE_LOCK_TIMEOUT", "inf"),
        ("SQLITE_DBNAME", ""),
        ("POSTGRES_DBNAME", None),
        ("POSTGRES_HOST", None),
        ("POSTGRES_USER", None),
        ("POSTGRES_PASSWORD", None),
        ("POSTGRES_CONNECT_TIMEOUT", "soon"),
        ("POSTGRES_IDLE_IN_TRANSACTION_SESSION_TIMEOUT", "soon"),
        ("POSTGRES_LOCK_TIMEOUT", "soon"),
        ("POSTGRES_POOL_SIZE", "1.5"),
        ("POSTGRES_MAX_OVERFLOW", "many"),
        ("POSTGRES_MAX_WAITING", "many"),
        ("POSTGRES_CONN_MAX_AGE", "old"),
        ("POSTGRES_PRE_PING", "perhaps"),
    ],
)
def test_a_setting_that_cannot_be_read_is_named(name: str, value: str | None, tmp_path: Path) -> None:
    if name.startswith("POSTGRES"):
        settings = postgres_settings("postgresql://nobody@127.0.0.1:1/none")
    else:
        settings = sqlite_settings(tmp_path / "events.db")
    settings.pop(name, None)
    if value is not None:
        settings[name] = value
    with pytest.raises(InvalidSetting, match=f"ACCOUNTS_{name} or {name}") as raised:
        InfrastructureFactory.construct(Environment("accounts", settings)).application_recorder()
    assert isinstance(raised.value, OSError)
    assert isinstance(raised.value, KeiroError)


def test_tracking_of_many_rows_refuses_only_what_is_there(sql_settings: Settings) -> None:
    with closing_factory({**sql_settings, "SINGLE_ROW_TRACKING": "n"}) as factory:
        recorder = factory.process_recorder()
        recorder.insert_tracking(Tracking("up", 1))
        recorder.insert_events(stored(2), tracking=Tracking("up", 2))
        for position in (1, 2):
            with pytest.raises(IntegrityError):
                recorder.insert_events(stored(), tracking=Tracking("up", position))
        assert recorder.max_tracking_id("up") == 2


def test_a_table_of_many_rows_becomes_one_of_single_rows(sql_settings: Settings) -> None:
    with closing_factory({**sql_settings, "SINGLE_ROW_TRACKING": "n"}) as factory:
        recorder = factory.tracking_recorder()
        for tracking in (Tracking("up", 1), Tracking("up", 2), Tracking("other", 7)):
            recorder.insert_tracking(tracking)
    for _ in range(2):
        with closing_factory(sql_settings) as factory:
            recorder = factory.tracking_recorder()
            assert (recorder.max_tracking_id("up"), recorder.max_tracking_id("other")) == (2, 7)
            with pytest.raises(IntegrityError):
                recorder.insert_tracking(Tracking("up", 2))
    assert {"old1_tracking", "bkup1_notification_tracking"} & tables(sql_settings)


@pytest.mark.parametrize("create_table", ["y", "n"])
def test_a_table_of_single_rows_cannot_be_used_for_many(sql_settings: Settings, create_table: str) -> None:
    with closing_factory(sql_settings) as factory:
        factory.tracking_recorder().insert_tracking(Tracking("up", 1))
    many = {**sql_settings, "SINGLE_ROW_TRACKING": "n", "CREATE_TABLE": create_table}
    with closing_factory(many) as factory, pytest.raises(OperationalError, match="SINGLE_ROW_TRACKING"):
        factory.tracking_recorder().insert_tracking(Tracking("up", 2))


def give_password() -> str:
    """Found by POSTGRES_GET_PASSWORD_TOPIC."""
    return "secret"


def test_the_password_comes_from_a_function_if_a_topic_names_one(postgres_url: str) -> None:
    settings = postgres_settings(postgres_url)
    del settings["POSTGRES_PASSWORD"]
    settings["POSTGRES_GET_PASSWORD_TOPIC"] = get_topic(give_password)
    app = Accounts(settings)
    assert app.balance(app.open("ann")) == 0
    app.close()


def test_the_lock_timeout_ends_the_wait_for_another_writer(postgres_url: str) -> None:
    app = Accounts({**postgres_settings(postgres_url), "POSTGRES_LOCK_TIMEOUT": "1"})
    with psycopg.connect(postgres_url) as other:
        other.execute("LOCK TABLE accounts_events IN EXCLUSIVE MODE")
        with pytest.raises(OperationalError, match="lock timeout"):
            app.open("ann")
    app.open("ann")
    app.close()


def test_the_idle_in_transaction_timeout_is_set_on_connections(postgres_url: str) -> None:
    settings = {**postgres_settings(postgres_url), "POSTGRES_IDLE_IN_TRANSACTION_SESSION_TIMEOUT": "7"}
    with closing_factory(settings) as factory:
        found = factory.datastore.execute(b"SHOW idle_in_transaction_session_timeout")  # type: ignore[attr-defined]
    assert found == [("7s",)]


def test_a_full_pool_refuses_those_who_may_not_wait(postgres_url: str) -> None:
    settings = {
        **postgres_settings(postgres_url),
        "POSTGRES_POOL_SIZE": "1",
        "POSTGRES_MAX_OVERFLOW": "0",
        "POSTGRES_CONNECT_TIMEOUT": "1",
    }
    with closing_factory(settings) as factory:
        view: Any = factory.tracking_recorder()
        with view.transaction(), pytest.raises(OperationalError, match="POSTGRES_POOL_SIZE"):
            view.max_tracking_id("up")
        assert view.max_tracking_id("up") is None


def test_only_so_many_may_wait_for_a_connection(postgres_url: str) -> None:
    settings = {
        **postgres_settings(postgres_url),
        "POSTGRES_POOL_SIZE": "1",
        "POSTGRES_MAX_OVERFLOW": "0",
        "POSTGRES_MAX_WAITING": "1",
    }
    with closing_factory(settings) as factory:
        view: Any = factory.tracking_recorder()
        with view.transaction():
            waiting = threading.Thread(target=view.max_tracking_id, args=("up",))
            waiting.start()
            while view.datastore._requests < 2:
                waiting.join(0.01)
            with pytest.raises(OperationalError, match="POSTGRES_POOL_SIZE"):
                view.max_tracking_id("up")
        waiting.join(30)
        assert view.max_tracking_id("up") is None


def test_names_of_tables_that_do_not_fit_are_refused(postgres_url: str) -> None:
    environment = Environment("x" * 60, postgres_settings(postgres_url))
    factory = InfrastructureFactory[Any].construct(environment)
    constructors: list[Callable[[], Any]] = [factory.application_recorder, factory.tracking_recorder]
    for construct in constructors:
        with pytest.raises(ProgrammingError, match="longer than the 63 bytes"):
            construct()
    factory.close()
