"""Encoding payloads: stored exactly or refused with the place, and digests of inputs."""

from __future__ import annotations

import ast
import functools
import itertools
import math
import re
import subprocess
import sys
import uuid
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from types import SimpleNamespace
from typing import Any

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keiro.codec import MAX_DEPTH, PAYLOAD_LIMIT, decoder_for, digest, encode
from keiro.errors import PayloadRejected

WHERE = "result of step 'charge'"
NAN = math.nan


@dataclass
class Line:
    sku: str
    price: Any


@dataclass
class Order:
    lines: list[Line]
    note: str | None = None


class Point(msgspec.Struct, rename="camel"):
    the_x: float
    the_y: float | msgspec.UnsetType = msgspec.UNSET


class Loose(pydantic.BaseModel):
    amount: float = 0
    text: str = ""
    blob: bytes = b""
    extra: dict[str, Any] = {}


class Weight(float):
    pass


class Colour(StrEnum):
    RED = "red"


class Size(IntEnum):
    BIG = 2


class Odd(Enum):
    NOTHING = NAN


@dataclass
class Detached:
    """Like a row whose session is closed."""

    name: str

    def __getattribute__(self, name: str) -> Any:
        if name == "name":
            raise RuntimeError("gone")
        return super().__getattribute__(name)


def nested(levels: int, wrap: Any, inner: Any = 1) -> Any:
    return functools.reduce(lambda value, _: wrap(value), range(levels), inner)


def in_list(value: Any) -> Any:
    return [value]


def in_dict(value: Any) -> Any:
    return {"a": value}


def own_cycle() -> Any:
    value: dict[str, Any] = {}
    value["items"] = [1, (value,)]
    return value


def rejected(value: Any, **options: Any) -> PayloadRejected:
    with pytest.raises(PayloadRejected) as caught:
        encode(value, where=WHERE, **options)
    return caught.value


@pytest.mark.parametrize(
    ("value", "path", "problem"),
    [
        pytest.param(NAN, "$", "is nan", id="nan"),
        pytest.param([1, None, -math.inf], "$[2]", "is -inf", id="infinity"),
        pytest.param(
            {"order": Order([Line("a", 1.0), Line("b", NAN)])}, "$.order.lines[1].price", "is nan", id="field"
        ),
        pytest.param({"p": Point(NAN)}, "$.p.the_x", "is nan", id="struct"),
        pytest.param([Weight("nan")], "$[0]", "is nan", id="float-subclass"),
        pytest.param({"k": Odd.NOTHING}, "$.k", "is nan", id="enum-value"),
        pytest.param({Size.BIG: NAN, Colour.RED: 1}, "$[2]", "is nan", id="enum-key"),
        pytest.param({"a": Decimal("NaN")}, "$.a", "Decimal('NaN')", id="decimal-nan"),
        pytest.param([Decimal("sNaN12")], "$[0]", "Decimal('sNaN12')", id="decimal-signalling"),
        pytest.param([Decimal("-Infinity")], "$[0]", "Decimal('-Infinity')", id="decimal-infinity"),
        pytest.param([2**80, None, NAN], "$[2]", "is nan", id="nan-beside-a-big-integer"),
        pytest.param({"m": Loose(amount=NAN)}, "$.m.amount", "is nan", id="model-field"),
        pytest.param([Loose(extra={"q": [math.inf]})], "$[0].extra.q[0]", "is inf", id="untyped-model-field"),
        pytest.param("a\0b", "$", "NUL", id="nul"),
        pytest.param({"k": ["\\", "\\\0"]}, "$.k[1]", "NUL", id="nul-after-a-backslash"),
        pytest.param({"a": {"\0": 1}}, "$.a['\\x00']", "a key that holds a NUL", id="nul-key"),
        pytest.param(Loose(text="\0"), "$.text", "NUL", id="nul-in-a-model"),
        pytest.param({"a b": ["\ud800"]}, "$['a b'][0]", "lone surrogate", id="surrogate"),
        pytest.param({"\udfff": 1}, "$['\\udfff']", "a key that holds a lone surrogate", id="surrogate-key"),
        pytest.param({"a": [object()]}, "$.a[0]", "type object", id="type"),
        pytest.param([1, {2, 1j}], "$[1][…]", "type complex", id="type-in-a-set"),
        pytest.param({"ns": SimpleNamespace(a=1)}, "$.ns", "types.SimpleNamespace", id="type-by-module"),
        pytest.param({"a": {(1, 2): 3}}, "$.a[…]", "a key of type tuple", id="key"),
        pytest.param({"a": {None: 3}}, "$.a[…]", "a key of type NoneType", id="none-key"),
        pytest.param([10**5000], "$[0]", "too large for a number", id="integer-of-5000-digits"),
        pytest.param({"m": Loose(blob=b"\xff")}, "$.m", "UnicodeDecodeError", id="model-that-cannot-be-dumped"),
        pytest.param(own_cycle(), "$.items[1][0]", "contains itself", id="cycle"),
        pytest.param([Detached("a"), object()], "$[0]", "cannot be read (RuntimeError: gone)", id="unreadable"),
    ],
)
def test_a_value_that_would_not_come_back_is_refused_with_its_path(value: Any, path: str, problem: str) -> None:
    error = rejected(value)

    assert error.path == path
    assert error.where == WHERE
    assert f"{WHERE} cannot be stored: {path} " in str(error)
    assert problem in str(error)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "null",
        ["NaN", "-Infinity", "Infinity", "sNaN", None],
        "\\u0000",
        "\\\\u0000",
        {"\\u0000": None},
        2**53 + 1,
        -(2**200),
        [None, 2**80],
        10**4299,
        -0.0,
        5e-324,
        sys.float_info.max,
        ["]" * 600, "{" * 600, '\\"[', "\\"],
        ['"', "[" * 2000],
        ["\\", "[" * 2000, '\\"'],
        [[]] * 3000,
    ],
    ids=lambda value: repr(value)[:20],
)
def test_what_only_looks_like_a_refused_value_is_stored_exactly(value: Any) -> None:
    restored = msgspec.json.decode(encode(value, where=WHERE))

    assert restored == value
    assert type(restored) is type(value)


