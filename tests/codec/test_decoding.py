"""Decoding payloads by annotation: what comes back is what the annotation says, or an error that names the place."""

from __future__ import annotations

import collections
import functools
import inspect
import math
import types
import typing
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Any, NamedTuple, TypedDict
from uuid import UUID

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keiro.codec import decoder_for, encode, result_decoder
from keiro.errors import DecodeFailed, PayloadRejected

WHERE = "result of step 'charge'"


@dataclass
class Small:
    x: int


@dataclass
class Large:
    x: int
    y: int = 0


@dataclass
class Tree:
    value: int
    children: list[Tree] = field(default_factory=list)


class Colour(StrEnum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Half(Enum):
    HALF = 0.5


class Text(str):
    __slots__ = ()


class Pair(NamedTuple):
    left: int
    right: str


class Options(TypedDict, total=False):
    size: int


class Tagged(msgspec.Struct, tag=True):
    when: datetime


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="forbid")

    number: int = pydantic.Field(validation_alias="Number", serialization_alias="n")
    when: datetime = datetime(2024, 1, 1, tzinfo=UTC)
    tags: set[str] = {"a"}

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def double(self) -> int:
        return 2 * self.number


class Other(pydantic.BaseModel):
    text: str


Names = pydantic.RootModel[list[str]]


class Duck:
    """Reads and dumps like a model, and knows nothing of pydantic."""

    def __init__(self, sound: str) -> None:
        self.sound = sound

    def __repr__(self) -> str:
        return f"Duck({self.sound!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Duck) and other.sound == self.sound

    __hash__ = None  # type: ignore[assignment]

    def model_dump(self, mode: str) -> Any:
        assert mode == "json"
        return {"sound": self.sound}

    @classmethod
    def model_validate(cls, data: Any) -> Duck:
        return cls(data["sound"])


class Foreign:
    pass


def round_trip(value: Any, annotation: Any) -> Any:
    return decoder_for(annotation, where=WHERE)(encode(value, where=WHERE))


def refused(annotation: Any, data: bytes) -> DecodeFailed:
    with pytest.raises(DecodeFailed) as caught:
        decoder_for(annotation, where=WHERE)(data)
    return caught.value


BOUND = typing.TypeVar("BOUND", bound=Small)
ONE_OF = typing.TypeVar("ONE_OF", int, str)


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (Small, Small(1)),
        (Tree, Tree(1, [Tree(2), Tree(3, [Tree(4)])])),
        (Tagged, Tagged(datetime(2024, 1, 1, tzinfo=UTC))),
        (Pair, Pair(1, "a")),
        (Options, {"size": 1}),
        (list[Small] | None, [Small(1)]),
        (dict[UUID, tuple[int, ...]], {UUID(int=1): (1, 2)}),
        (dict[Colour, set[int]], {Colour.RED: {1}}),
        (Level, Level.HIGH),
        (Text, Text("a")),
        (collections.OrderedDict[int, Small], collections.OrderedDict({1: Small(1)})),
        (collections.Counter, collections.Counter("aab")),
        (Iterable[Small], [Small(1)]),
        (typing.Awaitable[Small], Small(1)),
        (BOUND, Small(1)),
        (ONE_OF, "a"),
        (object, {"a": [1]}),
        (typing.NoReturn, None),
        (None, None),
        (Small | Large, Small(1)),
        (Small | Large, Large(1, 0)),
        (Large | Small, Small(1)),
        (Large | Small | None, None),
        (datetime | str, "2024"),
        (datetime | str, datetime(2024, 1, 1, tzinfo=UTC)),
        (Strict, Strict(Number=1)),
        (list[Strict], [Strict(Number=1)]),
        (Strict | None, None),
        (Strict | Other, Other(text="a")),
        (dict[str, Strict | Other], {"a": Strict(Number=1), "b": Other(text="b")}),
        (Strict | int, 5),
        (Names, Names(["a"])),
        (Duck, Duck("quack")),
        (dict[str, Duck], {"a": Duck("quack")}),
    ],
    ids=str,
)
def test_a_value_comes_back_as_its_annotation_says(annotation: Any, value: Any) -> None:
    restored = round_trip(value, annotation)

    assert restored == value
    assert type(restored) is type(value)


