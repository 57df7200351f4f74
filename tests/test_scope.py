"""What a body calls: names, scopes, map, and the way to the driver. The driver here only writes down its calls."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Coroutine
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

import pytest

from keiro.definition import Step, step, workflow
from keiro.errors import InvalidCall, InvalidName, RunSealed
from keiro.retry import Retry
from keiro.run import ScopedRun, WorkflowRun, bind, fold, new_events
from tests.aggregates import RUN, Basket, history
from tests.conftest import spelled


class Recorder:
    """A driver that notes every call at once and runs steps without recording them."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.info = {"attempt": 1}

    @property
    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    def step(
        self,
        step: Step,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        name: str,
        retry: Retry | None,
        timeout: float | None,
    ) -> Coroutine[Any, Any, Any]:
        self.calls.append((name, step, args, kwargs, retry, timeout))
        return self._run(step, args, kwargs)

    def apply(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Coroutine[Any, Any, Any]:
        self.calls.append((name, method, args, kwargs))
        return self._run(lambda: None, (), {})

    async def _run(self, step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        await asyncio.sleep(0)
        value = step(*args, **kwargs)
        return await value if asyncio.iscoroutine(value) else value

    def now_ms(self) -> int:
        return 1_700_000_000_123

    def random(self) -> float:
        return 0.25

    def uuid4(self) -> UUID:
        return UUID(int=1)


@pytest.fixture
def driver() -> Recorder:
    return Recorder()


@pytest.fixture
def basket(driver: Recorder) -> Basket:
    run = fold(Basket, history())
    bind(run, driver)
    return run


@step(retry=Retry(3), timeout=5)
async def charge(amount: int, currency: str = "eur") -> str:
    return f"{amount} {currency}"


def plain(amount: int) -> int:
    return amount + 1


# Steps


async def test_a_step_goes_to_the_driver_with_its_arguments(basket: Basket, driver: Recorder) -> None:
    result = await basket.step(charge, 5, currency="usd")

    assert result == "5 usd"
    assert driver.calls == [("charge", charge, (5,), {"currency": "usd"}, None, None)]


async def test_a_plain_function_is_a_step_too(basket: Basket, driver: Recorder) -> None:
    assert await basket.step(plain, 5) == 6
    assert driver.names == ["plain"]
    assert isinstance(driver.calls[0][1], Step)


async def test_the_name_is_reserved_at_the_call_not_at_the_await(basket: Basket, driver: Recorder) -> None:
    first, second = basket.step(plain, 1, key="first"), basket.step(plain, 2, key="second")

    assert driver.names == ["first", "second"]
    assert asyncio.iscoroutine(first)
    assert [await second, await first] == [3, 2]


async def test_the_options_of_one_call_replace_those_of_the_step(basket: Basket, driver: Recorder) -> None:
    retry = Retry(9)

    await basket.step(charge, 5, key="again", retry=retry, timeout=timedelta(minutes=1))
    await basket.step(charge, 5, timeout=2)

    assert driver.calls[0] == ("again", charge, (5,), {}, retry, 60.0)
    assert driver.calls[1][4:] == (None, 2.0)


@pytest.mark.parametrize("key", ["", "a:b", "a#2", "a/b", "__workflow_x", "\0", "\ud800", "x" * 513, 5])
def test_a_key_that_cannot_name_a_step_is_refused(key: Any, basket: Basket, driver: Recorder) -> None:
    with pytest.raises(InvalidName):
        basket.step(plain, 1, key=key)
    with pytest.raises(InvalidName):
        basket.scope(key)

    assert driver.calls == []


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), True, "1"])
def test_a_timeout_that_is_no_duration_is_refused(timeout: Any, basket: Basket) -> None:
    with pytest.raises(InvalidCall, match="timeout of step 'charge'"):
        basket.step(charge, 1, timeout=timeout)


def test_what_cannot_be_called_is_no_step(basket: Basket) -> None:
    with pytest.raises(InvalidCall, match="must be a function"):
        basket.step("charge")  # type: ignore[call-overload]


# Scopes


async def test_a_scope_puts_its_key_before_names(basket: Basket, driver: Recorder) -> None:
    outer = basket.scope("order-1")
    inner = outer.scope("line 2")

    await outer.step(plain, 1)
    await inner.step(plain, 1)
    await inner.step(plain, 1, key="renamed")
    await inner.apply(Basket.add, "sku-1")
    await basket.step(plain, 1)

    assert driver.names == [
        "order-1/plain",
        "order-1/line 2/plain",
        "order-1/line 2/renamed",
        "apply:order-1/line 2/add",
        "plain",
    ]


