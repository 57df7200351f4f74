"""Cancellation of workflows with a cleanup: asked to end, interrupted at one place, and cancelled once the body ended.

WF-25, CH-44 and CH-47 where the end is not at once.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import keiro
from keiro.decisions import Appended, Cancel, RefusedTerminal, Spawn
from keiro.events import StateChanged, WorkflowCancelled
from tests.conformance.interleaved import Interleaved, records
from tests.conformance.test_cancel import cancelled, left
from tests.conformance.test_children import LIMIT_S, gate, held, only_child, reached
from tests.conformance.test_steps import calls, note, step_names, topics
from tests.conftest import MakeEngine


@pytest.fixture(autouse=True)
def _fresh() -> None:
    calls.clear()
    gate.clear()
    gate.update(entered=asyncio.Event(), go=asyncio.Event(), cleaning=asyncio.Event(), clean=asyncio.Event())


@keiro.step(cleanup=True)
async def undo(what: Any) -> Any:
    calls.append(f"undo {what}")
    return what


@keiro.step(cleanup=True)
async def slow_undo(what: Any) -> Any:
    calls.append(f"undoing {what}")
    gate["cleaning"].set()
    await gate["clean"].wait()
    calls.append(f"undone {what}")
    return what


@keiro.workflow(cleanup=True)
async def books(run: keiro.WorkflowRun) -> str:
    booked = None
    try:
        booked = await run.step(note, "flight")
        return await run.step(held, "hotel")
    finally:
        if booked is not None:
            await run.step(undo, booked)


@keiro.workflow(cleanup=True)
async def parks(run: keiro.WorkflowRun) -> str:
    try:
        await run.step(note, "before")
        return str(await run.deferred("never").result())
    except asyncio.CancelledError:
        await run.step(undo, "before")
        raise


@keiro.workflow(cleanup=True)
async def slow(run: keiro.WorkflowRun) -> None:
    await run.step(note, "first")
    try:
        await run.deferred("never").result()
    finally:
        await run.step(undo, "one")
        await run.step(slow_undo, "two")


async def requests(handle: keiro.Handle) -> list[str | None]:
    """The reasons of the requests to end that are recorded."""
    return [
        event.reason
        async for event in handle.events()
        if isinstance(event, StateChanged) and event.state == "cancel_requested"
    ]


async def test_a_run_under_way_is_interrupted_and_cleans_up(make_engine: MakeEngine) -> None:
    """Asked twice, it is asked once; the marker follows the cleanup."""
    async with make_engine(books) as engine:
        handle = await engine.start(books, id="a")
        await gate["entered"].wait()
        assert await handle.cancel(reason="ill") is True
        assert await handle.cancel(reason="more") is False
        assert await handle.cancel(wait=True) is False
        await cancelled(handle)
        assert await requests(handle) == ["ill"]
        assert await step_names(handle) == ["note", "undo"]
        assert calls == ["flight", "hotel", "undo flight"]
        (event,) = [one async for one in handle.events() if isinstance(one, WorkflowCancelled)]
        run = await handle.run()
        assert event.reason == "ill" and run.cancel_requested_at_ms is not None and run.cleanup_ms == 30_000
        with pytest.raises(keiro.WorkflowCancelled, match="ill"):
            await handle.result(LIMIT_S)
        assert await engine.store.asked() == []


async def test_wait_returns_after_the_marker(make_engine: MakeEngine) -> None:
    async with make_engine(slow) as engine:
        handle = await engine.start(slow, id="a")
        await reached_step(handle, "note")
        waiting = asyncio.create_task(handle.cancel(wait=True))
        await gate["cleaning"].wait()
        assert not waiting.done() and await handle.status() == "running"
        gate["clean"].set()
        assert await waiting is True
        await cancelled(handle)


async def reached_step(handle: keiro.Handle, name: str) -> None:
    async with asyncio.timeout(LIMIT_S):
        while name not in await step_names(handle):
            await asyncio.sleep(0.001)


async def test_a_parked_run_is_woken_to_clean_up(make_engine: MakeEngine, parks_at_once: None) -> None:
    async with make_engine(parks) as engine:
        handle = await engine.start(parks, id="a")
        await reached(handle, "suspended")
        assert await handle.cancel()
        await cancelled(handle)
        assert calls == ["before", "undo before"]


@pytest.mark.parametrize("order", ["before", "after"])
async def test_a_park_and_a_request_have_one_order(make_engine: MakeEngine, parks_at_once: None, order: str) -> None:
    async with make_engine(parks) as engine:
        race = Interleaved(
            engine, records("wf:parks-a", "StateChanged"), order, lambda: Cancel("wf:parks-a", engine.wall_ms())
        )
        handle = await engine.start(parks, id="a")
        await cancelled(handle)
        assert isinstance(await race.outcome, Appended)
        assert calls == ["before", "undo before"]


async def test_one_that_has_not_begun_or_is_paced_is_driven_now(make_engine: MakeEngine) -> None:
    @keiro.workflow(cleanup=True, retry=keiro.Retry(5, initial=3600))
    async def fails(run: keiro.WorkflowRun) -> None:
        try:
            await run.step(note, "tried")
            calls.append("fails")
            raise ValueError("again")
        except BaseException:
            await run.step(undo, "tried")
            raise

    async with make_engine(parks, fails) as engine:
        later = await engine.start(parks, id="a", delay=3600)
        paced = await engine.start(fails, id="a")
        async with asyncio.timeout(LIMIT_S):
            while (await paced.run()).attempts == 0:
                await asyncio.sleep(0.001)
        assert await later.cancel(wait=True) and await paced.cancel(wait=True)
        await cancelled(later)
        await cancelled_after(paced, retried=True)
        assert "before" not in calls and calls.count("tried") == 1 and calls.count("undo tried") == 1


@pytest.mark.parametrize("order", ["before", "after"])
async def test_of_a_request_and_a_completion_the_first_one_counts(make_engine: MakeEngine, order: str) -> None:
    async with make_engine(books) as engine:
        handle = await engine.start(books, id="a")
        await gate["entered"].wait()
        race = Interleaved(
            engine,
            records(handle.run_id, "WorkflowCompleted"),
            order,
            lambda: Cancel(handle.run_id, engine.wall_ms()),
        )
        gate["go"].set()
        if order == "before":
            await cancelled(handle)
            assert isinstance(await race.outcome, Appended) and len(await requests(handle)) == 1
        else:
            assert await handle.result(LIMIT_S) == "hotel"
            assert await race.outcome == RefusedTerminal("completed") and await requests(handle) == []


@pytest.mark.parametrize("topic", ["WorkflowFailed", "WorkflowRetried"])
@pytest.mark.parametrize("order", ["before", "after"])
async def test_of_a_request_and_a_failure_the_first_one_counts(make_engine: MakeEngine, order: str, topic: str) -> None:
    @keiro.workflow(cleanup=True, retry=keiro.Retry(3, initial=3600) if topic == "WorkflowRetried" else None)
    async def fails(run: keiro.WorkflowRun) -> None:
        await run.step(held, "tried")
        raise ValueError("no")

    async with make_engine(fails) as engine:
        handle = await engine.start(fails, id="a")
        await gate["entered"].wait()
        race = Interleaved(
            engine, records(handle.run_id, topic), order, lambda: Cancel(handle.run_id, engine.wall_ms())
        )
        gate["go"].set()
        if order == "after" and topic == "WorkflowFailed":
            await reached(handle, "failed")
            assert await race.outcome == RefusedTerminal("failed")
        else:
            await cancelled_after(handle, retried=order == "after")
            assert isinstance(await race.outcome, Appended)


async def cancelled_after(handle: keiro.Handle, *, retried: bool) -> None:
    with pytest.raises(keiro.WorkflowCancelled):
        await handle.result(LIMIT_S)
    assert [topic for topic in await topics(handle) if topic in ("WorkflowRetried", "WorkflowCancelled")] == [
        *(["WorkflowRetried"] if retried else []),
        "WorkflowCancelled",
    ]


@pytest.mark.parametrize("order", ["before", "after"])
async def test_a_request_and_the_next_round_have_one_order(make_engine: MakeEngine, order: str) -> None:
    """The round that is there when the request comes is the one that ends."""

    @keiro.workflow(cleanup=True)
    async def rounds(run: keiro.WorkflowRun, number: int) -> None:
        try:
            if number == 0:
                await run.step(held, "round 0")
                run.continue_as_new(1)
            await run.deferred("never").result()
        except asyncio.CancelledError:
            await run.step(undo, number)

    async with make_engine(rounds) as engine:
        handle = await engine.start(rounds, 0, id="a")
        await gate["entered"].wait()
        race = Interleaved(
            engine,
            lambda command: type(command).__name__ == "Rotate",
            order,
            lambda: Cancel(handle.run_id, engine.wall_ms()),
        )
        gate["go"].set()
        with pytest.raises(keiro.WorkflowCancelled):
            await handle.result(LIMIT_S)
        assert isinstance(await race.outcome, Appended)
        run = await handle.run()
        if order == "before":
            assert run.round_ordinal == 0
        else:
            assert run.round_ordinal == 1 and run.cleanup_ms == 30_000 and "undo 1" in calls


async def test_a_step_whose_effect_is_recorded_after_the_request_is_seen_by_the_body(
    make_engine: MakeEngine,
) -> None:
    """Its effect has happened: it is undone, and not taken for one that was interrupted."""
    async with make_engine(books) as engine:
        race = Interleaved(
            engine,
            records("wf:books-a", "StepRecorded", "note"),
            "before",
            lambda: Cancel("wf:books-a", engine.wall_ms()),
        )
        handle = await engine.start(books, id="a")
        await cancelled(handle)
        assert isinstance(await race.outcome, Appended)
        assert calls[0] == "flight" and calls[-1] == "undo flight"


async def test_after_the_interruption_only_cleanup_steps_are_taken(make_engine: MakeEngine) -> None:
    @keiro.workflow(cleanup=True)
    async def tries(run: keiro.WorkflowRun) -> str:
        try:
            await run.deferred("never").result()
        except asyncio.CancelledError:
            refused = (
                lambda: run.step(note, "more"),
                lambda: run.sleep(1),
                lambda: run.deferred("other").result(),
                lambda: run.deferred("other").token(),
                lambda: run.spawn(parks),
                lambda: run.first(run.sleep(1)),
            )
            for call in refused:
                try:
                    await call()
                except keiro.CleanupOnly as error:
                    calls.append("asked to end" in str(error))
            try:
                run.continue_as_new()
            except keiro.CleanupOnly:
                calls.append(True)
            await run.step(undo, "at last")
        return "swallowed"

    async with make_engine(tries, parks) as engine:
        handle = await engine.start(tries, id="a")
        await waiting(engine, handle)
        assert await handle.cancel(wait=True)
        await cancelled(handle)
        assert calls == [True] * 7 + ["undo at last"]
        assert await handle.children() == []


async def waiting(engine: keiro.Engine, handle: keiro.Handle) -> None:
    """Return when the run does nothing but wait."""
    async with asyncio.timeout(LIMIT_S):
        while (driver := engine._resident.get(handle.run_id)) is None or not driver.resting:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("way", ["returns", "raises", "interrupted"])
async def test_however_the_body_ends_the_run_is_cancelled(
    make_engine: MakeEngine, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    @keiro.workflow(cleanup=True, retry=keiro.Retry(5))
    async def ends(run: keiro.WorkflowRun) -> str:
        try:
            await run.deferred("never").result()
        except asyncio.CancelledError:
            if way == "raises":
                raise ValueError("cleanup broke") from None
            if way == "interrupted":
                raise
        return "all the same"

    async with make_engine(ends) as engine:
        handle = await engine.start(ends, id="a")
        await waiting(engine, handle)
        assert await handle.cancel(wait=True)
        await cancelled(handle)
        assert ("cleanup broke" in caplog.text) == (way == "raises")


async def test_a_restart_in_mid_cleanup_repeats_no_recorded_step(make_engine: MakeEngine) -> None:
    """The next process interrupts the body at the same place."""
    async with make_engine(slow, grace=0) as engine:
        handle = await engine.start(slow, id="a")
        await reached_step(handle, "note")
        assert await handle.cancel()
        await gate["cleaning"].wait()
    assert calls == ["first", "undo one", "undoing two"]
    gate["clean"].set()
    async with make_engine(slow) as engine:
        handle = engine.handle("wf:slow-a")
        await cancelled(handle)
        assert calls == ["first", "undo one", "undoing two", "undoing two", "undone two"]
        assert await step_names(handle) == ["note", "undo", "slow_undo"]


async def test_a_completion_after_the_request_is_not_delivered_by_a_replay_either(make_engine: MakeEngine) -> None:
    async with make_engine(slow, grace=0) as engine:
        handle = await engine.start(slow, id="a")
        await reached_step(handle, "note")
        assert await handle.cancel()
        await gate["cleaning"].wait()
        assert await engine.complete(handle.run_id, "never", "late")
    gate["clean"].set()
    async with make_engine(slow) as engine:
        await cancelled(engine.handle("wf:slow-a"))
        assert calls[-1] == "undone two"


async def test_cleanup_steps_are_retried_and_may_park_meanwhile(make_engine: MakeEngine, parks_at_once: None) -> None:
    tried: list[int] = []

    @keiro.step(cleanup=True, retry=keiro.Retry(3, initial=0.2))
    async def flaky() -> None:
        tried.append(1)
        if len(tried) < 3:
            raise ValueError("not yet")

    @keiro.workflow(cleanup=True)
    async def tidies(run: keiro.WorkflowRun) -> None:
        try:
            await run.deferred("never").result()
        finally:
            await run.step(undo, "first")
            await run.step(flaky)

    async with make_engine(tidies) as engine:
        handle = await engine.start(tidies, id="a")
        await reached(handle, "suspended")
        assert await handle.cancel(wait=True)
        await cancelled(handle)
        assert len(tried) == 3 and calls == ["undo first"]
        assert "AttemptFailed" in await topics(handle)


async def test_a_cleanup_step_under_way_is_not_interrupted(make_engine: MakeEngine) -> None:
    @keiro.workflow(cleanup=True)
    async def tidies(run: keiro.WorkflowRun) -> None:
        await run.step(slow_undo, "early")
        await run.step(note, "after")

    async with make_engine(tidies) as engine:
        handle = await engine.start(tidies, id="a")
        await gate["cleaning"].wait()
        assert await handle.cancel()
        gate["clean"].set()
        await cancelled(handle)
        assert calls == ["undoing early", "undone early"]


async def test_tasks_of_the_body_are_interrupted_with_it_here_and_in_a_replay(make_engine: MakeEngine) -> None:
    @keiro.workflow(cleanup=True)
    async def both(run: keiro.WorkflowRun) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(charged(run.scope("a")))
                group.create_task(charged(run.scope("b")))
            calls.append("never")
        except asyncio.CancelledError:
            await run.step(slow_undo, "both")
            raise

    async def charged(scope: keiro.ScopedRun) -> None:
        await scope.step(note, "charged")
        await scope.deferred("never").result()

    async with make_engine(both, grace=0) as engine:
        handle = await engine.start(both, id="a")
        async with asyncio.timeout(LIMIT_S):
            while len(await step_names(handle)) < 2:
                await asyncio.sleep(0.001)
        assert await handle.cancel()
        await gate["cleaning"].wait()
    gate["clean"].set()
    async with make_engine(both) as engine:
        await cancelled(engine.handle("wf:both-a"))
        assert calls == ["charged", "charged", "undoing both", "undoing both", "undone both"]


async def test_when_the_grace_is_over_the_run_is_cancelled_whatever_its_body_does(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_engine(slow) as engine:
        handle = await engine.start(slow, id="a")
        await reached_step(handle, "note")
        assert await handle.cancel()
        await gate["cleaning"].wait()
        assert engine._worker is not None
        await engine._worker.end_graces()
        assert await handle.status() == "running"
        later(engine, monkeypatch)
        await engine._worker.end_graces()
        await cancelled(handle)
        await left(engine)
        assert calls == ["first", "undo one", "undoing two"]


def later(engine: keiro.Engine, monkeypatch: pytest.MonkeyPatch, ms: int = 30_000) -> None:
    """The store's clock goes forward by the grace."""
    now = engine.store.now_ms
    monkeypatch.setattr(engine.store, "now_ms", lambda: now() + ms)


