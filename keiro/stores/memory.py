"""The store in memory: nothing is durable, everything else is as in the others.

It is the executable model the SQL stores are compared with: plain dicts, one lock (the event-loop thread), the same
decisions.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
from asyncio import Future
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any

from msgspec.structs import replace

from keiro.decisions import (
    Above,
    Acted,
    Appended,
    Below,
    Command,
    Completions,
    Decision,
    EndedChildren,
    LastEdge,
    Links,
    Loaded,
    Need,
    Newest,
    Numbered,
    One,
    Outcome,
    Rounds,
    Stored,
    Taken,
    Write,
    decide,
)
from keiro.errors import InvalidCall, KeiroError
from keiro.events import Event
from keiro.history import snapshot_of
from keiro.identity import RunId, parse_run_id
from keiro.lanes import lane, lane_in, pinned
from keiro.limits import LONGEST_S, NO_LIMITS, Left, Limits, Use, admitted, begins, left, queue_of, queues_of
from keiro.limits import Queue as Limited
from keiro.mapper import EventMapper
from keiro.projections.base import ReadModel
from keiro.projections.invariants import COLUMNS, Examined, Finding, diagnose
from keiro.projections.rebuilt import ComputedRuns, mended
from keiro.projections.run_parents import RUN_PARENTS, TOPICS, ComputedRunParents, RunParent
from keiro.projections.runs import claimed
from keiro.projections.waits import CHILDREN, CLOCKS, DEFERREDS, TIMESTAMPS, Change, ChildRow, Forget, Put, timestamp
from keiro.repository import MemorySnapshots, SnapshotTable
from keiro.rows import Head, Run, Status
from keiro.stores.base import (
    LEASE_MS,
    MOST_WRITTEN,
    Candidate,
    Clock,
    Incarnation,
    Listener,
    Pending,
    Queue,
    WorkerRow,
    published,
    refused_when_closed,
    tell,
    wall_ms,
)
from keiro.stores.blocking import RunTables
from keiro.stores.caller import Joined
from keiro.stores.connections import Connections
from keiro.stores.kept import BITE, Computed, Kept, MemoryRows, Report, decoded
from keiro.stores.listing import Listed, Listing, MemoryListing
from keiro.stores.memory_edges import Edges
from keiro.stores.memory_journal import MemoryJournal
from keiro.stores.recorders.memory import MemoryFactory as MemoryFactory  # the module serves as PERSISTENCE_MODULE too
from keiro.stores.transaction import Gate


class Database:
    """What a SQL store has in its file or server: engines of one process that name the same one share it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # engines in the event loops of several threads may share it
        self.runs: dict[str, Run] = {}
        self.pending: set[int] = set()
        self.ids: dict[int, str] = {}
        self.heads: dict[int, Head] = {}
        self.journal = MemoryJournal()
        self.linked: dict[tuple[str, str], set[tuple[Any, ...]]] = {}
        self.named: dict[str, set[tuple[Any, ...]]] = {}
        self.by_run: dict[int, list[Stored]] = {}
        self.by_event: dict[tuple[int, bytes], Stored] = {}
        self.workers: dict[int, WorkerRow] = {}
        self.last_worker = 0
        self.last_key = 0
        self.step_maps: dict[int, dict[int, str]] = {}
        self.snapshots = MemorySnapshots()
        self.open_stores: list[MemoryStore] = []
        self.edges = Edges()
        self.kept: dict[str, MemoryRows] = {}
        self.rounds: dict[str, list[str]] = {}  # of lineages: the rounds after round 0, the oldest first
        self.rows: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {}
        self.under: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
        self.due: set[int] = set()
        self.asked: set[str] = set()
        self.held: dict[int, str] = {}  # of runs that are owned: the queue a slot of which they hold
        self.starts: dict[str, dict[int, int]] = {}
        self.listed = Listed()

    def keep(self, run: Run) -> None:
        """Store a row."""
        self.runs[run.run_id] = run
        self.listed.stale[run.run_id] = None
        if run.status == Status.PENDING:
            self.pending.add(run.run_key)
        else:
            self.pending.discard(run.run_key)
        if run.cancel_requested_at_ms is not None and not run.terminal:
            self.asked.add(run.run_id)
        else:
            self.asked.discard(run.run_id)
        if run.status == Status.SUSPENDED and run.wake_at_ms is not None:
            self.due.add(run.run_key)
        else:
            self.due.discard(run.run_key)

    def change(self, change: Change) -> None:
        """Change a row of `keiro.projections.waits` or `keiro.projections.run_parents`."""
        if change.table == RUN_PARENTS:
            self.edges.change(change)
            self.listed.stale[change.key["child_id"]] = None
            return
        rows = self.rows.setdefault(change.table, {})
        whole = tuple(change.key.values())
        if isinstance(change, Put):
            if whole not in rows:
                rows[whole] = {**change.key, **change.values}
                self.under.setdefault((change.table, *whole[:2]), []).append(whole)
                if change.table == CHILDREN:
                    parent = (change.values["parent_id"], change.values["parent_name"])
                    self.linked.setdefault(parent, set()).add(whole)
                    self.named.setdefault(whole[0], set()).add(whole)
            return
        # A key is whole, or the first two columns of one: all clocks of a run.
        for key in [whole] if whole in rows else self.under.get((change.table, *whole[:2]), ()):
            row = rows.get(key)
            if row is None or key[: len(whole)] != whole:
                continue
            if isinstance(change, Forget):
                del rows[key]
            elif change.unless_set is None or row[change.unless_set] is None:
                row.update(change.values)

    def claimable(
        self, now_ms: int, workflows: Sequence[str], limit: int, limits: Limits, lefts: dict[str, Left]
    ) -> list[Run]:
        """Pending runs that are due, and parked ones whose time has come, as far as the limits let them through."""
        parked = self.parked(now_ms, workflows)
        pending = [
            run
            for run in self.pending_runs()
            if lane_in(workflows, run) is not None
            and (run.next_attempt_at_ms is None or run.next_attempt_at_ms <= now_ms)
        ]
        pending.sort(key=lambda run: (run.priority, run.run_key))
        heads = self.heads
        return [
            run
            for run, _ in admitted(
                [(run, heads[run.run_key]) for run in parked],
                [(run, heads[run.run_key]) for run in pending],
                limits,
                lefts,
                limit,
            )
        ]

    def use(self, queue: Limited, worker_key: int, now_ms: int) -> Use:
        """What is taken of a queue."""
        owners = [self.heads[key].owner for key, name in self.held.items() if name == queue.name]
        since = now_ms if queue.rate is None else now_ms - queue.rate.per_ms
        starts = self.starts.get(queue.name, {})
        return Use(
            owned=sum(owner is not None for owner in owners),
            mine=owners.count(worker_key),
            started=sum(number for at, number in starts.items() if at > since),
        )

    def parked(self, now_ms: int, workflows: Sequence[str]) -> list[Run]:
        """The parked runs whose time has come, the longest due first."""
        waits = [
            (run.wake_at_ms or 0, key, run)
            for key in self.due
            if lane_in(workflows, run := self.runs[self.ids[key]]) is not None and (run.wake_at_ms or 0) <= now_ms
        ]
        return [run for _, _, run in sorted(waits, key=itemgetter(0, 1))]

    def renew(self, worker_key: int, now_ms: int) -> bool:
        """Extend a lease."""
        with self.lock:
            worker = self.workers.get(worker_key)
            if worker is None:
                return False
            self.workers[worker_key] = replace(worker, lease_expires_at_ms=now_ms + LEASE_MS)
            return True

    def parent_of(self, run: Run) -> str | None:
        """The lineage that has a run as a child."""
        row = self.rows.get(CHILDREN, {}).get((run.key, run.workflow))
        return None if row is None else str(RunId(row["parent_name"], row["parent_id"]))

    def forget(self, gone: Sequence[Run]) -> None:
        """Delete runs, and all there is of them."""
        for run in gone:
            del self.runs[run.run_id], self.heads[run.run_key], self.ids[run.run_key]
            self.listed.stale[run.run_id] = None
            for stored in self.by_run.pop(run.run_key):
                del self.by_event[run.run_key, stored.event_id]
                self.journal.remove(stored.position)
            self.snapshots.forget(run.run_id)
            self.step_maps.pop(run.run_key, None)
            self.pending.discard(run.run_key)
            self.due.discard(run.run_key)
            for table in (CLOCKS, DEFERREDS):
                for key in self.under.pop((table, run.workflow, run.run_id), ()):
                    self.rows[table].pop(key, None)
            self.listed.stale.update((edge.child_id, None) for edge in self.edges.children_of(run.run_id))
            self.edges.forget(run.run_id)
            if run.round_ordinal == 0:
                self._forget_children(run)
                continue
            rounds = self.rounds[run.lineage_id]
            at = rounds.index(run.run_id)
            following = self.runs.get(rounds[at + 1]) if at + 1 < len(rounds) else None
            if following is not None and following.parent_run_id == run.run_id:
                self.keep(replace(following, parent_run_id=None))
            del rounds[at]
            if not rounds:
                del self.rounds[run.lineage_id]

    def _forget_children(self, run: Run) -> None:
        rows = self.rows.get(CHILDREN, {})
        for whole in self.linked.pop((run.key, run.workflow), ()):
            rows.pop(whole, None)
            self._unname(whole)
            self.under.pop((CHILDREN, *whole), None)
            child = self.runs.get(str(RunId(whole[1], whole[0])))
            if child is not None and child.parent_run_id == run.run_id:
                self.keep(replace(child, parent_run_id=None))
        own = rows.pop((run.key, run.workflow), None)
        if own is not None:
            self._unname((run.key, run.workflow))
            self.under.pop((CHILDREN, run.key, run.workflow), None)
            self.linked[own["parent_id"], own["parent_name"]].discard((run.key, run.workflow))

    def _unname(self, whole: tuple[Any, ...]) -> None:
        same = self.named.get(whole[0], set())
        same.discard(whole)
        if not same:
            self.named.pop(whole[0], None)

    def pending_runs(self) -> Iterator[Run]:
        """The pending runs, oldest first."""
        for key in sorted(self.pending):
            yield self.runs[self.ids[key]]


