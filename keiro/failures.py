"""Exceptions as stored data, and back.

`capture` reads an exception into a `Failure`, whatever it is, and never raises. `revive` builds it again: the original
type where its class is loaded and can be built to say the same, else `StepFailed` with all that was stored. Nothing
is imported or unpickled to that end, so reading a journal runs no code that the program has not loaded itself.

`KeyboardInterrupt`, `SystemExit` and `CancelledError` are for the caller to let pass: they end a process or a task and
are not how a step failed.
"""

from __future__ import annotations

import math
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from keiro.codec import decoder_for, encode
from keiro.errors import StepFailed, WorkflowFailed

MAX_TEXT: Final = 8_192
"""Characters kept of a message, a note, and each string among arguments and attributes."""
MAX_TRACEBACK: Final = 16_384
"""Characters kept of a traceback: its end, where it was raised."""
MAX_TOTAL: Final = 262_144
"""Characters kept of all tracebacks of one failure, and bytes of the arguments and attributes of each exception."""
MAX_CHAIN: Final = 16
"""Levels of causes and groups that are followed."""
MAX_EXCEPTIONS: Final = 256
"""Exceptions of a chain and its groups that are kept."""


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is stored of an exception. `type` is `module:qualname`, `message` its text."""

    type: str
    message: str
    args: tuple[Any, ...] | None = None
    """What it is built from, as plain data; None where some of that has no JSON form."""
    attributes: dict[str, Any] = {}
    """Its further attributes, as plain data: those that have a JSON form."""
    notes: tuple[str, ...] = ()
    traceback: str = ""
    """The formatted frames, innermost last."""
    cause: Failure | None = None
    context: Failure | None = None
    """The exception being handled when this one was raised, unless it has a cause or hides it."""
    members: tuple[Failure, ...] = ()
    """The exceptions of a group."""


def capture(error: BaseException) -> Failure:
    """What can be stored of `error`. Never raises; text that UTF-8 or a database refuses is replaced, long text cut."""
    try:
        return _Capture().of(error, ())
    except Exception as problem:
        # A class that overrides what every exception has: its name is all there is.
        name = _stored_text(type(error).__name__)
        return Failure(type=f"?:{name}", message=f"<cannot be shown: reading it raised {type(problem).__name__}>")


def revive(failure: Failure) -> Exception:
    """The exception again, without a traceback: its formatted frames are in `failure`, and survive another `capture`.

    A `StepFailed` stands for one whose class is not loaded, is no `Exception`, or cannot be built to say the same.
    """
    error = _original(failure)
    if error is None:
        error = StepFailed(_headline(failure), failure)
        notes = [*failure.notes, _frames_note(failure)] if failure.traceback else list(failure.notes)
    else:
        notes = list(failure.notes)
        if failure.traceback:
            vars(error)[_TRACEBACK] = failure.traceback
    if notes:
        vars(error)["__notes__"] = notes
    # By the slots of BaseException: a frozen class refuses assignment.
    if failure.cause is not None:
        object.__setattr__(error, "__cause__", revive(failure.cause))
    if failure.context is not None:
        object.__setattr__(error, "__context__", revive(failure.context))
    return error


def summary(failure: Failure) -> str:
    """The failure in one line, as Python prints an exception's last one; of a group, with its first member."""
    line = _headline(failure)
    # A group's own message names none of what is in it.
    return f"{line}: {summary(failure.members[0])}" if failure.members else line


def describe(failure: Failure) -> str:
    """The failure as Python prints exceptions: causes first, each with its traceback and notes."""
    parts = []
    if failure.cause is not None:
        parts += [describe(failure.cause), "\nThe above was the direct cause of the following:\n"]
    elif failure.context is not None:
        parts += [describe(failure.context), "\nWhile handling the above, the following was raised:\n"]
    if failure.traceback:
        parts.append(f"Traceback (innermost last):\n{failure.traceback.rstrip()}")
    parts += [_headline(failure), *failure.notes]
    parts += [f"  | {line}" for member in failure.members for line in describe(member).splitlines()]
    return "\n".join(parts)


