"""Classes of workflows: their options, bases and mixins, redefinition, and what is refused."""

from __future__ import annotations

import abc
import asyncio
import dataclasses
import importlib
import sys
import textwrap
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import eventsourcing.domain
import msgspec
import pytest

from keiro import run as run_module
from keiro.commands import event
from keiro.definition import Workflow, workflow
from keiro.errors import (
    InvalidCall,
    InvalidName,
    KeiroError,
)
from keiro.events import OpaqueEvent, StepRecorded
from keiro.mapper import EventMapper
from keiro.retry import Retry
from keiro.run import (
    RESERVED,
    WorkflowRun,
    aggregate_of,
    fold,
    new_events,
    workflow_of,
)
from tests.aggregates import AT_MS, RUN, Basket, history, stored
from tests.conftest import spelled


class Line(msgspec.Struct, frozen=True):
    """A typed value of a command."""

    sku: str
    price: Decimal


# Classes


def test_a_class_is_a_workflow_with_its_options() -> None:
    retry = Retry(2)

    class Shipping(WorkflowRun, name="ship.it", retry=retry, version="v2"):
        """Ships."""

        async def execute(self, order: str, *, fast: bool = False) -> str:
            return f"{order} {fast} {len(vars(self))}"

    found = workflow_of(Shipping)

    assert (found.name, found.retry, found.version, found.aggregate) == ("ship.it", retry, "v2", Shipping)
    assert asyncio.run(found.body(Shipping(), "o-1", fast=True)) == "o-1 True 0"
    assert found.input.decode(found.input.encode(("o-1",), {})) == (("o-1",), {"fast": False})


def test_the_name_of_a_class_is_the_default() -> None:
    class Default(WorkflowRun):
        async def execute(self) -> None: ...

    class Derived(Default):
        pass

    assert [workflow_of(one).name for one in (Default, Derived)] == ["Default", "Derived"]


def test_workflow_of_takes_a_workflow_or_a_class() -> None:
    @workflow
    async def plain(run: WorkflowRun) -> None: ...

    assert workflow_of(plain) is plain
    assert isinstance(workflow_of(Basket), Workflow)


async def undecorated(run: WorkflowRun) -> None: ...


@pytest.mark.parametrize("given", [undecorated, WorkflowRun, Basket(), "basket", None, Line], ids=spelled)
def test_workflow_of_says_what_to_pass(given: object) -> None:
    with pytest.raises(InvalidCall, match=r"pass a (function decorated|subclass)"):
        workflow_of(given)


def test_the_aggregate_of_a_body_is_new_and_of_the_workflows_class() -> None:
    from keiro.rows import Run

    row = Run(
        run_id="wf:basket-7",
        workflow="basket",
        key="7",
        status="pending",
        lineage_id="",
        input_json="{}",
        created_at_ms=5,
    )

    @workflow
    async def plain(run: WorkflowRun) -> None: ...

    basket, run = aggregate_of(workflow_of(Basket), row), aggregate_of(plain, row)

    assert (type(basket), vars(basket), basket.id, basket.version) == (Basket, {"items": []}, RUN, 1)
    assert (type(run), vars(run)) == (WorkflowRun, {})
    assert basket.created_on == datetime(1970, 1, 1, 0, 0, 0, 5000, tzinfo=UTC)


class Greeting:
    """A mixin that knows nothing of keiro but the decorator."""

    greetings: tuple[str, ...] = ()

    @event("Greeted")
    def greet(self, name: str) -> None:
        self.greetings = (*self.greetings, name)

    def greet_all(self, *names: str) -> None:
        for name in names:
            self.greet(name)


