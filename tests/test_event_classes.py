"""The event classes of commands: written out or made of methods, and their versions."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from keiro.commands import event
from keiro.errors import (
    DecodeFailed,
    InvalidCall,
)
from keiro.events import StepRecorded
from keiro.mapper import EventMapper
from keiro.run import (
    WorkflowRun,
    fold,
    new_events,
)
from tests.aggregates import AT_MS, RUN, Basket, history, stored

# Event classes


def test_an_event_class_may_be_written_out() -> None:
    class Account(WorkflowRun, name="account"):
        def __init__(self) -> None:
            self.balance = Decimal(0)

        class Opened(WorkflowRun.Event):
            """An account was opened."""

            owner: str

            def apply(self, aggregate: Account) -> None:
                aggregate.owner = self.owner

        class Deposited(WorkflowRun.Event):
            amount: Decimal
            channel: str = "branch"

        class Withdrawn(WorkflowRun.Event):
            amount: Decimal

        def open(self, owner: str) -> None:
            self.trigger_event(self.Opened, owner=owner.title())

        @event(Deposited)
        def deposit(self, amount: Decimal) -> None:
            self.balance += amount

        @event("Withdrawn")
        def withdraw(self, amount: Decimal) -> None:
            self.balance -= amount

        async def execute(self) -> None: ...

    account = Account()

    account.open("ann")
    account.deposit(Decimal("5.50"))
    account.withdraw(Decimal("1.25"))

    events = account.collect_events()
    assert [EventMapper().encode(one) for one in events] == [
        ("account:Opened", '{"owner":"Ann"}'),
        ("account:Deposited", '{"amount":"5.50","channel":"branch"}'),
        ("account:Withdrawn", '{"amount":"1.25"}'),
    ]
    assert vars(account) == {"balance": Decimal("4.25"), "owner": "Ann"}
    assert account == fold(Account, stored(Account, *events))
    assert Account.Opened.__doc__ == "An account was opened."


def test_triggering_checks_the_event_and_its_fields() -> None:
    basket = Basket()

    with pytest.raises(InvalidCall, match="not an event of Basket"):
        basket.trigger_event(StepRecorded, step="a")
    with pytest.raises(InvalidCall, match="not an event of Basket"):
        basket.trigger_event(type("ItemAdded", (WorkflowRun.Event,), {}))
    with pytest.raises(InvalidCall, match=r"Basket\.ItemAdded: .*colour"):
        basket.trigger_event(Basket.ItemAdded, sku="a", colour="red")  # type: ignore[attr-defined]


def test_an_event_without_a_name_is_named_after_its_method() -> None:
    class Named(WorkflowRun, name="named"):
        @event
        def item_added(self, sku: str) -> None: ...

        async def execute(self) -> None: ...

    [added] = new_events(Named(), Named.item_added, ("a",), {})

    assert EventMapper().encode(added)[0] == "named:ItemAdded"


def test_applying_an_event_triggers_no_other() -> None:
    class Nested(WorkflowRun, name="nested"):
        def __init__(self) -> None:
            self.log: list[str] = []
            self.note("begun")

        @event("Noted")
        def note(self, text: str) -> None:
            self.log.append(text)

        @event("Closed")
        def close(self) -> None:
            self.note("closed")

        @event("Confused")
        def confuse(self) -> None:
            self.trigger_event(self.Noted, text="x")  # type: ignore[attr-defined]

        async def execute(self) -> None: ...

    run = Nested()
    run.close()

    assert [type(one).__name__ for one in run.pending_events] == ["Closed"]
    assert run.log == ["begun", "closed"]
    with pytest.raises(InvalidCall, match="every fold would record it anew"):
        run.confuse()


# Versions of events


class Order(WorkflowRun, name="order"):
    """Version 3 of an event: `article` became `sku`, then `quantity` came."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, int]] = []

    class Ordered(WorkflowRun.Event):
        class_version = 3

        sku: str
        quantity: int

        @staticmethod
        def upcast_v1_v2(state: dict[str, Any]) -> None:
            state["sku"] = state.pop("article")
            assert list(state) == ["sku"]

        @staticmethod
        def upcast_v2_v3(state: dict[str, Any]) -> None:
            state["quantity"] = 1

    @event(Ordered)
    def order(self, sku: str, quantity: int) -> None:
        self.lines.append((sku, quantity))

    async def execute(self) -> None: ...


