"""Lets the listing of executions follow the journal: soon after commits, and at once for who reads it.

Its indexes cost more than a commit, so writers come first: while they write, the listing takes a small part of the time
only, unless it falls far behind. Rows and how far they are change in one transaction; a crash repeats nothing.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final, Protocol

from keiro.errors import StoreError
from keiro.stores.base import SAFETY_POLL_S
from keiro.stores.listing import Listing

COALESCE_S: Final = 0.03
"""How long commits are collected: a run that begins and ends within is written once."""
QUIET_S: Final = 0.01
"""When nothing was committed for so long, nobody is in the way."""
REST: Final = 14
"""While others write, a pause is so many times as long as the work before it,"""
FAR_BEHIND_S: Final = 10.0
"""until the rows have been behind for so long: who reads would wait for all that piles up."""
FAR_REST: Final = 2
"""Then a pause is so many times as long."""
TURN_S: Final = 0.004
"""How long a transaction should take, because other commits wait for it on SQLite."""
MOST: Final = 5000
LEAST: Final = 20
AWAY_S: Final = 1.0


class Reporter(Protocol):
    """Where operators are told."""

    def report(self, event: str, run_id: str, **fields: object) -> None:
        """Tell operators something they should know."""


class Lister:
    """Follows the journal for the listing, in one task."""

    def __init__(self, listing: Listing, reporter: Reporter) -> None:
        self.moved = asyncio.Event()
        self._listing = listing
        self._reporter = reporter
        self._turn = asyncio.Lock()
        self._most = 200
        self._away = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to follow."""
        self._task = asyncio.get_running_loop().create_task(self._follow(), name="keiro listing")

    async def stop(self) -> None:
        """Follow no more. A transaction under way is finished or undone."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def catch_up(self, position: int) -> None:
        """Return when the rows have followed up to a position, and over what was marked until now."""
        async with self._turn:
            drained = False
            while True:
                done = await self._listing.advance(MOST)
                drained = drained or done.drained
                if drained and done.position >= min(position, done.head):
                    return
                # Where the store works on this very thread, nothing else would run before all is done.
                await asyncio.sleep(0)

    async def _follow(self) -> None:
        loop = asyncio.get_running_loop()
        current_at = loop.time()
        current = True
        while True:
            if current:
                with suppress(TimeoutError):
                    async with asyncio.timeout(SAFETY_POLL_S):
                        await self.moved.wait()
                current_at = loop.time()
                await asyncio.sleep(COALESCE_S)
            try:
                took, current = await self._follow_some()
                self._away = False
            except Exception as error:
                # Whatever it is, it is told and tried again: else the rows would stand still in silence.
                if not self._away:
                    what = "store_away" if isinstance(error, StoreError) else "listing_failed"
                    self._reporter.report(what, "", listing="keiro_executions", error=f"{error}")
                self._away = True
                await asyncio.sleep(AWAY_S)
                continue
            await self._rest(took * (REST if loop.time() - current_at < FAR_BEHIND_S else FAR_REST))

    async def _follow_some(self) -> tuple[float, bool]:
        """How long it took, and whether nothing is left."""
        loop = asyncio.get_running_loop()
        async with self._turn:
            self.moved.clear()
            start = loop.time()
            done = await self._listing.advance(self._most)
            took = loop.time() - start
        if took > 2 * TURN_S:
            self._most = max(LEAST, self._most // 2)
        elif took < TURN_S and done.rows:
            self._most = min(MOST, self._most * 2)
        return took, done.drained and done.position >= done.head

    async def _rest(self, seconds: float) -> None:
        """Leave the store to others for a while, as long as there are any."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        some = self.moved.is_set()
        while (left := until - loop.time()) > 0:
            self.moved.clear()
            await asyncio.sleep(min(left, QUIET_S))
            if not self.moved.is_set():
                break
            some = True
        if some:
            self.moved.set()