_named: dict[str, Database] = {}


class MemoryRunTables:
    """Runs and snapshots of a database in memory."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self.snapshots: SnapshotTable = db.snapshots

    def read(self, run_id: str, gt: int | None, lte: int | None, desc: bool, limit: int | None) -> Sequence[Stored]:
        """The events of a run by version."""
        run = self._db.runs.get(run_id)
        rows = [] if run is None else self._db.by_run[run.run_key][gt or 0 : lte]
        return (rows[::-1] if desc else rows)[:limit]

    def renew(self, worker_key: int, now_ms: int) -> bool:
        """Extend the lease of a worker."""
        return self._db.renew(worker_key, now_ms)

    def close(self) -> None:
        """Nothing to disconnect from."""


class MemoryStore:
    """A journal in dicts: a private one, or with a name (`memory://name`) the process's one of that name."""

    listener: Listener

    def __init__(self, name: str = "", clock: Clock = wall_ms) -> None:
        self.now_ms = clock
        self._db = db = _named.setdefault(name, Database()) if name else Database()
        self._runs = db.runs
        self._ids = db.ids
        self._heads = db.heads
        self._journal = db.journal
        self._by_run = db.by_run
        self._by_event = db.by_event
        self._workers = db.workers
        self._kept: MemoryKept | None = None

    async def open(self, *, migrate: bool) -> None:
        """Nothing to connect to."""
        self._loop = asyncio.get_running_loop()
        self._queue = Queue(self._loop, lambda: self._loop.call_soon(self._flush))
        self._closed = False
        self._db.open_stores.append(self)

    async def close(self) -> None:
        """Commit what is queued."""
        self._flush()
        self._closed = True
        self._db.open_stores.remove(self)

    def submit(self, command: Command) -> Future[Outcome]:
        """Queue a command."""
        if self._closed:
            return refused_when_closed(self._loop)
        return self._queue.put(command)

    def _flush(self) -> None:
        done: list[Decision] = []
        settled: list[tuple[Pending, Outcome]] = []
        with self._db.lock:
            for pending in self._queue.take():
                try:
                    decision = self._write(self._decide(pending.command))
                except KeiroError as error:  # raised before anything is written
                    pending.fail(error)
                    continue
                done.append(decision)
                settled.append((pending, decision.outcome))
        for pending, outcome in settled:
            pending.settle(outcome)
        if settled:
            self._publish(*published(done))

    def run_tables(self) -> RunTables:
        """Access to runs from any thread."""
        return MemoryRunTables(self._db)

    def keep(self, models: Sequence[ReadModel], mapper: EventMapper) -> Kept:
        """Keep the rows of these projections from now on."""
        self._kept = MemoryKept(self._db, models, mapper)
        return self._kept

    def listing(self, mapper: EventMapper) -> Listing:
        """The listing of executions."""
        return MemoryListing(self._db, mapper)

    def join(self, connection: Any) -> Joined:
        """No connection leads here."""
        raise InvalidCall(
            f"connection={connection!r}: the journal is in memory and can share no transaction with a database. Use a "
            "sqlite:/// or postgresql:// URL"
        )

    def connections(self) -> Connections:
        """There are none."""
        raise InvalidCall(
            "run.transaction: the journal is in memory and can share no transaction with a database. Use a sqlite:/// "
            "or postgresql:// URL, or in a test replace the step: keiro.testing.replace_steps"
        )

    def announce(self) -> None:
        """A transaction that was not ours to commit has ended: look, here and in other processes, what it wrote."""
        self.listener.woken()

    def _publish(self, changed: list[Run], touched: Sequence[str] = (), taken: Sequence[Taken] = ()) -> None:
        tell(self.listener, changed, touched, taken)
        for other in list(self._db.open_stores):
            if other is not self:
                with suppress(RuntimeError):  # its event loop ended before its engine was closed: nobody listens
                    other._loop.call_soon_threadsafe(other.listener.woken)

    def _decide(self, command: Command) -> Decision:
        deciding = decide(command)
        try:
            need = next(deciding)
            while True:
                need = deciding.send(self._answer(need))
        except StopIteration as stop:
            decision: Decision = stop.value
            return decision

    def _answer(self, need: Need) -> Any:
        match need:
            case One(run_id, event_id, after):
                run = self._runs.get(run_id)
                if run is None:
                    return None
                key = run.run_key
                overtaken = after is not None and any(":" in row.topic for row in self._by_run[key][after:])
                present = None if event_id is None else self._by_event.get((key, event_id))
                return Loaded(run, self._heads[key], present, overtaken)
            case Newest(lineage_id):
                return self._answer(One(self._db.rounds.get(lineage_id, [lineage_id])[-1]))
            case Rounds(lineage_id, most):
                return [self._runs[name] for name in self._db.rounds.get(lineage_id, ())[:most]]
            case Acted(run_id, after):
                since = self._by_run[self._runs[run_id].run_key][after:]
                return any(row.topic == "StepRecorded" or ":" in row.topic for row in since)
            case Links(key):
                named = [self._db.rows[CHILDREN][whole] for whole in sorted(self._db.named.get(key, ()))]
                return [
                    (str(RunId(row["child_name"], key)), str(RunId(row["parent_name"], row["parent_id"])))
                    for row in named
                ]
            case Completions(run_id):
                of = [row for row in self._db.rows.get(DEFERREDS, {}).values() if row["execution_id"] == run_id]
                of.sort(key=lambda row: (row["completed_at_ms"], row["deferred_name"]))
                return [(row["deferred_name"], row["exit_json"]) for row in of]
            case EndedChildren(lineage_id):
                parent = parse_run_id(lineage_id)
                ended = [
                    self._runs[str(RunId(row["child_name"], row["child_id"]))]
                    for row in self._db.rows.get(CHILDREN, {}).values()
                    if (row["parent_id"], row["parent_name"]) == (parent.key, parent.workflow)
                    and row["status"] != "running"
                ]
                return sorted(ended, key=lambda run: run.run_key)
            case Below(lineage_id):
                below = [self._runs[edge.child_id] for edge in self._db.edges.children_of(lineage_id)]
                return [run for run in below if not run.terminal or run.handoff_run_id is not None]
            case Above(lineage_id):
                return self._db.edges.above(lineage_id)
            case Numbered(child_id, parent_id):
                return self._db.edges.seqs.get((child_id, parent_id))
            case LastEdge():
                return self._db.edges.last

    def _write(self, decision: Decision) -> Decision:
        """Write all of a decision, or raise with nothing written; the decision with the keys of new runs."""
        last, key = self._db.journal.last, self._db.last_key
        writes: list[Write] = []
        appended: list[Stored] = []
        for write in decision.writes:
            if write.before is None:
                key += 1
                run = replace(write.run, run_key=key)
                write = replace(write, run=run, head=replace(write.head, run_key=key))
            writes.append(write)
            for version, one in enumerate(write.events, write.head.version - len(write.events) + 1):
                last += 1
                topic, run_key = one.event.TOPIC, write.run.run_key
                appended.append(
                    Stored(last, run_key, version, one.event_id, topic, one.payload, write.at_ms, write.run_id)
                )
        if self._kept is not None and appended:
            self._kept.project(appended)  # raises before anything is written
        for write in writes:
            run_key = write.run.run_key
            if write.before is None:
                self._ids[run_key] = write.run_id
                self._by_run[run_key] = []
                if write.run.round_ordinal:
                    self._db.rounds.setdefault(write.run.lineage_id, []).append(write.run_id)
            self._heads[run_key] = write.head
            if write.run is not write.before:
                self._db.keep(write.run)
            for change in write.changes():
                self._db.change(change)
        self._db.journal.last, self._db.last_key = last, key
        if decision.gone:
            self._db.forget(decision.gone)
        self._journal.extend(appended)
        for stored in appended:
            self._by_run[stored.run_key].append(stored)
            self._by_event[stored.run_key, stored.event_id] = stored
        outcome = decision.outcome
        if isinstance(outcome, Appended) and outcome.run is not None:
            outcome = replace(outcome, run=self._runs[outcome.run.run_id])
        return replace(decision, outcome=outcome, writes=tuple(writes))

    async def run(self, run_id: str) -> Run | None:
        """The row of a run."""
        return self._runs.get(run_id)

    async def head(self, run_id: str) -> tuple[Run, Head] | None:
        """The row and the head of a run."""
        run = self._runs.get(run_id)
        return None if run is None else (run, replace(self._heads[run.run_key]))

    async def runs(
        self, *, status: str | None = None, workflow: str | None = None, before: int | None = None, limit: int
    ) -> list[Run]:
        """Runs, newest first."""
        found = []
        for key in reversed(self._ids):
            run = self._runs[self._ids[key]]
            if (
                (before is None or key < before)
                and (status is None or run.status == status)
                and (workflow is None or run.workflow == workflow)
            ):
                found.append(run)
                if len(found) == limit:
                    break
        return found

    async def ended(self, run_ids: Sequence[str]) -> list[Run]:
        """The terminal ones of these runs."""
        return [run for name in run_ids if (run := self._runs.get(name)) is not None and run.terminal]

    async def history(self, run_keys: Sequence[int], after: int = 0) -> dict[int, list[Stored]]:
        """The events of runs."""
        return {key: self._by_run[key][after:] for key in run_keys}

    async def step_maps(self, run_key: int) -> list[str]:
        """Snapshots of a run's history."""
        return list(self._db.step_maps.get(run_key, {}).values())

    async def keep_step_map(self, run_key: int, until: int, state: str) -> None:
        """Keep a snapshot."""
        self._db.step_maps.setdefault(run_key, {})[until] = state

    async def snapshot(self, run_key: int, after: int, until: int) -> None:
        """Keep a snapshot of a stretch of the journal."""
        await self.keep_step_map(run_key, until, snapshot_of(self._by_run[run_key][after:until]))

    async def drop_step_maps(self, run_key: int) -> None:
        """Delete the snapshots."""
        self._db.step_maps.pop(run_key, None)

    async def read(self, after: int, limit: int) -> list[Stored]:
        """Events by position."""
        return self._journal.read(after, limit=limit)

    async def register(self, incarnation: Incarnation) -> int:
        """Enter a worker."""
        with self._db.lock:
            self._db.last_worker += 1
            key = self._db.last_worker
            now = self.now_ms()
            self._workers[key] = WorkerRow(
                key,
                incarnation.worker_id,
                incarnation.host,
                incarnation.pid,
                incarnation.process_started,
                None,
                now,
                now + LEASE_MS,
            )
            return key

    async def renew(self, worker_key: int) -> bool:
        """Extend a lease."""
        return self._db.renew(worker_key, self.now_ms())

    async def workers(self) -> list[WorkerRow]:
        """All workers."""
        return list(self._workers.values())

    async def claim(
        self, worker_key: int, workflows: Sequence[str], limit: int, limits: Limits = NO_LIMITS
    ) -> list[tuple[Run, Head]]:
        """Take pending runs."""
        with self._db.lock:
            now = self.now_ms()
            taken: list[tuple[Run, Head]] = []
            if worker_key not in self._workers:
                return taken
            db = self._db
            for key in [key for key in db.held if self._heads[key].owner is None]:
                del db.held[key]
            lefts = {
                name: left(queue, db.use(queue, worker_key, now), limit)
                for name, (queue, _) in queues_of(limits).items()
            }
            for run in db.claimable(now, workflows, limit, limits, lefts):
                db.held.pop(run.run_key, None)
                if (queue := queue_of(limits, run)) is not None:
                    db.held[run.run_key] = queue.name
                    if begins(run):
                        starts = db.starts.setdefault(queue.name, {})
                        starts[now] = starts.get(now, 0) + 1
                        for at in [at for at in starts if at <= now - LONGEST_S * 1000]:
                            del starts[at]
                run = claimed(run, now)
                head = self._heads[run.run_key]
                head = self._heads[run.run_key] = replace(head, owner=worker_key, epoch=head.epoch + 1)
                self._db.keep(run)
                taken.append((run, replace(head)))
            return taken

    async def opens_ms(self, queue: Limited, at_ms: int) -> int | None:
        """When a rate that was used up has room again."""
        with self._db.lock:
            if queue.rate is None or self._db.use(queue, 0, at_ms).started < queue.rate.starts:
                return None
            since = at_ms - queue.rate.per_ms
            return min(at for at in self._db.starts[queue.name] if at > since) + queue.rate.per_ms

    async def due(self, workflows: Sequence[str]) -> list[tuple[str, int]]:
        """Parked runs whose time has come."""
        with self._db.lock:
            found = self._db.parked(self.now_ms(), workflows)[:MOST_WRITTEN]
            return [(run.run_id, self._heads[run.run_key].version) for run in found]

    async def asked(self) -> list[tuple[str, int]]:
        """Runs that are asked to end."""
        with self._db.lock:
            runs = [self._runs[name] for name in self._db.asked]
            return [(run.run_id, over) for run in runs if (over := run.grace_over_ms) is not None]

    async def next_due_ms(self, workflows: Sequence[str]) -> int | None:
        """When the next paced run is due."""
        with self._db.lock:
            paced = [run for run in self._db.pending_runs() if lane_in(workflows, run) is not None]
            due = [self._runs[self._db.ids[key]] for key in self._db.due]
            parked = [run for run in due if lane_in(workflows, run) is not None]
            dues = [run.next_attempt_at_ms for run in paced] + [run.wake_at_ms for run in parked]
            return min((due for due in dues if due is not None), default=None)

    async def unregistered(self, workflows: Sequence[str]) -> list[str]:
        """Lanes with runs to be driven that are not among these."""
        with self._db.lock:
            now = self.now_ms()
            pending = [run for run in self._db.pending_runs() if (run.next_attempt_at_ms or 0) <= now]
            parked = [run for key in self._db.due if ((run := self._runs[self._db.ids[key]]).wake_at_ms or 0) <= now]
            names = pinned(workflows)
            return sorted(
                {
                    lane(run.workflow, run.version_tag if run.workflow in names else None)
                    for run in (*pending, *parked)
                    if lane_in(workflows, run) is None
                }
            )

    async def release(self, worker_key: int, run_keys: Sequence[int]) -> None:
        """Hand runs back."""
        with self._db.lock:
            self._disown([key for key in run_keys if key in self._heads and self._heads[key].owner == worker_key])

    async def owned(self, worker_key: int) -> dict[int, int]:
        """What a worker owns."""
        with self._db.lock:
            return {key: head.version for key, head in self._heads.items() if head.owner == worker_key}

    async def newest(self, lineage_id: str) -> Run | None:
        """The newest round."""
        rounds = self._db.rounds.get(lineage_id)
        return None if rounds is None else self._runs[rounds[-1]]

    async def children(self, workflow: str, key: str) -> list[ChildRow]:
        """The children of a run."""
        rows = self._db.rows.get(CHILDREN, {}).values()
        found = [_child(row) for row in rows if (row["parent_id"], row["parent_name"]) == (key, workflow)]
        return sorted(found, key=lambda row: (row.created_at, row.child_id.encode()))

    async def parents_of(self, lineage_id: str) -> list[RunParent]:
        """The edges to parents."""
        return self._db.edges.parents_of(lineage_id)

    async def children_of(self, lineage_id: str) -> list[RunParent]:
        """The edges from children."""
        return self._db.edges.children_of(lineage_id)

    async def consider(self, commands: Sequence[Command]) -> list[Outcome]:
        """What commands would do."""
        with self._db.lock:
            return [self._decide(command).outcome for command in commands]

    async def existing(self, run_ids: Sequence[str]) -> set[str]:
        """Those of these runs that there are."""
        return {name for name in run_ids if name in self._runs}

    async def ended_before(self, before_ms: int, after: tuple[int, int], limit: int) -> list[Candidate]:
        """Lineages that have ended."""
        with self._db.lock:
            found = (
                (run.finished_at_ms, run.run_key, run)
                for run in self._runs.values()
                if run.finished_at_ms is not None and run.handoff_run_id is None and run.finished_at_ms <= before_ms
            )
            page = heapq.nsmallest(limit, (one for one in found if one[:2] > after))
            return [
                Candidate(run.lineage_id, ended, key, *self._size(run.lineage_id), self._db.parent_of(run))
                for ended, key, run in page
            ]

    def _size(self, lineage_id: str) -> tuple[int, int]:
        rounds = [self._runs[name] for name in (lineage_id, *self._db.rounds.get(lineage_id, ()))]
        return len(rounds), sum(self._heads[run.run_key].version for run in rounds)

    async def handed_off_before(self, before_ms: int, after: tuple[int, int], limit: int) -> list[Candidate]:
        """Old rounds."""
        with self._db.lock:
            found = (
                (run.finished_at_ms, run.run_key, run)
                for rounds in self._db.rounds.values()
                for run in map(self._runs.__getitem__, rounds[:-2])
                if run.finished_at_ms is not None and run.finished_at_ms <= before_ms
            )
            page = heapq.nsmallest(limit, (one for one in found if one[:2] > after))
            return [
                Candidate(run.lineage_id, ended, key, 1, self._heads[key].version, None) for ended, key, run in page
            ]

    async def bury(self, worker: WorkerRow) -> bool:
        """Remove a dead worker as it was seen."""
        with self._db.lock:
            if self._workers.get(worker.worker_key) != worker:
                return False
            del self._workers[worker.worker_key]
            self._disown([key for key, head in self._heads.items() if head.owner == worker.worker_key])
            return True

    async def adopt_orphans(self) -> bool:
        """Make pending what is owned by no listed worker."""
        with self._db.lock:
            keys = [
                key for key, head in self._heads.items() if head.owner is not None and head.owner not in self._workers
            ]
            self._disown(keys)
            return bool(keys)

    def _disown(self, keys: Sequence[int]) -> None:
        changed: list[Run] = []
        for key in keys:
            head = self._heads[key]
            self._heads[key] = replace(head, owner=None, epoch=head.epoch + 1)
            run = self._runs[self._ids[key]]
            if run.status == Status.RUNNING:
                run = replace(run, status=Status.PENDING)
                self._db.keep(run)
                changed.append(run)
        if changed:
            self._publish(changed)


