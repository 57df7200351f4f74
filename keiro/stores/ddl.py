"""What SQLite and Postgres write differently when a table is created: types, checks, triggers.

Revisions are built from these pieces, so databases in use depend on them: what one emits never changes. A new
need gets a new method.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

SCHEMA: Final = "keiro"
"""The Postgres schema of all tables. SQLite has none."""

MAX_MS: Final = 2**53 - 1
"""The largest integer that every reader of JSON holds exactly; times are bounded by it."""


class Dialect(Protocol):
    """The pieces of DDL one dialect needs. Columns are nullable unless the revision adds NOT NULL."""

    name: str
    identity: str
    """Type and key of an integer primary key that the database counts up and never gives twice."""
    bigint: str
    """A 64-bit integer."""
    id: str
    """Text that identifies something: it compares and sorts by its bytes."""
    now: str
    """The time now, as a default of a `timestamp`."""

    def table(self, name: str) -> str:
        """The name of a table as statements must write it."""

    def integer(self, column: str, low: int = 0) -> str:
        """A column of whole numbers from `low` to 2**53 - 1: keys, positions, milliseconds."""

    def count(self, column: str, low: int = 0) -> str:
        """A column of whole numbers from `low` to 2**31 - 1."""

    def real(self, column: str, low: float, high: float) -> str:
        """A column of finite numbers from `low` to `high`."""

    def uuid(self, column: str) -> str:
        """A column of UUIDs: 16 bytes on SQLite."""

    def text(self, column: str) -> str:
        """A column of text, and of nothing that merely can stand in a text column."""

    def named(self, column: str) -> str:
        """A column of text that identifies something and is never empty."""

    def digest(self, column: str) -> str:
        """A column of SHA-256 digests, in 64 hexadecimal digits."""

    def json(self, column: str) -> str:
        """A column of JSON kept as the text it was given: a binary JSON type would write it anew."""

    def jsonb(self, column: str) -> str:
        """A column of JSON in the database's own form, where it has one."""

    def timestamp(self, column: str) -> str:
        """A time with its zone: text in ISO 8601, UTC, where the database has no such type."""

    def storage(self, **options: float) -> str:
        """Storage parameters that follow the closing bracket of CREATE TABLE."""

    def refuse(self, message: str) -> str:
        """The statement of a trigger that fails what fired it, as a violated constraint does."""

    def trigger(self, name: str, event: str, table: str, body: Sequence[str], *, when: str | None = None) -> list[str]:
        """The statements that create a trigger. `event` reads like `BEFORE UPDATE OF a, b`; `when` may use
        NEW, OLD and subqueries."""

    def differ(self, one: str, other: str) -> str:
        """The condition that two values are not the same, where NULL is a value like any other."""

    def bypasses(self, name: str, keys: Sequence[Sequence[str]], message: str) -> list[str]:
        """The statements that refuse what removes rows of the table `name` past its BEFORE DELETE triggers. `keys` are
        all its unique keys."""