_TRACEBACK: Final = "__keiro_traceback__"
_OWN_FRAMES: Final = str(Path(__file__).parent)
_CUT: Final = "… [cut]"
_UNSTORABLE = re.compile("[\ud800-\udfff\0]")


def _headline(failure: Failure) -> str:
    name = failure.type.removeprefix("builtins:").replace(":", ".")
    return f"{name}: {failure.message}" if failure.message else name


def _frames_note(failure: Failure) -> str:
    return f"Originally raised at (innermost last):\n{failure.traceback}"


def _stored_text(text: str) -> str:
    text = _UNSTORABLE.sub("\ufffd", str.__str__(text))
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - len(_CUT)] + _CUT


def _message(error: BaseException) -> str:
    try:
        return _stored_text(str(error))
    except Exception as problem:
        return f"<{type(error).__name__} cannot be shown: its __str__ raised {type(problem).__name__}>"


# Capturing


class _Capture:
    """One walk over an exception and what it is chained to."""

    def __init__(self) -> None:
        self.exceptions_left = MAX_EXCEPTIONS
        self.text_left = MAX_TOTAL

    def of(self, error: BaseException, above: tuple[BaseException, ...]) -> Failure:
        self.exceptions_left -= 1
        if type(error) is StepFailed and isinstance(error.failure, Failure):
            # It stands for another one: that is what failed.
            known = error.failure
            return replace(known, notes=tuple(note for note in _notes(error) if note != _frames_note(known)))
        above = (*above, error)
        members: tuple[Failure, ...] = ()
        arguments, attributes = _reduced(error)
        if isinstance(error, BaseExceptionGroup):
            arguments = (error.message,)
            members = tuple(f for e in error.exceptions if (f := self._next(e, above)) is not None)
        cause = self._next(error.__cause__, above)
        hidden = error.__cause__ is not None or error.__suppress_context__
        packer = _Packer(self, above)
        return Failure(
            type=_stored_text(_topic(type(error))),
            message=_message(error),
            args=packer.arguments(arguments),
            attributes=packer.attributes(attributes),
            notes=_notes(error),
            traceback=self._traceback(error),
            cause=cause,
            context=None if hidden else self._next(error.__context__, above),
            members=members,
        )

    def _next(self, error: BaseException | None, above: tuple[BaseException, ...]) -> Failure | None:
        if error is None or self.exceptions_left <= 0 or len(above) >= MAX_CHAIN:
            return None
        # Chains can be circular: what is being captured already ends this one.
        return None if any(error is one for one in above) else self.of(error, above)

    def _traceback(self, error: BaseException) -> str:
        known = vars(error).get(_TRACEBACK)
        if isinstance(known, str):
            return known
        try:
            frames = traceback.extract_tb(error.__traceback__, limit=-100)
            while len(frames) > 1 and frames[0].filename.startswith(_OWN_FRAMES):
                del frames[0]
            text = _UNSTORABLE.sub("\ufffd", "".join(frames.format()))
        except Exception:
            return ""
        room = min(MAX_TRACEBACK, self.text_left)
        text = text if len(text) <= room else "…" + text[len(text) - room + 1 :] if room else ""
        self.text_left -= len(text)
        return text


def _topic(kind: type) -> str:
    """`module:qualname`. A class of the program that was started has the name under which others import it."""
    module = kind.__module__
    if module in _STARTED:
        name = _name_of_main()
        # Loaded a second time under its own name, it has two classes each: only the given name tells them apart.
        if name is not None and sys.modules.get(name) in (None, sys.modules.get(module)):
            module = name
    return f"{module}:{kind.__qualname__}"


_STARTED: Final = ("__main__", "__mp_main__")


def _name_of_main() -> str | None:
    """What `import` calls the program that was started with `python FILE` or `python -m MODULE`; None for a prompt."""
    main = vars(sys.modules["__main__"]) if "__main__" in sys.modules else {}
    spec, file = main.get("__spec__"), main.get("__file__")
    if spec is not None and isinstance(spec.name, str) and spec.name not in _STARTED:
        return spec.name
    return Path(file).stem if isinstance(file, str) else None


