"""Schedules: a tick has one run whoever drives it, what is commanded is never lost, and what waits costs nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

import keiro
from keiro import schedule, waits
from keiro.decisions import Rotate
from keiro.events import StepRecorded, WorkflowStarted
from keiro.run import workflow_of
from keiro.schedule import ScheduleRun
from keiro.schedules import Schedules
from keiro.testing import SkippingClock
from keiro.testing.replayer import replay_stored
from tests.conformance.parking import parked
from tests.conformance.retained import rows_left
from tests.conftest import MakeEngine

NEVER = "0 0 1 1 *"
EVERY_SECOND = "* * * * * *"
BERLIN = "Europe/Berlin"

seen: list[tuple[str, Any]] = []
gates: dict[str, asyncio.Event] = {}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    seen.clear()
    gates.clear()
    monkeypatch.setattr(waits, "PARK_S", 0.01)


@keiro.workflow
async def report(run: keiro.WorkflowRun, to: str = "all", at: datetime | None = None) -> str:
    seen.append((run.key, at))
    return to


@keiro.workflow
async def long_report(run: keiro.WorkflowRun) -> None:
    seen.append((run.key, None))
    await run.deferred("done").result()


@keiro.workflow
async def broken_report(run: keiro.WorkflowRun) -> None:
    seen.append((run.key, None))
    raise ValueError("no data")


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def started(engine: keiro.Engine, workflow: str) -> list[str]:
    """The keys of the runs of a workflow, oldest first."""
    return [run.key for run in reversed(await engine.runs(workflow=workflow, limit=1000))]


def keys() -> list[str]:
    return [key for key, _ in seen]


# Ticks, on all three stores


async def test_a_tick_has_one_run_whoever_drives_the_schedule(make_engine: MakeEngine) -> None:
    """SC-1: Several engines on one store: no tick is left out, and none has two runs."""
    async with make_engine(report) as one, make_engine(report) as two, make_engine(report) as three:
        await one.schedules.put("often", report, "all", keiro.TICK, cron=EVERY_SECOND)
        await until(lambda: len(set(keys())) >= 3)
        await three.schedules.delete("often")
        runs = await started(two, "report")
        times = [datetime.strptime(key, "often-%Y%m%dT%H%M%SZ").replace(tzinfo=UTC) for key in runs]
        assert times == [times[0] + timedelta(seconds=n) for n in range(len(times))]
        assert [at for key, at in seen if key == runs[0]] == [times[0]], "its body ran once, and knew its tick"
        for key in runs:
            events = [event async for event in one.handle(f"wf:report-{key}").events()]
            assert [type(event) for event in events].count(WorkflowStarted) == 1


async def test_what_is_put_again_changes_nothing_and_another_definition_changes_it(make_engine: MakeEngine) -> None:
    """SC-3."""
    async with make_engine(report, long_report) as engine:
        put = engine.schedules.put
        assert await put("nightly", report, "ada", cron="0 2 * * *", zone=BERLIN)
        [row] = await engine.schedules.list()
        assert (row.name, row.workflow, row.cron, row.zone) == ("nightly", "report", "0 2 * * *", BERLIN)
        assert (row.overlap, row.backfill, row.paused, row.last_at, row.last_run_id) == (
            "skip",
            False,
            False,
            None,
            None,
        )
        assert row.next_at is not None and row.next_at.astimezone(ZoneInfo(BERLIN)).hour == 2

        assert not await put("nightly", report, "ada", cron="0 2 * * *", zone=BERLIN)
        assert not await put("nightly", report, to="ada", cron="0 2 * * *", zone=BERLIN)
        assert await put("nightly", report, "grace", cron="0 2 * * *", zone=BERLIN, overlap="allow")
        [changed] = await engine.schedules.list()
        assert (changed.overlap, changed.next_at) == ("allow", row.next_at)
        assert await put("nightly", long_report, cron="30 3 * * *", backfill=True)
        [changed] = await engine.schedules.list()
        assert (changed.workflow, changed.zone, changed.backfill) == ("long_report", "UTC", True)
        assert changed.next_at is not None and (changed.next_at.hour, changed.next_at.minute) == (3, 30)
        assert len(await engine.runs(workflow=schedule.SCHEDULE)) == 1


async def test_what_cannot_be_scheduled_is_refused_before_anything_is_written(make_engine: MakeEngine) -> None:
    @keiro.workflow
    async def unknown(run: keiro.WorkflowRun) -> None: ...

    @keiro.workflow
    async def many(run: keiro.WorkflowRun, *times: datetime) -> None: ...

    good: dict[str, Any] = {"cron": NEVER}
    bad: list[tuple[type[Exception], str, Any, tuple[Any, ...], dict[str, Any]]] = [
        (keiro.InvalidCall, "a", report, (), {"cron": "61 * * * *"}),
        (keiro.InvalidCall, "a", report, (), {"cron": "0 0 */29 2 SUN#5"}),
        (keiro.InvalidCall, "a", report, (), {"cron": NEVER, "zone": "Mars/Olympus"}),
        (keiro.InvalidCall, "a", report, (), {"cron": NEVER, "overlap": "queue"}),
        (keiro.InvalidCall, "a", report, (), {"cron": NEVER, "backfill": 1}),
        (keiro.InvalidCall, "a", report, (1, 2, 3), good),
        (keiro.PayloadRejected, "a", report, (5,), good),
        (keiro.PayloadRejected, "a", report, ("all", "yesterday"), good),
        (keiro.InvalidCall, "a", many, (keiro.TICK,), good),
        (keiro.InvalidCall, "a", ScheduleRun, (), good),
        (keiro.UnknownWorkflow, "a", unknown, (), good),
        (keiro.InvalidName, "a:b", report, (), good),
        (keiro.InvalidName, "", report, (), good),
        (keiro.InvalidName, "a" * 401, report, (), good),
    ]
    async with make_engine(report, many) as engine:
        for kind, name, workflow, args, options in bad:
            with pytest.raises(kind):
                await engine.schedules.put(name, workflow, *args, **options)
        assert await engine.runs() == []
        for call in (engine.schedules.pause, engine.schedules.resume, engine.schedules.trigger):
            with pytest.raises(keiro.RunNotFound, match="no schedule 'a'"):
                await call("a")
        assert not await engine.schedules.delete("a")


async def test_paused_it_does_not_tick_and_resumed_it_does(make_engine: MakeEngine) -> None:
    async with make_engine(report) as engine:
        await engine.schedules.put("a", report, cron=EVERY_SECOND)
        await until(lambda: seen)
        assert await engine.schedules.pause("a")
        assert not await engine.schedules.pause("a")
        [row] = await engine.schedules.list()
        assert (row.paused, row.next_at) == (True, None)
        handle = engine.handle("wf:keiro.schedule-a")
        assert (await parked(handle)).wake_at_ms is None, "paused it waits for no clock"
        runs = await started(engine, "report")
        assert await engine.schedules.resume("a")
        assert not await engine.schedules.resume("a")
        await until(lambda: len(set(keys())) > len(runs))
        assert (await started(engine, "report"))[: len(runs)] == runs


async def test_a_trigger_starts_a_run_now_and_once(make_engine: MakeEngine) -> None:
    async with make_engine(report) as engine:
        await engine.schedules.put("a", report, "ada", keiro.TICK, cron=NEVER)
        handle = await engine.schedules.trigger("a", id="click")
        assert await handle.result() == "ada"
        assert (await engine.schedules.trigger("a", id="click")).run_id == handle.run_id == "wf:report-a-trigger-click"
        await engine.schedules.pause("a")
        other = await engine.schedules.trigger("a")
        assert await other.result() == "ada", "also while it is paused"
        assert len(await started(engine, "report")) == 2
        assert all(isinstance(at, datetime) for _, at in seen)
        while (row := (await engine.schedules.list())[0]).last_run_id != other.run_id:
            await asyncio.sleep(0.005)
        assert row.last_at is not None


async def test_a_trigger_whose_caller_dies_is_carried_out_by_the_schedule(make_engine: MakeEngine) -> None:
    async with make_engine(report) as engine:
        await engine.schedules.put("a", report, cron=NEVER)
        await engine.command("wf:keiro.schedule-a", ScheduleRun.trigger, "a-trigger-x", 1_000)
        assert await until_started(engine, "wf:report-a-trigger-x") == "all"


async def until_started(engine: keiro.Engine, run_id: str) -> Any:
    while True:
        try:
            return await engine.handle(run_id).result()
        except keiro.RunNotFound:
            await asyncio.sleep(0.005)


async def test_deleted_its_name_is_free_and_its_runs_stay(make_engine: MakeEngine) -> None:
    async with make_engine(report) as engine:
        await engine.schedules.put("a", report, cron=NEVER)
        handle = await engine.schedules.trigger("a")
        await handle.result()
        assert await engine.schedules.delete("a")
        assert not await engine.schedules.delete("a")
        assert await engine.schedules.list() == []
        assert await engine.runs(workflow=schedule.SCHEDULE) == [], "nothing is left of it"
        assert await handle.result() == "all"
        assert await engine.schedules.put("a", report, "other", cron=NEVER)
        assert await (await engine.schedules.trigger("a")).result() == "other"
        # Cancelled as a run, which is how it would be left by a crash in the middle of a deletion.
        await engine.cancel("wf:keiro.schedule-a")
        assert await engine.schedules.list() == []
        with pytest.raises(keiro.RunNotFound):
            await engine.schedules.trigger("a")
        assert await engine.schedules.put("a", report, "third", cron=NEVER)
        assert await (await engine.schedules.trigger("a")).result() == "third"


async def test_many_programs_put_the_same_schedule_as_they_start(make_engine: MakeEngine) -> None:
    async with make_engine(report) as one, make_engine(report) as two, make_engine(report, worker=False) as client:
        done = await asyncio.gather(
            *(engine.schedules.put("a", report, cron=NEVER) for engine in (one, two, client) * 3)
        )
        assert any(done)
        assert [row.name for row in await client.schedules.list()] == ["a"]
        assert not await two.schedules.put("a", report, cron=NEVER)
        await one.cancel("wf:keiro.schedule-a")
        await asyncio.gather(*(engine.schedules.put("a", report, cron=NEVER) for engine in (one, two, client) * 3))
        assert [row.name for row in await client.schedules.list()] == ["a"]


async def test_a_worker_without_the_code_of_the_target_starts_it_with_the_right_input(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """SC-9."""

    @keiro.workflow(version="7")
    async def elsewhere(run: keiro.WorkflowRun, day: datetime, *, to: str, many: list[int], **more: Any) -> Any:
        return [day.isoformat(), to, many, more]

    async with make_engine(elsewhere, worker=False) as client:
        await client.schedules.put(
            "a", elsewhere, keiro.TICK, to="ada", many=[1, 2], other=keiro.TICK, cron=EVERY_SECOND, zone="Asia/Kolkata"
        )
    async with make_engine(report) as engine:
        while not (runs := await started(engine, "elsewhere")):
            await asyncio.sleep(0.02)
        await engine.schedules.delete("a")
        row = await engine.handle(f"wf:elsewhere-{runs[0]}").run()
        assert (row.status, row.version_tag) == ("pending", "7")
        worker = engine._worker
        assert worker is not None
        await worker.report_unregistered()
        assert "elsewhere" in caplog.text and "keiro.schedule" not in caplog.text
    async with make_engine(elsewhere) as engine:
        day, to, many, more = await engine.handle(f"wf:elsewhere-{runs[0]}").result()
        tick = datetime.strptime(runs[0], "a-%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
        assert day == tick.astimezone(ZoneInfo("Asia/Kolkata")).isoformat()
        assert (to, many, datetime.fromisoformat(more["other"])) == ("ada", [1, 2], tick)


async def test_a_clients_schedule_waits_for_a_worker_and_is_changed_meanwhile(make_engine: MakeEngine) -> None:
    """No worker is up: what is commanded is durable all the same, and seen."""
    async with make_engine(report, worker=False) as client:
        await client.schedules.put("a", report, "ada", cron=NEVER)
        await client.schedules.pause("a")
        handle = await client.schedules.trigger("a")
        assert [row.paused for row in await client.schedules.list()] == [True]
        assert await handle.status() == "pending"
    async with make_engine(report) as engine:
        assert await engine.handle(handle.run_id).result() == "ada"
        assert [row.paused for row in await engine.schedules.list()] == [True]


# Rounds, on all three stores


async def test_a_command_that_comes_while_a_round_ends_is_not_lost(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SC-4: It stands in the round that ends, after the last thing its body has seen."""
    monkeypatch.setattr(schedule, "ROUND", 2)
    async with make_engine(report) as engine, make_engine(report, worker=False) as client:
        submit = engine.store.submit
        told: list[int] = []

        async def late(command: Any) -> Any:
            await client.schedules.pause("a")
            await client.schedules.put("a", report, "late", cron="0 12 * * *")
            told.append(await client.command("wf:keiro.schedule-a", ScheduleRun.trigger, "a-trigger-late", 1_000))
            return await submit(command)

        def held(command: Any) -> Any:
            if isinstance(command, Rotate) and not told:
                told.append(0)
                return asyncio.ensure_future(late(command))
            return submit(command)

        engine.store.submit = held  # type: ignore[method-assign]
        await engine.schedules.put("a", report, "early", cron=NEVER)
        await engine.schedules.trigger("a")
        assert await until_started(engine, "wf:report-a-trigger-late") == "late"
        [row] = await client.schedules.list()
        assert (row.paused, row.cron) == (True, "0 12 * * *")
        assert (await client.handle("wf:keiro.schedule-a").run()).round_ordinal >= 1


