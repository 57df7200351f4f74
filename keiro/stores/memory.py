"""The store in memory: nothing is durable, everything else is as in the others.

It is the executable model the SQL stores are compared with: plain dicts, one lock (the event-loop thread), the same
decisions.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Sequence

from msgspec.structs import replace

from keiro.decisions import Append, Command, Decision, Loaded, Outcome, Start, Stored, decide
from keiro.rows import Head, Run, Status
from keiro.stores.base import LEASE_MS, Clock, Incarnation, Listener, Pending, Queue, WorkerRow, wall_ms


class Database:
    """What a SQL store has in its file or server: engines of one process that name the same one share it."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.ids: dict[int, str] = {}
        self.heads: dict[int, Head] = {}
        self.journal: list[Stored] = []
        self.by_run: dict[int, list[Stored]] = {}
        self.by_event: dict[tuple[int, bytes], Stored] = {}
        self.workers: dict[int, WorkerRow] = {}
        self.last_worker = 0
        self.open_stores: list[MemoryStore] = []


_named: dict[str, Database] = {}


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

    async def open(self, *, migrate: bool) -> None:
        """Nothing to connect to."""
        self._loop = asyncio.get_running_loop()
        self._queue = Queue(self._loop, self._flush)
        self._db.open_stores.append(self)

    async def close(self) -> None:
        """Commit what is queued."""
        self._flush()
        self._db.open_stores.remove(self)

    def submit(self, command: Command) -> Future[Outcome]:
        """Queue a command."""
        return self._queue.put(command)

    def _flush(self) -> None:
        changed: list[Run] = []
        settled: list[tuple[Pending, Outcome]] = []
        for pending in self._queue.take():
            decision = decide(pending.command, self._load(pending.command))
            outcome = self._write(decision, changed) if decision.events else decision.outcome
            settled.append((pending, outcome))
        for pending, outcome in settled:
            pending.settle(outcome)
        if settled:
            self._publish(changed)

    def _publish(self, changed: list[Run]) -> None:
        self.listener.committed(changed)
        for other in self._db.open_stores:
            if other is not self:
                other._loop.call_soon_threadsafe(other.listener.woken)

    def _load(self, command: Command) -> Loaded | None:
        run = self._runs.get(command.run_id)
        if run is None:
            return None
        event_id = command.started.event_id if isinstance(command, Start) else command.events[0].event_id
        overtaken = False
        if isinstance(command, Append) and command.owner is None and command.expected is not None:
            overtaken = any(":" in row.topic for row in self._by_run[run.run_key][command.expected :])
        return Loaded(run, self._heads[run.run_key], self._by_event.get((run.run_key, event_id)), overtaken)

    def _write(self, decision: Decision, changed: list[Run]) -> Outcome:
        run, head = decision.run, decision.head
        assert run is not None and head is not None
        outcome = decision.outcome
        if decision.before is None:
            run = replace(run, run_key=len(self._ids) + 1)
            head = replace(head, run_key=run.run_key)
            self._ids[run.run_key] = run.run_id
            self._by_run[run.run_key] = []
            outcome = replace(outcome, run=run)
        self._heads[run.run_key] = head
        if run is not decision.before:
            self._runs[run.run_id] = run
            changed.append(run)
        events = self._by_run[run.run_key]
        for one in decision.events:
            stored = Stored(
                len(self._journal) + 1,
                run.run_key,
                len(events) + 1,
                one.event_id,
                one.event.TOPIC,
                one.payload,
                decision.at_ms,
                run.run_id,
            )
            self._journal.append(stored)
            events.append(stored)
            self._by_event[run.run_key, one.event_id] = stored
        return outcome

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

    async def read(self, after: int, limit: int) -> list[Stored]:
        """Events by position."""
        return self._journal[after : after + limit]

    async def register(self, incarnation: Incarnation) -> int:
        """Enter a worker."""
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
        worker = self._workers.get(worker_key)
        if worker is None:
            return False
        self._workers[worker_key] = replace(worker, lease_expires_at_ms=self.now_ms() + LEASE_MS)
        return True

    async def workers(self) -> list[WorkerRow]:
        """All workers."""
        return list(self._workers.values())

    async def claim(self, worker_key: int, workflows: Sequence[str], limit: int) -> list[tuple[Run, Head]]:
        """Take pending runs."""
        now = self.now_ms()
        taken: list[tuple[Run, Head]] = []
        if worker_key not in self._workers:
            return taken
        for key, name in self._ids.items():
            run = self._runs[name]
            if run.status != Status.PENDING or run.workflow not in workflows:
                continue
            if run.next_attempt_at_ms is not None and run.next_attempt_at_ms > now:
                continue
            if len(taken) == limit:
                break
            run = replace(
                run,
                status=Status.RUNNING,
                started_at_ms=now if run.started_at_ms is None else run.started_at_ms,
                next_attempt_at_ms=None,
            )
            head = self._heads[key]
            head = self._heads[key] = replace(head, owner=worker_key, epoch=head.epoch + 1)
            self._runs[name] = run
            taken.append((run, replace(head)))
        return taken

    async def next_due_ms(self, workflows: Sequence[str]) -> int | None:
        """When the next paced run is due."""
        return min(
            (
                run.next_attempt_at_ms
                for run in self._runs.values()
                if run.status == Status.PENDING and run.workflow in workflows and run.next_attempt_at_ms is not None
            ),
            default=None,
        )

    async def unregistered(self, workflows: Sequence[str]) -> list[str]:
        """Workflows with pending runs that are not among these."""
        return sorted(
            {
                run.workflow
                for run in self._runs.values()
                if run.status == Status.PENDING and run.workflow not in workflows
            }
        )

    async def release(self, worker_key: int, run_keys: Sequence[int]) -> None:
        """Hand runs back."""
        self._disown([key for key in run_keys if self._heads[key].owner == worker_key])

    async def owned(self, worker_key: int) -> list[int]:
        """What a worker owns."""
        return [key for key, head in self._heads.items() if head.owner == worker_key]

    async def bury(self, worker: WorkerRow) -> bool:
        """Remove a dead worker as it was seen."""
        if self._workers.get(worker.worker_key) != worker:
            return False
        del self._workers[worker.worker_key]
        self._disown([key for key, head in self._heads.items() if head.owner == worker.worker_key])
        return True

    async def adopt_orphans(self) -> bool:
        """Make pending what is owned by no listed worker."""
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
                run = self._runs[run.run_id] = replace(run, status=Status.PENDING)
                changed.append(run)
        if changed:
            self._publish(changed)
