"""Retention: deletes what ended long ago and that nobody can ask for any more: old rounds, and whole runs.

What may go is decided by `keiro.decisions`, under the journal's lock, in the transaction that deletes; here is only the
walk over the table, in bites that nobody has to wait for. Old rounds go first, whether their run goes on or not: what
is left of a run then is small, and goes as a whole. So a crash between any two bites leaves runs that are whole for
everybody who may ask for them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from datetime import timedelta
from typing import Final, TypeAlias

import msgspec

from keiro.decisions import MOST_ROUNDS, Collect, Collected, Command, Outcome, Trim
from keiro.definition import patience
from keiro.errors import InvalidCall, StoreBusy, StoreUnavailable
from keiro.stores.base import Candidate, Store

BITE: Final = 1000
"""So many lineages, or rounds, are listed by one statement."""
AT_ONCE: Final = MOST_ROUNDS
"""So many rounds are deleted in one transaction,"""
MOST_EVENTS: Final = 5_000
"""with so many events, or one round that has more."""
_FOR_EVER: Final = 2**53 - 1


class Collection(msgspec.Struct, frozen=True):
    """What `Engine.gc` has deleted, or with `dry_run` would.

    `collected` are the run ids of lineages (those of round 0), oldest end first, with `runs` rounds in them. `scanned`
    had ended in time; those of them that are not in `collected` are still held by their parents. `failed` are the ones
    whose deletion was refused by the store, each with the reason. `shortened` are lineages that stay, each with the
    number of its old rounds that went.
    """

    scanned: int
    runs: int
    collected: tuple[str, ...]
    failed: tuple[tuple[str, str], ...]
    shortened: tuple[tuple[str, int], ...] = ()


async def collect(store: Store, older_than: float | timedelta, *, dry_run: bool) -> Collection:
    """Delete, or only list, the lineages that ended at least `older_than` seconds ago, and of others the rounds that
    did."""
    if isinstance(older_than, int):
        older_than = min(older_than, 2**53)  # nothing is older than that
    age = patience(older_than, "gc(older_than=...)")
    if age is None:
        raise InvalidCall("gc(older_than=None): say how long runs are to be kept after their end")
    before_ms = max(0, store.now_ms() - round(age * 1000))
    failed: dict[str, str] = {}
    trimmed: Counter[str] = Counter()
    async for some in _portions(store.handed_off_before, before_ms):
        sizes = Counter(one.run_id for one in some)
        trims = [Trim(run_id, before_ms, most) for run_id, most in sizes.items()]
        for trim, outcome in zip(trims, await _decided(store, trims, dry_run), strict=True):
            if isinstance(outcome, Collected):
                trimmed[trim.run_id] += outcome.rounds
            elif isinstance(outcome, BaseException):
                failed[trim.run_id] = str(outcome)
    scanned = runs = 0
    collected: list[str] = []
    async for some in _portions(store.ended_before, before_ms):
        scanned += len(some)
        collects = [Collect(one.run_id, before_ms, one.parent, dry_run) for one in some]
        for one, outcome in zip(some, await _decided(store, collects, dry_run), strict=True):
            if isinstance(outcome, Collected):
                collected.append(one.run_id)
                gone = trimmed.pop(one.run_id, 0)
                # A preview has deleted no rounds: all are counted where they are listed.
                runs += one.rounds if dry_run else outcome.rounds + gone
                failed.pop(one.run_id, None)
            elif isinstance(outcome, BaseException):
                failed[one.run_id] = str(outcome)
    return Collection(scanned, runs, tuple(collected), tuple(failed.items()), tuple(sorted(trimmed.items())))


async def remove(store: Store, lineage_id: str) -> Outcome:
    """Delete a lineage that has ended, however long ago: its old rounds, a few in each transaction, and then the rest.
    After a crash in between it is there still, and is asked for as before."""
    few = Trim(lineage_id, _FOR_EVER, MOST_ROUNDS // 10)
    while isinstance(await store.submit(few), Collected):
        await asyncio.sleep(0)
    return await store.submit(Collect(lineage_id, _FOR_EVER))


Listed: TypeAlias = Callable[[int, tuple[int, int], int], Awaitable[list[Candidate]]]


async def _portions(listed: Listed, before_ms: int) -> AsyncIterator[list[Candidate]]:
    """What is listed, so much at a time as one transaction may delete."""
    after = (-1, 0)
    while page := await listed(before_ms, after, BITE):
        after = (page[-1].finished_at_ms, page[-1].run_key)
        for some in portions(page):
            yield some
            # Where the store works on this very thread, nothing else would run before all is done.
            await asyncio.sleep(0)


def portions(page: Sequence[Candidate]) -> Iterator[list[Candidate]]:
    """The page, cut before what would make a transaction too large."""
    some: list[Candidate] = []
    rounds = events = 0
    for one in page:
        rounds, events = rounds + one.rounds, events + one.events
        if some and (rounds > AT_ONCE or events > MOST_EVENTS):
            yield some
            some, rounds, events = [], one.rounds, one.events
        some.append(one)
    if some:
        yield some


async def _decided(store: Store, commands: Sequence[Command], dry_run: bool) -> list[Outcome | BaseException]:
    if dry_run:
        return [*await store.consider(commands)]
    outcomes = await asyncio.gather(*map(store.submit, commands), return_exceptions=True)
    for outcome in outcomes:
        # One run that cannot be deleted is told of and left; a store that is away is another matter.
        if isinstance(outcome, StoreUnavailable | StoreBusy | asyncio.CancelledError):
            raise outcome
    return outcomes
