"""`Application.save` with 1 and with 10 new events: the eventsourcing library's own recorders against
keiro's.

Both are chosen by the library's own environment variable and by nothing else, and both commit every save with
the same durability: SQLite in WAL mode with synchronous FULL, Postgres with synchronous_commit on.
"""

from __future__ import annotations

import gc
import resource
import time
from typing import Any

from eventsourcing.application import Application
from eventsourcing.domain import Aggregate, event
from psycopg.conninfo import conninfo_to_dict

from benchmarks.contestant import Place


class Counter(Aggregate):
    @event("Started")
    def __init__(self) -> None:
        self.total = 0

    @event("Added")
    def add(self, amount: int) -> None:
        self.total += amount


class Saves:
    """Saves one aggregate again and again. Its public methods are commands of child.py."""

    sqlite: str
    postgres: str

    async def open(self, store: str, at: str) -> dict[str, Any]:
        place = Place(store, at)  # type: ignore[arg-type]
        environment = {"PERSISTENCE_MODULE": self.sqlite if place.is_sqlite else self.postgres}
        if place.is_sqlite:
            environment["SQLITE_DBNAME"] = place.at
        else:
            parts = conninfo_to_dict(place.at)
            environment |= {
                "POSTGRES_DBNAME": str(parts["dbname"]),
                "POSTGRES_HOST": str(parts["host"]),
                "POSTGRES_PORT": str(parts["port"]),
                "POSTGRES_USER": str(parts["user"]),
                "POSTGRES_PASSWORD": str(parts.get("password", "")),
            }
        self._application: Application[Any] = Application(environment)
        return {}

    async def save(self, seconds: float, events: int) -> dict[str, Any]:
        counter = Counter()
        self._application.save(counter)
        gc.collect()
        usage, count = resource.getrusage(resource.RUSAGE_SELF), 0
        began = time.perf_counter()
        while (elapsed := time.perf_counter() - began) < seconds:
            for _ in range(events):
                counter.add(1)
            self._application.save(counter)
            count += 1
        after = resource.getrusage(resource.RUSAGE_SELF)
        user, system = after.ru_utime - usage.ru_utime, after.ru_stime - usage.ru_stime
        return {"seconds": elapsed, "count": count, "cpu": user + system, "user": user}

    async def close(self) -> dict[str, Any]:
        self._application.close()
        return {}


class LibrarySaves(Saves):
    sqlite = "eventsourcing.sqlite"
    postgres = "eventsourcing.postgres"


class KeiroSaves(Saves):
    sqlite = "keiro.stores.sqlite"
    postgres = "keiro.stores.postgres"

    def __init__(self) -> None:
        import keiro.stores.sqlite  # noqa: F401  (so that a missing module shows as missing)
