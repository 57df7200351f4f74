"""Who plays: every line of the report, with the class that plays it and the settings it plays with."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from benchmarks.contestant import STORES, Store


@dataclass(frozen=True)
class Entry:
    """A contestant under one group of settings. `role` is "floor", "keiro" or "peer".

    `acknowledges` says whether a step is durable when the body gets its result.
    """

    name: str
    module: str
    attribute: str
    stores: tuple[Store, ...]
    role: str
    settings: str
    package: str | None = None
    acknowledges: bool = True

    def create(self) -> Any:
        """Import and build the contestant. Raises ImportError when its packages are not installed."""
        return getattr(importlib.import_module(self.module), self.attribute)()


_FILES: tuple[Store, ...] = ("sqlite-full", "sqlite-normal", "postgres")

#: The engines, which run workflows.
ENGINES: tuple[Entry, ...] = (
    Entry(
        "floor",
        "benchmarks.floor",
        "Floor",
        _FILES,
        "floor",
        "plain sqlite3, one transaction an operation; plain psycopg, one prepared autocommit statement each",
    ),
    Entry("keiro", "benchmarks.keiro_bench", "Keiro", STORES, "keiro", "as shipped", "keiro-durable"),
    Entry(
        "dbos",
        "benchmarks.dbos_bench",
        "DbosShipped",
        ("sqlite-full", "postgres"),
        "peer",
        "as shipped: async workflows and steps, default configuration (SQLite keeps its rollback journal), "
        "a registered queue for enqueueing",
        "dbos",
    ),
    Entry(
        "dbos-tuned",
        "benchmarks.dbos_bench",
        "DbosTuned",
        _FILES,
        "peer",
        "sync workflows and steps; on SQLite a custom engine in WAL mode; on Postgres a pool of 50 without "
        "pre-ping; start_workflow instead of a queue",
        "dbos",
    ),
    Entry(
        "absurd",
        "benchmarks.absurd_bench",
        "AbsurdShipped",
        ("postgres",),
        "peer",
        "as shipped: async client, one start_worker() with its defaults, await_task_result()",
        "absurd-sdk",
    ),
    Entry(
        "absurd-tuned",
        "benchmarks.absurd_bench",
        "AbsurdTuned",
        ("postgres",),
        "peer",
        "sync client; work_batch() in line for single runs; for many runs four workers with a connection "
        "each, batches of ten, a poll of 10 ms and claims of 2 s",
        "absurd-sdk",
    ),
    Entry(
        "langgraph",
        "benchmarks.langgraph_bench",
        "LangGraphShipped",
        STORES,
        "peer",
        'as shipped: StateGraph, one node a step, durability "async": the next step begins before the last is durable',
        "langgraph",
        acknowledges=False,
    ),
    Entry(
        "langgraph-sync",
        "benchmarks.langgraph_bench",
        "LangGraphSync",
        _FILES,
        "peer",
        'StateGraph, one node a step, durability "sync"',
        "langgraph",
    ),
    Entry(
        "langgraph-tuned",
        "benchmarks.langgraph_bench",
        "LangGraphTuned",
        STORES,
        "peer",
        'functional API (@entrypoint, @task), durability "sync", which does not wait for a task to be written; '
        "on SQLite the blocking checkpointer for single runs",
        "langgraph",
        acknowledges=False,
    ),
)

#: The persistence modules, under an `eventsourcing` application.
RECORDERS: tuple[Entry, ...] = (
    Entry(
        "eventsourcing",
        "benchmarks.saves",
        "LibrarySaves",
        ("sqlite-full", "postgres"),
        "peer",
        "eventsourcing.sqlite (WAL, synchronous FULL) and eventsourcing.postgres as shipped",
        "eventsourcing",
    ),
    Entry(
        "keiro-recorders",
        "benchmarks.saves",
        "KeiroSaves",
        ("sqlite-full", "postgres"),
        "keiro",
        "keiro.stores.sqlite and keiro.stores.postgres as shipped",
        "keiro-durable",
    ),
)

#: What is imported by whom, for the import time.
IMPORTS: dict[str, str] = {
    "keiro": "keiro",
    "dbos": "dbos",
    "absurd": "absurd_sdk",
    "langgraph": "langgraph.graph",
}


def entry_named(name: str) -> Entry:
    return next(entry for entry in (*ENGINES, *RECORDERS) if entry.name == name)
