"""Deferreds: completed from outside before, while and after a run parks, once, and never lost (WF-120 to WF-143)."""

from __future__ import annotations

import asyncio
import sqlite3
from typing import Any

import pytest

import keiro
from keiro import driver as drivers
from keiro import waits
from keiro.errors import StoreUnavailable
from keiro.events import StepRecorded
from keiro.projections.waits import DEFERREDS
from tests.conformance.parking import (
    before_parking,
    evicted,
    is_park,
    is_timeout,
    parked,
    reached,
    recorded,
    stopped_at_every_version,
)
from tests.conformance.test_steps import calls, note, step_names, topics
from tests.conftest import MakeEngine

RUN = "wf:asks-a"
entries: list[str] = []
gate: dict[str, asyncio.Event] = {}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    calls.clear()
    entries.clear()
    gate.clear()
    gate.update(entered=asyncio.Event(), go=asyncio.Event())
    monkeypatch.setattr(waits, "PARK_S", 0.01)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every wait parks the run at once, so that each is followed by a replay."""
    monkeypatch.setattr(waits, "PARK_S", 0)


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait parks the run, so that parking is no net under a wake that is missed."""
    monkeypatch.setattr(waits, "PARK_S", 3600.0)


async def held(value: str) -> str:
    gate["entered"].set()
    await gate["go"].wait()
    return value


@keiro.workflow
async def asks(run: keiro.WorkflowRun) -> list[Any]:
    entries.append(run.key)
    return [await run.step(note, "before"), await run.deferred("d").result(), await run.step(note, "after")]


@keiro.workflow
async def asks_with_patience(run: keiro.WorkflowRun, seconds: float) -> Any:
    try:
        return await run.deferred("d").result(timeout=seconds)
    except TimeoutError:
        return "too late"


async def test_wf_04_and_05_a_run_parks_on_an_open_deferred_and_goes_on_when_it_is_completed(
    make_engine: MakeEngine,
) -> None:
    """WF-04, WF-05, WF-61, WF-122: nothing of the deferred is journaled before it is completed."""
    async with make_engine(asks, strict=True) as engine:
        handle = await engine.start(asks, id="a")
        row = await evicted(engine, handle)
        assert (row.waiting_reason, row.waiting_token, row.wake_at_ms) == ("deferred", "awk:d", None)
        assert await step_names(handle) == ["note"]
        assert await engine.complete(RUN, "d", {"x": [1]})
        assert await handle.result() == ["before", {"x": [1]}, "after"]
        assert calls == ["before", "after"]
        assert await step_names(handle) == ["note", "awk:d", "note#2"]


async def test_wf_05_and_61_completed_while_no_engine_drives_it(make_engine: MakeEngine) -> None:
    """WF-05, WF-61, WF-33: parked it is hidden from every look, completed it is found by the next one."""
    async with make_engine(asks) as engine:
        handle = await engine.start(asks, id="a")
        await evicted(engine, handle)
        assert await engine.store.claim(1, ["asks"], 10) == []
        assert await engine.store.next_due_ms(["asks"]) is None
    async with make_engine(worker=False) as client:
        assert await client.complete(RUN, "d", 1)
        assert (await client.handle(RUN).run()).status == "pending"
    async with make_engine(asks) as engine:
        assert await engine.handle(RUN).result() == ["before", 1, "after"]
    assert calls == ["before", "after"]


async def test_wf_33_parked_runs_cost_nothing_and_only_the_completed_one_moves(make_engine: MakeEngine) -> None:
    """WF-33, F26: of many parked runs one is completed, and no other body is entered again."""
    async with make_engine(asks) as engine:
        handles = [await engine.start(asks, id=f"r{n}") for n in range(10)]
        for handle in handles:
            await evicted(engine, handle)
        entries.clear()
        await engine.complete(handles[3].run_id, "d", 3)
        assert await handles[3].result() == ["before", 3, "after"]
        assert entries == ["r3"]


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}, {"failed": "x"}, {"ok": None}, {"cancelled": None}])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_p1_every_value_is_delivered_as_it_is(make_engine: MakeEngine, value: Any, when: str) -> None:
    """P1, F17, WF-130: null is a value, and so is what looks like a failure or a cancellation."""
    async with make_engine(asks) as engine:
        handle = await engine.start(asks, id="a")
        if when == "after":
            await evicted(engine, handle)
        assert await engine.complete(RUN, "d", value)
        assert await handle.result() == ["before", value, "after"]


