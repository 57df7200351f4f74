"""The journal as a stream for consumers outside a run: what was recorded, in order, and then what is recorded next.

A consumer keeps the position of the last event it has dealt with, and goes on behind it. Positions have no gaps to a
reader, so nothing is skipped and nothing comes twice, whatever becomes of the connection. It reads in batches and holds
nothing open between them: however slow a consumer is, no writer waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import suppress
from datetime import datetime
from typing import Any, Final, Protocol

import msgspec

from keiro.errors import InvalidCall, RunNotFound, SourceChanged, StoreError
from keiro.events import Event, WorkflowCompleted, ms_of
from keiro.identity import parse_run_id
from keiro.mapper import EventMapper
from keiro.projections.base import position_of
from keiro.stores.base import SAFETY_POLL_S, Store
from keiro.stores.kept import Kept

BATCH: Final = 500
STRETCH: Final = 20_000
"""So many positions at most are looked through at once for events of some types."""
COALESCE_S: Final = 0.02
"""How long commits are collected once something was given: looks after each would cost as much as the commits."""
AWAY_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0)


class JournalEntry(msgspec.Struct, frozen=True, gc=False):
    """An event and where it stands in the journal. `position` orders the events of all runs, from 1."""

    position: int
    event: Event

    @property
    def run_id(self) -> str:
        """The run it belongs to: one round."""
        return self.event.originator_id

    @property
    def version(self) -> int:
        """Its place in the run, from 1."""
        return self.event.originator_version

    @property
    def recorded_at(self) -> datetime:
        """When it was recorded, UTC."""
        return self.event.timestamp

    @property
    def recorded_at_ms(self) -> int:
        """When it was recorded, in milliseconds since the epoch."""
        return ms_of(self.event.timestamp)

    @property
    def workflow(self) -> str:
        """The name of the run's workflow."""
        return parse_run_id(self.event.originator_id).workflow

    @property
    def key(self) -> str:
        """The run's key within the workflow."""
        return parse_run_id(self.event.originator_id).key


class Reporter(Protocol):
    """Where operators are told."""

    def report(self, event: str, run_id: str, **fields: object) -> None:
        """Tell operators something they should know."""


