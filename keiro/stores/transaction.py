"""One transaction over rows in memory and a journal in a database, in the one order that cannot deadlock.

Whoever needs both takes the gate of the memory rows first, then the application's rows, then the journal, and commits:
the other way round, one task would hold the journal while it waits for the gate, and another the gate while it waits
for the journal. Who only writes the journal never takes the gate.
"""

from __future__ import annotations

import asyncio
import random
from asyncio import Future, Lock, Task
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, Generic, Protocol, TypeVar

T = TypeVar("T")

RETRIES: Final = 10
RETRY_BASE_S: Final = 0.05
RETRY_CAP_S: Final = 10.0


class State(Protocol):
    """Something in memory that takes part in transactions; savepoints are a `begin` within a `begin`."""

    def begin(self) -> None:
        """Remember how it is now."""

    def release(self) -> None:
        """Keep what changed since the last `begin`."""

    def rollback(self) -> None:
        """Undo what changed since the last `begin`."""


class Gate:
    """The permit of the memory rows of one engine: one task at a time changes them.

    A task that holds it may ask again: its inner transaction is a savepoint. What holds the permit is the task and not
    its context, so a child task, which inherits the context, waits like any other.
    """

    def __init__(self, states: Sequence[State] = ()) -> None:
        self.states = list(states)
        self._permit = Lock()
        self._holder: Task[Any] | None = None
        self._depth = 0

    @property
    def held(self) -> bool:
        """Whether the current task holds the permit."""
        return self._holder is not None and self._holder is asyncio.current_task()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Snapshot]:
        """Change memory rows: what is not accepted when the block ends is undone.

        In the outermost block `accept` says when, and gives the permit back; an inner one keeps its changes when it
        ends well. Waiting for the permit can be cancelled, and then nothing has happened.
        """
        if self.held:
            with self.savepoint():
                yield Snapshot(self, outermost=False)
            return
        await self._permit.acquire()
        self._holder = asyncio.current_task()
        snapshot = Snapshot(self, outermost=True)
        self._begin()
        try:
            yield snapshot
        finally:
            if snapshot.open:
                self._rollback()
                self._leave()

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Undo what the block changes if it raises. The permit is held."""
        self._begin()
        try:
            yield
        except BaseException:
            self._rollback()
            raise
        self._release()

    def _begin(self) -> None:
        for state in self.states:
            state.begin()

    def _release(self) -> None:
        for state in self.states:
            state.release()

    def _rollback(self) -> None:
        for state in self.states:
            state.rollback()

    def _leave(self) -> None:
        self._holder = None
        self._permit.release()


class Snapshot:
    """Memory rows as they were when a transaction began."""

    def __init__(self, gate: Gate, *, outermost: bool) -> None:
        self._gate = gate
        self.open = outermost

    def accept(self) -> None:
        """The journal has committed: the changes stay, and the permit is free from here on."""
        if self.open:
            self.open = False
            self._gate._release()
            self._gate._leave()

    def rewind(self) -> None:
        """The journal begins again after a conflict: so do the memory rows."""
        if self.open:
            self._gate._rollback()
            self._gate._begin()


class Commit(Protocol):
    """A transaction of the journal, as far as others may wait for its end."""

    def on_commit(self, callback: Callable[[], object]) -> None:
        """Call `callback` when the outermost transaction has committed; never, if this part of it is undone."""


C = TypeVar("C", bound=Commit)
Body = Callable[[C], Awaitable[T]]


async def compose(gate: Gate | None, transact: Callable[[Body[C, T]], Awaitable[T]], body: Body[C, T]) -> T:
    """Run `body` in one transaction of the memory rows behind `gate` and of the journal that `transact` opens.

    `transact` decides how the journal's transaction is begun, tried again and ended; the order is fixed here. The
    memory rows are accepted exactly when the journal has committed, before any other callback of `on_commit`: those
    run with both released, and what they raise undoes nothing. If the body does not complete, or the journal does not
    commit, memory rows are as before.
    """
    if gate is None:
        return await transact(body)
    async with gate.transaction() as snapshot:

        async def ordered(journal: C) -> T:
            snapshot.rewind()
            completed = False
            # Registered before the body can register anything: the gate is free when the first of those runs.
            journal.on_commit(lambda: snapshot.accept() if completed else None)
            value = await body(journal)
            completed = True
            return value

        return await transact(ordered)


class Waiting(Protocol):
    """A command on its way to the journal, and the future its sender awaits."""

    future: Future[Any]

    def fail(self, error: BaseException) -> None:
        """Tell the sender that nothing was written."""


W = TypeVar("W", bound=Waiting)


class GatedQueue(Generic[W]):
    """Commands that change memory rows. They wait here for the gate, and nothing else waits for them.

    `commit` writes a batch with the gate held: it calls `accept` of the snapshot at the commit, and raises if nothing
    was written.
    """

    def __init__(self, gate: Gate, commit: Callable[[list[W], Snapshot], Awaitable[None]]) -> None:
        self._gate = gate
        self._commit = commit
        self._waiting: list[W] = []
        self._task: Task[None] | None = None

    def put(self, one: W) -> None:
        """Queue a command."""
        self._waiting.append(one)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work(), name="keiro gated writes")

    async def _work(self) -> None:
        # A tick late, so that all commands of one tick share a transaction.
        await asyncio.sleep(0)
        while self._waiting:
            batch: list[W] = []
            try:
                async with self._gate.transaction() as snapshot:
                    # Who was cancelled while it waited for the gate has asked for nothing.
                    batch = [one for one in self._waiting if not one.future.cancelled()]
                    self._waiting = []
                    if batch:
                        await self._commit(batch, snapshot)
            except Exception as error:
                if len(batch) == 1:
                    batch[0].fail(error)
                else:
                    await self._one_by_one(batch)
        self._task = None

    async def _one_by_one(self, batch: list[W]) -> None:
        # One bad command must not take the others down.
        for one in batch:
            try:
                async with self._gate.transaction() as snapshot:
                    await self._commit([one], snapshot)
            except Exception as error:
                one.fail(error)

    async def drain(self) -> None:
        """Wait until nothing is queued."""
        while self._task is not None:
            await asyncio.wait([self._task])


class Callbacks:
    """What is to be done when a transaction commits, with marks for its savepoints."""

    def __init__(self) -> None:
        self._pending: list[Callable[[], object]] = []

    def add(self, callback: Callable[[], object]) -> None:
        """Remember a callback."""
        self._pending.append(callback)

    def mark(self) -> int:
        """Where a savepoint begins."""
        return len(self._pending)

    def undo(self, mark: int = 0) -> None:
        """Forget what was added since the mark: that part of the transaction was rolled back."""
        del self._pending[mark:]

    def run(self, failed: Callable[[BaseException], object]) -> None:
        """Call all of them, in order; what one raises is told to `failed` and stops no other."""
        pending, self._pending = self._pending, []
        for callback in pending:
            try:
                callback()
            except Exception as error:
                failed(error)


def delays(rng: Callable[[float, float], float] = random.uniform) -> Iterator[float]:
    """Seconds to wait before each further try of a transaction that met a conflict: doubling, with jitter, capped.

    The cap is the last thing applied, so no delay exceeds it. When they are used up the conflict is the caller's.
    """
    for n in range(RETRIES - 1):
        yield min(rng(0.5, 1.5) * RETRY_BASE_S * 2**n, RETRY_CAP_S)


async def patiently(
    attempt: Callable[[], Awaitable[T]],
    transient: Callable[[BaseException], bool],
    *,
    outermost: bool = True,
    sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
) -> T:
    """Run a transaction, again where it met a transient conflict: only the outermost may, an inner one would repeat
    into the same doomed transaction."""
    if outermost:
        for pause in delays():
            try:
                return await attempt()
            except Exception as error:
                if not transient(error):
                    raise
            await sleep(pause)
    return await attempt()