async def test_wf_123_the_first_completion_counts(make_engine: MakeEngine) -> None:
    """WF-123, WF-125, WF-06: a second one is told so and changes nothing, whatever it says; also after the end."""
    async with make_engine(asks) as engine:
        handle = await engine.start(asks, id="a")
        await evicted(engine, handle)
        assert await engine.complete(RUN, "d", "first")
        assert not await engine.complete(RUN, "d", "second")
        assert not await engine.fail(RUN, "d", ValueError("third"))
        assert not await engine.cancel_deferred(RUN, "d")
        assert await handle.result() == ["before", "first", "after"]
        before = await topics(handle)
        assert not await engine.complete(RUN, "d", "late")
        assert await topics(handle) == before


async def test_wf_131_and_f24_of_completions_and_cancellations_at_once_exactly_one_wins(
    make_engine: MakeEngine,
) -> None:
    """WF-131, F24, U2: sent together by two engines; one is told that it did it, and the body sees that one."""
    async with make_engine(asks) as engine, make_engine(worker=False) as other:
        for n in range(15):
            handle = await engine.start(asks, id=f"r{n}")
            await parked(handle)
            won = await asyncio.gather(
                engine.complete(handle.run_id, "d", "mine"),
                other.complete(handle.run_id, "d", "theirs"),
                other.cancel_deferred(handle.run_id, "d", "cancelled"),
                engine.fail(handle.run_id, "d", ValueError("failed")),
            )
            assert sorted(won) == [False, False, False, True]
            match won.index(True):
                case 0 | 1 as winner:
                    assert (await handle.result())[1] == ["mine", "theirs"][winner]
                case 2:
                    with pytest.raises(keiro.WorkflowFailed) as failed:
                        await handle.result()
                    assert isinstance(failed.value.__cause__, keiro.DeferredCancelled)
                case _:
                    with pytest.raises(keiro.WorkflowFailed) as failed:
                        await handle.result()
                    assert isinstance(failed.value.__cause__, ValueError)
            assert (await step_names(handle)).count("awk:d") == 1


async def test_wf_124_a_cancelled_deferred_raises_and_a_failed_one_raises_what_it_failed_with(
    make_engine: MakeEngine,
) -> None:
    """WF-124, WF-132, F29: a cancellation makes a parked owner pending too, and the body may go on after it."""

    @keiro.workflow
    async def catches(run: keiro.WorkflowRun) -> list[str]:
        said = []
        for name in ("cancelled", "failed"):
            try:
                await run.deferred(name, int).result()
            except (keiro.DeferredCancelled, ValueError) as error:
                said.append(f"{type(error).__name__}: {error}")
        return said

    async with make_engine(catches, strict=True) as engine:
        handle = await engine.start(catches, id="a")
        await evicted(engine, handle)
        assert await engine.cancel_deferred(handle.run_id, "cancelled", "not needed")
        while (await parked(handle)).waiting_token != "awk:failed":
            await asyncio.sleep(0.002)
        assert await engine.fail(handle.run_id, "failed", ValueError("bad card"))
        first, second = await handle.result()
        assert first.startswith("DeferredCancelled") and first.endswith("was cancelled: not needed")
        assert second == "ValueError: bad card"


