"""Answers that are lost on the way back: what was committed is found again, and no effect happens twice."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any

import pytest

import keiro
from keiro import driver as drivers
from keiro.decisions import Append, Start
from keiro.errors import StoreError, StoreUnavailable
from keiro.events import StepRecorded
from keiro.stores.postgres import FEW
from keiro.stores.pq import ConnectionLost
from tests.conformance.test_steps import calls, note, step_names, topics
from tests.conftest import MakeEngine


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls.clear()
    monkeypatch.setattr(drivers, "STORE_RETRY_S", (0.0, 0.001))


MANY = FEW + 2
"""Parallel steps, more than Postgres gets one by one."""


class Seer(keiro.WorkflowRun, name="counted"):
    """Its command is several events, so that a run's append is too."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    @keiro.event("Seen")
    def see(self, n: int) -> None:
        self.seen.append(n)

    def see_two(self, n: int) -> None:
        self.see(n)
        self.see(n + 1)

    async def execute(self, n: int) -> list[Any]:
        await self.step(note, "first")
        await self.apply(Seer.see_two, n)
        held = list(self.seen)
        many = await asyncio.gather(*(self.step(note, n, key=f"n{n}") for n in range(MANY)))
        return [held, many, self.seen]


@keiro.workflow(retry=keiro.Retry(2, initial=0.0, jitter=0))
async def fails_first(run: keiro.WorkflowRun) -> str:
    if run.info.attempt == 1:
        raise ValueError("the first attempt")
    return str(await run.step(note, "again"))


RESULTS = {"wf:counted-a": [[1, 2], list(range(MANY)), [1, 2]], "wf:fails_first-a": "again"}
EFFECTS: dict[Any, int] = dict.fromkeys(["first", "again", *range(MANY)], 1)


async def start_both(engine: keiro.Engine) -> list[keiro.Handle]:
    """Start until it is acknowledged, as a caller does: the same id again is safe whatever became of the first."""
    handles = []
    for workflow, args in ((Seer, (1,)), (fails_first, ())):
        while True:
            try:
                handles.append(await engine.start(workflow, *args, id="a"))
                break
            except StoreError:
                await asyncio.sleep(0)
    return handles


async def check(engine: keiro.Engine, handles: list[keiro.Handle]) -> None:
    for handle in handles:
        assert await handle.result() == RESULTS[handle.run_id]
        steps = await step_names(handle)
        expected = {"wf:counted-a": MANY + 2, "wf:fails_first-a": 1}
        assert len(steps) == len(set(steps)) == expected[handle.run_id]
        versions = [event.originator_version async for event in handle.events()]
        assert versions == list(range(1, len(versions) + 1))
        found = await engine.store.head(handle.run_id)
        assert found is not None and found[1].owner is None
    recorded = [event async for event in handles[0].events() if type(event).__name__ == "Seen"]
    assert len(recorded) == 2
    assert Counter(calls) == EFFECTS, "no process died, so no step may have run twice"
    assert await topics(handles[1]) == ["WorkflowStarted", "WorkflowRetried", "StepRecorded", "WorkflowCompleted"]


