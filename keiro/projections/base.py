"""Read models of the user's own: a projection is a pure fold of events into the rows of one table.

Everything a projection does is decided here, from the events and the rows alone; where rows are kept, and in which
transaction, is the stores' business. So the rows are the same on every store, and the same again when they are
rebuilt from the journal.
"""

from __future__ import annotations

import copy
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, TypeAlias

import msgspec

from keiro.errors import InvalidCall, ProjectionFailed
from keiro.events import Event, OpaqueEvent

if TYPE_CHECKING:
    from sqlalchemy import Table

Key: TypeAlias = tuple[Any, ...]
"""The values of a row's primary key, in the order of its columns."""
Row: TypeAlias = Mapping[str, Any]
"""A row by the keys of its table's columns."""
Change: TypeAlias = dict[str, Any] | None
"""What became of a row: the row as it is now, or None where there is none any more."""

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_MODES: Final = ("inline", "follow")


class Projection(ABC):
    """A read model: which rows an event concerns, and what each row is after it.

    `keys` and `fold` must be pure. They see the event and the row, no clock, no database and nothing they keep, because
    the same event may be folded again: after a crash, in another process, or when the rows are rebuilt.

        class OrdersPerCustomer(keiro.Projection):
            name = "orders_per_customer"
            table = sa.Table(
                "orders_per_customer", sa.MetaData(),
                sa.Column("customer", sa.Text, primary_key=True), sa.Column("orders", sa.Integer, nullable=False),
            )
            topics = ("WorkflowStarted",)

            def keys(self, event):
                return [msgspec.json.decode(event.input)["customer"]]

            def fold(self, key, row, event):
                return {"orders": 1 if row is None else row["orders"] + 1}
    """

    name: ClassVar[str]
    """Names the projection in the store, so it must stay the same: letters, digits, `_`, `.` and `-`."""
    table: ClassVar[Table]
    """A SQLAlchemy table with a primary key. The engine creates it where it migrates; on Postgres in the first schema
    of the search path, unless its MetaData names another."""
    topics: ClassVar[Sequence[str] | None] = None
    """The stored topics it wants (`WorkflowStarted`, `basket:ItemAdded`); None: every event."""
    mode: ClassVar[Literal["inline", "follow"]] = "inline"
    """`inline`: rows change in the transaction that appends the event, and a fold that raises rejects the command. This
    holds in the processes whose engine has the projection; let all have it, or rebuild. `follow`: rows change soon
    after, each event exactly once, and a fold that raises stops the projection until it no longer does."""
    store: ClassVar[Literal["memory"] | None] = None
    """`memory`: rows are kept in this process, folded from the journal when the engine opens."""
    append_only: ClassVar[bool] = False
    """Rows are inserted and never change. A fold that would change or delete one raises."""

    @abstractmethod
    def keys(self, event: Event) -> Iterable[Any]:
        """The primary keys of the rows the event concerns: a value each, or a tuple for a key of several columns."""

    @abstractmethod
    def fold(self, key: Any, row: Row | None, event: Event) -> Row | None:
        """The whole row after the event, None for no row; `row` is the one before.

        Columns of the key are filled in, other columns that are left out are NULL. The event has `originator_id` (the
        run id), `originator_version` and `timestamp`; `position_of(event)` is its place in the journal.
        """


def position_of(event: Event) -> int:
    """The place in the journal of an event that a projection is given: it orders the events of all runs."""
    # Not a field of the event: what happened is the same wherever it is kept, and its fields are the user's to name.
    position: int = event.__dict__["position"]
    return position


def placed_at(event: Event, position: int) -> Event:
    """Fill in the position of an event that was decoded just now."""
    event.__dict__["position"] = position
    return event