class MemoryKept:
    """`Kept` beside a journal in memory: all rows are in dicts, shared as the journal is."""

    gate: Gate | None = None

    def __init__(self, db: Database, models: Sequence[ReadModel], mapper: EventMapper) -> None:
        self._db = db
        self._mapper = mapper
        self._rows = {model.name: db.kept.setdefault(model.name, MemoryRows(model)) for model in models}
        self._inline = [self._rows[model.name] for model in models if model.mode == "inline"]

    def project(self, appended: Sequence[Stored]) -> None:
        """Fold events that are about to be appended onto the inline rows. Raises `ProjectionFailed`, with none
        changed.
        """
        until = appended[-1].position
        planned = []
        for rows in self._inline:
            if any(rows.model.wants(stored.topic) for stored in appended):
                before = self._db.journal.read(rows.position)
                planned.append((rows, rows.plan(self._decoded(rows.model, [*before, *appended]))))
        for rows, changes in planned:
            rows.take(changes, until)

    def _decoded(self, model: ReadModel, stored: Sequence[Stored]) -> list[Event]:
        return decoded(self._mapper, [row for row in stored if model.wants(row.topic)])

    async def setup(self, *, create: bool) -> None:
        """See `Kept`."""
        for rows in self._inline:
            rows.apply(self._decoded(rows.model, self._db.journal.read(rows.position)), self._db.journal.last)

    async def head(self) -> int:
        """See `Kept`."""
        return self._db.journal.last

    async def read(self, after: int, until: int, topics: frozenset[str] | None, limit: int) -> list[Event]:
        """See `Kept`."""
        found = [row for row in self._db.journal.read(after, until=until) if topics is None or row.topic in topics]
        return decoded(self._mapper, found[:limit])

    async def tracked(self, model: ReadModel) -> int | None:
        """See `Kept`."""
        return self._rows[model.name].position

    async def advance(self, model: ReadModel, tracked: int, until: int, events: Sequence[Event]) -> bool:
        """See `Kept`."""
        rows = self._rows[model.name]
        if rows.position != tracked:
            return False
        rows.apply(events, until)
        return True

    async def select(self, model: ReadModel, equals: Mapping[str, Any]) -> list[dict[str, Any]]:
        """See `Kept`."""
        return self._rows[model.name].select(equals)

    async def rebuild(self, model: ReadModel) -> Report:
        """See `Kept`."""
        rows = self._rows[model.name]
        computed = Computed(model)
        computed.fold(self._decoded(model, self._db.journal.read(0, until=rows.position)))
        return rows.mend(computed.rows)

    async def examine(self, after: int, *, fix: bool) -> tuple[list[Finding], int | None]:
        """See `Kept`."""
        db = self._db
        with db.lock:
            keys = sorted(key for key in db.ids if key > after and db.ids[key] in db.runs)[:BITE]
            found: list[Finding] = []
            for key in keys:
                run, head = db.runs[db.ids[key]], db.heads[key]
                rows = {
                    table: {
                        row[columns[0]]: row
                        for row in db.rows.get(table, {}).values()
                        if (row["flow_name"], row["execution_id"]) == (run.workflow, run.run_id)
                    }
                    for table, columns in COLUMNS.items()
                }
                events = decoded(self._mapper, db.by_run.get(key, ()))
                listed = head.owner is None or head.owner in db.workers
                first = db.runs.get(run.lineage_id)
                child = db.rows.get(CHILDREN, {}).get((run.key, run.workflow))
                diagnosis = diagnose(
                    Examined(
                        run,
                        head,
                        listed,
                        events,
                        rows[CLOCKS],
                        rows[DEFERREDS],
                        None if first is None else first.parent_run_id,
                        None if child is None else _child(child),
                    )
                )
                found += diagnosis.findings
                if fix:
                    if diagnosis.run is not None:
                        db.keep(diagnosis.run)
                    if diagnosis.version is not None:
                        db.heads[key] = replace(head, version=diagnosis.version)
                    for change in diagnosis.changes:
                        db.change(change)
            return found, keys[-1] if len(keys) == BITE else None

    async def rebuild_runs(self) -> Report:
        """See `Kept`."""
        computed = ComputedRuns({})
        computed.fold(decoded(self._mapper, self._db.journal.read(0)))
        updated = 0
        for name, run in self._db.runs.items():
            should_be = mended(run, computed.runs.get(name), self._db.heads[run.run_key].owner is not None)
            if should_be != run:
                self._db.keep(should_be)
                updated += 1
        return Report(updated=updated, verified=len(computed.runs) - updated)

    async def rebuild_run_parents(self) -> Report:
        """See `Kept`."""
        db = self._db
        with db.lock:
            computed = ComputedRunParents({}, {})
            computed.fold(decoded(self._mapper, [row for row in db.journal.read(0) if row.topic in TOPICS]))
            kept, seqs = db.edges.seqs, computed.seqs
            report = Report(
                inserted=len(seqs.keys() - kept.keys()),
                updated=sum(kept.get(edge, seq) != seq for edge, seq in seqs.items()),
                deleted=len(kept.keys() - seqs.keys()),
                verified=sum(kept.get(edge) == seq for edge, seq in seqs.items()),
            )
            if report.differences:
                db.listed.stale.update((child, None) for child, _ in (*kept, *seqs))
                db.edges.replace(seqs)
        return report


def _child(row: Mapping[str, Any]) -> ChildRow:
    values = dict(row)
    for name in TIMESTAMPS:
        values[name] = None if row[name] is None else timestamp(row[name])
    return ChildRow(**values)