@pytest.mark.parametrize("act", ["complete", "cancel"])
async def test_wf_40_and_42_before_the_run_has_asked(make_engine: MakeEngine, act: str) -> None:
    """WF-40, WF-42, WF-130, F23: while it still runs a step; it never parks, and is told when it asks."""

    @keiro.workflow
    async def busy_first(run: keiro.WorkflowRun) -> Any:
        await run.step(held, "x")
        try:
            return await run.deferred("d", int).result()
        except keiro.DeferredCancelled:
            return "cancelled"

    async with make_engine(busy_first) as engine:
        handle = await engine.start(busy_first, id="a")
        await gate["entered"].wait()
        assert await (engine.complete if act == "complete" else engine.cancel_deferred)(
            handle.run_id, "d", **{"value" if act == "complete" else "reason": None if act == "cancel" else 7}
        )
        gate["go"].set()
        assert await handle.result() == (7 if act == "complete" else "cancelled")
        assert "StateChanged" not in await topics(handle)


@pytest.mark.parametrize("who", ["self", "other"])
@pytest.mark.parametrize("act", ["complete", "cancel"])
async def test_wf_40_and_42_at_the_moment_of_parking(make_engine: MakeEngine, act: str, who: str) -> None:
    """WF-40, WF-42, F21, F27, F28, F29: after the run has looked for the last time and before its event is written.
    The event that would park it is refused, and it goes on without a replay."""
    async with make_engine(asks) as engine, make_engine(worker=False) as other:
        sender = engine if who == "self" else other

        async def tell() -> None:
            if act == "complete":
                assert await sender.complete(RUN, "d", 1)
            else:
                assert await sender.cancel_deferred(RUN, "d")

        before_parking(engine, tell)
        handle = await engine.start(asks, id="a")
        if act == "complete":
            assert await handle.result(timeout=20) == ["before", 1, "after"]
        else:
            with pytest.raises(keiro.WorkflowFailed):
                await handle.result(timeout=20)
        assert entries == ["a"]
        assert "StateChanged" not in await topics(handle)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("act", ["complete", "cancel"])
async def test_wf_41_and_43_right_behind_the_event_that_parks(make_engine: MakeEngine, act: str) -> None:
    """WF-41, WF-43, F27: queued behind it, before anybody knows that the run is parked: it is pending again at once."""
    async with make_engine(asks) as engine:
        submit = engine.store.submit
        told: list[Any] = []

        def both(command: Any) -> Any:
            sent = submit(command)
            if is_park(command) and not told:
                doing = engine.complete(RUN, "d", 1) if act == "complete" else engine.cancel_deferred(RUN, "d")
                told.append(asyncio.ensure_future(doing))
            return sent

        engine.store.submit = both  # type: ignore[method-assign]
        handle = await engine.start(asks, id="a")
        if act == "complete":
            assert await handle.result(timeout=20) == ["before", 1, "after"]
        else:
            with pytest.raises(keiro.WorkflowFailed):
                await handle.result(timeout=20)
        assert await told[0]
        assert calls[0] == "before" and calls.count("before") == 1


@pytest.mark.parametrize("park_s", [0, 0.002])
async def test_lost_wake_ups_at_any_moment(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, park_s: float
) -> None:
    """Field reports, "Lost wake-ups", F21, F27: many runs are completed at whatever moment of their parking, from two
    engines, each after another number of turns of the event loop; every one of them ends."""
    monkeypatch.setattr(waits, "PARK_S", park_s)

    @keiro.workflow
    async def asks_twice(run: keiro.WorkflowRun) -> int:
        return int(await run.deferred("one", int).result()) + int(await run.deferred("two", int).result())

    async with make_engine(asks_twice) as engine, make_engine(worker=False) as other:

        async def one(n: int) -> int:
            handle = await engine.start(asks_twice, id=str(n))
            for name in ("one", "two") if n % 3 else ("two", "one"):
                for _ in range(n * 7 % 60):
                    await asyncio.sleep(0)
                await (engine if n % 2 else other).complete(handle.run_id, name, n)
            return int(await handle.result(timeout=60))

        for batch in range(4):
            runs = range(batch * 30, batch * 30 + 30)
            assert await asyncio.gather(*map(one, runs)) == [2 * n for n in runs]


