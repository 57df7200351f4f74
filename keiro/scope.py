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
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, TypeVar, overload
from uuid import UUID

from msgspec import UNSET, UnsetType

from keiro.attributes import STEP as ATTRIBUTES
from keiro.attributes import checked
from keiro.codec import decoder_for
from keiro.definition import Step, Workflow, patience, retry_or_none, seconds, step_of
from keiro.errors import ChildCancelled, ChildFailed, DecodeFailed, DeferredCancelled, InvalidCall
from keiro.events import ms_of, time_of
from keiro.failures import revive, summary
from keiro.identity import check_step_name, child_result_step, deferred_step, parse_run_id, run_id, token_of
from keiro.limits import check_priority
from keiro.projections.waits import decode_exit
from keiro.retry import Retry
from keiro.rows import Status

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

    def sleep(self, due_ms: Callable[[], int], name: str) -> Coroutine[Any, Any, None]:
        """Reserve the name now; the coroutine ends when the time has come."""

    def wait(self, kind: str, step: str, timeout: float | None) -> Callable[[], Coroutine[Any, Any, Any]]:
        """The coroutine waits for a step that others record."""

    def until(self, predicate: Callable[[], Any], timeout: float | None, name: str) -> Coroutine[Any, Any, None]:
        """Reserve the name now; the coroutine ends when the predicate holds."""

    def first(self, awaitables: Sequence[Awaitable[Any]], name: str) -> Coroutine[Any, Any, tuple[int, Any]]:
        """Reserve the name now; the coroutine gives the index and the value of what is done first."""

    def token(self, name: str) -> Coroutine[Any, Any, str]:
        """The coroutine gives the secret of a deferred."""

    def spawn(
        self,
        workflow: Workflow,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: str | None,
        on_cancel: str,
        priority: int,
    ) -> Coroutine[Any, Any, str]:
        """Reserve the child's key now; the coroutine records the child and gives its key."""

    def of_child(self, run_id: str, what: str) -> Coroutine[Any, Any, Any]:
        """Cancel a child, or ask for its status, as a recorded step."""

    def set_attributes(self, values: dict[str, Any], name: str) -> Coroutine[Any, Any, None]:
        """Reserve the name now; the coroutine records the attributes as a step."""

    def compensate(self) -> Coroutine[Any, Any, None]:
        """The coroutine undoes what compensable steps have done."""

    def continue_as_new(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BaseException:
        """What ends the round when it is raised."""

    def patched(self, patch: str) -> bool:
        """Whether the round was begun with the patch."""

    def wall_ms(self) -> int:
        """The time it is now."""

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

    def transaction(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        key: str | None = None,
        retry: Retry | None = None,
        timeout: float | timedelta | None = None,
        **kwargs: Any,
    ) -> Coroutine[Any, Any, Any]:
        """Run `fn(connection, *args, **kwargs)` as a step whose own SQL and whose record are committed together: it
        takes effect exactly once.

        `connection` is SQLAlchemy's `Connection` to the journal's database, in a transaction that is open; for an async
        function it is an `AsyncConnection`. A conflict with another transaction runs `fn` again. What it raises rolls
        everything back. Named, retried and replayed as by `step`. Raises `InvalidCall` in a run in memory.
        """
        step = step_of(fn)
        return self._driver("transaction").step(
            step.in_transaction(),
            args,
            kwargs,
            name=f"tx:{self._keiro_prefix}{step.name if key is None else check_step_name(key)}",
            retry=retry_or_none(retry, f"retry of step {step.name!r}"),
            timeout=seconds(timeout, f"timeout of step {step.name!r}"),
        )

    def compensate(self) -> Coroutine[Any, Any, None]:
        """Undo what this round's compensable steps have done, the newest first: call `compensate(result, *args)` of
        each one that succeeded and has that option, as a recorded step. Call it where the body gives up, then raise."""
        return self._driver("compensate").compensate()

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

    # Waits

    def sleep(self, duration: float | timedelta, *, key: str | None = None) -> Coroutine[Any, Any, None]:
        """Go on after `duration` (seconds), whatever happens to this process meanwhile. The deadline is set when the
        sleep is first reached and stays. `key` names the sleep among others.
        """
        length = patience(duration, "run.sleep(duration)")
        assert length is not None
        driver = self._driver("sleep")
        return driver.sleep(lambda: driver.wall_ms() + round(length * 1000), self._named(key, "sleep"))

    def sleep_until(self, time: datetime, *, key: str | None = None) -> Coroutine[Any, Any, None]:
        """Go on at `time`, a datetime with its zone; at once if it has passed."""
        if not isinstance(time, datetime) or time.tzinfo is None:
            raise InvalidCall(f"run.sleep_until({time!r}): give a datetime with its zone, such as datetime.now(UTC)")
        due = max(ms_of(time), 0)
        return self._driver("sleep_until").sleep(lambda: due, self._named(key, "sleep"))

    def deferred(self, name: str, type: Any = Any) -> Deferred:
        """A value that comes from outside: `engine.complete(run.id, name, value)`, before or after it is asked for
        here. `type` is what it is read as.
        """
        driver = self._driver("deferred")
        return Deferred(driver, self._keiro_root._keiro_id, f"{self._keiro_prefix}{check_step_name(name)}", type)

    def until(
        self, predicate: Callable[[], Any], *, timeout: float | timedelta | None = None, key: str | None = None
    ) -> Coroutine[Any, Any, None]:
        """Go on when `predicate()` holds for this run's own state, which its commands change. It is called after each
        command, and must depend on that state only. Raises `TimeoutError` after `timeout` seconds.
        """
        if not callable(predicate):
            raise InvalidCall(f"run.until({predicate!r}): give a function without parameters, such as a lambda")
        limit = patience(timeout, "run.until(timeout=...)")
        return self._driver("until").until(predicate, limit, self._named(key, "until"))

    def first(self, *awaitables: Awaitable[Any], key: str | None = None) -> Coroutine[Any, Any, First]:
        """The place and the value of the one that is done first: steps, sleeps, results of deferreds and children. The
        winner is recorded; the others are cancelled, and a step among them leaves no record. Raises what it raised.
        """
        if not awaitables:
            raise InvalidCall("run.first() needs something to wait for, such as two calls of run.step(...)")
        return _first(self._driver("first").first(awaitables, self._named(key, "first")))

    def _named(self, key: str | None, default: str) -> str:
        return self._keiro_prefix + (default if key is None else check_step_name(key))

    # Children

    def spawn(
        self,
        workflow: Any,
        /,
        *args: Any,
        id: str | None = None,
        on_cancel: str = "cancel",
        priority: int = 0,
        **kwargs: Any,
    ) -> Coroutine[Any, Any, Child]:
        """Start a run as a child of this one; on return it is durable. `id` is its key (default: made of this run's
        key, the workflow and a number); a child with that id that this run has is attached to. `on_cancel` says what
        becomes of it when this run is cancelled: `cancel`, or `detach` to let it go on. `priority` is its place among
        the runs that wait for a worker, the lowest first. Raises `RunConflict` for a run that is another's, was started
        on its own and has not ended, or has another input. What this round has spawned already is given again without
        a look at the input.
        """
        from keiro.run import workflow_of

        if on_cancel not in ("cancel", "detach"):
            raise InvalidCall(f"run.spawn(on_cancel={on_cancel!r}): it is 'cancel' or 'detach'")
        definition = workflow_of(workflow)
        driver = self._driver("spawn")
        return _spawned(
            driver, definition, driver.spawn(definition, args, kwargs, id, on_cancel, check_priority(priority))
        )

    def call(self, workflow: Any, /, *args: Any, id: str | None = None, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """Start a child and wait for its result."""
        return _called(self.spawn(workflow, *args, id=id, **kwargs))

    # Attributes

    def set_attributes(self, **values: Any) -> Coroutine[Any, Any, None]:
        """Set attributes of this run, by which `engine.executions.list(attributes={...})` finds it: text, numbers,
        truth values, datetimes with their zone; None takes one away, those not named stay. A recorded step: on return
        it is durable. The next round begins with them. Raises `InvalidCall` for other values and more than 64.
        """
        driver = self._driver("set_attributes")
        changes = checked(values, "run.set_attributes", removing=True)
        return driver.set_attributes(changes, f"{ATTRIBUTES}{self._keiro_prefix}set")

    # Rounds and versions

    def continue_as_new(self, *args: Any, **kwargs: Any) -> NoReturn:
        """End this round and begin the next one, with these inputs and an empty history. It leaves the body by an
        exception that is no `Exception`. What deferreds were completed with and this round did not ask for is carried
        over, children and cancellation belong to all rounds.
        """
        raise self._driver("continue_as_new").continue_as_new(args, kwargs)

    def patched(self, patch: str) -> bool:
        """Whether this round began when the workflow had `patches=[..., patch]`: where it is False, do what was done
        before, so that runs that began then replay. Decided at the beginning of a round, and so for all of it.
        """
        return self._driver("patched").patched(patch)

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


class First(NamedTuple):
    """What was done first, and what came of it."""

    winner: int
    value: Any


async def _first(found: Coroutine[Any, Any, tuple[int, Any]]) -> First:
    return First(*await found)


class Deferred:
    """A value that comes from outside; see `run.deferred`."""

    __slots__ = ("_decode", "_driver", "_run_id", "name")

    def __init__(self, driver: Driver, run_id: str, name: str, type: Any) -> None:
        self._driver = driver
        self._run_id = run_id
        self.name = name
        self._decode = decoder_for(type, where=f"deferred {name!r}")

    def result(self, timeout: float | timedelta | None = None) -> Coroutine[Any, Any, Any]:
        """What it was completed with. Raises what it was failed with, `DeferredCancelled` if it was cancelled, and
        `TimeoutError` after `timeout` seconds; the first in the journal counts, for every replay.
        """
        limit = patience(timeout, "deferred.result(timeout=...)")
        return self._result(self._driver.wait("deferred", deferred_step(self.name), limit))

    async def _result(self, found: Callable[[], Awaitable[Any]]) -> Any:
        end = decode_exit((await found()).result)
        if end.ok is not UNSET:
            return self._decode(bytes(end.ok))
        if end.failed is not UNSET:
            raise revive(end.failed)
        raise DeferredCancelled(f"the deferred {self.name!r} of {self._run_id} was cancelled{_because(end.cancelled)}")

    async def token(self) -> str:
        """A string that nobody can guess and that completes this deferred, from wherever it is brought back:
        `engine.complete(token=..., value=...)`. It is recorded before it is given out, and holds for this round.
        """
        return token_of(self._run_id, self.name, await self._driver.token(self.name))


class Child:
    """A child of a run, as its parent's body sees it."""

    __slots__ = ("_driver", "_workflow", "key", "run_id")

    def __init__(self, driver: Driver, workflow: Workflow, key: str) -> None:
        self._driver = driver
        self._workflow = workflow
        self.key = key
        self.run_id = run_id(workflow.name, key)

    def result(self, timeout: float | timedelta | None = None) -> Coroutine[Any, Any, Any]:
        """What the child returned. Raises `ChildFailed` (the original exception is its `__cause__`), `ChildCancelled`,
        and `TimeoutError` after `timeout` seconds; the child goes on then.
        """
        limit = patience(timeout, "child.result(timeout=...)")
        return self._result(self._driver.wait("child", child_result_step(self.key), limit))

    async def _result(self, found: Callable[[], Awaitable[Any]]) -> Any:
        end = decode_exit((await found()).result)
        if end.ok is not UNSET:
            try:
                return self._workflow.decode_result(bytes(end.ok))
            except DecodeFailed as error:
                # The parent is what cannot go on, and this is where: the child itself has ended well.
                step = child_result_step(self.key)
                raise DecodeFailed(f"{step!r}, what {self.run_id} returned: {error}", where=step) from error
        if end.failed is not UNSET:
            failed = ChildFailed(f"{self.run_id} failed: {summary(end.failed)}", end.failed)
            raise failed from revive(end.failed)
        raise ChildCancelled(f"{self.run_id} was cancelled{_because(end.cancelled)}")

    def cancel(self) -> Coroutine[Any, Any, bool]:
        """Cancel the child, as a recorded step; whether it was this call that did."""
        return self._driver.of_child(self.run_id, "cancel")

    async def status(self) -> Status:
        """Where the child stands, as a recorded step: a replay is told the same."""
        return Status(await self._driver.of_child(self.run_id, "status"))

    def __repr__(self) -> str:
        return f"<child {self.run_id}>"


async def _spawned(driver: Driver, workflow: Workflow, key: Coroutine[Any, Any, str]) -> Child:
    return Child(driver, workflow, await key)


async def _called(spawned: Coroutine[Any, Any, Child]) -> Any:
    child = await spawned
    return await child.result()


def _because(reason: str | UnsetType | None) -> str:
    return f": {reason}" if isinstance(reason, str) else ""


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
