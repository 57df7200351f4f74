"""Runs as aggregates of the `eventsourcing` library: its `Repository` over the journal, with its snapshots.

Reading only: what a run records is written by the engine, under its rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol
from uuid import UUID

from keiro.errors import DecodeFailed, InvalidCall, KeiroError, RunNotFound
from keiro.events import Event, WorkflowStarted
from keiro.library import (
    AggregateNotFoundError,
    AggregateRecorder,
    DomainEventProtocol,
    EventStore,
    JSONTranscoder,
    Mapper,
    Repository,
    StoredEvent,
)
from keiro.mapper import EventMapper, JournalEvent, JournalMapper, StoredRow
from keiro.run import WorkflowRun, advance, begin, initial_fields, restored
from keiro.snapshots import RunSnapshot, decode_snapshot, encode_snapshot

ReadRun = Callable[[str, int | None, int | None, bool, int | None], Sequence[StoredRow]]
"""Reads the events of a run by version: run id, above, up to and including, newest first, at most so many."""


class SnapshotRow(NamedTuple):
    """A row of `keiro_snapshots`."""

    originator_id: str
    originator_version: int
    topic: str
    state: str


class SnapshotTable(Protocol):
    """Where snapshots are kept."""

    def select(
        self, run_id: str, gt: int | None, lte: int | None, desc: bool, limit: int | None
    ) -> Sequence[SnapshotRow]:
        """The snapshots of a run with gt < version <= lte, by version, `desc`: newest first."""

    def insert(self, rows: Sequence[SnapshotRow]) -> None:
        """Add snapshots; one of the same run and version replaces the one that is there. Durable on
        return.
        """


class MemorySnapshots:
    """Snapshots in a dict, for the memory store."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[int, SnapshotRow]] = {}

    def select(
        self, run_id: str, gt: int | None, lte: int | None, desc: bool, limit: int | None
    ) -> Sequence[SnapshotRow]:
        """See `SnapshotTable`."""
        rows = self._rows.get(run_id, {})
        versions = sorted((v for v in rows if (gt is None or v > gt) and (lte is None or v <= lte)), reverse=desc)
        return [rows[version] for version in versions[:limit]]

    def insert(self, rows: Sequence[SnapshotRow]) -> None:
        """See `SnapshotTable`."""
        for row in rows:
            self._rows.setdefault(row.originator_id, {})[row.originator_version] = row

    def forget(self, run_id: str) -> None:
        """Delete the snapshots of a run."""
        self._rows.pop(run_id, None)


class NoSuchRun(RunNotFound, AggregateNotFoundError):
    """No run has this id, or it has no event up to the version asked for."""


class RunRepository(Repository[str]):
    """The library's repository; `get(run_id)` folds the run's events, from its newest snapshot on.

    It projects with keiro's own fold, which checks that the journal is complete. Raises `RunNotFound`, which
    is the library's `AggregateNotFoundError` too.
    """

    def __init__(self, mapper: EventMapper, journal: EventStore[str], snapshots: EventStore[str] | None) -> None:
        super().__init__(journal, snapshot_store=snapshots)
        self._mapper = mapper

    def get(
        self,
        aggregate_id: str,
        *,
        version: int | None = None,
        projector_func: Callable[[Any, Iterable[Any]], Any] | None = None,
        **options: bool,
    ) -> Any:
        """The aggregate of a run, as of its newest event or of `version`."""
        project = projector_func or self.project
        try:
            return super().get(aggregate_id, version=version, projector_func=project, **options)
        except AggregateNotFoundError:
            upto = "" if version is None else f" with an event up to version {version}"
            raise NoSuchRun(f"there is no run {aggregate_id!r}{upto}") from None

    def project(self, aggregate: WorkflowRun | None, events: Iterable[Any]) -> WorkflowRun | None:
        """Apply events to an aggregate; with None, they begin with a snapshot or with WorkflowStarted."""
        rest = iter(events)
        if aggregate is None:
            first = next(rest, None)
            if first is None:
                return None
            if isinstance(first, RunSnapshot):
                aggregate = restored(first, self._aggregate(first.topic))
            else:
                aggregate = begin(
                    first, self._aggregate(first.workflow) if isinstance(first, WorkflowStarted) else None
                )
        return advance(aggregate, rest)

    def take_snapshot(self, run_id: str, version: int | None = None) -> RunSnapshot:
        """Store a snapshot of a run, so that later folds begin there. Durable on return.

        Raises `RunNotFound`, and `InvalidCall` for a state that a snapshot would not restore exactly.
        """
        if self.snapshot_store is None:
            raise InvalidCall("this repository has no place for snapshots")
        snapshot = RunSnapshot.take(self.get(run_id, version=version))
        self.snapshot_store.put([snapshot])
        return snapshot

    def current(self, run_id: str, every: int) -> WorkflowRun:
        """The aggregate of a run; if its newest snapshot is `every` events behind, there is a new one then, unless its
        state is none that a snapshot would restore exactly, or the store is busy: it is only a shortcut."""
        run: WorkflowRun = self.get(run_id)
        if self.snapshot_store is not None:
            taken = next(iter(self.snapshot_store.get(run_id, desc=True, limit=1)), None)
            if run.version - (0 if taken is None else taken.originator_version) >= every:
                with suppress(KeiroError):
                    self.snapshot_store.put([RunSnapshot.take(run)])
        return run

    def _aggregate(self, workflow: str) -> type[WorkflowRun]:
        return self._mapper.aggregate(workflow) or WorkflowRun


