"""For tests of runs that wait: until a run is parked, what is known of its clocks, and a stop at every version."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import keiro
from keiro.decisions import Append, Fire, Outcome
from keiro.events import Event, StateChanged, StepRecorded, Wait


async def parked(handle: keiro.Handle) -> Any:
    """The row of the run, once it is parked."""
    while (run := await handle.run()).status != "suspended":
        assert not run.terminal, run
        await asyncio.sleep(0.002)
    return run


async def evicted(engine: keiro.Engine, handle: keiro.Handle) -> Any:
    """The row of the run, once it is parked and nothing of it is left in this process."""
    run = await parked(handle)
    while run.run_id in engine._resident:
        await asyncio.sleep(0)
    return run


async def reached(handle: keiro.Handle, *wanted: str) -> None:
    """Until steps with these names are recorded in the run."""
    while not set(wanted) <= {event.step async for event in handle.events() if isinstance(event, StepRecorded)}:
        await asyncio.sleep(0.002)


async def clocks(handle: keiro.Handle) -> list[Wait]:
    """The clocks that were set in the run, in order."""
    changed = [event async for event in handle.events() if isinstance(event, StateChanged)]
    return [wait for event in changed if event.state == "clock_scheduled" for wait in event.waits]


async def recorded(handle: keiro.Handle, step: str) -> StepRecorded:
    """The only record of a step."""
    found = [event async for event in handle.events() if isinstance(event, StepRecorded) and event.step == step]
    assert len(found) == 1, (step, found)
    return found[0]


def ms(event: Event) -> int:
    """When an event was recorded."""
    return round(event.timestamp.timestamp() * 1000)


def is_park(command: object) -> bool:
    """Whether this is the event that parks a run."""
    return (
        isinstance(command, Append)
        and isinstance(command.events[0].event, StateChanged)
        and command.events[0].event.state == "suspended"
    )


def is_timeout(command: object) -> bool:
    """Whether this records that the time of a wait is over: by whoever drives the run, or for a parked one."""
    event = command.events[0].event if isinstance(command, Append) else None
    return isinstance(command, Fire) or (isinstance(event, StepRecorded) and event.step.startswith("timeout:"))


def before_parking(engine: keiro.Engine, act: Callable[[], Awaitable[object]]) -> None:
    """Let `act` be done before the first event of this engine that parks a run, and after everything it looked at."""
    submit = engine.store.submit
    done = False

    async def send(command: Any) -> Outcome:
        await act()
        return await submit(command)

    def held(command: Any) -> Any:
        nonlocal done
        if is_park(command) and not done:
            done = True
            return asyncio.ensure_future(send(command))
        return submit(command)

    engine.store.submit = held  # type: ignore[method-assign]


async def stopped_at_every_version(
    make: Callable[[], keiro.Engine],
    start: Callable[[keiro.Engine], Awaitable[keiro.Handle]],
    help_on: Callable[[keiro.Engine, keiro.Handle], Awaitable[object]],
) -> tuple[Any, int]:
    """The result of a run whose engine is closed without grace at each version of its journal, and how often it was.

    `help_on` is called after each opening and does what others do for the run; it may be called again.
    """
    stops = 0
    while True:
        async with make() as engine:
            handle = await start(engine)
            helping = asyncio.ensure_future(help_on(engine, handle))
            while True:
                found = await engine.store.head(handle.run_id)
                assert found is not None
                if found[0].terminal:
                    await helping
                    return await handle.result(), stops
                if found[1].version > stops + 1:
                    break
                await asyncio.sleep(0)
            stops = found[1].version - 1
            helping.cancel()
            await asyncio.wait([helping])
            await engine.close(grace=0)
