"""The store in one SQLite file, shared by any number of processes on a host.

Commits run on the event-loop thread, one transaction per loop tick: a hop to a thread would cost more than the commit
and could starve behind a busy loop. When another process holds the write lock the flush is scheduled again; the loop
never blocks on it.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from asyncio import Future
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from keiro.codec import Codec
from keiro.decisions import Append, Appended, Command, Outcome, Start, Stored, Taken, born, releases
from keiro.errors import KeiroError, ProjectionFailed, StoreBusy, StoreError, StoreUnavailable
from keiro.lanes import pinned
from keiro.limits import NO_LIMITS, Limits, let_through
from keiro.limits import Queue as Limited
from keiro.mapper import EventMapper
from keiro.projections.base import ReadModel
from keiro.projections.run_parents import RunParent, to_edge
from keiro.projections.waits import ChildRow
from keiro.rows import Head, Run
from keiro.stores import migrate
from keiro.stores.base import (
    Candidate,
    Clock,
    Incarnation,
    Listener,
    Pending,
    Queue,
    WorkerRow,
    known_and_left,
    published,
    refused_when_closed,
    tell,
    wall_ms,
)
from keiro.stores.blocking import RunTables, SqlRunTables
from keiro.stores.caller import Joined, execute_of_sqlite, join_sqlite
from keiro.stores.connections import Connections, on_sqlite
from keiro.stores.faults import is_busy, sqlite_fault
from keiro.stores.kept import Kept
from keiro.stores.kept_sql import Inline, SqlKept
from keiro.stores.listing import Listing
from keiro.stores.listing_sql import SqlListing
from keiro.stores.recorders.sqlite import SQLiteFactory as SQLiteFactory  # the module serves as PERSISTENCE_MODULE too
from keiro.stores.sql import Execute, Program, Row, Sql, Statement
from keiro.stores.transaction import GatedQueue, Snapshot
from keiro.stores.wake import WakeSocket

T = TypeVar("T")

BUSY_RETRY_S: Final = 0.0003
BUSY_LIMIT_S: Final = 30.0
LOOK_S: Final = 1.0
MANY: Final = 4
"""From so many rows on, one call for all of them costs less."""
_SYNCHRONOUS: Final = {"full": "FULL", "normal": "NORMAL"}


@dataclass(slots=True)
class _Done:
    """What a transaction did: the answers to its commands, the rows of runs it changed, the runs it touched, those
    that it has given to this process."""

    settled: list[tuple[Pending, Outcome]] = field(default_factory=list)
    changed: list[Run] = field(default_factory=list)
    touched: list[str] = field(default_factory=list)
    taken: list[Taken] = field(default_factory=list)


class SQLiteStore:
    """A journal in the SQLite file `path`. `durability` is `full` (acknowledged survives a power cut) or `normal`
    (survives a crash of the process; a power cut may take the newest commits, in order)."""

    listener: Listener

    def __init__(self, path: str, *, durability: str = "full", codec: Codec, clock: Clock = wall_ms) -> None:
        self.path = path
        self.now_ms = clock
        self._synchronous = _SYNCHRONOUS[durability]
        self._sql = Sql("", codec)
        self.sql, self.dialect = self._sql, "sqlite"
        self._inline: Inline | None = None
        self._gated: GatedQueue[Pending] | None = None
        self._busy_since: float | None = None
        self._retry: asyncio.TimerHandle | None = None

    # Opening and closing

    async def open(self, *, migrate: bool) -> None:
        """Open the file, creating it when it does not exist, and bring its schema up to date."""
        self._loop = asyncio.get_running_loop()
        await self._ensure(migrate)
        self._conn = self._connect()
        self._connections = on_sqlite(self.path, self._synchronous)
        self._queue = Queue(self._loop, lambda: self._loop.call_soon(self._flush), self._flush)
        self._closed = False
        self._wake = WakeSocket(self._loop, self._woken, self._look_around)
        self._data_version = self._pragma("data_version")
        # Both are there from the first look into the file until the last connection to it is closed.
        self._files = self._identities()
        self._moved = False
        self._poll = self._loop.call_later(LOOK_S, self._look)

    async def _ensure(self, upgrade: bool) -> None:
        mode: migrate.Mode = "migrate" if upgrade else "verify"
        # In a thread, because it may wait for another process that migrates.
        await asyncio.to_thread(migrate.ensure_sqlite, self.path, mode=mode)

    def _connect(self) -> sqlite3.Connection:
        try:
            conn = sqlite3.connect(self.path, timeout=5, isolation_level=None, cached_statements=256)
            conn.execute("PRAGMA journal_mode=WAL")
            conn.execute(f"PRAGMA synchronous={self._synchronous}")
            conn.execute("PRAGMA foreign_keys=ON")
            conn.execute("PRAGMA recursive_triggers=ON")
            # The loop must never sleep in SQLite's own busy handler; the flush comes back by itself.
            conn.execute("PRAGMA busy_timeout=0")
        except sqlite3.Error as error:
            raise sqlite_fault(error, self.path) from error
        return conn

    async def close(self) -> None:
        """Commit what is queued and close the file."""
        self._poll.cancel()
        if self._gated is not None:
            await self._gated.drain()
        while self._queue.waiting:
            self._flush()
            if self._queue.waiting:
                await asyncio.sleep(BUSY_RETRY_S)
        if self._retry is not None:
            self._retry.cancel()
        self._closed = True
        self._wake.close()
        self._conn.close()
        await self._connections.close()

    def _pragma(self, name: str) -> int:
        return int(self._conn.execute(f"PRAGMA {name}").fetchone()[0])

    # Wakes between processes

    def _look(self) -> None:
        # The net under the wake-ups: a lost datagram costs at most one of these intervals.
        self._poll = self._loop.call_later(LOOK_S, self._look)
        self._moved = self._identities() != self._files
        try:
            version = self._pragma("data_version")
        except sqlite3.Error:
            return
        if version != self._data_version:
            self._data_version = version
            self.listener.woken()

    def _identities(self) -> list[tuple[int, int] | None]:
        return [_identity(self.path), _identity(f"{self.path}-wal")]

    def _check_place(self) -> None:
        # SQLite goes on with a file that has no name any more: what is written there nobody ever finds again.
        if self._moved:
            raise StoreUnavailable(
                f"{self.path} was deleted or replaced while it was open; nothing is written any more. Stop all "
                "programs that use it, put back the file and its -wal file, then start them again"
            )

    def _woken(self) -> None:
        self.listener.woken()

    def _look_around(self) -> None:
        with suppress(StoreError):
            self._wake.peers([w.address for w in self._sql.to_workers(self._select(self._sql.text.list_workers, ()))])

    def _published(self, changed: Sequence[Run], touched: Sequence[str], taken: Sequence[Taken] = ()) -> None:
        tell(self.listener, changed, touched, taken)
        if changed or touched:
            self._wake.send()

    # The append

    def submit(self, command: Command) -> Future[Outcome]:
        """Queue a command for the commit of this tick."""
        if self._closed:
            return refused_when_closed(self._loop)
        if self._gated is not None and self._inline is not None and self._inline.gates(command):
            pending = Pending(command, self._loop.create_future())
            self._gated.put(pending)
            return pending.future
        return self._queue.put(command)

    def _flush(self) -> None:
        batch = self._queue.take()
        error = self._flushed(batch) if batch else None
        if error is None:
            return
        if is_busy(error):
            self._come_back(batch, error)
        elif len(batch) == 1:
            self._fail(batch[0], error)
        else:
            # One bad command must not take the others down.
            for n, one in enumerate(batch):
                error = self._flushed([one])
                if error is not None and is_busy(error):
                    self._come_back(batch[n:], error)
                    return
                if error is not None:
                    self._fail(one, error)

    def _flushed(self, batch: list[Pending]) -> Exception | None:
        """Commit a batch and tell; the error, if nothing was written."""
        try:
            done = self._commit(batch)
        except Exception as error:
            return error
        self._busy_since = None
        for pending, outcome in done.settled:
            pending.settle(outcome)
        self._published(done.changed, done.touched, done.taken)
        return None

    def _fail(self, pending: Pending, error: Exception) -> None:
        known = isinstance(error, sqlite3.Error)
        pending.fail(_caused(sqlite_fault(error, self.path), error) if known else error)

    def _come_back(self, batch: list[Pending], error: Exception) -> None:
        now = self._loop.time()
        if self._busy_since is None:
            self._busy_since = now
        if now - self._busy_since > BUSY_LIMIT_S:
            self._busy_since = None
            for pending in batch:
                pending.fail(
                    _caused(
                        StoreBusy(
                            f"{self.path} was locked by another connection for {BUSY_LIMIT_S:g} s; nothing was "
                            "written. Find "
                            "what holds a write transaction open, then try again; inside one, pass its connection="
                        ),
                        error,
                    )
                )
            return
        self._queue.front(batch)
        self._queue.hold()
        self._retry = self._loop.call_later(BUSY_RETRY_S, self._flush)

    def _commit(self, batch: list[Pending]) -> _Done:
        self._check_place()
        conn = self._conn
        inline = self._inline
        known, left = known_and_left(batch)
        done: _Done | None = None
        conn.execute("BEGIN IMMEDIATE")
        try:
            if known:
                try:
                    if inline is None or not (inline.memory or inline.wants([pending.command for pending in known])):
                        done = self._write_known(known)
                    else:
                        done = self._write_and_project(known, inline)
                except sqlite3.IntegrityError:
                    done = None  # an event is there already, sent again because its first answer was lost
                if done is None:
                    conn.execute("ROLLBACK")
                    conn.execute("BEGIN IMMEDIATE")
                    left = batch
            if done is None:
                done = _Done()
            if left:
                self._write_left(left, done)
            conn.execute("COMMIT")
        except BaseException:
            if conn.in_transaction:
                conn.execute("ROLLBACK")
            raise
        return done

    def _write_and_project(self, batch: list[Pending], inline: Inline) -> _Done | None:
        """As `_write_known`; None too if a projection refuses one of the commands: each is then tried by itself."""
        after = self._drive(inline.head())
        done = self._write_known(batch)
        if done is not None:
            try:
                self._drive(inline.project(after, memory=inline.memory))
            except ProjectionFailed:
                return None
        return done

    async def _commit_gated(self, batch: list[Pending], snapshot: Snapshot) -> None:
        """Write commands whose sender holds the gate of rows in memory; raise if nothing was written."""
        deadline = self._loop.time() + BUSY_LIMIT_S
        while True:
            snapshot.rewind()
            try:
                done = self._commit(batch)
                break
            except sqlite3.Error as error:
                if not is_busy(error) or self._loop.time() > deadline:
                    raise sqlite_fault(error, self.path) from error
            await asyncio.sleep(BUSY_RETRY_S)
        snapshot.accept()
        for pending, outcome in done.settled:
            pending.settle(outcome)
        self._published(done.changed, done.touched, done.taken)

    def _write_known(self, batch: list[Pending]) -> _Done | None:
        """Write commands whose senders know the state, all at once; None if one of them was wrong."""
        text = self._sql.text
        seal = self._sql.seal
        execute = self._conn.execute
        settled: list[tuple[Pending, Outcome]] = []
        changed: list[Run] = []
        advances: list[tuple[Any, ...]] = []
        releasing: list[tuple[Any, ...]] = []
        rows: list[list[Any]] = []
        events: list[tuple[Any, ...]] = []
        for pending in batch:
            command = pending.command
            if isinstance(command, Append):
                assert command.expected is not None
                version = command.expected
                for one in command.events:
                    version += 1
                    events.append(
                        (command.run_key, version, one.event_id, one.event.TOPIC, seal(one.payload), command.at_ms)
                    )
                fence = (version, command.run_key, command.expected, command.owner, command.epoch)
                run = command.run
                if run is None:
                    advances.append(fence)
                else:
                    (releasing if releases(command.events, run) else advances).append(fence)
                    rows.append(self._sql.changed_values(run))
                    changed.append(run)
                settled.append((pending, Appended(version)))
            else:
                assert isinstance(command, Start)
                run = born(command)
                found = execute(text.insert_run_if_new, self._sql.run_values(run)).fetchone()
                if found is None:
                    return None
                run = replace(run, run_key=found[0])
                epoch = 0 if command.owner is None else 1
                execute(text.insert_head, (run.run_key, 1, command.owner, epoch))
                one = command.started
                events.append((run.run_key, 1, one.event_id, one.event.TOPIC, seal(one.payload), command.at_ms))
                changed.append(run)
                settled.append((pending, Appended(1, run)))
        executemany = self._conn.executemany
        if advances and executemany(text.advance, advances).rowcount != len(advances):
            return None
        if releasing and executemany(text.advance_and_release, releasing).rowcount != len(releasing):
            return None
        executemany(text.insert_event, events)
        if rows:
            executemany(text.update_run, rows)
        return _Done(settled, changed)

    def _write_left(self, batch: list[Pending], done: _Done) -> None:
        """Load, decide and write commands in a savepoint, each in one of its own where they cannot go together."""
        inline = self._inline
        self._conn.execute("SAVEPOINT some")
        try:
            after = 0 if inline is None else self._drive(inline.head())
            decisions = self._drive(self._sql.execute([pending.command for pending in batch]))
            if inline is not None and any(decision.writes for decision in decisions):
                self._drive(inline.project(after, memory=inline.memory))
        except (sqlite3.DataError, sqlite3.IntegrityError, KeiroError) as error:
            self._conn.execute("ROLLBACK TO some")
            self._conn.execute("RELEASE some")
            if len(batch) == 1:
                known = isinstance(error, KeiroError)
                batch[0].fail(error if known else _caused(sqlite_fault(error, self.path), error))
            else:
                # One bad command must not take the others down.
                for pending in batch:
                    self._write_left([pending], done)
            return
        self._conn.execute("RELEASE some")
        changed, touched, taken = published(decisions)
        done.settled += [(pending, decision.outcome) for pending, decision in zip(batch, decisions, strict=True)]
        done.changed += changed
        done.touched += touched
        done.taken += taken

    def _drive(self, program: Program[T]) -> T:
        try:
            statements = next(program)
            while True:
                try:
                    results = self._results(statements)
                except Exception as error:
                    statements = program.throw(error)
                else:
                    statements = program.send(results)
        except StopIteration as stop:
            result: T = stop.value
            return result

    def _results(self, statements: Sequence[Statement]) -> list[list[Row]]:
        execute = self._conn.execute
        if len(statements) < MANY:
            return [execute(sql, values).fetchall() for sql, values in statements]
        results: list[list[Row]] = []
        for sql, group in groupby(statements, key=itemgetter(0)):
            rows = [values for _, values in group]
            if len(rows) >= MANY and _gives_nothing(sql):
                self._conn.executemany(sql, rows)
                results += [[]] * len(rows)
            else:
                results += [execute(sql, values).fetchall() for values in rows]
        return results

    async def _locked(self, program: Callable[[], Program[T]]) -> T:
        """Run a writing program in a transaction of its own, waiting while another process holds the lock."""
        deadline = self._loop.time() + BUSY_LIMIT_S
        while True:
            self._check_place()
            try:
                self._conn.execute("BEGIN IMMEDIATE")
                try:
                    result = self._drive(program())
                    self._conn.execute("COMMIT")
                    return result
                except BaseException:
                    if self._conn.in_transaction:
                        self._conn.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                if not is_busy(error) or self._loop.time() > deadline:
                    raise sqlite_fault(error, self.path) from error
            await asyncio.sleep(BUSY_RETRY_S)

    def _select(self, sql: str, values: Sequence[Any]) -> list[Any]:
        with self._reading():
            return self._conn.execute(sql, values).fetchall()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        self._check_place()
        try:
            yield
        except sqlite3.Error as error:
            raise sqlite_fault(error, self.path) from error

    def run_tables(self) -> RunTables:
        """Blocking access to runs."""

        def connect() -> tuple[Execute, Callable[[], None]]:
            conn = sqlite3.connect(self.path, timeout=30, isolation_level=None, check_same_thread=False)
            conn.execute(f"PRAGMA synchronous={self._synchronous}")
            return execute_of_sqlite(conn), conn.close

        return SqlRunTables(self._sql, connect, lambda error: sqlite_fault(error, self.path))

    # Rows of projections, and transactions of callers

    def keep(self, models: Sequence[ReadModel], mapper: EventMapper) -> Kept:
        """Keep the rows of these projections from now on."""
        kept = SqlKept(self, models, mapper)
        self._inline = kept.inline
        self._gated = None if kept.gate is None else GatedQueue(kept.gate, self._commit_gated)
        return kept

    def listing(self, mapper: EventMapper) -> Listing:
        """The listing of executions."""
        return SqlListing(self, mapper)

    async def transact(self, program: Callable[[], Program[T]], *, locked: bool) -> T:
        """Run a program in a transaction: any that writes has the only lock there is."""
        return await self._locked(program)

    async def query(self, program: Callable[[], Program[T]]) -> T:
        """Run a program that only reads."""
        self._check_place()
        try:
            return self._drive(program())
        except sqlite3.Error as error:
            raise sqlite_fault(error, self.path) from error

    async def create_tables(self, models: Sequence[ReadModel], *, create: bool) -> None:
        """Create the tables of projections, or check them."""
        from keiro.stores.tables import create_on_sqlite

        await asyncio.to_thread(create_on_sqlite, self.path, models, create=create)

    def announce(self) -> None:
        """A transaction that was not ours to commit has ended: look, here and in other processes, what it wrote."""
        self.listener.woken()
        self._wake.send()

    def join(self, connection: Any) -> Joined:
        """The journal through a caller's connection."""
        return join_sqlite(connection, self.path, self._sql, self._inline)

    def connections(self) -> Connections:
        """Connections to the file, for transactional steps."""
        return self._connections

    # Reading

    async def run(self, run_id: str) -> Run | None:
        """The row of a run."""
        rows = self._select(self._sql.text.load_keys, (run_id,))
        return self._sql.to_run(rows[0]) if rows else None

    async def head(self, run_id: str) -> tuple[Run, Head] | None:
        """The row and the head of a run."""
        rows = self._select(self._sql.text.load, (run_id,))
        return self._sql.to_owned(rows[0]) if rows else None

    async def runs(
        self, *, status: str | None = None, workflow: str | None = None, before: int | None = None, limit: int
    ) -> list[Run]:
        """Runs, newest first."""
        sql, values = self._sql.list_runs(status, workflow, before, limit)
        return [self._sql.to_run(row) for row in self._select(sql, values)]

    async def ended(self, run_ids: Sequence[str]) -> list[Run]:
        """The terminal ones of these runs."""
        return [self._sql.to_run(row) for row in self._select(*self._sql.named(self._sql.text.ended, run_ids))]

    async def history(self, run_keys: Sequence[int], after: int = 0) -> dict[int, list[Stored]]:
        """The events of runs."""
        unseal = self._sql.unseal
        # SQLite gives values as the journal has them, and this is what a replay waits for: no conversions, and no list
        # of rows beside that of the events.
        with self._reading():
            return {
                key: [
                    Stored(position, run_key, version, event_id, topic, unseal(payload), at_ms)
                    for position, run_key, version, event_id, topic, payload, at_ms in self._conn.execute(
                        self._sql.text.history, (key, after)
                    )
                ]
                for key in run_keys
            }

    async def step_maps(self, run_key: int) -> list[str]:
        """Snapshots of a run's history."""
        return [self._sql.unseal(row[0]) for row in self._select(self._sql.text.step_maps, (run_key,))]

    async def keep_step_map(self, run_key: int, until: int, state: str) -> None:
        """Keep a snapshot."""
        await self._locked(lambda: self._sql.keep_step_map(run_key, until, state))

    async def snapshot(self, run_key: int, after: int, until: int) -> None:
        """Keep a snapshot of a stretch of the journal."""
        await self._locked(lambda: self._sql.snapshot(run_key, after, until))

    async def drop_step_maps(self, run_key: int) -> None:
        """Delete the snapshots."""
        await self._locked(lambda: self._sql.drop_step_maps(run_key))

    async def read(self, after: int, limit: int) -> list[Stored]:
        """Events by position."""
        return [self._sql.to_stored(row) for row in self._select(self._sql.text.read, (after, limit))]

    # Retention

    async def consider(self, commands: Sequence[Command]) -> list[Outcome]:
        """What commands would do."""
        return await self.query(lambda: self._sql.consider(commands))

    async def existing(self, run_ids: Sequence[str]) -> set[str]:
        """Those of these runs that there are."""
        return {row[0] for row in self._select(*self._sql.named(self._sql.text.existing, run_ids))}

    async def ended_before(self, before_ms: int, after: tuple[int, int], limit: int) -> list[Candidate]:
        """Lineages that have ended."""
        return [self._sql.to_candidate(row) for row in self._select(*self._sql.ended_before(before_ms, after, limit))]

    async def handed_off_before(self, before_ms: int, after: tuple[int, int], limit: int) -> list[Candidate]:
        """Old rounds."""
        rows = self._select(*self._sql.handed_off_before(before_ms, after, limit))
        return [self._sql.to_candidate(row) for row in rows]

    # Workers

    async def register(self, incarnation: Incarnation) -> int:
        """Enter a worker."""
        key = await self._locked(lambda: self._sql.register(incarnation, self._wake.address, self.now_ms()))
        self._look_around()
        self._wake.send()  # the others learn that there is one more to wake
        return key

    async def renew(self, worker_key: int) -> bool:
        """Extend a lease."""
        renewed = await self._locked(lambda: self._sql.renew(worker_key, self.now_ms()))
        self._look_around()
        return renewed

    async def workers(self) -> list[WorkerRow]:
        """All workers."""
        return self._sql.to_workers(self._select(self._sql.text.list_workers, ()))

    async def claim(
        self, worker_key: int, workflows: Sequence[str], limit: int, limits: Limits = NO_LIMITS
    ) -> list[tuple[Run, Head]]:
        """Take pending runs."""
        # Looking needs no lock: an idle worker must not stop the others from writing.
        now, open_now = self.now_ms(), workflows
        if limits:
            uses = [self._select(*look) for look in self._sql.uses(worker_key, limits, now)]
            open_now = let_through(workflows, limits, self._sql.to_lefts(limits, uses, limit))
        if not self._select(*self._sql.any_claimable(open_now, now)):
            return []
        return await self._locked(lambda: self._sql.claim(worker_key, workflows, limit, self.now_ms(), limits))

    async def opens_ms(self, queue: Limited, at_ms: int) -> int | None:
        """When a rate that was used up has room again."""
        if queue.rate is None:
            return None
        rows = self._select(*self._sql.opens(queue.name, at_ms - queue.rate.per_ms, queue.rate.starts))
        return int(rows[0][0]) + queue.rate.per_ms if rows else None

    async def due(self, workflows: Sequence[str]) -> list[tuple[str, int]]:
        """Parked runs whose time has come."""
        return [(run_id, version) for run_id, version in self._select(*self._sql.due(workflows, self.now_ms()))]

    async def asked(self) -> list[tuple[str, int]]:
        """Runs that are asked to end."""
        return [(run_id, over) for run_id, over in self._select(self._sql.text.asked, ())]

    async def next_due_ms(self, workflows: Sequence[str]) -> int | None:
        """When the next paced run is due."""
        found: int | None = self._select(*self._sql.next_due(workflows))[0][0]
        return found

    async def unregistered(self, workflows: Sequence[str]) -> list[str]:
        """Lanes with runs to be driven that are not among these."""
        now = self.now_ms()
        rows = self._select(*self._sql.unregistered(workflows, now))
        versions = self._select(*self._sql.versions(workflows, now)) if pinned(workflows) else []
        return self._sql.to_unregistered(rows, workflows, versions)

    async def release(self, worker_key: int, run_keys: Sequence[int]) -> None:
        """Hand runs back."""
        if await self._locked(lambda: self._sql.release(worker_key, run_keys)):
            self._wake.send()

    async def owned(self, worker_key: int) -> dict[int, int]:
        """What a worker owns."""
        return dict(self._select(self._sql.text.owned, (worker_key,)))

    async def newest(self, lineage_id: str) -> Run | None:
        """The newest round."""
        rows = self._select(self._sql.text.newest, (lineage_id,))
        return self._sql.to_run(rows[0]) if rows else None

    async def children(self, workflow: str, key: str) -> list[ChildRow]:
        """The children of a run."""
        return [self._sql.to_child(row) for row in self._select(self._sql.text.list_children, (key, workflow))]

    async def parents_of(self, lineage_id: str) -> list[RunParent]:
        """The edges to parents."""
        return [to_edge(row) for row in self._select(self._sql.text.parents_of, (lineage_id,))]

    async def children_of(self, lineage_id: str) -> list[RunParent]:
        """The edges from children."""
        return [to_edge(row) for row in self._select(self._sql.text.children_of, (lineage_id,))]

    async def bury(self, worker: WorkerRow) -> bool:
        """Remove a dead worker as it was seen."""
        return await self._locked(lambda: self._sql.bury(worker))

    async def adopt_orphans(self) -> bool:
        """Make pending what is owned by no listed worker."""
        return await self._locked(self._sql.adopt_orphans)


@lru_cache(maxsize=256)
def _gives_nothing(sql: str) -> bool:
    return sql.startswith(("INSERT", "UPDATE", "DELETE")) and "RETURNING" not in sql


def _identity(path: str) -> tuple[int, int] | None:
    """Which file a path leads to."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _caused(error: KeiroError, cause: BaseException) -> KeiroError:
    error.__cause__ = cause
    return error
