"""`WorkflowRun`: a run as an event-sourced aggregate, and the pure fold of its events.

The aggregate holds the user's state and nothing else in `__dict__`: what a run is (id, version, times), its
pending events and the link to a driver are slots, so comparing, copying and snapshots never see the engine.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from keiro.classes import check_class, fields_of, taken
from keiro.commands import (
    Commands,
    EventMethod,
    UserEvent,
    aggregates,
    bind_call,
    command_of,
    define_commands,
    reader,
)
from keiro.definition import Workflow
from keiro.errors import DecodeFailed, InvalidCall, KeiroError, NonDeterminism, PayloadRejected, StoreError
from keiro.events import Event, WorkflowStarted, blank, ms_of, placed, time_of
from keiro.identity import check_workflow_name, run_id
from keiro.library import BaseAggregate, MetaAggregate
from keiro.mapper import decode_user, encode_user
from keiro.retry import Retry
from keiro.rows import Run
from keiro.scope import Driver as Driver
from keiro.scope import Scope
from keiro.scope import ScopedRun as ScopedRun
from keiro.snapshots import RunSnapshot

A = TypeVar("A", bound="WorkflowRun")


class RunType(MetaAggregate[Any]):
    """The class of aggregate classes. Calling one makes an instance that has no journal, for unit tests."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            raise InvalidCall(f"{cls.__qualname__}() takes no arguments: `execute` and the commands of a run have them")
        run = _bare(cast("type[WorkflowRun]", cls), "", 0, datetime.now(UTC))
        _initialise(run)
        return run


