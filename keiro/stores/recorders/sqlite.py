"""Recorders in a SQLite file, in the tables and the format of the library's own `eventsourcing.sqlite`.

A database of either opens in the other. That includes its weak point: table names do not carry the
application's name, so two applications on one file share one event log (`stored_events`). Give each
application a file of its own with `<APPNAME>_SQLITE_DBNAME`.

What is acknowledged survives power loss (WAL, `synchronous=FULL`). Every writing transaction starts as a
writer (one autocommit statement, or BEGIN IMMEDIATE), so none can fail by upgrading a snapshot somebody has
overtaken, and ids are given out in commit order.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, TypeVar
from uuid import UUID

from eventsourcing.persistence import (
    AggregateRecorder,
    ApplicationRecorder,
    DataError,
    IntegrityError,
    Notification,
    OperationalError,
    ProcessRecorder,
    Recorder,
    StoredEvent,
    Subscription,
    Tracking,
)
from eventsourcing.utils import Environment, EnvType

from keiro.stores.recorders.common import (
    MIGRATION_NAME,
    CallerTransaction,
    InvalidSetting,
    RecorderFactory,
    RecorderSubscription,
    WaitingTrackingRecorder,
    flag,
    names,
    number,
    open_transaction,
    refuse_beside_open_transaction,
)
from keiro.stores.recorders.sqlite_connections import RawTransaction, SQLiteDatastore, driver_connection, rows_of

if TYPE_CHECKING:
    import sqlalchemy

_POLL_INTERVAL_S: Final = 0.1
"""How often a subscription looks for commits of other processes; those of its own wake it."""

_ONE_STATEMENT: Final = 20
"""Up to this many events are one statement: the driver caches one for each number of events."""

_EVENTS_TABLE: Final = (
    "CREATE TABLE IF NOT EXISTS {} (originator_id TEXT, originator_version INTEGER, topic TEXT, state BLOB,"
    " PRIMARY KEY (originator_id, originator_version))"
)

_MAX_TRACKING: Final = "SELECT max(notification_id) FROM tracking WHERE application_name = ?"


class SQLiteRecorder(Recorder):
    """Base of all recorders of this store."""

    def __init__(self, datastore: SQLiteDatastore, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.datastore = datastore

    def create_table(self) -> None:
        """Create what is missing. Views extend this to create tables of their own."""


class SQLiteAggregateRecorder(SQLiteRecorder, AggregateRecorder):
    """Events of aggregates without positions; snapshots."""

    def __init__(self, datastore: SQLiteDatastore, events_table_name: str = "stored_events", **kwargs: Any) -> None:
        super().__init__(datastore, **kwargs)
        self.events_table_name = events_table_name
        self._table = _quoted(events_table_name)
        columns = "originator_id, originator_version, topic, state"
        self._insert_statement = f"INSERT INTO {self._table} ({columns}) VALUES (?, ?, ?, ?)"

    def create_table(self) -> None:
        """Create the table unless it exists."""
        # Looking first takes no lock, so an application starts while another one writes.
        if not self.datastore.read("SELECT 1 FROM sqlite_master WHERE name = ?", (self.events_table_name,)):
            self.datastore.write(lambda connection: connection.execute(self._table_statement()))
        super().create_table()

    def _table_statement(self) -> str:
        return _EVENTS_TABLE.format(self._table) + " WITHOUT ROWID"

    def insert_events(self, stored_events: Sequence[StoredEvent], **kwargs: Any) -> Sequence[int] | None:
        """Record all or nothing; `IntegrityError` for a version that is recorded already."""
        rows = self._rows(stored_events)
        joined = self._joined(kwargs) or open_transaction(self.datastore)
        if joined is not None:
            self.datastore.execute_in(joined, lambda c: c.executemany(self._insert_statement, rows))
        elif rows:
            self.datastore.write(lambda connection: self._insert(connection, rows))
        return None

    def _joined(self, kwargs: dict[str, Any]) -> CallerTransaction | None:
        connection = kwargs.get("connection")
        return None if connection is None else self.datastore.join(connection)

    def _insert(self, connection: sqlite3.Connection, rows: list[tuple[Any, ...]]) -> None:
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(self._insert_statement, rows)
        connection.execute("COMMIT")

    def _rows(self, stored_events: Sequence[StoredEvent]) -> list[tuple[Any, ...]]:
        rows = []
        last: UUID | str | None = None
        for event in stored_events:
            if event.originator_id is not last:  # a save mostly has events of one aggregate
                last = event.originator_id
                key = self._stored_id(last)
            rows.append((key, event.originator_version, event.topic, event.state))
        return rows

    def _stored_id(self, originator_id: UUID | str) -> str:
        if isinstance(originator_id, UUID):
            return originator_id.hex
        if self.datastore.originator_id_type == "uuid":
            # It would be stored, and fail to be read.
            try:
                return UUID(originator_id).hex
            except (ValueError, AttributeError):
                raise DataError(
                    f"aggregate id {originator_id!r} is not a UUID; set ORIGINATOR_ID_TYPE=text for ids that are text"
                ) from None
        return originator_id

    def _read_id(self, stored: str) -> UUID | str:
        return UUID(stored) if self.datastore.originator_id_type == "uuid" else stored

    def select_events(
        self,
        originator_id: UUID | str,
        *,
        gt: int | None = None,
        lte: int | None = None,
        desc: bool = False,
        limit: int | None = None,
    ) -> Sequence[StoredEvent]:
        """The events of one aggregate, by version."""
        key = self._stored_id(originator_id)
        statement = f"SELECT originator_version, topic, state FROM {self._table} WHERE originator_id = ?"
        parameters: list[Any] = [key]
        if gt is not None:
            statement += " AND originator_version > ?"
            parameters.append(gt)
        if lte is not None:
            statement += " AND originator_version <= ?"
            parameters.append(lte)
        statement += " ORDER BY originator_version" + (" DESC" if desc else "")
        if limit is not None:
            statement += " LIMIT ?"
            parameters.append(limit)
        joined = open_transaction(self.datastore)
        if joined is not None and originator_id in joined.originators:
            rows = rows_of(joined.connection, statement, parameters)
        else:
            rows = self.datastore.read(statement, parameters)
        read_id = self._read_id(key)
        return [StoredEvent(read_id, version, topic, state) for version, topic, state in rows]


class SQLiteApplicationRecorder(SQLiteAggregateRecorder, ApplicationRecorder):
    """Events of aggregates, numbered in the order they were committed."""

    def __init__(self, datastore: SQLiteDatastore, events_table_name: str = "stored_events", **kwargs: Any) -> None:
        super().__init__(datastore, events_table_name, **kwargs)
        self._channel = datastore.channel(events_table_name)
        self._insert_statements = [self._insert_statement + ", (?, ?, ?, ?)" * n for n in range(_ONE_STATEMENT)]
        self._witness_query = f"SELECT 1 FROM {self._table} WHERE originator_id = ? AND originator_version = ?"

    def _table_statement(self) -> str:
        return _EVENTS_TABLE.format(self._table)  # with a rowid: that is the position

    def insert_events(self, stored_events: Sequence[StoredEvent], **kwargs: Any) -> Sequence[int] | None:
        """Record all or nothing and return the positions; `IntegrityError` for a version that exists.

        With `connection=`, a `sqlalchemy.Connection` or `sqlite3.Connection` on the same file, the events
        join the caller's transaction: they are there when, and only if, the caller commits. Subscribers are
        woken then by a SQLAlchemy connection, and see the commit of a raw one at their next look (0.1 s).
        """
        rows = self._rows(stored_events)
        tracking = kwargs.get("tracking")
        if not rows and tracking is None:
            return []
        joined = self._joined(kwargs)
        if joined is not None:
            ids = self.datastore.execute_in(joined, lambda c: self._insert_all(c, rows, tracking))
            joined.originators.update(e.originator_id for e in stored_events)
            if isinstance(joined, RawTransaction) and rows:
                joined.witness = self._witness_query, rows[-1][:2]
            self._wake_after_commit(kwargs["connection"])
            return ids
        refuse_beside_open_transaction(self.datastore)
        ids = self.datastore.write(lambda connection: self._commit(connection, rows, tracking))
        self._wake()
        return ids

    def _commit(
        self, connection: sqlite3.Connection, rows: list[tuple[Any, ...]], tracking: Tracking | None
    ) -> list[int]:
        if tracking is None and len(rows) <= _ONE_STATEMENT:
            # An autocommit statement begins as a writer, waits for its turn and commits by itself.
            statement = self._insert_statements[len(rows) - 1]
            last = connection.execute(statement, list(chain.from_iterable(rows))).lastrowid or 0
            return list(range(last - len(rows) + 1, last + 1))
        connection.execute("BEGIN IMMEDIATE")
        ids = self._insert_all(connection, rows, tracking)
        connection.execute("COMMIT")
        return ids

    def _insert_all(
        self, connection: sqlite3.Connection, rows: list[tuple[Any, ...]], tracking: Tracking | None
    ) -> list[int]:
        if not rows:
            return []
        connection.executemany(self._insert_statement, rows)
        # New rowids follow the highest one, and no other writer can come between.
        last: int = rows_of(connection, "SELECT last_insert_rowid()")[0][0]
        return list(range(last - len(rows) + 1, last + 1))

    def _wake(self) -> None:
        self._channel.publish()

    def _wake_after_commit(self, connection: Any) -> None:
        if isinstance(connection, sqlite3.Connection):
            return
        from sqlalchemy import event

        # SQLAlchemy announces a commit just before it happens.
        event.listen(connection, "commit", lambda _: self._commit_expected(), once=True)

    def _commit_expected(self) -> None:
        self._channel.expect_commit()

    def select_notifications(
        self,
        start: int | None,
        limit: int,
        stop: int | None = None,
        topics: Sequence[str] = (),
        *,
        inclusive_of_start: bool = True,
    ) -> Sequence[Notification]:
        """Up to `limit` events by position, from `start` to `stop`, only those of the topics if any are
        given.
        """
        conditions = []
        parameters: list[Any] = []
        if start is not None:
            conditions.append("rowid >= ?" if inclusive_of_start else "rowid > ?")
            parameters.append(start)
        if stop is not None:
            conditions.append("rowid <= ?")
            parameters.append(stop)
        if topics:
            conditions.append(f"topic IN ({', '.join('?' * len(topics))})")
            parameters.extend(topics)
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        rows = self.datastore.read(
            f"SELECT originator_id, originator_version, topic, state, rowid FROM {self._table}{where}"
            " ORDER BY rowid LIMIT ?",
            (*parameters, limit),
        )
        read_id = self._read_id
        return [Notification(read_id(key), *rest) for key, *rest in rows]

    def max_notification_id(self) -> int | None:
        """The last position, `None` when nothing is recorded."""
        found: int | None = self.datastore.read(f"SELECT max(rowid) FROM {self._table}")[0][0]
        return found

    def subscribe(self, gt: int | None = None, topics: Sequence[str] = ()) -> Subscription[ApplicationRecorder]:
        """Iterate over all events after position `gt`, of this and of other processes, waiting for more."""
        return RecorderSubscription(self, self._channel, gt=gt, topics=topics, poll_interval=_POLL_INTERVAL_S)


class SQLiteTrackingRecorder(SQLiteRecorder, WaitingTrackingRecorder):
    """How far each upstream application has been processed. Base class of views.

    A view creates its tables in `create_table()` and writes a row together with the position it comes from:

        with self.transaction(tracking) as connection:
            connection.execute(insert(table).values(...))
    """

    def __init__(self, datastore: SQLiteDatastore, **kwargs: Any) -> None:
        super().__init__(datastore, **kwargs)
        self.tracking_table_name = "tracking"
        self.tracking_channel = datastore.channel(self.tracking_table_name)
        self._checked_multi_row = False

    @contextmanager
    def transaction(self, tracking: Tracking | None = None) -> Iterator[sqlalchemy.Connection]:
        """A writing transaction that commits at the end of the block, with `tracking`, or rolls back both.

        Raises `IntegrityError` before the block runs if the position was processed already, and
        `OperationalError` if another writer keeps the lock for longer than `SQLITE_LOCK_TIMEOUT`.
        """
        with self.datastore.connection(write=True) as connection:
            if tracking is not None:
                raw, _ = driver_connection(connection)
                try:
                    self._insert_tracking(raw, tracking)
                except sqlite3.Error as error:
                    raise self.datastore.translated(error) from error
            yield connection
        self.tracking_channel.publish()

    @contextmanager
    def connect(self) -> Iterator[sqlalchemy.Connection]:
        """A transaction for reading, as of one moment; writers do not wait for it."""
        with self.datastore.connection(write=False) as connection:
            yield connection

    def create_table(self) -> None:
        """Create the table, or bring one with many rows per application to one row each."""
        single = self.datastore.single_row_tracking
        if not self._table_exists() or (single and not self._is_single_row()):
            self.datastore.write(self._create_or_migrate)
        self._refuse_many_rows(self._is_single_row)
        super().create_table()

    def _table_exists(self) -> bool:
        return bool(self.datastore.read("SELECT 1 FROM sqlite_master WHERE name = 'tracking'"))

    def _is_single_row(self) -> bool:
        return self.max_tracking_id(MIGRATION_NAME) is not None

    def _create_or_migrate(self, connection: sqlite3.Connection) -> None:
        connection.execute("BEGIN IMMEDIATE")
        # Look again under the lock: another process may have been faster.
        positions: list[Any] = []
        exists = rows_of(connection, "SELECT 1 FROM sqlite_master WHERE name = 'tracking'")
        if self.datastore.single_row_tracking and exists:
            positions = connection.execute(
                "SELECT application_name, max(notification_id) FROM tracking GROUP BY application_name"
            ).fetchall()
            if any(name == MIGRATION_NAME for name, _ in positions):
                connection.execute("ROLLBACK")
                return
            connection.execute("ALTER TABLE tracking RENAME TO old1_tracking")
        key = "(application_name" + (")" if self.datastore.single_row_tracking else ", notification_id)")
        connection.execute(
            "CREATE TABLE IF NOT EXISTS tracking (application_name TEXT, notification_id INTEGER,"
            f" PRIMARY KEY {key}) WITHOUT ROWID"
        )
        if self.datastore.single_row_tracking:
            connection.executemany("INSERT INTO tracking VALUES (?, ?)", [*positions, (MIGRATION_NAME, 1)])
        connection.execute("COMMIT")

    def insert_tracking(self, tracking: Tracking) -> None:
        """Record a position; `IntegrityError` unless it is above the last one of its application."""
        self.datastore.write(lambda connection: self._insert_tracking(connection, tracking))
        self.tracking_channel.publish()

    def _insert_tracking(self, connection: sqlite3.Connection, tracking: Tracking) -> None:
        if not self.datastore.single_row_tracking:
            self._refuse_many_rows(lambda: bool(rows_of(connection, _MAX_TRACKING, (MIGRATION_NAME,))[0][0]))
            connection.execute(
                "INSERT INTO tracking VALUES (?, ?)", (tracking.application_name, tracking.notification_id)
            )
            return
        done = connection.execute(
            "INSERT INTO tracking VALUES (?1, ?2) ON CONFLICT (application_name)"
            " DO UPDATE SET notification_id = ?2 WHERE notification_id < ?2",
            (tracking.application_name, tracking.notification_id),
        )
        if done.rowcount == 0:
            raise IntegrityError(
                f"position {tracking.notification_id} of application '{tracking.application_name}' was processed"
                " already, or a later one"
            )

    def _refuse_many_rows(self, is_single_row: Callable[[], bool]) -> None:
        if self.datastore.single_row_tracking or self._checked_multi_row:
            return
        if is_single_row():
            raise OperationalError(
                "SINGLE_ROW_TRACKING is off, but the tracking table has one row per application already; remove the"
                " setting"
            )
        self._checked_multi_row = True

    def max_tracking_id(self, application_name: str) -> int | None:
        """The last processed position of an application, `None` if there is none."""
        found: int | None = self.datastore.read(_MAX_TRACKING, (application_name,))[0][0]
        return found


class SQLiteProcessRecorder(SQLiteTrackingRecorder, SQLiteApplicationRecorder, ProcessRecorder):
    """Records events and the position they were made from together."""

    def __init__(self, datastore: SQLiteDatastore, *, events_table_name: str = "stored_events", **kwargs: Any) -> None:
        super().__init__(datastore, events_table_name=events_table_name, **kwargs)

    def _insert_all(
        self, connection: sqlite3.Connection, rows: list[tuple[Any, ...]], tracking: Tracking | None
    ) -> list[int]:
        ids = super()._insert_all(connection, rows, tracking)
        if tracking is not None:
            self._insert_tracking(connection, tracking)
        return ids

    def _wake(self) -> None:
        super()._wake()
        self.tracking_channel.publish()

    def _commit_expected(self) -> None:
        super()._commit_expected()
        self.tracking_channel.expect_commit()


class SQLiteFactory(RecorderFactory[SQLiteTrackingRecorder]):
    """Constructs recorders for the file `SQLITE_DBNAME`, with `SQLITE_LOCK_TIMEOUT` (seconds, default 5)."""

    SQLITE_DBNAME = "SQLITE_DBNAME"
    SQLITE_LOCK_TIMEOUT = "SQLITE_LOCK_TIMEOUT"

    def __init__(self, env: Environment | EnvType | None) -> None:
        super().__init__(env)
        db_name = self.env.get(self.SQLITE_DBNAME)
        if not db_name:
            raise InvalidSetting(
                f"set {names(self.env, self.SQLITE_DBNAME)} to the path of the database file (or a file: URI)"
            )
        self.datastore = SQLiteDatastore(
            db_name,
            lock_timeout=number(self.env, self.SQLITE_LOCK_TIMEOUT, default=5.0, kind=float),
            originator_id_type=self.originator_id_type(),
            single_row_tracking=flag(self.env, self.SINGLE_ROW_TRACKING, default=True),
        )

    def aggregate_recorder(self, purpose: str = "events") -> AggregateRecorder:
        """A recorder of events or snapshots without positions, in the table `stored_<purpose>`."""
        return self._ready(SQLiteAggregateRecorder(self.datastore, events_table_name=f"stored_{purpose}"))

    def application_recorder(self) -> ApplicationRecorder:
        """An application's recorder, of the class `APPLICATION_RECORDER_TOPIC` names if set."""
        kind = self.recorder_class(SQLiteApplicationRecorder, self.APPLICATION_RECORDER_TOPIC)
        return self._ready(kind(self.datastore))

    def tracking_recorder(
        self, tracking_recorder_class: type[SQLiteTrackingRecorder] | None = None
    ) -> SQLiteTrackingRecorder:
        """A view; raises `UnsupportedRecorder` for a class that is not a `SQLiteTrackingRecorder` of keiro."""
        kind = self.recorder_class(SQLiteTrackingRecorder, self.TRACKING_RECORDER_TOPIC, tracking_recorder_class)
        return self._ready(kind(self.datastore))

    def process_recorder(self) -> ProcessRecorder:
        """A recorder of events with tracking."""
        kind = self.recorder_class(SQLiteProcessRecorder, self.PROCESS_RECORDER_TOPIC)
        return self._ready(kind(self.datastore))

    def close(self) -> None:
        """Close the database's connections."""
        if hasattr(self, "datastore"):
            self.datastore.close()

    def _ready(self, recorder: R) -> R:
        if self.creates_tables():
            recorder.create_table()
        return recorder


R = TypeVar("R", bound=SQLiteRecorder)
Factory = SQLiteFactory


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
