"""Runs as aggregates: commands, their arguments, the fold and the state. No engine anywhere."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, ClassVar, Final
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from keiro.commands import event
from keiro.definition import step
from keiro.errors import (
    DecodeFailed,
    InvalidCall,
    NonDeterminism,
    PayloadRejected,
    StoreError,
)
from keiro.events import Event, OpaqueEvent, StepRecorded, WorkflowCompleted, placed
from keiro.mapper import EventMapper
from keiro.run import (
    WorkflowRun,
    advance,
    apply_event,
    blank_aggregate,
    fold,
    new_events,
    workflow_of,
)
from tests.aggregates import AT_MS, RUN, Basket, history, started, stored
from tests.conftest import spelled


class Line(msgspec.Struct, frozen=True):
    """A typed value of a command."""

    sku: str
    price: Decimal


# Commands


def test_a_command_changes_state_and_is_pending_as_an_event() -> None:
    basket = Basket()

    basket.add("sku-1")
    basket.add("sku-2", quantity=2)

    assert basket.items == ["sku-1", "sku-2", "sku-2"]
    assert basket.version == 2
    [first, second] = basket.collect_events()
    assert (first.sku, first.quantity, first.originator_version) == ("sku-1", 1, 1)
    assert (second.sku, second.quantity, second.originator_version) == ("sku-2", 2, 2)
    assert type(first) is Basket.ItemAdded  # type: ignore[attr-defined]
    assert basket.collect_events() == []


def test_the_event_of_a_command_has_its_workflow_in_the_topic_and_its_arguments_as_json() -> None:
    [added] = new_events(Basket(), Basket.add, ("sku-1",), {})

    assert EventMapper().encode(added) == ("basket:ItemAdded", '{"sku":"sku-1","quantity":1}')


def test_a_command_on_a_folded_instance_goes_on_at_the_version_of_the_journal() -> None:
    basket = fold(Basket, history(StepRecorded(step="a", result=Raw(b"1"))))

    basket.add("sku-1")

    [added] = basket.pending_events
    assert (added.originator_id, added.originator_version) == (RUN, 3)
    assert basket.version == 3
    assert basket.modified_on == added.timestamp > basket.created_on


def test_new_events_returns_what_a_command_triggers_without_columns() -> None:
    basket = fold(Basket, history())

    events = new_events(basket, Basket.replace_all, (["a", "b"],), {})

    assert [type(one).__name__ for one in events] == ["Emptied", "ItemAdded", "ItemAdded"]
    assert [one.originator_version for one in events] == [0, 0, 0]
    assert basket.pending_events == []


@pytest.mark.parametrize(
    "method", [Basket.replace_all, lambda basket: basket.replace_all], ids=["of the class", "of the instance"]
)
def test_a_command_may_be_given_as_a_method_of_the_class_or_of_an_instance(method: Any) -> None:
    basket = Basket()
    if method is not Basket.replace_all:
        method = method(basket)

    assert len(new_events(basket, method, (["a"],), {})) == 2


def test_a_command_that_raises_is_rejected_and_leaves_nothing_pending() -> None:
    basket = fold(Basket, history())
    basket.add("kept")

    with pytest.raises(ValueError, match="at least one"):
        new_events(basket, Basket.replace_all, ([],), {})

    assert [one.sku for one in basket.collect_events()] == ["kept"]


def test_a_command_that_raises_after_an_event_leaves_nothing_pending() -> None:
    class Careful(WorkflowRun, name="careful"):
        def __init__(self) -> None:
            self.total = 0

        @event("Paid")
        def pay(self, amount: int) -> None:
            if self.total + amount > 10:
                raise ValueError("too much")
            self.total += amount

        def pay_twice(self, amount: int) -> None:
            self.pay(amount)
            self.pay(amount)

        async def execute(self) -> None: ...

    run = Careful()

    with pytest.raises(ValueError, match="too much"):
        new_events(run, Careful.pay_twice, (6,), {})

    assert run.pending_events == []


def test_a_command_without_an_event_records_nothing() -> None:
    class Quiet(WorkflowRun, name="quiet"):
        def look(self) -> str:
            return "nothing"

        async def execute(self) -> None: ...

    assert new_events(Quiet(), Quiet.look, (), {}) == []


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), (("a", 1, 2), {}), (("a",), {"sku": "b"}), (("a",), {"colour": "red"})]
)
@pytest.mark.parametrize("method", ["add", "replace_all"])
def test_arguments_a_command_does_not_take_are_an_invalid_call(
    method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    with pytest.raises(InvalidCall, match=rf"Basket\.{method}\("):
        new_events(Basket(), getattr(Basket, method), args, kwargs)


class Unrelated(WorkflowRun, name="unrelated"):
    """Has a method of the same name."""

    @event("ItemAdded")
    def add(self, sku: str) -> None: ...

    async def execute(self) -> None: ...


@pytest.mark.parametrize(
    "method",
    [
        Unrelated.add,
        Basket.execute,
        Basket.step,
        Basket.collect_events,
        Basket.__init__,
        Basket.id,
        Basket,
        len,
        "add",
        None,
        lambda self: None,
    ],
    ids=spelled,
)
def test_what_is_no_command_of_the_class_is_refused(method: Any) -> None:
    with pytest.raises(InvalidCall, match=r"Basket"):
        new_events(Basket(), method, (), {})


def test_a_step_or_another_callable_of_the_class_is_no_command() -> None:
    class Stepping(WorkflowRun, name="stepping"):
        charge = step(name="charge")(lambda self: None)
        size = functools.partial(len)

        async def execute(self) -> None: ...

    for method in (Stepping.charge, Stepping.size):
        with pytest.raises(InvalidCall, match="is not a command of"):
            new_events(Stepping(), method, (), {})


def test_a_decorated_method_refuses_an_instance_of_another_class() -> None:
    with pytest.raises(InvalidCall, match="not a command of Basket"):
        Unrelated.add(Basket(), "x")  # type: ignore[arg-type]
    with pytest.raises(InvalidCall, match=r"is a command of a keiro\.WorkflowRun"):
        Basket.add(object(), "x")  # type: ignore[arg-type]


def test_calling_the_class_takes_no_arguments() -> None:
    with pytest.raises(InvalidCall, match="takes no arguments"):
        Basket("customer")


# Arguments


class Typed(WorkflowRun, name="typed"):
    """A command with a parameter of each kind."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @event("Noted")
    def note(
        self,
        ident: UUID,
        at: datetime,
        /,
        line: Line,
        *,
        prices: dict[str, Decimal],
        tags: frozenset[str] = frozenset({"new"}),
        wait: timedelta | None = None,
        plain=0,  # type: ignore[no-untyped-def]
    ) -> None:
        self.seen.append((ident, at, line, prices, tags, wait, plain))

    async def execute(self) -> None: ...