@pytest.mark.parametrize("annotation", [Any, "Unresolved", inspect.Parameter.empty, typing.Self])
def test_without_an_annotation_the_value_is_plain_data(annotation: Any) -> None:
    assert round_trip({"a": (1, Small(2))}, annotation) == {"a": [1, {"x": 2}]}


def test_members_of_a_union_are_told_apart_by_what_they_are_stored_as_in_the_order_written() -> None:
    @dataclass
    class Twin:
        x: int

    assert round_trip(Twin(1), Small | Twin) == Small(1)
    assert round_trip(Twin(1), Twin | Small) == Twin(1)
    # A field was added since: nothing is stored as this JSON any more, and the first that reads it does.
    assert decoder_for(Large | str)(b'{"x":1}') == Large(1, 0)


@pytest.mark.parametrize(
    ("annotation", "data", "path", "text"),
    [
        (
            Tree,
            b'{"value":1,"children":[{"value":2,"children":[{"value":"x"}]}]}',
            "$.children[0].children[0].value",
            "`int`",
        ),
        (Tree, b'{"children":[]}', "$", "missing required field `value`"),
        (None, b"3", "$", "Expected `null`"),
        (Strict, b'{"number":"x"}', "$", "valid integer"),
        (dict[str, list[Strict]], b'{"a":[{"number":"x"}]}', "$[...][0]", "valid integer"),
        (Small | Large, b"[1]", "$", "fits no member of the union"),
        (Foreign, b"1", "$", "Foreign cannot be built from JSON"),
        (Callable[[], int], b"1", "$", "cannot be built from JSON"),
        (Text, b"1", "$", "Expected `str`"),
        (Small, b"{", "$", "truncated"),
        (Any, b"[" * 100_000, "$", "nested too deeply"),
    ],
)
def test_json_that_does_not_fit_names_the_place(annotation: Any, data: bytes, path: str, text: str) -> None:
    error = refused(annotation, data)

    assert error.where == WHERE
    assert str(error).startswith(WHERE)
    assert text in str(error)
    assert f" at {path}. " in str(error)


@pytest.mark.parametrize("annotation", [Half, list[Small | Large], typing.ClassVar[int]])
def test_an_annotation_nothing_can_be_read_as_is_an_error_before_there_is_a_value(annotation: Any) -> None:
    decoder = decoder_for(annotation, where=WHERE)

    with pytest.raises(DecodeFailed, match="no JSON can be read as"):
        decoder.compile()


def test_a_decoder_reads_text_bytes_and_raw_json() -> None:
    for annotation in (Small, Strict, Small | Large, Strict | Other):
        decoder = decoder_for(annotation)
        data = b'{"x":1,"number":1,"text":"t"}' if annotation in (Small, Small | Large) else b'{"number":1}'
        assert decoder(data) == decoder(data.decode()) == decoder(msgspec.Raw(data))


# Properties

_OFFSETS = st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes)))
_SCALARS: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (type(None), st.none()),
    (bool, st.booleans()),
    (int, st.integers()),
    (float, st.floats()),
    (str, st.text(st.characters())),
    (bytes, st.binary()),
    (UUID, st.uuids()),
    (Decimal, st.decimals()),
    (datetime, st.datetimes(timezones=st.none() | _OFFSETS)),
    (date, st.dates()),
    (time, st.times(timezones=st.none() | _OFFSETS)),
    (timedelta, st.timedeltas()),
    (Colour, st.sampled_from(Colour)),
    (Level, st.sampled_from(Level)),
]
_KEYS = [pair for pair in _SCALARS if pair[0] in (str, int, UUID, Colour, Level, date)]


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def build(pair: Any, key: Any, kind: str) -> Any:
        annotation, values = pair
        match kind:
            case "list":
                return list[annotation], st.lists(values, max_size=3)
            case "tuple":
                return tuple[annotation, ...], st.lists(values, max_size=3).map(tuple)
            case "optional":
                return annotation | None, st.none() | values
            case "set":
                return set[key[0]], st.sets(key[1], max_size=3)
        return dict[key[0], annotation], st.dictionaries(key[1], values, max_size=3)

    kinds = st.sampled_from(["list", "tuple", "optional", "set", "dict"])
    return st.builds(build, inner, st.sampled_from(_KEYS), kinds)


_TYPED = st.recursive(st.sampled_from(_SCALARS), _containers, max_leaves=5)
_ANNOTATED = _TYPED.flatmap(lambda pair: st.tuples(st.just(pair[0]), pair[1]))


