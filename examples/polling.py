"""Asking a service again and again until it is ready, in rounds: a run that may go on for years with a short journal.

    python examples/polling.py

Each round asks a few times and hands over to the next one with `continue_as_new`; the handle of the start follows.
"""

import asyncio

import keiro

READY_AFTER = 7
ROUND = 3


@keiro.step
async def ask(times: int) -> str:
    """A service that says so when it has been asked often enough."""
    print(f"asking, time {times}")
    return "ready" if times >= READY_AFTER else "busy"


@keiro.workflow
async def wait_until_ready(run: keiro.WorkflowRun, asked: int) -> int:
    for times in range(asked + 1, asked + 1 + ROUND):
        if await run.step(ask, times) == "ready":
            return times
        await run.sleep(0.1)  # minutes or days, in earnest: a run that sleeps takes no memory
    run.continue_as_new(asked + ROUND)


async def main() -> None:
    async with keiro.Engine("sqlite:///polling.db", workflows=[wait_until_ready]) as engine:
        handle = await engine.start(wait_until_ready, 0, id="service-1")
        print("ready after", await handle.result())
        last = await handle.run()
        print(f"rounds: {last.round_ordinal + 1}, steps of the last: {len(await engine.steps(last.run_id))}")


asyncio.run(main())