@pytest.mark.usefixtures("never")
async def test_a_completion_that_comes_while_another_is_being_read_is_not_missed(make_engine: MakeEngine) -> None:
    """F21: the run is busy with a step, so that it does not park, and two deferreds come one after the other."""

    @keiro.workflow
    async def busy_and_asking(run: keiro.WorkflowRun) -> list[Any]:
        return await asyncio.gather(
            run.step(held, "x"), run.deferred("one", int).result(), run.deferred("two", int).result(), follow(run)
        )

    async def follow(run: keiro.WorkflowRun) -> Any:
        return [await run.deferred("two", int).result(), await run.step(note, "followed")]

    async with make_engine(busy_and_asking) as engine:
        handle = await engine.start(busy_and_asking, id="a")
        await gate["entered"].wait()
        history, read, go_on = engine.store.history, asyncio.Event(), asyncio.Event()

        async def slow(*args: Any) -> Any:
            rows = await history(*args)
            if not read.is_set():
                read.set()
                await go_on.wait()
            return rows

        engine.store.history = slow  # type: ignore[method-assign]
        await engine.complete(handle.run_id, "one", 1)
        await read.wait()
        await engine.complete(handle.run_id, "two", 2)
        go_on.set()
        async with asyncio.timeout(20):
            await reached(handle, "note")
        gate["go"].set()
        assert await handle.result() == ["x", 1, 2, [2, "followed"]]


@pytest.mark.usefixtures("never")
async def test_f21_a_completion_that_came_while_nobody_asked_is_there_when_somebody_does(
    make_engine: MakeEngine,
) -> None:
    """F21: the step of another task goes on for long, and the run does not park meanwhile."""

    @keiro.workflow
    async def asks_later(run: keiro.WorkflowRun) -> Any:
        async def then_asks() -> Any:
            await run.step(inner)
            return [await run.deferred("d", int).result(), await run.step(note, "followed")]

        return await asyncio.gather(run.step(held, "x"), then_asks())

    entered, go = asyncio.Event(), asyncio.Event()

    async def inner() -> None:
        entered.set()
        await go.wait()

    async with make_engine(asks_later) as engine:
        handle = await engine.start(asks_later, id="a")
        await entered.wait()
        await gate["entered"].wait()
        await engine.complete(handle.run_id, "d", 1)
        go.set()
        async with asyncio.timeout(20):
            await reached(handle, "note")
        gate["go"].set()
        assert await handle.result() == ["x", [1, "followed"]]


@pytest.mark.usefixtures("never")
@pytest.mark.parametrize("who", ["self", "other"])
async def test_a_resident_run_hears_of_each_completion(make_engine: MakeEngine, who: str) -> None:
    """WF-161, F21: it is not parked, and is woken by the commit of its own engine, or by the news of another one."""
    async with make_engine(asks) as engine, make_engine(worker=False) as other:
        handle = await engine.start(asks, id="a")
        await reached(handle, "note")
        assert await (engine if who == "self" else other).complete(RUN, "d", 1)
        assert await handle.result(timeout=20) == ["before", 1, "after"]
        assert entries == ["a"]
        assert "StateChanged" not in await topics(handle)


async def test_wf_126_what_is_recorded_is_found_without_any_wake(make_engine: MakeEngine) -> None:
    """WF-126, F11: the wake-up is lost altogether; the run finds the record when it wants to park."""
    async with make_engine(asks) as engine:
        store: Any = engine.store
        listener = store.listener

        class Deaf:
            """A listener that is not told what others appended."""

            def committed(self, changed: Any, touched: Any = (), taken: Any = ()) -> None:
                listener.committed(changed, (), taken)

            def __getattr__(self, name: str) -> Any:
                return getattr(listener, name)

        store.listener = Deaf()
        before_parking(engine, lambda: engine.complete(RUN, "d", 1))
        handle = await engine.start(asks, id="a")
        assert await handle.result(timeout=20) == ["before", 1, "after"]