def has_no_json(value: Any) -> bool:
    match value:
        case str():
            return "\0" in value or any("\ud800" <= character <= "\udfff" for character in value)
        case float() | Decimal():
            return not math.isfinite(value) if isinstance(value, float) else not value.is_finite()
        case list() | tuple() | set():
            return any(map(has_no_json, value))
        case dict():
            return any(map(has_no_json, [*value, *value.values()]))
    return False


@given(_ANNOTATED)
def test_an_annotated_value_is_refused_or_comes_back_equal(annotated: tuple[Any, Any]) -> None:
    annotation, value = annotated
    try:
        restored = round_trip(value, annotation)
    except PayloadRejected:
        assert has_no_json(value)
    else:
        assert not has_no_json(value)
        assert restored == value
        assert type(restored) is type(value)


@given(
    data=st.binary(max_size=30), annotation=st.sampled_from([Any, Small, Tree, Strict, Small | Large, list[int], Text])
)
def test_no_stored_bytes_crash_a_decoder(data: bytes, annotation: Any) -> None:
    try:
        decoder_for(annotation)(data)
    except DecodeFailed:
        pass


# What a function returns


def later() -> DefinedLater:
    raise AssertionError


@dataclass
class DefinedLater:
    z: int


def test_a_class_may_be_defined_after_the_function_that_returns_it() -> None:
    assert result_decoder(later)(b'{"z":1}') == DefinedLater(1)


def test_classes_around_a_local_function_are_found() -> None:
    @dataclass
    class Local:
        z: int

    def local() -> list[Local]:
        raise AssertionError

    decoder = result_decoder(local)

    assert decoder(b'[{"z":1}]') == [Local(1)]


def test_classes_of_a_closure_are_found_wherever_its_function_is_used() -> None:
    def make() -> Callable[[], Any]:
        @dataclass
        class Local:
            z: int

        def local() -> Local:
            return Local(1)

        return local

    local = make()

    assert result_decoder(local)(b'{"z":1}') == local()


def test_names_of_a_caller_are_not_taken_for_those_of_the_definition() -> None:
    DefinedLater = Small  # noqa: F841

    assert type(result_decoder(later)(b'{"z":1}')) is not Small


class Callables:
    async def method(self) -> Small:
        raise AssertionError

    def __call__(self) -> Small:
        raise AssertionError


def wrapped() -> Callable[..., Any]:
    def original() -> Small:
        raise AssertionError

    @functools.wraps(original)
    def wrapper(*args: Any) -> Any:
        raise AssertionError

    return wrapper


def promising() -> Awaitable[Small]:
    raise AssertionError


@pytest.mark.parametrize(
    "fn",
    [Callables().method, Callables(), functools.partial(Callables().method), wrapped(), promising, Small],
    ids=["method", "callable object", "partial", "wrapped", "awaitable", "class"],
)
def test_every_kind_of_callable_has_its_return_annotation(fn: Callable[..., Any]) -> None:
    assert result_decoder(fn)(b'{"x":1}') == Small(1)


@pytest.mark.parametrize("fn", [len, lambda: 1, functools.partial(print)], ids=["builtin", "lambda", "partial"])
def test_a_callable_without_annotation_returns_plain_data(fn: Callable[..., Any]) -> None:
    assert result_decoder(fn)(b'{"x":1}') == {"x": 1}


@pytest.fixture
def typing_only() -> types.ModuleType:
    """A module with a name that only type checkers import, and one that is there."""
    module = types.ModuleType("typing_only")
    source = """
from __future__ import annotations
from decimal import Decimal
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from elsewhere import Order
def charge(order: Order, amount: Decimal) -> Order: ...
"""
    exec(source, module.__dict__)
    return module


def test_an_annotation_that_cannot_be_resolved_is_reported_once_and_read_as_plain_data(
    typing_only: types.ModuleType,
) -> None:
    decoder = result_decoder(typing_only.charge, where=WHERE)

    assert decoder(b"1") == 1
    with pytest.warns(UserWarning, match=f"{WHERE}: the annotation Order cannot be resolved.*plain dict"):
        assert decoder(b'{"id":1}') == {"id": 1}
    assert decoder(b'{"id":2}') == {"id": 2}
