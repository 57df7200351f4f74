"""Steps replaced by name: the body, its journal and the reading of results stay what they are."""

from __future__ import annotations

from dataclasses import dataclass
from unittest.mock import AsyncMock, Mock

import pytest

import keiro
from keiro.testing import replace_steps
from keiro.testing.plugin import EngineFactory


@dataclass
class Receipt:
    order: str
    cents: int


@keiro.step(retry=keiro.Retry(attempts=3, initial=0.001))
async def charge(order: str, cents: int) -> Receipt:
    raise AssertionError("no test shall charge anybody")


def ship(order: str) -> str:
    raise AssertionError("nor send parcels")


@keiro.workflow
async def fulfil(run: keiro.WorkflowRun, order: str) -> list[str]:
    receipt = await run.step(charge, order, 100)
    again = await run.scope("gift").step(ship, order)
    return [type(receipt).__name__, receipt.order, await run.step(ship, order), again]


async def test_a_fake_runs_in_the_place_of_its_step(keiro_engine: EngineFactory) -> None:
    engine = await keiro_engine(fulfil)
    charged = AsyncMock(return_value={"order": "o-1", "cents": 5})
    replace_steps(engine, {"charge": charged, "ship": lambda order: f"parcel of {order}"})

    handle = await engine.start(fulfil, "o-1")

    # then its result is read by the annotation of the step it stands for
    assert await handle.result() == ["Receipt", "o-1", "parcel of o-1", "parcel of o-1"]
    charged.assert_awaited_once_with("o-1", 100)
    assert [row.step for row in await engine.steps(handle.run_id)] == ["charge", "gift/ship", "ship"]


async def test_a_call_has_its_own_fake_and_a_later_replacement_adds(keiro_engine: EngineFactory) -> None:
    engine = await keiro_engine(fulfil)
    replace_steps(engine, {"charge": Mock(return_value=Receipt("x", 1)), "ship": Mock(return_value="plain")})
    replace_steps(engine, {"gift/ship": Mock(return_value="wrapped")})
    assert await engine.execute(fulfil, "o-1") == ["Receipt", "x", "plain", "wrapped"]


async def test_a_fake_that_fails_is_tried_again_as_its_step_would_be(keiro_engine: EngineFactory) -> None:
    engine = await keiro_engine(fulfil)
    flaky = Mock(side_effect=[ConnectionError(), ConnectionError(), Receipt("x", 1)])
    replace_steps(engine, {"charge": flaky, "ship": lambda order: order})
    assert (await engine.execute(fulfil, "o-1"))[1] == "x"
    assert flaky.call_count == 3


async def test_what_is_no_function_or_no_name_is_refused(keiro_engine: EngineFactory) -> None:
    engine = await keiro_engine(fulfil)
    with pytest.raises(keiro.InvalidCall, match="'charge' must be replaced by a function"):
        replace_steps(engine, {"charge": 7})  # type: ignore[dict-item]
    with pytest.raises(keiro.InvalidName):
        replace_steps(engine, {"sleep:sleep": lambda: None})