def test_arguments_come_back_as_annotated() -> None:
    ident, at = UUID(int=7), datetime(2024, 2, 29, 12, tzinfo=UTC)
    line, prices = Line("a", Decimal("1.10")), {"eu": Decimal("2.50")}
    events = new_events(
        Typed(),
        Typed.note,
        (ident, at, line),
        {"prices": prices, "wait": timedelta(seconds=1), "plain": [1, "x"]},
    )

    run = fold(Typed, stored(Typed, *events))

    assert run.seen == [(ident, at, line, prices, frozenset({"new"}), timedelta(seconds=1), [1, "x"])]
    assert isinstance(run.seen[0][2], Line)


def test_a_class_that_is_defined_in_a_function_or_in_the_workflow_is_found_for_annotations() -> None:
    class Local(msgspec.Struct):
        x: int

    class Nesting(WorkflowRun, name="nesting"):
        class Inner(msgspec.Struct):
            y: int

        def __init__(self) -> None:
            self.seen: list[Any] = []

        @event("Noted")
        def note(self, local: Local, inner: Inner) -> None:
            self.seen = [local, inner]

        async def execute(self) -> None: ...

    events = new_events(Nesting(), Nesting.note, (Local(1), Nesting.Inner(2)), {})

    assert fold(Nesting, stored(Nesting, *events)).seen == [Local(1), Nesting.Inner(2)]


def test_an_annotation_nobody_can_resolve_is_plain_data_and_says_so() -> None:
    class Vague(WorkflowRun, name="vague"):
        @event("Noted")
        def note(self, thing: Nowhere) -> None:  # type: ignore[name-defined]  # noqa: F821
            self.seen = thing

        async def execute(self) -> None: ...

    with pytest.warns(UserWarning, match="annotation Nowhere of 'thing' cannot be resolved"):
        events = new_events(Vague(), Vague.note, ({"a": 1},), {})

    assert fold(Vague, stored(Vague, *events)).seen == {"a": 1}


