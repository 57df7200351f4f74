"""A small application for tests, and helpers to look at it from other threads and processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar
from uuid import UUID, uuid4

import psycopg
from eventsourcing.application import Application
from eventsourcing.domain import Aggregate, event
from eventsourcing.persistence import ApplicationRecorder, Notification, StoredEvent


class Account(Aggregate):
    """Counts deposits."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.balance = 0

    @event("Deposited")
    def deposit(self, amount: int) -> None:
        self.balance += amount


class Accounts(Application[UUID]):
    """An application named `accounts`."""

    name = "accounts"

    def open(self, owner: str, **kwargs: Any) -> UUID:
        account = Account(owner)
        self.save(account, **kwargs)
        return account.id

    def deposit(self, account_id: UUID, amount: int, **kwargs: Any) -> None:
        account: Account = self.repository.get(account_id)
        account.deposit(amount)
        self.save(account, **kwargs)

    def balance(self, account_id: UUID) -> int:
        account: Account = self.repository.get(account_id)
        return account.balance


class SnapshottingAccounts(Accounts):
    """The same, taking a snapshot at every second version."""

    name = "accounts"
    snapshotting_intervals: ClassVar[Any] = {Account: 2}


def stored(count: int = 1, *, topic: str = "topic", originator_id: UUID | None = None) -> list[StoredEvent]:
    """Events of one new aggregate."""
    key = originator_id or uuid4()
    return [StoredEvent(key, version, topic, b"state") for version in range(1, count + 1)]


class Tail(threading.Thread):
    """Iterates over a subscription in a thread and lets a test await what arrives."""

    def __init__(self, recorder: ApplicationRecorder, *, gt: int | None = None, topics: Sequence[str] = ()) -> None:
        super().__init__(daemon=True)
        self.subscription = recorder.subscribe(gt=gt, topics=topics)
        self.arrived: list[Notification] = []
        self.error: BaseException | None = None
        self._changed = threading.Condition()
        self.start()

    def run(self) -> None:
        try:
            for notification in self.subscription:
                with self._changed:
                    self.arrived.append(notification)
                    self._changed.notify_all()
        except BaseException as error:
            self.error = error

    @property
    def ids(self) -> list[int]:
        """The positions that arrived, in order."""
        return [n.id for n in self.arrived]

    def wait_for(self, done: Callable[[Sequence[int]], bool], timeout: float = 30) -> None:
        """Block until the ids that arrived satisfy a condition."""
        with self._changed:
            if not self._changed.wait_for(lambda: done(self.ids), timeout):
                raise AssertionError(f"only {self.ids[-5:]} arrived ({len(self.arrived)})")

    def stop(self) -> None:
        """End the iteration and the thread."""
        self.subscription.stop()
        self.join(30)
        assert not self.is_alive()


@contextmanager
def tailing(recorder: ApplicationRecorder, **kwargs: Any) -> Iterator[Tail]:
    """A tail that is stopped at the end of the block."""
    tail = Tail(recorder, **kwargs)
    try:
        yield tail
    finally:
        tail.stop()


def wait_for_listener(url: str) -> None:
    """Wait until a courier listens, which is the first thing it does."""
    with psycopg.connect(url, autocommit=True) as connection:
        while not connection.execute(
            "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle'"
            " AND application_name = 'keiro courier' AND query ~ '^(LISTEN|NOTIFY)'"
        ).fetchone():
            threading.Event().wait(0.01)
