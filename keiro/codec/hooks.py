"""The types msgspec leaves to us, in both directions: pydantic models and subclasses of the plain types.

pydantic is recognised by what its models can do and never imported: it is there if its models are.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import typing
import uuid
from collections.abc import Callable
from datetime import date, datetime
from typing import Any

import msgspec


def enc_hook(value: Any) -> Any:
    """The JSON form of a value msgspec does not know; raises TypeError if it has none."""
    kind = type(value)
    if hasattr(kind, "__pydantic_validator__"):
        # By field name and without computed fields: validation takes that back, whatever the model's aliases are.
        return value.model_dump(mode="json", by_alias=False, round_trip=True)
    if hasattr(kind, "model_dump"):
        return value.model_dump(mode="json")
    # The base class's own methods: a subclass may override how it is converted.
    match value:
        case str():
            return str.__str__(value)
        case int():
            return int.__int__(value)
        case float():
            return float.__float__(value)
        case bytes():
            return bytes.__bytes__(value)
        case uuid.UUID():
            return uuid.UUID(int=value.int)
        case datetime():
            day, time = (value.year, value.month, value.day), (value.hour, value.minute, value.second)
            return datetime(*day, *time, value.microsecond, tzinfo=value.tzinfo, fold=value.fold)
        case date():
            return date(value.year, value.month, value.day)
    raise TypeError(f"values of type {show(kind)} have no JSON form")


def _values_hook(value: Any) -> Any:
    # A model's JSON has None for NaN in untyped fields, and sets in hash order, which differs between processes:
    # of its values, the numbers can be searched and msgspec sorts the sets.
    if hasattr(type(value), "__pydantic_validator__"):
        return value.model_dump(mode="python", by_alias=False, round_trip=True)
    return enc_hook(value)


encode_json = msgspec.json.Encoder(enc_hook=enc_hook).encode
encode_sorted = msgspec.json.Encoder(enc_hook=_values_hook, order="deterministic").encode
encode_binary = msgspec.msgpack.Encoder(enc_hook=_values_hook).encode
decode_any = msgspec.json.Decoder().decode


def dec_hook(kind: Any, value: Any) -> Any:
    """Build a type msgspec does not know from plain data; it adds the path to a TypeError or ValueError."""
    if is_model(kind):
        return model_reader(kind)(encode_json(value))
    origin = typing.get_origin(kind) or kind
    members = typing.get_args(kind)
    if origin is collections.abc.Iterable:
        return _convert(value, list[members[0] if members else Any])  # type: ignore[misc]
    if isinstance(origin, type):
        for base in (str, int, float, bytes, dict, list):
            if issubclass(origin, base):
                return origin(_convert(value, base[members] if members else base))  # type: ignore[index]
        try:
            if isinstance(value, origin):
                return value
        except TypeError:  # a protocol instances cannot be checked against
            pass
    raise TypeError(f"{show(kind)} cannot be built from JSON")


def _convert(value: Any, kind: Any) -> Any:
    return msgspec.convert(value, kind, str_keys=True, dec_hook=dec_hook)


def is_model(annotation: Any) -> bool:
    """Whether this is the class of a pydantic model, or of something that reads like one."""
    return isinstance(annotation, type) and hasattr(annotation, "model_validate")


@functools.lru_cache(maxsize=1024)
def model_reader(model: Any) -> Callable[[bytes | str], Any]:
    """How a model is read from JSON."""
    if not hasattr(model, "model_validate_json"):
        return lambda data: model.model_validate(decode_any(data))
    # From JSON, not from data: a model in strict mode takes only that of its own dump back.
    return by_field_name(model.model_validate_json)


def by_field_name(validate: Callable[..., Any]) -> Callable[[bytes | str], Any]:
    """A pydantic validation that takes fields by their names, as they are dumped, besides their aliases."""
    if "by_name" not in inspect.signature(validate).parameters:  # pydantic before 2.11
        return validate
    return functools.partial(validate, by_alias=True, by_name=True)


def show(annotation: Any) -> str:
    """A type as the reader of a message knows it."""
    if isinstance(annotation, type) and typing.get_origin(annotation) is None:
        bare = annotation.__module__ in ("builtins", "__main__")
        return annotation.__qualname__ if bare else f"{annotation.__module__}.{annotation.__qualname__}"
    return str(annotation).replace("typing.", "")