class SQLite:
    """DDL for SQLite. It cannot add a CHECK to a table that exists, so a table is born with all of them."""

    name = "sqlite"
    identity = "INTEGER PRIMARY KEY AUTOINCREMENT"
    bigint = "INTEGER"
    id = "TEXT"
    now = "(strftime('%Y-%m-%dT%H:%M:%f+00:00', 'now'))"

    def table(self, name: str) -> str:
        """The plain name."""
        return name

    def integer(self, column: str, low: int = 0) -> str:
        """Any value fits any column here, so every check names the storage class. NULL passes."""
        return self._whole(column, low, MAX_MS)

    def count(self, column: str, low: int = 0) -> str:
        """Bounded like the 32-bit integer of Postgres."""
        return self._whole(column, low, 2**31 - 1)

    def _whole(self, column: str, low: int, high: int) -> str:
        kind = f"typeof({column}) IN ('integer', 'null')"
        return f"{column} INTEGER CHECK ({kind} AND {column} BETWEEN {low} AND {high})"

    def real(self, column: str, low: float, high: float) -> str:
        """NaN arrives as NULL here."""
        return f"{column} REAL CHECK (typeof({column}) IN ('real', 'null') AND {column} BETWEEN {low:g} AND {high:g})"

    def uuid(self, column: str) -> str:
        """16 bytes."""
        return f"{column} BLOB CHECK (typeof({column}) IN ('blob', 'null') AND length({column}) = 16)"

    def text(self, column: str) -> str:
        """Bytes in a text column would be kept as bytes, unreadable to every other tool."""
        return f"{column} TEXT CHECK (typeof({column}) IN ('text', 'null'))"

    def named(self, column: str) -> str:
        """Bytes would never equal the text they stand for."""
        return f"{column} {self.id} CHECK (typeof({column}) IN ('text', 'null') AND length({column}) > 0)"

    def digest(self, column: str) -> str:
        """Text."""
        return f"{column} TEXT CHECK (typeof({column}) IN ('text', 'null') AND length({column}) = 64)"

    def json(self, column: str) -> str:
        """Text that parses."""
        return f"{column} TEXT CHECK ({column} IS NULL OR (typeof({column}) = 'text' AND json_valid({column})))"

    def jsonb(self, column: str) -> str:
        """Text that parses."""
        return self.json(column)

    def timestamp(self, column: str) -> str:
        """Text."""
        return f"{column} TEXT"

    def storage(self, **options: float) -> str:
        """SQLite has none."""
        return ""

    def refuse(self, message: str) -> str:
        """ABORT undoes the statement and leaves the transaction to its owner."""
        return f"SELECT RAISE(ABORT, {_literal(message)})"

    def trigger(self, name: str, event: str, table: str, body: Sequence[str], *, when: str | None = None) -> list[str]:
        """One statement."""
        condition = f" WHEN {when}" if when else ""
        steps = " ".join(f"{step};" for step in body)
        return [f"CREATE TRIGGER {name} {event} ON {table} FOR EACH ROW{condition} BEGIN {steps} END"]

    def differ(self, one: str, other: str) -> str:
        """IS DISTINCT FROM came with 3.39."""
        return f"{one} IS NOT {other}"

    def bypasses(self, name: str, keys: Sequence[Sequence[str]], message: str) -> list[str]:
        """INSERT OR REPLACE fires delete triggers on connections with recursive_triggers only: an insert that meets a
        row is refused before. It may also meet one by its rowid, which is -1 here unless the statement gives it."""
        met = (" AND ".join(f"{column} = NEW.{column}" for column in key) for key in keys)
        when = " OR ".join(["NEW.rowid <> -1", *(f"EXISTS (SELECT 1 FROM {name} WHERE {one})" for one in met)])
        return self.trigger(f"{name}_no_replace", "BEFORE INSERT", name, [self.refuse(message)], when=when)


