"""Threads for plain functions: few, reused, and daemons.

A thread cannot be stopped. One that hangs in a step must not keep the process alive when everything else has ended, and
neither `asyncio.to_thread` nor anyio's worker threads are left behind at exit.
"""

from __future__ import annotations

import asyncio
import os
import threading
from asyncio import Future
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any, Final

MOST: Final = 64
"""How many plain functions run at once; more wait."""

Work = Callable[[], None]


class Threads:
    """Daemon threads that run one function after the other."""

    def __init__(self, name: str) -> None:
        self._name = f"keiro {name}"
        self._work: SimpleQueue[Work] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._threads = 0

    def submit(self, work: Work) -> None:
        """Run `work` in a thread as soon as one is free; it must not raise."""
        with self._lock:
            if self._idle:
                self._idle -= 1
                grow = False
            else:
                grow = self._threads < MOST
                self._threads += grow
        self._work.put(work)
        if grow:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._work.get()()
            with self._lock:
                # A thread is promised to what waits before it calls itself idle.
                if self._work.empty():
                    self._idle += 1


STEPS: Final = "step"
CONNECTIONS: Final = "connection"
"""What is done on connections of transactions, locks that are waited for included."""
ENDS: Final = "commit"
"""Commits and rollbacks: apart, so that they never wait for a thread behind those who wait for the lock they free."""

_threads: dict[str, Threads] = {}


def _begin_again() -> None:
    for name in (STEPS, CONNECTIONS, ENDS):
        _threads[name] = Threads(name)


_begin_again()


# A forked child has none of its parent's threads: work would wait for ever for one that is said to be idle.
os.register_at_fork(after_in_child=_begin_again)


async def in_thread(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    begins: Callable[[], object] | None = None,
    pool: str = STEPS,
) -> Any:
    """Call a plain function in a thread, in a copy of this task's context. `begins` is called here when it begins.

    When the await is cancelled the function goes on, and its result is thrown away; if it has not begun, it never does.
    """
    loop = asyncio.get_running_loop()
    future: Future[Any] = loop.create_future()
    context = copy_context()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        elif isinstance(error, StopIteration):
            # As in a coroutine: a future cannot carry it.
            future.set_exception(RuntimeError(f"{fn!r} raised StopIteration"))
        else:
            future.set_exception(error)

    def work() -> None:
        if future.cancelled():
            # Meanwhile the step may have failed, or its run be another worker's: an effect that began only now would
            # be nobody's.
            return
        result, error = None, None
        if begins is not None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(lambda: future.done() or begins())
        try:
            result = context.run(fn, *args, **kwargs)
        except BaseException as raised:
            error = raised
        # The loop may have ended meanwhile: then nobody waits.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, result, error)

    _threads[pool].submit(work)
    return await future