class ReadModel:
    """A projection as engine and stores use it: checked, with its table's columns by name.

    Raises `InvalidCall` for a projection that cannot work.
    """

    def __init__(self, given: Projection | type[Projection]) -> None:
        projection = given() if isinstance(given, type) and issubclass(given, Projection) else given
        if not isinstance(projection, Projection):
            raise InvalidCall(f"{given!r} is no projection: pass a subclass of keiro.Projection, or an instance of one")
        kind = type(projection)
        where = f"projection {kind.__qualname__}"
        name = getattr(projection, "name", None)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidCall(f"{where}: name must be 1 to 128 of the characters A-Z a-z 0-9 _ . -, not {name!r}")
        table = getattr(projection, "table", None)
        if table is None or not hasattr(table, "primary_key"):
            raise InvalidCall(f"{where}: table must be a sqlalchemy.Table, not {table!r}")
        if projection.mode not in _MODES:
            raise InvalidCall(f"{where}: mode is 'inline' or 'follow', not {projection.mode!r}")
        if projection.store not in (None, "memory"):
            raise InvalidCall(f"{where}: store is None (the journal's) or 'memory', not {projection.store!r}")
        if isinstance(projection.topics, str):
            raise InvalidCall(f"{where}: topics is a tuple of names, not {projection.topics!r}")
        if inspect.iscoroutinefunction(projection.keys) or inspect.iscoroutinefunction(projection.fold):
            raise InvalidCall(f"{where}: keys and fold are pure functions, they cannot be async")
        self.projection = projection
        self.name: str = name
        self.table: Table = table
        self.mode = projection.mode
        self.append_only = projection.append_only
        self.in_memory = projection.store == "memory"
        self.topics = None if projection.topics is None else frozenset(projection.topics)
        # SQLAlchemy's names may be of a subclass of str, which msgspec does not take.
        self.columns: tuple[str, ...] = tuple("".join(column.key) for column in table.columns)
        self.key_columns: tuple[str, ...] = tuple("".join(column.key) for column in table.primary_key.columns)
        if not self.key_columns:
            raise InvalidCall(f"{where}: table {table.name} needs a primary key, which keys() names rows by")
        self._row_type = msgspec.defstruct(
            kind.__name__,
            [(column, Any) for column in self.columns],
            frozen=True,
            kw_only=True,
            rename=None,
        )

    def wants(self, topic: str) -> bool:
        """Whether the projection wants events of this topic."""
        return self.topics is None or topic in self.topics

    def key_of(self, row: Row) -> Key:
        """The primary key of a row."""
        return tuple(row[column] for column in self.key_columns)

    def record(self, row: Row) -> Any:
        """A row as the engine gives it to callers: a frozen struct with the table's columns."""
        return self._row_type(**row)

    def touched(self, events: Iterable[Event]) -> list[tuple[Event, list[Key]]]:
        """The events the projection wants, each with the keys of the rows it concerns."""
        found: list[tuple[Event, list[Key]]] = []
        for event in events:
            if not self.wants(topic_of(event)):
                continue
            try:
                keys = [self._key(key) for key in self.projection.keys(event)]
            except Exception as error:
                raise self.failed(event, error) from error
            if keys:
                found.append((event, list(dict.fromkeys(keys))))
        return found

    def fold(self, touched: Sequence[tuple[Event, list[Key]]], rows: Mapping[Key, Row]) -> dict[Key, Change]:
        """Fold the events onto `rows` (those there are of the keys they touch); what changed."""
        now: dict[Key, Change] = {}
        for event, keys in touched:
            for key in keys:
                row = now[key] if key in now else rows.get(key)
                try:
                    now[key] = self._after(key, row, event)
                except Exception as error:
                    raise self.failed(event, error) from error
        return {key: row for key, row in now.items() if row != rows.get(key)}

    def _key(self, key: Any) -> Key:
        columns = self.key_columns
        values = key if isinstance(key, tuple) else (key,)
        if len(values) != len(columns):
            raise ValueError(f"keys() gave {key!r} for the primary key ({', '.join(columns)})")
        if not all(isinstance(value, Hashable) and value is not None for value in values):
            raise ValueError(f"keys() gave {key!r}: the values of a primary key are neither None nor mutable")
        return values

    def _after(self, key: Key, row: Row | None, event: Event) -> Change:
        given = None if row is None else MappingProxyType(owned(row))
        after = self.projection.fold(key if len(key) > 1 else key[0], given, event)
        if after is None:
            full = None
        else:
            full = dict.fromkeys(self.columns)
            full.update(zip(self.key_columns, key, strict=True))
            for column, value in after.items():
                if column not in full:
                    raise ValueError(f"fold() gave a row with {column!r}, which is no column of {self.table.name}")
                if column in self.key_columns and value != full[column]:
                    raise ValueError(f"fold() gave a row with {column} = {value!r} for the key {key!r}")
                full[column] = value
            full = owned(full)
        if self.append_only and row is not None and full != row:
            raise ValueError(f"{self.table.name} is append-only, and fold() would change the row {key!r}")
        return full

    def failed(self, event: Event, error: Exception) -> ProjectionFailed:
        """The error for a fold of this event that raised `error`."""
        place = f"{topic_of(event)}, event {event.originator_version} of {event.originator_id}"
        return ProjectionFailed(
            f"projection {self.name!r} cannot fold {place}: {type(error).__name__}: {error}. Nothing was written; "
            "mend its keys() or fold()",
            projection=self.name,
            position=position_of(event),
        )

    def refused(self, error: Exception) -> ProjectionFailed:
        """The error for rows that the table did not take."""
        return ProjectionFailed(
            f"projection {self.name!r}: table {self.table.name} refused its rows: {error}. Nothing was written; make "
            "the rows fit the table, or the table the rows",
            projection=self.name,
        )


def topic_of(event: Event) -> str:
    """The stored topic of an event."""
    return event.topic if isinstance(event, OpaqueEvent) else event.TOPIC


_ATOMIC: Final = frozenset((int, str, float, bool, bytes, type(None)))


def owned(row: Row) -> dict[str, Any]:
    """A copy of a row that shares nothing mutable with it: what a fold does to lists in a row stays its own."""
    return {name: value if type(value) in _ATOMIC else copy.deepcopy(value) for name, value in row.items()}