def test_a_scope_shows_the_run_it_is_a_view_of(basket: Basket, driver: Recorder) -> None:
    scope = basket.scope("a").scope("b")

    assert (scope.id, scope.run_id, scope.key, scope.workflow, scope.round) == (RUN, RUN, "7", "basket", 0)
    assert (scope.version, scope.info) == (1, driver.info)
    assert scope.items is basket.items
    assert repr(scope) == "<scope a/b/ of wf:basket-7>"
    assert isinstance(copy.copy(scope), ScopedRun)
    with pytest.raises(AttributeError, match="nothing"):
        scope.nothing  # noqa: B018
    with pytest.raises(AttributeError):
        scope.items = []


# Deterministic values


@pytest.mark.parametrize("scoped", [False, True])
def test_values_come_from_the_driver(scoped: bool, basket: Basket, driver: Recorder) -> None:
    run = basket.scope("a") if scoped else basket

    assert run.now() == datetime(2023, 11, 14, 22, 13, 20, 123_000, tzinfo=UTC)
    assert run.random() == 0.25
    assert run.uuid4() == UUID(int=1)
    assert run.info == driver.info


# Commands in a body


async def test_apply_sends_the_command_as_a_step(basket: Basket, driver: Recorder) -> None:
    await basket.apply(Basket.add, "sku-1", quantity=2)
    await basket.apply(basket.replace_all, ["a"])

    assert driver.calls == [
        ("apply:add", Basket.add, ("sku-1",), {"quantity": 2}),
        ("apply:replace_all", Basket.replace_all, (["a"],), {}),
    ]


@pytest.mark.parametrize("method", [Basket.execute, charge, WorkflowRun.step, "add", None], ids=spelled)
def test_apply_refuses_what_is_no_command(method: Any, basket: Basket, driver: Recorder) -> None:
    with pytest.raises(InvalidCall, match="Basket"):
        basket.apply(method)

    assert driver.calls == []


def test_a_direct_call_in_a_body_says_what_to_write(basket: Basket) -> None:
    for call in (lambda: basket.add("x"), lambda: Basket.add(basket, "x"), lambda: basket.scope("a").add("x")):
        with pytest.raises(InvalidCall, match=r"would not be recorded: write `await self\.apply\(Basket\.add,"):
            call()
    with pytest.raises(InvalidCall, match="would not be recorded"):
        basket.replace_all(["x"])
    with pytest.raises(InvalidCall, match="would not be recorded"):
        basket.trigger_event(Basket.ItemAdded, sku="x")  # type: ignore[attr-defined]

    assert (basket.items, basket.pending_events) == ([], [])


def test_a_command_runs_on_a_copy_that_the_driver_does_not_hear_of(basket: Basket) -> None:
    with pytest.raises(InvalidCall, match="on the instance of a body, not on a copy"):
        new_events(basket, Basket.add, ("x",), {})

    twin = copy.deepcopy(basket)
    [added] = new_events(twin, Basket.add, ("x",), {})

    assert added == Basket.ItemAdded(sku="x")  # type: ignore[attr-defined]
    assert (basket.items, twin.items) == ([], ["x"])


def test_the_link_to_the_driver_is_no_part_of_the_aggregate(basket: Basket) -> None:
    assert basket == fold(Basket, history())
    assert vars(basket) == {"items": []}
    with pytest.raises(InvalidCall, match="only inside a running body"):
        copy.deepcopy(basket).step(plain, 1)


# Map


async def test_map_runs_items_in_scopes_and_returns_results_in_their_order(basket: Basket, driver: Recorder) -> None:
    async def ship(scope: ScopedRun, amount: int) -> str:
        for _ in range(10 - amount):
            await asyncio.sleep(0)
        return await scope.step(charge, amount)

    results = await basket.map(ship, iter([1, 5, 3]), key=lambda amount: f"order-{amount}")

    assert results == ["1 eur", "5 eur", "3 eur"]
    assert driver.names == ["order-5/charge", "order-3/charge", "order-1/charge"]


