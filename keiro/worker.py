"""A worker: the part of an engine that owns runs, keeps its lease, and takes over what dead workers left.

One incarnation of a process is one worker with one lease. Nothing here polls for work: commits of this process and
wake-ups of others say when to look, and a slow look is the net under them.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

from keiro import history
from keiro.decisions import Appended, EndGrace, Fire, Taken
from keiro.errors import StoreError
from keiro.history import History, load
from keiro.lanes import pinned, split
from keiro.limits import NO_LIMITS, Limits, queues_of
from keiro.rows import Head, Run
from keiro.stores.base import LEASE_MS, MOST_CLAIMED, RENEW_MS, SAFETY_POLL_S, SEAL_MS, Incarnation, Store, WorkerRow

BLOCKED_S: Final = 5.0
"""An event loop that stands still for longer is told of: it endangers the lease."""
DEAD_S: Final = 600.0
"""An event loop that stands still for longer is taken for dead: its lease is not renewed for it any more."""
FAREWELL_S: Final = 5.0
"""How long a worker that ends waits for a store that may not answer; its lease ends by itself."""
RETRY_S: Final = 0.5
"""How soon a lease that could not be renewed is tried again."""
_CLOCK: Final[int] = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Employer(Protocol):
    """What a worker needs of its engine."""

    store: Store

    def adopt(self, run: Run, head: Head, history: History) -> None:
        """Drive a run that this worker owns now."""

    def free_slots(self) -> int:
        """How many more runs may be resident."""

    def look_at(self, keys: set[int], versions: Mapping[int, int]) -> None:
        """Tell the drivers of these runs what the store has of them: the versions of those that are still ours."""

    def resident_keys(self) -> set[int]:
        """The run_keys of the runs that are driven here."""

    def seal_all(self) -> None:
        """Stop all resident runs: their ownership is over."""

    async def births_over(self) -> None:
        """Return when all starts under way have committed or failed."""

    def tick(self) -> None:
        """Look after those who wait for other processes."""

    def report(self, event: str, run_id: str, **fields: object) -> None:
        """Tell operators something they should know."""


class Worker:
    """Registers, renews, claims, buries."""

    def __init__(
        self, employer: Employer, workflows: Sequence[str], limits: Limits = NO_LIMITS, *, claims: bool
    ) -> None:
        self._employer = employer
        self._store = employer.store
        self._workflows = tuple(workflows)
        self._limits = limits
        self._claims = claims
        self._incarnation = incarnation()
        self.key = 0
        self._renewed_at = 0.0  # by `_elapsed`
        self._wake = asyncio.Event()
        self._look = asyncio.Event()
        self._look_at = 0.0  # when the claims look again by themselves, in the store's milliseconds
        self._due_at = 0.0  # when a clock is due next, as far as is known here
        self.claiming = 0  # how many runs a claim that is under way may bring
        self.taking = 0  # how many have become ours without one, and are not driven yet
        self._takes: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._reported: set[str] = set()
        self._sealed = False
        self._strays: set[int] = set()
        self._seen_at = 0.0  # when the event loop was last seen to go on, by `_elapsed`
        self._ended = threading.Event()

    async def start(self) -> None:
        """Register, take over from workers of this host that are gone, and begin to work."""
        loop = asyncio.get_running_loop()
        await self._register()
        await self._bury_dead()
        await self._store.adopt_orphans()
        await self.report_unregistered()
        self._seen_at = _elapsed()
        threading.Thread(target=self._stand_in, args=(loop,), name="keiro lease", daemon=True).start()
        self._tasks = [loop.create_task(self._keep_lease(), name="keiro lease")]
        if self._claims:
            self._tasks.append(loop.create_task(self._claim_for_ever(), name="keiro claims"))
        self._tasks.append(loop.create_task(self._watch_others(), name="keiro watch"))
        self._tasks.append(loop.create_task(self._look_for_ever(), name="keiro residents"))

    async def stop_claiming(self) -> None:
        """Claim nothing more; the lease is kept."""
        self._claims = False
        self.wake()

    async def stop(self) -> None:
        """End the lease and the loops. Runs must have been released before."""
        self._ended.set()
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await self._bury_self(self._incarnation)

    async def _bury_self(self, old: Incarnation) -> None:
        # Again where a renewal that was still under way came between the look and the burial.
        while row := next((row for row in await self._store.workers() if row.worker_id == old.worker_id), None):
            if await self._store.bury(row):
                break

    @property
    def leased(self) -> bool:
        """Whether new runs may be born as this worker's."""
        return self._claims and not self._sealed

    def holds(self) -> bool:
        """Whether the lease covers an effect that begins now. If it could not be renewed in time, all runs are sealed
        here and now: the loop may have been blocked, or the process stopped, so that no timer could do it."""
        if not self._sealed and (_elapsed() - self._renewed_at) * 1000 > SEAL_MS:
            # Before anybody may take our runs, so that no effect of ours overlaps with theirs.
            self._sealed = True
            self._employer.seal_all()
        return not self._sealed

    def wake(self) -> None:
        """There may be something to claim."""
        self._wake.set()

    def expect(self, due_ms: int) -> None:
        """A parked run is due then: look in time."""
        self._due_at = min(self._due_at, due_ms)
        if due_ms < self._look_at:
            self._wake.set()

    def look_after(self) -> None:
        """Others have committed: runs of ours may have been appended to, or taken."""
        self._look.set()

    async def _look_for_ever(self) -> None:
        while True:
            await self._look.wait()
            self._look.clear()
            keys = self._employer.resident_keys()
            if not keys:
                continue
            try:
                key = self.key
                versions = await self._store.owned(key)
                if self.key == key and not self._sealed:
                    self._employer.look_at(keys, versions)
            except Exception as error:
                self._trouble(error)

    def take(self, taken: Sequence[Taken]) -> None:
        """Drive runs that have become this worker's without a claim."""
        mine = [one for one in taken if one.head.owner == self.key]
        if mine:
            self.taking += len(mine)
            task = asyncio.get_running_loop().create_task(self._take(mine), name="keiro takes")
            self._takes.add(task)
            task.add_done_callback(self._takes.discard)

    async def _take(self, taken: Sequence[Taken]) -> None:
        key = self.key
        try:
            runs = [(one.run, one.head) for one in taken if one.sure or await self._is_ours(one)]
            histories = await self._history(key, runs)
        except Exception as error:
            self._trouble(error)
            return
        finally:
            self.taking -= len(taken)
        if self._sealed or not self._claims or self.key != key:
            return  # as after a claim: the end of the incarnation hands them back
        for run, head in runs:
            self._employer.adopt(run, head, histories[run.run_key])

    async def _is_ours(self, one: Taken) -> bool:
        """Whether the run is still this worker's as it was told, and nobody drives it here."""
        if one.run.run_key in self._employer.resident_keys():
            return False
        found = await self._store.head(one.run.run_id)
        return found is not None and (found[1].owner, found[1].epoch) == (one.head.owner, one.head.epoch)

    # Claiming

    async def _claim_for_ever(self) -> None:
        while self._claims:
            self._wake.clear()
            # What is parked from here on may be missed by this look: whenever it is due, it is worth another one.
            self._look_at = math.inf
            pause = SAFETY_POLL_S
            try:
                if not self._sealed:
                    pause = await self._claim_all()
            except Exception as error:
                self._due_at = 0.0
                self._trouble(error)
            self._look_at = self._store.now_ms() + pause * 1000
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()

    async def _fire_all(self) -> None:
        """Record the clocks that are due of parked runs, in sets and whether or not there is room to drive them now."""
        fired = True
        while fired and self._claims and not self._sealed:
            due = await self._store.due(self._workflows)
            at_ms = self._store.now_ms()
            outcomes = await asyncio.gather(
                *(self._store.submit(Fire(run_id, version, at_ms)) for run_id, version in due)
            )
            # What cannot be fired is claimed as it is.
            fired = any(isinstance(outcome, Appended) for outcome in outcomes)

    async def _claim_all(self) -> float:
        began, key = self._store.now_ms(), self.key
        # Not at every wake: those who have something to do now need not wait for this look.
        due_at, self._due_at = self._due_at, math.inf
        if due_at <= began:
            await self._fire_all()
        while self._claims and (room := min(self._employer.free_slots(), MOST_CLAIMED)) > 0:
            self.claiming = room  # kept free: what is started meanwhile waits for its turn
            try:
                taken = await self._store.claim(key, self._workflows, room, self._limits)
                if not taken:
                    break
                histories = await self._history(key, taken)
            finally:
                self.claiming = 0
            if self._sealed or not self._claims or self.key != key:
                # The runs are not driven: the end of the incarnation that claimed them hands, or has handed, them back.
                return SAFETY_POLL_S
            for run, head in taken:
                self._employer.adopt(run, head, histories[run.run_key])
        # What was due before and is not taken waits for a free slot, or for the next incarnation: no use in asking
        # again at once.
        due = min((due for due in await self._dues(began) if due is not None and due > began), default=None)
        if due is not None:
            self._due_at = min(self._due_at, due)
        return SAFETY_POLL_S if due is None else min(max(due - self._store.now_ms(), 1) / 1000, SAFETY_POLL_S)

    async def _dues(self, began: int) -> list[int | None]:
        """When something may be claimed that cannot be now; each queue by itself, for what is due in a full one must
        not hide what will be due in another."""
        dues = [await self._store.next_due_ms([name for name in self._workflows if name not in self._limits])]
        for queue, names in queues_of(self._limits).values():
            dues.append(await self._store.next_due_ms(names))
            # As of before the claim: a rate that opened since then is due at once.
            dues.append(await self._store.opens_ms(queue, began))
        return dues

    def _trouble(self, error: Exception) -> None:
        # Whatever it was, the loops go on: a worker that ended without a word would leave its runs to nobody.
        known = isinstance(error, StoreError | TimeoutError)
        self._employer.report("store_away" if known else "worker_fault", "", error=str(error) or repr(error))

    async def _history(self, key: int, taken: Sequence[tuple[Run, Head]]) -> dict[int, History]:
        run_keys = [run.run_key for run, _ in taken]
        try:
            long = [run.run_key for run, head in taken if head.version > history.EVERY]
            stored = await self._store.history([run_key for run_key in run_keys if run_key not in long])
            histories = {run_key: History((), rows) for run_key, rows in stored.items()}
            for run_key in long:
                histories[run_key] = await load(self._store, run_key)
            return histories
        except BaseException:
            # Claimed but not driven would be owned by a living worker for ever.
            with suppress(StoreError):
                await self._store.release(key, run_keys)
            raise

    async def report_unregistered(self) -> None:
        """Report, once each, workflows that have pending or due runs and are not registered here, and versions of
        pinned ones."""
        if not self._claims:
            return
        for name in await self._store.unregistered(self._workflows):
            if name not in self._reported:
                self._reported.add(name)
                workflow, version = split(name)
                if version is None and workflow not in pinned(self._workflows):
                    self._employer.report("unregistered_workflow", "", workflow=name)
                else:
                    self._employer.report("unregistered_version", "", workflow=workflow, version=version)

    # The lease

    async def _keep_lease(self) -> None:
        pause = RENEW_MS / 1000
        while True:
            slept = _elapsed()
            await asyncio.sleep(pause)
            self._seen_at = _elapsed()
            late = self._seen_at - slept - pause
            if late > BLOCKED_S:
                self._employer.report("loop_blocked", "", seconds=late)
            pause = RENEW_MS / 1000
            # A store that does not answer is as good as one that is away: the runs must be sealed in time all the same.
            left = None if self._sealed else self._renewed_at + SEAL_MS / 1000 - _elapsed()
            try:
                async with asyncio.timeout(left):
                    await self._renew()
            except Exception as error:
                self._trouble(error)
                pause = RETRY_S
                self.holds()

    async def _renew(self) -> None:
        started = _elapsed()
        renewed = not self._sealed and await self._store.renew(self.key)
        if not renewed or self._sealed:  # sealed also while the renewal was under way
            await self._begin_again()
            return
        # Counted from before the statement was sent: the lease cannot have begun earlier.
        self._renewed_at = started
        await self._store.adopt_orphans()
        await self._release_strays()

    def _stand_in(self, loop: asyncio.AbstractEventLoop) -> None:
        """Renew in the place of an event loop that stands still; in a thread of its own.

        Without it a step that blocks the loop for longer than the lease would be taken over while it runs, by a worker
        that then loses it in the same way, and so for ever.
        """
        while not self._ended.wait(BLOCKED_S / 5):
            if loop.is_closed():
                return  # it ended without a close of the engine: nobody is left to drive what the lease would keep
            key, started = self.key, _elapsed()
            still = started - self._seen_at - RENEW_MS / 1000
            if self._sealed or still > DEAD_S or started - self._renewed_at < RENEW_MS / 1000 + BLOCKED_S:
                continue
            tables = self._store.run_tables()
            try:
                if tables.renew(key, self._store.now_ms()) and self.key == key:
                    self._renewed_at = started
                    if still > 0:  # else it is the store that takes its time
                        self._employer.report("loop_blocked", "", seconds=still)
            except Exception as error:
                self._trouble(error)
            finally:
                tables.close()

    async def _register(self) -> None:
        started = _elapsed()
        self.key = await self._store.register(self._incarnation)
        self._renewed_at = started

    async def _release_strays(self) -> None:
        """Hand back what this worker owns and does not drive: a claim or a start whose answer was lost on the way.

        Only what was so at the last look too: a start that is being committed now is not resident yet either.
        """
        strays = set(await self._store.owned(self.key)) - self._employer.resident_keys()
        if lost := strays & self._strays:
            self._employer.report("strays_released", "", runs=len(lost))
            await self._store.release(self.key, sorted(lost))
            self.wake()
        self._strays = strays

    async def _begin_again(self) -> None:
        """The old incarnation is over, because it was buried or because it had to seal its runs: start a new one."""
        self._employer.report("lease_lost", "")
        self._sealed = True
        self._employer.seal_all()
        # A run born as the old incarnation's after its burial would belong to nobody, and be taken for the new one's.
        await self._employer.births_over()
        old, self._incarnation = self._incarnation, incarnation()
        await self._bury_self(old)
        await self._register()
        self._sealed = False
        await self._store.adopt_orphans()
        self.wake()

    # Other workers

    async def _watch_others(self) -> None:
        while True:
            await asyncio.sleep(SAFETY_POLL_S)
            try:
                self._employer.tick()
                await self.end_graces()
                await self._bury_dead()
                await self.report_unregistered()
            except Exception as error:
                self._trouble(error)

    async def end_graces(self) -> None:
        """Cancel the runs that were asked to end and have not in time, whoever has them and whatever they wait for."""
        now = self._store.now_ms()
        for run_id, over_ms in await self._store.asked():
            if over_ms <= now and isinstance(await self._store.submit(EndGrace(run_id, now)), Appended):
                self._employer.report("grace_over", run_id)

    async def _bury_dead(self) -> None:
        now = self._store.now_ms()
        host = self._incarnation.host
        for row in await self._store.workers():
            if row.worker_key == self.key or (row.lease_expires_at_ms > now and not provably_gone(row, host)):
                continue
            if await self._store.bury(row):
                self._employer.report("worker_buried", "", worker=row.worker_id, host=row.host, pid=row.pid)
                if self._limits:
                    self._store.announce()  # the slots it held may be for others to take than this worker
                else:
                    self.wake()


def _elapsed() -> float:
    # Goes on while the machine sleeps, as the leases in the store do.
    return time.clock_gettime(_CLOCK)


def incarnation() -> Incarnation:
    """Who this process is, this time."""
    return Incarnation(uuid.uuid4().hex, host_identity(), os.getpid(), process_started(os.getpid()) or "")


def host_identity() -> str:
    """The host, its current boot and the process-id namespace: within it, equal pids mean the same process."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return "|".join(parts)


def process_started(pid: int) -> str | None:
    """When a process of this host began, in the kernel's ticks; empty where that cannot be read; None if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
        return _alive(pid)
    except OSError:
        return ""
    # The second field is the command in parentheses and may contain anything.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else fields[19]


def _alive(pid: int) -> str | None:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        return ""
    return ""


def provably_gone(row: WorkerRow, host: str) -> bool:
    """Whether the process of a worker has certainly ended: it was on this very host, and is not there or is another."""
    if row.host != host:
        return False
    started = process_started(row.pid)
    return started is None or (bool(started) and bool(row.process_started) and started != row.process_started)


assert LEASE_MS > SEAL_MS > RENEW_MS
