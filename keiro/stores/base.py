"""The interface every store implements, and what is the same in all of them.

A store locks, loads, appends, writes rows, commits and notifies. It decides nothing: under its lock it asks
`keiro.decisions` what a command does and writes exactly that.
"""

from __future__ import annotations

import time
from asyncio import AbstractEventLoop, Future
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from keiro.decisions import Append, Command, Decision, Outcome, Spawn, Start, Stored, Taken
from keiro.errors import StoreUnavailable
from keiro.events import WorkflowStarted
from keiro.limits import NO_LIMITS, Limits
from keiro.limits import Queue as Limited
from keiro.reports import log
from keiro.rows import Head, Run

if TYPE_CHECKING:
    from keiro.mapper import EventMapper
    from keiro.projections.base import ReadModel
    from keiro.projections.run_parents import RunParent
    from keiro.projections.waits import ChildRow
    from keiro.stores.blocking import RunTables
    from keiro.stores.caller import Joined
    from keiro.stores.connections import Connections
    from keiro.stores.kept import Kept
    from keiro.stores.listing import Listing

LEASE_MS: Final = 30_000
"""A worker that has not renewed its lease for this long is taken for dead."""
RENEW_MS: Final = 10_000
SEAL_MS: Final = 20_000
"""A worker that could not renew for this long stops its runs, well before anybody may claim them."""
MOST_CLAIMED: Final = 200
"""So many runs are claimed at once."""
MOST_WRITTEN: Final = 1000
"""So many commands are written at once: the event loop goes on between two batches."""
AT_ONCE: int = 8
"""So many commits in a row may be made without a turn of the event loop between them."""
SAFETY_POLL_S: Final = 1.0
"""How often a waiting process looks at the store although nothing woke it."""


class Incarnation(msgspec.Struct, frozen=True):
    """One start of a process as a worker. `host` changes with a reboot and with the container, so pids compare."""

    worker_id: str
    host: str
    pid: int
    process_started: str


class WorkerRow(msgspec.Struct, frozen=True):
    """A worker as the store knows it."""

    worker_key: int
    worker_id: str
    host: str
    pid: int
    process_started: str
    address: str | None
    started_at_ms: int
    lease_expires_at_ms: int


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A lineage whose newest round, `run_key`, has ended, with so many rounds and so many events in all of them;
    `parent` is the lineage that has it as a child. Or an old round of a lineage, alone."""

    run_id: str
    finished_at_ms: int
    run_key: int
    rounds: int
    events: int
    parent: str | None


class Listener(Protocol):
    """What an engine wants to hear from its store, on the event-loop thread."""

    def committed(self, changed: Sequence[Run], touched: Sequence[str] = (), taken: Sequence[Taken] = ()) -> None:
        """A transaction of this process committed; these rows of `keiro_runs` changed, to the runs `touched` others
        than their owners appended, and the runs `taken` are this process's now. Called once per commit."""

    def woken(self) -> None:
        """Another process committed something, or may have."""


