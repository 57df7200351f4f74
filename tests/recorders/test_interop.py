"""One database, keiro's recorders and the library's own: what either writes the other reads, and both may
write.
"""

from __future__ import annotations

import threading
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from eventsourcing.application import Application
from eventsourcing.persistence import (
    DatetimeAsISO,
    DecimalAsStr,
    JSONTranscoder,
    Mapper,
    StoredEvent,
    Tracking,
    Transcoding,
    UUIDAsHex,
)
from eventsourcing.tests.application import BankAccounts
from hypothesis import example, given
from hypothesis import strategies as st

from keiro.stores.recorders.mapping import FlatEventMapper
from tests.recorders.accounts import Account, Accounts, SnapshottingAccounts, stored
from tests.recorders.conftest import Settings, closing_factory


def library(settings: Settings) -> Settings:
    """The same database with the library's own persistence module."""
    name = settings["PERSISTENCE_MODULE"].rpartition(".")[2]
    return {**settings, "PERSISTENCE_MODULE": f"eventsourcing.{name}"}


def test_each_reads_what_the_other_wrote(sql_settings: Settings) -> None:
    theirs, ours = BankAccounts(library(sql_settings)), BankAccounts(sql_settings)
    for writer, reader in ((theirs, ours), (ours, theirs)):
        account_id = writer.open_account("Alice", "alice@example.com")
        writer.credit_account(account_id, Decimal("10.00"))
        writer.take_snapshot(account_id)
        reader.credit_account(account_id, Decimal("25.00"))
        assert writer.get_balance(account_id) == reader.get_balance(account_id) == Decimal("35.00")
        assert list(writer.recorder.select_events(account_id)) == list(reader.recorder.select_events(account_id))
    assert list(theirs.recorder.select_notifications(None, 9)) == list(ours.recorder.select_notifications(None, 9))
    theirs.close()
    ours.close()


def test_a_database_of_either_opens_in_the_other(sql_settings: Settings) -> None:
    for first, second in (
        (library(sql_settings), sql_settings),
        (sql_settings, library(sql_settings)),
    ):
        app = SnapshottingAccounts(first)
        account_id = app.open("ann")
        app.deposit(account_id, 5)
        app.close()
        app = SnapshottingAccounts(second)
        app.deposit(account_id, 6)
        assert app.balance(account_id) == 11
        assert app.snapshots is not None
        assert len(list(app.snapshots.get(account_id))) == 1
        app.close()


def test_each_sees_how_far_the_other_has_processed(sql_settings: Settings) -> None:
    with closing_factory(library(sql_settings)) as theirs, closing_factory(sql_settings) as ours:
        recorders = [theirs.process_recorder(), ours.process_recorder()]
        for position in range(1, 5):
            recorders[position % 2].insert_events(stored(), tracking=Tracking("up", position))
            assert [r.max_tracking_id("up") for r in recorders] == [position, position]


def test_text_ids_of_the_library_are_found(sql_settings: Settings) -> None:
    settings = {**sql_settings, "ORIGINATOR_ID_TYPE": "text"}
    with closing_factory(library(settings)) as theirs, closing_factory(settings) as ours:
        events = [StoredEvent("account-1", 1, "topic", b"state")]
        theirs.application_recorder().insert_events(events)
        assert ours.application_recorder().select_events("account-1") == events


def test_positions_follow_commits_while_both_write(sql_settings: Settings) -> None:
    """A reader that goes on from the last position it has seen misses nothing."""
    apps = [Accounts(settings) for settings in (library(sql_settings), sql_settings) for _ in range(2)]
    errors: list[BaseException] = []
    read: list[int] = []
    done = threading.Event()

    def write(app: Accounts) -> None:
        try:
            for _ in range(40):
                app.recorder.insert_events(stored(5))
        except BaseException as error:
            errors.append(error)

    def tail() -> None:
        recorder = apps[-1].recorder
        while True:
            finished = done.is_set()
            found = recorder.select_notifications(read[-1] if read else 0, 50, inclusive_of_start=False)
            read.extend(n.id for n in found)
            if finished and not found:
                return

    threads = [threading.Thread(target=write, args=(app,)) for app in apps]
    reader = threading.Thread(target=tail)
    for thread in (*threads, reader):
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    reader.join()
    assert errors == []
    assert len(read) == 4 * 40 * 5
    # Those of one insert have neighbouring positions.
    notifications = apps[-1].recorder.select_notifications(None, 1000)
    for first in range(0, len(notifications), 5):
        group = notifications[first : first + 5]
        assert {n.originator_id for n in group} == {group[0].originator_id}
        assert [n.id for n in group] == list(range(group[0].id, group[0].id + 5))
    for app in apps:
        app.close()


