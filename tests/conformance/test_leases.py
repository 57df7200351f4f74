"""Leases: renewed under long steps, sealed in time when they cannot be, taken over when they end (WF-73 to 82)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import Raw
from msgspec.structs import replace

import keiro
from keiro import worker as workers
from keiro.decisions import Start, new
from keiro.driver import Driver
from keiro.errors import StoreUnavailable
from keiro.events import AttemptFailed, WorkflowStarted
from keiro.stores.base import LEASE_MS, RENEW_MS, SEAL_MS, WorkerRow
from keiro.worker import host_identity, process_started, provably_gone
from tests.conformance.test_ownership import gate, held, held_workflow, own_row, worker_of
from tests.conformance.test_steps import calls, note, step_names
from tests.conftest import MakeEngine


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    # A lease is renewed when a test says so: a renewal in between would heal what the test is about.
    monkeypatch.setattr(workers, "RENEW_MS", 86_400_000)
    calls.clear()
    gate.clear()
    gate.update(entered=asyncio.Event(), go=asyncio.Event())


def set_clock(now_ms: Callable[[], int], *engines: keiro.Engine) -> None:
    for engine in engines:
        engine.store.now_ms = now_ms  # type: ignore[method-assign]


async def failures(handle: keiro.Handle) -> list[AttemptFailed]:
    return [event async for event in handle.events() if isinstance(event, AttemptFailed)]


def reported(engine: keiro.Engine) -> list[tuple[str, str]]:
    """What the engine reports from now on."""
    told: list[tuple[str, str]] = []
    engine.report = lambda event, run_id, **fields: told.append((event, run_id))  # type: ignore[method-assign]
    return told


async def test_wf_80_a_lease_that_is_renewed_outlives_a_step_longer_than_it(make_engine: MakeEngine) -> None:
    """WF-80, F33: nobody takes the run while its worker renews, however long the step; without, when the lease ends."""
    async with make_engine(held_workflow) as engine, make_engine(held_workflow) as other:
        handle = await engine.start(held_workflow, id="a")
        await gate["entered"].wait()
        now = engine.store.now_ms()
        for _ in range(5):
            now += RENEW_MS
            set_clock(lambda at=now: at, engine, other)  # type: ignore[misc]
            await worker_of(engine)._renew()
            now += SEAL_MS - 1
            set_clock(lambda at=now: at, engine, other)  # type: ignore[misc]
            await worker_of(other)._renew()
            await worker_of(other)._bury_dead()
        assert await handle.status() == "running" and calls == ["before", "held"]
        await worker_of(engine)._renew()
        await worker_of(other)._renew()

        # Renewed at the same moment, so to the millisecond: up to its last one the lease holds.
        ends = (await own_row(engine)).lease_expires_at_ms
        await other.store.renew(worker_of(other).key)
        set_clock(lambda: ends - 1, engine, other)
        await worker_of(other)._bury_dead()
        assert await handle.status() == "running"
        set_clock(lambda: ends, engine, other)
        await worker_of(other)._bury_dead()
        while calls.count("held") < 2:
            await asyncio.sleep(0)
        gate["go"].set()
        assert await other.handle(handle.run_id).result() == ["before", "held", "after"]
        assert calls == ["before", "held", "held", "after"]


async def test_wf_73_and_74_a_run_has_one_owner_and_is_free_when_handed_back(make_engine: MakeEngine) -> None:
    """WF-73, WF-74, WF-75, E2: of many who claim one gets it; a release frees it, only for its owner, and once."""
    async with make_engine(worker=False) as client, make_engine(worker=False) as rival:
        handle = await client.start(held_workflow, id="a")
        mine, theirs = worker_of(client).key, worker_of(rival).key
        claims = [client.store.claim(mine, ["held_workflow"], 1) for _ in range(3)]
        claims += [rival.store.claim(theirs, ["held_workflow"], 1) for _ in range(3)]
        taken = [found for found in await asyncio.gather(*claims) if found]
        assert len(taken) == 1
        ((run, head),) = taken[0]
        assert head.owner in (mine, theirs)
        await client.store.release(mine + theirs - head.owner, [run.run_key])
        assert await handle.status() == "running"
        await client.store.release(head.owner, [run.run_key])
        assert await handle.status() == "pending"
        assert len(await rival.store.claim(theirs, ["held_workflow"], 1)) == 1


async def test_wf_81_a_step_does_not_begin_under_a_lease_that_could_not_be_renewed(make_engine: MakeEngine) -> None:
    """WF-81: also where no timer could run, because the loop was blocked or the process stopped: looked at before the
    effect. It is no attempt and no failure."""

    @keiro.workflow
    async def overslept(run: keiro.WorkflowRun) -> list[str]:
        return [await run.step(too_long), await run.step(note, "next")]

    async def too_long() -> str:
        calls.append("too long")
        if len(calls) == 1:
            worker_of(engine)._renewed_at -= SEAL_MS / 1000 + 1
        return "done"

    async with make_engine(overslept) as engine:
        handle = await engine.start(overslept, id="a")
        driver = None
        while driver is None or not driver.sealed:
            await asyncio.sleep(0)
            driver = engine._resident.get(handle.run_id, driver)
        assert calls == ["too long"]
        assert await step_names(handle) == ["too_long"]
        assert not worker_of(engine).leased
        await worker_of(engine)._renew()
        assert await handle.result() == ["done", "next"]
        assert calls == ["too long", "next"]
        assert await failures(handle) == []


async def test_wf_80_a_lease_is_renewed_while_a_step_blocks_the_event_loop(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WF-80: else two workers would take the run from each other for ever, and never record the step."""
    monkeypatch.setattr(workers, "BLOCKED_S", 0.05)

    @keiro.workflow
    async def blocks(run: keiro.WorkflowRun) -> list[str]:
        return [await run.step(blocking), await run.step(note, "next")]

    async def blocking() -> str:
        calls.append("blocking")
        worker = worker_of(engine)
        monkeypatch.setattr(workers, "RENEW_MS", 50)
        before, until = worker._renewed_at, time.monotonic() + 60
        while len(told) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        assert worker._renewed_at > before
        monkeypatch.setattr(workers, "RENEW_MS", 86_400_000)
        return "done"

    async with make_engine(blocks) as engine:
        told = reported(engine)
        lease = (await own_row(engine)).lease_expires_at_ms
        assert await engine.execute(blocks, id="a") == ["done", "next"]
        assert (await own_row(engine)).lease_expires_at_ms > lease
        assert calls == ["blocking", "next"]
        assert set(told) == {("loop_blocked", "")}