class Feed:
    """The events of a store: `async for entry in engine.events.follow(after=position): ...`."""

    def __init__(
        self,
        store: Store,
        kept: Kept,
        mapper: EventMapper,
        reporter: Reporter,
        moved: set[asyncio.Event],
        check_open: Callable[[], object],
    ) -> None:
        self._store = store
        self._kept = kept
        self._mapper = mapper
        self._reporter = reporter
        self._moved = moved
        self._check_open = check_open

    async def last(self) -> int:
        """The position of the newest event, 0 in an empty journal: `follow(after=await engine.events.last())` begins
        with what comes next."""
        self._check_open()
        return await self._kept.head()

    def follow(
        self,
        *,
        after: int = 0,
        run: str | None = None,
        types: Iterable[str | type[Event]] | None = None,
        live: bool = True,
    ) -> AsyncGenerator[JournalEntry, None]:
        """Every event with a position above `after`, in order; then, with `live`, each new one as it is committed.

        `run` is a run id, for the events of that run and of its later rounds alone. `types` are the names of events
        (`"StepRecorded"`, `"basket:ItemAdded"`) or their classes. It ends when the engine is closed, and with `live`
        false at what is the end when it comes there. An outage of the store is waited for. Raises `InvalidCall`,
        `RunNotFound`, and `SourceChanged` for a position that this journal does not have yet: it is of another one.
        """
        self._check_open()
        if isinstance(after, bool) or not isinstance(after, int) or not 0 <= after < 2**63:
            raise InvalidCall(f"follow(after={after!r}): after is the position of an event, or 0")
        if run is not None:
            parse_run_id(run)
        topics = None if types is None else frozenset(map(self._topic, _listed(types)))
        entries = self._of_all(after, topics) if run is None else self._of_run(after, run, topics)
        return self._followed(entries, live)

    def _topic(self, one: object) -> str:
        topic = getattr(one, "TOPIC", None) if isinstance(one, type) else one
        if not isinstance(topic, str) or not topic or not self._mapper.can_occur(topic):
            raise InvalidCall(
                f"follow(types=...): no event has the type {one!r}. There are those of keiro.events (`StepRecorded`) "
                "and those of a workflow's own class (`basket:ItemAdded`)"
            )
        return topic

    async def _followed(
        self, entries: AsyncGenerator[JournalEntry | None, None], live: bool
    ) -> AsyncGenerator[JournalEntry, None]:
        """`entries` gives None where it has come to the end of the journal."""
        woken = asyncio.Event()
        loop = asyncio.get_running_loop()
        given = 0.0
        self._moved.add(woken)
        try:
            while self._is_open():
                # Before the look: what is committed from here on is looked for again.
                woken.clear()
                try:
                    async for entry in entries:
                        if entry is None:
                            break
                        yield entry
                        given = loop.time()
                    else:
                        return
                except Exception:
                    if not self._is_open():
                        return  # whatever a store that is closed says
                    raise
                if not live:
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(SAFETY_POLL_S):
                        await woken.wait()
                if (early := given + COALESCE_S - loop.time()) > 0:
                    await asyncio.sleep(early)
        finally:
            self._moved.discard(woken)
            await entries.aclose()

    def _is_open(self) -> bool:
        try:
            self._check_open()
        except InvalidCall:
            return False
        return True

    async def _of_all(self, after: int, topics: frozenset[str] | None) -> AsyncGenerator[JournalEntry | None, None]:
        head = await self._patiently(self._kept.head)
        if after > head:
            raise SourceChanged(
                f"follow(after={after}): the newest event of this journal has position {head}, so that position is of "
                "another journal, or of this one before it was set back"
            )
        while True:
            while after < head:
                until = head if topics is None else min(head, after + STRETCH)
                events = await self._patiently(lambda: self._kept.read(after, until, topics, BATCH))  # noqa: B023
                for event in events:
                    after = position_of(event)
                    yield JournalEntry(after, event)
                if len(events) < BATCH:
                    after = until
            known, head = head, await self._patiently(self._kept.head)
            if head == known:
                yield None

    async def _of_run(
        self, after: int, run_id: str, topics: frozenset[str] | None
    ) -> AsyncGenerator[JournalEntry | None, None]:
        version = 0
        run = await self._patiently(lambda: self._store.run(run_id))
        if run is None:
            raise RunNotFound(f"there is no run {run_id!r}: start it first, or check its id")
        while True:
            rows = (await self._patiently(lambda: self._store.history([run.run_key], version)))[run.run_key]  # noqa: B023
            following: str | None = None
            for row in rows:
                version = row.version
                if row.position <= after and row.topic != WorkflowCompleted.TOPIC:
                    continue
                event = self._mapper.decode_row(row, run.run_id)
                if isinstance(event, WorkflowCompleted):
                    following = event.handoff
                if row.position > after and (topics is None or row.topic in topics):
                    yield JournalEntry(row.position, event)
            if following is not None:
                later = await self._patiently(lambda: self._store.run(following))  # noqa: B023
                if later is not None:
                    run, version = later, 0
                    continue
            if not rows:
                yield None

    async def _patiently(self, ask: Callable[[], Any]) -> Any:
        """What a store answers, however often it is away before."""
        pauses = iter(AWAY_S)
        away = False
        while True:
            try:
                return await ask()
            except StoreError as error:
                if not self._is_open():
                    raise
                if not away:
                    self._reporter.report("store_away", "", error=str(error))
                away = True
            await asyncio.sleep(next(pauses, AWAY_S[-1]))


def _listed(types: object) -> list[Any]:
    if isinstance(types, str) or not isinstance(types, Iterable):
        raise InvalidCall(f"follow(types={types!r}): pass a list, types=['StepRecorded']")
    return list(types)
