"""What an aggregate class may look like, and the fields it declares.

Everything that would not work, or not do what it looks like, is refused when the class is defined.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, Final

from keiro.codec.decoding import Decoder, decoder_for
from keiro.errors import InvalidCall


class Field:
    """A field of an aggregate that is declared in its class: `total: Decimal = Decimal(0)`."""

    __slots__ = ("_decoder", "_owner", "annotation", "make", "name")

    def __init__(self, owner: type, name: str, annotation: Any, make: Callable[[], Any]) -> None:
        self._owner = owner
        self.name = name
        self.annotation = annotation
        self.make = make
        self._decoder: Decoder | None = None

    @property
    def decode(self) -> Decoder:
        """Reads the field's JSON by its annotation; as plain data where that cannot be resolved."""
        if self._decoder is None:
            alone = types.SimpleNamespace(__annotations__={self.name: self.annotation})
            try:
                module = vars(sys.modules[self._owner.__module__])
                hints = typing.get_type_hints(alone, module, dict(vars(self._owner)), include_extras=True)
            except Exception:
                hints = {}
            where = f"field {self.name!r} of {self._owner.__qualname__}"
            self._decoder = decoder_for(hints.get(self.name, Any), where=where)
        return self._decoder


def check_class(cls: type, core: frozenset[type], reserved: frozenset[str]) -> None:
    """Check an aggregate class and its bases, but those in `core`, which own the names in `reserved`."""
    for klass in cls.__mro__:
        if klass in core:
            continue
        # What was defined for a base class (its event classes) has been checked with that class.
        names = raw_annotations(klass).keys() | vars(klass).keys()
        if hidden := {name for name in names if name in reserved or _is_own(klass, name)}:
            raise InvalidCall(f"{klass.__qualname__} defines {taken(hidden)}")
        if vars(klass).get("__slots__"):
            raise InvalidCall(f"{klass.__qualname__} has __slots__: the state of a run is its __dict__, leave them out")
    made = typing.cast(Any, cls).__init__
    if not inspect.isroutine(made) or inspect.iscoroutinefunction(made):
        raise InvalidCall(f"{cls.__qualname__}.__init__ must be a plain method")
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = list(inspect.signature(made).parameters.values())[1:]
    if named := [parameter.name for parameter in parameters if parameter.kind not in variable]:
        raise InvalidCall(
            f"{cls.__qualname__}.__init__ takes {', '.join(named)}, but a run is created without arguments: "
            "take them in execute, and give the state of a new run its first values here"
        )


def taken(names: Iterable[str]) -> str:
    """Names of `WorkflowRun` that a user's class or instance would hide, as part of a message."""
    return f"{', '.join(sorted(names))}, which keiro.WorkflowRun has: choose another name"


def fields_of(cls: type, core: frozenset[type]) -> dict[str, Field]:
    """The fields declared in the bodies of an aggregate class and its bases, but those in `core`.

    Raises `InvalidCall` for one without a default, and for a list, dict or set that all runs would share.
    """
    fields: dict[str, Field] = {}
    for klass in reversed(cls.__mro__):
        if klass in core:
            continue
        annotations = raw_annotations(klass)
        for name, annotation in annotations.items():
            if not _CONSTANT.match(annotation if isinstance(annotation, str) else str(annotation)):
                default = vars(klass).get(name, dataclasses.MISSING)
                fields[name] = Field(klass, name, annotation, _maker(f"{klass.__qualname__}.{name}", default))
        for name, value in vars(klass).items():
            shared = isinstance(value, list | dict | set | bytearray) and not name.isupper()
            if shared and name not in annotations and not name.startswith("_"):
                raise InvalidCall(
                    f"{klass.__qualname__}.{name} is a {type(value).__name__} that all runs would share: set "
                    "it in __init__, annotate it to make it a field of each run, or mark it as ClassVar"
                )
    return fields


def raw_annotations(of: Any) -> dict[str, Any]:
    """The annotations of a function or class, where possible without resolving the names in them."""
    if sys.version_info >= (3, 14):
        import annotationlib

        return annotationlib.get_annotations(of, format=annotationlib.Format.STRING)
    return inspect.get_annotations(of)


_CONSTANT: Final = re.compile(r"(\w+\.)*(ClassVar|Final)\b")


def _is_own(klass: type, name: str) -> bool:
    return name.startswith("_keiro_") and "_keiro_commands" not in vars(klass)


def _maker(where: str, default: Any) -> Callable[[], Any]:
    if isinstance(default, dataclasses.Field):
        if default.default_factory is not dataclasses.MISSING:
            return default.default_factory
        default = default.default
    if default is dataclasses.MISSING:
        raise InvalidCall(
            f"{where} has no default: a run begins without arguments, so give the field one, or set it in "
            "__init__ without declaring it in the class"
        )
    return lambda: copy.deepcopy(default)