class Named:
    """A value of the user's own type."""

    def __init__(self, name: str) -> None:
        self.name = name


class NamedAsStr(Transcoding):
    type = Named
    name = "named"

    def encode(self, obj: Named) -> str:
        return obj.name

    def decode(self, data: str) -> Named:
        return Named(data)


class Measure:
    """A value of a type that is written as a number, or as a value of another type."""

    def __init__(self, value: Any) -> None:
        self.value = value


class MeasureAsItsValue(Transcoding):
    type = Measure
    name = "measure"

    def encode(self, obj: Measure) -> Any:
        return obj.value

    def decode(self, data: Any) -> Measure:
        return Measure(data)


class Pair(tuple[int, int]):
    """Written as a list, whatever is registered for it."""


class PairAsDict(Transcoding):
    type = Pair
    name = "pair"

    def encode(self, obj: Pair) -> dict[str, int]:
        return {"a": obj[0], "b": obj[1]}

    def decode(self, data: dict[str, int]) -> Pair:
        return Pair(data.values())


def transcoder() -> JSONTranscoder:
    result = JSONTranscoder()
    for transcoding in (UUIDAsHex(), DecimalAsStr(), DatetimeAsISO(), NamedAsStr(), MeasureAsItsValue(), PairAsDict()):
        result.register(transcoding)
    return result


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(min_value=-(10**30), max_value=10**30)
    | st.floats()
    | st.text()
    | st.uuids()
    | st.decimals()
    | st.datetimes(timezones=st.timezones())
    | st.builds(Named, st.text())
    | st.builds(Measure, st.floats() | st.uuids())
    | st.builds(lambda a, b: Pair((a, b)), st.integers(), st.integers()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(amount=VALUES, note=VALUES)
@example(amount=float("nan"), note=1e16)
@example(amount=Measure(float("nan")), note=Measure(Named("inner")))
@example(amount=Pair((1, 2)), note=(1, [2.5, {"a": None}]))
def test_the_stored_bytes_are_those_of_the_library(amount: Any, note: Any) -> None:
    account = Account("ann")
    account.deposit(5)
    event = account.collect_events()[1]
    vars(event).update(amount=amount, note=note)
    theirs = Mapper[UUID](transcoder()).to_stored_event(event)
    ours = FlatEventMapper[UUID](transcoder()).to_stored_event(event)
    assert ours == theirs


def test_every_character_is_stored_as_the_library_stores_it() -> None:
    event: Any = Account("ann").collect_events()[0]
    text = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
    vars(event)["owner"] = text
    theirs = Mapper[UUID](transcoder()).to_stored_event(event)
    assert FlatEventMapper[UUID](transcoder()).to_stored_event(event) == theirs


def test_an_event_that_cannot_be_encoded_raises_what_the_library_raises() -> None:
    event: Any = Account("ann").collect_events()[0]
    for value in (object(), "\ud800"):
        vars(event)["owner"] = value
        raised = []
        for mapper in (Mapper[UUID](transcoder()), FlatEventMapper[UUID](transcoder())):
            with pytest.raises((TypeError, UnicodeEncodeError)) as caught:
                mapper.to_stored_event(event)
            raised.append(type(caught.value))
        assert raised[0] is raised[1]


class Upgraded(Account):
    """An account whose deposits are in cents since version 2."""

    class Deposited(Account.Event):
        amount: int
        class_version = 2

        @staticmethod
        def upcast_v1_v2(state: dict[str, Any]) -> None:
            state["amount"] *= 100

        def apply(self, aggregate: Any) -> None:
            aggregate.balance += self.amount


def test_events_of_an_older_version_are_brought_up_to_date(settings: Settings) -> None:
    app = Application[UUID](settings)
    account = Upgraded("ann")
    account.trigger_event(Upgraded.Deposited, amount=500)
    app.save(account)
    old = app.recorder.select_events(account.id)[1]
    assert b'"class_version":2' in old.state
    state = old.state.replace(b'"class_version":2', b'"class_version":1').replace(b"500", b"7")
    app.recorder.insert_events([StoredEvent(account.id, 3, old.topic, state)])
    found: Upgraded = app.repository.get(account.id)
    assert found.balance == 1200
    app.close()