class Store(Protocol):
    """One journal. All methods run on the event-loop thread of the engine that opened the store.

    Every method that writes raises `StoreUnavailable` or `StoreBusy` when nothing could be written, and returns only
    after the commit: on SQLite and Postgres what it acknowledges survives a crash of the process and, at the default
    durability, of the machine.
    """

    listener: Listener

    async def open(self, *, migrate: bool) -> None:
        """Connect; bring the schema up to date, or only verify it. Raises `MigrationRequired`."""

    async def close(self) -> None:
        """Finish what is under way and disconnect."""

    def now_ms(self) -> int:
        """The time all processes on this store agree on, for leases and clocks."""

    def submit(self, command: Command) -> Future[Outcome]:
        """Queue a command; it commits together with all others of this loop tick. Outcomes are values."""

    def keep(self, models: Sequence[ReadModel], mapper: EventMapper) -> Kept:
        """Keep the rows of these projections from now on; called once, before `open`. Inline ones change in the
        transaction that appends, and one that cannot rejects the command with `ProjectionFailed`."""

    def listing(self, mapper: EventMapper) -> Listing:
        """The listing of executions."""

    def join(self, connection: Any) -> Joined:
        """The journal through a connection of a caller's, in the transaction open there. Raises `InvalidCall` for what
        does not lead here."""

    def connections(self) -> Connections:
        """Connections to the database, for transactional steps. Raises `InvalidCall` where there is none."""

    def announce(self) -> None:
        """A transaction that was not the store's to commit has ended: look, here and elsewhere, what it wrote."""

    async def run(self, run_id: str) -> Run | None:
        """The row of a run."""

    async def head(self, run_id: str) -> tuple[Run, Head] | None:
        """The row and the head of a run."""

    async def runs(
        self, *, status: str | None = None, workflow: str | None = None, before: int | None = None, limit: int
    ) -> list[Run]:
        """Runs, newest first; `before` is the run_key to go on from."""

    async def ended(self, run_ids: Sequence[str]) -> list[Run]:
        """Those of the given runs that are terminal."""

    async def history(self, run_keys: Sequence[int], after: int = 0) -> dict[int, list[Stored]]:
        """The events of runs from version `after` + 1 on, in order."""

    async def step_maps(self, run_key: int) -> list[str]:
        """The snapshots of a run's history as JSON, in order. Raises `DecodeFailed`."""

    async def keep_step_map(self, run_key: int, until: int, state: str) -> None:
        """Keep a snapshot of a run's history, which ends with version `until`."""

    async def snapshot(self, run_key: int, after: int, until: int) -> None:
        """Keep a snapshot of the events of a run with the versions above `after` and up to `until`."""

    async def drop_step_maps(self, run_key: int) -> None:
        """Delete the snapshots of a run's history."""

    async def read(self, after: int, limit: int) -> list[Stored]:
        """Events of all runs with a position above `after`, in order. Gap-free: what a reader has read up to a
        position never gains an event at or below it."""

    def run_tables(self) -> RunTables:
        """Blocking access to the events and snapshots of runs, from any thread; to be closed after use."""

    async def register(self, incarnation: Incarnation) -> int:
        """Enter a worker with a fresh lease; its worker_key."""

    async def renew(self, worker_key: int) -> bool:
        """Extend the lease of a worker; False if the worker is no longer listed."""

    async def workers(self) -> list[WorkerRow]:
        """All listed workers."""

    async def claim(
        self, worker_key: int, workflows: Sequence[str], limit: int, limits: Limits = NO_LIMITS
    ) -> list[tuple[Run, Head]]:
        """Take pending (and due) runs of these workflows, by priority, then oldest first. They are running and owned on
        return. What `limits` let through is counted, and what is taken of it is written, in the same transaction.

        Here and in what follows workflows are given as lanes: see `keiro.lanes`.
        """

    async def opens_ms(self, queue: Limited, at_ms: int) -> int | None:
        """When the rate of a queue lets a run begin again, if it was used up at `at_ms`."""

    async def due(self, workflows: Sequence[str]) -> list[tuple[str, int]]:
        """The ids and versions of parked runs of these workflows whose time has come, the longest due first; at most
        `MOST_WRITTEN`."""

    async def asked(self) -> list[tuple[str, int]]:
        """The ids of all runs that are asked to end and have not, and when their grace is over."""

    async def next_due_ms(self, workflows: Sequence[str]) -> int | None:
        """When the next paced or parked run of these workflows is due."""

    async def unregistered(self, workflows: Sequence[str]) -> list[str]:
        """Names of workflows that are not among the given ones and have runs to be driven: pending and, if they are
        paced, due, or parked and due. Of those that are pinned here, the lanes that are not among the given ones and
        have such runs at the front of a queue; the bare name stands for runs without a version."""

    async def release(self, worker_key: int, run_keys: Sequence[int]) -> None:
        """Hand runs back: they are pending again. Only those the worker still owns."""

    async def owned(self, worker_key: int) -> dict[int, int]:
        """The run_keys of all runs the worker owns, and their versions."""

    async def newest(self, lineage_id: str) -> Run | None:
        """The row of the newest round of a lineage; None for one that has only round 0."""

    async def children(self, workflow: str, key: str) -> list[ChildRow]:
        """The children of a run, oldest first."""

    async def parents_of(self, lineage_id: str) -> list[RunParent]:
        """The edges from a lineage to its parents, by their numbers."""

    async def children_of(self, lineage_id: str) -> list[RunParent]:
        """The edges to a lineage from its children, by their numbers."""

    async def consider(self, commands: Sequence[Command]) -> list[Outcome]:
        """What each command would do by itself; nothing is written."""

    async def existing(self, run_ids: Sequence[str]) -> set[str]:
        """Those of the given runs that there are."""

    async def ended_before(self, before_ms: int, after: tuple[int, int], limit: int) -> list[Candidate]:
        """Lineages whose newest round ended at `before_ms` or earlier, oldest end first, from behind `after` (the end
        and the run_key of the last one of the page before)."""

    async def handed_off_before(self, before_ms: int, after: tuple[int, int], limit: int) -> list[Candidate]:
        """As `ended_before`, the rounds that handed off at `before_ms` or earlier, but for round 0 and the last but one
        of each lineage."""

    async def bury(self, worker: WorkerRow) -> bool:
        """Remove a dead worker as it was seen and make its runs pending; False if it renewed or is gone already."""

    async def adopt_orphans(self) -> bool:
        """Make pending every run whose owner is no listed worker; whether there were any."""


def published(decisions: Sequence[Decision]) -> tuple[list[Run], list[str], list[Taken]]:
    """What a listener is told of decisions that are committed."""
    return (
        [run for one in decisions for run in one.changed],
        [name for one in decisions for name in one.touched],
        [one.taken for one in decisions if one.taken is not None],
    )


def tell(listener: Listener, changed: Sequence[Run], touched: Sequence[str] = (), taken: Sequence[Taken] = ()) -> None:
    """Tell of a commit. What a listener raises undoes nothing, and must stop neither who sent a command nor the task
    that writes: everybody would wait for ever for what they send."""
    try:
        listener.committed(changed, touched, taken)
    except Exception as error:
        log.error("who was told of a commit raised; what was committed stays", exc_info=error)


