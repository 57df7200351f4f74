"""A run that is asked to end: when its body is interrupted, and what it may do from then on.

Everything recorded before the interruption is delivered, here and by every replay; what is not recorded is held back
until the body has nothing else left to do, and then `CancelledError` is raised where it awaits. So a replay interrupts
the body where it was interrupted before, and only steps marked as cleanup follow.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from typing import TYPE_CHECKING, Final, NoReturn

from keiro.errors import CleanupOnly

if TYPE_CHECKING:
    from keiro.driver import Driver

TURNS: Final = 25
"""So many turns of the event loop the body has to be quiet: what is delivered to one task of it takes some of them
until the task that waits for that one goes on."""
BUSY_S: Final = 0.01
"""How often to look while something is recorded or a cleanup step runs."""
BEHIND_S: Final = 0.04
"""How often to look while a replay has not asked for all that was recorded: the body may await something of its own."""


class Asked:
    """The request, and how far it has come with one resident run."""

    __slots__ = ("_driver", "_held", "_loop", "_mark", "_quiet", "cancels", "interrupted", "reason", "version")

    def __init__(self, driver: Driver, version: int, reason: str | None) -> None:
        self._driver = driver
        self._loop = asyncio.get_running_loop()
        self._held: set[Future[None]] = set()
        self._mark: object = None
        self._quiet = 0
        self.version = version
        self.reason = reason
        self.interrupted = False
        self.cancels = 0  # how many of the requests to cancel the body's task are ours

    def watch(self) -> None:
        """Interrupt the body once it has been delivered all that is recorded."""
        self._loop.call_soon(self._look)

    def _look(self) -> None:
        driver = self._driver
        if self.interrupted or driver.over or driver.sealed or driver.draining is not None:
            return
        busy = driver.delivering
        mark = driver.gone_on()
        if busy or mark != self._mark:
            self._mark = mark
            self._quiet = 0
        self._quiet += 1
        if self._quiet > TURNS:
            self._interrupt()
        elif busy:
            self._loop.call_later(BUSY_S, self._look)
        elif driver.left_before(self.version):
            self._loop.call_later(BEHIND_S, self._look)
        else:
            self._loop.call_soon(self._look)

    def _interrupt(self) -> None:
        assert self._driver.task is not None
        self._driver.task.cancel()
        self.cancels = 1
        self.interrupt()

    def interrupt(self) -> None:
        """The body is interrupted now; with it those of its tasks that nobody awaits, as far as they wait."""
        self.interrupted = True
        self.release()
        self._driver.waits.interrupt()

    def release(self) -> None:
        """Let go of what is held back: it is cancelled."""
        for future in self._held:
            future.cancel()

    async def refuse(self, what: str) -> NoReturn:
        """Hold back what is not recorded until the body is interrupted. From then on it is an error to ask for it."""
        if not self.interrupted:
            future = self._loop.create_future()
            self._held.add(future)
            try:
                await future
            finally:
                self._held.discard(future)
        # A body that swallows the error and asks again must not stop the event loop, or nothing would end it.
        await asyncio.sleep(0)
        self.fail(what)

    def fail(self, what: str) -> NoReturn:
        """Say that nothing but cleanup steps is taken."""
        raise CleanupOnly(
            f"{self._driver.run.run_id} is asked to end, so {what} is not done any more: after CancelledError a body "
            "may only call steps that are marked with @keiro.step(cleanup=True)"
        )