def test_state_is_made_of_what_will_be_read_back_on_the_first_run_too() -> None:
    class Loose(WorkflowRun, name="loose"):
        @event("Noted")
        def note(self, thing: Any) -> None:
            self.thing = thing

        async def execute(self) -> None: ...

    run = Loose()
    run.note((1, 2))

    assert run.thing == [1, 2]
    assert run == fold(Loose, stored(Loose, *run.collect_events()))


@pytest.mark.parametrize("value", [3, None, ["a"]])
def test_a_value_that_would_not_be_read_back_rejects_the_command(value: Any) -> None:
    basket = Basket()

    with pytest.raises(PayloadRejected, match="sku does not fit its annotation") as caught:
        basket.add(value)

    assert (caught.value.where, caught.value.path) == ("event basket:ItemAdded", "$.sku")
    assert (basket.items, basket.pending_events, basket.version) == ([], [], 0)


@pytest.mark.parametrize("value", [float("nan"), object(), "a\0b", "\ud800", {(1, 2): 3}], ids=spelled)
def test_a_value_that_cannot_be_stored_rejects_the_command(value: Any) -> None:
    class Anything(WorkflowRun, name="anything"):
        @event("Noted")
        def note(self, value: Any) -> None:
            raise AssertionError("applied")

        async def execute(self) -> None: ...

    with pytest.raises(PayloadRejected, match="anything:Noted"):
        Anything().note(value)


def test_a_default_is_stored_so_that_the_past_does_not_change_with_it() -> None:
    def define(default: int) -> type[Any]:
        class Counter(WorkflowRun, name="counter"):
            def __init__(self) -> None:
                self.total = 0

            @event("Counted")
            def count(self, by: int = default) -> None:
                self.total += by

            async def execute(self) -> None: ...

        return Counter

    before, after = define(1), define(100)
    mapper = EventMapper([workflow_of(before)])
    [counted] = new_events(before(), before.count, (), {})
    topic, payload = mapper.encode(counted)

    later = EventMapper([workflow_of(after)]).decode(topic, payload, "wf:counter-7", 2, AT_MS)

    assert payload == '{"by":1}'
    assert fold(after, [*history(run_id="wf:counter-7"), later]).total == 1


def test_a_parameter_added_with_a_default_reads_older_events() -> None:
    older = EventMapper().decode("basket:ItemAdded", '{"sku":"a"}', RUN, 2, AT_MS)

    assert fold(Basket, [*history(), older]).items == ["a"]


def test_an_event_is_not_changed_by_what_later_events_do_to_the_state() -> None:
    class Aliased(WorkflowRun, name="aliased"):
        def __init__(self) -> None:
            self.items: list[str] = []

        @event("Replaced")
        def replace(self, items: list[str], *, more: list[str]) -> None:
            self.items = items
            self.more = more

        @event("Added")
        def add(self, item: str) -> None:
            self.items.append(item)
            self.more.append(item)

        def both(self) -> None:
            self.replace(["a"], more=[])
            self.add("b")

        async def execute(self) -> None: ...

    events = history(*new_events(Aliased(), Aliased.both, (), {}), run_id="wf:aliased-7")

    assert (events[1].items, events[1].more) == (["a"], [])  # type: ignore[attr-defined]
    assert fold(Aliased, events) == fold(Aliased, events)
    assert fold(Aliased, events).items == ["a", "b"]


# Fold


def test_a_fold_is_the_state_after_all_events_whatever_lies_between() -> None:
    step = StepRecorded(step="charge", result=Raw(b"1"))
    add = Basket.ItemAdded  # type: ignore[attr-defined]
    events = history(add(sku="a"), step, add(sku="b"), WorkflowCompleted(result=Raw(b"2")))

    basket = fold(Basket, events)

    assert basket.items == ["a", "b"]
    assert (basket.id, basket.run_id, basket.key, basket.workflow, basket.round) == (
        RUN,
        RUN,
        "7",
        "basket",
        0,
    )
    assert basket.version == 5
    assert (basket.created_on, basket.modified_on) == (events[0].timestamp, events[-1].timestamp)
    assert basket.pending_events == []


