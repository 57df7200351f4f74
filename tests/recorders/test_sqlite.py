"""What is particular to SQLite: writers in other processes, connections closed under readers, files that
refuse.
"""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from eventsourcing.persistence import IntegrityError, InterfaceError, OperationalError, PersistenceError, Tracking

from keiro.stores.recorders.sqlite import SQLiteApplicationRecorder, SQLiteProcessRecorder
from keiro.stores.recorders.sqlite_connections import SQLiteDatastore
from tests.recorders.accounts import Accounts, stored
from tests.recorders.conftest import closing_factory, sqlite_settings


def application_recorder(path: Path | str, **kwargs: Any) -> SQLiteApplicationRecorder:
    recorder = SQLiteApplicationRecorder(SQLiteDatastore(str(path), **kwargs))
    recorder.create_table()
    return recorder


WRITER = """
import sys
from uuid import uuid4
from eventsourcing.persistence import StoredEvent, Tracking
from keiro.stores.recorders.sqlite import SQLiteProcessRecorder
from keiro.stores.recorders.sqlite_connections import SQLiteDatastore
sys.stdin.readline()
recorder = SQLiteProcessRecorder(SQLiteDatastore(sys.argv[1]))
recorder.create_table()
for number in range(1, 101):
    key = uuid4()
    count = 1 + number % 3 * 12
    events = [StoredEvent(key, version, sys.argv[2], b"state") for version in range(count)]
    tracking = Tracking(sys.argv[2], number) if number % 2 else None
    ids = recorder.insert_events(events, tracking=tracking)
    assert ids == list(range(ids[0], ids[0] + count)), ids
    recorder.select_events(key)
"""


def test_processes_that_open_a_new_file_at_once_all_write_and_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.db"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), f"writer {number}"],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        _, errors = writer.communicate(timeout=120)
        assert writer.returncode == 0, errors
    recorder = SQLiteProcessRecorder(SQLiteDatastore(str(path)))
    total = 4 * sum(1 + number % 3 * 12 for number in range(1, 101))
    notifications = recorder.select_notifications(None, 2 * total)
    assert [n.id for n in notifications] == list(range(1, total + 1))
    assert [recorder.max_tracking_id(f"writer {number}") for number in range(4)] == [99] * 4
    recorder.datastore.close()


def test_a_new_file_that_somebody_is_writing_to_is_waited_for(tmp_path: Path) -> None:
    """SQLite does not wait by itself where it switches to WAL."""
    path = tmp_path / "events.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("CREATE TABLE notes (note)")
        other.execute("BEGIN IMMEDIATE")
        opened: list[SQLiteDatastore] = []
        opening = threading.Thread(target=lambda: opened.append(SQLiteDatastore(str(path), lock_timeout=30)))
        opening.start()
        opening.join(0.1)
        other.execute("COMMIT")
        opening.join(30)
    assert [datastore.read("PRAGMA journal_mode") for datastore in opened] == [[("wal",)]]
    opened[0].close()


def test_a_transaction_that_reads_before_it_writes_is_never_overtaken(tmp_path: Path) -> None:
    """Begun as a reader, the view's transaction would fail at its first write as soon as anybody else
    committed.
    """

    def write() -> None:
        # As another process would: this one's own threads take turns before they come to SQLite.
        with closing(sqlite3.connect(tmp_path / "events.db", timeout=30)) as other, other:
            other.execute("INSERT INTO tracking VALUES ('other', 1)")

    with closing_factory(sqlite_settings(tmp_path / "events.db")) as factory:
        view: Any = factory.tracking_recorder()
        with view.transaction() as connection:
            connection.exec_driver_sql("SELECT * FROM tracking").all()
            meanwhile = threading.Thread(target=write)
            meanwhile.start()
            meanwhile.join(0.1)
            connection.exec_driver_sql("CREATE TABLE notes (note)")
        meanwhile.join(30)
        assert view.max_tracking_id("other") == 1


