"""Blocking access to a SQL journal from any thread: reads for the `eventsourcing` library's repository, its snapshots,
and the lease of a worker whose event loop stands still.

On a connection of its own, opened at the first use: the library reads where it is called, not on the event loop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from keiro.decisions import Stored
from keiro.repository import SnapshotRow, SnapshotTable
from keiro.stores.base import LEASE_MS
from keiro.stores.sql import Execute, Row, Sql


class RunTables(Protocol):
    """What a repository of runs is made of."""

    snapshots: SnapshotTable

    def read(self, run_id: str, gt: int | None, lte: int | None, desc: bool, limit: int | None) -> Sequence[Stored]:
        """The events of a run by version."""

    def renew(self, worker_key: int, now_ms: int) -> bool:
        """Extend the lease of a worker; False if the worker is no longer listed."""

    def close(self) -> None:
        """Disconnect."""


class SqlRunTables:
    """Runs and snapshots in a SQL database. `connect` gives an autocommitting connection: how to execute, how to
    close; `now` is the query for the database's time, where leases are counted by that.
    """

    def __init__(
        self,
        sql: Sql,
        connect: Callable[[], tuple[Execute, Callable[[], None]]],
        fault: Callable[[Exception], Exception],
        now: str | None = None,
    ) -> None:
        self._sql = sql
        self._connect = connect
        self._fault = fault
        self._now = now
        self._lock = threading.Lock()
        self._open: tuple[Execute, Callable[[], None]] | None = None
        self.snapshots: SnapshotTable = self

    def read(self, run_id: str, gt: int | None, lte: int | None, desc: bool, limit: int | None) -> Sequence[Stored]:
        """The events of a run by version."""
        order = "DESC" if desc else "ASC"
        values = (run_id, 0 if gt is None else gt, _TOP if lte is None else lte, _TOP if limit is None else limit)
        return [
            self._sql.to_stored(row) for row in self._execute(self._sql.text.run_events + order + " LIMIT ?", values)
        ]

    def select(
        self, run_id: str, gt: int | None, lte: int | None, desc: bool, limit: int | None
    ) -> Sequence[SnapshotRow]:
        """The snapshots of a run by version."""
        order = "DESC" if desc else "ASC"
        values = (run_id, 0 if gt is None else gt, _TOP if lte is None else lte, _TOP if limit is None else limit)
        rows = self._execute(self._sql.text.snapshots + order + " LIMIT ?", values)
        return [SnapshotRow(row[0], int(row[1]), row[2], self._sql.unseal(row[3])) for row in rows]

    def insert(self, rows: Sequence[SnapshotRow]) -> None:
        """Add snapshots; one of the same run and version replaces the one that is there."""
        for row in rows:
            values = (row.originator_id, row.originator_version, row.topic, self._sql.seal(row.state))
            self._execute(self._sql.text.put_snapshot, values)

    def renew(self, worker_key: int, now_ms: int) -> bool:
        """Extend the lease of a worker."""
        if self._now is not None:
            # What the event loop's thread carried on may have stood still while the machine slept: a lease counted from
            # it would have ended already, and the worker take it for a fresh one.
            ((now,),) = self._execute(self._now, ())
            now_ms = int(now)
        return bool(self._execute(self._sql.text.renew, (now_ms + LEASE_MS, worker_key)))

    def _execute(self, sql: str, values: Sequence[Any]) -> list[Row]:
        with self._lock:
            for last in (False, True):
                # A connection that has been idle may have been dropped: that is found out by using it, once.
                fresh = self._open is None
                try:
                    if self._open is None:
                        self._open = self._connect()
                    return self._open[0](sql, values)
                except Exception as error:
                    self._close()
                    if fresh or last:
                        raise self._fault(error) from error
        raise AssertionError("unreachable")

    def _close(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened[1]()

    def close(self) -> None:
        """Disconnect."""
        with self._lock:
            self._close()


_TOP = 2**63 - 1