@pytest.mark.parametrize("pauses", [False, True])
async def test_between_two_rounds_it_is_seen_whole_and_can_be_commanded(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, pauses: bool
) -> None:
    """The process dies when the new round has begun and knows nothing yet of the one before."""
    monkeypatch.setattr(schedule, "ROUND", 3)
    closed, reached = Schedules.closed, asyncio.Event()
    async with make_engine(report) as dying, make_engine(report, worker=False) as client:

        async def stuck(self: Schedules, run_id: str) -> Any:
            if self._engine is dying:
                reached.set()
                await asyncio.Event().wait()
            return await closed(self, run_id)

        monkeypatch.setattr(Schedules, "closed", stuck)
        await client.schedules.put("a", report, "ada", cron="0 3 * * *")
        handle = await client.schedules.trigger("a")
        while not reached.is_set() and (await client.schedules.list())[0].last_run_id != handle.run_id:
            await asyncio.sleep(0.005)
        while not reached.is_set():
            await client.schedules.pause("a")
            await asyncio.sleep(0.01)
            if not reached.is_set():
                await client.schedules.resume("a")
        await dying.close(grace=0)
    async with make_engine(report, worker=False) as client:
        run = await client.handle("wf:keiro.schedule-a").run()
        assert run.round_ordinal == 1
        [row] = await client.schedules.list()
        assert (row.cron, row.last_run_id) == ("0 3 * * *", handle.run_id)
        assert not await client.schedules.put("a", report, "ada", cron="0 3 * * *")
        assert await client.schedules.put("a", report, "ada", cron="0 4 * * *")
        if pauses:
            await client.schedules.pause("a")
        else:
            await client.schedules.resume("a")
        [before] = await client.schedules.list()
        assert (before.cron, before.paused, before.last_run_id) == ("0 4 * * *", pauses, handle.run_id)
        assert (before.next_at is None) == pauses
    async with make_engine(report) as engine:
        await parked(engine.handle("wf:keiro.schedule-a"))
        assert await engine.schedules.list() == [before]
        assert await engine.schedules.resume("a") == pauses
        [row] = await engine.schedules.list()
        assert row.next_at is not None and row.next_at.hour == 4