async def test_wf_120_and_121_a_deferred_is_nothing_until_its_token_or_its_end_is_recorded(
    make_engine: MakeEngine,
) -> None:
    """WF-120, WF-121: the token is one entry, the same for all who ask for it, and its end another one."""

    @keiro.workflow
    async def gives(run: keiro.WorkflowRun) -> Any:
        token = await run.deferred("d").token()
        assert token == await run.deferred("d").token()
        await run.step(note, token)
        return await run.deferred("d").result()

    async with make_engine(gives, strict=True) as engine:
        handle = await engine.start(gives, id="a")
        await evicted(engine, handle)
        assert await step_names(handle) == ["awkid:d", "note"]
        assert await engine.complete(token=calls[0], value="signed")
        assert not await engine.complete(token=calls[0], value="again")
        assert await handle.result() == "signed"
        assert await step_names(handle) == ["awkid:d", "note", "awk:d"]
        assert len(calls) == 1


async def test_wf_127_a_forged_token_is_refused_and_completes_nothing(make_engine: MakeEngine) -> None:
    """WF-127, F25: tokens are random, so what is derived from names is none; it is an error and not a silent False."""
    from keiro.identity import token_of

    @keiro.workflow
    async def gives(run: keiro.WorkflowRun) -> Any:
        await run.step(note, await run.deferred("d").token())
        return await run.deferred("d").result()

    async with make_engine(gives) as engine:
        tokens = []
        for key in ("a", "b"):
            await evicted(engine, await engine.start(gives, id=key))
            tokens.append(calls[-1])
        assert tokens[0] != tokens[1]
        handle = engine.handle("wf:gives-a")
        for forged in (token_of("wf:gives-a", "d", ""), token_of("wf:gives-a", "d", "x" * 24)):
            with pytest.raises(keiro.RunConflict):
                await engine.complete(token=forged, value=1)
        with pytest.raises(keiro.RunConflict):
            await engine.complete(token=token_of("wf:gives-a", "other", "x"), value=1)
        with pytest.raises(keiro.RunNotFound):
            await engine.complete(token=token_of("wf:gives-none", "d", "x"), value=1)
        for text in ("", "kdt_", "kdt_%%%", "nonsense", 7, tokens[0][:-3]):
            with pytest.raises(keiro.KeiroError):
                await engine.complete(token=text, value=1)  # type: ignore[arg-type]
        assert (await handle.run()).status == "suspended"
        assert await engine.complete(token=tokens[0], value=1)
        assert await handle.result() == 1


async def test_wf_129_a_token_holds_for_its_round_only(make_engine: MakeEngine) -> None:
    """WF-129: the next round gives out another one, and the old one is refused."""

    @keiro.workflow
    async def two_rounds(run: keiro.WorkflowRun, n: int) -> Any:
        await run.step(note, await run.deferred("d").token())
        if n:
            run.continue_as_new(n - 1)
        return await run.deferred("d").result()

    async with make_engine(two_rounds) as engine:
        handle = await engine.start(two_rounds, 1, id="a")
        await evicted(engine, handle)
        first, second = calls
        assert first != second
        with pytest.raises(keiro.RunConflict):
            await engine.complete(token=first, value="stale")
        assert await engine.complete(token=second, value="fresh")
        assert await handle.result() == "fresh"


