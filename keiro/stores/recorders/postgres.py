"""Recorders in Postgres, in the tables and the format of the library's own `eventsourcing.postgres`.

A database of either opens in the other, and both may write at once. Recording is one prepared statement
that takes its turn, inserts and commits in a single round trip. Turns are an advisory lock of the
transaction, taken before ids are drawn, so commit order equals id order and a reader that has seen an id
never finds a smaller one later. The library's writers lock the table instead (EXCLUSIVE); that waits for
the ROW EXCLUSIVE lock every insert here holds to its end, and an insert here waits for theirs before it
draws an id, so the order holds between both. Its `POSTGRES_ENABLE_DB_FUNCTIONS`, whose function takes no
lock, keeps no order beside anybody; here it has no effect.

Tables are created without that library's storage parameters, which all but switch autovacuum off.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final, TypeVar
from uuid import UUID

import psycopg
from eventsourcing.persistence import (
    AggregateRecorder,
    ApplicationRecorder,
    DataError,
    IntegrityError,
    Notification,
    OperationalError,
    ProcessRecorder,
    ProgrammingError,
    Recorder,
    StoredEvent,
    Subscription,
    Tracking,
)
from eventsourcing.utils import Environment, EnvType, resolve_topic
from psycopg.sql import SQL, Composable, Identifier, Literal

from keiro.stores.recorders.common import (
    MIGRATION_NAME,
    CallerTransaction,
    RecorderFactory,
    RecorderSubscription,
    WaitingTrackingRecorder,
    flag,
    number,
    open_transaction,
    refuse_beside_open_transaction,
    required,
)
from keiro.stores.recorders.postgres_connections import (
    Attempt,
    ConnectionLost,
    Driver,
    PostgresDatastore,
    Row,
    run_in,
)

if TYPE_CHECKING:
    import sqlalchemy

logger = logging.getLogger(__name__)

_POLL_INTERVAL_S: Final = 1.0
"""How often a subscription looks for events although nothing woke it: a notification may be lost."""

_RECONNECT_S: Final = (0.1, 0.5, 1.0, 2.0, 5.0)
"""Pauses of a subscription while the server is away; it goes on until it is stopped."""

_IDENTIFIER_BYTES: Final = 63


class PostgresRecorder(Recorder):
    """Base of all recorders of this store."""

    def __init__(self, datastore: PostgresDatastore, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.datastore = datastore

    def create_table(self) -> None:
        """Create what is missing. Views extend this to create tables of their own."""

    def _sql(self, statement: str, **parts: Composable) -> bytes:
        return SQL(statement).format(**parts).as_bytes(None)

    def _qualified(self, name: str) -> Identifier:
        if len(name.encode()) > _IDENTIFIER_BYTES:
            raise ProgrammingError(
                f"'{name}' is longer than the {_IDENTIFIER_BYTES} bytes Postgres allows for a name of a table; give the"
                " application or projection a shorter `name`"
            )
        return Identifier(self.datastore.schema, name)

    def _exists(self, name: str) -> bool:
        # Looking first takes no lock, so an application starts while another one writes.
        return bool(
            self.datastore.execute(
                b"SELECT 1 FROM pg_class JOIN pg_namespace n ON n.oid = relnamespace"
                b" WHERE relname = %b AND nspname = %b",
                (name, self.datastore.schema),
            )
        )

    def _create(self, connection: Driver, *statements: bytes) -> None:
        # IF NOT EXISTS alone does not keep two processes that start together from failing.
        connection.execute(b"SELECT pg_advisory_xact_lock(%b)", (_lock_key("create", self.datastore.schema),))
        for statement in statements:
            connection.execute(statement)


class PostgresAggregateRecorder(PostgresRecorder, AggregateRecorder):
    """Events of aggregates without positions; snapshots."""

    _numbered = False

    def __init__(
        self, datastore: PostgresDatastore, *, events_table_name: str = "stored_events", **kwargs: Any
    ) -> None:
        super().__init__(datastore, **kwargs)
        self.events_table_name = events_table_name
        self._events = self._qualified(events_table_name)
        self._id_type = Identifier(datastore.originator_id_type)
        self._insert_statement = self._sql(
            "INSERT INTO {events} (originator_id, originator_version, topic, state)"
            " SELECT * FROM unnest(%b::{id}[], %b::bigint[], %b::text[], %b::bytea[])",
            events=self._events,
            id=self._id_type,
        )
        self._select_statement = self._sql(
            "SELECT originator_version, topic, state FROM {events} WHERE originator_id = %b::{id}",
            events=self._events,
            id=self._id_type,
        )

    def create_table(self) -> None:
        """Create the table and its index unless they exist."""
        index = f"{self.events_table_name}_notification_id_idx"
        if not self._exists(self.events_table_name) or (self._numbered and not self._exists(index)):
            create_table = self._sql(
                "CREATE TABLE IF NOT EXISTS {events} (originator_id {id} NOT NULL, originator_version bigint NOT NULL,"
                " topic text, state bytea" + (", notification_id bigserial" if self._numbered else "") + ","
                " PRIMARY KEY (originator_id, originator_version))",
                events=self._events,
                id=self._id_type,
            )
            create_index = self._sql(
                "CREATE UNIQUE INDEX IF NOT EXISTS {index} ON {events} (notification_id)",
                index=Identifier(index),
                events=self._events,
            )
            statements = (create_table, create_index) if self._numbered else (create_table,)
            self.datastore.transact(lambda connection: self._create(connection, *statements))
        super().create_table()

    def insert_events(self, stored_events: Sequence[StoredEvent], **kwargs: Any) -> Sequence[int] | None:
        """Record all or nothing; `IntegrityError` for a version that is recorded already."""
        if not stored_events:
            return None
        columns = self._columns(stored_events)
        joined = self._joined(kwargs) or open_transaction(self.datastore)
        if joined is not None:
            self.datastore.execute_in(joined, lambda raw: run_in(raw, self._insert_statement, columns))
            return None
        attempt = Attempt()
        try:
            self.datastore.execute(self._insert_statement, columns, attempt)
        except IntegrityError:
            if not (attempt.lost and self._are_stored(stored_events)):
                raise
        return None

    def _joined(self, kwargs: dict[str, Any]) -> CallerTransaction | None:
        connection = kwargs.get("connection")
        return None if connection is None else self.datastore.join(connection)

    def _columns(self, stored_events: Sequence[StoredEvent]) -> tuple[list[Any], ...]:
        return (
            [self._stored_id(e.originator_id) for e in stored_events],
            [e.originator_version for e in stored_events],
            [e.topic for e in stored_events],
            [e.state for e in stored_events],
        )

    def _stored_id(self, originator_id: UUID | str) -> UUID | str:
        if self.datastore.originator_id_type == "text":
            return str(originator_id)
        if isinstance(originator_id, UUID):
            return originator_id
        try:
            return UUID(originator_id)
        except (ValueError, AttributeError):
            raise DataError(
                f"aggregate id {originator_id!r} is not a UUID; set ORIGINATOR_ID_TYPE=text for ids that are text"
            ) from None

    def _are_stored(self, stored_events: Sequence[StoredEvent]) -> bool:
        return bool(self._stored(stored_events, b"1"))

    def _stored(self, stored_events: Sequence[StoredEvent], column: bytes) -> list[Any] | None:
        """A column of these very events, if all of them are recorded.

        After a connection was lost around a commit, a second attempt is refused by what the first one
        wrote. Events of the same topic and state at the same versions are those: state holds the time in
        microseconds.
        """
        ids, versions, topics, states = self._columns(stored_events)
        rows = self.datastore.execute(
            self._sql(
                "SELECT originator_id, originator_version, topic, state, " + column.decode() + " FROM {events}"
                " WHERE (originator_id, originator_version) IN (SELECT * FROM unnest(%b::{id}[], %b::bigint[]))",
                events=self._events,
                id=self._id_type,
            ),
            (ids, versions),
        )
        found = {(key, version): rest for key, version, *rest in rows}
        result = []
        for key, version, topic, state in zip(ids, versions, topics, states, strict=True):
            row = found.get((key, version))
            if row is None or row[:2] != [topic, state]:
                return None
            result.append(row[2])
        return result

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
        statement = self._select_statement
        parameters: list[Any] = [key]
        if gt is not None:
            statement += b" AND originator_version > %b"
            parameters.append(gt)
        if lte is not None:
            statement += b" AND originator_version <= %b"
            parameters.append(lte)
        statement += b" ORDER BY originator_version" + (b" DESC" if desc else b"")
        if limit is not None:
            statement += b" LIMIT %b"
            parameters.append(limit)
        joined = open_transaction(self.datastore)
        if joined is not None and originator_id in joined.originators:
            rows = self.datastore.execute_in(joined, lambda raw: run_in(raw, statement, parameters))
        else:
            rows = self.datastore.execute(statement, parameters)
        return [StoredEvent(key, version, topic, state) for version, topic, state in rows]


class PostgresApplicationRecorder(PostgresAggregateRecorder, ApplicationRecorder):
    """Events of aggregates, numbered in the order they were committed."""

    _numbered = True

    def __init__(
        self, datastore: PostgresDatastore, *, events_table_name: str = "stored_events", **kwargs: Any
    ) -> None:
        super().__init__(datastore, events_table_name=events_table_name, **kwargs)
        self.channel_name = events_table_name.replace(".", "_")
        self._channel = datastore.channel(events_table_name)
        self._insert_one = self._insert_numbered("SELECT %b::{id}, %b::bigint, %b::text, %b::bytea FROM turn")
        self._insert_many = self._insert_numbered(_UNNEST.format("turn"))
        self._select_notifications_statement = self._sql(
            "SELECT originator_id, originator_version, topic, state, notification_id FROM {events}",
            events=self._events,
        )
        self._max_statement = self._sql("SELECT max(notification_id) FROM {events}", events=self._events)

    def _insert_numbered(self, rows: str, before: str = "", **parts: Composable) -> bytes:
        return self._sql(
            "WITH turn AS MATERIALIZED (SELECT pg_advisory_xact_lock({key}))" + before + " INSERT INTO {events}"
            " (originator_id, originator_version, topic, state) " + rows + " RETURNING notification_id",
            key=Literal(_lock_key("append", self.datastore.schema, self.events_table_name)),
            events=self._events,
            id=self._id_type,
            **parts,
        )

    def insert_events(self, stored_events: Sequence[StoredEvent], **kwargs: Any) -> Sequence[int] | None:
        """Record all or nothing and return the positions; `IntegrityError` for a version that exists.

        With `connection=`, a `sqlalchemy.Connection` or `psycopg.Connection` to the same database, the
        events join the caller's transaction: they are there, and subscribers are woken, when and only if
        the caller commits. The other writers of this application wait until then, so save last: after all
        rows that such a writer may have locked.
        """
        tracking = kwargs.get("tracking")
        joined = self._joined(kwargs)
        if joined is not None:
            ids = self.datastore.execute_in(joined, lambda raw: self._insert_in(raw, stored_events, tracking))
            joined.originators.update(e.originator_id for e in stored_events)
            return ids
        refuse_beside_open_transaction(self.datastore)
        attempt = Attempt()
        try:
            ids = self._insert(stored_events, tracking, attempt)
        except IntegrityError:
            stored = self._stored_before_loss(stored_events, tracking) if attempt.lost else None
            if stored is None:
                raise
            ids = stored
        self._wake(ids)
        return ids

    def _insert(self, stored_events: Sequence[StoredEvent], tracking: Tracking | None, attempt: Attempt) -> list[int]:
        if not stored_events:
            return []
        return [row[0] for row in self.datastore.execute(*self._statement(stored_events), attempt)]

    def _insert_in(self, raw: Driver, stored_events: Sequence[StoredEvent], tracking: Tracking | None) -> list[int]:
        if not stored_events:
            return []
        ids = [row[0] for row in run_in(raw, *self._statement(stored_events))]
        # Inside the transaction: it is delivered exactly if and when the caller commits.
        run_in(raw, b"SELECT pg_notify(%b, '')", (self.channel_name,))
        return ids

    def _statement(self, stored_events: Sequence[StoredEvent]) -> tuple[bytes, Sequence[Any]]:
        if len(stored_events) == 1:
            event = stored_events[0]
            key = self._stored_id(event.originator_id)
            return self._insert_one, (key, event.originator_version, event.topic, event.state)
        return self._insert_many, self._columns(stored_events)

    def _stored_before_loss(self, stored_events: Sequence[StoredEvent], tracking: Tracking | None) -> list[int] | None:
        return self._stored(stored_events, b"notification_id")

    def _wake(self, ids: Sequence[int]) -> None:
        if ids:
            self._channel.publish()
            self.datastore.courier.send(self.channel_name)

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
            conditions.append(b"notification_id >= %b" if inclusive_of_start else b"notification_id > %b")
            parameters.append(start)
        if stop is not None:
            conditions.append(b"notification_id <= %b")
            parameters.append(stop)
        if topics:
            conditions.append(b"topic = ANY(%b)")
            parameters.append(list(topics))
        where = b" WHERE " + b" AND ".join(conditions) if conditions else b""
        rows = self.datastore.execute(
            self._select_notifications_statement + where + b" ORDER BY notification_id LIMIT %b",
            (*parameters, limit),
        )
        return [Notification(*row) for row in rows]

    def max_notification_id(self) -> int | None:
        """The last position, `None` when nothing is recorded."""
        found: int | None = self.datastore.execute(self._max_statement)[0][0]
        return found

    def subscribe(self, gt: int | None = None, topics: Sequence[str] = ()) -> Subscription[ApplicationRecorder]:
        """Iterate over all events after position `gt`, of this and of other processes, waiting for more.

        The iteration outlives lost connections and restarts of the server: it waits until it is stopped.
        """
        self.datastore.courier.listen(self.channel_name, self._channel)
        return _PostgresSubscription(self, self._channel, gt=gt, topics=topics, poll_interval=_POLL_INTERVAL_S)


class _PostgresSubscription(RecorderSubscription):
    _failures = 0

    def _fetch(self) -> None:
        try:
            super()._fetch()
            self._failures = 0
        except ConnectionLost as error:
            logger.warning("the subscription waits for Postgres to come back: %s", error)
            pause = _RECONNECT_S[min(self._failures, len(_RECONNECT_S) - 1)]
            self._failures += 1
            self._channel.wait(self._channel.count, pause)


class PostgresTrackingRecorder(PostgresRecorder, WaitingTrackingRecorder):
    """How far each upstream application has been processed. Base class of views.

    A view creates its tables in `create_table()` and writes a row together with the position it comes from:

        with self.transaction(tracking) as connection:
            connection.execute(insert(table).values(...))
    """

    def __init__(
        self,
        datastore: PostgresDatastore,
        *,
        tracking_table_name: str = "notification_tracking",
        **kwargs: Any,
    ) -> None:
        super().__init__(datastore, **kwargs)
        self.tracking_table_name = tracking_table_name
        self._tracking = self._qualified(tracking_table_name)
        self.tracking_channel = datastore.channel(tracking_table_name)
        self._checked_multi_row = False
        self._track_statement = self._sql(
            "INSERT INTO {tracking} AS t VALUES (%b, %b)" + self._on_conflict(), tracking=self._tracking
        )
        self._max_tracking_statement = self._sql(
            "SELECT max(notification_id) FROM {tracking} WHERE application_name = %b",
            tracking=self._tracking,
        )

    def _on_conflict(self) -> str:
        upsert = (
            " ON CONFLICT (application_name) DO UPDATE SET notification_id = EXCLUDED.notification_id"
            " WHERE t.notification_id < EXCLUDED.notification_id"
        )
        return (upsert if self.datastore.single_row_tracking else "") + " RETURNING 1"

    @contextmanager
    def transaction(self, tracking: Tracking | None = None) -> Iterator[sqlalchemy.Connection]:
        """A transaction that commits at the end of the block, with `tracking`, or rolls back both.

        Raises `IntegrityError` before the block runs if the position was processed already. Until the end,
        other processors of the same upstream application wait.
        """
        with self.datastore.connection() as connection:
            if tracking is not None:
                self._refuse_many_rows()
                raw: Any = connection.connection.driver_connection
                try:
                    _check_tracked(run_in(raw, self._track_statement, _values(tracking)), tracking)
                except psycopg.Error as error:
                    raise self.datastore.translated(error) from error
            yield connection
        self.tracking_channel.publish()

    @contextmanager
    def connect(self) -> Iterator[sqlalchemy.Connection]:
        """A transaction for reading."""
        with self.datastore.connection() as connection:
            yield connection

    def create_table(self) -> None:
        """Create the table, or bring one with many rows per application to one row each."""
        single = self.datastore.single_row_tracking
        if not self._exists(self.tracking_table_name) or (single and not self._is_single_row()):
            self.datastore.transact(self._create_or_migrate)
        self._refuse_many_rows()
        super().create_table()

    def _is_single_row(self) -> bool:
        return self.max_tracking_id(MIGRATION_NAME) is not None

    def _create_or_migrate(self, connection: Driver) -> None:
        self._create(connection)
        single = self.datastore.single_row_tracking
        positions: list[Row] = []
        # Look again under the lock: another process may have been faster.
        exists = connection.execute(b"SELECT to_regclass(%b)", (self._tracking.as_string(None),)).fetchone()
        if single and exists is not None and exists[0] is not None:
            connection.execute(self._sql("LOCK TABLE {t} IN ACCESS EXCLUSIVE MODE", t=self._tracking))
            positions = connection.execute(
                self._sql(
                    "SELECT application_name, max(notification_id) FROM {t} GROUP BY application_name",
                    t=self._tracking,
                )
            ).fetchall()
            if any(name == MIGRATION_NAME for name, _ in positions):
                return
            backup = f"bkup1_{self.tracking_table_name}".encode()[:_IDENTIFIER_BYTES].decode(errors="ignore")
            connection.execute(
                self._sql("ALTER TABLE {t} RENAME TO {backup}", t=self._tracking, backup=Identifier(backup))
            )
        key = "application_name" if single else "application_name, notification_id"
        connection.execute(
            self._sql(
                "CREATE TABLE IF NOT EXISTS {t} (application_name text, notification_id bigint, PRIMARY KEY ("
                + key
                + "))",
                t=self._tracking,
            )
        )
        if single:
            for position in [*positions, (MIGRATION_NAME, 1)]:
                connection.execute(self._track_statement, position)

    def insert_tracking(self, tracking: Tracking) -> None:
        """Record a position; `IntegrityError` unless it is above the last one of its application."""
        attempt = Attempt()
        try:
            self._track(tracking, attempt)
        except IntegrityError:
            if not (attempt.lost and self._is_last(tracking)):
                raise
        self.tracking_channel.publish()

    def _track(self, tracking: Tracking, attempt: Attempt) -> None:
        self._refuse_many_rows()
        _check_tracked(self.datastore.execute(self._track_statement, _values(tracking), attempt), tracking)

    def _is_last(self, tracking: Tracking) -> bool:
        return self.max_tracking_id(tracking.application_name) == tracking.notification_id

    def _refuse_many_rows(self) -> None:
        if self.datastore.single_row_tracking or self._checked_multi_row:
            return
        if self._is_single_row():
            raise OperationalError(
                f"SINGLE_ROW_TRACKING is off, but table {self.tracking_table_name} has one row per application already;"
                " remove the setting"
            )
        self._checked_multi_row = True

    def max_tracking_id(self, application_name: str) -> int | None:
        """The last processed position of an application, `None` if there is none."""
        found: int | None = self.datastore.execute(self._max_tracking_statement, (application_name,))[0][0]
        return found


class PostgresProcessRecorder(PostgresTrackingRecorder, PostgresApplicationRecorder, ProcessRecorder):
    """Records events and the position they were made from together, by one statement."""

    def __init__(
        self,
        datastore: PostgresDatastore,
        *,
        events_table_name: str = "stored_events",
        tracking_table_name: str = "notification_tracking",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            datastore,
            tracking_table_name=tracking_table_name,
            events_table_name=events_table_name,
            **kwargs,
        )
        # Tracking takes its turn first: two processors that took these two locks in different orders would
        # deadlock.
        self._insert_tracked = self._insert_numbered(
            _UNNEST.format("tracked"),
            ", tracked AS (INSERT INTO {tracking} AS t SELECT %b::text, %b::bigint FROM turn"
            + self._on_conflict()
            + ")",
            tracking=self._tracking,
        )

    def _insert(self, stored_events: Sequence[StoredEvent], tracking: Tracking | None, attempt: Attempt) -> list[int]:
        if tracking is None:
            return super()._insert(stored_events, None, attempt)
        if not stored_events:
            self._track(tracking, attempt)
            return []
        self._refuse_many_rows()
        parameters = (*_values(tracking), *self._columns(stored_events))
        rows = self.datastore.execute(self._insert_tracked, parameters, attempt)
        _check_tracked(rows, tracking)
        return [row[0] for row in rows]

    def _insert_in(self, raw: Driver, stored_events: Sequence[StoredEvent], tracking: Tracking | None) -> list[int]:
        ids = super()._insert_in(raw, stored_events, tracking)
        if tracking is not None:
            self._refuse_many_rows()
            _check_tracked(run_in(raw, self._track_statement, _values(tracking)), tracking)
        return ids

    def _stored_before_loss(self, stored_events: Sequence[StoredEvent], tracking: Tracking | None) -> list[int] | None:
        if not stored_events and tracking is not None:
            return [] if self._is_last(tracking) else None
        return super()._stored_before_loss(stored_events, tracking)

    def _wake(self, ids: Sequence[int]) -> None:
        super()._wake(ids)
        self.tracking_channel.publish()


class PostgresFactory(RecorderFactory[PostgresTrackingRecorder]):
    """Constructs recorders for the database that the `POSTGRES_…` settings name.

    Tables are `<application>_events`, `<application>_snapshots` and `<application>_tracking`, in lower case.
    """

    def __init__(self, env: Environment | EnvType | None) -> None:
        super().__init__(env)
        get_password_topic = self.env.get("POSTGRES_GET_PASSWORD_TOPIC")
        self.datastore = PostgresDatastore(
            dbname=required(self.env, "POSTGRES_DBNAME"),
            host=required(self.env, "POSTGRES_HOST"),
            port=self.env.get("POSTGRES_PORT") or "5432",
            user=required(self.env, "POSTGRES_USER"),
            password="" if get_password_topic else required(self.env, "POSTGRES_PASSWORD"),
            get_password=resolve_topic(get_password_topic) if get_password_topic else None,
            connect_timeout=number(self.env, "POSTGRES_CONNECT_TIMEOUT", default=30.0, kind=float),
            idle_in_transaction_session_timeout=number(
                self.env, "POSTGRES_IDLE_IN_TRANSACTION_SESSION_TIMEOUT", default=5.0, kind=float
            ),
            lock_timeout=number(self.env, "POSTGRES_LOCK_TIMEOUT", default=0.0, kind=float),
            pool_size=number(self.env, "POSTGRES_POOL_SIZE", default=5, kind=int),
            max_overflow=number(self.env, "POSTGRES_MAX_OVERFLOW", default=10, kind=int),
            max_waiting=number(self.env, "POSTGRES_MAX_WAITING", default=0, kind=int),
            conn_max_age=number(self.env, "POSTGRES_CONN_MAX_AGE", default=3600.0, kind=float),
            pre_ping=flag(self.env, "POSTGRES_PRE_PING", default=False),
            schema=(self.env.get("POSTGRES_SCHEMA") or "").strip() or "public",
            originator_id_type=self.originator_id_type(),
            single_row_tracking=flag(self.env, self.SINGLE_ROW_TRACKING, default=True),
        )

    def aggregate_recorder(self, purpose: str = "events") -> AggregateRecorder:
        """A recorder of events or snapshots without positions."""
        return self._ready(PostgresAggregateRecorder(self.datastore, events_table_name=self._table(purpose, "stored")))

    def application_recorder(self) -> ApplicationRecorder:
        """An application's recorder, of the class `APPLICATION_RECORDER_TOPIC` names if set."""
        kind = self.recorder_class(PostgresApplicationRecorder, self.APPLICATION_RECORDER_TOPIC)
        return self._ready(kind(self.datastore, events_table_name=self._table("events", "stored")))

    def tracking_recorder(
        self, tracking_recorder_class: type[PostgresTrackingRecorder] | None = None
    ) -> PostgresTrackingRecorder:
        """A view; raises `UnsupportedRecorder` for a class that is not a `PostgresTrackingRecorder` of
        keiro.
        """
        kind = self.recorder_class(PostgresTrackingRecorder, self.TRACKING_RECORDER_TOPIC, tracking_recorder_class)
        return self._ready(kind(self.datastore, tracking_table_name=self._table("tracking", "notification")))

    def process_recorder(self) -> ProcessRecorder:
        """A recorder of events with tracking, of the class `PROCESS_RECORDER_TOPIC` names if set."""
        kind = self.recorder_class(PostgresProcessRecorder, self.PROCESS_RECORDER_TOPIC)
        return self._ready(
            kind(
                self.datastore,
                events_table_name=self._table("events", "stored"),
                tracking_table_name=self._table("tracking", "notification"),
            )
        )

    def close(self) -> None:
        """Close the database's connections."""
        if hasattr(self, "datastore"):
            self.datastore.close()

    def _table(self, purpose: str, default_prefix: str) -> str:
        return f"{self.env.name.lower() or default_prefix}_{purpose}"

    def _ready(self, recorder: R) -> R:
        if self.creates_tables():
            recorder.create_table()
        return recorder


R = TypeVar("R", bound=PostgresRecorder)
Factory = PostgresFactory

_UNNEST: Final = (
    "SELECT e.id, e.version, e.topic, e.state FROM {}, unnest(%b::{{id}}[], %b::bigint[], %b::text[], %b::bytea[])"
    " WITH ORDINALITY AS e (id, version, topic, state, place) ORDER BY e.place"
)


def _lock_key(*names: str) -> int:
    return int.from_bytes(sha256("\0".join(("keiro.recorders", *names)).encode()).digest()[:8], signed=True)


def _values(tracking: Tracking) -> tuple[str, int]:
    return tracking.application_name, tracking.notification_id


def _check_tracked(rows: Sequence[Row], tracking: Tracking) -> None:
    if not rows:
        raise IntegrityError(
            f"position {tracking.notification_id} of application '{tracking.application_name}' was processed already,"
            " or a later one"
        )
