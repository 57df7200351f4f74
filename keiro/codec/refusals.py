"""Why a value cannot be stored: a walk to the first part without an exact JSON form. It explains, it never decides."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import uuid
from collections.abc import Iterator
from decimal import Decimal
from enum import Enum
from typing import Any, Final, TypeAlias

import msgspec

from keiro.codec.hooks import enc_hook, encode_json, show

Problem: TypeAlias = tuple[str, str]
"""What is wrong with a part of a value, and what to do about it."""

_Parts: TypeAlias = Iterator[tuple[str, Any, Problem | None]]

_PLAIN_DATA: Final = "Pass plain data, a dataclass, an attrs class, a msgspec.Struct or a pydantic model"

_UNSTORABLE = re.compile("[\ud800-\udfff\0]").search


def find(value: Any, max_depth: int) -> tuple[str, str, str] | None:
    """Path, problem and advice for the first part of `value` that cannot be stored; None if all of it can.

    It keeps its own stack, so no depth is a danger.
    """
    trail: list[str] = []
    above: dict[int, Any] = {}
    stack: list[_Parts] = [iter([("$", value, None)])]
    while stack:
        try:
            step = next(stack[-1], None)
        except Exception as error:
            return _path(trail), f"cannot be read ({_say(error)})", "Pass a copy of the data"
        if step is None:
            stack.pop()
            if above:
                above.popitem()
                trail.pop()
            continue
        place, node, problem = step
        trail.append(place)
        if problem is None and id(node) in above:
            problem = "contains itself", "JSON has no references: let the parts name each other by an id"
        if problem is None and len(above) >= max_depth:
            problem = (
                f"is nested deeper than {max_depth} levels",
                "Pass a flatter shape, such as a list of parts",
            )
        parts: _Parts | None = None
        if problem is None:
            try:
                parts = _parts(node)
                problem = None if parts is not None else _leaf_problem(node)
            except Exception as error:
                problem = f"is of type {show(type(node))} and cannot be encoded ({_say(error)})", _PLAIN_DATA
        if problem is not None:
            return _path(trail), *problem
        if parts is None:
            trail.pop()
        else:
            above[id(node)] = node
            stack.append(parts)
    return None


class _Numbers:
    """Part of a model's own values: looked at for numbers only, the model itself brings the rest into JSON."""

    def __init__(self, within: Any) -> None:
        self.within = within


def _parts(node: Any) -> _Parts | None:
    """What a container holds, as it is encoded; None for anything else."""
    kind = type(node)
    match node:
        case Enum():
            return iter([("", node.value, None)])
        case None | str() | int() | float() | bytes():
            return None
        case dict():
            return ((_member(key), item, _key_problem(key)) for key, item in node.items())
        case list() | tuple():
            return ((f"[{index}]", item, None) for index, item in enumerate(node))
        case set() | frozenset():
            return (("[…]", item, None) for item in node)
        case msgspec.Struct():
            names: Any = node.__struct_fields__
        case _ if dataclasses.is_dataclass(kind):
            names = [field.name for field in dataclasses.fields(kind)]
        case _ if hasattr(kind, "__attrs_attrs__"):
            names = [attribute.name for attribute in kind.__attrs_attrs__]
        case _ if hasattr(kind, "__pydantic_validator__"):
            # Its JSON shows what has no JSON form, its own values the numbers that the JSON lacks.
            return iter([("", enc_hook(node), None), ("", _Numbers(node.model_dump(round_trip=True)), None)])
        case _ if hasattr(kind, "model_dump"):
            return iter([("", enc_hook(node), None)])
        case _Numbers():
            parts = _parts(node.within)
            return None if parts is None else ((place, _Numbers(item), None) for place, item, _ in parts)
        case _:
            return None
    values = ((name, getattr(node, name, msgspec.UNSET)) for name in names)
    return ((f".{name}", item, None) for name, item in values if item is not msgspec.UNSET)


def _leaf_problem(node: Any) -> Problem | None:
    within = node.within if isinstance(node, _Numbers) else node
    match within:
        case str() if found := _UNSTORABLE(within):
            if found[0] == "\0":
                return "holds a NUL character, which databases refuse in text", "Remove it, or pass bytes"
            return "holds a lone surrogate, which has no UTF-8 form", "Pass the bytes the text was read from"
        case float() if not math.isfinite(within):
            return f"is {float.__repr__(within)}", "Pass None or a string: JSON has no such number"
        case Decimal() if not within.is_finite():
            return f"is Decimal('{within}')", "Pass None or a string: JSON has no such number"
    if within is not node:
        return None
    try:
        encode_json(node)
    except TypeError:
        if inspect.isawaitable(node):
            return f"is of type {show(type(node))}", "Await it; a step that returns one must be an `async def` itself"
        return f"is of type {show(type(node))}, which has no JSON form", _PLAIN_DATA
    except ValueError:
        return (
            f"is of type {show(type(node))} and too large for a number in JSON",
            "Pass it as bytes or a string",
        )
    return None


def _key_problem(key: Any) -> Problem | None:
    if isinstance(key, str) and (problem := _leaf_problem(key)):
        return f"has a key that {problem[0]}", problem[1]
    try:
        encode_json({key: None})
    except Exception:
        return f"has a key of type {show(type(key))}", "Use str, int, UUID or enum keys"
    return None


def _member(key: Any) -> str:
    match key:
        case Enum():
            return f"[{key!s}]"
        case str() if key.isidentifier():
            return f".{key}"
        case str():
            return f"[{_clip(ascii(str.__str__(key)), 60)}]"
        case int() | uuid.UUID():
            return f"[{_clip(str(key), 60)}]"
    return "[…]"


def _clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _path(trail: list[str]) -> str:
    return "".join(trail if len(trail) <= 40 else [*trail[:20], "…", *trail[-10:]])


def _say(error: Exception) -> str:
    return _clip(" ".join(f"{type(error).__name__}: {error}".split()), 200)
