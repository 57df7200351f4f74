"""Plain functions in threads: results, exceptions, contexts, and an end of the process that waits for none."""

from __future__ import annotations

import asyncio
import contextvars
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from keiro import threads
from keiro.threads import MOST, in_thread

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")


async def test_results_and_exceptions_come_back_and_contexts_are_copies() -> None:
    def reads() -> str:
        variable.set(seen := variable.get() + "!")
        return seen

    def fails() -> None:
        raise ValueError("no")

    def stops() -> None:
        raise StopIteration

    variable.set("mine")
    assert await in_thread(reads, (), {}) == "mine!"
    assert variable.get() == "mine"
    with pytest.raises(ValueError, match="no"):
        await in_thread(fails, (), {})
    with pytest.raises(RuntimeError, match="StopIteration"):
        await in_thread(stops, (), {})


async def test_threads_are_reused_and_never_more_than_the_limit() -> None:
    names: set[int] = set()
    inside, most, lock = 0, 0, threading.Lock()
    full = threading.Event()

    def meets() -> None:
        nonlocal inside, most
        with lock:
            names.add(threading.get_ident())
            inside += 1
            most = max(most, inside)
            if inside == MOST:
                full.set()
        full.wait(30)
        with lock:
            inside -= 1

    await asyncio.gather(*(in_thread(meets, (), {}) for _ in range(3 * MOST)))
    assert most == MOST
    assert len(names) == MOST


async def test_a_cancelled_await_does_not_wait_for_its_function() -> None:
    began, go, ended = threading.Event(), threading.Event(), threading.Event()

    def works() -> None:
        began.set()
        go.wait(30)
        ended.set()

    task = asyncio.create_task(in_thread(works, (), {}))
    assert await asyncio.to_thread(began.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not ended.is_set()
    go.set()
    assert await asyncio.to_thread(ended.wait, 30)


async def test_a_function_whose_await_was_cancelled_before_a_thread_was_free_never_begins() -> None:
    """Its step has failed meanwhile, or its run is driven elsewhere: nobody would know of the effect."""
    go, began = threading.Event(), threading.Event()
    busy = [asyncio.create_task(in_thread(go.wait, (30,), {})) for _ in range(MOST)]
    await asyncio.sleep(0)
    waiting = asyncio.create_task(in_thread(began.set, (), {}))
    behind = asyncio.create_task(in_thread(int, (), {}))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    go.set()
    await asyncio.gather(*busy, behind)
    await in_thread(int, (), {})
    assert not began.is_set()


PROGRAM = """
import asyncio, threading, keiro

entered = threading.Event()

def hangs():
    entered.set()
    threading.Event().wait()

@keiro.workflow
async def stuck(run):
    await run.step(hangs)

async def main():
    async with keiro.Engine("sqlite:///stuck.db", workflows=[stuck], grace=0) as engine:
        await engine.start(stuck, id="a")
        await asyncio.to_thread(entered.wait)

asyncio.run(main())
print("over")
"""


def test_a_step_that_hangs_in_its_thread_does_not_keep_the_process_alive(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr


async def test_a_forked_child_has_threads_of_its_own() -> None:
    """Those of the parent, idle or not, do not exist there."""
    await in_thread(list, (), {})
    while not threads._threads[threads.STEPS]._idle:
        await asyncio.sleep(0)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            asyncio._set_running_loop(None)
            os.write(write, asyncio.run(in_thread(lambda: b"done", (), {})))
        finally:
            os._exit(0)
    os.close(write)
    assert await asyncio.wait_for(asyncio.to_thread(os.read, read, 16), 30) == b"done"
    os.close(read)
    os.waitpid(pid, 0)