class Postgres:
    """DDL for Postgres, in the schema `keiro`."""

    name = "postgresql"
    identity = "BIGINT GENERATED ALWAYS AS IDENTITY (CACHE 1) PRIMARY KEY"
    bigint = "BIGINT"
    id = 'TEXT COLLATE "C"'
    now = "now()"

    def table(self, name: str) -> str:
        """The name within the schema, whatever the search path."""
        return f"{SCHEMA}.{name}"

    def integer(self, column: str, low: int = 0) -> str:
        """The type admits whole numbers only."""
        return f"{column} BIGINT CHECK ({column} BETWEEN {low} AND {MAX_MS})"

    def count(self, column: str, low: int = 0) -> str:
        """The type bounds it above."""
        return f"{column} INTEGER CHECK ({column} >= {low})"

    def real(self, column: str, low: float, high: float) -> str:
        """NaN is greater than every number here."""
        return f"{column} DOUBLE PRECISION CHECK ({column} BETWEEN {low:g} AND {high:g})"

    def uuid(self, column: str) -> str:
        """The type says it all."""
        return f"{column} UUID"

    def text(self, column: str) -> str:
        """The type says it all."""
        return f"{column} TEXT"

    def named(self, column: str) -> str:
        """A check of its length."""
        return f"{column} {self.id} CHECK (length({column}) > 0)"

    def digest(self, column: str) -> str:
        """A check of its length."""
        return f"{column} TEXT CHECK (length({column}) = 64)"

    def json(self, column: str) -> str:
        """The cast raises where the text does not parse; `IS JSON` would need Postgres 16."""
        return f"{column} TEXT CHECK ({column} IS NULL OR ({column}::json) IS NOT NULL)"

    def jsonb(self, column: str) -> str:
        """The type says it all."""
        return f"{column} JSONB"

    def timestamp(self, column: str) -> str:
        """The type says it all."""
        return f"{column} TIMESTAMPTZ"

    def storage(self, **options: float) -> str:
        """A WITH clause."""
        return f" WITH ({', '.join(f'{name} = {value}' for name, value in options.items())})"

    def refuse(self, message: str) -> str:
        """Raised as an integrity error (23001), like every violated constraint."""
        return f"RAISE EXCEPTION USING MESSAGE = {_literal(message)}, ERRCODE = 'restrict_violation'"

    def trigger(self, name: str, event: str, table: str, body: Sequence[str], *, when: str | None = None) -> list[str]:
        """A function and its trigger, of one name. The condition stands in the function, because the WHEN of
        a trigger takes no subquery."""
        steps = " ".join(f"{step};" for step in body)
        if when:
            steps = f"IF {when} THEN {steps} END IF;"
        action = event.split()[1]
        level = "STATEMENT" if action == "TRUNCATE" else "ROW"
        # What a row trigger returns before the change is the row to go on with; otherwise it does not matter.
        result = {"DELETE": "OLD", "TRUNCATE": "NULL"}.get(action, "NEW")
        return [
            f"CREATE FUNCTION {SCHEMA}.{name}() RETURNS trigger LANGUAGE plpgsql AS"
            f" $$ BEGIN {steps} RETURN {result}; END $$",
            f"CREATE TRIGGER {name} {event} ON {table} FOR EACH {level} EXECUTE FUNCTION {SCHEMA}.{name}()",
        ]

    def differ(self, one: str, other: str) -> str:
        """One operator."""
        return f"{one} IS DISTINCT FROM {other}"

    def bypasses(self, name: str, keys: Sequence[Sequence[str]], message: str) -> list[str]:
        """TRUNCATE fires no row triggers."""
        return self.trigger(f"{name}_no_truncate", "BEFORE TRUNCATE", self.table(name), [self.refuse(message)])


def dialect(name: str) -> Dialect:
    """The pieces for the dialect that SQLAlchemy calls `name`."""
    return SQLite() if name == "sqlite" else Postgres()


def unchanged(d: Dialect, name: str, message: str) -> list[str]:
    """The statements that make the rows of the table `name` what they are for good."""
    return d.trigger(f"{name}_no_update", "BEFORE UPDATE", d.table(name), [d.refuse(message)])


def kept_with_run(d: Dialect, name: str, keys: Sequence[Sequence[str]], message: str) -> list[str]:
    """The statements that keep the rows of the table `name` as long as the run that their `run_id` names. `keys` are
    all unique keys of the table. One of several writers has to look before it inserts: on SQLite no form of INSERT
    passes over a row that is there."""
    alive = f"EXISTS (SELECT 1 FROM {d.table('keiro_runs')} WHERE run_id = OLD.run_id)"
    return [
        *d.trigger(f"{name}_no_delete", "BEFORE DELETE", d.table(name), [d.refuse(message)], when=alive),
        *d.bypasses(name, keys, message),
    ]


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
