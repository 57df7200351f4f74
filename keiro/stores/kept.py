"""Where the rows of projections are kept, and the rows of those that are kept in memory.

Followers, rebuilds and queries work on `Kept` and do not know whether rows are in dicts or in tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgspec

from keiro.decisions import Stored
from keiro.events import Event
from keiro.mapper import EventMapper
from keiro.projections.base import Change, Key, ReadModel, Row, placed_at
from keiro.projections.invariants import Finding
from keiro.stores.transaction import Gate

BITE: Final = 100
"""How many runs are examined at once."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a rebuild found: rows it inserted, updated, deleted, and found as they should be (`verified`).

    `unmended` rows differ too, and stay so: an append-only table keeps what it has.
    """

    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    verified: int = 0
    unmended: int = 0

    @property
    def differences(self) -> int:
        """How many rows were not what the journal says."""
        return self.inserted + self.updated + self.deleted + self.unmended


class Kept(Protocol):
    """The rows of an engine's projections, beside the journal of its store."""

    gate: Gate | None
    """The permit of inline rows in memory beside a journal in a database; None without such."""

    async def setup(self, *, create: bool) -> None:
        """Create the tables, or check that they are there, and build the rows of inline projections that never were.

        Raises `MigrationRequired` where a table is missing and must not be created, `ProjectionFailed`.
        """

    async def head(self) -> int:
        """The position of the newest event, 0 for an empty journal."""

    async def read(self, after: int, until: int, topics: frozenset[str] | None, limit: int) -> list[Event]:
        """At most `limit` events with `after` < position <= `until`, in order."""

    async def tracked(self, model: ReadModel) -> int | None:
        """Up to which position a projection's rows are durably folded; None where nothing says so."""

    async def advance(self, model: ReadModel, tracked: int, until: int, events: Sequence[Event]) -> bool:
        """Fold events onto the rows and move the tracking from `tracked` to `until`, in one transaction.

        False, and nothing written, where the tracking is not at `tracked`: another process was there.
        """

    async def select(self, model: ReadModel, equals: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The rows whose columns have these values, in no order."""

    async def rebuild(self, model: ReadModel) -> Report:
        """Compute the rows from the journal and make the kept ones the same, while others go on writing."""

    async def rebuild_runs(self) -> Report:
        """As `rebuild`, for `keiro_runs`."""

    async def rebuild_run_parents(self) -> Report:
        """As `rebuild`, for `keiro_run_parents`."""

    async def examine(self, after: int, *, fix: bool) -> tuple[list[Finding], int | None]:
        """What is wrong with the next `BITE` runs behind the run_key `after`, and the run_key to go on from, None at
        the end. With `fix` it is mended in the transaction that found it, but for owners, which `adopt_orphans` is
        for. The lock is held for those runs only that seemed wrong before."""


def decoded(mapper: EventMapper, rows: Iterable[Stored]) -> list[Event]:
    """The events in rows of the journal, as projections are given them."""
    return [placed_at(mapper.decode_row(row, row.run_id), row.position) for row in rows]


def matches(row: Row, equals: Mapping[str, Any]) -> bool:
    """Whether the row's columns have these values."""
    return all(row[name] == value for name, value in equals.items())


Same = Callable[[Change, Change], bool]


def identical(one: Change, other: Change) -> bool:
    """Whether two rows in memory are the same."""
    return one == other


class Differences:
    """What must change so that kept rows become the computed ones."""

    def __init__(self, model: ReadModel, same: Same = identical) -> None:
        self.put: list[dict[str, Any]] = []
        self.delete: list[Key] = []
        self._append_only = model.append_only
        self._same = same
        self._inserted = self._updated = self._deleted = self._unmended = 0
        self._wrong = 0

    def compare(self, key: Key, computed: Change, kept: Change) -> None:
        """Note what one row needs; None: there is none, or should be none."""
        if self._same(computed, kept):
            return
        self._wrong += computed is not None
        if kept is None and computed is not None:
            self._inserted += 1
            self.put.append(computed)
        elif self._append_only:
            self._unmended += 1
        elif computed is None:
            self._deleted += 1
            self.delete.append(key)
        else:
            self._updated += 1
            self.put.append(computed)

    def report(self, computed: int) -> Report:
        """The counts, where there should be `computed` rows in all."""
        return Report(
            inserted=self._inserted,
            updated=self._updated,
            deleted=self._deleted,
            unmended=self._unmended,
            verified=computed - self._wrong,
        )


class MemoryRows:
    """The rows of one projection in dicts, folded from the journal up to `position`.

    Changes made after `begin` are seen only through `get` until they are accepted, so whoever reads meanwhile sees
    committed rows. `begin` inside a `begin` is a savepoint.
    """

    def __init__(self, model: ReadModel) -> None:
        self.model = model
        self.rows: dict[Key, dict[str, Any]] = {}
        self.committed_position = 0
        self._layers: list[dict[Key, Change]] = []
        self._positions: list[int] = []

    @property
    def position(self) -> int:
        """Up to where the events are folded, in the transaction that is open if one is."""
        return self._positions[-1] if self._positions else self.committed_position

    def get(self, key: Key) -> Change:
        """A row as the open transaction sees it."""
        for layer in reversed(self._layers):
            if key in layer:
                return layer[key]
        return self.rows.get(key)

    def plan(self, events: Sequence[Event]) -> dict[Key, Change]:
        """What these events change; nothing is changed yet. Raises `ProjectionFailed`."""
        touched = self.model.touched(events)
        rows = {key: row for _, keys in touched for key in keys if (row := self.get(key)) is not None}
        return self.model.fold(touched, rows)

    def take(self, changes: Mapping[Key, Change], position: int) -> None:
        """Make planned changes: the events up to `position` are folded now."""
        if self._layers:
            self._layers[-1].update(changes)
            self._positions[-1] = position
            return
        for key, row in changes.items():
            if row is None:
                self.rows.pop(key, None)
            else:
                self.rows[key] = row
        self.committed_position = position

    def apply(self, events: Sequence[Event], until: int) -> None:
        """Fold those of the events that are not folded yet, and count everything up to `until` as folded."""
        at = self.position
        new = [event for event in events if event.__dict__["position"] > at]
        self.take(self.plan(new), max(at, until))

    def begin(self) -> None:
        """Open a transaction, or a savepoint in the one that is open."""
        self._positions.append(self.position)
        self._layers.append({})

    def rollback(self) -> None:
        """Forget the changes since the last `begin`."""
        self._layers.pop()
        self._positions.pop()

    def release(self) -> None:
        """Keep the changes since the last `begin` as part of what it was opened in."""
        changes, position = self._layers.pop(), self._positions.pop()
        self.take(changes, position)

    def select(self, equals: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Committed rows whose columns have these values."""
        return [dict(row) for row in self.rows.values() if matches(row, equals)]

    def mend(self, computed: Mapping[Key, dict[str, Any]]) -> Report:
        """Make the committed rows the computed ones."""
        found = Differences(self.model)
        for key in {**self.rows, **computed}:
            found.compare(key, computed.get(key), self.rows.get(key))
        for row in found.put:
            self.rows[self.model.key_of(row)] = row
        for key in found.delete:
            del self.rows[key]
        return found.report(len(computed))


class Computed:
    """Rows of one projection as its journal says, folded event by event from the beginning."""

    def __init__(self, model: ReadModel, rows: Mapping[Key, dict[str, Any]] | None = None) -> None:
        self.model = model
        self.rows = dict(rows or {})

    def fold(self, events: Sequence[Event]) -> set[Key]:
        """Fold more events; the keys they touch."""
        touched = self.model.touched(events)
        keys = {key for _, some in touched for key in some}
        for key, row in self.model.fold(touched, self.rows).items():
            if row is None:
                self.rows.pop(key, None)
            else:
                self.rows[key] = row
        return keys
