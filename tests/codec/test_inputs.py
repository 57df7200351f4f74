"""The stored input of a workflow: a call as JSON and back, over changes of the function."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keiro.codec import InputCodec, input_codec
from keiro.errors import DecodeFailed, InvalidCall, KeiroError, PayloadRejected

WHERE = "input of workflow 'fulfil'"


@dataclass
class Order:
    id: str
    prices: list[float]


def codec(fn: Callable[..., Any], skip_first: bool = True) -> InputCodec:
    return input_codec(fn, skip_first=skip_first, where=WHERE)


async def fulfil(run: Any, order: Order, limit: int = 3, *, urgent: bool = False) -> None: ...


async def positional(run: Any, a: Order, b: int = 2, /, c: int = 3) -> None: ...


async def variadic(run: Any, first: int, *rest: Order, flag: bool = False, **others: Order) -> None: ...


ORDER = Order("o-1", [1.5])
STORED = b'{"id":"o-1","prices":[1.5]}'


@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "stored"),
    [
        (fulfil, (ORDER,), {}, b'{"order":%s}' % STORED),
        (fulfil, (ORDER, 7), {"urgent": True}, b'{"order":%s,"limit":7,"urgent":true}' % STORED),
        (fulfil, (), {"limit": 7, "order": ORDER}, b'{"limit":7,"order":%s}' % STORED),
        (positional, (ORDER,), {"c": 5}, b'{"a":%s,"c":5}' % STORED),
        (positional, (ORDER, 1, 2), {}, b'{"a":%s,"b":1,"c":2}' % STORED),
        (variadic, (1,), {}, b'{"first":1}'),
        (variadic, (1, ORDER, ORDER), {"flag": True}, b'{"first":1,"rest":[%s,%s],"flag":true}' % (STORED, STORED)),
        (variadic, (1,), {"x": ORDER}, b'{"first":1,"x":%s}' % STORED),
    ],
)
def test_arguments_are_stored_by_name_and_come_back_as_the_same_call(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], stored: bytes
) -> None:
    inputs = codec(fn)

    assert inputs.encode(args, kwargs) == stored

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = inspect.signature(fn).bind(None, *args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    assert call(*inputs.decode(stored)) == call(args, kwargs)


def test_an_input_is_read_as_the_annotations_say_and_not_as_it_was_passed() -> None:
    async def body(run: Any, pair: tuple[int, int], plain: Any) -> None: ...

    inputs = codec(body)

    assert inputs.decode(inputs.encode(([1, 2], (1, 2)), {})) == (((1, 2), [1, 2]), {})


@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "problem"),
    [
        (fulfil, (), {}, "parameter 'order' is missing"),
        (fulfil, (ORDER, 1, 2), {}, "3 arguments were given by position, at most 2 are taken"),
        (fulfil, (ORDER,), {"order": ORDER}, "parameter 'order' was given twice"),
        (fulfil, (ORDER,), {"urgnt": True}, "there is no parameter 'urgnt'"),
        (fulfil, (ORDER,), {"run": 1}, "there is no parameter 'run'"),
        (positional, (), {"a": ORDER}, "parameter 'a' can only be given by position"),
        (variadic, (1,), {"rest": ORDER}, "'rest' stands for further arguments by position"),
    ],
)
def test_arguments_the_function_does_not_take_are_refused_by_name(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidCall) as caught:
        codec(fn).encode(args, kwargs)

    assert isinstance(caught.value, KeiroError)
    assert isinstance(caught.value, TypeError)
    assert f"{WHERE}: {problem}" in str(caught.value)
    assert "the arguments are (" in str(caught.value)


@pytest.mark.parametrize(
    ("args", "path"),
    [
        ((Order("o", [1.5, float("nan")]),), "$.order.prices[1]"),
        ((object(),), "$.order"),
        ((Order("o", [1.5, "x"]),), "$.order.prices[1]"),  # type: ignore[list-item]
        (("o-1",), "$.order"),
        ((ORDER, "many"), "$.limit"),
    ],
    ids=["nan", "type", "wrong part", "wrong type", "wrong scalar"],
)
def test_what_would_not_be_read_back_is_refused_before_anything_starts(args: tuple[Any, ...], path: str) -> None:
    with pytest.raises(PayloadRejected) as caught:
        codec(fulfil).encode(args, {})

    assert caught.value.where == WHERE
    assert caught.value.path == path
    assert path in str(caught.value)


def test_an_annotation_nothing_can_be_read_as_is_refused_at_the_call() -> None:
    class Connection:
        pass

    async def body(run: Any, connection: Connection) -> None: ...

    with pytest.raises(PayloadRejected, match=r"\$.connection .*Connection"):
        codec(body).encode((5,), {})


def test_an_input_over_the_limit_is_refused() -> None:
    with pytest.raises(PayloadRejected, match="50 are allowed"):
        codec(variadic).encode((1,), {"x": Order("o" * 50, [])}, limit=50)


# Stored by one version of the function, read by another


def read(fn: Callable[..., Any], stored: bytes) -> Any:
    return codec(fn).decode(stored)


def test_a_parameter_added_with_a_default_takes_it_for_old_inputs() -> None:
    async def newer(run: Any, added: int = 9, order: Any = None, *rest: int, more: str = "m") -> None: ...

    assert read(newer, b'{"order":1,"rest":[2]}') == ((9, 1, 2), {"more": "m"})


def test_a_parameter_added_without_a_default_is_an_error_that_says_so() -> None:
    async def newer(run: Any, order: Any, *, added: int) -> None: ...

    with pytest.raises(DecodeFailed, match=r"no value for parameter 'added'.*a default"):
        read(newer, b'{"order":1}')


def test_null_is_a_value_and_absent_is_the_default() -> None:
    async def body(run: Any, a: int | None = 1, b: int | None = 2) -> None: ...

    assert read(body, b'{"a":null}') == ((None, 2), {})


def test_a_stored_name_the_function_no_longer_takes_is_an_error_unless_it_takes_any() -> None:
    async def strict(run: Any, order: Any) -> None: ...

    async def lenient(run: Any, order: Any, **others: Any) -> None: ...

    stored = b'{"order":1,"gone":2}'

    with pytest.raises(DecodeFailed, match=r"holds 'gone', but the function takes \(order\)"):
        read(strict, stored)
    assert read(lenient, stored) == ((1,), {"gone": 2})


@pytest.mark.parametrize(
    ("stored", "text"),
    [
        (
            b'{"order":{"id":"o","prices":["x"]}}',
            r"parameter 'order' of the input of workflow 'fulfil'.*\$\.order\.prices\[0\]",
        ),
        (b'{"order":null}', r"Expected `object`, got `null` at \$\.order"),
        (b"[1]", "must be a JSON object"),
        (b"{", "must be a JSON object"),
    ],
)
def test_a_stored_input_that_does_not_fit_names_parameter_and_place(stored: bytes, text: str) -> None:
    with pytest.raises(DecodeFailed, match=text):
        read(fulfil, stored)


def test_what_cannot_be_resolved_in_one_annotation_leaves_the_others() -> None:
    module = types.ModuleType("typing_only")
    source = "async def body(run, order: Missing, amount: 'Decimal') -> None: ..."
    exec(f"from __future__ import annotations\nfrom decimal import Decimal\n{source}", module.__dict__)

    with pytest.warns(UserWarning, match="parameter 'order' of the input .* Missing cannot be resolved"):
        (order, amount), _ = read(module.body, b'{"order":{},"amount":"1.50"}')

    assert order == {}
    assert amount == module.Decimal("1.50")


# Which parameter is the run


def test_the_run_is_the_first_parameter_and_is_not_stored() -> None:
    class Flow:
        async def execute(self, order: Order) -> None: ...

    async def gathering(*everything: int) -> None: ...

    assert codec(Flow.execute).encode((ORDER,), {}) == b'{"order":%s}' % STORED
    assert codec(Flow().execute, skip_first=False).encode((ORDER,), {}) == b'{"order":%s}' % STORED
    assert codec(functools.partial(fulfil, limit=5)).decode(b'{"order":%s}' % STORED) == (
        (ORDER,),
        {"limit": 5, "urgent": False},
    )
    assert codec(gathering).encode((1, 2), {}) == b'{"everything":[1,2]}'


def test_a_function_that_cannot_take_the_run_is_refused_when_it_is_defined() -> None:
    async def nothing() -> None: ...

    async def by_keyword(*, run: Any) -> None: ...

    for fn in (nothing, by_keyword):
        with pytest.raises(InvalidCall, match="must take the run as its first parameter"):
            codec(fn)


# Sameness


def test_two_inputs_are_the_same_call_in_any_order_of_sets_and_mappings() -> None:
    async def body(run: Any, tags: set[str], table: dict[str, int]) -> None: ...

    inputs = codec(body)
    stored = b'{"tags":["a","b"],"table":{"x":1,"y":2}}'

    assert inputs.same(stored, b'{"table":{"y":2,"x":1},"tags":["b","a"]}')
    assert not inputs.same(stored, b'{"tags":["a","b"],"table":{"x":1,"y":3}}')
    assert not inputs.same(stored, b'{"tags":["a"],"table":{"x":1,"y":2}}')


def test_inputs_that_no_longer_fit_are_compared_as_json() -> None:
    assert codec(fulfil).same(b'{"gone":1,"a":[1]}', b'{"a":[1],"gone":1}')
    assert not codec(fulfil).same(b'{"gone":1}', b'{"gone":2}')


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(
    first=st.integers(),
    rest=st.lists(st.tuples(st.text(), st.integers()).map(lambda pair: Order(pair[0], [float(pair[1] % 1000)]))),
    others=st.dictionaries(st.text(min_size=1).filter(lambda name: name not in ("first", "rest", "flag")), _VALUES),
)
def test_any_call_comes_back_or_is_refused(first: int, rest: list[Order], others: dict[str, Any]) -> None:
    async def body(run: Any, first: int, *rest: Order, flag: bool = False, **others: Any) -> None: ...

    inputs = codec(body)
    try:
        stored = inputs.encode((first, *rest), others)
    except PayloadRejected:
        assert "\\x00" in repr((rest, others))
    else:
        assert inputs.decode(stored) == ((first, *rest), {"flag": False, **others})
        assert inputs.same(stored, msgspec.json.format(stored))
