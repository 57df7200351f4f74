"""The same engine for synchronous code: an event loop in a thread of its own, and the same methods without `await`."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, Unpack

from keiro.engine import Engine, Handle
from keiro.errors import InvalidCall
from keiro.events import Event
from keiro.executions import Changes, Filters, Missing, Observed, Options, Page
from keiro.feed import JournalEntry
from keiro.projections.run_parents import RunParent
from keiro.projections.waits import ChildRow
from keiro.rows import Run, Status
from keiro.schedules import ScheduleRow

T = TypeVar("T")


class BlockingHandle:
    """A run, seen from synchronous code. Methods and errors are those of `Handle`."""

    def __init__(self, engine: BlockingEngine, handle: Handle) -> None:
        self._engine = engine
        self._handle = handle
        self.run_id = handle.run_id

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the result; `timeout` in seconds."""
        return self._engine.wait(self._handle.result(timeout))

    def run(self) -> Run:
        """The operational row of the run."""
        return self._engine.wait(self._handle.run())

    def status(self) -> Status:
        """Where the run stands."""
        return self._engine.wait(self._handle.status())

    def cancel(self, *, reason: str | None = None, wait: bool = False) -> bool:
        """Cancel the run."""
        return self._engine.wait(self._handle.cancel(reason=reason, wait=wait))

    def children(self) -> list[ChildRow]:
        """The children of the run, oldest first."""
        return self._engine.wait(self._handle.children())

    def events(self, after: int = 0) -> list[Event]:
        """The events of the run with a version above `after`, in order."""

        async def collect() -> list[Event]:
            return [event async for event in self._handle.events(after)]

        return self._engine.wait(collect())

    def __repr__(self) -> str:
        return repr(self._handle)