async def test_the_grace_is_ended_by_another_process_and_without_the_code(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, parks_at_once: None
) -> None:
    """Nobody has the workflow: whoever looks writes the end, and the parent is told."""

    @keiro.workflow
    async def parent(run: keiro.WorkflowRun) -> str:
        try:
            return str(await run.call(parks, id="k"))
        except keiro.ChildCancelled as error:
            return str(error)

    async with make_engine(parent) as engine:
        handle = await engine.start(parent, id="a")
        await reached(handle, "suspended")
        assert await engine.cancel("wf:parks-k", reason="late")
        assert await engine.handle("wf:parks-k").status() == "pending"
        later(engine, monkeypatch)
        assert engine._worker is not None
        await engine._worker.end_graces()
        await cancelled(engine.handle("wf:parks-k"))
        assert await handle.result(LIMIT_S) == "wf:parks-k was cancelled: late"


async def test_who_waits_ends_the_run_where_no_worker_does(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_engine(worker=False) as client:
        async with make_engine(parks, grace=0) as engine:
            handle = await engine.start(parks, id="a")
            await waiting(engine, handle)
        assert await client.cancel(handle.run_id)
        later(client, monkeypatch)
        assert await client.cancel(handle.run_id, wait=True) is True
        await cancelled(client.handle(handle.run_id))


@pytest.mark.parametrize("who", ["here", "other"])
async def test_children_are_cancelled_or_asked_with_their_parent(make_engine: MakeEngine, who: str) -> None:
    """CH-47: one that has a cleanup too does its own; the parent is told of each end."""

    @keiro.workflow
    async def plain(run: keiro.WorkflowRun) -> None:
        await run.deferred("never").result()

    @keiro.workflow(cleanup=True)
    async def family(run: keiro.WorkflowRun) -> None:
        await run.spawn(plain, id="plain")
        await run.spawn(parks, id="tidy")
        await run.spawn(plain, id="detached", on_cancel="detach")
        try:
            await run.deferred("never").result()
        finally:
            await run.step(slow_undo, "family")

    async with make_engine(family, plain, parks) as engine, make_engine(worker=False) as client:
        handle = await engine.start(family, id="a")
        await waiting(engine, handle)
        await reached_step(engine.handle("wf:parks-tidy"), "note")
        assert await (engine if who == "here" else client).cancel(handle.run_id)
        await cancelled(engine.handle("wf:plain-plain"))
        await cancelled(engine.handle("wf:parks-tidy"))
        await gate["cleaning"].wait()
        assert await handle.status() == "running"
        statuses = {row.child_id: row.status for row in await handle.children()}
        assert statuses == {"plain": "cancelled", "tidy": "cancelled", "detached": "running"}
        assert await engine.reconcile() == []
        gate["clean"].set()
        await cancelled(handle)
        assert sorted(calls) == ["before", "undo before", "undoing family", "undone family"]


@pytest.mark.parametrize("order", ["before", "after"])
async def test_a_child_that_is_spawned_as_its_parent_is_asked_is_not_left_alone(
    make_engine: MakeEngine, order: str
) -> None:
    @keiro.workflow(cleanup=True)
    async def spawns(run: keiro.WorkflowRun) -> None:
        try:
            await run.spawn(parks, id="k")
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await run.step(undo, "spawns")

    async with make_engine(spawns, parks) as engine:
        race = Interleaved(
            engine, lambda command: isinstance(command, Spawn), order, lambda: Cancel("wf:spawns-a", engine.wall_ms())
        )
        handle = await engine.start(spawns, id="a")
        await cancelled(handle)
        assert isinstance(await race.outcome, Appended) and "undo spawns" in calls
        if order == "before":
            assert await handle.children() == [] and await engine.store.run("wf:parks-k") is None
        else:
            await cancelled(engine.handle("wf:parks-k"))
            assert (await only_child(handle)).status == "cancelled"


async def test_a_workflow_without_a_cleanup_is_cancelled_as_before(make_engine: MakeEngine) -> None:
    """Its cleanup steps are ordinary ones."""

    @keiro.workflow
    async def plain(run: keiro.WorkflowRun) -> None:
        await run.step(undo, "ordinary")
        try:
            await run.deferred("never").result()
        finally:
            await run.step(undo, "too late")

    async with make_engine(plain) as engine:
        handle = await engine.start(plain, id="a")
        await waiting(engine, handle)
        assert await handle.cancel(wait=True)
        await cancelled(handle)
        assert calls == ["undo ordinary"] and await requests(handle) == []


async def test_an_owner_that_has_not_read_the_request_does_not_complete_the_run(make_engine: MakeEngine) -> None:
    """It is told that something came before its record, and ends the run before it has read what: the end is decided on
    what is there, and not written on the strength of the version alone."""
    async with make_engine(books) as engine:
        handle = await engine.start(books, id="a")
        await gate["entered"].wait()
        race = Interleaved(
            engine,
            records(handle.run_id, "StepRecorded", "undo"),
            "before",
            lambda: Cancel(handle.run_id, engine.wall_ms()),
        )
        gate["go"].set()
        await cancelled(handle)
        assert isinstance(await race.outcome, Appended) and await step_names(handle) == ["note", "held", "undo"]


async def test_a_step_that_swallows_the_interruption_is_not_recorded(make_engine: MakeEngine) -> None:
    """A replay does not run it, so the body must not go on from its result now."""

    async def stubborn(well: bool) -> str:
        gate["entered"].set()
        try:
            await gate["go"].wait()
        except asyncio.CancelledError:
            if not well:
                raise ValueError("not well") from None
        return "all the same"

    @keiro.workflow(cleanup=True)
    async def will_not(run: keiro.WorkflowRun, well: bool) -> None:
        try:
            calls.append(await run.step(stubborn, well))
        except asyncio.CancelledError:
            await run.step(undo, "stubborn")
            raise

    async with make_engine(will_not) as engine:
        for well in (True, False):
            gate["entered"].clear()
            handle = await engine.start(will_not, well, id=str(well))
            await gate["entered"].wait()
            assert await handle.cancel(wait=True)
            await cancelled(handle)
            assert await step_names(handle) == ["undo"]
        assert calls == ["undo stubborn", "undo stubborn"]


async def test_a_replay_is_not_interrupted_before_it_has_come_to_where_it_was(make_engine: MakeEngine) -> None:
    """Also where the body awaits something of its own in between."""

    @keiro.workflow(cleanup=True)
    async def dawdles(run: keiro.WorkflowRun) -> None:
        done = []
        try:
            for number in range(3):
                done.append(await run.step(note, number))
                await asyncio.sleep(0.05)
            await run.deferred("never").result()
        finally:
            await run.step(slow_undo, len(done))

    async with make_engine(dawdles, grace=0) as engine:
        handle = await engine.start(dawdles, id="a")
        await reached_step(handle, "note#3")
        await waiting(engine, handle)
        assert await handle.cancel()
        await gate["cleaning"].wait()
    gate["clean"].set()
    async with make_engine(dawdles) as engine:
        await cancelled(engine.handle("wf:dawdles-a"))
        assert calls == [0, 1, 2, "undoing 3", "undoing 3", "undone 3"]


@pytest.mark.parametrize("again", [False, True], ids=["here", "replayed"])
async def test_a_task_that_nobody_awaits_is_interrupted_too(make_engine: MakeEngine, again: bool) -> None:
    @keiro.workflow(cleanup=True)
    async def leaves(run: keiro.WorkflowRun) -> None:
        async def other() -> None:
            try:
                await run.deferred("other").result()
            except asyncio.CancelledError:
                calls.append("other")

        task = asyncio.create_task(other())
        try:
            await run.deferred("never").result()
        finally:
            await asyncio.wait([task])
            await run.step(undo, "both")

    async with make_engine(leaves, grace=0) as engine:
        handle = await engine.start(leaves, id="a")
        await waiting(engine, handle)
        if not again:
            assert await handle.cancel(wait=True)
            assert calls == ["other", "undo both"]
            return
    calls.clear()  # also the end of an engine interrupts what waits
    async with make_engine(leaves) as engine:
        handle = engine.handle("wf:leaves-a")
        assert await handle.cancel(wait=True)
        await cancelled(handle)
        assert calls == ["other", "undo both"]


async def test_the_reason_and_the_grace_of_a_run_are_those_it_was_started_with(make_engine: MakeEngine) -> None:
    """A cancellation needs no code: what a run has is on its row, whatever its workflow says by now."""

    @keiro.workflow(name="changed", cleanup=True, grace=5)
    async def before(run: keiro.WorkflowRun) -> None:
        await run.deferred("never").result()

    @keiro.workflow(name="changed")
    async def after(run: keiro.WorkflowRun) -> None:
        try:
            await run.deferred("never").result()
        finally:
            await run.step(undo, "changed")

    async with make_engine(before, grace=0) as engine:
        handle = await engine.start(before, id="a")
        assert (await handle.run()).cleanup_ms == 5_000
    async with make_engine(after) as engine:
        handle = engine.handle("wf:changed-a")
        assert await handle.cancel(wait=True)
        await cancelled(handle)
        assert calls == ["undo changed"]


def test_what_is_no_cleanup_or_no_grace_is_refused() -> None:
    async def body(run: keiro.WorkflowRun) -> None: ...

    for options in ({"grace": 5}, {"cleanup": 1}, {"cleanup": True, "grace": 0}, {"cleanup": True, "grace": 1e12}):
        with pytest.raises(keiro.InvalidCall):
            keiro.workflow(**options)(body)  # type: ignore[call-overload]
    with pytest.raises(keiro.InvalidCall):
        keiro.step(cleanup="yes")(body)  # type: ignore[call-overload]
    assert keiro.workflow(cleanup=True, grace=1.5)(body).cleanup_ms == 1500
