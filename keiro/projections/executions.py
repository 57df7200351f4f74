"""The listing of executions: what a row of it shows of a run, and what a query of it finds.

Pure. The rows follow `keiro_runs`, which is a fold of the journal; whoever keeps them asks here what they must be, so
they are the same on every store, and the same again when they are rebuilt.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from keiro.failures import Failure, summary
from keiro.identity import parse_run_id
from keiro.rows import Run, Status

TRACKING: Final = "keiro_executions"
"""Under this name it is kept how far the rows have followed the journal."""
FILTERS: Final = ("status", "execution_flow", "execution_parent_id", "execution_lineage", "waiting_reason")
"""The columns that are filtered by: bit n of the name of an index is filter n."""
MOST_SHOWN: Final = 500
"""Characters of a failure that a row shows."""
MOST_WORDS: Final = 100
"""Words of a failure that it is found by."""
MOST_OF_WORD: Final = 64
"""Characters of a word that count."""


class Execution(msgspec.Struct, frozen=True, gc=False):
    """A run as the listing shows it. Times are integer milliseconds since the epoch, UTC."""

    run_id: str
    status: str
    execution_flow: str
    """The name of its workflow."""
    execution_parent_id: str | None
    """The run that it is the next round of, or that spawned it, or the first one it was linked to."""
    execution_lineage: str
    """The run id of round 0."""
    waiting_reason: str | None
    """What kind of thing a parked run waits for, None for others."""
    round_ordinal: int
    version_tag: str | None
    attempts: int
    created_at_ms: int
    started_at_ms: int | None
    finished_at_ms: int | None
    next_attempt_at_ms: int | None
    wake_at_ms: int | None
    waiting_token: str | None
    """The step that a parked run waits for."""
    cancel_requested_at_ms: int | None
    attributes_json: str | None
    failure_json: str | None
    """How it failed, as JSON: a line of at most 500 characters."""

    @property
    def workflow(self) -> str:
        """The name of its workflow."""
        return self.execution_flow

    @property
    def key(self) -> str:
        """Its key within the workflow."""
        return parse_run_id(self.run_id).key

    @property
    def attributes(self) -> dict[str, Any]:
        """Its attributes."""
        return {} if self.attributes_json is None else msgspec.json.decode(self.attributes_json)

    @property
    def failure(self) -> str | None:
        """How it failed, in one line of at most 500 characters; None unless it did."""
        return None if self.failure_json is None else msgspec.json.decode(self.failure_json, type=str)


COLUMNS: Final = Execution.__struct_fields__
_OF_RUN: Final = {
    "execution_flow": "workflow",
    "execution_parent_id": "parent_run_id",
    "execution_lineage": "lineage_id",
}
RUN_COLUMNS: Final = tuple(_OF_RUN.get(name, name) for name in COLUMNS[:-1])
"""The columns of `keiro_runs` that the columns of a row are, but for its last one, the failure."""
FIXED: Final = ("run_id", "created_at_ms")
"""The place of a row in the listing: it never changes."""
PLACE: Final = tuple(COLUMNS.index(name) for name in ("created_at_ms", "run_id"))

_decode_failure: Final = msgspec.json.Decoder(Failure).decode


def listed(values: Sequence[Any], failure_json: str | None) -> Execution:
    """The row of a run with these values of `RUN_COLUMNS`."""
    shown = None
    if failure_json is not None and values[1] == Status.FAILED:
        shown = msgspec.json.encode(summary(_decode_failure(failure_json))[:MOST_SHOWN]).decode()
    return Execution(*(*values, shown))


def listed_run(run: Run, first_parent: str | None = None) -> Execution:
    """The row of a run; `first_parent` is the first run that it was linked to."""
    values = [getattr(run, name) for name in RUN_COLUMNS]
    values[1] = str(run.status)
    if run.parent_run_id is None:
        values[3] = first_parent
    return listed(values, run.failure_json)


def words(text: str | None) -> list[str]:
    """The words that a text is found by, each once: letters and digits, however they are written."""
    found = (word[:MOST_OF_WORD] for word in re.findall(r"\w+", (text or "").casefold()))
    return list(dict.fromkeys(found))[:MOST_WORDS]


def attribute_values(attributes_json: str | None) -> dict[str, str]:
    """The attributes in a row, each as the text that it is looked up by."""
    if attributes_json is None:
        return {}
    attributes: dict[str, Any] = msgspec.json.decode(attributes_json)
    return {name: text for name, value in attributes.items() if (text := attribute_text(value)) is not None}


def attribute_text(value: Any) -> str | None:
    """A value of an attribute as JSON of one spelling: 1 and 1.0 are equal, 1 and True are not. None for what is no
    such value."""
    if isinstance(value, datetime) and value.tzinfo is not None:
        value = value.astimezone(UTC)
    elif isinstance(value, float) and not isinstance(value, bool):
        if not math.isfinite(value):
            return None
        value = int(value) if value.is_integer() and abs(value) < 2**53 else value
    elif not isinstance(value, str | int):
        return None
    return msgspec.json.encode(value).decode()


class Query(msgspec.Struct, frozen=True):
    """What of the listing is asked for.

    `equal` are filters by their number, each with a value, which may be None; `after_ms` and `before_ms` bound the time
    of creation, both inclusive; `attributes` are names with the texts of values; `prefix` begins the run id; `words`
    all are in the failure. `newest` turns the order round, and `place` is where to go on: behind that row.
    """

    equal: tuple[tuple[int, str | None], ...] = ()
    after_ms: int | None = None
    before_ms: int | None = None
    attributes: tuple[tuple[str, str], ...] = ()
    prefix: str | None = None
    words: tuple[str, ...] = ()
    newest: bool = False
    place: tuple[int, str] | None = None
    limit: int = 100

    @property
    def mask(self) -> int:
        """The number of the index for its filters."""
        return sum(1 << number for number, _ in self.equal)


def matcher(query: Query) -> Callable[[Execution], bool]:
    """Whether a row is one that the query finds, wherever it begins and however many it asks for."""
    values = [(COLUMNS.index(FILTERS[number]), wanted) for number, wanted in query.equal]
    low = -1 if query.after_ms is None else query.after_ms
    high = 2**53 if query.before_ms is None else query.before_ms
    attributes = dict(query.attributes)

    def matches(row: Execution) -> bool:
        return (
            low <= row.created_at_ms <= high
            and all(getattr(row, COLUMNS[at]) == wanted for at, wanted in values)
            and (query.prefix is None or row.run_id.startswith(query.prefix))
            and (not attributes or attributes.items() <= attribute_values(row.attributes_json).items())
            and (not query.words or set(query.words) <= set(words(row.failure)))
        )

    return matches


def place_of(row: Execution) -> tuple[int, bytes]:
    """Where a row stands: by its time, then by the bytes of its id."""
    return row.created_at_ms, row.run_id.encode()


def found(query: Query, rows: Iterable[Execution]) -> list[Execution]:
    """The rows that a query finds, in its order: from where it begins, one more than it asks for."""
    place = None if query.place is None else (query.place[0], query.place[1].encode())
    matches = matcher(query)
    some = [
        row
        for row in rows
        if matches(row) and (place is None or (place_of(row) < place if query.newest else place_of(row) > place))
    ]
    some.sort(key=place_of, reverse=query.newest)
    return some[: query.limit + 1]


class Changes:
    """What must be written so that kept rows become those that should be."""

    def __init__(self) -> None:
        self.inserted: list[Execution] = []
        self.updated: dict[tuple[str, ...], list[Execution]] = {}
        """By the columns that changed: an index of a column that did not is not written."""
        self.deleted: list[str] = []
        self.attributes: dict[str, Execution] = {}
        """The runs whose attributes changed, by run id."""
        self.failures: dict[str, Execution] = {}
        """The runs whose failures changed."""
        self.counts: dict[tuple[str, str], int] = {}
        """How many more runs of a workflow have a status now."""

    def compare(self, kept: Execution | None, wanted: Execution | None) -> None:
        """Note what one row needs; None: there is none, or should be none."""
        if kept == wanted:
            return
        if kept is not None and (wanted is None or wanted.created_at_ms != kept.created_at_ms):
            # With another time it is another run, which was given the id of one that is gone.
            self.deleted.append(kept.run_id)
            self._count(kept, -1)
            kept = None
        if wanted is None:
            return
        if kept is None:
            self.inserted.append(wanted)
            self._count(wanted, 1)
        else:
            columns = tuple(name for name in COLUMNS if getattr(kept, name) != getattr(wanted, name))
            self.updated.setdefault(columns, []).append(wanted)
            if "status" in columns or "execution_flow" in columns:
                self._count(kept, -1)
                self._count(wanted, 1)
        if wanted.attributes_json != (None if kept is None else kept.attributes_json):
            self.attributes[wanted.run_id] = wanted
        if wanted.failure_json != (None if kept is None else kept.failure_json):
            self.failures[wanted.run_id] = wanted

    def _count(self, row: Execution, change: int) -> None:
        of = (row.execution_flow, row.status)
        self.counts[of] = self.counts.get(of, 0) + change

    def __len__(self) -> int:
        return len(self.inserted) + sum(map(len, self.updated.values())) + len(self.deleted)


def counted(rows: Iterable[Execution]) -> dict[str, int]:
    """How many rows have each status; those with none are left out."""
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.status] = counts.get(row.status, 0) + 1
    return counts


def prefix_end(prefix: str) -> str | None:
    """The first text, in the order of bytes, behind all that begin with `prefix`; None where there is none."""
    for at in range(len(prefix) - 1, -1, -1):
        point = ord(prefix[at]) + 1
        if point == 0xD800:
            point = 0xE000  # no text has those in between
        if point <= 0x10FFFF:
            return prefix[:at] + chr(point)
    return None