def repository(read: ReadRun, mapper: EventMapper, snapshots: SnapshotTable | None = None) -> RunRepository:
    """A repository over the journal that `read` reads."""
    journal = JournalStore(JournalMapper(mapper), JournalRecorder(read))
    taken = None
    if snapshots is not None:
        taken = SnapshotStore(SnapshotMapper(mapper), SnapshotRecorder(snapshots))
    return RunRepository(mapper, journal, taken)


class JournalRecorder(AggregateRecorder):
    """The library's recorder of the events of runs."""

    def __init__(self, read: ReadRun) -> None:
        self.read = read

    def insert_events(self, stored_events: Sequence[StoredEvent], **kwargs: Any) -> Sequence[int] | None:
        """Refused: a run's journal is written by the engine."""
        raise InvalidCall(
            "the journal of a run is written by the engine: send commands with `engine.command(run_id, "
            "Class.method, ...)`"
        )

    def select_events(
        self,
        originator_id: UUID | str,
        *,
        gt: int | None = None,
        lte: int | None = None,
        desc: bool = False,
        limit: int | None = None,
    ) -> Sequence[JournalEvent]:
        """The events of a run by version."""
        run_id = str(originator_id)
        return [
            JournalEvent(run_id, row.version, row.topic, row.payload.encode(), row.recorded_at_ms)
            for row in self.read(run_id, gt, lte, desc, limit)
        ]


class JournalStore(EventStore[str]):
    """The library's event store; rows become events without a `StoredEvent` between, at half the cost."""

    mapper: JournalMapper
    recorder: JournalRecorder

    def get(
        self,
        originator_id: str,
        *,
        gt: int | None = None,
        lte: int | None = None,
        desc: bool = False,
        limit: int | None = None,
    ) -> Iterator[Event]:
        """The events of a run by version."""
        decode = self.mapper.events.decode
        for row in self.recorder.read(originator_id, gt, lte, desc, limit):
            yield decode(row.topic, row.payload, originator_id, row.version, row.recorded_at_ms)


class SnapshotRecorder(AggregateRecorder):
    """The library's recorder of snapshots."""

    def __init__(self, table: SnapshotTable) -> None:
        self.table = table

    def insert_events(self, stored_events: Sequence[StoredEvent], **kwargs: Any) -> Sequence[int] | None:
        """Add snapshots."""
        self.table.insert(
            [SnapshotRow(str(s.originator_id), s.originator_version, s.topic, s.state.decode()) for s in stored_events]
        )
        return None

    def select_events(
        self,
        originator_id: UUID | str,
        *,
        gt: int | None = None,
        lte: int | None = None,
        desc: bool = False,
        limit: int | None = None,
    ) -> Sequence[StoredEvent]:
        """The snapshots of a run by version."""
        rows = self.table.select(str(originator_id), gt, lte, desc, limit)
        return [StoredEvent(row.originator_id, row.originator_version, row.topic, row.state.encode()) for row in rows]


class SnapshotMapper(Mapper[str]):
    """The library's mapper for the stored form of snapshots."""

    def __init__(self, events: EventMapper) -> None:
        super().__init__(JSONTranscoder())
        self.events = events

    def to_stored_event(self, domain_event: DomainEventProtocol[str]) -> StoredEvent:
        """The stored form of a snapshot."""
        if not isinstance(domain_event, RunSnapshot):
            raise InvalidCall(f"{domain_event!r} is not a snapshot of a run")
        return StoredEvent(
            originator_id=domain_event.originator_id,
            originator_version=domain_event.originator_version,
            topic=domain_event.topic,
            state=encode_snapshot(domain_event).encode(),
        )

    def to_domain_event(self, stored_event: StoredEvent) -> DomainEventProtocol[str]:
        """The snapshot in a stored one; raise `DecodeFailed` if the aggregate's class cannot go on from
        it.
        """
        cls = self.events.aggregate(stored_event.topic) or WorkflowRun
        run_id = str(stored_event.originator_id)
        text = stored_event.state.decode()
        return decode_snapshot(
            text, stored_event.topic, run_id, stored_event.originator_version, cls, initial_fields(cls)
        )


class SnapshotStore(EventStore[str]):
    """The library's event store over snapshots."""

    def get(
        self,
        originator_id: str,
        *,
        gt: int | None = None,
        lte: int | None = None,
        desc: bool = False,
        limit: int | None = None,
    ) -> Iterator[DomainEventProtocol[str]]:
        """The usable snapshots of a run by version; the fold does without the others."""
        for stored in self.recorder.select_events(originator_id, gt=gt, lte=lte, desc=desc, limit=limit):
            try:
                yield self.mapper.to_domain_event(stored)
            except DecodeFailed:
                continue