class Setup:
    """A mixin with an `__init__` for any place in the order of bases."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ready = True


class Mixed(Greeting, Setup, WorkflowRun, name="mixed"):
    """A workflow of mixins."""

    async def execute(self) -> None: ...


class Behind(WorkflowRun, Greeting, Setup, name="behind"):
    """The same the other way round."""

    async def execute(self) -> None: ...


@pytest.mark.parametrize("cls", [Mixed, Behind])
def test_commands_and_state_may_come_from_mixins(cls: type[Any]) -> None:
    run = cls()

    events = new_events(run, cls.greet_all, ("ann", "bob"), {})

    assert [EventMapper().encode(one)[0] for one in events] == [f"{workflow_of(cls).name}:Greeted"] * 2
    assert vars(run) == {"greetings": ("ann", "bob"), "ready": True}
    assert fold(cls, stored(cls, *events)) == run


class Gift(Basket, name="gift"):
    """A workflow derived from another, with a command of its own and one that it overrides."""

    def __init__(self) -> None:
        super().__init__()
        self.card = ""

    @event("CardWritten")
    def write(self, text: str) -> None:
        self.card = text

    @event("ItemAdded")
    def add(self, sku: str, quantity: int = 1, wrapped: bool = True) -> None:
        super().add(f"*{sku}" if wrapped else sku, quantity)


def test_a_subclass_inherits_commands_under_its_own_topics() -> None:
    gift = Gift()

    gift.write("hello")
    gift.add("a")
    gift.empty()
    gift.add("b", wrapped=False)

    events = gift.collect_events()
    assert [EventMapper().encode(one) for one in events] == [
        ("gift:CardWritten", '{"text":"hello"}'),
        ("gift:ItemAdded", '{"sku":"a","quantity":1,"wrapped":true}'),
        ("gift:Emptied", "{}"),
        ("gift:ItemAdded", '{"sku":"b","quantity":1,"wrapped":false}'),
    ]
    assert vars(gift) == {"items": ["b"], "card": "hello"}
    assert fold(Gift, stored(Gift, *events)) == gift
    assert issubclass(Gift.Emptied, Basket.Emptied)  # type: ignore[attr-defined]


def test_deriving_a_class_does_not_change_its_base() -> None:
    [added] = new_events(Basket(), Basket.add, ("a",), {})

    assert EventMapper().encode(added) == ("basket:ItemAdded", '{"sku":"a","quantity":1}')


def test_a_subclass_may_override_a_command_by_a_plain_method() -> None:
    class Polite(Basket, name="polite"):
        def add(self, sku: str, quantity: int = 1) -> None:
            if quantity > 5:
                raise ValueError("leave some")
            super().add(sku, quantity)

    run = Polite()

    with pytest.raises(ValueError, match="leave some"):
        new_events(run, Polite.add, ("a", 6), {})
    events = new_events(run, Polite.add, ("a", 2), {})

    assert run.items == ["a", "a"]
    assert fold(Polite, stored(Polite, *events)) == run


def test_an_abstract_body_makes_a_base_that_is_no_workflow() -> None:
    class Base(WorkflowRun, name="base"):
        @event("Noted")
        def note(self, text: str) -> None:
            self.text = text

        @abc.abstractmethod
        async def execute(self) -> None: ...

    class Concrete(Base, name="concrete"):
        async def execute(self) -> None: ...

    with pytest.raises(InvalidCall, match="pass a subclass of it that defines execute"):
        workflow_of(Base)
    run = Concrete()
    run.note("x")
    assert EventMapper().encode(run.pending_events[0])[0] == "concrete:Noted"
    with pytest.raises(TypeError, match="abstract"):
        Base()


def test_a_class_may_be_defined_again_as_in_a_notebook() -> None:
    def define(factor: int) -> type[Any]:
        space: dict[str, Any] = {
            "__name__": "__main__",
            "WorkflowRun": WorkflowRun,
            "event": event,
            "factor": factor,
        }
        exec(
            textwrap.dedent("""
                class Cell(WorkflowRun, name="cell"):
                    def __init__(self):
                        self.total = 0

                    @event("Counted")
                    def count(self, by: int):
                        self.total += by * factor

                    async def execute(self) -> int:
                        return self.total
            """),
            space,
        )
        cell: type[Any] = space["Cell"]
        return cell

    first, second = define(1), define(10)
    events = [EventMapper().decode("cell:Counted", '{"by":2}', "wf:cell-7", 2, AT_MS)]

    assert fold(second, [*history(run_id="wf:cell-7"), *events]).total == 20
    assert EventMapper([workflow_of(first)]).aggregate("cell") is first
    assert EventMapper().aggregate("cell") is second


@pytest.fixture
def module_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "reloaded_workflows.py"
    sys.modules.pop("reloaded_workflows", None)


def test_a_module_with_workflows_may_be_reloaded(module_path: Path) -> None:
    module_path.write_text(
        textwrap.dedent("""
            from keiro.commands import event
            from keiro.run import WorkflowRun

            class Reloaded(WorkflowRun, name="reloaded"):
                class Noted(WorkflowRun.Event):
                    text: str

                @event(Noted)
                def note(self, text: str) -> None:
                    self.text = text

                async def execute(self) -> None: ...
        """)
    )
    module = importlib.import_module("reloaded_workflows")
    before = module.Reloaded

    after = importlib.reload(module).Reloaded

    assert after is not before
    for cls in (before, after):
        assert fold(cls, stored(cls, *new_events(cls(), cls.note, ("x",), {}))).text == "x"


def test_the_mapper_of_an_engine_prefers_the_engines_own_workflows() -> None:
    @workflow(name="basket")
    async def plain(run: WorkflowRun) -> None: ...

    read = EventMapper([plain]).decode("basket:ItemAdded", '{"sku":"a"}', RUN, 2, AT_MS)

    assert isinstance(read, OpaqueEvent)


# Refusals


def body(**names: Any) -> dict[str, Any]:
    async def execute(self: Any) -> None: ...

    return {"execute": execute, **names}


def define(names: dict[str, Any], *bases: type, **options: Any) -> type[Any]:
    return run_module.RunType("Refused", (*bases, WorkflowRun), {"__module__": __name__, **names}, **options)


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_names_of_workflow_run_cannot_be_taken_by_a_class(name: str) -> None:
    with pytest.raises(InvalidCall, match=rf"Refused defines {name}, which keiro\.WorkflowRun has"):
        define(body(**{name: lambda self: None}))
    with pytest.raises(InvalidCall, match=rf"Refused defines {name}, which"):
        define(body(__annotations__={name: "int"}))
    with pytest.raises(InvalidCall, match=rf"Mixin defines {name}, which"):
        define(body(), type("Mixin", (), {name: 1}))


def test_what_a_body_calls_is_reserved() -> None:
    assert {"step", "scope", "map", "apply", "now", "random", "uuid4", "info"} <= RESERVED
    assert {"id", "run_id", "key", "workflow", "round", "version", "Event", "pending_events"} <= RESERVED


def test_names_of_workflow_run_cannot_be_taken_by_an_instance() -> None:
    class Hiding(WorkflowRun, name="hiding"):
        def __init__(self) -> None:
            self.step = 1  # type: ignore[assignment, method-assign]

        async def execute(self) -> None: ...

    with pytest.raises(InvalidCall, match=r"__init__ sets step, which keiro\.WorkflowRun has"):
        Hiding()


def test_what_a_run_is_cannot_be_assigned() -> None:
    for name in ("id", "version", "created_on", "modified_on", "key"):
        with pytest.raises(AttributeError):
            setattr(Basket(), name, 1)


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ({}, "needs `async def execute"),
        ({"execute": lambda self: None}, "needs `async def execute"),
        ({"execute": 1}, "needs `async def execute"),
        (body(__init__=lambda self, customer: None), "__init__ takes customer"),
        (body(__init__=lambda self, customer=None: None), "__init__ takes customer"),
        (body(__init__=lambda self, *, a, b: None), "__init__ takes a, b"),
        (body(__init__=undecorated), "__init__ must be a plain method"),
        (body(__annotations__={"owner": "str"}), r"Refused\.owner has no default"),
        (body(__annotations__={"owner": str}, owner=dataclasses.field()), r"Refused\.owner has no default"),
        (body(__slots__=("owner",)), "has __slots__"),
        (body(items=[]), r"Refused\.items is a list that all runs would share"),
        (body(items={}), "is a dict that all runs"),
        (body(items=set()), "is a set that all runs"),
        (body(_keiro_id="x"), "defines _keiro_id"),
        (body(ItemAdded=1, add=event("ItemAdded")(lambda self: None)), r"ItemAdded exists and is no event"),
    ],
)
def test_a_class_that_would_not_work_is_refused(names: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidCall, match=problem) as caught:
        define(names)

    assert isinstance(caught.value, KeiroError)
    assert isinstance(caught.value, TypeError)


def test_a_mixin_with_arguments_or_bare_annotations_is_refused() -> None:
    @dataclasses.dataclass
    class Data:
        owner: str

    class Bare:
        owner: str

    with pytest.raises(InvalidCall, match="__init__ takes owner"):
        define(body(), Data)
    with pytest.raises(InvalidCall, match=r"Bare\.owner has no default"):
        define(body(), Bare)


@pytest.mark.parametrize("name", ["", "has space", "a:b", "x" * 129])
def test_a_name_that_cannot_name_a_workflow_is_refused(name: str) -> None:
    with pytest.raises(InvalidName):
        define(body(), name=name)


def test_unknown_class_arguments_are_refused() -> None:
    with pytest.raises(InvalidCall, match="has the arguments colour"):
        define(body(), colour="red")


def sync(self: Any) -> None: ...


async def asynchronous(self: Any) -> None: ...


async def asynchronous_generator(self: Any) -> Any:
    yield


def generator(self: Any) -> Any:
    yield


@pytest.mark.parametrize(
    ("spec", "method", "problem"),
    [
        ("Added", asynchronous, "neither async nor a generator"),
        ("Added", asynchronous_generator, "neither async nor a generator"),
        ("Added", generator, "neither async nor a generator"),
        ("Added", lambda self, *skus: None, r"no \*skus: name each"),
        ("Added", lambda self, **skus: None, r"no \*\*skus: name each"),
        ("Added", lambda: None, "takes `self` first"),
        ("Added", WorkflowRun.__init__, "not <slot wrapper"),
        ("Added", property(sync), "decorates a method, not <property"),
        ("Added", staticmethod(sync), "decorates a method, not <staticmethod"),
        ("Added", 5, "decorates a method, not 5"),
        ("", sync, "cannot name an event"),
        ("item added", sync, "cannot name an event"),
        ("_Added", sync, "cannot name an event"),
        ("Added", Setup.__init__, "leave __init__ undecorated"),
    ],
)
def test_an_event_method_that_would_not_work_is_refused(spec: str, method: Any, problem: str) -> None:
    with pytest.raises(InvalidCall, match=problem):
        event(spec)(method)


@pytest.mark.parametrize("spec", [5, None, StepRecorded, Basket, property(sync)], ids=spelled)
def test_the_decorator_says_what_it_takes(spec: Any) -> None:
    with pytest.raises(InvalidCall, match=r"@keiro\.event takes"):
        event(spec)


@pytest.mark.parametrize("name", ["timestamp", "originator_id", "originator_version", "apply", "class_version"])
def test_a_parameter_cannot_have_a_name_of_every_event(name: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"def add(self, {name}): ...", scope)

    with pytest.raises(InvalidCall, match=f"{name!r} is a name every event has already"):
        define(body(add=event("Added")(scope["add"])))


@pytest.mark.parametrize("name", ["Event", "Snapshot", "step"])
def test_an_event_cannot_have_a_name_of_workflow_run(name: str) -> None:
    with pytest.raises(InvalidCall, match=rf"Refused\.{name} exists and is no event"):
        define(body(add=event(name)(sync)))


def test_two_methods_cannot_record_one_event() -> None:
    def other(self: Any) -> None: ...

    with pytest.raises(InvalidCall, match=r"sync and .*other both record Added"):
        define(body(sync=event("Added")(sync), other=event("Added")(other)))
    with pytest.raises(InvalidCall, match=r"Basket\.add and .*other both record ItemAdded"):
        define(body(other=event("ItemAdded")(other)), Basket)


def test_the_librarys_own_decorator_is_refused() -> None:
    def add(self: Any, sku: str) -> None: ...

    with pytest.raises(InvalidCall, match=r"with @keiro\.event"):
        define(body(add=eventsourcing.domain.event("ItemAdded")(add)))


class Versioned(WorkflowRun.Event):
    """Claims a version that cannot be reached."""

    class_version = 3
    sku: str

    @staticmethod
    def upcast_v1_v2(state: dict[str, Any]) -> None: ...


class Zero(WorkflowRun.Event):
    """Has no valid version."""

    class_version = 0


class Applied(WorkflowRun.Event):
    """Applies itself."""

    sku: str

    def apply(self, aggregate: Any) -> None: ...


class Fielded(WorkflowRun.Event):
    """Needs two fields."""

    sku: str
    quantity: int


class Stamped(WorkflowRun.Event):
    """Has a field that a method hides."""

    create_timestamp: int  # type: ignore[assignment]


class Dangling(WorkflowRun.Event):
    """Names a class that is nowhere."""

    line: Nowhere  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (Versioned, "no static method upcast_v2_v3"),
        (Zero, "class_version is a whole number from 1, not 0"),
        (Applied, "has a method `apply` and .*add applies it too"),
        (Fielded, r"has the fields \(sku, quantity\), .*add takes \(sku\)"),
        (Basket.ItemAdded, None),  # type: ignore[attr-defined]
        (Stamped, "create_timestamp.* every event has already"),
        (Dangling, "Nowhere"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_an_event_class_that_would_not_work_is_refused(given: type[Any], problem: str | None) -> None:
    def add(self: Any, sku: str) -> None: ...

    names = body(add=event(given)(add))
    if problem is None:
        assert define(names).ItemAdded.TOPIC == "Refused:ItemAdded"
        return
    with pytest.raises(InvalidCall, match=problem):
        define(names)


def test_a_method_cannot_take_what_its_event_class_does_not_have() -> None:
    def add(self: Any, sku: str, quantity: int, colour: str) -> None: ...

    with pytest.raises(InvalidCall, match=r"add takes \(sku, quantity, colour\)"):
        define(body(add=event(Fielded)(add)))


def test_calls_of_a_body_are_refused_without_one() -> None:
    basket = fold(Basket, history())

    for call in (
        lambda: basket.step(len, "x"),
        lambda: basket.scope("a"),
        lambda: basket.map(len, ["x"]),
        lambda: basket.apply(Basket.add, "x"),
        basket.now,
        basket.random,
        basket.uuid4,
        lambda: basket.info,
    ):
        with pytest.raises(InvalidCall, match=r"works only inside a running body.*engine\.command"):
            call()