@pytest.mark.parametrize("when", ["before", "after"])
async def test_u19_an_error_of_the_store_is_no_attempt_and_repeats_no_effect(
    make_engine: MakeEngine, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    """U19, WF-71, F8, L2: every command of two runs fails once, before it was written or after it was committed."""
    async with make_engine(Seer, fails_first) as engine:
        submit = engine.store.submit
        failed: set[Any] = set()

        def failing(command: Any) -> Any:
            async def send() -> Any:
                what = command.run_id if isinstance(command, Start) else command.events[-1].event_id
                if what in failed:
                    return await submit(command)
                failed.add(what)
                if when == "after":
                    await submit(command)
                raise StoreUnavailable("the answer was lost")

            return asyncio.ensure_future(send())

        engine.store.submit = failing  # type: ignore[method-assign]
        handles = await start_both(engine)
        await check(engine, handles)
        assert len(failed) >= 9
    assert "could not be driven on" not in caplog.text


async def test_any_refusal_of_the_store_is_the_stores_and_no_failure_of_the_run(make_engine: MakeEngine) -> None:
    """U19: a statement that is cancelled or refused for reasons of the server's is sent again, whatever its code."""
    async with make_engine(Seer, fails_first) as engine:
        submit = engine.store.submit
        refused: list[Any] = []

        def refusing(command: Any) -> Any:
            if isinstance(command, Append) and len(refused) < 3:
                refused.append(command)
                future = asyncio.get_running_loop().create_future()
                future.set_exception(StoreError("refused a statement (57014): canceling statement due to user request"))
                return future
            return submit(command)

        engine.store.submit = refusing  # type: ignore[method-assign]
        handles = await start_both(engine)
        await check(engine, handles)
        assert len(refused) == 3


async def test_a_commit_whose_answer_is_lost_with_the_connection_is_found_again(
    postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Trap 1, WF-06: every single write of two runs commits, and then its connection is gone."""
    caplog.set_level(logging.ERROR)
    async with keiro.Engine(postgres_url, workflows=[Seer, fails_first], migrate=True) as engine:
        store: Any = engine.store
        lost: Counter[str] = Counter()
        connect = store._connect

        def losing(connection: Any) -> Any:
            pipeline = connection.pipeline

            async def send(statements: Any) -> Any:
                answers = await pipeline(statements)
                sql = statements[0][0]
                writes = sql == "COMMIT" or (sql.startswith("WITH") and not connection.in_transaction)
                if writes and lost[sql] < 4:
                    lost[sql] += 1
                    await connection.close()
                    raise ConnectionLost("the connection went away")
                return answers

            connection.pipeline = send
            return connection

        async def connecting(*, listen: bool = False) -> Any:
            connection = await connect(listen=listen)
            return connection if listen else losing(connection)

        losing(store._writer)
        store._connect = connecting
        handles = await start_both(engine)
        await check(engine, handles)
        assert len(lost) >= 5, "starts, steps, ends, batches, and what is decided under the lock"
    assert caplog.text == ""


async def test_a_run_whose_lost_start_is_answered_again_is_driven_by_the_engine_that_started_it(
    postgres_url: str,
) -> None:
    """The second try finds the event it sent: the run is this worker's own, in its first epoch, and begins at once."""
    async with keiro.Engine(postgres_url, workflows=[fails_first], migrate=True) as engine:
        store: Any = engine.store
        writer = store._writer
        pipeline = writer.pipeline

        async def send(statements: Any) -> Any:
            await pipeline(statements)
            await writer.close()
            raise ConnectionLost("the connection went away")

        writer.pipeline = send
        handle = await engine.start(fails_first, id="a")
        assert engine._resident or (await handle.run()).terminal or (await handle.run()).attempts
        assert await handle.result() == "again"


async def test_the_newest_event_of_a_command_is_what_a_lost_answer_finds(make_engine: MakeEngine) -> None:
    """A command of several events is there whole or not at all: found by its last one, the body sees all of it."""
    async with make_engine(Seer) as engine:
        submit = engine.store.submit
        lost: list[Any] = []

        def losing(command: Any) -> Any:
            async def send() -> Any:
                outcome = await submit(command)
                if isinstance(command, Append) and len(command.events) > 1 and not lost:
                    lost.append(command)
                    raise StoreUnavailable("the answer was lost")
                return outcome

            return asyncio.ensure_future(send())

        engine.store.submit = losing  # type: ignore[method-assign]
        assert await engine.execute(Seer, 5, id="a") == [[5, 6], list(range(MANY)), [5, 6]]
        assert lost


async def test_a_command_sent_again_is_told_the_same_version(make_engine: MakeEngine) -> None:
    """WF-06: the version of its last event, whether it was recorded now, before, or by a rival at the same time."""
    gate = asyncio.Event()

    class Open(keiro.WorkflowRun, name="held_open"):
        def __init__(self) -> None:
            self.seen: list[int] = []

        @keiro.event("Seen")
        def see(self, n: int) -> None:
            self.seen.append(n)

        def see_two(self, n: int) -> None:
            self.see(n)
            self.see(n + 1)

        async def execute(self) -> None:
            await self.step(gate.wait)

    async with make_engine(Open) as engine:
        handle = await engine.start(Open, id="a")
        told = await asyncio.gather(*(engine.command(handle.run_id, Open.see_two, 1, id="click") for _ in range(3)))
        told.append(await engine.command(handle.run_id, Open.see_two, 1, id="click"))
        assert told == [3] * 4
        assert await topics(handle) == ["WorkflowStarted", "Seen", "Seen"]
        gate.set()
        await engine.wait_ended(handle.run_id)


async def test_an_event_recorded_between_claim_and_history_is_delivered_once(make_engine: MakeEngine) -> None:
    """The history that is read may go further than the head that was claimed."""
    async with make_engine(worker=False) as client:
        handle = await client.start(Seer, 1, id="a")
    engine = make_engine(Seer)
    history = engine.store.history

    async def after_a_command(run_keys: Any, after: int = 0) -> Any:
        engine.store.history = history  # type: ignore[method-assign]
        await engine.command(handle.run_id, Seer.see, 40)
        return await history(run_keys, after)

    engine.store.history = after_a_command  # type: ignore[method-assign]
    async with engine:
        assert await engine.handle(handle.run_id).result() == [[40, 1, 2], list(range(MANY)), [40, 1, 2]]
        recorded = [event async for event in engine.handle(handle.run_id).events()]
        assert sum(isinstance(event, StepRecorded) for event in recorded) == MANY + 2


async def test_a_command_is_delivered_once_to_tasks_that_look_at_the_same_time(make_engine: MakeEngine) -> None:
    """Two parallel steps are recorded in one commit, behind a command: each then reads on in the journal."""
    entered, go = asyncio.Event(), asyncio.Event()

    async def hold(n: int) -> int:
        if n == 2:
            entered.set()
        await go.wait()
        return n

    class Watcher(keiro.WorkflowRun, name="watcher"):
        def __init__(self) -> None:
            self.seen: list[int] = []

        @keiro.event("Seen")
        def see(self, n: int) -> None:
            self.seen.append(n)

        async def execute(self) -> list[int]:
            await asyncio.gather(*(self.step(hold, n, key=f"s{n}") for n in range(3)))
            return self.seen

    async with make_engine(Watcher) as engine:
        handle = await engine.start(Watcher, id="a")
        await entered.wait()
        await engine.command(handle.run_id, Watcher.see, 7)
        go.set()
        assert await handle.result() == [7]