async def test_a_token_is_given_out_though_the_store_is_away_for_a_moment(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F8: between the record of the token and its delivery; the body does not see the outage."""
    monkeypatch.setattr(drivers, "STORE_RETRY_S", (0.0, 0.001))

    @keiro.workflow
    async def gives(run: keiro.WorkflowRun) -> str:
        return await run.deferred("d").token()

    async with make_engine(gives) as engine:
        history, failures = engine.store.history, [StoreUnavailable("away"), StoreUnavailable("away")]

        async def away(*args: Any, **kwargs: Any) -> Any:
            if failures:
                raise failures.pop()
            return await history(*args, **kwargs)

        handle = await engine.start(gives, id="a")
        engine.store.history = away  # type: ignore[method-assign]
        assert (await handle.result()).startswith("kdt_")
        assert not failures


async def test_wf_141_and_142_nothing_reaches_a_run_that_has_ended(make_engine: MakeEngine) -> None:
    """WF-141, WF-142: cancelled or failed; who completes a deferred of it is told so and nothing is written.
    A parked run that is cancelled has ended at once."""

    @keiro.workflow
    async def fails(run: keiro.WorkflowRun) -> None:
        raise ValueError("no")

    async with make_engine(asks, fails) as engine:
        cancelled = await engine.start(asks, id="a")
        await evicted(engine, cancelled)
        assert await engine.cancel(RUN)
        failed = await engine.start(fails, id="a")
        with pytest.raises(keiro.WorkflowFailed):
            await failed.result()
        for handle in (cancelled, failed):
            before = await topics(handle)
            for call in (engine.complete(handle.run_id, "d", 1), engine.cancel_deferred(handle.run_id, "d")):
                with pytest.raises(keiro.RunEnded):
                    await call
            assert await topics(handle) == before
        with pytest.raises(keiro.WorkflowCancelled):
            await cancelled.result()
        with pytest.raises(keiro.RunNotFound):
            await engine.complete("wf:asks-none", "d", 1)


async def test_wf_140_a_run_that_failed_while_a_step_of_it_ran_takes_no_record_of_it(make_engine: MakeEngine) -> None:
    """WF-140: the step that was under way is not journaled, and what waits in another task ends."""

    @keiro.workflow
    async def fails_beside_a_step(run: keiro.WorkflowRun) -> None:
        tasks = [asyncio.create_task(run.step(held, "x")), asyncio.create_task(run.deferred("d").result())]
        await gate["entered"].wait()
        try:
            raise ValueError("no")
        finally:
            assert tasks

    async with make_engine(fails_beside_a_step) as engine:
        handle = await engine.start(fails_beside_a_step, id="a")
        with pytest.raises(keiro.WorkflowFailed):
            await handle.result()
        gate["go"].set()
        for _ in range(20):
            await asyncio.sleep(0)
        assert await step_names(handle) == []
        assert (await topics(handle))[-1] == "WorkflowFailed"


async def test_wf_143_a_resurrected_run_takes_completions_again(make_engine: MakeEngine) -> None:
    """WF-143: refused while it has failed, accepted and delivered afterwards."""
    broken = True

    @keiro.workflow
    async def fails_then_asks(run: keiro.WorkflowRun) -> Any:
        await run.step(note, 1)
        if broken:
            raise ValueError("no")
        return await run.deferred("d").result()

    async with make_engine(fails_then_asks) as engine:
        handle = await engine.start(fails_then_asks, id="a")
        with pytest.raises(keiro.WorkflowFailed):
            await handle.result()
        with pytest.raises(keiro.RunEnded):
            await engine.complete(handle.run_id, "d", 1)
        broken = False
        assert await engine.resurrect(handle.run_id)
        again = engine.handle(handle.run_id)
        await evicted(engine, again)
        assert await engine.complete(handle.run_id, "d", 2)
        assert await again.result() == 2
        assert calls == [1]


# Timeouts


@pytest.mark.parametrize("park_s", [0, 0.01])
async def test_u24_a_deferred_that_does_not_come_times_out_for_every_replay(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, park_s: float
) -> None:
    """U24: the timeout is a step; what comes later is there for who asks again, and changes nothing of before."""
    monkeypatch.setattr(waits, "PARK_S", park_s)

    @keiro.workflow
    async def asks_again(run: keiro.WorkflowRun) -> list[Any]:
        seen: list[Any] = []
        for timeout in (0.05, 0, None):
            try:
                seen.append(await run.deferred("d", int).result(timeout=timeout))
            except TimeoutError as error:
                seen.append("awk:d" in str(error))
        await run.sleep(0.05)
        return seen

    async with make_engine(asks_again, strict=True) as engine:
        handle = await engine.start(asks_again, id="a")
        await reached(handle, "timeout:awk:d#2")
        await parked(handle)
        await engine.complete(handle.run_id, "d", 7)
        assert await handle.result() == [True, True, 7]
        names = await step_names(handle)
        assert names == ["timeout:awk:d", "timeout:awk:d#2", "awk:d", "sleep:sleep"]


async def test_what_comes_just_before_the_timeout_is_recorded_wins(make_engine: MakeEngine) -> None:
    """U24, F24: the time is over and its record is under way when the completion is committed: it came first."""
    async with make_engine(asks_with_patience) as engine:
        submit = engine.store.submit
        held_once: list[Any] = []

        def held_back(command: Any) -> Any:
            if is_timeout(command) and not held_once:
                held_once.append(command)

                async def send() -> Any:
                    assert await engine.complete(handle.run_id, "d", "in time")
                    return await submit(command)

                return asyncio.ensure_future(send())
            return submit(command)

        engine.store.submit = held_back  # type: ignore[method-assign]
        handle = await engine.start(asks_with_patience, 0.03, id="a")
        assert await handle.result() == "in time"
        assert held_once
        assert await step_names(handle) == ["awk:d"]


async def test_what_was_not_read_yet_still_comes_before_the_timeout(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U24: a completion is in the journal and this process has not read it, because a step of the run was recorded
    behind it. The timeout must not be recorded as if nothing had come: a replay would return the value."""
    monkeypatch.setattr(waits, "PARK_S", 3600.0)

    @keiro.workflow
    async def both(run: keiro.WorkflowRun) -> Any:
        async def patient() -> Any:
            try:
                return await run.deferred("d").result(timeout=0.3)
            except TimeoutError:
                return "too late"

        return await asyncio.gather(patient(), run.step(held, "x"))

    async with make_engine(both) as engine, make_engine(worker=False) as other:
        engine.woken = lambda: None  # type: ignore[method-assign]
        engine.tick = lambda: None  # type: ignore[method-assign]
        handle = await engine.start(both, id="a")
        await gate["entered"].wait()
        while not [event async for event in handle.events() if type(event).__name__ == "StateChanged"]:
            await asyncio.sleep(0)
        assert await other.complete(handle.run_id, "d", "in time")
        gate["go"].set()
        result = await handle.result()
        names = await step_names(handle)
        assert result == ["in time", "x"], names
        assert names == ["awk:d", "held"]


@pytest.mark.parametrize("at", ["due", "early"])
async def test_a_timeout_that_is_due_while_no_process_runs_is_over_in_the_next_one(
    make_engine: MakeEngine, at: str
) -> None:
    """U24, WF-34: a parked run with a timeout is found when that is due; a completion that came before it wins."""
    async with make_engine(asks_with_patience) as engine:
        handle = await engine.start(asks_with_patience, 0.3, id="a")
        due = (await evicted(engine, handle)).wake_at_ms
    async with make_engine(worker=False) as client:
        if at == "early":
            assert await client.complete(handle.run_id, "d", "in time")
        while client.wall_ms() <= due:
            await asyncio.sleep(0.01)
    async with make_engine(asks_with_patience, strict=True) as engine:
        assert await engine.handle(handle.run_id).result() == ("in time" if at == "early" else "too late")


def consumed(store_url: str, engine: keiro.Engine) -> dict[tuple[str, str], int | None]:
    """When each completion was taken by the body, by run and name."""
    if store_url.startswith("memory"):
        rows = engine.store._db.rows[DEFERREDS].values()  # type: ignore[attr-defined]
        return {(row["execution_id"], row["deferred_name"]): row["consumed_at_ms"] for row in rows}
    columns = "execution_id, deferred_name, consumed_at_ms"
    if store_url.startswith("sqlite"):
        with sqlite3.connect(store_url.removeprefix("sqlite:///")) as connection:
            found = connection.execute(f"SELECT {columns} FROM {DEFERREDS}").fetchall()
    else:
        import psycopg

        with psycopg.connect(store_url) as server:
            found = server.execute(f"SELECT {columns} FROM keiro.{DEFERREDS}".encode()).fetchall()
    return {(run_id, name): at_ms for run_id, name, at_ms in found}


async def test_a_completion_shows_when_the_body_took_it(make_engine: MakeEngine, store_url: str) -> None:
    """Said with the next event that parks the run or ends its round, once; what was not taken is carried over."""

    @keiro.workflow
    async def takes(run: keiro.WorkflowRun, again: bool) -> int:
        one: int = await run.deferred("one", int).result()
        if again:
            await run.deferred("two", int).result()
            run.continue_as_new(False)
        return one

    async with make_engine(takes, strict=True) as engine:
        handle = await engine.start(takes, True, id="a")
        await engine.complete(handle.run_id, "one", 1)
        while (await parked(handle)).waiting_token != "awk:two":
            await asyncio.sleep(0.002)
        first = (handle.run_id, "one")
        at_ms = consumed(store_url, engine)[first]
        assert at_ms is not None
        await engine.complete(handle.run_id, "late", None)
        await engine.complete(handle.run_id, "two", 2)
        while not (await handle.run()).round_ordinal:
            await asyncio.sleep(0.002)
        rows = consumed(store_url, engine)
        assert rows[first] == at_ms, "the first time counts"
        assert rows[handle.run_id, "two"] is not None
        assert rows[handle.run_id, "late"] is None
        assert rows[handle.run_id + "#1", "late"] is None, "carried over"
        await engine.complete(handle.run_id, "one", 3)
        assert await handle.result() == 3
        assert consumed(store_url, engine)[handle.run_id + "#1", "one"] is not None


# Whoever drives it, wherever it is stopped


@pytest.mark.parametrize("park_s", [0, 0.02])
async def test_deferreds_survive_a_stop_at_every_version(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, park_s: float
) -> None:
    """WF-05, WF-61, WF-122: closed without grace after each event; the same result, and each effect once."""
    monkeypatch.setattr(waits, "PARK_S", park_s)

    @keiro.workflow
    async def tour(run: keiro.WorkflowRun) -> list[Any]:
        token = await run.deferred("signed").token()
        await run.step(note, token)
        both = await asyncio.gather(run.deferred("one", int).result(), run.scope("s").deferred("two").result())
        signed = await run.deferred("signed").result(timeout=3600)
        try:
            await run.deferred("never").result(timeout=0.02)
        except TimeoutError:
            signed += "!"
        return [both, signed, await run.step(note, "end")]

    async def others(engine: keiro.Engine, handle: keiro.Handle) -> None:
        await reached(handle, "note")
        await engine.complete(handle.run_id, "s/two", None)
        await engine.complete(handle.run_id, "one", 1)
        await engine.complete(token=calls[0], value="signed")

    result, stops = await stopped_at_every_version(
        lambda: make_engine(tour, strict=True), lambda engine: engine.start(tour, id="a"), others
    )
    assert result == [[1, None], "signed!", "end"]
    assert stops > 4
    assert len(set(calls)) == 2
    async with make_engine(tour) as engine:
        handle = engine.handle("wf:tour-a")
        for step in ("awk:one", "awk:s/two", "awk:signed", "awkid:signed", "timeout:awk:never"):
            await recorded(handle, step)


@pytest.mark.usefixtures("at_once")
async def test_a_run_that_parks_at_every_wait_says_the_same_as_one_that_never_does(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WF-59, WF-61: time, random numbers and results are those of a run that stays in memory."""

    @keiro.workflow
    async def numbers(run: keiro.WorkflowRun) -> list[Any]:
        said: list[Any] = []
        for n in range(3):
            before = run.random()
            value = await run.deferred(f"d{n}").result()
            said.append([before, value, run.random(), run.now().isoformat(), str(run.uuid4())])
        return said

    async with make_engine(numbers, strict=True) as engine:
        handle = await engine.start(numbers, id="a")
        for n in range(3):
            while (await parked(handle)).waiting_token != f"awk:d{n}":
                await asyncio.sleep(0.002)
            await engine.complete(handle.run_id, f"d{n}", n)
        result = await handle.result()
        times = [event.timestamp.isoformat() async for event in handle.events() if isinstance(event, StepRecorded)]
        assert [one[3] for one in result] == times
        assert len({number for one in result for number in (one[0], one[2], one[4])}) == 9
