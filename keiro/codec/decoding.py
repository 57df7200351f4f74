"""Decoding payloads by annotation: what a function returned comes back as what it says it returns.

Annotations are resolved at the first use, when every class they name is defined.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import inspect
import re
import sys
import types
import typing
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
from msgspec import Raw

from keiro.codec.hooks import by_field_name, dec_hook, decode_any, encode_json, is_model, model_reader, show
from keiro.errors import DecodeFailed

Json: TypeAlias = bytes | str | Raw
"""Encoded JSON, as encoders, drivers and events hand it over."""

decode_object = msgspec.json.Decoder(dict[str, Raw]).decode


class Hint(typing.NamedTuple):
    """A resolved annotation, or `Any` and the text of one that could not be resolved."""

    annotation: Any
    unresolved: str | None = None


class Decoder:
    """Reads stored JSON as an annotation says; call it with the JSON.

    Raises `DecodeFailed`, naming `where` and the path in the value, for JSON that does not fit.
    """

    __slots__ = ("_annotation", "_decode", "_hint", "_root", "where")

    def __init__(self, hint: Callable[[], Hint], *, where: str, root: str = "$") -> None:
        self.where = where
        self._hint = hint
        self._root = root
        self._annotation: Any = Any
        self._decode: Callable[[Any], Any] | None = None

    def __call__(self, data: Json) -> Any:
        decode = self._decode or self.compile()
        try:
            return decode(data)
        except Exception as error:
            text, path = self.explain(error)
            raise DecodeFailed(
                f"{self.where}: the stored JSON cannot be read as {show(self._annotation)}: {text} at {path}. Let"
                " the annotation accept what is stored: a default for a newer field, a union with the older type",
                where=self.where,
            ) from error

    def compile(self) -> Callable[[Any], Any]:
        """Resolve the annotation now; raises `DecodeFailed` if no JSON can be read as it."""
        if self._decode is not None:
            return self._decode
        hint = self._hint()
        self._annotation = hint.annotation
        try:
            decode = _reader(hint.annotation)
        except Exception as error:
            raise DecodeFailed(
                f"{self.where}: no JSON can be read as {show(hint.annotation)} ({error}). Annotate it with plain"
                " data, a dataclass, an attrs class, a msgspec.Struct or a pydantic model",
                where=self.where,
            ) from error
        if hint.unresolved is not None:
            decode = self._plain_data(decode, hint.unresolved)
        self._decode = decode
        return decode

    def explain(self, error: BaseException | None) -> tuple[str, str]:
        """What a failed read says, and the path of the part that does not fit."""
        if isinstance(error, RecursionError):
            return "it is nested too deeply", self._root
        text = str(error) or type(error).__name__
        found = _PATH.search(text)
        return (text, self._root) if found is None else (text[: found.start()], self._root + found[1])

    def _plain_data(self, decode: Callable[[Any], Any], unresolved: str) -> Callable[[Any], Any]:
        """Read as plain data, and say so once where an object was meant."""

        def plain(data: Json) -> Any:
            value = decode(data)
            if isinstance(value, dict | list):
                self._decode = decode
                warnings.warn(
                    f"{self.where}: the annotation {unresolved} cannot be resolved, so the value is a plain"
                    f" {type(value).__name__}. Define its classes at module level and import them at run time",
                    stacklevel=3,
                )
            return value

        return plain


def decoder_for(annotation: Any, *, where: str = "a stored value") -> Decoder:
    """The decoder of a resolved annotation. `Any`, none at all and unresolved text are read as plain data."""
    return Decoder(lambda: Hint(annotation), where=where)


def result_decoder(fn: Callable[..., Any], *, where: str | None = None) -> Decoder:
    """The decoder of what `fn` returns, by its return annotation; a class returns its instances."""
    place = where or f"result of {getattr(fn, '__qualname__', None) or repr(fn)}"
    if isinstance(fn, type):
        return Decoder(lambda: Hint(fn), where=place)
    hints = Hints(fn)
    return Decoder(lambda: hints.of("return"), where=place)


_PATH = re.compile(r" - at `\$(.*)`$", re.DOTALL)
"""What msgspec appends to an error inside the value."""


# From annotations to readers


def _reader(annotation: Any) -> Callable[[Any], Any]:
    annotation = plain(annotation)
    try:
        # Unions that differ in the order of their members are equal, and here the order may decide.
        return _cached_reader(annotation, typing.get_args(annotation))
    except TypeError:
        # Not hashable, or not readable: only the latter fails again.
        return _new_reader(annotation)


def plain(annotation: Any) -> Any:
    """The annotation to read by: `Any` for those that say nothing of the data."""
    if annotation in (inspect.Parameter.empty, typing.NoReturn, typing.Never, typing.Self, object):
        return Any
    if isinstance(annotation, str | typing.ForwardRef | typing.ParamSpec):
        return Any
    if isinstance(annotation, typing.TypeVar):
        return plain(annotation.__bound__ or Any)
    if typing.get_origin(annotation) in (collections.abc.Awaitable, collections.abc.Coroutine):
        return plain(typing.get_args(annotation)[-1])
    return annotation


def _new_reader(annotation: Any) -> Callable[[Any], Any]:
    if is_model(annotation):
        read = model_reader(annotation)
        return lambda data: read(bytes(data) if isinstance(data, Raw) else data)
    try:
        return msgspec.json.Decoder(annotation, dec_hook=dec_hook).decode
    except Exception:
        members = typing.get_args(annotation)
        if any(map(_names_model, members)):
            # pydantic tells the classes of a union apart by their fields. It is loaded: its models are here.
            validate = by_field_name(sys.modules["pydantic"].TypeAdapter(annotation).validate_json)
            return lambda data: validate(bytes(data) if isinstance(data, Raw) else data)
        if typing.get_origin(annotation) in (typing.Union, types.UnionType):
            return _first_that_fits([_new_reader(plain(member)) for member in members])
        raise


@functools.lru_cache(maxsize=1024)
def _cached_reader(annotation: Any, _members: tuple[Any, ...]) -> Callable[[Any], Any]:
    return _new_reader(annotation)


def _first_that_fits(readers: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """For unions msgspec does not take: the first member stored as this very JSON, else the first that fits."""

    def read_first(data: Json) -> Any:
        stored = decode_any(data)
        fitting = []
        for read in readers:
            try:
                value = read(data)
                if _complete(value) and decode_any(encode_json(value)) == stored:
                    return value
            except Exception:
                continue
            fitting.append(value)
        if not fitting:
            raise ValueError("it fits no member of the union")
        return fitting[0]

    return read_first


def _complete(value: Any) -> bool:
    # msgspec leaves the plain defaults of a dataclass to its class, and does not encode what the instance lacks.
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) and hasattr(value, "__dict__") else ()
    return all(field.name in vars(value) for field in fields)


def _names_model(annotation: Any) -> bool:
    return hasattr(annotation, "__pydantic_validator__") or any(map(_names_model, typing.get_args(annotation)))


# Annotations of a function


class Hints:
    """The annotations of a function, resolved one by one when they are first needed."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        while isinstance(fn, functools.partial):
            fn = fn.func
        fn = inspect.unwrap(fn)
        if not inspect.isroutine(fn):
            fn = inspect.unwrap(type(fn).__call__)
        self._written: dict[str, Any] = dict(getattr(fn, "__annotations__", None) or {})
        self._globals: dict[str, Any] = getattr(fn, "__globals__", {})
        self._locals = _local_names(fn, self._written)
        self._resolved: dict[str, Any] | None = None

    def of(self, name: str) -> Hint:
        """The annotation of a parameter, or of `return`."""
        if self._resolved is None:
            self._resolved = self._resolve()
        if name in self._resolved:
            return Hint(self._resolved[name])
        return Hint(Any, str(self._written[name])) if name in self._written else Hint(Any)

    def _resolve(self) -> dict[str, Any]:
        resolved: dict[str, Any] = {}
        for name, written in self._written.items():
            # Alone, so that a name nobody can resolve does not take the others with it.
            alone = types.SimpleNamespace(__annotations__={name: written})
            try:
                resolved.update(typing.get_type_hints(alone, self._globals, self._locals, include_extras=True))
            except Exception:
                continue
        return resolved


def _local_names(fn: Any, annotations: dict[str, Any]) -> dict[str, Any]:
    """What the annotations of a function name in the one around it: from its closure, and the frame defining it."""
    texts = (str(written) for written in annotations.values() if not isinstance(written, type))
    used = {name for text in texts for name in re.findall(r"[^\W\d]\w*", text)}
    found: dict[str, Any] = {}
    outer, inside, _ = getattr(fn, "__qualname__", "").rpartition(".<locals>.")
    frame = sys._getframe(1) if used and inside else None
    while frame is not None:
        if frame.f_code.co_qualname == outer and frame.f_globals is fn.__globals__:
            found = {name: value for name, value in frame.f_locals.items() if name in used}
            break
        frame = frame.f_back
    names = getattr(getattr(fn, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(fn, "__closure__", None) or (), strict=False):
        try:
            if name in used:
                found[name] = cell.cell_contents
        except ValueError:  # defined around it, not assigned yet
            continue
    return found
