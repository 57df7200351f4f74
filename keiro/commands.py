"""`@keiro.event`: methods whose call is an event, and the event classes made of them.

A decorated method changes the aggregate's state and does nothing else: it runs once when the command is sent
and once at every fold. Its event class has the method's parameters as fields, so arguments come back from the
journal as annotated.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
import typing
import warnings
import weakref
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, ClassVar, Final, TypeVar, overload
from uuid import UUID

import msgspec

from keiro.classes import raw_annotations
from keiro.codec.decoding import Decoder, Hint, Hints, decoder_for, plain
from keiro.errors import DecodeFailed, InvalidCall
from keiro.events import Event
from keiro.library import CommandMethodDecorator

F = TypeVar("F", bound=Callable[..., None])


class UserEvent(Event, frozen=True, kw_only=True, omit_defaults=True):
    """Base of the events that users' commands record; `WorkflowRun.Event` is this class.

    A subclass whose fields change later sets `class_version` and has static methods `upcast_v1_v2(state)` and
    so on, which change the dict of an older stored event in place.
    """

    METHOD: ClassVar[EventMethod | None] = None
    GENERATED: ClassVar[bool] = False
    READER: ClassVar[Decoder | None] = None
    AGGREGATE: ClassVar[type] = object


class EventMethod:
    """A method of an aggregate whose call triggers an event; `Basket.add` is one, and names the command."""

    def __init__(self, fn: Callable[..., None], spec: str | type[UserEvent] | None) -> None:
        if not isinstance(fn, types.FunctionType):
            raise InvalidCall(f"@keiro.event decorates a method, not {fn!r}: put it directly above a `def`")
        where = f"@keiro.event on {fn.__qualname__}"
        if fn.__name__ == "__init__":
            raise InvalidCall(f"{where}: a run is created by WorkflowStarted; leave __init__ undecorated")
        if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
            raise InvalidCall(
                f"{where}: an event method only changes state and is applied again at every fold, so it is "
                "neither async nor a generator: do the work in a step and pass its result to a plain `def`"
            )
        self.signature = inspect.signature(fn)
        if not self.signature.parameters:
            raise InvalidCall(f"{where}: an event method takes `self` first")
        for parameter in self.parameters:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise InvalidCall(
                    f"{where}: the parameters are the event's fields by name, so no {parameter}: name each"
                )
        self.fn = fn
        self.spec = spec
        # Made here, where names around the class can still be seen; resolved when the first event is read.
        self.hints = Hints(fn)
        self.event_name = spec if isinstance(spec, str) else spec.__name__ if spec else _camel(fn.__name__)
        if not self.event_name.isidentifier() or self.event_name.startswith("_"):
            raise InvalidCall(f"{where}: {self.event_name!r} cannot name an event; use a name like 'ItemAdded'")
        functools.update_wrapper(self, fn)

    @property
    def parameters(self) -> list[inspect.Parameter]:
        """The parameters after `self`."""
        return list(self.signature.parameters.values())[1:]

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> EventMethod: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> types.MethodType: ...
    def __get__(self, instance: object | None, owner: type | None = None) -> EventMethod | types.MethodType:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, run: Any, /, *args: Any, **kwargs: Any) -> None:
        command = getattr(run, "_keiro_command", None)
        if command is None:
            raise InvalidCall(f"{self.fn.__qualname__} is a command of a keiro.WorkflowRun, {run!r} is not one")
        command(self, args, kwargs)

    def fields(self, run: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The event's fields for a call; raise `InvalidCall` if the method does not take the arguments."""
        bound = bind_call(self.fn, (run, *args), kwargs)
        return {parameter.name: bound.arguments[parameter.name] for parameter in self.parameters}

    def __repr__(self) -> str:
        return f"<command {self.fn.__qualname__}: {self.event_name}>"