def _notes(error: BaseException) -> tuple[str, ...]:
    notes = vars(error).get("__notes__")
    if not isinstance(notes, list | tuple):
        return ()
    return tuple(_stored_text(note) for note in notes[:32] if isinstance(note, str))


def _reduced(error: BaseException) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What an exception says it is built from (`__reduce__`, as for pickling), and its other attributes."""
    arguments, attributes = error.args, vars(error)
    try:
        reduced: Any = error.__reduce_ex__(2)
        if reduced[0] is type(error) and isinstance(reduced[1], tuple):
            arguments = reduced[1]
            if len(reduced) > 2 and isinstance(reduced[2], dict):
                attributes = reduced[2]
    except Exception:
        pass
    return arguments, attributes


# Arguments and attributes as plain data. JSON's own types stand for themselves; `{"$type": …, "$value": …}` is another
# type, by its `module:qualname` or one of the names in `_CONTAINERS`.


class _Unpackable(Exception):
    pass


class _Packer:
    def __init__(self, capture: _Capture, above: tuple[BaseException, ...]) -> None:
        self.capture = capture
        self.above = above
        self.left = 1000

    def arguments(self, values: tuple[Any, ...]) -> tuple[Any, ...] | None:
        try:
            packed = tuple(self.pack(value, 0) for value in values)
            return packed if len(msgspec.json.encode(packed)) <= MAX_TOTAL else None
        except Exception:
            return None

    def attributes(self, values: dict[str, Any]) -> dict[str, Any]:
        packed: dict[str, Any] = {}
        room = MAX_TOTAL
        for name, value in values.items():
            if name in (_TRACEBACK, "__notes__") or isinstance(value, Failure) or not isinstance(name, str):
                continue
            try:
                one = self.pack(value, 0)
                size = len(msgspec.json.encode({name: one}))
            except Exception:
                continue
            if size <= room and not _UNSTORABLE.search(name):
                packed[name] = one
                room -= size
        return packed

    def pack(self, value: Any, depth: int) -> Any:
        self.left -= 1
        if self.left < 0 or depth > 20:
            raise _Unpackable
        kind = type(value)
        if value is None or kind is bool or (kind is int and value.bit_length() <= 10_000):
            return value
        if kind is str:
            return _stored_text(value)
        if kind is float:
            return value if math.isfinite(value) else {"$type": "float", "$value": repr(value)}
        depth += 1
        if kind is list:
            return [self.pack(one, depth) for one in value]
        if kind is tuple:
            return {"$type": "tuple", "$value": [self.pack(one, depth) for one in value]}
        if kind is set or kind is frozenset:
            members = sorted((self.pack(one, depth) for one in value), key=msgspec.json.encode)
            return {"$type": kind.__name__, "$value": members}
        if kind is dict:
            if "$type" not in value and all(type(key) is str for key in value):
                return {_stored_text(key): self.pack(one, depth) for key, one in value.items()}
            pairs = [[self.pack(key, depth), self.pack(one, depth)] for key, one in value.items()]
            return {"$type": "dict", "$value": pairs}
        if isinstance(value, BaseException):
            failure = self.capture._next(value, self.above)
            if failure is None:
                raise _Unpackable
            return {"$type": "exception", "$value": msgspec.json.decode(msgspec.json.encode(failure))}
        stored = encode(value, where="an exception", limit=MAX_TOTAL)
        restored = decoder_for(kind)(stored)
        if type(restored) is not kind or restored != value:
            raise _Unpackable
        return {"$type": _topic(kind), "$value": msgspec.json.decode(stored)}


def _unpack(value: Any) -> Any:
    if type(value) is list:
        return [_unpack(one) for one in value]
    if type(value) is not dict:
        return value
    if "$type" not in value:
        return {key: _unpack(one) for key, one in value.items()}
    name, stored = value["$type"], value["$value"]
    if name in _CONTAINERS:
        return _CONTAINERS[name](stored)
    kind = _loaded(name)
    if kind is None:
        raise _Unpackable
    return decoder_for(kind)(msgspec.json.encode(stored))


_CONTAINERS: Final[dict[str, Callable[[Any], Any]]] = {
    "float": float,
    "tuple": lambda stored: tuple(map(_unpack, stored)),
    "set": lambda stored: set(map(_unpack, stored)),
    "frozenset": lambda stored: frozenset(map(_unpack, stored)),
    "dict": lambda stored: {_unpack(key): _unpack(one) for key, one in stored},
    "exception": lambda stored: revive(msgspec.convert(stored, Failure)),
}


# Reviving


def _original(failure: Failure) -> Exception | None:
    kind = _loaded(failure.type)
    if kind is None or not issubclass(kind, Exception) or failure.args is None:
        return None
    try:
        arguments = tuple(map(_unpack, failure.args))
    except Exception:
        return None
    if issubclass(kind, BaseExceptionGroup):
        arguments = (*arguments, [revive(member) for member in failure.members])
    attributes = {}
    for name, stored in failure.attributes.items():
        try:
            attributes[name] = _unpack(stored)
        except Exception:
            continue
    if issubclass(kind, WorkflowFailed | StepFailed):
        attributes["failure"] = failure.cause
    ways = (_construct, _restore) if _describes_itself(kind) else (_restore, _construct)
    for build in ways:
        try:
            error = build(kind, arguments)
            for name, value in attributes.items():
                _set(error, name, value)
            if type(error) is kind and _says_the_same(error, failure):
                return error
        except Exception:
            continue
    return None


def _restore(kind: type[Exception], arguments: tuple[Any, ...]) -> Exception:
    """Without the class's own `__new__` and `__init__`: what they did shows in what was stored."""
    base = _built_in(kind)
    error: Exception = base.__new__(kind, *arguments)
    base.__init__(error, *arguments)
    return error


