"""What a driven run waits for, in memory: clocks, deferreds, children, and the parking of a run that only waits.

A wait is over when its step is recorded, whoever recorded it, or when its time has come. A run that does nothing but
wait for a while is parked: one event that holds only if nothing has come meanwhile, and the run leaves the process.
"""

from __future__ import annotations

import asyncio
from asyncio import Future, Task, TimerHandle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from keiro.decisions import Append, Appended, VersionConflict, fold, new
from keiro.errors import RunSealed, StoreError
from keiro.events import StateChanged, Wait
from keiro.identity import StepIds, suspended_step

if TYPE_CHECKING:
    from keiro.driver import Driver

PARK_S: float = 0.1
"""How long a run has to do nothing but wait before it is parked: what comes sooner costs no replay."""
TURNS: Final = 25
"""How many turns of the event loop a run has to be quiet where `PARK_S` is 0: what is done in one task of a body takes
some of them until the task that waits for that one goes on."""
LONGEST_S: Final = 3600.0
"""A clock is looked at that often at least: the machine may have slept."""


def is_external(step: str) -> bool:
    """Whether others than the run's own body record this step."""
    return step.startswith("awk:") or (step.startswith("child:") and step.endswith(":result"))


class _Open:
    """One wait of one task of the body."""

    __slots__ = ("clock", "due_ms", "future", "kind", "step")

    def __init__(self, kind: str, step: str, due_ms: int | None, clock: str | None, future: Future[None]) -> None:
        self.kind = kind
        self.step = step
        self.due_ms = due_ms
        self.clock = clock
        self.future = future

    def shown(self, retracted: Callable[[str], int]) -> Iterator[Wait]:
        """What the event that parks the run says of it: enough for others to fire its clock."""
        if self.clock is None or self.due_ms is None:
            yield Wait(self.kind, self.step, self.due_ms, retracted(self.step))
        else:
            yield Wait(self.kind, self.step)
            yield Wait("timeout", self.clock, self.due_ms, retracted(self.clock))


