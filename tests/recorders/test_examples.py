"""Whole applications of the library, the same code on every store: only the environment says where they
record.
"""

from __future__ import annotations

import time
from typing import Any, ClassVar
from uuid import NAMESPACE_URL, UUID, uuid5

import pytest
from eventsourcing.application import Application, EventSourcedLog, ProcessingEvent
from eventsourcing.dispatch import singledispatchmethod
from eventsourcing.domain import Aggregate, DomainEvent, event
from eventsourcing.persistence import IntegrityError
from eventsourcing.projection import EventSourcedProjectionRunner
from eventsourcing.system import (
    MultiThreadedRunner,
    NewMultiThreadedRunner,
    NewSingleThreadedRunner,
    ProcessApplication,
    Runner,
    SingleThreadedRunner,
    System,
)

from tests.recorders.conftest import Settings


@pytest.fixture(autouse=True)
def environment(settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Every application reads its settings from the process's environment."""
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    if "SQLITE_DBNAME" in settings:
        # Applications on one SQLite file would share one event log.
        for name in ("ORDERS", "SHIPPING"):
            monkeypatch.setenv(f"{name}_SQLITE_DBNAME", str(tmp_path / f"{name}.db"))


# Pages with titles that are unique: an aggregate per page, one per title, and a log of all pages.


class Page(Aggregate):
    """A page somebody writes."""

    def __init__(self, title: str, author: str) -> None:
        self.title = title
        self.author = author
        self.body = ""

    @event("Renamed")
    def rename(self, title: str) -> None:
        self.title = title

    @event("BodyChanged")
    def write(self, body: str) -> None:
        self.body = body


class Title(Aggregate):
    """Which page has a title."""

    def __init__(self, name: str, page_id: UUID | None) -> None:
        self.name = name
        self.page_id = page_id

    @classmethod
    def create_id(cls, name: str) -> UUID:
        return uuid5(NAMESPACE_URL, f"/titles/{name}")

    @event("Given")
    def give(self, page_id: UUID | None) -> None:
        self.page_id = page_id


class PageLogged(DomainEvent):
    """That a page exists."""

    page_id: UUID


class TitleTaken(Exception):
    """Another page has this title."""


class Wiki(Application[UUID]):
    """Pages, found by their titles."""

    name = "wiki"
    snapshotting_intervals: ClassVar[Any] = {Page: 3}

    def __init__(self) -> None:
        super().__init__()
        self.pages = EventSourcedLog(self.events, uuid5(NAMESPACE_URL, "/pages"), PageLogged)

    def create(self, title: str, author: str) -> None:
        page = Page(title, author)
        self.save(page, self._take(title, page.id), self.pages.trigger_event(page_id=page.id))

    def write(self, title: str, body: str) -> None:
        page = self.page(title)
        page.write(body)
        self.save(page)

    def rename(self, old: str, new: str) -> None:
        page = self.page(old)
        page.rename(new)
        freed: Title = self.repository.get(Title.create_id(old))
        freed.give(None)
        self.save(page, freed, self._take(new, page.id))

    def page(self, title: str) -> Page:
        found: Title = self.repository.get(Title.create_id(title))
        assert found.page_id is not None
        page: Page = self.repository.get(found.page_id)
        return page

    def titles(self) -> list[str]:
        pages: list[Page] = [self.repository.get(logged.page_id) for logged in self.pages.get()]
        return [page.title for page in pages]

    def _take(self, name: str, page_id: UUID) -> Title:
        if Title.create_id(name) not in self.repository:
            return Title(name, page_id)
        title: Title = self.repository.get(Title.create_id(name))
        if title.page_id is not None:
            raise TitleTaken(name)
        title.give(page_id)
        return title


def test_pages_are_written_renamed_and_found_again_by_another_start(settings: Settings) -> None:
    wiki = Wiki()
    wiki.create("home", "ann")
    wiki.create("about", "bob")
    for body in ("one", "two", "three"):
        wiki.write("home", body)
    wiki.rename("home", "start")
    with pytest.raises(TitleTaken):
        wiki.rename("about", "start")
    wiki.create("home", "carl")
    if not settings["PERSISTENCE_MODULE"].endswith("memory"):
        wiki.close()
        wiki = Wiki()
    assert wiki.titles() == ["start", "about", "home"]
    assert (wiki.page("start").body, wiki.page("start").author) == ("three", "ann")
    assert wiki.page("home").author == "carl"
    page_id = wiki.page("start").id
    assert wiki.snapshots is not None
    assert [s.originator_version for s in wiki.snapshots.get(page_id)] == [3]
    earlier: Page = wiki.repository.get(page_id, version=4)
    assert (earlier.title, earlier.body) == ("home", "three")
    wiki.close()


def test_of_two_who_create_one_page_at_once_the_second_records_nothing() -> None:
    wiki = Wiki()
    first, second = Page("home", "ann"), Page("home", "bob")
    titles = [Title("home", page.id) for page in (first, second)]
    wiki.save(first, titles[0])
    with pytest.raises(IntegrityError):
        wiki.save(second, titles[1])
    assert wiki.page("home").author == "ann"
    assert second.id not in wiki.repository
    wiki.close()


# Orders that another application ships: a system of two, each with its own event log.


class Order(Aggregate):
    """Something that was ordered."""

    def __init__(self, product: str) -> None:
        self.product = product


class Shipment(Aggregate):
    """The parcel of an order."""

    def __init__(self, order_id: UUID, product: str) -> None:
        self.order_id = order_id
        self.product = product

    @classmethod
    def create_id(cls, order_id: UUID, product: str) -> UUID:
        return uuid5(order_id, "shipment")


class Orders(Application[UUID]):
    """Takes orders."""

    name = "orders"

    def order(self, product: str) -> UUID:
        order = Order(product)
        self.save(order)
        return order.id


class Shipping(ProcessApplication[UUID]):
    """Ships what was ordered, once."""

    name = "shipping"

    @singledispatchmethod
    def policy(self, domain_event: Any, processing_event: ProcessingEvent[UUID]) -> None:
        """Nothing follows from other events."""

    @policy.register
    def _(self, domain_event: Order.Created, processing_event: ProcessingEvent[UUID]) -> None:
        product: str = domain_event.product  # type: ignore[attr-defined]
        processing_event.collect_events(Shipment(domain_event.originator_id, product))

    def shipped(self, order_id: UUID) -> bool:
        return Shipment.create_id(order_id, "") in self.repository


def wait_until_shipped(shipping: Shipping, order_ids: list[UUID]) -> None:
    deadline = time.monotonic() + 30
    while not all(shipping.shipped(order_id) for order_id in order_ids):
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(
    "runner_class",
    [SingleThreadedRunner, NewSingleThreadedRunner, MultiThreadedRunner, NewMultiThreadedRunner],
)
def test_a_system_ships_every_order_once(runner_class: type[Runner[UUID]]) -> None:
    runner = runner_class(System([[Orders, Shipping]]))
    runner.start()
    orders, shipping = runner.get(Orders), runner.get(Shipping)
    order_ids = [orders.order(f"product {number}") for number in range(30)]
    wait_until_shipped(shipping, order_ids)
    assert shipping.recorder.max_tracking_id("orders") == 30
    assert shipping.recorder.max_notification_id() == 30
    runner.stop()
    for app in (orders, shipping):
        app.close()


def test_a_projection_ships_what_was_ordered_before_and_after_it_started(settings: Settings) -> None:
    orders = Orders()
    order_ids = [] if settings["PERSISTENCE_MODULE"].endswith("memory") else [orders.order("early")]
    with EventSourcedProjectionRunner(application_class=Orders, projection_class=Shipping) as runner:
        order_ids += [runner.app.order(f"product {number}") for number in range(20)]
        wait_until_shipped(runner.projection, order_ids)
        runner.wait(len(order_ids), timeout=30)
    orders.close()
