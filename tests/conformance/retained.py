"""What a store still has: the number of rows in each table of keiro, workers and bookkeeping left out."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg

import keiro
from keiro.retention import Collection

APART = ("keiro_workers", "keiro_projection_tracking", "keiro_run_source", "keiro_run_changes")
FOLLOWS = "keiro_execution"
"""The tables of the listing, which forgets a little later."""


def rows_left(engine: keiro.Engine) -> dict[str, int]:
    """How many rows each table has that has any."""
    store: Any = engine.store
    if engine.url.startswith("memory"):
        db = store._db
        counts = {name: len(rows) for name, rows in db.rows.items()}
        parts = ("runs", "ids", "heads", "pending", "due", "by_run", "by_event", "rounds", "under")
        counts |= {name: len(getattr(db, name)) for name in parts}
        counts |= {"journal": len(db.journal.read(0)), "linked": sum(map(len, db.linked.values()))}
        counts |= {"snapshots": len(db.snapshots._rows)}
    else:
        schema = "keiro." if engine.url.startswith("postgres") else ""
        counts = {name: execute(engine.url, f"SELECT count(*) FROM {schema}{name}")[0][0] for name in tables(engine)}
    return {name: count for name, count in counts.items() if count and name not in APART and FOLLOWS not in name}


def tables(engine: keiro.Engine) -> list[str]:
    """The tables of keiro there are, whoever added them."""
    if engine.url.startswith("postgres"):
        sql = "SELECT tablename FROM pg_tables WHERE schemaname = 'keiro' AND tablename LIKE 'keiro_%'"
    else:
        sql = "SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE 'keiro_%'"
    return [name for (name,) in execute(engine.url, sql) if "alembic" not in name and "version" not in name]


def execute(url: str, *statements: str) -> list[Any]:
    """Run statements on a connection of one's own; the rows of the last one. What takes a lock of a whole table belongs
    in a thread: an engine that is open may be in the middle of a transaction on it, and goes on with that only if the
    event loop does."""
    if url.startswith("postgres"):
        with psycopg.connect(url, autocommit=True) as connection:
            for sql in statements:
                cursor = connection.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []
    with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)) as client:
        client.execute("PRAGMA recursive_triggers=ON")
        for sql in statements:
            found = client.execute(sql).fetchall()
        return found


@contextlib.contextmanager
def later(engine: keiro.Engine, seconds: float) -> Iterator[None]:
    """For this block it is so much later."""
    store: Any = engine.store
    before = store.now_ms
    store.now_ms = lambda: before() + round(seconds * 1000)
    try:
        yield
    finally:
        store.now_ms = before


async def gc_later(engine: keiro.Engine, days: float, **options: Any) -> Collection:
    """What a collection of all that is older than 30 days does in so many days."""
    with later(engine, days * 86400):
        return await engine.gc(older_than=30 * 86400, **options)


def ids(runs: Sequence[str]) -> list[str]:
    """Run ids as they are compared."""
    return sorted(runs)
