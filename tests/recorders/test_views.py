"""Views are subclasses of keiro's tracking recorders; their rows and their position commit together."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import sqlalchemy as sa
from eventsourcing import popo
from eventsourcing import sqlite as library_sqlite
from eventsourcing.dispatch import singledispatchmethod
from eventsourcing.persistence import (
    InfrastructureFactory,
    IntegrityError,
    Tracking,
    TrackingRecorder,
    WaitInterruptedError,
)
from eventsourcing.projection import Projection, ProjectionRunner

from keiro.errors import KeiroError
from keiro.stores.recorders import common
from keiro.stores.recorders.common import UnsupportedRecorder
from keiro.stores.recorders.memory import MemoryTrackingRecorder
from keiro.stores.recorders.postgres import PostgresTrackingRecorder
from keiro.stores.recorders.sqlite import SQLiteTrackingRecorder
from tests.recorders.accounts import Account, Accounts
from tests.recorders.conftest import Settings, closing_factory

OWNERS = sa.Table("owners", sa.MetaData(), sa.Column("owner", sa.Text, primary_key=True))


class MemoryOwners(MemoryTrackingRecorder):
    """The owners of all accounts."""

    def __init__(self) -> None:
        super().__init__()
        self._owners: set[str] = set()

    def add(self, owner: str, tracking: Tracking) -> None:
        with self.transaction(tracking):
            if owner == "nobody":
                raise ValueError("nobody owns nothing")
            self._owners.add(owner)

    def owners(self) -> list[str]:
        return sorted(self._owners)


class _Owners(TrackingRecorder):
    transaction: Any
    connect: Any

    def create_table(self) -> None:
        super().create_table()  # type: ignore[misc]
        with self.transaction() as connection:
            OWNERS.create(connection, checkfirst=True)

    def add(self, owner: str, tracking: Tracking) -> None:
        with self.transaction(tracking) as connection:
            connection.execute(sa.insert(OWNERS).values(owner=owner))
            if owner == "nobody":
                raise ValueError("nobody owns nothing")

    def owners(self) -> list[str]:
        with self.connect() as connection:
            return list(connection.scalars(sa.select(OWNERS.c.owner).order_by(OWNERS.c.owner)))


class SQLiteOwners(_Owners, SQLiteTrackingRecorder):
    """The same in SQLite."""


class PostgresOwners(_Owners, PostgresTrackingRecorder):
    """The same in Postgres."""


def view_class(settings: Settings) -> type[Any]:
    """The view for the store that is configured."""
    return {
        "memory": MemoryOwners,
        "sqlite": SQLiteOwners,
        "postgres": PostgresOwners,
    }[settings["PERSISTENCE_MODULE"].rpartition(".")[2]]


class Seen(Projection[Any]):
    """Collects owners."""

    name = "seen"

    @singledispatchmethod
    def process_event(self, event: Any, tracking: Tracking) -> None:
        self.view.insert_tracking(tracking)

    @process_event.register
    def _(self, event: Account.Created, tracking: Tracking) -> None:
        self.view.add(event.owner, tracking)  # type: ignore[attr-defined]


@pytest.fixture
def view(settings: Settings, factory: InfrastructureFactory) -> Any:
    return factory.tracking_recorder(view_class(settings))


def test_rows_and_position_commit_together(view: Any) -> None:
    view.add("ann", Tracking("accounts", 1))
    assert view.owners() == ["ann"]
    assert view.max_tracking_id("accounts") == 1


def test_an_exception_in_the_block_records_neither(view: Any) -> None:
    with pytest.raises(ValueError, match="nobody"):
        view.add("nobody", Tracking("accounts", 1))
    assert view.owners() == []
    assert view.max_tracking_id("accounts") is None


def test_a_position_that_was_processed_is_refused_before_anything_is_written(view: Any) -> None:
    view.add("ann", Tracking("accounts", 2))
    for position in (1, 2):
        with pytest.raises(IntegrityError):
            view.add("bob", Tracking("accounts", position))
    assert view.owners() == ["ann"]


def test_of_two_processors_of_one_position_exactly_one_writes(settings: Settings, view: Any) -> None:
    if settings["PERSISTENCE_MODULE"].endswith("memory"):
        others = [view, view]
    else:
        with closing_factory(settings) as first, closing_factory(settings) as second:
            others = [f.tracking_recorder(view_class(settings)) for f in (first, second)]
            race(others)
        return
    race(others)


def race(views: list[Any]) -> None:
    """Process the same positions in two threads."""
    refused: list[int] = []
    barrier = threading.Barrier(2, timeout=60)

    def process(view: Any) -> None:
        for position in range(1, 51):
            barrier.wait()
            try:
                view.add(f"owner {position}", Tracking("accounts", position))
            except IntegrityError:
                refused.append(position)

    threads = [threading.Thread(target=process, args=(view,)) for view in views]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(refused) == list(range(1, 51))
    assert len(views[0].owners()) == 50


def test_a_projection_follows_an_application(settings: Settings) -> None:
    with ProjectionRunner(
        application_class=Accounts, projection_class=Seen, view_class=view_class(settings), env=settings
    ) as runner:
        for owner in ("ann", "bob"):
            account = Account(owner)
            account.deposit(5)
            last = runner.app.save(account)[-1].notification.id
        runner.wait(last, timeout=30)
        assert runner.view.owners() == ["ann", "bob"]
    runner.view.datastore.close() if hasattr(runner.view, "datastore") else None


def test_a_view_of_another_store_is_refused_with_advice(settings: Settings, factory: InfrastructureFactory) -> None:
    views = [library_sqlite.SQLiteTrackingRecorder, popo.POPOTrackingRecorder, dict]
    views += [view for view in (MemoryOwners, SQLiteOwners, PostgresOwners) if view is not view_class(settings)]
    for foreign in views:
        with pytest.raises(UnsupportedRecorder, match=r"self\.transaction\(tracking\)") as raised:
            factory.tracking_recorder(foreign)
        assert isinstance(raised.value, TypeError)
        assert isinstance(raised.value, KeiroError)


def test_wait_is_woken_by_the_position_and_not_by_a_poll(view: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "_TRACKING_POLL_S", (3600.0, 3600.0))
    waits = threading.Thread(target=view.wait, args=("accounts", 2, 60.0), daemon=True)
    waits.start()
    view.add("ann", Tracking("accounts", 1))
    view.add("bob", Tracking("accounts", 2))
    waits.join(30)
    assert not waits.is_alive()


def test_wait_sees_a_position_recorded_elsewhere(view: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = threading.Thread(target=view.wait, args=("accounts", 1, 60.0), daemon=True)
    waits.start()
    # As if another process had recorded it: nothing is published here.
    monkeypatch.setattr(view.tracking_channel, "publish", lambda: None)
    view.insert_tracking(Tracking("accounts", 1))
    waits.join(30)
    assert not waits.is_alive()


def test_wait_can_be_interrupted_while_it_waits(view: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "_TRACKING_POLL_S", (3600.0, 3600.0))
    looked = threading.Event()
    has_tracking_id = view.has_tracking_id
    monkeypatch.setattr(view, "has_tracking_id", lambda *args: has_tracking_id(*args) or looked.set())
    interrupt = threading.Event()
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            view.wait("accounts", 1, 60.0, interrupt)
        except BaseException as error:
            raised.append(error)

    waits = threading.Thread(target=wait, daemon=True)
    waits.start()
    assert looked.wait(30)
    interrupt.set()
    waits.join(30)
    assert [type(error) for error in raised] == [WaitInterruptedError]