def test_subclasses_of_plain_types_are_stored_as_what_they_are() -> None:
    class Text(str):
        __slots__ = ()

        def __str__(self) -> str:
            return "something else"

    class Count(int):
        pass

    class Blob(bytes):
        pass

    class Id(uuid.UUID):
        pass

    class Day(date):
        pass

    class Moment(datetime):
        pass

    moment = Moment(2024, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
    value = [Text("a"), Count(3), Weight(1.5), Blob(b"\xff"), Id(int=1), Day(2024, 1, 2), moment, Colour.RED, Size.BIG]

    plain = [
        "a",
        3,
        1.5,
        b"\xff",
        uuid.UUID(int=1),
        date(2024, 1, 2),
        datetime.fromisoformat(moment.isoformat()),
        "red",
        2,
    ]
    assert encode(value, where=WHERE) == msgspec.json.encode(plain)


@pytest.mark.parametrize(
    "wrap", [in_list, in_dict, lambda value: {"a": [value, "]}"]}], ids=["lists", "dicts", "strings"]
)
@pytest.mark.parametrize("levels", [MAX_DEPTH + 1, 3000, 100_000])
def test_nesting_beyond_the_limit_is_refused_at_any_depth(wrap: Any, levels: int) -> None:
    error = rejected(nested(levels, wrap))

    assert f"nested deeper than {MAX_DEPTH} levels" in str(error)
    assert len(error.path) < 200


def test_the_deepest_payload_can_be_read_from_deep_in_the_call_stack() -> None:
    value = nested(MAX_DEPTH // 2, lambda inner: {"a": [inner]})
    data = encode(value, where=WHERE)

    def read(depth: int) -> Any:
        return read(depth - 1) if depth else decoder_for(Any)(data)

    assert read(300) == value


def test_a_payload_over_the_limit_is_refused_with_its_size_and_the_limit() -> None:
    assert len(encode("x" * 98, where=WHERE, limit=100)) == 100

    error = rejected("x" * 99, limit=100)

    assert "takes 101 bytes as JSON, and 100 are allowed" in str(error)
    assert f"{PAYLOAD_LIMIT:,} are allowed" in str(rejected(b"x" * 20_000_000))


def test_a_failing_serialiser_of_a_model_is_a_refusal() -> None:
    class Broken(pydantic.BaseModel):
        a: int = 1

        @pydantic.field_serializer("a")
        def serialise(self, value: int) -> int:
            raise RuntimeError("no")

    assert rejected({"x": Broken()}).path == "$.x"


def test_a_payload_changed_by_another_thread_while_it_is_encoded_is_a_refusal() -> None:
    class Shifting(dict[str, Any]):
        """Encodes with a NUL, and has none when it is looked at."""

        answers = itertools.chain(["\0"], itertools.repeat("fine"))

    class Lazy(pydantic.BaseModel):
        @pydantic.model_serializer
        def dump(self) -> Any:
            return next(Shifting.answers)

    assert "holds a NUL character" in str(rejected(Lazy()))


# Properties

_KEYS = st.text(alphabet="ab é'\"\\1", min_size=1, max_size=3)
_PLACES = st.lists(st.integers(0, 3) | _KEYS, max_size=6)


def follow(value: Any, path: str) -> Any:
    for attribute, item in re.findall(r"\.(\w+)|\[('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\d+)\]", path):
        value = value[attribute or ast.literal_eval(item)]
    return value


@given(places=_PLACES, bad=st.sampled_from([NAN, "\0", "\ud800", object()]), filling=st.sampled_from([None, "x", 1.5]))
def test_the_path_of_a_refusal_leads_to_the_refused_part(places: list[int | str], bad: Any, filling: Any) -> None:
    value = bad
    for place in reversed(places):
        value = [*[filling] * place, value, filling] if isinstance(place, int) else {"": filling, place: value}

    error = rejected(value)

    assert follow(value, error.path) is bad


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(), max_size=4), inner, max_size=4)
    ),
    max_leaves=20,
)


