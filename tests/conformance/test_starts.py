"""Starts: many at once, and later."""

from __future__ import annotations

import pytest

import keiro
from tests.conformance.test_steps import calls, note
from tests.conftest import MakeEngine


@pytest.fixture(autouse=True)
def _fresh() -> None:
    calls.clear()


@keiro.workflow
async def noted(run: keiro.WorkflowRun, n: int) -> str:
    return await run.step(note, f"n{n}")


async def test_many_runs_are_started_at_once_and_found_again(make_engine: MakeEngine) -> None:
    """The same bulk sent twice starts nothing twice, and what is new in it is started."""
    ids = [f"bulk-{n}" for n in range(300)]
    async with make_engine(noted) as engine:
        first = await engine.start_many(noted, range(200), ids=ids[:200])
        again = await engine.start_many(noted, [(n,) for n in range(300)], ids=ids)
        assert [handle.run_id for handle in again[:200]] == [handle.run_id for handle in first]
        assert [await handle.result() for handle in again] == [f"n{n}" for n in range(300)]
        assert sorted(calls) == sorted(f"n{n}" for n in range(300))
        with pytest.raises(keiro.RunConflict, match=r"wf:noted-bulk-3 exists and was started with another input"):
            await engine.start_many(noted, [7, 8], ids=["new", "bulk-3"])
        assert await engine.handle("wf:noted-new").result() == "n7"


async def test_a_bulk_with_one_bad_input_starts_nothing(make_engine: MakeEngine) -> None:
    async with make_engine(noted, worker=False) as engine:
        for inputs, ids in (([1, float("nan")], None), ([1, 2], ["a", "b#"]), ([1, 2], ["a"]), ("12", None)):
            with pytest.raises((keiro.PayloadRejected, keiro.InvalidName, keiro.InvalidCall)):
                await engine.start_many(noted, inputs, ids=ids)
        assert await engine.runs() == []


async def test_a_delayed_start_is_durable_at_once_and_driven_at_its_time(make_engine: MakeEngine) -> None:
    """Start delay: also by another process than the one that started it; not before, and without polling for it."""
    async with make_engine(worker=False) as client:
        now = client.store.now_ms()
        handle = await client.start(noted, 1, id="later", delay=0.3)
        run = await handle.run()
        assert run.status == "pending" and run.next_attempt_at_ms is not None
        assert 300 <= run.next_attempt_at_ms - now <= 60_000
    async with make_engine(noted) as engine:
        assert await engine.handle(handle.run_id).result() == "n1"
        ended = await engine.handle(handle.run_id).run()
        assert ended.started_at_ms is not None and ended.started_at_ms >= run.next_attempt_at_ms
        with pytest.raises(keiro.InvalidCall, match="delay"):
            await engine.start(noted, 1, delay=float("nan"))
