"""`keiro.blocking`: the engine for synchronous code."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import keiro


@keiro.step
def double(n: int) -> int:
    return n * 2


@keiro.workflow
async def doubling(run: keiro.WorkflowRun, n: int) -> int:
    if n < 0:
        raise ValueError("negative")
    return await run.step(double, n)


def engine(url: str) -> keiro.Engine:
    return keiro.Engine(url, workflows=[doubling], migrate=True)


def test_synchronous_code_starts_runs_and_reads_results(store_url: str) -> None:
    with keiro.blocking(engine(store_url)) as blocking:
        handle = blocking.start(doubling, 2, id="a")
        assert handle.result(timeout=30) == 4
        assert handle.status() == "completed"
        assert handle.run().run_id == "wf:doubling-a"
        assert [type(event).__name__ for event in handle.events()] == [
            "WorkflowStarted",
            "StepRecorded",
            "WorkflowCompleted",
        ]
        assert blocking.execute(doubling, 2, id="a") == 4
        assert blocking.handle(handle.run_id).result() == 4
        assert [run.key for run in blocking.runs()] == ["a"]
        assert [step.step for step in blocking.steps(handle.run_id)] == ["double"]
        assert blocking.rebuild("runs").differences == 0
        with pytest.raises(keiro.WorkflowFailed) as failed:
            blocking.execute(doubling, -1)
        assert isinstance(failed.value.__cause__, ValueError)


def test_many_threads_may_call_it_at_once(store_url: str) -> None:
    with keiro.blocking(engine(store_url)) as blocking, ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda n: blocking.execute(doubling, n, id=str(n)), range(20))) == [
            2 * n for n in range(20)
        ]


def test_the_engines_thread_ends_with_the_block(store_url: str) -> None:
    with pytest.raises(RuntimeError, match="of the block"), keiro.blocking(engine(store_url)) as blocking:
        assert blocking.execute(doubling, 1) == 2
        raise RuntimeError("the fault of the block")
    assert "keiro engine" not in [thread.name for thread in threading.enumerate()]


def test_a_call_after_the_block_is_refused(store_url: str) -> None:
    with keiro.blocking(engine(store_url)) as blocking:
        handle = blocking.start(doubling, 1, id="a")
    with pytest.raises(keiro.InvalidCall, match=r"inside the `with keiro\.blocking\(\.\.\.\)` block"):
        blocking.start(doubling, 2)
    with pytest.raises(keiro.InvalidCall, match="the engine is closed"):
        handle.result()


def test_an_engine_that_cannot_open_says_so_where_it_was_opened() -> None:
    with pytest.raises(keiro.StoreUnavailable), keiro.blocking(engine("sqlite:////no/such/folder/keiro.db")):
        pass
    assert "keiro engine" not in [thread.name for thread in threading.enumerate()]


def test_a_call_from_the_engines_own_loop_is_refused_instead_of_waiting_for_ever(store_url: str) -> None:
    with keiro.blocking(engine(store_url)) as blocking:

        async def inside() -> None:
            blocking.execute(doubling, 1)

        with pytest.raises(keiro.InvalidCall, match="own event loop"):
            blocking.wait(inside())


@keiro.workflow
async def asks(run: keiro.WorkflowRun, n: int) -> int:
    child = await run.spawn(doubles, n, id=f"{run.key}-child")
    return await run.deferred("more", int).result() + await child.result()


@keiro.workflow
async def doubles(run: keiro.WorkflowRun, n: int) -> int:
    return 2 * n


def test_waits_and_children_from_synchronous_code(tmp_path: Path) -> None:
    engine = keiro.Engine(f"sqlite:///{tmp_path}/keiro.db", workflows=[asks, doubles])
    with keiro.blocking(engine) as blocking:
        handles = blocking.start_many(asks, range(3), ids=["a", "b", "c"])
        assert [blocking.complete(handle.run_id, "more", 10) for handle in handles] == [True] * 3
        assert [handle.result() for handle in handles] == [10, 12, 14]
        assert [child.run_id for child in blocking.children.of("wf:asks-b")] == ["wf:doubles-b-child"]
        assert [child.status for child in handles[1].children()] == ["completed"]
        assert blocking.cancel("wf:asks-a") is False and handles[0].cancel() is False


def test_schedules_from_synchronous_code(store_url: str) -> None:
    with keiro.blocking(engine(store_url)) as blocking:
        assert blocking.schedules.put("a", doubling, 4, cron="@yearly")
        assert not blocking.schedules.put("a", doubling, 4, cron="@yearly")
        assert blocking.schedules.trigger("a", id="now").result(timeout=30) == 8
        assert blocking.schedules.pause("a")
        assert [(row.name, row.paused) for row in blocking.schedules.list()] == [("a", True)]
        assert blocking.schedules.resume("a")
        assert blocking.schedules.delete("a")
        assert blocking.schedules.list() == []