CLOSER = """
import sys, threading
from uuid import uuid4
from eventsourcing.persistence import InterfaceError, StoredEvent
from keiro.stores.recorders.sqlite import SQLiteApplicationRecorder
from keiro.stores.recorders.sqlite_connections import SQLiteDatastore

for _ in range(20):
    recorder = SQLiteApplicationRecorder(SQLiteDatastore(sys.argv[1]))
    recorder.create_table()
    key = uuid4()
    recorder.insert_events([StoredEvent(key, version, "topic", b"state" * 50) for version in range(2000)])
    reading = threading.Barrier(5)

    def work(write):
        reading.wait()
        try:
            while True:
                if write:
                    recorder.insert_events([StoredEvent(uuid4(), 1, "topic", b"state")])
                else:
                    recorder.select_notifications(None, 5000)
        except InterfaceError as error:
            assert "has been closed" in str(error), error

    threads = [threading.Thread(target=work, args=(n == 0,)) for n in range(4)]
    for thread in threads:
        thread.start()
    reading.wait()
    recorder.datastore.close()
    for thread in threads:
        thread.join()
print("survived")
"""


def test_closing_while_other_threads_read_and_write_ends_nothing_but_their_work(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CLOSER, str(tmp_path / "events.db")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "survived\n"), done.stderr


def test_what_is_being_written_when_the_application_is_closed_is_committed(tmp_path: Path) -> None:
    with closing_factory(sqlite_settings(tmp_path / "events.db")) as factory:
        view: Any = factory.tracking_recorder()
        datastore: SQLiteDatastore = view.datastore

        def work(connection: sqlite3.Connection) -> None:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("INSERT INTO tracking VALUES ('one', 1)")
            datastore.close()
            connection.execute("COMMIT")

        datastore.write(work)
    with closing_factory(sqlite_settings(tmp_path / "events.db")) as factory:
        view = factory.tracking_recorder()
        with view.transaction(Tracking("two", 2)), view.connect() as reading:
            view.datastore.close()
            assert reading.exec_driver_sql("SELECT max(notification_id) FROM tracking").scalar() == 1
    with closing_factory(sqlite_settings(tmp_path / "events.db")) as factory:
        view = factory.tracking_recorder()
        assert (view.max_tracking_id("one"), view.max_tracking_id("two")) == (1, 2)


def test_after_closing_everything_is_refused_and_closing_again_is_not(tmp_path: Path) -> None:
    recorder = application_recorder(tmp_path / "events.db")
    recorder.datastore.close()
    recorder.datastore.close()
    for use in (lambda: recorder.insert_events(stored()), recorder.max_notification_id):
        with pytest.raises(InterfaceError, match="closed"):
            use()


def test_a_failed_batch_of_any_size_leaves_no_trace(tmp_path: Path) -> None:
    recorder = application_recorder(tmp_path / "events.db")
    taken = stored()
    assert recorder.insert_events(taken) == [1]
    for size in (1, 5, 500):
        with pytest.raises(IntegrityError, match="read again"):
            recorder.insert_events([*stored(size), *taken])
        assert recorder.max_notification_id() == 1
    # No id was burnt.
    assert recorder.insert_events(stored(2)) == [2, 3]
    recorder.datastore.close()


def test_commits_survive_power_loss_by_default(tmp_path: Path) -> None:
    datastore = SQLiteDatastore(str(tmp_path / "events.db"))
    assert datastore.read("PRAGMA synchronous") == [(2,)]
    assert datastore.write(lambda c: c.execute("PRAGMA synchronous").fetchall()) == [(2,)]
    assert datastore.read("PRAGMA journal_mode") == [("wal",)]
    datastore.close()


