"""A run that is driven and what others want of it, at the very moment: what its driver sends is held until they have.

`test_races.py` forces every pair at the journal. Here the drivers and the callers are real, and what they are told is
compared with what has become of the run.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

import keiro
from keiro.decisions import Append, Command, Outcome, Rotate
from keiro.events import TERMINAL
from tests.conformance.interleaved import records
from tests.conformance.parking import is_park, is_timeout
from tests.conftest import MakeEngine

LIMIT_S = 30
RUN = "wf:raced-a"


@pytest.fixture(autouse=True)
def _parks(parks_at_once: None) -> None:
    """What waits leaves the process as soon as it may."""


@keiro.workflow
async def raced(run: keiro.WorkflowRun, how: str, n: int) -> str:
    go = run.deferred("go", str)
    if n == 0:
        if how == "complete":
            return "done"
        if how == "fail":
            raise RuntimeError("raced")
        if how == "rotate":
            run.continue_as_new(how, 1)
        if how == "timeout":
            try:
                return str(await go.result(timeout=0.001))
            except TimeoutError:
                return "late"
    return str(await go.result())


@keiro.workflow
async def family(run: keiro.WorkflowRun, how: str) -> str:
    try:
        return str(await run.call(raced, how, 0, id="a"))
    except (keiro.ChildFailed, keiro.ChildCancelled) as error:
        return type(error).__name__


def is_rotation(command: Command) -> bool:
    return isinstance(command, Rotate)


INSIDE: dict[str, Callable[[Command], bool]] = {
    "complete": records(RUN, "WorkflowCompleted"),
    "fail": records(RUN, "WorkflowFailed"),
    "rotate": is_rotation,
    "timeout": is_timeout,
    "park": lambda command: is_park(command) and isinstance(command, Append) and command.run_id == RUN,
}


async def cancels(engine: keiro.Engine) -> object:
    return await engine.cancel(RUN)


async def completes(engine: keiro.Engine) -> object:
    return await told(engine.complete(RUN, "go", "go"))


async def fails(engine: keiro.Engine) -> object:
    return await told(engine.fail(RUN, "go", RuntimeError("told to")))


async def told(answer: Awaitable[bool]) -> object:
    try:
        return await answer
    except keiro.RunEnded:
        return "ended"


async def buries(engine: keiro.Engine) -> object:
    """What another worker does when a lease has ended."""
    found = await engine.store.head(RUN)
    assert found is not None
    owners = [row for row in await engine.store.workers() if row.worker_key == found[1].owner]
    return [await engine.store.bury(row) for row in owners] == [True]


async def resurrects(engine: keiro.Engine) -> object:
    return await engine.resurrect(RUN)


OUTSIDE = {"cancel": cancels, "signal": completes, "fail": fails, "lease_loss": buries, "resurrect": resurrects}


class Held:
    """The first command that `when` holds for waits until it is let go."""

    def __init__(self, engine: keiro.Engine, when: Callable[[Command], bool]) -> None:
        self._submit = engine.store.submit
        self._when = when
        self._command: Command | None = None
        self.reached = asyncio.Event()
        self.outcome: Future[Outcome] = asyncio.get_running_loop().create_future()
        engine.store.submit = self.submit  # type: ignore[method-assign]

    def submit(self, command: Command) -> Future[Outcome]:
        if self.reached.is_set() or not self._when(command):
            return self._submit(command)
        self._command = command
        self.reached.set()
        return self.outcome

    def let_go(self) -> None:
        """Send it now; who sent it is told when it is written."""
        assert self._command is not None
        self._submit(self._command).add_done_callback(self._done)

    def _done(self, sent: Future[Outcome]) -> None:
        if not self.outcome.done():
            self.outcome.set_result(sent.result())


@pytest.mark.parametrize("order", ["outside", "inside", "batch outside", "batch inside"])
@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("inside", INSIDE)
async def test_what_they_are_told_is_what_becomes_of_the_run(
    make_engine: MakeEngine, inside: str, outside: str, order: str
) -> None:
    """One of the two is first: by itself and from another engine, or in one batch."""
    async with make_engine(raced, family, grace=0) as engine, make_engine(raced, family, worker=False) as other:
        held = Held(engine, INSIDE[inside])
        await engine.start(family, inside, id="p")
        async with asyncio.timeout(LIMIT_S):
            await held.reached.wait()
        act = OUTSIDE[outside]
        if order == "outside":
            answer = await act(other)
            held.let_go()
        elif order == "inside":
            held.let_go()
            await asyncio.wait([held.outcome])
            answer = await act(other)
        else:
            acting = asyncio.ensure_future(act(engine))
            if order == "batch inside":
                held.let_go()
                await asyncio.sleep(0)
            else:
                await asyncio.sleep(0)
                held.let_go()
            answer = await acting
        async with AsyncExitStack() as stack:
            if outside == "lease_loss":  # the one that lost it learns of that when it renews: others are there at once
                await stack.enter_async_context(make_engine(raced, family))
            await ended_as_told(other, outside, answer)
        assert await other.reconcile() == []
        assert (await other.rebuild("runs")).differences == 0


async def ended_as_told(client: keiro.Engine, outside: str, answer: Any) -> None:
    """The run has ended as the caller was told, or it waits for what has not happened and ends when it does."""
    handle = client.handle(RUN)
    while not (run := await handle.run()).terminal and run.status != "suspended":
        await asyncio.sleep(0.002)
    recorded = ["awk:go" in names for names in await steps_of_rounds(client)]
    if run.status == "suspended":
        assert recorded[-1] is False, "it waits for what has happened"
        assert await client.complete(RUN, "go", "at last") is True
    try:
        end: Any = await handle.result(LIMIT_S)
    except (keiro.WorkflowFailed, keiro.WorkflowCancelled) as error:
        end = type(error).__name__
    match outside:
        case "cancel":
            assert answer is (end == "WorkflowCancelled")
        case "signal" | "fail":
            assert answer in (True, "ended") and any(recorded) is (answer is True)
        case "resurrect":
            # It failed, and after that it does so again: the body has not changed.
            assert answer in (True, False) and (end == "WorkflowFailed" or not answer)
    assert await client.handle("wf:family-p").result(LIMIT_S) == str(end).replace("Workflow", "Child")
    for names in await steps_of_rounds(client, topics=True):
        ends = [name for name in names if name in TERMINAL]
        assert len(ends) == 1 + (outside == "resurrect" and answer is True) and names[-1] in TERMINAL


async def steps_of_rounds(engine: keiro.Engine, *, topics: bool = False) -> list[list[str]]:
    """The steps (or the topics) that are recorded in each round."""
    found = []
    for name in (RUN, f"{RUN}#1"):
        if (run := await engine.store.run(name)) is not None:
            rows = (await engine.store.history([run.run_key]))[run.run_key]
            events = [engine.mapper.decode_row(row, name) for row in rows]
            found.append([one.TOPIC if topics else str(getattr(one, "step", "")) for one in events])
    return found