class BlockingEngine:
    """An open engine, for calls from any thread but its own.

    It has the methods of `Engine` (`command`, `rows`, `steps`, `rebuild`, `caught_up`, ...), which wait for what the
    engine's coroutines return; those that give handles give blocking ones.
    """

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self.engine = engine
        self._loop = loop

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine of the engine and wait for it. Interrupting the wait cancels it."""
        if _running_loop() is self._loop:
            coroutine.close()
            raise InvalidCall("keiro.blocking was called from the engine's own event loop: await the engine instead")
        if self._loop.is_closed():
            coroutine.close()
            raise InvalidCall("the engine is closed: use it inside the `with keiro.blocking(...)` block")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.engine, name)
        if not inspect.iscoroutinefunction(found):
            return found

        @functools.wraps(found)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.wait(found(*args, **kwargs))

        return call

    def start(self, workflow: Any, /, *args: Any, id: str | None = None, **kwargs: Any) -> BlockingHandle:
        """As `Engine.start`."""
        return BlockingHandle(self, self.wait(self.engine.start(workflow, *args, id=id, **kwargs)))

    def start_many(
        self, workflow: Any, inputs: Iterable[Any], /, *, ids: Iterable[str] | None = None, **options: Any
    ) -> list[BlockingHandle]:
        """As `Engine.start_many`."""
        started = self.engine.start_many(workflow, inputs, ids=ids, **options)
        return [BlockingHandle(self, handle) for handle in self.wait(started)]

    @property
    def children(self) -> BlockingChildren:
        """As `Engine.children`."""
        return BlockingChildren(self)

    @property
    def run_parents(self) -> BlockingRunParents:
        """As `Engine.run_parents`."""
        return BlockingRunParents(self)

    @property
    def events(self) -> BlockingFeed:
        """As `Engine.events`."""
        return BlockingFeed(self)

    @property
    def executions(self) -> BlockingExecutions:
        """As `Engine.executions`."""
        return BlockingExecutions(self)

    @property
    def schedules(self) -> BlockingSchedules:
        """As `Engine.schedules`."""
        return BlockingSchedules(self)

    def execute(self, workflow: Any, /, *args: Any, id: str | None = None, **kwargs: Any) -> Any:
        """As `Engine.execute`."""
        return self.wait(self.engine.execute(workflow, *args, id=id, **kwargs))

    def handle(self, run_id: str) -> BlockingHandle:
        """As `Engine.handle`."""
        return BlockingHandle(self, self.engine.handle(run_id))


class BlockingChildren:
    """As the children of an engine, for synchronous code."""

    def __init__(self, engine: BlockingEngine) -> None:
        self._engine = engine

    def of(self, run_id: str) -> list[ChildRow]:
        """The children of a run, oldest first."""
        return self._engine.wait(self._engine.engine.children.of(run_id))


class BlockingRunParents:
    """As the edges between runs of an engine, for synchronous code. Methods and errors are those of `RunParents`."""

    def __init__(self, engine: BlockingEngine) -> None:
        self._engine = engine
        self._parents = engine.engine.run_parents

    def of(self, run_id: str) -> list[RunParent]:
        """The edges from a run to its parents."""
        return self._engine.wait(self._parents.of(run_id))

    def children(self, run_id: str) -> list[RunParent]:
        """The edges from the runs that have this one as a parent."""
        return self._engine.wait(self._parents.children(run_id))

    def link(self, child: str, parent: str, *, connection: Any = None) -> RunParent:
        """Let a run have a further parent."""
        return self._engine.wait(self._parents.link(child, parent, connection=connection))

    def unlink(self, child: str, parent: str, *, connection: Any = None) -> bool:
        """Take back a link."""
        return self._engine.wait(self._parents.unlink(child, parent, connection=connection))


class BlockingFeed:
    """As the events of an engine, for synchronous code. Options and errors are those of `Feed`."""

    def __init__(self, engine: BlockingEngine) -> None:
        self._engine = engine
        self._feed = engine.engine.events

    def last(self) -> int:
        """The position of the newest event."""
        return self._engine.wait(self._feed.last())

    def follow(self, **options: Any) -> Iterator[JournalEntry]:
        """The events, one after the other; with `live`, waiting for the next."""

        async def begin() -> AsyncGenerator[JournalEntry, None]:
            return self._feed.follow(**options)

        entries = self._engine.wait(begin())
        try:
            while (entry := self._engine.wait(anext(entries, None))) is not None:
                yield entry
        finally:
            with suppress(InvalidCall):
                self._engine.wait(entries.aclose())


class BlockingExecutions:
    """As the listing of an engine, for synchronous code. Options and errors are those of `Executions`."""

    def __init__(self, engine: BlockingEngine) -> None:
        self._engine = engine
        self._executions = engine.engine.executions

    def list(self, **options: Unpack[Options]) -> Page:
        """A page of runs."""
        return self._engine.wait(self._executions.list(**options))

    def counts(self, **filters: Unpack[Filters]) -> dict[Status, int]:
        """How many runs have each status."""
        return self._engine.wait(self._executions.counts(**filters))

    def observe(self, run_ids: Iterable[str]) -> Sequence[Observed | Missing]:
        """What there is of each of these runs."""
        return self._engine.wait(self._executions.observe(run_ids))

    def changes_since(self, revision: int = 0, *, source: str | None = None, limit: int = 1000) -> Changes:
        """The runs that changed since."""
        return self._engine.wait(self._executions.changes_since(revision, source=source, limit=limit))


class BlockingSchedules:
    """As the schedules of an engine, for synchronous code. Methods and errors are those of `Schedules`."""

    def __init__(self, engine: BlockingEngine) -> None:
        self._engine = engine
        self._schedules = engine.engine.schedules

    def put(self, name: str, workflow: Any, /, *args: Any, **kwargs: Any) -> bool:
        """Start runs of a workflow whenever an expression ticks."""
        return self._engine.wait(self._schedules.put(name, workflow, *args, **kwargs))

    def pause(self, name: str) -> bool:
        """Let no tick start a run."""
        return self._engine.wait(self._schedules.pause(name))

    def resume(self, name: str) -> bool:
        """Let it tick again."""
        return self._engine.wait(self._schedules.resume(name))

    def trigger(self, name: str, *, id: str | None = None) -> BlockingHandle:
        """Start a run now."""
        return BlockingHandle(self._engine, self._engine.wait(self._schedules.trigger(name, id=id)))

    def delete(self, name: str) -> bool:
        """Delete a schedule."""
        return self._engine.wait(self._schedules.delete(name))

    def list(self) -> list[ScheduleRow]:
        """All schedules, by name."""
        return self._engine.wait(self._schedules.list())


@contextmanager
def blocking(engine: Engine) -> Iterator[BlockingEngine]:
    """Open `engine` in a thread of its own and close it at the end of the block.

    Steps and bodies run in that thread; the block may call the engine from any other thread.
    """
    loop = asyncio.new_event_loop()
    # A daemon, so that a program that dies inside the block is not kept alive by its engine.
    thread = threading.Thread(target=loop.run_forever, name="keiro engine", daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(engine.__aenter__(), loop).result()
        try:
            yield BlockingEngine(engine, loop)
        finally:
            asyncio.run_coroutine_threadsafe(engine.close(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