def test_another_writer_is_waited_for_as_long_as_the_setting_says(tmp_path: Path) -> None:
    recorder = application_recorder(tmp_path / "events.db", lock_timeout=0.1)
    other = sqlite3.connect(tmp_path / "events.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    for count in (1, 30):
        with pytest.raises(OperationalError, match="SQLITE_LOCK_TIMEOUT"):
            recorder.insert_events(stored(count))
    other.execute("COMMIT")
    other.close()
    assert recorder.insert_events(stored()) == [1]
    recorder.datastore.close()


@pytest.mark.parametrize("path", ["events.db", ":memory:"])
def test_a_write_inside_a_views_own_transaction_is_refused_at_once(tmp_path: Path, path: str) -> None:
    settings = sqlite_settings(tmp_path / path) if path != ":memory:" else sqlite_settings(Path(path))
    with closing_factory({**settings, "SQLITE_LOCK_TIMEOUT": "3600"}) as factory:
        view: Any = factory.tracking_recorder()
        with view.transaction(Tracking("up", 1)):
            with pytest.raises(OperationalError, match="inside a view's"):
                view.insert_tracking(Tracking("up", 2))
            with pytest.raises(OperationalError, match="inside a view's"), view.transaction():
                pass
            view.max_tracking_id("up")
        assert view.max_tracking_id("up") == 1


def test_a_file_that_is_no_database_or_read_only_or_nowhere_is_named(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("this is not a database, however long it goes on " * 100)
    with pytest.raises(PersistenceError, match=r"notes\.txt.*not a SQLite database"):
        SQLiteDatastore(str(text))
    with pytest.raises(InterfaceError, match="SQLITE_DBNAME"):
        SQLiteDatastore(str(tmp_path / "missing" / "events.db"))
    application_recorder(tmp_path / "events.db").datastore.close()
    recorder = application_recorder(f"file:{tmp_path}/events.db?mode=ro")
    assert recorder.select_notifications(None, 9) == []
    with pytest.raises(OperationalError, match="may not be written"):
        recorder.insert_events(stored())
    recorder.datastore.close()


def test_a_full_disk_records_nothing_and_recording_goes_on_when_there_is_space(tmp_path: Path) -> None:
    recorder = application_recorder(tmp_path / "events.db")
    recorder.insert_events(stored())
    pages = recorder.datastore.read("PRAGMA page_count")[0][0]
    recorder.datastore.write(lambda c: c.execute(f"PRAGMA max_page_count = {pages}").fetchall())
    with pytest.raises(OperationalError, match="Free some space"):
        for _ in range(20):
            recorder.insert_events(stored(50))
    recorded = recorder.max_notification_id()
    assert recorded == len(recorder.select_notifications(None, 10_000))
    recorder.datastore.write(lambda c: c.execute("PRAGMA max_page_count = 100000").fetchall())
    assert recorder.insert_events(stored()) == [recorded + 1]
    recorder.datastore.close()


def test_databases_in_memory_are_shared_by_name_only() -> None:
    uri = "file:recorders?mode=memory&cache=shared"
    one, two, apart = (application_recorder(name) for name in (uri, uri, ":memory:"))
    threads = [threading.Thread(target=lambda r=r: [r.insert_events(stored(3)) for _ in range(50)]) for r in (one, two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (one.max_notification_id(), two.max_notification_id(), apart.max_notification_id()) == (300, 300, None)
    for recorder in (one, two, apart):
        recorder.datastore.close()


def test_two_applications_on_one_file_share_one_log_as_the_library_has_it(tmp_path: Path) -> None:
    class Ledgers(Accounts):
        name = "ledgers"

    settings = sqlite_settings(tmp_path / "events.db")
    accounts, ledgers = Accounts(settings), Ledgers(settings)
    accounts.open("ann")
    ledgers.open("bob")
    assert len(accounts.notification_log.select(1, 10)) == 2
    accounts.close()
    ledgers.close()
    apart = {**settings, "LEDGERS_SQLITE_DBNAME": str(tmp_path / "ledgers.db")}
    ledgers = Ledgers(apart)
    assert len(ledgers.notification_log.select(1, 10)) == 0
    ledgers.close()