@pytest.mark.usefixtures("parks_at_once")
async def test_every_round_replays(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strictly, after each parking, and by the replayer from its journal."""
    monkeypatch.setattr(schedule, "ROUND", 3)
    async with make_engine(report, strict=True) as engine:
        await engine.schedules.put("a", report, cron=EVERY_SECOND)
        await engine.schedules.trigger("a")
        await until(lambda: len(set(keys())) >= 3)
        await engine.schedules.pause("a")
        await parked(engine.handle("wf:keiro.schedule-a"))
        rounds = await engine.runs(workflow=schedule.SCHEDULE)
        assert len(rounds) >= 2
        for run in rounds:
            assert run.failure_json is None
            stored = (await engine.store.history([run.run_key]))[run.run_key]
            (await replay_stored(stored, workflow_of(ScheduleRun))).check()


async def test_while_it_waits_nothing_is_asked_of_the_store(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SC-5: twenty schedules cost what none costs, the renewal of the lease and the slow look that is the net of all
    waits; here it is slower than the test."""
    monkeypatch.setattr("keiro.worker.SAFETY_POLL_S", 3600.0)
    async with make_engine(report) as engine:
        for n in range(20):
            await engine.schedules.put(f"s{n}", report, cron=NEVER)
        for n in range(20):
            await parked(engine.handle(f"wf:keiro.schedule-s{n}"))
        while engine._resident:
            await asyncio.sleep(0.01)
        asked: list[str] = []

        def counted(name: str, real: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                asked.append(name)
                return real(*args, **kwargs)

            return call

        names = ["submit", "run", "head", "runs", "history", "claim", "due", "next_due_ms", "unregistered"]
        names += ["release", "owned", "newest", "ended", "read"]
        for name in names:
            setattr(engine.store, name, counted(name, getattr(engine.store, name)))
        await asyncio.sleep(1.2)  # less than the lease is renewed after
        assert asked == []
        await engine.schedules.trigger("s0")
        assert "submit" in asked


# Time that skips, where the clock is not a server's


@pytest.fixture(params=["memory", "sqlite"])
def skipping_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://{tmp_path}" if request.param == "memory" else f"sqlite:///{tmp_path}/keiro.db"


At = Callable[..., Any]


@pytest.fixture
def at(skipping_url: str) -> At:
    """An engine whose clock begins at a time in UTC; opened again, at another."""

    @asynccontextmanager
    async def opened(start: str, *workflows: Any) -> AsyncIterator[tuple[keiro.Engine, SkippingClock]]:
        async with keiro.Engine(skipping_url, workflows=workflows or (report,), worker=False) as client:
            # The clock is set before a worker looks at what is due by it.
            client.store.now_ms = lambda: 0  # type: ignore[method-assign]
        engine = keiro.Engine(skipping_url, workflows=workflows or (report,), strict=True)
        begins = datetime.fromisoformat(start).replace(tzinfo=UTC)
        engine.store.now_ms = lambda: round(begins.timestamp() * 1000)  # type: ignore[method-assign]
        async with engine:
            yield engine, SkippingClock(engine, start=begins)

    return opened


async def test_it_ticks_on_the_wall_clock_of_its_zone(at: At) -> None:
    async with at("2026-10-23T12:00") as (engine, clock):
        await engine.schedules.put("a", report, "all", keiro.TICK, cron="0 8 * * *", zone=BERLIN)
        await clock.advance(timedelta(days=4))
    assert seen == [
        (f"a-202610{day}T0{hour}0000Z", datetime(2026, 10, day, hour, tzinfo=UTC))
        for day, hour in ((24, 6), (25, 7), (26, 7), (27, 7))
    ]
    assert {at.astimezone(ZoneInfo(BERLIN)).hour for _, at in seen} == {8}


async def test_the_hour_that_spring_leaves_out_and_the_one_that_autumn_repeats(at: At) -> None:
    async with at("2026-03-28T12:00") as (engine, clock):
        await engine.schedules.put("a", report, cron="30 2 * * *", zone=BERLIN)
        await engine.schedules.put("b", report, cron="30 2 * * *", zone="America/New_York")
        await clock.advance(timedelta(days=2))
        assert [key for key in keys() if key[0] == "a"] == ["a-20260329T010000Z", "a-20260330T003000Z"]
    seen.clear()
    async with at("2026-10-24T12:00") as (engine, clock):
        await clock.advance(timedelta(days=2))
        assert [key for key in keys() if key[0] == "a"] == ["a-20261025T003000Z", "a-20261026T013000Z"]
    seen.clear()
    async with at("2027-03-13T12:00") as (engine, clock):
        await clock.advance(timedelta(days=2))
        assert [key for key in keys() if key[0] == "b"] == ["b-20270314T070000Z", "b-20270315T063000Z"]


async def test_ticks_that_were_missed_are_left_out(at: At) -> None:
    """SC-7."""
    async with at("2026-12-01T07:30") as (engine, _):
        await engine.schedules.put("a", report, cron="0 * * * *")
        await parked(engine.handle("wf:keiro.schedule-a"))
    async with at("2026-12-01T11:01:01") as (engine, clock):
        await clock.advance(3600)
        assert keys() == ["a-20261201T120000Z"]
        [row] = await engine.schedules.list()
        assert row.next_at == datetime(2026, 12, 1, 13, tzinfo=UTC)


async def test_a_tick_that_is_late_by_less_than_a_minute_is_not_missed(at: At) -> None:
    """A restart around a tick costs nothing: the newest tick runs, those before it do not."""
    async with at("2026-12-01T07:30") as (engine, _):
        await engine.schedules.put("a", report, cron="0 * * * *")
        await parked(engine.handle("wf:keiro.schedule-a"))
    async with at("2026-12-01T11:00:59") as (engine, clock):
        await clock.advance(1)
        assert keys() == ["a-20261201T110000Z"]
        assert (await engine.schedules.list())[0].last_at == datetime(2026, 12, 1, 11, tzinfo=UTC)


async def test_a_backfill_makes_up_for_all_that_were_missed_up_to_a_bound(at: At) -> None:
    async with at("2026-12-01T07:30") as (engine, _):
        await engine.schedules.put("a", report, cron="0 * * * *", backfill=True, overlap="allow")
        await engine.schedules.put("b", report, cron="* * * * *", backfill=True, overlap="allow")
        for name in "ab":
            await parked(engine.handle(f"wf:keiro.schedule-{name}"))
    async with at("2026-12-02T07:30:30") as (engine, clock):
        await clock.advance(1)
        hours = [f"a-{datetime(2026, 12, 1, 8, tzinfo=UTC) + timedelta(hours=n):%Y%m%dT%H}0000Z" for n in range(24)]
        assert sorted(key for key in keys() if key[0] == "a") == hours
        minutes = sorted(key for key in keys() if key[0] == "b")
        assert len(minutes) == len(set(minutes)) == schedule.MOST
        assert minutes[-1] == "b-20261202T073000Z", "the newest of 1440"


async def test_skip_leaves_ticks_out_while_a_run_of_the_schedule_goes_on(at: At) -> None:
    """SC-8."""
    async with at("2026-12-01T07:30", long_report) as (engine, clock):
        await engine.schedules.put("a", long_report, cron="0 * * * *")
        await engine.schedules.put("b", long_report, cron="0 * * * *", overlap="allow")
        await clock.advance(3 * 3600)
        assert [key for key in keys() if key[0] == "b"] == [f"b-20261201T{h}0000Z" for h in ("08", "09", "10")]
        assert {key for key in keys() if key[0] == "a"} == {"a-20261201T080000Z"}
        await engine.complete("wf:long_report-a-20261201T080000Z", "done")
        await engine.handle("wf:long_report-a-20261201T080000Z").result()
        await clock.advance(3600)
        assert {key for key in keys() if key[0] == "a"} == {"a-20261201T080000Z", "a-20261201T110000Z"}
        # A triggered run counts too, and starts although one goes on.
        triggered = await engine.schedules.trigger("a")
        await engine.complete("wf:long_report-a-20261201T110000Z", "done")
        await clock.advance(3600)
        assert "a-20261201T120000Z" not in keys()
        await engine.complete(triggered.run_id, "done")
        await clock.advance(3600)
        assert "a-20261201T130000Z" in keys()


async def test_a_backfill_under_skip_starts_the_newest_only(at: At) -> None:
    async with at("2026-12-01T07:30", long_report) as (engine, _):
        await engine.schedules.put("a", long_report, cron="0 * * * *", backfill=True)
        await parked(engine.handle("wf:keiro.schedule-a"))
    async with at("2026-12-01T11:30", long_report) as (engine, clock):
        await clock.advance(1)
        assert set(keys()) == {"a-20261201T110000Z"}


async def test_a_run_that_fails_stops_nothing(at: At) -> None:
    async with at("2026-12-01T07:30", broken_report) as (engine, clock):
        await engine.schedules.put("a", broken_report, cron="0 * * * *")
        await clock.advance(3 * 3600)
        assert keys() == [f"a-20261201T{h}0000Z" for h in ("08", "09", "10")]
        assert {run.status for run in await engine.runs(workflow="broken_report")} == {"failed"}


async def test_a_clock_that_is_put_back_runs_no_tick_again(at: At) -> None:
    async with at("2026-12-01T07:30") as (engine, clock):
        await engine.schedules.put("a", report, cron="0 * * * *")
        await clock.advance(3600)
    async with at("2026-12-01T06:00") as (engine, clock):
        await clock.advance(2.5 * 3600)
        assert keys() == ["a-20261201T080000Z"]
    async with at("2026-12-01T06:00") as (engine, clock):
        # What is decided anew by that clock is not before the last tick either.
        await engine.schedules.pause("a")
        await engine.schedules.resume("a")
        await engine.schedules.put("a", report, cron="*/30 * * * *")
        await clock.advance(3 * 3600)
        assert keys() == ["a-20261201T080000Z", "a-20261201T083000Z", "a-20261201T090000Z"]
        assert len(await engine.runs(workflow="report")) == 3


async def test_ticks_of_a_pause_are_not_made_up_for(at: At) -> None:
    async with at("2026-12-01T07:30") as (engine, clock):
        await engine.schedules.put("a", report, cron="0 * * * *", backfill=True, overlap="allow")
        await engine.schedules.pause("a")
        await clock.advance(5 * 3600)
        await engine.schedules.resume("a")
        await clock.advance(3600)
        assert keys() == ["a-20261201T130000Z"]


async def test_a_change_takes_back_the_next_tick_of_the_old_definition(at: At) -> None:
    async with at("2026-12-01T07:30") as (engine, clock):
        await engine.schedules.put("a", report, "old", cron="0 8 * * *")
        await engine.schedules.put("a", report, "new", cron="15 9 * * *")
        await clock.advance(timedelta(days=1))
        assert keys() == ["a-20261201T091500Z"]


async def test_a_change_that_comes_while_a_tick_is_dealt_with_counts_for_the_next_one(
    at: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tick was decided on before, and must not bring back what was next then."""
    tick, changed = Schedules.tick, []

    async def changing(self: Schedules, *args: Any) -> Any:
        found = await tick(self, *args)
        if not changed:
            changed.append(await self.put("a", report, "new", cron="15 8 * * *"))
        return found

    monkeypatch.setattr(Schedules, "tick", changing)
    async with at("2026-12-01T07:30") as (engine, clock):
        await engine.schedules.put("a", report, "old", cron="0 * * * *")
        await clock.advance(3600)
        assert keys() == ["a-20261201T080000Z", "a-20261201T081500Z"]
        assert await engine.handle("wf:report-a-20261201T081500Z").result() == "new"


async def test_a_worker_without_zone_data_does_not_end_the_schedule(at: At, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tick is tried again, there or by another worker, and told of meanwhile."""
    real = schedule.cron_of

    def missing(expression: str, zone: str) -> Any:
        raise keiro.InvalidCall(f"no zone {zone}")

    async with at("2026-12-01T07:30") as (engine, clock):
        await engine.schedules.put("a", report, cron="0 8 * * *", zone=BERLIN)
        await clock.advance(timedelta(hours=23))
        monkeypatch.setattr(schedule, "cron_of", missing)
        await clock.advance(timedelta(hours=2))
        assert keys() == []
        monkeypatch.setattr(schedule, "cron_of", real)
        await clock.advance(120)
        assert keys() == ["a-20261202T070000Z"], "late, but its clock was fired in time"


async def test_the_journal_of_a_schedule_is_cut_into_rounds(at: At) -> None:
    async with at("2026-12-01T07:30") as (engine, clock):
        await engine.schedules.put("a", report, cron="0 * * * *")
        await clock.advance(timedelta(hours=2 * schedule.ROUND + 10))
        rounds = await engine.runs(workflow=schedule.SCHEDULE)
        assert [run.round_ordinal for run in rounds] == [2, 1, 0]
        for run in rounds:
            events = (await engine.store.history([run.run_key]))[run.run_key]
            assert len(events) < 8 * schedule.ROUND
            assert sum(event.topic == StepRecorded.TOPIC for event in events) < 4 * schedule.ROUND
        assert len(keys()) == len(set(keys())) == 2 * schedule.ROUND + 10


# Beside what else is done to all runs


async def test_retention_and_the_doctor_leave_a_schedule_alone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first rounds have ended, but it has not; what it started may go."""
    monkeypatch.setattr(schedule, "ROUND", 2)
    async with make_engine(report) as engine:
        await engine.schedules.put("a", report, cron="0 3 * * *")
        for n in range(3):
            await (await engine.schedules.trigger("a", id=str(n))).result()
        while (row := (await engine.schedules.list())[0]).last_run_id != "wf:report-a-trigger-2":
            await asyncio.sleep(0.005)
        await parked(engine.handle("wf:keiro.schedule-a"))
        assert await engine.reconcile() == []
        collected = (await engine.gc(older_than=0)).collected
        assert sorted(collected) == [f"wf:report-a-trigger-{n}" for n in range(3)]
        assert await engine.schedules.list() == [row]
        assert await (await engine.schedules.trigger("a")).result() == "all"


async def test_a_schedule_that_has_ticked_for_long_has_few_rows_after_a_collection(at: At) -> None:
    """U22: collected now and then while it ticks, it never has many; it ticks on, and can be changed and deleted."""
    async with at("2026-12-01T07:30") as (engine, clock):
        await engine.schedules.put("a", report, cron="* * * * *")
        most = 0
        for part in range(1, 5):
            await clock.advance(timedelta(minutes=500))
            await engine.gc(older_than=0)
            rows = rows_left(engine)
            most = max(most, sum(rows.values()))
            rounds = await engine.runs(workflow=schedule.SCHEDULE)
            last = rounds[0].round_ordinal
            assert last == 500 * part // schedule.ROUND
            assert [run.round_ordinal for run in rounds] == [last, last - 1, 0]
        assert len(set(keys())) == 2000
        assert most < 3 * 8 * schedule.ROUND
        assert await engine.reconcile() == []
        assert (await engine.rebuild("runs")).differences == 0

        assert await engine.schedules.pause("a")
        [row] = await engine.schedules.list()
        assert (row.paused, row.last_run_id) == (True, f"wf:report-{keys()[-1]}")
        assert await engine.schedules.resume("a")
        await clock.advance(timedelta(minutes=1))
        assert len(keys()) == 2001
        assert await engine.schedules.delete("a")
        await engine.gc(older_than=0)
        assert rows_left(engine) == {}


async def test_a_schedule_of_many_rounds_is_deleted(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its old rounds a few at a time, then the rest; the name is free."""
    monkeypatch.setattr(schedule, "ROUND", 1)
    monkeypatch.setattr("keiro.decisions.MOST_ROUNDS", 4)
    async with make_engine(report) as engine:
        await engine.schedules.put("a", report, cron=NEVER)
        for n in range(12):
            await (await engine.schedules.trigger("a", id=str(n))).result()
        await until_rounds(engine, 12)
        assert await engine.schedules.delete("a")
        assert await engine.runs(workflow=schedule.SCHEDULE) == []
        assert await engine.schedules.put("a", report, cron=NEVER)


async def until_rounds(engine: keiro.Engine, ordinal: int) -> None:
    while (await engine.handle(f"wf:{schedule.SCHEDULE}-a").run()).round_ordinal < ordinal:
        await asyncio.sleep(0.005)


async def test_a_look_at_schedules_that_are_deleted_and_put_meanwhile(make_engine: MakeEngine) -> None:
    """It finds what is there, and nothing in place of what is gone between two of its statements."""
    async with make_engine(report) as engine, make_engine(report, worker=False) as client:

        async def churn() -> None:
            for _ in range(10):
                await engine.schedules.put("a", report, cron=NEVER)
                await engine.schedules.delete("a")

        churning = asyncio.ensure_future(churn())
        while not churning.done():
            assert {row.name for row in await client.schedules.list()} <= {"a"}
            await asyncio.sleep(0)
        await churning
        assert await client.schedules.list() == []