def test_later_rounds_have_their_own_id() -> None:
    [first] = [placed(started(round=2, lineage=RUN), f"{RUN}#2", 1, AT_MS)]

    basket = fold(Basket, [first])

    assert (basket.id, basket.key, basket.round) == (f"{RUN}#2", "7", 2)


@given(
    st.lists(
        st.one_of(
            st.builds(lambda sku, n: ("add", (sku, n)), st.text("abc", max_size=2), st.integers(0, 3)),
            st.just(("empty", ())),
            st.builds(lambda skus: ("replace_all", (skus,)), st.lists(st.text("abc"), min_size=1, max_size=3)),
        ),
        max_size=12,
    )
)
def test_the_fold_of_the_stored_events_equals_the_instance_that_took_the_commands(
    commands: list[tuple[str, tuple[Any, ...]]],
) -> None:
    lived = Basket()
    events: list[Event] = []
    for method, args in commands:
        events += new_events(lived, getattr(Basket, method), args, {})

    folded = fold(Basket, stored(Basket, *events))

    assert folded == lived
    for length in range(len(events) + 1):
        prefix = stored(Basket, *events[:length])
        assert advance(fold(Basket, prefix), stored(Basket, *events)[length + 1 :]) == folded


@pytest.mark.parametrize(
    "broken",
    [
        lambda events: events[:1] + events[2:],
        lambda events: events[:2] + events[3:],
        lambda events: [events[0], events[2], events[1], *events[3:]],
        lambda events: [*events[:2], events[1], *events[2:]],
        lambda events: [*events[:3], placed(events[3], "wf:basket-8", 4, AT_MS)],
        lambda events: [*events, events[0]],
        lambda events: events[1:],
        lambda events: [placed(events[0], RUN, 2, AT_MS)],
        lambda events: [],
    ],
    ids=[
        "second lost",
        "third lost",
        "swapped",
        "twice",
        "of another run",
        "start twice",
        "no start",
        "start is no first event",
        "empty",
    ],
)
def test_an_incomplete_history_is_not_folded(broken: Callable[[list[Event]], list[Event]]) -> None:
    """F50."""
    add = Basket.ItemAdded  # type: ignore[attr-defined]
    events = history(add(sku="a"), StepRecorded(step="s", result=Raw(b"1")), add(sku="b"))

    with pytest.raises(StoreError, match=r"nothing is folded"):
        fold(Basket, broken(events))


def test_events_mutate_an_aggregate_as_the_library_does_it() -> None:
    first, second = history(Basket.ItemAdded(sku="a"))  # type: ignore[attr-defined]

    basket = second.mutate(first.mutate(None))

    assert type(basket) is Basket
    assert basket.items == ["a"]
    with pytest.raises(StoreError):
        second.mutate(basket)
    with pytest.raises(StoreError):
        second.mutate(None)


def test_a_recorded_event_its_method_refuses_is_a_contradiction_with_its_cause() -> None:
    class Strict(WorkflowRun, name="strict"):
        @event("Noted")
        def note(self, n: int) -> None:
            raise ValueError("no longer allowed")

        async def execute(self) -> None: ...

    events = history(Strict.Noted(n=1), run_id="wf:strict-7")  # type: ignore[attr-defined]

    with pytest.raises(NonDeterminism, match=r"event 2 of wf:strict-7, .*Strict\.Noted") as caught:
        fold(Strict, events)
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(NonDeterminism):
        apply_event(blank_aggregate(started("strict"), Strict), events[1])


def test_a_process_without_the_class_folds_versions_and_times() -> None:
    mapper = EventMapper()
    events = history(run_id="wf:elsewhere-7")
    events += [mapper.decode("elsewhere:Moved", '{"to":"x"}', "wf:elsewhere-7", 2, AT_MS + 9)]

    run = fold(WorkflowRun, events)

    assert isinstance(events[1], OpaqueEvent)
    assert (type(run), run.version, vars(run)) == (WorkflowRun, 2, {})
    assert run.modified_on == events[1].timestamp


def test_an_event_the_class_no_longer_has_is_not_passed_over() -> None:
    gone = EventMapper().decode("basket:ItemLost", '{"sku":"x"}', RUN, 2, AT_MS)

    assert isinstance(gone, OpaqueEvent)
    with pytest.raises(DecodeFailed, match=r"event 2 of wf:basket-7 is ItemLost, which the class Basket does"):
        fold(Basket, [*history(), gone])


