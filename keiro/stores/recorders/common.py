"""What the recorders of all stores share: waking, waiting, settings and errors.

Errors that the recorder contracts name are the `eventsourcing` library's own (`IntegrityError`,
`OperationalError`, …), because its applications catch those; errors about how keiro is used are also
`KeiroError`s. All of that library that is used here is documented; nothing relies on its internals.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final, Generic, TypeVar, cast
from uuid import UUID
from weakref import WeakValueDictionary

from eventsourcing.domain import TAggregateID
from eventsourcing.persistence import (
    AggregateRecorder,
    ApplicationRecorder,
    DatabaseError,
    DataError,
    EventStore,
    InfrastructureFactory,
    IntegrityError,
    InterfaceError,
    InternalError,
    Mapper,
    Notification,
    NotSupportedError,
    OperationalError,
    PersistenceError,
    ProgrammingError,
    Subscription,
    TrackingRecorder,
    Transcoder,
    TTrackingRecorder,
    WaitInterruptedError,
)
from eventsourcing.utils import Environment, resolve_topic, strtobool

from keiro.errors import KeiroError
from keiro.stores.recorders.mapping import FlatEventMapper, RecordingStore

T = TypeVar("T")
N = TypeVar("N", int, float)

MIGRATION_NAME: Final = "__migration__"
"""The library marks a tracking table that has one row per application by a row of this name."""

_BATCH: Final = 500
_TRACKING_POLL_S: Final = (0.1, 0.8)
"""How often `wait()` looks for positions recorded by other processes: at first, and at most after some
doubling.
"""

_INTERRUPT_POLL_S: Final = 0.02
_COMMIT_POLL_S: Final = 0.002
_COMMIT_WINDOW_S: Final = 1.0


class UnsupportedRecorder(KeiroError, TypeError):
    """A recorder or view class does not belong to the store that is configured."""


class InvalidSetting(KeiroError, OSError):
    """A setting is missing or cannot be read. (An `OSError`, as in the library's own factories.)"""


class UnusableConnection(KeiroError, ProgrammingError):
    """`save(…, connection=…)` cannot join this connection, or was left out where it is needed."""


_ERRORS: Final[dict[str, type[PersistenceError]]] = {
    kind.__name__: kind
    for kind in (
        InterfaceError,
        DataError,
        OperationalError,
        IntegrityError,
        InternalError,
        ProgrammingError,
        NotSupportedError,
        DatabaseError,
    )
}


def translated(error: Exception, where: str) -> PersistenceError:
    """The library's exception for a driver's: both follow the names of PEP 249."""
    for kind in type(error).__mro__:
        if found := _ERRORS.get(kind.__name__):
            break
    else:
        found = PersistenceError
    advice = ""
    if found is IntegrityError:
        advice = ". Somebody else recorded this version or position first: read again and repeat the change"
    return found(f"{where}: {str(error).strip()}{advice}")


# Waking


class Channel:
    """Wakes the threads of this process that wait for new rows in one table.

    `count` grows with every commit, so a waiter that reads it before it reads the table cannot miss one.
    """

    def __init__(self) -> None:
        # Reentrant: stop() may run in a signal handler or a finalizer while this very thread holds the lock.
        self._condition = threading.Condition(threading.RLock())
        self._commit_expected_until = 0.0
        self.count = 0

    def publish(self) -> None:
        """Wake all waiters."""
        with self._condition:
            self.count += 1
            self._condition.notify_all()

    def expect_commit(self) -> None:
        """Have waiters look every few milliseconds for a while: a commit is due that nobody will announce."""
        with self._condition:
            self._commit_expected_until = time.monotonic() + _COMMIT_WINDOW_S
            self._condition.notify_all()

    def wait(self, seen: int, timeout: float) -> None:
        """Return when `count` is no longer `seen`, when it is worth a look, or after `timeout` seconds."""
        with self._condition:
            for _ in range(2):  # once more when woken by `expect_commit`
                if self.count != seen:
                    return
                if time.monotonic() < self._commit_expected_until:
                    timeout = min(timeout, _COMMIT_POLL_S)
                if not self._condition.wait(timeout):
                    return


_shared: WeakValueDictionary[tuple[object, ...], Any] = WeakValueDictionary()
_shared_lock = threading.Lock()


def shared(kind: type[T], *key: object) -> T:
    """The one object of this kind and key in this process, while anybody holds it.

    Two applications on one database wake each other and take turns although each has a factory of its own.
    """
    with _shared_lock:
        found = _shared.get((kind, *key))
        if found is None:
            found = _shared[(kind, *key)] = kind()
        return cast(T, found)


# Waiting


class RecorderSubscription(Subscription[ApplicationRecorder]):
    """An iterator over the events of an application that blocks for more until `stop()`.

    It reads in the thread that iterates, so an error reaches the caller where it happens and there is no
    thread to hang or to outlive anything. Iteration ends by itself when the main thread has ended, so that
    a subscription somebody forgot does not keep the interpreter from exiting.
    """

    def __init__(
        self,
        recorder: ApplicationRecorder,
        channel: Channel,
        *,
        gt: int | None,
        topics: Sequence[str],
        poll_interval: float,
    ) -> None:
        super().__init__(recorder=recorder, gt=gt, topics=topics)
        self._reader = recorder
        self._channel = channel
        self._position = gt or 0
        self._filter = topics
        self._poll_interval = poll_interval
        self._batch: deque[Notification] = deque()
        self._stopped = False

    def stop(self) -> None:
        """End the iteration, from any thread and at any time; what was read but not yielded is dropped."""
        super().stop()
        self._stopped = True
        self._channel.publish()

    def __next__(self) -> Notification:
        while not self._stopped:
            if self._batch:
                return self._batch.popleft()
            seen = self._channel.count
            self._fetch()
            if not self._batch and not self._stopped:
                if not threading.main_thread().is_alive():
                    self.stop()
                # The timeout is the safety net for commits of other processes whose wake-up was lost.
                self._channel.wait(seen, self._poll_interval)
        raise StopIteration

    def _fetch(self) -> None:
        stop: int | None = None
        if self._filter:
            # Read the head first: where nothing matches up to it, the next look starts behind it.
            stop = self._reader.max_notification_id()
            if stop is None or stop <= self._position:
                return
        found = self._reader.select_notifications(
            start=self._position, limit=_BATCH, stop=stop, topics=self._filter, inclusive_of_start=False
        )
        self._batch.extend(found)
        if stop is not None and len(found) < _BATCH:
            self._position = stop
        elif found:
            self._position = found[-1].id


class WaitingTrackingRecorder(TrackingRecorder):
    """A tracking recorder whose `wait()` is woken by commits of this process and polls only for those of
    others.
    """

    tracking_channel: Channel

    def wait(
        self,
        application_name: str,
        notification_id: int | None,
        timeout: float = 1.0,
        interrupt: threading.Event | None = None,
    ) -> None:
        """Block until the position is recorded. Raises `TimeoutError` after `timeout` seconds and
        `WaitInterruptedError` when `interrupt` is set."""
        deadline = time.monotonic() + timeout
        poll_interval, longest = _TRACKING_POLL_S
        while True:
            seen = self.tracking_channel.count
            if self.has_tracking_id(application_name, notification_id):
                return
            look_again = min(deadline, time.monotonic() + poll_interval)
            poll_interval = min(poll_interval * 2, longest)
            while self.tracking_channel.count == seen and (remaining := look_again - time.monotonic()) > 0:
                if interrupt is not None:
                    if interrupt.is_set():
                        raise WaitInterruptedError
                    remaining = min(remaining, _INTERRUPT_POLL_S)
                self.tracking_channel.wait(seen, remaining)
            if interrupt is not None and interrupt.is_set():
                raise WaitInterruptedError
            if self.tracking_channel.count == seen and time.monotonic() >= deadline:
                if self.has_tracking_id(application_name, notification_id):
                    return
                raise TimeoutError(
                    f"position {notification_id} of application '{application_name}' was not processed within"
                    f" {timeout} s"
                )


# Transactions of the caller


class CallerTransaction:
    """A transaction that the caller of `save(…, connection=…)` opened and will end.

    While it is open, reads of the aggregates saved in it see what it wrote, and snapshots are written in
    it: a snapshot is taken by `save()` itself, which must neither miss the events it has just recorded nor
    wait for the lock they hold.
    """

    def __init__(self, datastore: object, connection: Any, is_open: Callable[[], bool]) -> None:
        self.datastore = datastore
        self.connection = connection
        self.is_open = is_open
        """Tells this transaction from a later one on the same connection."""
        self.originators: set[UUID | str] = set()
        """Aggregates that were saved in it."""


# A context variable, so that neither another thread nor another asyncio task sees what one has not
# committed yet.
_caller_transactions: ContextVar[tuple[CallerTransaction, ...]] = ContextVar("caller_transactions", default=())


def remember(transaction: CallerTransaction) -> CallerTransaction:
    """Keep a caller's transaction for the reads that follow in this thread or task."""
    kept = (t for t in _caller_transactions.get() if t.datastore is not transaction.datastore and t.is_open())
    _caller_transactions.set((*kept, transaction))
    return transaction


def open_transaction(datastore: object) -> CallerTransaction | None:
    """The caller's transaction on this datastore that this thread or task has joined, while it is open."""
    transactions = _caller_transactions.get()
    if not transactions:
        return None
    for transaction in transactions:
        if transaction.datastore is datastore:
            if transaction.is_open():
                return transaction
            _caller_transactions.set(tuple(t for t in transactions if t is not transaction))
    return None


def refuse_beside_open_transaction(datastore: object) -> None:
    """Refuse a save that would wait for the lock of a transaction its own thread has left open."""
    if open_transaction(datastore) is not None:
        raise UnusableConnection(
            "an earlier save() joined a transaction that is still open in this thread or task, and a save() without"
            " connection= would wait for its lock for ever. Pass connection= here too, or commit first"
        )


# Settings


class RecorderFactory(InfrastructureFactory[TTrackingRecorder], Generic[TTrackingRecorder]):
    """Reads settings as the library's own factories do: `<APPNAME>_<KEY>` first, then `<KEY>`."""

    CREATE_TABLE = "CREATE_TABLE"
    ORIGINATOR_ID_TYPE = "ORIGINATOR_ID_TYPE"
    SINGLE_ROW_TRACKING = "SINGLE_ROW_TRACKING"

    def mapper(
        self,
        transcoder: Transcoder | None = None,
        mapper_class: type[Mapper[TAggregateID]] | None = None,
    ) -> Mapper[TAggregateID]:
        """The mapper `MAPPER_TOPIC` names, else one that writes the library's format."""
        if mapper_class is None and not self.env.get(self.MAPPER_TOPIC):
            mapper_class = FlatEventMapper
        return super().mapper(transcoder, mapper_class)

    def event_store(
        self,
        mapper: Mapper[TAggregateID] | None = None,
        recorder: AggregateRecorder | None = None,
    ) -> EventStore[TAggregateID]:
        """An event store over the given recorder, else over a new application recorder."""
        return RecordingStore(mapper or self.mapper(), recorder or self.application_recorder())

    def creates_tables(self) -> bool:
        """Whether recorders create their tables when they are constructed."""
        return flag(self.env, self.CREATE_TABLE, default=True)

    def originator_id_type(self) -> str:
        """`uuid` or `text`."""
        value = (self.env.get(self.ORIGINATOR_ID_TYPE) or "uuid").lower()
        if value not in ("uuid", "text"):
            raise InvalidSetting(
                f"{names(self.env, self.ORIGINATOR_ID_TYPE)} is '{value}'; it must be 'uuid' or 'text'"
            )
        return value

    def recorder_class(self, base: type[T], setting: str, given: type[Any] | None = None) -> type[T]:
        """The class to construct: the given one, or the one a topic setting names, or `base` itself."""
        if given is None:
            topic = self.env.get(setting)
            if not topic:
                return base
            given = resolve_topic(topic)
        if not (isinstance(given, type) and issubclass(given, base)):
            raise UnsupportedRecorder(
                f"{given!r} is not a subclass of {base.__module__}.{base.__qualname__}, which PERSISTENCE_MODULE"
                f" asks for. A view of another store's tracking recorder must become a subclass of this one and"
                f" write its rows inside `with self.transaction(tracking)`"
            )
        return given


def names(env: Environment, key: str) -> str:
    """The environment variables a setting is read from, for messages."""
    return " or ".join(env.create_keys(key))


def required(env: Environment, key: str) -> str:
    """A setting that has no default."""
    value = env.get(key)
    if value is None:
        raise InvalidSetting(f"set {names(env, key)}: this persistence module cannot work without it")
    return value


def flag(env: Environment, key: str, *, default: bool) -> bool:
    """A yes or no setting; empty is the default."""
    value = env.get(key)
    if not value:
        return default
    try:
        return strtobool(value)
    except ValueError:
        raise InvalidSetting(f"{names(env, key)} is '{value}'; it must be yes or no") from None


def number(env: Environment, key: str, *, default: N, kind: Callable[[str], N]) -> N:
    """A number that is not negative; empty is the default."""
    value = (env.get(key) or "").strip()
    if not value:
        return default
    try:
        result = kind(value)
    except ValueError:
        result = None
    if result is None or not 0 <= result < 1_000_000_000:
        raise InvalidSetting(
            f"{names(env, key)} is '{value}'; it must be a number that is not negative, or empty for {default}"
        )
    return result
