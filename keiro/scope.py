"""What a body may call, on the run itself or on a scope of it, and the driver behind it.

A scope is a view of the run whose step names carry a prefix, so that the same steps can run many times at
once and a replay still tells them apart.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABCMeta, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload
from uuid import UUID

from keiro.definition import Step, retry_or_none, seconds, step_of
from keiro.errors import InvalidCall
from keiro.events import time_of
from keiro.identity import check_step_name, parse_run_id
from keiro.retry import Retry

if TYPE_CHECKING:
    from keiro.run import WorkflowRun

T = TypeVar("T")
R = TypeVar("R")


class Driver(Protocol):
    """What drives a run: every call of a body ends here. Names are complete, with the prefix of the scope."""

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
        """Reserve the name now; the coroutine runs the step, or finds it recorded, and returns its result."""

    def apply(
        self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str
    ) -> Coroutine[Any, Any, Any]:
        """Reserve the name now; the coroutine records what the command triggers as a step, and applies it."""

    def now_ms(self) -> int:
        """The time of the last event delivered to the calling task."""

    def random(self) -> float:
        """A number in [0, 1)."""

    def uuid4(self) -> UUID:
        """A random UUID."""

    @property
    def info(self) -> Any:
        """What is known about the run as it is driven here."""


class Scope(metaclass=ABCMeta):
    """The calls of a body; on an instance that no body runs on, each of them raises `InvalidCall`."""

    __slots__ = ()

    _keiro_driver: Driver
    _keiro_step: Callable[..., Coroutine[Any, Any, Any]]
    _keiro_prefix: str

    @property
    @abstractmethod
    def _keiro_root(self) -> WorkflowRun:
        """The run itself."""

    @overload
    def step(
        self,
        fn: Callable[..., Awaitable[T]],
        /,
        *args: Any,
        key: str | None = None,
        retry: Retry | None = None,
        timeout: float | timedelta | None = None,
        **kwargs: Any,
    ) -> Coroutine[Any, Any, T]: ...
    @overload
    def step(
        self,
        fn: Callable[..., T],
        /,
        *args: Any,
        key: str | None = None,
        retry: Retry | None = None,
        timeout: float | timedelta | None = None,
        **kwargs: Any,
    ) -> Coroutine[Any, Any, T]: ...
    def step(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        key: str | None = None,
        retry: Retry | None = None,
        timeout: float | timedelta | None = None,
        **kwargs: Any,
    ) -> Coroutine[Any, Any, Any]:
        """Run `fn(*args, **kwargs)` once: when its result is recorded, every later replay gets that result.

        Not a coroutine function: the step's name is reserved at the call, in the order of the calls. `key`
        replaces the name; `retry` and `timeout` (seconds, each attempt) replace the step's own. An argument
        of `fn` that is called `key`, `retry` or `timeout` is passed by position. Raises what `fn` raised when
        its retries are used up.
        """
        step: Step = fn if type(fn) is Step else step_of(fn)
        try:
            call = self._keiro_step
        except AttributeError:
            raise self._no_body("step") from None
        return call(
            step,
            args,
            kwargs,
            name=self._keiro_prefix + (step.name if key is None else check_step_name(key)),
            retry=None if retry is None else retry_or_none(retry, f"retry of step {step.name!r}"),
            timeout=None if timeout is None else seconds(timeout, f"timeout of step {step.name!r}"),
        )

    def scope(self, key: str) -> ScopedRun:
        """A view of this run whose step names begin with `key/`; scopes nest."""
        return ScopedRun(self._keiro_root, self._driver("scope"), f"{self._keiro_prefix}{check_step_name(key)}/")

    def map(
        self,
        fn: Callable[[Any, T], Awaitable[R]],
        items: Iterable[T],
        *,
        key: Callable[[T], str] | None = None,
        limit: int | None = None,
    ) -> Coroutine[Any, Any, list[R]]:
        """Run `fn(scope, item)` for all items, at most `limit` at a time; the results in the items' order.

        Each item has a scope of its own, named `key(item)`, or by the function and the item's index. The
        first exception cancels the others and is raised when they have ended.
        """
        self._driver("map")
        if not callable(fn):
            raise InvalidCall(f"map: what is called for each item must be an async function, not {fn!r}")
        if not isinstance(items, Iterable):
            raise InvalidCall(f"map: items must be a list or another iterable, not {items!r}")
        if key is not None and not callable(key):
            raise InvalidCall(f"map(key={key!r}): key is a function that names an item, such as `lambda one: one.id`")
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise InvalidCall(f"map(limit={limit!r}): limit is a whole number from 1, or None for all at once")
        if isinstance(fn, Step):
            raise InvalidCall(
                f"map: {fn!r} is a step, but what is called for each item gets a scope and the item: write "
                f"run.map(lambda scope, item: scope.step({fn.name}, item), items)"
            )
        todo: list[tuple[ScopedRun, T]] = []
        seen: dict[str, int] = {}
        label = _name_of(fn)
        for index, item in enumerate(items):
            name = f"{label}-{index}" if key is None else key(item)
            scope = self.scope(name)
            if seen.setdefault(name, index) != index:
                raise InvalidCall(
                    f"map: items {seen[name]} and {index} have the same key {name!r}, a replay could not "
                    "tell them apart: return a key of its own for each item"
                )
            todo.append((scope, item))
        return _map(fn, todo, limit)

    def apply(self, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """Send a command to this run, as a recorded step: `await self.apply(Basket.add, "sku-1")`."""
        name, command = self._keiro_root._keiro_method(method)
        return self._driver("apply").apply(command, args, kwargs, f"apply:{self._keiro_prefix}{name}")

    def now(self) -> datetime:
        """The time of the last event delivered to this task (UTC). Records nothing; a replay returns the
        same.
        """
        return time_of(self._driver("now").now_ms())

    def random(self) -> float:
        """A number in [0, 1). Records nothing; a replay returns the same."""
        return self._driver("random").random()

    def uuid4(self) -> UUID:
        """A random UUID. Records nothing; a replay returns the same."""
        return self._driver("uuid4").uuid4()

    @property
    def id(self) -> str:
        """The id of the run: `wf:<workflow>-<key>`, with `#<round>` after the first round. Empty without a
        journal.
        """
        return self._keiro_root._keiro_id

    @property
    def run_id(self) -> str:
        """The same as `id`."""
        return self._keiro_root._keiro_id

    @property
    def key(self) -> str:
        """The key the run was started with."""
        run_id = self._keiro_root._keiro_id
        return parse_run_id(run_id).key if run_id else ""

    @property
    def workflow(self) -> str:
        """The name of the workflow."""
        run_id = self._keiro_root._keiro_id
        return parse_run_id(run_id).workflow if run_id else ""

    @property
    def round(self) -> int:
        """Which round of its lineage this run is; 0 is the first."""
        run_id = self._keiro_root._keiro_id
        return parse_run_id(run_id).round if run_id else 0

    @property
    def version(self) -> int:
        """The place in the journal of the newest event this instance has seen; 1 is WorkflowStarted."""
        return self._keiro_root._keiro_version

    @property
    def info(self) -> Any:
        """What is known about the run as it is driven here."""
        return self._driver("info").info

    def _driver(self, call: str) -> Driver:
        try:
            return self._keiro_driver
        except AttributeError:
            raise self._no_body(call) from None

    def _no_body(self, call: str) -> InvalidCall:
        root = self._keiro_root
        return InvalidCall(
            f"{type(root).__qualname__}.{call} works only inside a running body, and this instance of "
            f"{root.id or 'no run'} has no engine behind it; from outside, use engine.command(...)"
        )


class ScopedRun(Scope):
    """A view of a run under a prefix. What the aggregate holds can be read through it."""

    __slots__ = ("_keiro_driver", "_keiro_prefix", "_keiro_step", "_run")

    def __init__(self, run: WorkflowRun, driver: Driver, prefix: str) -> None:
        self._run = run
        self._keiro_driver = driver
        self._keiro_step = driver.step
        self._keiro_prefix = prefix

    @property
    def _keiro_root(self) -> WorkflowRun:
        return self._run

    def __getattr__(self, name: str) -> Any:
        if name == "_run" or name.startswith("__"):  # asked of a copy that is being made
            raise AttributeError(name)
        return getattr(self._run, name)

    def __repr__(self) -> str:
        return f"<scope {self._keiro_prefix} of {self._run.id}>"


async def _map(fn: Callable[[Any, T], Awaitable[R]], todo: Sequence[tuple[ScopedRun, T]], limit: int | None) -> list[R]:
    results: dict[int, R] = {}
    room = None if limit is None else asyncio.Semaphore(limit)

    async def one(index: int, scope: ScopedRun, item: T) -> None:
        try:
            # Called here, in the item's own task: the names it reserves belong to that task.
            made = fn(scope, item)
            if not inspect.isawaitable(made):
                raise InvalidCall(f"map: {_name_of(fn)} returned {made!r}: it must be an async function")
            results[index] = await made
        finally:
            if room is not None:
                room.release()

    first: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for index, (scope, item) in enumerate(todo):
                if room is not None:
                    # Tasks are created in the items' order whatever the limit: a replay numbers them alike.
                    await room.acquire()
                group.create_task(one(index, scope, item))
    except BaseExceptionGroup as failed:
        first = failed.exceptions[0]
    if first is not None:
        try:
            raise first
        finally:
            del first  # its traceback holds this frame
    if len(results) < len(todo):
        # A task group takes a task that was cancelled from elsewhere for one that has ended.
        raise asyncio.CancelledError
    return [results[index] for index in range(len(todo))]


def _name_of(fn: Callable[..., Any]) -> str:
    while isinstance(fn, partial):
        fn = fn.func
    name: str = getattr(fn, "__name__", type(fn).__name__)
    return name
