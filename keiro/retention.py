"""Retention: deletes runs that ended long ago and that nobody can ask for any more.

What may go is decided by `keiro.decisions`, run by run and under the journal's lock, in the transaction that deletes;
here is only the walk over the table, in bites that nobody has to wait for.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Final

import msgspec

from keiro.decisions import Collect, Collected, Outcome
from keiro.definition import patience
from keiro.errors import InvalidCall, StoreBusy, StoreUnavailable
from keiro.stores.base import Candidate, Store

BITE: Final = 1000
"""So many lineages are listed by one statement."""
AT_ONCE: Final = 100
"""So many lineages are deleted in one transaction."""


class Collection(msgspec.Struct, frozen=True):
    """What `Engine.gc` has deleted, or with `dry_run` would.

    `collected` are the run ids of lineages (those of round 0), oldest end first, with `runs` rounds in them. `scanned`
    had ended in time; those of them that are not in `collected` are still held by their parents. `failed` are the ones
    whose deletion was refused by the store, each with the reason.
    """

    scanned: int
    runs: int
    collected: tuple[str, ...]
    failed: tuple[tuple[str, str], ...]


async def collect(store: Store, older_than: float | timedelta, *, dry_run: bool) -> Collection:
    """Delete, or only list, the lineages that ended at least `older_than` seconds ago."""
    if isinstance(older_than, int):
        older_than = min(older_than, 2**53)  # nothing is older than that
    age = patience(older_than, "gc(older_than=...)")
    if age is None:
        raise InvalidCall("gc(older_than=None): say how long runs are to be kept after their end")
    before_ms = max(0, store.now_ms() - round(age * 1000))
    scanned = runs = 0
    collected: list[str] = []
    failed: list[tuple[str, str]] = []
    after = (-1, 0)
    while page := await store.ended_before(before_ms, after, BITE):
        after = (page[-1].finished_at_ms, page[-1].run_key)
        scanned += len(page)
        for at in range(0, len(page), AT_ONCE):
            some = page[at : at + AT_ONCE]
            for one, outcome in zip(some, await _decided(store, some, before_ms, dry_run), strict=True):
                if isinstance(outcome, Collected):
                    collected.append(one.run_id)
                    runs += outcome.rounds
                elif isinstance(outcome, BaseException):
                    failed.append((one.run_id, str(outcome)))
            # Where the store works on this very thread, nothing else would run before all is done.
            await asyncio.sleep(0)
    return Collection(scanned, runs, tuple(collected), tuple(failed))


async def _decided(store: Store, some: list[Candidate], before_ms: int, dry_run: bool) -> list[Outcome | BaseException]:
    commands = [Collect(one.run_id, before_ms, one.parent) for one in some]
    if dry_run:
        return [*await store.consider(commands)]
    outcomes = await asyncio.gather(*map(store.submit, commands), return_exceptions=True)
    for outcome in outcomes:
        # One run that cannot be deleted is told of and left; a store that is away is another matter.
        if isinstance(outcome, StoreUnavailable | StoreBusy | asyncio.CancelledError):
            raise outcome
    return outcomes
