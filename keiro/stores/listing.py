"""The listing of executions as a store keeps it, and the one that is kept in memory.

Rows follow: commits cost nothing here, `advance` brings the rows after them, and every answer says how far they are.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec

from keiro.projections import executions
from keiro.projections.executions import Changes, Execution, Query
from keiro.projections.rebuilt import ComputedRuns, mended
from keiro.stores.kept import Report, decoded

if TYPE_CHECKING:
    from keiro.mapper import EventMapper
    from keiro.rows import Run
    from keiro.stores.memory import Database

T = TypeVar("T")


class Seen(msgspec.Struct, Generic[T], frozen=True):
    """An answer of the listing, and what it was when it was given: of one moment, all of it.

    `source` is the database, `revision` the number of the newest change of a row. The rows have followed the journal up
    to `position`; its end was `head`, and `marked` says that rows are to be looked at whatever the journal says.
    """

    source: str
    revision: int
    position: int
    head: int
    marked: bool
    items: list[T]

    @property
    def current(self) -> bool:
        """Whether nothing was left to follow."""
        return self.position >= self.head and not self.marked


class Entry(msgspec.Struct, frozen=True):
    """What the listing has of a run id: its row, or that it was deleted, or nothing; and the number of its change."""

    run_id: str
    revision: int | None
    deleted: bool
    execution: Execution | None


class Advanced(msgspec.Struct, frozen=True):
    """How far the rows have followed: up to `position` of a journal that ended at `head`. `rows` have changed, and with
    `drained` every run was looked at that was marked when it began."""

    position: int
    head: int
    rows: int
    drained: bool


class Listing(Protocol):
    """The rows of the listing in one store."""

    searchable: bool
    """Whether failures can be searched: not where payloads are encrypted or compressed."""

    async def advance(self, most: int) -> Advanced:
        """Let the rows follow over the next `most` positions of the journal and so many marks, in one transaction."""

    async def page(self, query: Query) -> Seen[Execution]:
        """What a query finds, in order, and one row more where there is one."""

    async def observe(self, run_ids: Sequence[str]) -> Seen[Entry]:
        """What there is of each of these ids."""

    async def changes(self, after: int, limit: int) -> Seen[Entry]:
        """The runs that changed since the revision `after`, in the order of their newest changes."""

    async def counts(self, query: Query) -> Seen[tuple[str, int]]:
        """How many of the runs that a query finds have each status."""

    async def rebuild(self, after: int) -> tuple[Report, int | None]:
        """Make the rows of the next runs behind the run_key `after` what the journal says, in one transaction; and the
        run_key to go on from, None at the end."""


class Listed:
    """The rows in memory. `stale` are the runs to look at, in the order in which they changed."""

    def __init__(self) -> None:
        self.source = uuid.uuid4().hex
        self.revision = 0
        self.position = 0
        self.rows: dict[str, Execution] = {}
        self.changes: dict[str, tuple[int, bool]] = {}
        self.stale: dict[str, None] = {}

    def write(self, changes: Changes) -> None:
        """Write rows, each with a number of its own."""
        for run_id in changes.deleted:
            del self.rows[run_id]
            self.number(run_id, deleted=True)
        for row in [*changes.inserted, *(row for rows in changes.updated.values() for row in rows)]:
            self.rows[row.run_id] = row
            self.number(row.run_id, deleted=False)

    def number(self, run_id: str, *, deleted: bool) -> None:
        """Give a change its number."""
        self.revision += 1
        self.changes.pop(run_id, None)
        self.changes[run_id] = (self.revision, deleted)


class MemoryListing:
    """`Listing` beside a journal in memory."""

    searchable = True

    def __init__(self, db: Database, mapper: EventMapper) -> None:
        self._db = db
        self._mapper = mapper

    def _seen(self, items: list[T]) -> Seen[T]:
        listed, head = self._db.listed, self._db.journal.last
        return Seen(listed.source, listed.revision, listed.position, head, bool(listed.stale), items)

    async def advance(self, most: int) -> Advanced:
        """See `Listing`: all at once, which costs no more here than looking at some."""
        with self._db.lock:
            listed, runs = self._db.listed, self._db.runs
            stale, listed.stale = listed.stale, {}
            changes = Changes()
            for run_id in stale:
                run = runs.get(run_id)
                if run is None and run_id not in listed.rows:
                    listed.number(run_id, deleted=True)  # it came and went in between
                changes.compare(listed.rows.get(run_id), None if run is None else self._row(run))
            listed.write(changes)
            listed.position = self._db.journal.last
            return Advanced(listed.position, listed.position, len(changes), True)

    def _row(self, run: Run) -> Execution:
        parents = self._db.edges.parents_of(run.run_id)
        return executions.listed_run(run, parents[0].parent_id if parents else None)

    async def page(self, query: Query) -> Seen[Execution]:
        """See `Listing`."""
        with self._db.lock:
            return self._seen(executions.found(query, self._db.listed.rows.values()))

    async def observe(self, run_ids: Sequence[str]) -> Seen[Entry]:
        """See `Listing`."""
        with self._db.lock:
            return self._seen([self._entry(run_id) for run_id in run_ids])

    def _entry(self, run_id: str) -> Entry:
        revision, deleted = self._db.listed.changes.get(run_id, (None, False))
        return Entry(run_id, revision, deleted, self._db.listed.rows.get(run_id))

    async def changes(self, after: int, limit: int) -> Seen[Entry]:
        """See `Listing`."""
        with self._db.lock:
            changes = self._db.listed.changes.items()
            found = [run_id for run_id, (revision, _) in changes if revision > after]
            return self._seen([self._entry(run_id) for run_id in found[:limit]])

    async def counts(self, query: Query) -> Seen[tuple[str, int]]:
        """See `Listing`."""
        with self._db.lock:
            matching = filter(executions.matcher(query), self._db.listed.rows.values())
            return self._seen(list(executions.counted(matching).items()))

    async def rebuild(self, after: int) -> tuple[Report, int | None]:
        """See `Listing`: all at once."""
        with self._db.lock:
            db, listed = self._db, self._db.listed
            computed = ComputedRuns({})
            computed.fold(decoded(self._mapper, db.journal.read(0)))
            wanted = {
                name: self._row(mended(run, computed.runs.get(name), db.heads[run.run_key].owner is not None))
                for name, run in db.runs.items()
            }
            changes = Changes()
            for run_id in {**listed.rows, **wanted}:
                changes.compare(listed.rows.get(run_id), wanted.get(run_id))
            listed.write(changes)
            return report(changes, len(wanted)), None


def report(changes: Changes, rows: int) -> Report:
    """What a rebuild found, where there should be `rows` in all."""
    inserted, updated = len(changes.inserted), sum(map(len, changes.updated.values()))
    return Report(inserted=inserted, updated=updated, deleted=len(changes.deleted), verified=rows - inserted - updated)