class WorkflowRun(Scope, BaseAggregate[str], metaclass=RunType):  # type: ignore[override]
    """A run: what a body may call, and, in a subclass, the state its commands change.

    A subclass has `async def execute(self, ...)` as its body, `@keiro.event` methods as its commands, and may
    have an `__init__` without parameters that sets the state of a new run. Class arguments: `name` (default:
    the class's name), `retry`, `version`, `patches`, `queue`, `cleanup` and `grace`, as for `@keiro.workflow`. A class
    whose `execute` is an abstract method is a base for others.

    Plain `Basket()` makes an instance without a journal: commands can be called on it, `collect_events()` has
    what they triggered. The same goes for an instance from `engine.repository`.
    """

    __slots__ = (
        "_keiro_applying",
        "_keiro_created_on",
        "_keiro_driver",
        "_keiro_id",
        "_keiro_modified_on",
        "_keiro_pending",
        "_keiro_step",
        "_keiro_version",
    )
    if TYPE_CHECKING:  # not at run time: the library makes a dataclass of an aggregate class with annotations
        _keiro_applying: bool
        _keiro_created_on: datetime
        _keiro_id: str
        _keiro_modified_on: datetime
        _keiro_pending: list[UserEvent]
        _keiro_version: int

    _keiro_prefix = ""
    _keiro_commands = Commands()
    _keiro_fields = fields_of(object, frozenset({object}))
    _keiro_workflow = cast("Workflow | None", None)
    class_version = 1

    Event = UserEvent
    Snapshot = RunSnapshot

    def __init_subclass__(
        cls,
        *,
        name: str | None = None,
        retry: Retry | None = None,
        version: str | None = None,
        pinned: bool = False,
        patches: Sequence[str] = (),
        queue: str | None = None,
        cleanup: bool = False,
        grace: float | timedelta | None = None,
        **kwargs: Any,
    ) -> None:
        # Not the library's own: that refuses a second class of one name in a module, which reloads define.
        try:
            super(BaseAggregate, cls).__init_subclass__(**kwargs)
        except TypeError as error:
            raise InvalidCall(f"class {cls.__qualname__} has the arguments {', '.join(kwargs)}: {error}") from None
        label = check_workflow_name(cls.__name__ if name is None else name)
        check_class(cls, CORE, RESERVED)
        body = getattr(cls, "execute", None)
        if not inspect.iscoroutinefunction(body):
            raise InvalidCall(
                f"{cls.__qualname__} needs `async def execute(self, ...)`, the body of the workflow. A base "
                "for other workflows declares it with @abstractmethod, a mixin is a plain class"
            )
        cls._keiro_fields = fields_of(cls, CORE)
        cls._keiro_commands = define_commands(cls, label, CORE)
        for event_name, event_class in cls._keiro_commands.events.items():
            setattr(cls, event_name, event_class)
        cls._keiro_workflow = None
        if not getattr(body, "__isabstractmethod__", False):
            cls._keiro_workflow = Workflow(
                body,
                name=label,
                retry=retry,
                version=version,
                pinned=pinned,
                patches=patches,
                queue=queue,
                cleanup=cleanup,
                grace=grace,
                aggregate=cls,
            )
            aggregates[label] = cls

    # What an aggregate of the library has

    @property
    def created_on(self) -> datetime:
        """When the run was started (UTC)."""
        return self._keiro_created_on

    @property  # type: ignore[misc]
    def modified_on(self) -> datetime:
        """When the newest event this instance has seen was recorded (UTC)."""
        return self._keiro_modified_on

    @property
    def pending_events(self) -> list[Any]:
        """What commands called on this instance have triggered and nobody has collected."""
        return self._keiro_pending

    def collect_events(self) -> Sequence[Any]:
        """Take the pending events."""
        collected, self._keiro_pending = self._keiro_pending, []
        return collected

    def trigger_event(self, event_class: type[Any], **kwargs: Any) -> None:
        """Record an event from a plain method that has decided it, and apply it.

        For event classes with an `apply` of their own; the call of a decorated method does the same. Raises
        `InvalidCall` for fields the event does not have, `PayloadRejected` for values it would not be read
        back with.
        """
        found = self._keiro_commands.events.get(getattr(event_class, "__name__", ""))
        if found is None or not issubclass(found, event_class):
            raise InvalidCall(f"{event_class!r} is not an event of {type(self).__qualname__}")
        if self._keiro_applying:
            raise InvalidCall(
                f"{found.__qualname__} is triggered while another event is applied, and every fold would "
                "record it anew: decide in a plain method and trigger both from there"
            )
        self._keiro_trigger(found, kwargs, "method")

    def _keiro_command(self, method: EventMethod, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._keiro_applying:
            # Part of what another event does, like `super().add(sku)` in an event method: no own event.
            method.fn(self, *args, **kwargs)
            return
        found = self._keiro_commands.by_method.get(method)
        if found is None:
            raise InvalidCall(f"{method!r} is not a command of {type(self).__qualname__}")
        self._keiro_trigger(found, method.fields(self, args, kwargs), method.fn.__name__)

    def _keiro_trigger(self, event_class: type[UserEvent], fields: dict[str, Any], method: str) -> None:
        name = type(self).__qualname__
        if _is_bound(self):
            raise InvalidCall(
                f"inside a running body a direct call of a command of {name} would not be recorded: write "
                f"`await self.apply({name}.{method}, ...)`"
            )
        try:
            event = event_class(**fields)
        except TypeError as error:
            raise InvalidCall(f"{event_class.__qualname__}: {error}") from None
        now = ms_of(datetime.now(UTC))
        event = placed(_as_read(event), self._keiro_id, self._keiro_version + 1, now)
        _apply(self, event)
        self._keiro_pending.append(event)

    def _keiro_method(self, method: Callable[..., Any]) -> tuple[str, Callable[..., Any]]:
        return command_of(type(self), method, CORE)

    @property
    def _keiro_root(self) -> WorkflowRun:
        return self

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __repr__(self) -> str:
        state = "".join(f", {name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}(id={self._keiro_id!r}, version={self._keiro_version}{state})"

    def __getstate__(self) -> tuple[dict[str, Any], dict[str, Any]]:
        # Copies have no driver: nothing that is done to a copy can reach the engine.
        slots = {slot: getattr(self, slot) for slot in _COPIED}
        slots["_keiro_pending"] = list(self._keiro_pending)
        return dict(vars(self)), slots


CORE: Final = frozenset(WorkflowRun.__mro__)
"""The classes that are no user's."""
RESERVED: Final = frozenset(n for n in dir(WorkflowRun) if not n.startswith("_")) - {"class_version"}
"""The names a subclass must leave alone."""
_COPIED: Final = tuple(slot for slot in WorkflowRun.__slots__ if slot not in ("_keiro_driver", "_keiro_step"))


def workflow_of(obj: object) -> Workflow:
    """The workflow a caller means: a `@keiro.workflow` function, or a subclass of `WorkflowRun`."""
    if isinstance(obj, Workflow):
        return obj
    if isinstance(obj, type) and issubclass(obj, WorkflowRun):
        if obj._keiro_workflow is not None:
            return obj._keiro_workflow
        raise InvalidCall(f"{obj.__qualname__} has no body: pass a subclass of it that defines execute")
    raise InvalidCall(
        f"{obj!r} is no workflow: pass a function decorated with @keiro.workflow, or a subclass of keiro.WorkflowRun"
    )


def aggregate_of(workflow: Workflow, run: Run) -> WorkflowRun:
    """A new aggregate for the body of a run, as it is right after WorkflowStarted."""
    cls: type[WorkflowRun] = workflow.aggregate or WorkflowRun
    made = _bare(cls, run.run_id, 1, time_of(run.created_at_ms))
    _initialise(made)
    return made


def bind(run: WorkflowRun, driver: Driver) -> None:
    """Give the instance of a body its driver: `run.*` calls end there, direct commands are refused."""
    run._keiro_driver = driver
    run._keiro_step = driver.step


# Folding


def fold(aggregate_class: type[A], events: Iterable[Event]) -> A:
    """The aggregate after all events of a run, in order, as they stand in the journal.

    Raises `StoreError` for a history with a gap, and `NonDeterminism` if an event method refuses what was
    recorded.
    """
    rest = iter(events)
    return advance(cast(A, begin(next(rest, None), aggregate_class)), rest)


def begin(first: Event | None, aggregate_class: type[WorkflowRun] | None = None) -> WorkflowRun:
    """The aggregate after the first event of a run, see `blank_aggregate`; `StoreError` if it is another."""
    if isinstance(first, WorkflowStarted) and first.originator_version == 1:
        return blank_aggregate(first, aggregate_class)
    found = "it has none" if first is None else f"here it is event {first.originator_version}, {first.TOPIC}"
    raise StoreError(
        f"the first event of a run is event 1, WorkflowStarted; {found}: nothing is folded from this journal"
    )


def blank_aggregate(started: WorkflowStarted, aggregate_class: type[WorkflowRun] | None = None) -> WorkflowRun:
    """The aggregate a run begins as: of this class, else of the one this process has for its workflow."""
    cls = aggregate_class or aggregates.get(started.workflow) or WorkflowRun
    own = started.originator_id or run_id(started.workflow, started.key, started.round)
    made = _bare(cls, own, 1, started.timestamp)
    _initialise(made)
    return made


def advance(run: A | None, events: Iterable[Event]) -> A:
    """Apply the next events of a run's journal, all of them, in order; None stands before the first."""
    rest = iter(events)
    if run is None:
        run = cast(A, begin(next(rest, None)))
    version = run._keiro_version
    own = run._keiro_id
    for event in rest:
        version += 1
        # A fold over a truncated history would be a state that never was, and nobody would notice.
        if event.originator_version != version or event.originator_id != own:
            raise StoreError(
                f"in the journal of {own}, event {event.originator_version} of {event.originator_id} stands "
                f"where event {version} belongs. It is incomplete, nothing is folded of it: use a backup"
            )
        _apply_recorded(run, event)
    return run


def apply_event(run: WorkflowRun, event: Event) -> None:
    """Deliver an event to the instance of a body. Events before it that change no state may be left out."""
    if event.originator_version <= run._keiro_version:
        raise StoreError(
            f"event {event.originator_version} of {event.originator_id} was delivered after event {run._keiro_version}"
        )
    _apply_recorded(run, event)


def new_events(
    run: WorkflowRun, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Event]:
    """Run a command on an instance and return what it triggers, in order, for the caller to append.

    The events have no columns yet, and their arguments are as they will be read back. The instance has moved
    on afterwards, also when the command raises: pass a `copy.deepcopy` of one that must not. What the command
    raises is its refusal; nothing is pending then. Raises `InvalidCall` for what is not a command of the
    instance's class, or for arguments it does not take.
    """
    name, command = run._keiro_method(method)
    if _is_bound(run):
        raise InvalidCall(f"{type(run).__qualname__}.{name} was called on the instance of a body, not on a copy")
    bind_call(command, (run, *args), kwargs)
    before = len(run._keiro_pending)
    try:
        command(run, *args, **kwargs)
    except BaseException:
        del run._keiro_pending[before:]
        raise
    triggered = run._keiro_pending[before:]
    del run._keiro_pending[before:]
    return [blank(event) for event in triggered]


def restored(snapshot: RunSnapshot, aggregate_class: type[WorkflowRun] | None = None) -> WorkflowRun:
    """The aggregate in a snapshot: of this class, else of the one this process has for its workflow."""
    cls = aggregate_class or aggregates.get(snapshot.topic) or WorkflowRun
    made = _bare(cls, snapshot.originator_id, snapshot.originator_version, snapshot.created_on)
    made._keiro_modified_on = snapshot.modified_on
    if cls is not WorkflowRun:
        # Where the class is unknown, a fold of all events has no state either.
        vars(made).update(copy.deepcopy(snapshot.state))
    return made


def initial_fields(cls: type[WorkflowRun]) -> frozenset[str]:
    """The names of the fields a new run has."""
    made = _bare(cls, "", 0, time_of(0))
    _initialise(made)
    return frozenset(vars(made))


def _bare(cls: type[A], own: str, version: int, created_on: datetime) -> A:
    run = cls.__new__(cls)
    run._keiro_id = own
    run._keiro_version = version
    run._keiro_created_on = run._keiro_modified_on = created_on
    run._keiro_pending = []
    run._keiro_applying = False
    return run


def _initialise(run: WorkflowRun) -> None:
    cls = type(run)
    state = vars(run)
    for name, field in cls._keiro_fields.items():
        state[name] = field.make()
    run._keiro_applying = True
    try:
        cls.__init__(run)
    finally:
        run._keiro_applying = False
    if hidden := RESERVED & state.keys():
        raise InvalidCall(f"{cls.__qualname__}.__init__ sets {taken(hidden)}")


def _is_bound(run: WorkflowRun) -> bool:
    return hasattr(run, "_keiro_driver")


def _apply(run: WorkflowRun, event: Event) -> None:
    run._keiro_applying = True
    try:
        event.apply(run)
    finally:
        run._keiro_applying = False
    run._keiro_version = event.originator_version
    run._keiro_modified_on = event.timestamp


def _apply_recorded(run: WorkflowRun, event: Event) -> None:
    try:
        _apply(run, event)
    except KeiroError:
        raise
    except Exception as error:
        raise NonDeterminism(
            f"event {event.originator_version} of {event.originator_id}, {type(event).__qualname__}, cannot "
            f"be applied ({type(error).__name__}: {error}). It is recorded, so its event method must accept "
            "it: refuse a command in a plain method, before it triggers an event"
        ) from error


def _as_read(event: UserEvent) -> UserEvent:
    """The event as it will come back from the journal: one that would not must not be recorded."""
    cls = type(event)
    stored = encode_user(event).decode()
    try:
        return decode_user(cls, stored)
    except DecodeFailed as error:
        text, path = reader(cls).explain(error.__cause__)
        raise PayloadRejected(
            f"{cls.__qualname__} cannot be recorded: {path.removeprefix('$.')} does not fit its annotation "
            f"({text}). Pass what it says, or annotate the parameter with what is passed",
            where=f"event {cls.TOPIC}",
            path=path,
        ) from error