def test_a_body_may_be_given_only_the_events_that_concern_it_but_never_one_twice() -> None:
    basket = blank_aggregate(started())
    one, two = (placed(Basket.ItemAdded(sku=sku), RUN, n, AT_MS) for sku, n in (("a", 4), ("b", 9)))  # type: ignore[attr-defined]

    apply_event(basket, one)
    apply_event(basket, two)

    assert (vars(basket), basket.version) == ({"items": ["a", "b"]}, 9)
    for delivered in (one, two):
        with pytest.raises(StoreError, match="was delivered after event 9"):
            apply_event(basket, delivered)


# State


def test_the_aggregate_holds_the_users_state_only() -> None:
    basket = fold(Basket, history(Basket.ItemAdded(sku="a")))  # type: ignore[attr-defined]

    assert vars(basket) == {"items": ["a"]}
    assert not hasattr(basket, "_keiro_driver")


def test_aggregates_are_equal_when_their_classes_and_states_are() -> None:
    add = Basket.ItemAdded  # type: ignore[attr-defined]
    one = fold(Basket, history(add(sku="a")))
    later = fold(Basket, history(StepRecorded(step="s", result=Raw(b"1")), add(sku="a")))
    bare = Basket()
    bare.add("a")

    assert one == later == bare
    assert one != fold(Basket, history())
    assert Basket() != type("Other", (Basket,), {})()
    assert Basket() != 5
    assert fold(WorkflowRun, history()) == WorkflowRun()


def test_an_aggregate_has_no_hash_because_it_changes() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(Basket())


def test_the_representation_shows_id_version_and_state() -> None:
    assert repr(fold(Basket, history())) == "Basket(id='wf:basket-7', version=1, items=[])"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda run: pickle.loads(pickle.dumps(run))], ids=["deep", "pickle"])
def test_a_copy_is_the_same_run_with_a_state_of_its_own(copied: Callable[[Basket], Basket]) -> None:
    basket = fold(Basket, history(Basket.ItemAdded(sku="a")))  # type: ignore[attr-defined]
    basket.add("b")

    twin = copied(basket)
    twin.add("c")

    assert (twin.id, twin.version, twin.items) == (RUN, 4, ["a", "b", "c"])
    assert (twin.created_on, len(twin.pending_events)) == (basket.created_on, 2)
    assert (basket.version, basket.items, len(basket.pending_events)) == (3, ["a", "b"], 1)


def test_a_shallow_copy_collects_its_own_events() -> None:
    basket = Basket()
    basket.add("a")

    twin = copy.copy(basket)
    twin.add("b")

    assert (len(basket.pending_events), len(twin.pending_events)) == (1, 2)


def test_users_may_name_their_own_fields_like_the_librarys_private_ones() -> None:
    class Private(WorkflowRun, name="private"):
        def __init__(self) -> None:
            self._id = "mine"
            self._version = 99
            self._driver = "taxi"
            self._pending_events = ()

        async def execute(self) -> None: ...

    run = fold(Private, history(run_id="wf:private-7"))

    assert (run.id, run.version, run.pending_events) == ("wf:private-7", 1, [])
    assert vars(run) == {"_id": "mine", "_version": 99, "_driver": "taxi", "_pending_events": ()}


def test_fields_declared_in_the_class_belong_to_each_run() -> None:
    class Declared(WorkflowRun, name="declared"):
        limit: ClassVar[int] = 10
        unit: Final = "kg"
        STATES = ("a", "b")
        KINDS = ["x"]  # noqa: RUF012
        total: Decimal = Decimal(0)
        items: list[str] = []  # noqa: RUF012
        marks: dict[str, int] = dataclasses.field(default_factory=lambda: {"a": 1})
        note: str = dataclasses.field(default="none")

        @event("ItemAdded")
        def add(self, sku: str) -> None:
            self.items.append(sku)
            self.marks[sku] = 1

        async def execute(self) -> None: ...

    one, other = Declared(), Declared()
    one.add("x")

    assert vars(one) == {"total": Decimal(0), "items": ["x"], "marks": {"a": 1, "x": 1}, "note": "none"}
    assert vars(other) == {"total": Decimal(0), "items": [], "marks": {"a": 1}, "note": "none"}