class Waits:
    """The open waits of one driven run."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._loop = asyncio.get_running_loop()
        self._open: dict[_Open, None] = {}  # in the order in which they began
        self._by_step: dict[str, list[_Open]] = {}
        self._timer: TimerHandle | None = None
        self._mark: tuple[int, int] = (0, 0)
        self._quiet = 0  # how many looks have found nothing since
        self._begun = 0
        self._task: Task[None] | None = None

    def __bool__(self) -> bool:
        return bool(self._open)

    async def over(self, kind: str, step: str, due_ms: int | None = None, clock: str | None = None) -> bool:
        """Wait until `step` is recorded (True) or `due_ms` has come (False), whichever is first. `clock` is the step
        that records the latter, where it is another one."""
        host = self._driver.host
        with self._opened(kind, step, due_ms, clock) as wait:
            while not self._driver.is_recorded(step):
                left = None if due_ms is None else (due_ms - host.wall_ms()) / 1000
                if left is not None and left <= 0:
                    return False
                self.rest()
                with suppress(TimeoutError):
                    async with asyncio.timeout(None if left is None else min(left, LONGEST_S)):
                        await wait.future
                if wait.future.done():
                    wait.future = self._loop.create_future()
            return True

    async def command(self, step: str, due_ms: int | None, clock: str) -> bool:
        """Wait until a command of the aggregate has come (True) or `due_ms` has (False)."""
        host = self._driver.host
        with self._opened("until", step, due_ms, clock) as wait:
            left = None if due_ms is None else (due_ms - host.wall_ms()) / 1000
            if left is not None and left <= 0:
                return False
            self.rest()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if left is None else min(left, LONGEST_S)):
                    await wait.future
                    return True
            return due_ms is None or host.wall_ms() < due_ms

    @contextmanager
    def _opened(self, kind: str, step: str, due_ms: int | None, clock: str | None) -> Iterator[_Open]:
        wait = _Open(kind, step, due_ms, clock, self._loop.create_future())
        self._open[wait] = None
        self._by_step.setdefault(step, []).append(wait)
        self._begun += 1
        try:
            yield wait
        finally:
            del self._open[wait]
            same = self._by_step[step]
            same.remove(wait)
            if not same:
                del self._by_step[step]

    def recorded(self, step: str) -> None:
        """Others have recorded this step."""
        for wait in self._by_step.get(step, ()):
            if not wait.future.done():
                wait.future.set_result(None)

    def commanded(self) -> None:
        """A command of the aggregate has come."""
        for wait in self._open:
            if wait.kind == "until" and not wait.future.done():
                wait.future.set_result(None)

    # The clock

    def next_due_ms(self) -> int | None:
        """When the first of the clocks is due."""
        return min((wait.due_ms for wait in self._open if wait.due_ms is not None), default=None)

    def clock_moved(self) -> None:
        """The time is another one than the event loop could foresee: look at what is due now."""
        now = self._driver.host.wall_ms()
        for wait in self._open:
            if wait.due_ms is not None and wait.due_ms <= now and not wait.future.done():
                wait.future.set_result(None)

    def seal(self) -> None:
        """Nothing more is waited for here."""
        if self._timer is not None:
            self._timer.cancel()
        for wait in self._open:
            wait.future.cancel()

    def interrupt(self) -> None:
        """What is waited for now is not waited for any more."""
        for wait in self._open:
            wait.future.cancel()

    # Parking

    def rest(self) -> None:
        """The run may have nothing left to do but wait: look again in a moment, and park it if that is so."""
        self._driver.look()
        if self._timer is None and self._task is None:
            self._timer = self._loop.call_later(PARK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        driver = self._driver
        if driver.sealed or driver.over or not self._open:
            return
        mark = (driver.version, self._begun)
        if driver.busy or mark != self._mark:
            self._mark = mark
            self._quiet = 0
            self.rest()
            return
        self._quiet += 1
        if PARK_S == 0 and self._quiet < TURNS:
            self.rest()
            return
        self._task = self._loop.create_task(self._park(), name=f"park {driver.run.run_id}")
        self._task.add_done_callback(self._parked)

    def _parked(self, task: Task[None]) -> None:
        self._task = None
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, RunSealed):  # else it was stopped before it could be parked
            self._driver.host.report("store_away", self._driver.run.run_id, error=str(error))
        if not self._driver.sealed and not self._driver.over and self._open:
            self.rest()

    async def _park(self) -> None:
        """Leave the process, unless something has come: the event holds only at the version the run is known at."""
        driver = self._driver
        # No effect begins and nothing is recorded until this is decided.
        driver.parking = self._loop.create_future()
        try:
            await driver.catch_up()
            # What has come is not delivered yet, or has ended one task and not reached the one that waits for it: they
            # are to run first. So a park that was refused is not tried again at once either.
            if (driver.version, self._begun) != self._mark or driver.busy or driver.sealed or self.come():
                return
            waits = tuple(dict.fromkeys(one for wait in self._open for one in wait.shown(driver.retractions)))
            if not waits:
                return
            consumed = driver.newly_consumed()
            event = new(StateChanged(state="suspended", waits=waits, consumed=consumed), self._id(driver.version))
            run, at_ms = driver.run, driver.host.wall_ms()
            after = fold(run, (event,), at_ms)
            outcome = await driver.host.store.submit(
                Append(
                    run.run_id,
                    (event,),
                    at_ms,
                    run.run_key,
                    driver.owner,
                    driver.epoch,
                    driver.version,
                    after,
                    exact=True,
                    alone=not consumed,
                )
            )
            if isinstance(outcome, VersionConflict):
                await driver.catch_up()
                return
            if isinstance(outcome, Appended):
                driver.run = after
            else:
                driver.lost = True
            driver.seal()
        except StoreError as error:
            driver.host.report("store_away", driver.run.run_id, error=str(error))
            await asyncio.sleep(0.5)
        finally:
            driver.parking.set_result(None)
            driver.parking = None

    def come(self) -> bool:
        """Whether something that is waited for has come, and its task has not run yet."""
        now = self._driver.host.wall_ms()
        return any(
            wait.future.done()
            or self._driver.is_recorded(wait.step)
            or (wait.due_ms is not None and wait.due_ms <= now)
            for wait in self._open
        )

    def _id(self, version: int) -> bytes:
        run = self._driver.run
        return StepIds(run.workflow, run.key, run.round_ordinal)(suspended_step(version))
