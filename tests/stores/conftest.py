"""A database of each SQL dialect, driven with plain SQL: what the schema promises, it promises to every
client."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import psycopg
import pytest

from keiro.stores import migrate

RUN = {
    "run_id": "wf:order-1",
    "workflow": "order",
    "key": "1",
    "status": "pending",
    "lineage_id": "wf:order-1",
    "input_json": "[]",
    "created_at_ms": 5,
}
EVENT = {
    "run_key": 1,
    "version": 1,
    "event_id": b"0123456789abcdef",
    "topic": "WorkflowStarted",
    "payload": "{}",
    "recorded_at_ms": 5,
}


class Database(Protocol):
    """One database. Statements name tables plainly and mark parameters with `?`; each is a transaction."""

    dialect: str
    refused: tuple[type[Exception], ...]
    """What the driver raises where a value does not fit its column or breaks a constraint."""
    guarded: tuple[type[Exception], ...]
    """What it raises where a trigger refuses."""

    def ensure(self, mode: migrate.Mode = "migrate", timeout: float = 30.0) -> None: ...

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]: ...

    def insert(self, table: str, row: dict[str, Any]) -> None: ...


class SQLiteDatabase:
    dialect = "sqlite"
    refused = guarded = (sqlite3.IntegrityError,)

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pragmas = ["foreign_keys = ON"]

    def ensure(self, mode: migrate.Mode = "migrate", timeout: float = 30.0) -> None:
        migrate.ensure_sqlite(str(self.path), mode=mode, timeout=timeout)

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.path, isolation_level=None)) as connection:
            for pragma in self.pragmas:
                connection.execute(f"PRAGMA {pragma}")
            return connection.execute(sql, values).fetchall()

    def insert(self, table: str, row: dict[str, Any]) -> None:
        marks = ", ".join("?" * len(row))
        self.rows(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", *row.values())


class PostgresDatabase:
    dialect = "postgresql"
    # A JSON check raises the error of its cast; a value of a wrong type has no cast at all.
    refused = (psycopg.IntegrityError, psycopg.DataError, psycopg.ProgrammingError)
    guarded = (psycopg.IntegrityError, psycopg.errors.GeneratedAlways)

    def __init__(self, url: str) -> None:
        self.url = url

    def ensure(self, mode: migrate.Mode = "migrate", timeout: float = 30.0) -> None:
        migrate.ensure_postgres(self.url, mode=mode, timeout=timeout)

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url, autocommit=True, options="-c search_path=keiro,public") as connection:
            found = connection.execute(sql.replace("?", "%s") if values else sql, values or None)
            return found.fetchall() if found.description else []

    def insert(self, table: str, row: dict[str, Any]) -> None:
        marks = ["?::uuid" if name == "event_id" else "?" for name in row]
        values = [value.hex() if name == "event_id" and value else value for name, value in row.items()]
        self.rows(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join(marks)})", *values)


@pytest.fixture(params=["sqlite", "postgres"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """A database with nothing in it."""
    if request.param == "sqlite":
        yield SQLiteDatabase(tmp_path / "runs.db")
    else:
        yield PostgresDatabase(request.getfixturevalue("postgres_url"))


@pytest.fixture
def database(empty: Database) -> Database:
    """A database at the newest revision."""
    empty.ensure()
    return empty