@overload
def event(spec: F, /) -> F: ...
@overload
def event(spec: str | type[UserEvent], /) -> Callable[[F], F]: ...
def event(spec: Any, /) -> Any:
    """Make a method of a `WorkflowRun` subclass a command: its call is recorded, its body applies the event.

    `@event("ItemAdded")` names the event, whose class is made from the method's parameters; if the workflow's
    class has a nested event class of that name, it is used. `@event(ItemAdded)` takes an event class, a
    subclass of `WorkflowRun.Event` whose fields are the method's parameters: `class_version` and
    `upcast_v1_v2` have their place there. A bare `@event` above `item_added` records `ItemAdded`.
    """
    if isinstance(spec, str) or (isinstance(spec, type) and issubclass(spec, UserEvent)):
        return functools.partial(EventMethod, spec=spec)
    if isinstance(spec, types.FunctionType):
        return EventMethod(spec, None)
    raise InvalidCall(
        f"@keiro.event takes the name of an event, a subclass of WorkflowRun.Event, or a method, not {spec!r}"
    )


def reader(cls: type[UserEvent]) -> Decoder:
    """The decoder of the stored JSON of an event, each field by its annotation."""
    if cls.READER is None:
        if cls.GENERATED:
            _resolve(cls)
        cls.READER = decoder_for(cls, where=f"event {cls.TOPIC}")
    return cls.READER


class Commands:
    """The events of one aggregate class by name, and the event each of its decorated methods triggers."""

    __slots__ = ("by_method", "events")

    def __init__(self) -> None:
        self.events: dict[str, type[UserEvent]] = {}
        self.by_method: dict[EventMethod, type[UserEvent]] = {}


aggregates: Final[weakref.WeakValueDictionary[str, type[Any]]] = weakref.WeakValueDictionary()
"""The class of each workflow that has one, by name: the latest definition, so that a reload replaces it."""


def define_commands(cls: type, workflow: str, core: frozenset[type]) -> Commands:
    """Collect the commands of an aggregate class and its bases, but those in `core`; make its event classes.

    Every aggregate class gets event classes of its own, under topics of its own: `<workflow>:<event>`.
    """
    given: dict[str, type[UserEvent]] = {}
    methods: dict[str, EventMethod] = {}
    found = Commands()
    every: list[EventMethod] = []
    for klass in reversed(cls.__mro__):
        if klass in core:
            continue
        here: dict[str, EventMethod] = {}
        for name, value in vars(klass).items():
            if isinstance(value, CommandMethodDecorator):
                raise InvalidCall(
                    f"{klass.__qualname__}.{name}: decorate the commands of a workflow with @keiro.event; "
                    "the eventsourcing library's own makes events that a run's journal cannot hold"
                )
            if isinstance(value, type) and issubclass(value, UserEvent):
                given[name] = value
            elif isinstance(value, EventMethod):
                _check_single(klass, here.setdefault(value.event_name, value), value)
                every.append(value)
        for name, method in here.items():
            # A subclass may override a method and its event, but not take the event for another method.
            _check_single(cls, methods.get(name, method), method)
            methods[name] = method
            if isinstance(method.spec, type):
                given.setdefault(name, method.spec)
    for name in {**given, **methods}:
        taken = getattr(cls, name, None)
        events = isinstance(taken, type) and issubclass(taken, UserEvent) and taken is not UserEvent
        if taken is not None and not events:
            raise InvalidCall(f"{cls.__qualname__}.{name} exists and is no event: give the event another name")
        found.events[name] = _event_class(cls, f"{workflow}:{name}", name, given.get(name), methods.get(name))
    for method in every:
        found.by_method[method] = found.events[method.event_name]
    return found


def command_of(cls: type, method: Any, core: frozenset[type]) -> tuple[str, Callable[..., Any]]:
    """The name and the function (its first argument is the instance) of a command of `cls`.

    Raises `InvalidCall` for anything else.
    """
    function = method.__func__ if isinstance(method, types.MethodType) else method
    for klass in cls.__mro__:
        if klass in core:
            continue
        for name, value in vars(klass).items():
            if value is not function or name.startswith("__"):
                continue
            if inspect.iscoroutinefunction(function):
                raise InvalidCall(f"{cls.__qualname__}.{name} is async: a command is a plain method that changes state")
            if isinstance(function, EventMethod | types.FunctionType):
                return name, function
    raise InvalidCall(
        f"{method!r} is not a command of {cls.__qualname__}: pass one of the methods of that class, as `Class.method`"
    )


