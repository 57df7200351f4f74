"""Keeps following projections up with the journal: each event once, in order, whichever process folds it.

Rows and tracking change in one transaction, and the tracking is moved only from where it was when the events were read.
So a crash repeats nothing and loses nothing, and of several followers of one projection one folds and the others go on
from there. Commits wake a follower; a slow look is the net under lost wake-ups.
"""

from __future__ import annotations

import asyncio
import enum
from asyncio import Future
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Protocol

import msgspec

from keiro.errors import ProjectionFailed, StoreError
from keiro.events import Event
from keiro.projections.base import ReadModel, position_of
from keiro.stores.base import SAFETY_POLL_S
from keiro.stores.kept import Kept

BATCH: Final = 500
COALESCE_S: Final = 0.02
"""How long commits are collected after one was folded, unless somebody waits: a transaction for each would cost as
much as the commits themselves."""
IDLE_TRACK: Final = 10_000
"""After how many events it did not want a projection's tracking is moved without them."""
AWAY_S: Final = 2.0
"""How long at most to wait before the next look at a store that was away."""
_CLOSED: Final = "the engine was closed while waiting for a projection"
BACKOFF_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class State(enum.StrEnum):
    """How a projection does."""

    CURRENT = "current"  # everything it had seen is folded
    BEHIND = "behind"  # it is folding
    FAILED = "failed"  # a fold raised or its table refused; it tries again, and goes no further before
    AWAY = "away"  # the store cannot be reached


class ProjectionStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How a projection stands: `lag` is the number of journal positions from `position` to the journal's head."""

    name: str
    mode: str
    state: State
    position: int
    lag: int
    error: str | None = None


class Reporter(Protocol):
    """Where operators are told."""

    def report(self, event: str, run_id: str, **fields: object) -> None:
        """Tell operators something they should know."""


class Follower:
    """Follows the journal for one projection, in one task."""

    def __init__(self, model: ReadModel, kept: Kept, reporter: Reporter) -> None:
        self.model = model
        self.moved = asyncio.Event()
        self.state = State.BEHIND
        self.error: ProjectionFailed | None = None
        self.position = 0
        """Every event up to here that it wants is folded; the tracking may be behind by events it does not want."""
        self._kept = kept
        self._reporter = reporter
        self._tracked = 0
        self._limit = BATCH
        self._waiting: list[tuple[int, Future[None]]] = []
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to follow."""
        self._task = asyncio.get_running_loop().create_task(self._follow(), name=f"keiro projection {self.model.name}")

    async def stop(self) -> None:
        """Follow no more. A transaction under way is finished or undone."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        for _, future in self._waiting:
            if not future.done():
                future.set_exception(StoreError(_CLOSED))

    async def caught_up(self, position: int, timeout: float | None) -> None:
        """Return once every event up to `position` is folded. Raises `ProjectionFailed` while the projection fails, and
        `TimeoutError` after `timeout` seconds."""
        if self.position >= position:
            return
        if self.error is not None:
            raise self.error
        if self._task is None:
            raise StoreError(_CLOSED)
        future: Future[None] = asyncio.get_running_loop().create_future()
        entry = (position, future)
        self._waiting.append(entry)
        self.moved.set()
        try:
            async with asyncio.timeout(timeout):
                await future
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)

    async def _follow(self) -> None:
        failures = 0
        while True:
            self.moved.clear()
            try:
                await self._catch_up()
            except Exception as error:
                # Whatever it is, it is told and tried again: else the projection would stand still in silence.
                longest = self._fail(error)
                await asyncio.sleep(min(BACKOFF_S[min(failures, len(BACKOFF_S) - 1)], longest))
                failures += 1
                continue
            failures = 0
            with suppress(TimeoutError):
                async with asyncio.timeout(SAFETY_POLL_S):
                    await self.moved.wait()
            if not self._waiting:
                await asyncio.sleep(COALESCE_S)

    def _fail(self, error: Exception) -> float:
        """Report what went wrong, once; for how long at most to wait before the next try."""
        name = self.model.name
        if isinstance(error, StoreError):
            if self.state is not State.AWAY:
                self._reporter.report("store_away", "", projection=name, error=str(error))
            self.state = State.AWAY
            return AWAY_S
        if not isinstance(error, ProjectionFailed):
            cause = error
            error = ProjectionFailed(f"projection {name!r} stopped: {type(cause).__name__}: {cause}", projection=name)
            error.__cause__ = cause
        if self.error is None or str(self.error) != str(error):
            self._reporter.report("projection_failed", "", projection=name, error=str(error))
        self.state, self.error = State.FAILED, error
        waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            if not future.done():
                future.set_exception(error)
        return BACKOFF_S[-1]

    async def _catch_up(self) -> None:
        """Fold until nothing new is there."""
        while True:
            asked = list(self._waiting)
            head = await self._kept.head()
            tracked = await self._kept.tracked(self.model)
            if tracked is None:
                raise ProjectionFailed(
                    f"projection {self.model.name!r} follows, but another process keeps it inline now, or its tracking "
                    "was deleted: use one mode in all processes, then open the engine again",
                    projection=self.model.name,
                )
            if tracked < self._tracked:
                self.position = tracked  # it was begun anew
            self._tracked = tracked
            self.position = max(self.position, tracked)
            if self.position >= head:
                self.state, self.error = State.CURRENT, None
                # What was the head when they asked may have been deleted since, and then no event ever reaches it.
                self._reached(asked)
                return
            if self.error is None:
                self.state = State.BEHIND
            events = await self._kept.read(self.position, head, self.model.topics, self._limit)
            until = position_of(events[-1]) if len(events) == self._limit else head
            if events or until - tracked >= IDLE_TRACK:
                if not await self._fold(tracked, until, events):
                    continue
                self._tracked = until
            self.position = until
            if until >= head:
                self.state, self.error = State.CURRENT, None
            self._reached()
            # Where the store works on this very thread, nothing else would run before all is folded.
            await asyncio.sleep(0)

    async def _fold(self, tracked: int, until: int, events: list[Event]) -> bool:
        try:
            moved = await self._kept.advance(self.model, tracked, until, events)
        except ProjectionFailed:
            if len(events) <= 1:
                raise
            # Everything before the event that fails is folded first: ever smaller batches lead up to it.
            self._limit = max(1, len(events) // 2)
            return False
        self._limit = min(BATCH, self._limit * 2)
        return moved

    def _reached(self, asked: Sequence[tuple[int, Future[None]]] = ()) -> None:
        for entry in list(self._waiting):
            position, future = entry
            if position <= self.position or entry in asked:
                self._waiting.remove(entry)
                if not future.done():
                    future.set_result(None)