def has_no_json(value: Any) -> bool:
    match value:
        case str():
            return "\0" in value or any("\ud800" <= character <= "\udfff" for character in value)
        case float():
            return not math.isfinite(value)
        case list():
            return any(map(has_no_json, value))
        case dict():
            return any(map(has_no_json, [*value, *value.values()]))
    return False


@given(_JSON)
def test_json_data_is_refused_or_comes_back_as_it_was(value: Any) -> None:
    try:
        data = encode(value, where=WHERE)
    except PayloadRejected:
        assert has_no_json(value)
    else:
        assert not has_no_json(value)
        # repr, because 1 == True == 1.0
        assert repr(decoder_for(Any)(data)) == repr(value)


# Digests


def test_a_digest_is_16_hex_digits_of_all_inputs() -> None:
    one = digest((1, "a"), {"b": 2})

    assert one is not None
    assert re.fullmatch("[0-9a-f]{16}", one)
    assert one == digest((1, "a"), {"b": 2})
    assert len({one, digest((1, "a", {"b": 2}), {}), digest((1,), {"b": 2}), digest(("1", "a"), {"b": 2})}) == 4


def test_a_digest_does_not_depend_on_the_order_of_mappings() -> None:
    assert digest(({"a": 1, "b": 2},), {"x": 1, "y": 2}) == digest(({"b": 2, "a": 1},), {"y": 2, "x": 1})


@pytest.mark.parametrize(
    "inputs", [object(), "\ud800", own_cycle(), {(1, 2): 3}], ids=["type", "surrogate", "cycle", "key"]
)
def test_inputs_without_a_json_form_have_no_digest(inputs: Any) -> None:
    assert digest((inputs,), {}) is None
    assert digest((), {"session": inputs}) is None
    assert digest((), {}) is None


def test_a_digest_of_sets_is_the_same_in_every_process() -> None:
    program = """
from keiro.codec import digest
import pydantic
class Tags(pydantic.BaseModel):
    names: set[str]
names = {f"name-{i}" for i in range(20)}
print(digest((names, frozenset(names), Tags(names=names)), {}))
"""
    digests = {
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, check=True, capture_output=True, text=True
        ).stdout
        for seed in ("1", "2", "3")
    }

    assert len(digests) == 1


def test_the_codec_does_not_load_pydantic() -> None:
    program = "import keiro.codec, sys; print('pydantic' in sys.modules)"

    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout

    assert loaded.strip() == "False"
