"""Crash points: a process that kills itself, as `kill -9` would, at a chosen boundary of its writes.

Every statement of a writing transaction is a boundary (before it is executed), and so is the moment after a commit,
when nobody has been told yet. Counting from 1 upwards until the program survives visits every one of them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

from keiro.decisions import Taken
from keiro.engine import Engine
from keiro.errors import InvalidCall
from keiro.rows import Run

_READS = ("SELECT", "PRAGMA", "EXPLAIN")


class CrashPoints:
    """Installed on an engine that is not open yet: SIGKILLs the process at boundary `at` of its writes (from 1), and
    with 0 only counts them in `passed`."""

    def __init__(self, engine: Engine, at: int) -> None:
        self.at = at
        self.passed = 0
        store: Any = engine.store
        self._engine = store.listener
        store.listener = self
        if engine.url.startswith("sqlite:"):
            self._sqlite(store)
        elif engine.url.startswith("postgres"):
            self._postgres(store)
        else:
            raise InvalidCall("a memory:// store survives no crash: there is nothing to test")

    def reach(self, statement: str = "") -> None:
        """A boundary. Statements that only read are none."""
        if statement.lstrip().upper().startswith(_READS):
            return
        self.passed += 1
        if self.passed == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def committed(self, changed: Sequence[Run], touched: Sequence[str] = (), taken: Sequence[Taken] = ()) -> None:
        """A commit that nobody was told of yet."""
        self.reach()
        self._engine.committed(changed, touched, taken)

    def woken(self) -> None:
        """Another process committed."""
        self._engine.woken()

    def _sqlite(self, store: Any) -> None:
        connect = store._connect

        def traced() -> Any:
            conn = connect()
            conn.set_trace_callback(self.reach)
            return conn

        store._connect = traced

    def _postgres(self, store: Any) -> None:
        connect = store._connect
        reach = self.reach

        async def traced(*, listen: bool = False) -> Any:
            conn = await connect(listen=listen)
            if not listen:
                send = conn.pipeline

                async def pipeline(statements: Any) -> Any:
                    reach(statements[0][0])
                    results = await send(statements)
                    reach(statements[0][0])
                    return results

                conn.pipeline = pipeline
            return conn

        store._connect = traced
