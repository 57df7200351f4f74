"""The journal of the memory store: events by position, with gaps where runs were deleted."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import islice

from keiro.decisions import Stored


class MemoryJournal:
    """Events in the order of their positions. Positions are never given twice."""

    def __init__(self) -> None:
        self.last = 0
        """The newest position that was given."""
        self._positions: list[int] = []
        self._rows: list[Stored | None] = []
        self._gone = 0

    def extend(self, rows: Sequence[Stored]) -> None:
        """Append events; their positions follow on `last`."""
        self._rows += rows
        self._positions += [row.position for row in rows]
        if rows:
            self.last = rows[-1].position

    def remove(self, position: int) -> None:
        """Delete an event that is there."""
        self._rows[bisect_left(self._positions, position)] = None
        self._gone += 1
        if self._gone * 2 > len(self._rows):
            # Now and then, so that a deletion does not cost as much as the journal is long.
            self._rows = [row for row in self._rows if row is not None]
            self._positions = [row.position for row in self._rows if row is not None]
            self._gone = 0

    def read(self, after: int, *, until: int | None = None, limit: int | None = None) -> list[Stored]:
        """Events with `after` < position <= `until`, at most `limit`."""
        first = bisect_right(self._positions, after)
        last = len(self._positions) if until is None else bisect_right(self._positions, until)
        rows = (row for i in range(first, last) if (row := self._rows[i]) is not None)
        return list(islice(rows, limit))
