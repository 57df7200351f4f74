"""Facts about the machine, without which the figures mean nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sqlite3
import statistics
import time
from pathlib import Path

from benchmarks.postgres import Postgres

_PACKAGES = (
    "keiro-durable",
    "eventsourcing",
    "msgspec",
    "psycopg",
    "SQLAlchemy",
    "dbos",
    "absurd-sdk",
    "absurdctl",
    "langgraph",
    "langgraph-checkpoint",
    "langgraph-checkpoint-sqlite",
    "langgraph-checkpoint-postgres",
    "aiosqlite",
)


def facts(folder: Path, postgres: Postgres | None) -> dict[str, object]:
    """Cores, versions, settings, and how long a small synchronous write takes where the databases lie."""
    return {
        "cores": os.cpu_count(),
        "processor": _processor(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "postgres": postgres.settings() if postgres else None,
        "fsync_us": fsync_latency(folder),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def fsync_latency(folder: Path, times: int = 300) -> dict[str, float]:
    """Microseconds to append 4 KiB and fdatasync it, in `folder`."""
    path, block, taken = folder / "fsync-probe", os.urandom(4096), []
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    try:
        for _ in range(times):
            began = time.perf_counter()
            os.write(descriptor, block)
            os.fdatasync(descriptor)
            taken.append((time.perf_counter() - began) * 1e6)
    finally:
        os.close(descriptor)
        path.unlink()
    cuts = statistics.quantiles(taken, n=100)
    return {"median": round(statistics.median(taken), 1), "p99": round(cuts[98], 1)}


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
