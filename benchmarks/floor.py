"""The floor: the rows that a run writes, written by the plain driver with nothing around it.

SQLite: one transaction an operation. Postgres: one prepared autocommit statement an operation. The tables are
keiro's own, with their indexes and triggers, so that what lies between the floor and keiro is keiro's code
alone.
"""

from __future__ import annotations

import itertools
import sqlite3
import time
import uuid
from abc import ABC, abstractmethod
from typing import Any

import psycopg

from benchmarks.contestant import Contestant, Place
from keiro.stores.migrate import ensure_postgres, ensure_sqlite

_REST = f'"started_at_ms":1750000000000,"inputs_digest":"{"9f86d081" * 8}"'


class Floor(Contestant):
    """Chooses the driver by the store."""

    async def prepare(self, place: Place) -> None:
        if place.store == "postgres":
            ensure_postgres(place.at)
        else:
            ensure_sqlite(place.at)

    async def open(self, place: Place) -> None:
        self._driver: _Driver = _Postgres(place) if place.store == "postgres" else _Sqlite(place)
        self._names = itertools.count()

    async def close(self) -> None:
        self._driver.close()

    async def run_one(self, steps: int) -> None:
        run = self._start()
        for step in range(steps):
            self._step(run, step)
        self._end(run, steps)

    async def run_many(self, runs: int, steps: int, bodies: bool) -> None:
        started = [self._start() for _ in range(runs)]
        for step in range(steps):
            for run in started:
                self._step(run, step)
        for run in started:
            self._end(run, steps)

    async def enqueue(self, runs: int) -> None:
        await self.run_many(runs, 1, False)

    def _start(self) -> int:
        key = f"run-{next(self._names)}"
        payload = f'{{"workflow":"floor","key":"{key}","input":[1],"on_cancel":"cancel"}}'
        return self._driver.start(key, payload)

    def _step(self, run: int, step: int) -> None:
        payload = f'{{"step":"_step#{step}","result":{step},{_REST}}}'
        self._driver.step(run, step + 1, payload)

    def _end(self, run: int, steps: int) -> None:
        self._driver.end(run, steps + 1, f'{{"result":{steps}}}')


class _Driver(ABC):
    """Three operations, each committed when it returns. `expected` is the head's version before it."""

    @abstractmethod
    def start(self, key: str, payload: str) -> int: ...

    @abstractmethod
    def step(self, run: int, expected: int, payload: str) -> None: ...

    @abstractmethod
    def end(self, run: int, expected: int, payload: str) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


_RUN = "(run_id, workflow, key, status, lineage_id, input_json, created_at_ms, started_at_ms)"
_JOURNAL = "(run_key, version, event_id, topic, payload, recorded_at_ms)"


def _event_id(run: int, version: int) -> bytes:
    return run.to_bytes(8, "big") + version.to_bytes(8, "big")


def _now() -> int:
    return time.time_ns() // 1_000_000


