"""Statements of one row that are also known over arrays, for Postgres.

A unit of work puts equal statements side by side. Sent one by one they cost the server some thirty microseconds each;
as one statement over arrays, a few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, NamedTuple, Self, TypeAlias

FEWEST: Final = 4
"""From so many rows on, arrays cost less."""
Row: TypeAlias = tuple[Any, ...]


class Last(list[tuple[str, Sequence[Any]]]):
    """The statements after which a program has no more: they may be committed in the same round trip."""


_KINDS: Final = {
    **dict.fromkeys(
        ("run_key", "version", "owner", "epoch", "round_ordinal", "attempts", "priority", "seq", "revision"), "bigint"
    ),
    "cleanup_ms": "bigint",
    **dict.fromkeys(("created_at", "updated_at", "completed_at"), "timestamptz"),
    "event_id": "uuid",
    **dict.fromkeys(("failed", "deleted"), "boolean"),
    "result": "jsonb",
}


def _kind(column: str) -> str:
    return "bigint" if column.endswith("_at_ms") else _KINDS.get(column, "text")


class PerRow(str):
    """SQL for one row, with `?` for its values. `many` does the same over arrays, one for each value; where it gives
    rows, `asked` tells of the values of one row, and `answered` of a row that is given, what they are about."""

    many: str
    asked: Callable[[Sequence[Any]], Any] | None
    answered: Callable[[Row], Any] | None

    @classmethod
    def of(
        cls,
        one: str,
        columns: Sequence[str],
        many: str,
        asked: Callable[[Sequence[Any]], Any] | None = None,
        answered: Callable[[Row], Any] | None = None,
    ) -> Self:
        """`columns` are those that the values of `one` belong to; `{t}` in `many` is the table that the arrays make."""
        arrays = ", ".join(f"${n}::{_kind(column)}[]" for n, column in enumerate(columns, 1))
        made = cls(one)
        made.many = many.replace("{t}", f"unnest({arrays}) WITH ORDINALITY AS t({', '.join(columns)}, n)")
        made.asked, made.answered = asked, answered
        return made


def inserted(one: str, table: str, columns: Sequence[str], end: str = "") -> PerRow:
    """Of an `INSERT` of one row."""
    names = ", ".join(columns)
    return PerRow.of(one, columns, f"INSERT INTO {table} ({names}) SELECT {names} FROM {{t}} ORDER BY n{end}")


def updated(one: str, table: str, changed: Sequence[str], keys: Sequence[str], condition: str = "") -> PerRow:
    """Of an `UPDATE` of one row that sets `changed`."""
    sets = ", ".join(f"{column} = t.{column}" for column in changed)
    where = " AND ".join(f"o.{column} = t.{column}" for column in keys)
    return PerRow.of(one, [*changed, *keys], f"UPDATE {table} o SET {sets} FROM {{t}} WHERE {where}{condition}")


def deleted(one: str, table: str, keys: Sequence[str]) -> PerRow:
    """Of a `DELETE` of one row."""
    where = " AND ".join(f"o.{column} = t.{column}" for column in keys)
    return PerRow.of(one, keys, f"DELETE FROM {table} o USING {{t}} WHERE {where}")


class Sent(NamedTuple):
    """A statement to send, for so many of those that were given."""

    sql: str
    params: Sequence[Any]
    asked: Sequence[Any] | None
    answered: Callable[[Row], Any] | None
    stands_for: int

    def apart(self, rows: list[Row]) -> Iterator[list[Row]]:
        """The rows of each statement that this one stands for."""
        if self.asked is None or self.answered is None:
            yield rows
            for _ in range(self.stands_for - 1):
                yield []
            return
        found: dict[Any, list[Row]] = {}
        for row in rows:
            found.setdefault(self.answered(row), []).append(row)
        for key in self.asked:
            yield found.get(key, [])


def gathered(statements: Sequence[tuple[str, Sequence[Any]]], array: Callable[[Sequence[Any]], Any]) -> Iterator[Sent]:
    """The statements to send for these, in order; `array` makes a parameter of a list."""
    for sql, group in groupby(statements, key=itemgetter(0)):
        rows = [values for _, values in group]
        if len(rows) < FEWEST or not isinstance(sql, PerRow):
            for values in rows:
                yield Sent(sql, values, None, None, 1)
        else:
            asked = None if sql.asked is None else list(map(sql.asked, rows))
            params = [array(column) for column in zip(*rows, strict=True)]
            yield Sent(sql.many, params, asked, sql.answered, len(rows))