async def test_a_lease_that_another_ended_is_not_renewed_behind_a_blocked_loop(make_engine: MakeEngine) -> None:
    """WF-81: whoever was buried finds that out when the loop goes on, and does nothing until then."""
    async with make_engine(worker=False) as engine, make_engine(worker=False) as other:
        await other.store.bury(await own_row(engine))
        tables = engine.store.run_tables()
        assert not tables.renew(worker_of(engine).key, engine.store.now_ms())
        tables.close()


async def test_any_number_of_runs_is_handed_back(make_engine: MakeEngine) -> None:
    """WF-75: more than a statement takes parameters."""
    async with make_engine(held_workflow) as engine:
        handle = await engine.start(held_workflow, id="a")
        await gate["entered"].wait()
        run_key = (await handle.run()).run_key
        await engine.store.release(worker_of(engine).key, [*range(10**9, 10**9 + 70_000), run_key])
        assert await handle.status() == "pending"
        gate["go"].set()


@pytest.mark.parametrize("fault", ["raises", "hangs"])
async def test_wf_81_runs_are_sealed_in_time_when_the_lease_cannot_be_renewed(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """WF-81, WF-82: a store that is away and one that does not answer. When it is back the worker begins anew, takes
    its runs again and goes on; the step under way is given up without being counted."""
    monkeypatch.setattr(workers, "RENEW_MS", 10)
    monkeypatch.setattr(workers, "RETRY_S", 0.01)
    async with make_engine(held_workflow) as engine:
        handle = await engine.start(held_workflow, id="a")
        await gate["entered"].wait()
        driver = engine._resident[handle.run_id]
        told = reported(engine)
        worker = worker_of(engine)
        before = worker.key
        renew = engine.store.renew
        cancelled: list[bool] = []

        async def away(worker_key: int) -> bool:
            if fault == "hangs":
                try:
                    await asyncio.Event().wait()
                finally:
                    cancelled.append(True)
            raise StoreUnavailable("the store is away")

        async def registered(*_: object) -> int:
            raise StoreUnavailable("the store is away")

        register = engine.store.register
        engine.store.renew, engine.store.register = away, registered  # type: ignore[method-assign]
        monkeypatch.setattr(workers, "SEAL_MS", 100)
        while not driver.sealed:
            await asyncio.sleep(0)
        monkeypatch.setattr(workers, "SEAL_MS", SEAL_MS)
        row = next(row for row in await engine.store.workers() if row.worker_key == before)
        assert row.lease_expires_at_ms > engine.store.now_ms(), "sealed before anybody may take the runs"
        assert ("store_away", "") in told and (fault == "raises" or cancelled)
        gate["go"].set()
        engine.store.renew, engine.store.register = renew, register  # type: ignore[method-assign]
        assert await handle.result() == ["before", "held", "after"]
        assert worker.key != before
        assert calls == ["before", "held", "held", "after"]
        assert await failures(handle) == []


def test_a_lease_is_sealed_before_it_ends_and_renewed_before_that() -> None:
    """E15, trap 49: the times leave room for a renewal that fails, and for a statement that is still under way."""
    assert RENEW_MS * 2 <= SEAL_MS <= LEASE_MS - 5_000


@pytest.mark.parametrize("error", [StoreUnavailable("away"), RuntimeError("a bug")], ids=["store", "bug"])
async def test_f8_no_error_ends_a_worker(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """F8, U19: what a look for work, a renewal or a look at other workers raises is reported, and the next happens."""
    monkeypatch.setattr(workers, "SAFETY_POLL_S", 0.005)
    monkeypatch.setattr(workers, "RENEW_MS", 5)
    monkeypatch.setattr(workers, "RETRY_S", 0.005)
    async with make_engine(held_workflow) as engine:
        told = reported(engine)
        gate["go"].set()
        store: Any = engine.store
        failed: dict[str, int] = dict.fromkeys(("claim", "adopt_orphans", "workers"), 0)

        def failing(name: str) -> Callable[..., Any]:
            real = getattr(store, name)

            async def call(*args: Any) -> Any:
                failed[name] += 1
                if failed[name] <= 2:
                    raise error
                return await real(*args)

            return call

        for name in failed:
            setattr(store, name, failing(name))
        async with make_engine(worker=False) as client:
            handle = await client.start(held_workflow, id="a")
            worker_of(engine).wake()
            assert await handle.result() == ["before", "held", "after"]
        while min(failed.values()) < 4:
            await asyncio.sleep(0)
        assert not any(task.done() for task in worker_of(engine)._tasks)
        assert {event for event, _ in told} >= {"store_away" if isinstance(error, StoreUnavailable) else "worker_fault"}


# Whose process is gone


def row_of(pid: int, started: str, host: str = "") -> WorkerRow:
    return WorkerRow(1, "w", host or host_identity(), pid, started, None, 0, 2**53 - 1)


def test_a_process_of_another_host_is_never_provably_gone() -> None:
    """Field report oban-py#32: equal pids on two hosts, or in two containers, are two processes."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert provably_gone(row_of(gone.pid, "1"), host_identity())
    assert not provably_gone(row_of(gone.pid, "1", "elsewhere"), host_identity())
    assert not provably_gone(row_of(gone.pid, "1", host_identity().split("|")[0]), host_identity())


def test_a_process_is_gone_when_it_is_not_there_or_only_its_entry_is() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = process_started(process.pid)
    assert started
    assert not provably_gone(row_of(process.pid, started), host_identity())
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert provably_gone(row_of(process.pid, started), host_identity()), "ended, and not yet waited for by its parent"
    process.communicate()
    assert provably_gone(row_of(process.pid, started), host_identity())


def test_a_pid_that_was_given_again_is_another_process() -> None:
    own = process_started(os.getpid())
    assert own
    assert not provably_gone(row_of(os.getpid(), own), host_identity())
    assert provably_gone(row_of(os.getpid(), str(int(own) + 1)), host_identity())


def test_where_the_beginning_of_a_process_is_unknown_nothing_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not provably_gone(row_of(os.getpid(), ""), host_identity())
    monkeypatch.setattr(workers, "process_started", lambda pid: "")
    assert not provably_gone(row_of(os.getpid(), "1"), host_identity())


async def test_a_worker_whose_process_is_gone_is_buried_before_its_lease_ends(make_engine: MakeEngine) -> None:
    """Field report dbos#453: no waiting where it is certain; and only there, among all workers that are listed."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    async with make_engine(worker=False) as engine:
        mine = worker_of(engine)._incarnation
        dead = await engine.store.register(replace(mine, worker_id="dead", pid=gone.pid, process_started="1"))
        far = await engine.store.register(replace(mine, worker_id="far", host="elsewhere", pid=gone.pid))
        handle = await engine.start(held_workflow, id="a")
        await engine.store.claim(dead, ["held_workflow"], 1)
        await worker_of(engine)._bury_dead()
        listed = {row.worker_key for row in await engine.store.workers()}
        assert dead not in listed and {far, worker_of(engine).key} <= listed
        assert await handle.status() == "pending"


# Who takes runs and does not drive them


async def test_runs_claimed_while_the_engine_closes_are_handed_back_undriven(make_engine: MakeEngine) -> None:
    """A drain begins no step, so it drives no run that a claim under way brings."""
    async with make_engine(worker=False) as client:
        handle = await client.start(held_workflow, id="a")
    engine = make_engine(held_workflow)
    claimed, closing = asyncio.Event(), asyncio.Event()
    history = engine.store.history

    async def slow(*args: Any, **kwargs: Any) -> Any:
        claimed.set()
        await closing.wait()
        return await history(*args, **kwargs)

    engine.store.history = slow  # type: ignore[method-assign]
    async with engine:
        await claimed.wait()
        assert await engine.handle(handle.run_id).status() == "running"
        stop = worker_of(engine).stop

        async def stopping() -> None:
            closing.set()
            for _ in range(5):
                await asyncio.sleep(0)
            await stop()

        worker_of(engine).stop = stopping  # type: ignore[method-assign]
    assert calls == []
    async with make_engine(worker=False) as client:
        found = await client.store.head(handle.run_id)
        assert found is not None and (found[0].status, found[1].owner) == ("pending", None)


async def test_a_start_that_commits_while_the_engine_closes_is_handed_back_undriven(make_engine: MakeEngine) -> None:
    """Its caller is told that it is durable; who drives it is whoever comes next."""
    engine = make_engine(held_workflow)
    late: list[Any] = []

    class Late:
        def committed(self, changed: Any, touched: Any = (), taken: Any = ()) -> None:
            late.append(changed)

        def woken(self) -> None:
            engine.woken()

    async with engine:
        engine.store.listener = Late()
        handle = await engine.start(held_workflow, id="a")
        stop = worker_of(engine).stop

        async def stopping() -> None:
            for changed in late:
                engine.committed(changed)
            for _ in range(5):
                await asyncio.sleep(0)
            await stop()

        worker_of(engine).stop = stopping  # type: ignore[method-assign]
    assert late and calls == []
    async with make_engine(held_workflow) as engine:
        gate["go"].set()
        assert await engine.handle(handle.run_id).result() == ["before", "held", "after"]


async def test_a_run_is_driven_though_the_caller_of_its_start_has_gone(make_engine: MakeEngine) -> None:
    """The commit is what begins it: a run owned by a living worker that does not drive it would never go on."""
    gate["go"].set()
    async with make_engine(held_workflow) as engine:
        starting = asyncio.create_task(engine.start(held_workflow, id="a"))
        while not engine._births:
            await asyncio.sleep(0)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        while await engine.store.run("wf:held_workflow-a") is None:
            await asyncio.sleep(0)
        run = await engine.wait_ended("wf:held_workflow-a")
        assert run.status == "completed" and calls == ["before", "held", "after"]


async def test_no_more_than_concurrency_runs_are_resident_however_many_are_started_at_once(
    make_engine: MakeEngine,
) -> None:
    most = 0

    async def count() -> None:
        nonlocal most
        most = max(most, len(engine._resident))

    @keiro.workflow
    async def counted(run: keiro.WorkflowRun, n: int) -> int:
        await run.step(count)
        return n

    async with make_engine(counted, concurrency=3) as engine:
        assert await asyncio.gather(*(engine.execute(counted, n, id=str(n)) for n in range(20))) == list(range(20))
        assert most == 3
        while engine._births or engine.free_slots() != 3:  # the last driver leaves a tick after its end is told
            await asyncio.sleep(0)


async def test_a_start_takes_no_slot_that_a_claim_under_way_may_fill(make_engine: MakeEngine) -> None:
    async with make_engine(worker=False) as client:
        await client.start(held_workflow, id="first")
    engine = make_engine(held_workflow, concurrency=1)
    claim = engine.store.claim
    most = 0

    async def meanwhile(*args: Any) -> Any:
        engine.store.claim = claim  # type: ignore[method-assign]
        await engine.start(held_workflow, id="second")
        return await claim(*args)

    adopt = engine.adopt

    def adopting(*args: Any) -> None:
        nonlocal most
        adopt(*args)
        most = max(most, len(engine._resident))

    engine.store.claim, engine.adopt = meanwhile, adopting  # type: ignore[method-assign]
    async with engine:
        await gate["entered"].wait()
        gate["go"].set()
        for name in ("first", "second"):
            assert await engine.handle(f"wf:held_workflow-{name}").result() == ["before", "held", "after"]
        assert most == 1


async def test_a_drain_begins_no_step_while_another_one_ends(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM: the steps under way are recorded; a parallel task of the same run that is ready for its next step leaves
    it to the next owner."""
    draining = asyncio.Event()
    drain = Driver.drain

    def drained(driver: Driver) -> None:
        drain(driver)
        draining.set()

    monkeypatch.setattr(Driver, "drain", drained)

    async def quick(n: int) -> int:
        calls.append(f"q{n}")
        gate["quick"].set()
        await draining.wait()
        return n

    @keiro.workflow
    async def two_tasks(run: keiro.WorkflowRun) -> list[Any]:
        async def chain() -> int:
            return sum([await run.step(quick, n, key=f"q{n}") for n in (1, 2)])

        return await asyncio.gather(run.step(held, "held"), chain())

    async def let_go(handle: keiro.Handle) -> None:
        while await step_names(handle) != ["q1"]:
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        gate["go"].set()

    gate["quick"] = asyncio.Event()
    engine = make_engine(two_tasks, grace=60)
    async with engine:
        handle = await engine.start(two_tasks, id="a")
        await asyncio.gather(gate["entered"].wait(), gate["quick"].wait())
        releasing = asyncio.create_task(let_go(handle))
    await releasing
    assert sorted(calls) == ["held", "q1"]
    async with make_engine(two_tasks) as engine:
        assert await engine.handle(handle.run_id).result() == ["held", 3]
        assert sorted(calls) == ["held", "q1", "q2"]


async def test_claims_whose_history_cannot_be_read_now_are_handed_back_at_once(make_engine: MakeEngine) -> None:
    """U19: claimed and not driven they would be a living worker's until it looks for strays."""
    gate["go"].set()
    async with make_engine(worker=False) as client:
        handle = await client.start(held_workflow, id="a")
    engine = make_engine(held_workflow)
    history, released = engine.store.history, engine.store.release
    handed_back: list[Any] = []

    async def away(*args: Any, **kwargs: Any) -> Any:
        engine.store.history = history  # type: ignore[method-assign]
        raise StoreUnavailable("the store is away")

    async def release(worker_key: int, run_keys: Any) -> None:
        handed_back.append(run_keys)
        await released(worker_key, run_keys)
        worker_of(engine).wake()

    engine.store.history, engine.store.release = away, release  # type: ignore[method-assign]
    async with engine:
        assert await engine.handle(handle.run_id).result() == ["before", "held", "after"]
        assert len(handed_back) == 1


@pytest.mark.parametrize("when", ["renews", "starts"])
async def test_a_worker_adopts_what_nobody_listed_owns_when_it_starts_and_when_it_renews(
    make_engine: MakeEngine, when: str
) -> None:
    """Born as a buried worker's, a run is found although no lease of its owner can end any more."""
    gate["go"].set()
    async with make_engine(worker=False) as client:
        event = WorkflowStarted(workflow="held_workflow", key="a", input=Raw(b"{}"))
        orphan = Start("wf:held_workflow-a", new(event, b"0123456789abcdef"), client.wall_ms(), 987_654)
        client.committed = lambda changed, *others: None  # type: ignore[method-assign]
        if when == "starts":
            await client.store.submit(orphan)
        async with make_engine(held_workflow) as engine:
            if when == "renews":
                await client.store.submit(orphan)
                await worker_of(engine)._renew()
            worker_of(engine).wake()
            assert await engine.handle("wf:held_workflow-a").result() == ["before", "held", "after"]


async def test_no_run_is_driven_that_was_claimed_by_an_incarnation_that_is_over(make_engine: MakeEngine) -> None:
    """WF-81: between claim and first step the lease may be lost: the runs are the next incarnation's to claim."""
    gate["go"].set()
    async with make_engine(worker=False) as client:
        handle = await client.start(held_workflow, id="a")
    engine = make_engine(held_workflow)
    history = engine.store.history
    adopted: list[str] = []
    read = asyncio.Event()

    async def meanwhile(*args: Any, **kwargs: Any) -> Any:
        engine.store.history = history  # type: ignore[method-assign]
        found = await history(*args, **kwargs)
        worker_of(engine)._renewed_at -= SEAL_MS
        assert not worker_of(engine).holds()
        read.set()
        return found

    adopt = engine.adopt

    def adopting(*args: Any) -> None:
        adopted.append(args[0].run_id)
        adopt(*args)

    engine.store.history, engine.adopt = meanwhile, adopting  # type: ignore[method-assign]
    async with engine:
        await read.wait()
        for _ in range(20):
            await asyncio.sleep(0)
        assert adopted == [] and calls == []
        await worker_of(engine)._renew()
        assert await engine.handle(handle.run_id).result() == ["before", "held", "after"]


async def test_a_renewal_that_comes_too_late_for_the_seal_begins_a_new_incarnation(make_engine: MakeEngine) -> None:
    """WF-81: what was sealed while the renewal was under way is not left to wait for the next one."""
    gate["go"].set()
    async with make_engine(held_workflow) as engine:
        worker, renew = worker_of(engine), engine.store.renew

        async def late(key: int) -> bool:
            renewed = await renew(key)
            worker._renewed_at -= SEAL_MS
            assert not worker.holds()
            return renewed

        engine.store.renew = late  # type: ignore[method-assign]
        await worker._renew()
        assert worker.holds()
        assert await engine.execute(held_workflow, id="a") == ["before", "held", "after"]
