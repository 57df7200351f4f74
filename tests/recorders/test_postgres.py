"""What is particular to Postgres: lost connections, commits nobody heard of, order among many writers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import psycopg
import pytest
from eventsourcing.persistence import (
    IntegrityError,
    InterfaceError,
    OperationalError,
    ProcessRecorder,
    StoredEvent,
    Tracking,
)

from keiro.stores.recorders import postgres_connections
from keiro.stores.recorders.postgres_connections import ConnectionLost
from keiro.testing.postgres import PostgresServer
from tests.recorders.accounts import Accounts, stored, tailing
from tests.recorders.conftest import Settings, closing_factory, postgres_settings
from tests.recorders.test_views import PostgresOwners


@pytest.fixture
def postgres(postgres_url: str) -> Settings:
    return postgres_settings(postgres_url)


@pytest.fixture
def recorder(postgres: Settings) -> Iterator[ProcessRecorder]:
    with closing_factory(postgres) as factory:
        yield factory.process_recorder()


@pytest.fixture(params=["before", "after"])
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Cuts the connection of the next statement, before the server commits it or after."""
    armed = [False]
    run = postgres_connections._run

    def cutting(connection: Any, *args: Any) -> Any:
        if not armed[0] or b"INSERT" not in args[0]:
            return run(connection, *args)
        armed[0] = False
        if request.param == "after":
            run(connection, *args)
        connection.close()
        raise psycopg.OperationalError("the connection was cut")

    monkeypatch.setattr(postgres_connections, "_run", cutting)
    return lambda: armed.__setitem__(0, True)


def test_a_connection_cut_around_the_commit_records_events_once(
    recorder: ProcessRecorder, cut: Callable[[], None]
) -> None:
    recorder.insert_events(stored())
    for number, events in enumerate((stored(), stored(5)), start=1):
        cut()
        ids = recorder.insert_events(events)
        assert ids is not None
        assert [n.originator_id for n in recorder.select_notifications(ids[0], len(ids))] == [
            e.originator_id for e in events
        ]
        cut()
        recorder.insert_events(stored(2), tracking=Tracking("up", number * 2))
        cut()
        recorder.insert_events([], tracking=Tracking("up", number * 2 + 1))
        assert recorder.max_tracking_id("up") == number * 2 + 1
    cut()
    recorder.insert_tracking(Tracking("up", 10))
    assert len(recorder.select_notifications(None, 100)) == 1 + 1 + 5 + 2 + 2


def test_a_snapshot_is_recorded_once_too(postgres: Settings, cut: Callable[[], None]) -> None:
    with closing_factory(postgres) as factory:
        snapshots = factory.aggregate_recorder("snapshots")
        snapshots.insert_events(stored())
        event = stored()[0]
        cut()
        snapshots.insert_events([event])
        assert snapshots.select_events(event.originator_id) == [event]


def test_after_a_cut_what_somebody_else_recorded_is_still_a_conflict(
    recorder: ProcessRecorder, cut: Callable[[], None]
) -> None:
    event = stored()[0]
    recorder.insert_events([event], tracking=Tracking("up", 5))
    other = StoredEvent(event.originator_id, event.originator_version, event.topic, b"another state")
    for refused in (
        lambda: recorder.insert_events([other]),
        lambda: recorder.insert_events([other, *stored()]),
        lambda: recorder.insert_events(stored(), tracking=Tracking("up", 5)),
        lambda: recorder.insert_events([], tracking=Tracking("up", 4)),
        lambda: recorder.insert_tracking(Tracking("up", 4)),
    ):
        cut()
        with pytest.raises(IntegrityError):
            refused()
    assert len(recorder.select_notifications(None, 100)) == 1


