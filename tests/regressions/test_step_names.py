"""Names of steps that the engine once used itself."""

from __future__ import annotations

import keiro
from tests.conftest import MakeEngine


async def start(n: int) -> int:
    return n


@keiro.workflow
async def starts_twice(run: keiro.WorkflowRun, n: int = 0) -> list[int]:
    found = [await run.step(start, n)]
    if n == 0:
        run.continue_as_new(1)
    return found


async def test_a_step_named_start_is_recorded_in_a_later_round(make_engine: MakeEngine) -> None:
    """Its record had the id of the event that began the round, and was taken for recorded already."""
    async with make_engine(starts_twice) as engine:
        assert await engine.execute(starts_twice, id="a") == [1]