@pytest.mark.parametrize(
    ("payload", "line"),
    [
        ('{"article":"a"}', ("a", 1)),
        ('{"class_version":1,"article":"a"}', ("a", 1)),
        ('{"class_version":2,"sku":"a"}', ("a", 1)),
        ('{"class_version":3,"sku":"a","quantity":5}', ("a", 5)),
        ('{"sku":"a","quantity":5,"class_version":3}', ("a", 5)),
    ],
)
def test_an_event_of_an_older_version_is_upcast(payload: str, line: tuple[str, int]) -> None:
    read = EventMapper().decode("order:Ordered", payload, "wf:order-7", 2, AT_MS)

    assert fold(Order, [*history(run_id="wf:order-7"), read]).lines == [line]


def test_the_version_of_an_event_class_is_stored_unless_it_is_the_first() -> None:
    [ordered] = new_events(Order(), Order.order, ("a", 2), {})

    assert EventMapper().encode(ordered)[1] == '{"class_version":3,"sku":"a","quantity":2}'


def test_an_event_without_fields_has_a_version_too() -> None:
    class Closing(WorkflowRun, name="closing"):
        class Closed(WorkflowRun.Event):
            class_version = 2

            @staticmethod
            def upcast_v1_v2(state: dict[str, Any]) -> None:
                del state["reason"]

        @event(Closed)
        def close(self) -> None:
            self.closed = True

        async def execute(self) -> None: ...

    events = new_events(Closing(), Closing.close, (), {})

    assert EventMapper().encode(events[0])[1] == '{"class_version":2}'
    assert fold(Closing, stored(Closing, *events)).closed


@pytest.mark.parametrize("topic", ["order:Ordered", "basket:ItemAdded"])
def test_an_event_of_a_newer_version_is_not_guessed_at(topic: str) -> None:
    """F51."""
    with pytest.raises(DecodeFailed, match="version 4 of its class"):
        EventMapper().decode(topic, '{"sku":"a","class_version":4,"quantity":1}', RUN, 2, AT_MS)


def test_a_value_that_mentions_a_class_version_is_just_a_value() -> None:
    class Loose(WorkflowRun, name="mentions"):
        @event("Noted")
        def note(self, thing: Any) -> None:
            self.thing = thing

        async def execute(self) -> None: ...

    for thing in ({"class_version": 9}, '"class_version"'):
        events = stored(Loose, *new_events(Loose(), Loose.note, (thing,), {}))
        assert fold(Loose, events).thing == thing


def test_an_upcast_that_fails_names_event_and_upcast() -> None:
    with pytest.raises(DecodeFailed, match=r"event 2 of wf:order-7 \(order:Ordered\).*upcast_v1_v2.*KeyError"):
        EventMapper().decode("order:Ordered", '{"other":1}', "wf:order-7", 2, AT_MS)


def test_the_event_class_of_a_base_may_be_refined() -> None:
    class Refined(Order, name="refined"):
        class Ordered(Order.Ordered):
            class_version = 4
            currency: str

            @staticmethod
            def upcast_v3_v4(state: dict[str, Any]) -> None:
                state["currency"] = "eur"

        @event(Ordered)
        def order(self, sku: str, quantity: int, currency: str = "usd") -> None:
            self.lines.append((sku + currency, quantity))

    run = Refined()
    run.order("a", 1)
    older = EventMapper().decode("refined:Ordered", '{"article":"b"}', "wf:refined-7", 3, AT_MS)

    folded = fold(Refined, [*history(*run.collect_events(), run_id="wf:refined-7"), older])

    assert folded.lines == [("ausd", 1), ("beur", 1)]