def test_connections_ended_by_the_server_are_replaced(
    postgres: Settings, terminate_backends: Callable[..., int]
) -> None:
    app = Accounts(postgres)
    with closing_factory(postgres) as factory:
        view = factory.tracking_recorder(PostgresOwners)
        account_id = app.open("ann")
        for position in range(1, 4):
            # Fill both pools with connections that are about to die.
            threads = [threading.Thread(target=app.balance, args=(account_id,)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert terminate_backends() >= 2
            app.deposit(account_id, 1)
            assert terminate_backends() >= 1
            view.add(f"owner {position}", Tracking("accounts", position))
            assert terminate_backends() >= 1
            assert view.owners() == [f"owner {n}" for n in range(1, position + 1)]
        assert app.balance(account_id) == 3
    app.close()


def save_until_stopped(app: Accounts, stop: threading.Event, acknowledged: list[int]) -> None:
    account_id = app.open(threading.current_thread().name)
    acknowledged.append(1)
    while not stop.is_set():
        app.deposit(account_id, 1)
        acknowledged[0] += 1


@pytest.mark.crash
def test_while_connections_die_and_the_server_crashes_nothing_acknowledged_is_lost_and_nothing_is_refused(
    restartable_postgres: PostgresServer,
) -> None:
    app = Accounts(postgres_settings(restartable_postgres.url()))
    stop = threading.Event()
    acknowledged: list[list[int]] = [[] for _ in range(3)]
    errors: list[BaseException] = []

    def work(mine: list[int]) -> None:
        try:
            save_until_stopped(app, stop, mine)
        except BaseException as error:
            errors.append(error)

    with tailing(app.recorder) as tail:
        threads = [threading.Thread(target=work, args=(mine,)) for mine in acknowledged]
        for thread in threads:
            thread.start()
        for disturb in (
            restartable_postgres.terminate_backends,
            restartable_postgres.terminate_backends,
            lambda: restartable_postgres.restart(immediate=True),
            restartable_postgres.terminate_backends,
            restartable_postgres.restart,
        ):
            before = len(tail.arrived)
            tail.wait_for(lambda ids, before=before: len(ids) >= before + 30)  # type: ignore[misc]
            disturb()
        before = len(tail.arrived)
        tail.wait_for(lambda ids: len(ids) >= before + 30)
        stop.set()
        for thread in threads:
            thread.join(60)
        assert errors == []
        total = sum(count for (count,) in acknowledged)
        tail.wait_for(lambda ids: len(ids) >= total)
        assert len(tail.ids) == total
        assert tail.ids == [n.id for n in app.recorder.select_notifications(None, 10 * total)]
    versions: dict[Any, list[int]] = {}
    for notification in tail.arrived:
        versions.setdefault(notification.originator_id, []).append(notification.originator_version)
    assert all(found == list(range(1, len(found) + 1)) for found in versions.values())
    app.close()


def test_a_server_that_was_never_there_is_reported_at_once() -> None:
    settings = {**postgres_settings("postgresql://nobody@127.0.0.1:1/none"), "CREATE_TABLE": "n"}
    with closing_factory(settings) as factory:
        with pytest.raises(OperationalError, match=r"none at 127\.0\.0\.1:1"):
            factory.application_recorder().max_notification_id()
        view: Any = factory.tracking_recorder()
        with pytest.raises(OperationalError, match=r"none at 127\.0\.0\.1:1"), view.transaction():
            pass


def test_a_server_that_stays_away_is_reported_and_used_again_when_it_is_back(
    restartable_postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_connections, "_RECONNECT_S", (0.01, 0.01))
    app = Accounts(postgres_settings(restartable_postgres.url()))
    account_id = app.open("ann")
    with tailing(app.recorder) as tail:
        restartable_postgres.stop()
        with pytest.raises(ConnectionLost):
            app.deposit(account_id, 5)
        restartable_postgres.start()
        app.deposit(account_id, 7)
        tail.wait_for(lambda ids: len(ids) == 2)
    assert app.balance(account_id) == 7
    app.close()


def test_writers_and_their_readers_agree_on_the_order(postgres: Settings) -> None:
    """Many threads with connections of their own; a reader that goes on from the last position misses
    nothing.
    """
    apps = [Accounts({**postgres, "POSTGRES_POOL_SIZE": "2"}) for _ in range(3)]
    read: list[int] = []
    done = threading.Event()

    def tail() -> None:
        while True:
            finished = done.is_set()
            found = apps[0].recorder.select_notifications(read[-1] if read else None, 100, inclusive_of_start=not read)
            read.extend(n.id for n in found)
            if finished and not found:
                return

    def write(app: Accounts) -> None:
        for size in (1, 3) * 40:
            app.recorder.insert_events(stored(size))

    writers = [threading.Thread(target=write, args=(app,)) for app in apps for _ in range(2)]
    reader = threading.Thread(target=tail)
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    reader.join()
    assert len(read) == len(set(read)) == 6 * 160
    # Those of one insert have neighbouring positions.
    found = apps[0].recorder.select_notifications(None, 6 * 160)
    for one, next_one in pairwise(found):
        if one.originator_id == next_one.originator_id:
            assert (one.id + 1, one.originator_version + 1) == (next_one.id, next_one.originator_version)
        else:
            assert next_one.originator_version == 1
    for app in apps:
        app.close()


def test_positions_come_in_the_order_of_the_events(recorder: ProcessRecorder) -> None:
    for size in (1, 2, 40, 3000):
        events = stored(size)
        ids = recorder.insert_events(events)
        assert ids is not None
        assert list(ids) == list(range(ids[0], ids[0] + size))
        found = recorder.select_notifications(ids[0], size)
        assert [n.originator_version for n in found] == [e.originator_version for e in events]


def test_a_refused_position_keeps_its_events_out(recorder: ProcessRecorder) -> None:
    recorder.insert_events(stored(2), tracking=Tracking("up", 3))
    for size in (0, 1, 2):
        with pytest.raises(IntegrityError, match="position 3 of application 'up'"):
            recorder.insert_events(stored(size), tracking=Tracking("up", 3))
    assert len(recorder.select_notifications(None, 9)) == 2


def test_applications_start_at_once_and_while_another_writes(postgres: Settings, postgres_url: str) -> None:
    errors: list[BaseException] = []
    barrier = threading.Barrier(6, timeout=60)

    def start() -> None:
        try:
            barrier.wait()
            with closing_factory(postgres) as factory:
                factory.process_recorder().insert_events(stored())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    with psycopg.connect(postgres_url) as other:
        other.execute("INSERT INTO stored_events SELECT * FROM stored_events WHERE false")
        with closing_factory({**postgres, "POSTGRES_LOCK_TIMEOUT": "1"}) as factory:
            factory.process_recorder()


def test_every_save_is_announced_to_other_listeners(postgres: Settings, postgres_url: str) -> None:
    app = Accounts(postgres)
    with psycopg.connect(postgres_url, autocommit=True) as listener:
        listener.execute("LISTEN accounts_events")
        for _ in range(3):
            app.open("ann")
            assert [n.channel for n in listener.notifies(timeout=30, stop_after=1)] == ["accounts_events"]
    app.close()


def test_a_rolled_back_save_is_not_announced(postgres: Settings, postgres_url: str) -> None:
    app = Accounts(postgres)
    with psycopg.connect(postgres_url, autocommit=True) as listener, psycopg.connect(postgres_url) as caller:
        listener.execute("LISTEN accounts_events")
        app.open("ann", connection=caller)
        caller.rollback()
        app.open("bob", connection=caller)
        caller.commit()
        announced = list(listener.notifies(timeout=30, stop_after=1))
        listener.execute("UNLISTEN *")
        assert len(announced) == 1
        assert [*announced, *listener.notifies(timeout=0)] == announced
    app.close()


def test_closing_ends_all_connections_and_refuses_further_use(postgres: Settings, postgres_url: str) -> None:
    app = Accounts(postgres)
    with tailing(app.recorder):
        app.open("ann")
    app.close()
    app.close()
    for use in (lambda: app.open("bob"), app.recorder.max_notification_id):
        with pytest.raises(InterfaceError, match="closed"):
            use()
    with psycopg.connect(postgres_url, autocommit=True) as observer:
        while observer.execute(
            "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        ).fetchone():
            threading.Event().wait(0.01)