def bind_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
    """The arguments of a call with defaults applied; raise `InvalidCall` if `fn` does not take them."""
    signature = inspect.signature(fn)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InvalidCall(f"{getattr(fn, '__qualname__', fn)}{signature}: {error}") from None
    bound.apply_defaults()
    return bound


def upcast(cls: type[Any], state: dict[str, Any], version: int) -> None:
    """Bring an older state up to the `class_version` of its event class or aggregate class, in place."""
    for older in range(version, cls.class_version):
        name = f"upcast_v{older}_v{older + 1}"
        try:
            getattr(cls, name)(state)
        except Exception as error:
            raise DecodeFailed(
                f"{cls.__qualname__}.{name}(state) raised {type(error).__name__}: {error}",
                where=cls.__qualname__,
            ) from error


# Event classes

_TAKEN: Final = frozenset(name for name in dir(UserEvent) if not name.startswith("__"))
_STRUCT_OPTIONS: Final = {"frozen": True, "kw_only": True, "omit_defaults": True}


def _check_single(cls: type, one: EventMethod, other: EventMethod) -> None:
    if one.fn.__name__ != other.fn.__name__:
        raise InvalidCall(
            f"{cls.__qualname__}: {one.fn.__qualname__} and {other.fn.__qualname__} both record "
            f"{one.event_name}; a fold could not tell which one to apply: give each its own event"
        )


def _event_class(
    cls: type, topic: str, name: str, given: type[UserEvent] | None, method: EventMethod | None
) -> type[UserEvent]:
    body: dict[str, Any] = {
        "TOPIC": topic,
        "METHOD": method,
        "GENERATED": False,
        "READER": None,
        "AGGREGATE": cls,
        "__module__": cls.__module__,
        "__qualname__": f"{cls.__qualname__}.{name}",
    }
    base: type[UserEvent]
    if given is not None and _derived(given) and given.GENERATED and given.METHOD is not method:
        # Made from a method that this class overrides: the fields are those of the overriding one.
        given = None
    if given is None:
        assert method is not None
        base = UserEvent
        body["GENERATED"] = True
        body["__doc__"] = method.fn.__doc__
        body["__annotations__"] = _fields_of_method(method, body)
    else:
        base = given
        body["__doc__"] = given.__doc__
        if _derived(given):
            body["GENERATED"] = given.GENERATED
        else:
            body["__annotations__"] = _fields_of_class(cls, given, body)
        if method is not None and given.METHOD is not method:
            _check_fit(cls, given, method)
    if method is not None and (given is None or given.METHOD is not method):
        body["apply"] = _applier(method)
    return types.new_class(name, (base,), _STRUCT_OPTIONS, lambda namespace: namespace.update(body))


def _derived(given: type[UserEvent]) -> bool:
    """Whether the class was made here for an aggregate class, rather than written by a user."""
    return "GENERATED" in vars(given)


def _fields_of_method(method: EventMethod, body: dict[str, Any]) -> dict[str, Any]:
    where = f"event {method.event_name} of {method.fn.__qualname__}"
    fields: dict[str, Any] = {}
    for parameter in method.parameters:
        _check_field(where, parameter.name)
        fields[parameter.name] = Any if parameter.annotation is parameter.empty else parameter.annotation
        if parameter.default is not parameter.empty:
            body[parameter.name] = _written(functools.partial(copy.deepcopy, parameter.default))
    return fields


def _fields_of_class(cls: type, given: type[UserEvent], body: dict[str, Any]) -> dict[str, Any]:
    where = f"event {given.__name__} of {cls.__qualname__}"
    version = given.class_version
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise InvalidCall(f"{where}: class_version is a whole number from 1, not {version!r}")
    for older in range(1, version):
        if not callable(getattr(given, f"upcast_v{older}_v{older + 1}", None)):
            raise InvalidCall(
                f"{where} has class_version {version} but no static method upcast_v{older}_v{older + 1}"
                f"(state): what version {older} has stored could not be read"
            )
    try:
        infos = msgspec.structs.fields(given)
    except NameError as error:
        raise InvalidCall(f"{where}: {error}; define it at module level, above the class") from None
    fields: dict[str, Any] = {}
    for info in infos:
        if info.name in UserEvent.__struct_fields__:
            continue
        _check_field(where, info.name)
        if info.required:
            continue
        fields[info.name] = info.type
        factory = info.default_factory
        if info.default is not msgspec.NODEFAULT:
            factory = functools.partial(copy.deepcopy, info.default)
        body[info.name] = _written(factory)
    return fields


