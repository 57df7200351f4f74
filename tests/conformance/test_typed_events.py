"""Typed events for consumers: list M of the store's reference."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from msgspec import Raw
from msgspec.structs import replace

import keiro
from keiro import typed_events as typed
from keiro.events import Event, OpaqueEvent, StepRecorded, WorkflowStarted, placed
from keiro.feed import JournalEntry
from tests.conftest import MakeEngine

ROOT = typed.Lineage(kind="root", run_id="wf:a-1", lineage_id="wf:a-1", root_run_id="wf:a-1")
CONSUMER = typed.Consumer(ROOT)
DONE = typed.AttemptLifecycle(
    state="succeeded", started_at_ms=5, finished_at_ms=9, result=typed.Success(value=Raw(b"1"))
)
LOST = typed.Failure(reason="error", detail=Raw(b'"lost"'))


def payload(lifecycle: typed.AttemptLifecycle = DONE, **changes: Any) -> typed.AttemptPayload:
    values = {"lineage": ROOT, "execution_id": "wf:a-1", "step_key_digest": "0" * 64, "attempt": 1, **changes}
    return typed.AttemptPayload(lifecycle=lifecycle, **values)


def entry(event: Event, run_id: str = "wf:a-1", version: int = 2) -> JournalEntry:
    return JournalEntry(7, placed(event, run_id, version, 1_700_000_000_000))


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "root", "run_id": "wf:a-1", "root_run_id": "wf:a-2"},
        {"kind": "root", "run_id": "wf:a-1", "root_run_id": "wf:a-1", "round": 1},
        {"kind": "root", "run_id": "wf:a-1", "root_run_id": "wf:a-1", "parent_run_id": "wf:b-1"},
        {"kind": "child", "run_id": "wf:a-1", "root_run_id": "wf:a-1"},
        {"kind": "child", "run_id": "wf:a-1", "root_run_id": "wf:a-1", "parent_run_id": "wf:a-1"},
        {"kind": "child", "run_id": "wf:a-1", "root_run_id": "wf:a-1", "parent_run_id": "wf:b-1", "round": 1},
        {"kind": "continuation", "run_id": "wf:a-1#1", "root_run_id": "wf:a-1", "parent_run_id": "wf:a-1"},
        {"kind": "continuation", "run_id": "wf:a-1", "root_run_id": "wf:a-1", "parent_run_id": "wf:a-2", "round": 1},
    ],
)
def test_m1_a_lineage_holds_together(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"root|derived|continuation|child"):
        typed.Lineage(lineage_id="wf:a-1", **wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"state": "running", "finished_at_ms": 9},
        {"state": "suspended", "result": DONE.result},
        {"state": "succeeded", "result": DONE.result},
        {"state": "succeeded", "finished_at_ms": 9},
        {"state": "succeeded", "finished_at_ms": 9, "result": LOST},
        {"state": "failed", "finished_at_ms": 9, "result": DONE.result},
        {"state": "failed", "finished_at_ms": 9, "result": LOST, "heartbeat_at_ms": 7},
        {"state": "running", "heartbeat_at_ms": -1},
        {"state": "running", "heartbeat_at_ms": 2**53},
    ],
)
def test_m2_an_end_comes_with_its_result_and_with_an_end_alone(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"end|result|heartbeat"):
        typed.AttemptLifecycle(started_at_ms=5, **wrong)


def test_m3_a_suspended_run_waits_for_something() -> None:
    with pytest.raises(ValueError, match="waits for something"):
        typed.ExecutionLifecycle(state="suspended")
    for wrong in ({"state": "running", "result": LOST}, {"state": "completed"}):
        with pytest.raises(ValueError, match="has ended"):
            typed.ExecutionLifecycle(**wrong)  # type: ignore[arg-type]


def test_m4_the_execution_is_the_run_of_the_lineage() -> None:
    with pytest.raises(ValueError, match="execution_id"):
        payload(execution_id="wf:a-2")
    with pytest.raises(ValueError, match="execution_id"):
        typed.StatePayload(
            lineage=ROOT,
            execution_id="wf:a-2",
            event=typed.Execution(lifecycle=typed.ExecutionLifecycle(state="running")),
        )


def test_m5_fields_that_are_not_known_are_refused() -> None:
    with pytest.raises(TypeError):
        payload(colour="red")
    data = msgspec.json.decode(typed.encode_payload(payload()))
    for where in (data, data["lifecycle"], data["lineage"]):
        where["colour"] = "red"
        with pytest.raises(typed.EventError) as raised:
            typed.decode_payload(typed.ATTEMPT_EVENT_TYPE, msgspec.json.encode(data), CONSUMER)
        assert raised.value.code == "malformed"
        del where["colour"]
    assert typed.decode_payload(typed.ATTEMPT_EVENT_TYPE, msgspec.json.encode(data), CONSUMER) == payload()


def test_what_was_made_can_be_decoded_again() -> None:
    waits = (typed.DeferredWait(wait_id="awk:d"), typed.ClockWait(wait_id="sleep:s", due_at_ms=9))
    of_run = [
        typed.Execution(lifecycle=typed.ExecutionLifecycle(state="suspended", waits=waits)),
        typed.Execution(lifecycle=typed.ExecutionLifecycle(state="completed", result=LOST)),
        typed.DeferredCompleted(wait_id="awk:d", result=typed.Success(value=Raw(b"[1]"))),
        typed.ClockScheduled(clock_id="sleep:s", wait_id="sleep:s", due_at_ms=9),
    ]
    for event in of_run:
        made = typed.StatePayload(lineage=ROOT, execution_id="wf:a-1", event=event)
        assert typed.decode_payload(typed.STATE_EVENT_TYPE, typed.encode_payload(made), CONSUMER) == made
    # M10: a clock that was set back.
    early = typed.AttemptLifecycle(state="failed", started_at_ms=9, finished_at_ms=5, result=LOST)
    made_of_attempt = payload(early)
    data = typed.encode_payload(made_of_attempt)
    assert typed.decode_payload(typed.ATTEMPT_EVENT_TYPE, data, CONSUMER) == made_of_attempt


def test_m6_what_is_of_another_run_or_lineage_is_foreign() -> None:
    with pytest.raises(typed.EventError, match="wf:a-2") as raised:
        typed.decode(entry(StepRecorded(step="s", result=Raw(b"1")), "wf:a-2"), CONSUMER)
    assert raised.value.code == "foreign"
    child = WorkflowStarted(workflow="a", key="1", input=Raw(b"{}"), parent="wf:b-1")
    with pytest.raises(typed.EventError) as raised:
        typed.decode(entry(child, version=1), CONSUMER)
    assert raised.value.code == "foreign"
    # M9: the payload says of which lineage it is, and nothing beside it changes that.
    other = replace(payload(), lineage=replace(ROOT, lineage_id="wf:a-9"))
    with pytest.raises(typed.EventError) as raised:
        typed.decode_payload(typed.ATTEMPT_EVENT_TYPE, typed.encode_payload(other), CONSUMER)
    assert raised.value.code == "foreign"


def test_m7_what_is_not_known_of_the_engine_is_unsupported_and_other_things_are_as_the_consumer_says() -> None:
    newer = entry(OpaqueEvent(topic="RunTeleported", data=Raw(b"{}")))
    with pytest.raises(typed.EventError) as raised:
        typed.decode(newer, replace(CONSUMER, unknown="surface"))
    assert raised.value.code == "unsupported"
    command = entry(OpaqueEvent(topic="basket:ItemAdded", data=Raw(b"{}")))
    assert typed.decode(command, CONSUMER) == typed.Ignored(command)
    assert typed.decode(command, replace(CONSUMER, unknown="surface")) == typed.Unknown(command)
    for event_type, code in (("keiro.engine.v3.x", "unsupported"), ("other", "malformed")):
        with pytest.raises(typed.EventError) as raised:
            typed.decode_payload(event_type, b"{}", CONSUMER)
        assert raised.value.code == code


def test_m8_another_version_is_malformed() -> None:
    data = msgspec.json.decode(typed.encode_payload(payload()))
    data["version"] = 1
    with pytest.raises(typed.EventError) as raised:
        typed.decode_payload(typed.ATTEMPT_EVENT_TYPE, msgspec.json.encode(data), CONSUMER)
    assert raised.value.code == "malformed"
    with pytest.raises(typed.EventError) as raised:
        typed.decode(JournalEntry(1, placed(StepRecorded(step="s", result=Raw(b"1")), "nonsense", 1, 1)), CONSUMER)
    assert raised.value.code == "malformed"


def test_an_attempt_that_has_ended_begins_no_more() -> None:
    running = typed.AttemptLifecycle(state="running", started_at_ms=5)
    typed.follows(None, running)
    typed.follows(running, DONE)
    typed.follows(DONE, DONE)
    with pytest.raises(typed.EventError) as raised:
        typed.follows(DONE, running)
    assert raised.value.code == "transition"


@keiro.step(tier="irreversible")
async def launch() -> str:
    keiro.heartbeat(1)
    return "up"


@keiro.step
async def breaks() -> None:
    raise ValueError("lost")


@keiro.workflow
async def voyage(run: keiro.WorkflowRun, rounds: int) -> str:
    if rounds:
        run.continue_as_new(rounds - 1)
    await run.step(launch)
    try:
        await run.step(breaks)
    except ValueError:
        await run.sleep(0.001)
    return str(await run.deferred("port", str).result(timeout=60))


@keiro.workflow
async def above(run: keiro.WorkflowRun) -> str:
    return str(await run.call(voyage, 1, id="below"))


async def test_the_journal_of_a_run_is_presented_whole(make_engine: MakeEngine, parks_at_once: None) -> None:
    async with make_engine(voyage, above) as engine:
        handle = await engine.start(above, id="a")
        while await engine.store.run("wf:voyage-below#1") is None:
            await asyncio.sleep(0.002)
        while (await engine.handle("wf:voyage-below#1").run()).waiting_token != "awk:port":
            await asyncio.sleep(0.002)
        await engine.complete("wf:voyage-below", "port", "Oslo")
        assert await handle.result() == "Oslo"

        found: dict[str, list[Any]] = {}
        consumers: dict[str, typed.Consumer] = {}
        async for one in engine.events.follow(live=False):
            if isinstance(one.event, WorkflowStarted):
                consumers[one.run_id] = typed.Consumer.of(one.event)
            event = typed.decode(one, consumers[one.run_id])
            if isinstance(event, typed.TypedEvent):
                found.setdefault(one.run_id, []).append(event.payload)
                assert (
                    typed.decode_payload(event.event_type, typed.encode_payload(event.payload), consumers[one.run_id])
                    == event.payload
                )
        kinds = {name: consumer.lineage.kind for name, consumer in consumers.items()}
        assert kinds == {"wf:above-a": "root", "wf:voyage-below": "child", "wf:voyage-below#1": "continuation"}
        seen = found["wf:voyage-below#1"]
        attempts = [(one.step_key_digest, one.lifecycle.state) for one in seen if isinstance(one, typed.AttemptPayload)]
        assert (typed.step_key_digest("launch"), "running") in attempts
        assert (typed.step_key_digest("launch"), "succeeded") in attempts
        assert (typed.step_key_digest("breaks"), "failed") in attempts
        states = [one.event for one in seen if isinstance(one, typed.StatePayload)]
        (port,) = [one for one in states if isinstance(one, typed.DeferredCompleted)]
        assert (port.wait_id, bytes(port.result.value)) == ("awk:port", b'"Oslo"')  # type: ignore[union-attr]
        assert {one.clock_id for one in states if isinstance(one, typed.ClockScheduled)} == {
            "sleep:sleep", "timeout:awk:port",
        }  # fmt: skip
        runs = [one.lifecycle for one in states if isinstance(one, typed.Execution)]
        assert runs[0].state == "running" and runs[-1].state == "completed"
        assert any(one.state == "suspended" and one.waits for one in runs)