def refused_when_closed(loop: AbstractEventLoop) -> Future[Outcome]:
    """The answer to a command that comes after `close`."""
    future: Future[Outcome] = loop.create_future()
    future.set_exception(StoreUnavailable("the engine is closed: nothing can be written any more"))
    return future


def wall_ms() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


Clock = Callable[[], int]


class Pending:
    """A command on its way to the journal, and the future its sender awaits."""

    __slots__ = ("command", "future")

    def __init__(self, command: Command, future: Future[Outcome]) -> None:
        self.command = command
        self.future = future

    def settle(self, outcome: Outcome) -> None:
        """Tell the sender; one that no longer listens does not matter, the journal has it."""
        if not self.future.done():
            self.future.set_result(outcome)

    def fail(self, error: BaseException) -> None:
        """Tell the sender that nothing was written."""
        if not self.future.done():
            self.future.set_exception(error)


def known_and_left(batch: list[Pending]) -> tuple[list[Pending], list[Pending]]:
    """The commands of a batch whose senders know the state, and those that are left to be decided.

    One of a run of which a command is left is left too: it must not overtake. So are appends whose version does not
    follow from the one before.
    """
    known: list[Pending] = []
    left: list[Pending] = []
    behind: set[str] = set()
    follows: dict[str, tuple[int | None, int, int] | None] = {}  # of runs in `known`: what the next append must be
    for pending in batch:
        command = pending.command
        run_id = command.run_id
        if isinstance(command, Append):
            expected, owner, epoch = command.expected, command.owner, command.epoch
            if (
                command.alone
                and owner is not None
                and expected is not None
                and run_id not in behind
                and (run_id not in follows or follows[run_id] == (expected, owner, epoch))
            ):
                follows[run_id] = (expected + len(command.events), owner, epoch)
                known.append(pending)
                continue
        elif isinstance(command, Start) and run_id not in behind and run_id not in follows and is_plain(command):
            follows[run_id] = None
            known.append(pending)
            continue
        behind.add(run_id)
        if isinstance(command, Spawn):
            behind.add(command.start.run_id)
        left.append(pending)
    return known, left


def is_plain(command: Start) -> bool:
    """Whether a run is born as most are: at once, with no parent and no cleanup, in round 0, of priority 0."""
    started = command.started.event
    assert isinstance(started, WorkflowStarted)
    special = (started.parent, started.attributes, started.deadline_at_ms, started.start_at_ms, started.cleanup_ms)
    return started.round == 0 and started.priority == 0 and special == (None, None, None, None, None)


class Queue:
    """Commands that wait for the flush of their loop tick: all of one tick share one commit.

    With `at_once`, which flushes, a command that nobody can share a commit with does not wait for the end of its tick:
    where nothing else is ready to run, two turns of the event loop would only cost time. `AT_ONCE` times in a row at
    most, so that the loop gets to its sockets and timers.
    """

    __slots__ = ("_at_once", "_create_future", "_left", "_pending", "_ready", "_schedule", "_scheduled")

    def __init__(
        self, loop: AbstractEventLoop, schedule: Callable[[], object], at_once: Callable[[], object] | None = None
    ) -> None:
        self._create_future = loop.create_future
        self._schedule = schedule
        self._pending: list[Pending] = []
        self._scheduled = False
        self._at_once = at_once
        # What will run in this tick, where the event loop is that of asyncio; without it nothing is done at once.
        self._ready: deque[Any] | None = getattr(loop, "_ready", None) if at_once is not None else None
        self._left = AT_ONCE

    def put(self, command: Command) -> Future[Outcome]:
        """Queue a command; the future is settled after the commit."""
        future: Future[Outcome] = self._create_future()
        self._pending.append(Pending(command, future))
        if not self._scheduled:
            # Once until the next `take`: it is scheduled behind all that runs in this tick.
            self._scheduled = True
            if self._left and self._ready is not None and not self._ready and self._at_once is not None:
                self._left -= 1
                self._at_once()
            else:
                self._left = AT_ONCE
                self._schedule()
        return future

    def front(self, batch: list[Pending]) -> None:
        """Put back what could not be committed, before all that came since: order is kept."""
        self._pending[:0] = batch

    def hold(self) -> None:
        """Do not schedule a flush until the next `take`: somebody else calls it."""
        self._scheduled = True

    @property
    def waiting(self) -> bool:
        """Whether anything is queued."""
        return bool(self._pending)

    def take(self) -> list[Pending]:
        """What is queued; at most `MOST_WRITTEN`, and then the rest is scheduled."""
        self._scheduled = False
        taken, self._pending = self._pending, []
        if len(taken) > MOST_WRITTEN:
            self._pending = taken[MOST_WRITTEN:]
            del taken[MOST_WRITTEN:]
            self._scheduled = True
            self._schedule()
        return taken
