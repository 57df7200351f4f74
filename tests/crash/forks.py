"""Runs an asynchronous program in a forked child, so that it can be killed for real and cheaply."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import traceback
from collections.abc import Awaitable, Callable

Program = Callable[[], Awaitable[None]]

LIMIT_S = 120
"""How long a child may take; a test run that hangs is ended after three minutes."""


def start(program: Program) -> int:
    """Fork a child that runs the program and exits with 0, or with 1 and a traceback; its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        asyncio.run(_awaited(program))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Not sys.exit: the test run's own cleanup must not happen in the child.
        os._exit(code)


async def _awaited(program: Program) -> None:
    await program()


def wait(pid: int) -> int:
    """The exit code of a child; negative is the signal that killed it.

    One that hangs is aborted, so that it says where: pytest has switched faulthandler on.
    """
    deadline = time.monotonic() + LIMIT_S
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGABRT)
        time.sleep(0.002)


def run(program: Program) -> int:
    """Run the program in a child to its end."""
    return wait(start(program))