def _check_fit(cls: type, given: type[UserEvent], method: EventMethod) -> None:
    where = f"event {given.__name__} of {cls.__qualname__}"
    if any("apply" in vars(klass) and not _derived(klass) for klass in given.__mro__[: -len(UserEvent.__mro__)]):
        raise InvalidCall(f"{where} has a method `apply` and {method.fn.__qualname__} applies it too: keep one")
    infos = [info for info in msgspec.structs.fields(given) if info.name not in UserEvent.__struct_fields__]
    fields = [info.name for info in infos]
    names = [parameter.name for parameter in method.parameters]
    if not set(names) <= set(fields) or any(info.required and info.name not in names for info in infos):
        raise InvalidCall(
            f"{where} has the fields ({', '.join(fields)}), {method.fn.__qualname__} takes "
            f"({', '.join(names)}): the parameters of a command are fields of its event, and those that are "
            "none need defaults"
        )


def _resolve(cls: type[UserEvent]) -> None:
    """Resolve the annotations of an event class made from a method.

    msgspec looks at annotations when it first needs them. That is now, when every class they name is defined.
    """
    method = cls.METHOD
    assert method is not None
    for klass in cls.__mro__:
        if not issubclass(klass, UserEvent) or klass is UserEvent:
            break
        for name in raw_annotations(klass):
            hint = method.hints.of(name)
            if hint.unresolved is not None:
                hint = _hint_in_class(cls.AGGREGATE, method, name, hint)
            if hint.unresolved is not None:
                warnings.warn(
                    f"{cls.TOPIC}: the annotation {hint.unresolved} of {name!r} cannot be resolved, so it is "
                    "read as plain data. Define its classes at module level, not under TYPE_CHECKING",
                    stacklevel=2,
                )
            klass.__annotations__[name] = plain(hint.annotation)


def _hint_in_class(aggregate: type, method: EventMethod, name: str, hint: Hint) -> Hint:
    """The annotation as the body of the aggregate's class sees it: it may name a class nested there."""
    nested = {key: value for klass in reversed(aggregate.__mro__) for key, value in vars(klass).items()}
    alone = types.SimpleNamespace(__annotations__={name: hint.unresolved})
    try:
        found = typing.get_type_hints(alone, method.fn.__globals__, nested, include_extras=True)
    except Exception:
        return hint
    return Hint(found[name])


def _check_field(where: str, name: str) -> None:
    if name in _TAKEN:
        raise InvalidCall(f"{where}: {name!r} is a name every event has already; call the parameter something else")


def _written(factory: Callable[[], Any]) -> Any:
    # msgspec leaves out a value that is its field's plain default. For what users record that would make the
    # past depend on the default of today, so each default becomes a factory: such a value is always written.
    return msgspec.field(default_factory=lambda: factory())


def _applier(method: EventMethod) -> Callable[[Any, Any], None]:
    fn = method.fn
    by_name = [one.name for one in method.parameters if one.kind is one.KEYWORD_ONLY]
    by_position = [one.name for one in method.parameters if one.kind is not one.KEYWORD_ONLY]

    def apply(self: Any, aggregate: Any) -> None:
        # The state gets values of its own: later events change it, and must not change this event with it.
        values = []
        for name in by_position:
            value = getattr(self, name)
            values.append(value if type(value) in _IMMUTABLE else copy.deepcopy(value))
        if by_name:
            fn(aggregate, *values, **{name: copy.deepcopy(getattr(self, name)) for name in by_name})
        else:
            fn(aggregate, *values)

    return apply


_IMMUTABLE: Final = frozenset(
    (str, int, float, bool, type(None), bytes, UUID, Decimal, datetime, date, time, timedelta)
)


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))