class _Sqlite(_Driver):
    _INSERT_RUN = f"INSERT INTO keiro_runs {_RUN} VALUES (?, 'floor', ?, 'running', ?, '[1]', ?, ?) RETURNING run_key"
    _INSERT_HEAD = "INSERT INTO keiro_run_heads (run_key, version, owner, epoch) VALUES (?, 1, 1, 1)"
    _ADVANCE = "UPDATE keiro_run_heads SET version = ?{} WHERE run_key = ? AND version = ? AND owner = 1 AND epoch = 1"
    _ADVANCE_ONLY = _ADVANCE.format("")
    _ADVANCE_AND_RELEASE = _ADVANCE.format(", owner = NULL")
    _END_RUN = "UPDATE keiro_runs SET status = 'completed', result_json = ?, finished_at_ms = ? WHERE run_key = ?"
    _INSERT_EVENT = f"INSERT INTO keiro_journal {_JOURNAL} VALUES (?, ?, ?, ?, ?, ?)"

    def __init__(self, place: Place) -> None:
        self._connection = sqlite3.connect(place.at, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute(f"PRAGMA synchronous={'FULL' if place.store == 'sqlite-full' else 'NORMAL'}")
        self._execute = self._connection.execute

    def start(self, key: str, payload: str) -> int:
        now, name = _now(), f"wf:floor-{key}"
        self._execute("BEGIN IMMEDIATE")
        ((run,),) = self._execute(self._INSERT_RUN, (name, key, name, now, now)).fetchall()
        self._execute(self._INSERT_HEAD, (run,))
        self._execute(self._INSERT_EVENT, (run, 1, _event_id(run, 1), "WorkflowStarted", payload, now))
        self._execute("COMMIT")
        return int(run)

    def step(self, run: int, expected: int, payload: str) -> None:
        version = expected + 1
        self._execute("BEGIN IMMEDIATE")
        self._execute(self._ADVANCE_ONLY, (version, run, expected))
        event = (run, version, _event_id(run, version), "StepRecorded", payload, _now())
        self._execute(self._INSERT_EVENT, event)
        self._execute("COMMIT")

    def end(self, run: int, expected: int, payload: str) -> None:
        version, now = expected + 1, _now()
        self._execute("BEGIN IMMEDIATE")
        self._execute(self._ADVANCE_AND_RELEASE, (version, run, expected))
        self._execute(self._END_RUN, (payload, now, run))
        event = (run, version, _event_id(run, version), "WorkflowCompleted", payload, now)
        self._execute(self._INSERT_EVENT, event)
        self._execute("COMMIT")

    def close(self) -> None:
        self._connection.close()


class _Postgres(_Driver):
    _EVENT = (
        f"INSERT INTO keiro.keiro_journal {_JOURNAL}"
        " SELECT run_key, {version}, %(event)s, '{topic}', %(payload)s, %(now)s FROM {source}"
    )
    _START = (
        f"WITH run AS (INSERT INTO keiro.keiro_runs {_RUN}"
        " VALUES (%(name)s, 'floor', %(key)s, 'running', %(name)s, '[1]', %(now)s, %(now)s)"
        " RETURNING run_key),"
        " head AS (INSERT INTO keiro.keiro_run_heads (run_key, version, owner, epoch)"
        " SELECT run_key, 1, 1, 1 FROM run RETURNING run_key) "
        + _EVENT.format(version="1", topic="WorkflowStarted", source="head")
        + " RETURNING run_key"
    ).encode()
    _HEAD = (
        "WITH head AS (UPDATE keiro.keiro_run_heads SET version = %(version)s{owner} WHERE run_key = %(run)s"
        " AND version = %(expected)s AND owner = 1 AND epoch = 1 RETURNING run_key) "
    )
    _STEP = (
        _HEAD.format(owner="") + _EVENT.format(version="%(version)s", topic="StepRecorded", source="head")
    ).encode()
    _END = (
        _HEAD.format(owner=", owner = NULL").rstrip()
        + ", run AS (UPDATE keiro.keiro_runs SET status = 'completed', result_json = %(payload)s,"
        " finished_at_ms = %(now)s WHERE run_key = (SELECT run_key FROM head) RETURNING run_key) "
        + _EVENT.format(version="%(version)s", topic="WorkflowCompleted", source="run")
    ).encode()

    def __init__(self, place: Place) -> None:
        self._connection: psycopg.Connection[Any] = psycopg.connect(place.at, autocommit=True)
        self._cursor = self._connection.cursor()

    def start(self, key: str, payload: str) -> int:
        values = {
            "name": f"wf:floor-{key}",
            "key": key,
            "event": uuid.uuid4(),
            "payload": payload,
            "now": _now(),
        }
        row = self._cursor.execute(self._START, values, prepare=True).fetchone()
        assert row is not None
        return int(row[0])

    def step(self, run: int, expected: int, payload: str) -> None:
        self._append(self._STEP, run, expected, payload)

    def end(self, run: int, expected: int, payload: str) -> None:
        self._append(self._END, run, expected, payload)

    def _append(self, statement: bytes, run: int, expected: int, payload: str) -> None:
        version = expected + 1
        values = {
            "run": run,
            "expected": expected,
            "version": version,
            "event": uuid.UUID(bytes=_event_id(run, version)),
            "payload": payload,
            "now": _now(),
        }
        self._cursor.execute(statement, values, prepare=True)

    def close(self) -> None:
        self._connection.close()