async def test_map_without_keys_names_items_by_function_and_index(basket: Basket, driver: Recorder) -> None:
    async def ship(scope: ScopedRun, amount: int, times: int = 1) -> int:
        return await scope.step(plain, amount * times)

    assert await basket.scope("day").map(ship, [1, 2]) == [2, 3]
    assert await basket.map(partial(ship, times=2), [1]) == [3]
    assert await basket.map(lambda scope, amount: scope.step(plain, amount), [1]) == [2]

    assert driver.names == ["day/ship-0/plain", "day/ship-1/plain", "ship-0/plain", "<lambda>-0/plain"]


async def test_map_of_nothing_is_nothing(basket: Basket) -> None:
    async def never(scope: ScopedRun, item: int) -> None:
        raise AssertionError

    assert await basket.map(never, []) == []


@pytest.mark.parametrize(("limit", "most"), [(1, 1), (3, 3), (None, 8), (100, 8)])
async def test_map_runs_at_most_so_many_at_a_time(limit: int | None, most: int, basket: Basket) -> None:
    running = highest = 0
    started: list[int] = []

    async def busy(scope: ScopedRun, item: int) -> int:
        nonlocal running, highest
        started.append(item)
        running += 1
        highest = max(highest, running)
        for _ in range(3 + item % 3):
            await asyncio.sleep(0)
        running -= 1
        return item

    assert await basket.map(busy, range(8), limit=limit) == list(range(8))
    assert highest == most
    assert started == list(range(8))


@pytest.mark.parametrize("limit", [None, 2])
@pytest.mark.parametrize("error", [ValueError("first"), RunSealed("sealed"), ExceptionGroup("own", [OSError()])])
async def test_map_raises_the_first_exception_plainly_when_the_others_have_ended(
    error: BaseException, limit: int | None, basket: Basket
) -> None:
    ended: list[int] = []

    async def fails(scope: ScopedRun, item: int) -> None:
        try:
            if item == 1:
                raise error
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(item)

    with pytest.raises(type(error)) as caught:
        await basket.map(fails, range(4), limit=limit)

    assert caught.value is error
    assert error.__context__ is None
    assert sorted(ended) == ([0, 1] if limit else [0, 1, 2, 3])
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_map_that_is_cancelled_cancels_its_items(basket: Basket) -> None:
    cancelled: list[int] = []
    waiting = asyncio.Event()

    async def waits(scope: ScopedRun, item: int) -> None:
        try:
            waiting.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(item)
            raise

    task = asyncio.create_task(basket.map(waits, range(3), limit=2))
    await waiting.wait()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert sorted(cancelled) == [0, 1]


async def test_map_does_not_take_a_cancelled_item_for_a_result(basket: Basket) -> None:
    async def gives_up(scope: ScopedRun, item: int) -> int:
        if item == 1:
            raise asyncio.CancelledError
        return item

    with pytest.raises(asyncio.CancelledError):
        await basket.map(gives_up, range(3))


async def test_map_wants_an_async_function(basket: Basket) -> None:
    with pytest.raises(InvalidCall, match=r"map: <lambda> returned 3: it must be an async function"):
        await basket.map(lambda scope, item: plain(item), [2])


def test_map_over_a_step_says_what_to_write(basket: Basket) -> None:
    @step
    def weigh(item: int) -> int:
        return item

    with pytest.raises(InvalidCall, match=r"run\.map\(lambda scope, item: scope\.step\(weigh, item\), items\)"):
        basket.map(weigh, [1, 2])  # type: ignore[arg-type]


async def test_map_wants_a_key_of_its_own_for_each_item(basket: Basket) -> None:
    async def ship(scope: ScopedRun, item: str) -> None: ...

    with pytest.raises(InvalidCall, match="items 0 and 2 have the same key 'a'"):
        basket.map(ship, ["a", "b", "a"], key=lambda item: item)
    with pytest.raises(InvalidName):
        basket.map(ship, ["a"], key=lambda item: 5)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("limit", [0, -1, True, 1.5])
def test_a_limit_is_a_whole_number_from_one(limit: Any, basket: Basket) -> None:
    async def ship(scope: ScopedRun, item: str) -> None: ...

    with pytest.raises(InvalidCall, match=r"map\(limit="):
        basket.map(ship, ["a"], limit=limit)


async def test_a_function_workflow_calls_the_same(driver: Recorder) -> None:
    @workflow
    async def plain_workflow(run: WorkflowRun, amount: int) -> str:
        assert (await run.map(lambda scope, item: scope.step(plain, item), [amount])) == [amount + 1]
        return await run.step(charge, amount)

    run = WorkflowRun()
    bind(run, driver)

    assert await plain_workflow(run, 5) == "5 eur"