def _construct(kind: type[Exception], arguments: tuple[Any, ...]) -> Exception:
    return kind(*arguments)


def _describes_itself(kind: type[Exception]) -> bool:
    """Whether the class says by `__reduce__` which arguments build it."""
    base = _built_in(kind)
    return kind.__reduce__ is not base.__reduce__ or kind.__reduce_ex__ is not base.__reduce_ex__


def _built_in(kind: type[Exception]) -> Any:
    heap_type = 1 << 9
    return next(base for base in kind.__mro__ if not base.__flags__ & heap_type)


def _set(error: Exception, name: str, value: Any) -> None:
    try:
        object.__setattr__(error, name, value)
    except AttributeError:  # a property without a setter hides what is in the instance
        vars(error)[name] = value


def _says_the_same(error: Exception, failure: Failure) -> bool:
    message = _message(error)
    if message == failure.message or isinstance(error, BaseExceptionGroup):
        return True
    # A set is shown in another order, and text that was cut or replaced among the arguments in another way.
    kept = msgspec.json.encode((failure.args, failure.attributes)).decode()
    return sorted(message) == sorted(failure.message) or "\ufffd" in kept or _CUT in kept


def _loaded(topic: str) -> Any:
    """The class `module:qualname`, if its module is loaded. Looked up without running a module's `__getattr__`."""
    module, _, qualname = topic.partition(":")
    if "<locals>" in qualname:
        return _loaded_local(topic)
    found: Any = sys.modules.get(module)
    if found is None and module == _name_of_main():
        found = sys.modules["__main__"]
    try:
        for name in qualname.split("."):
            found = vars(found)[name]
    except (KeyError, TypeError):
        return None
    return found if isinstance(found, type) else None


def _loaded_local(topic: str) -> type[Exception] | None:
    """An exception class defined inside a function: the latest of that name that exists."""
    found = None
    classes: list[type[Exception]] = [Exception]
    for kind in classes:
        classes.extend(type.__subclasses__(kind))
        if topic in (_topic(kind), f"{kind.__module__}:{kind.__qualname__}"):
            found = kind
    return found
