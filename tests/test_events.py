"""Events as the journal stores them: what is in the JSON, what comes back, and which ids they get."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from keiro.errors import DecodeFailed, InvalidCall
from keiro.events import (
    ENGINE_EVENTS,
    AttemptFailed,
    AttemptProgressed,
    AttemptStarted,
    Event,
    OpaqueEvent,
    RunLinked,
    RunUnlinked,
    StateChanged,
    StepRecorded,
    StepRetracted,
    Wait,
    WorkflowCancelled,
    WorkflowCompleted,
    WorkflowFailed,
    WorkflowResurrected,
    WorkflowRetried,
    WorkflowStarted,
    blank,
    ms_of,
    placed,
    time_of,
)
from keiro.failures import Failure
from keiro.identity import StepIds, sleep_id
from keiro.library import DomainEventProtocol, StoredEvent
from keiro.mapper import EventMapper, JournalEvent, JournalMapper

RUN = "wf:orders-7"
AT_MS = 1_700_000_000_123
DIGEST = "0f0f0f0f0f0f0f0f"

FAILURE = Failure(type="builtins:ValueError", message="no stock", args=("no stock",), notes=("of sku-1",))
EXAMPLES: list[Event] = [
    WorkflowStarted(workflow="orders", key="7", input=Raw(b'{"order":{"id":1}}')),
    WorkflowStarted(
        workflow="orders",
        key="7",
        input=Raw(b"{}"),
        round=2,
        lineage="wf:orders-7",
        parent="wf:day-1",
        parent_seq=9,
        on_cancel="detach",
        deadline_at_ms=AT_MS,
        start_at_ms=AT_MS,
        attributes={"region": "eu", "n": [1, None]},
        version="v3",
        patches=("new-tax",),
    ),
    StepRecorded(step="charge", result=Raw(b'{"paid":true,"note":"\xc3\xa9"}')),
    StepRecorded(step="charge#2", result=Raw(b"null"), attempt=3, started_at_ms=AT_MS, inputs_digest=DIGEST),
    AttemptStarted(step="charge", attempt=1),
    AttemptStarted(step="charge", attempt=2, tier="compensable", idempotency_key="k", preimage=Raw(b'{"a":1}')),
    AttemptProgressed(step="charge", attempt=1, checkpoint=Raw(b"[7]")),
    AttemptFailed(step="charge", attempt=2, failure=FAILURE),
    AttemptFailed(
        step="charge",
        attempt=2,
        failure=FAILURE,
        next_attempt_at_ms=AT_MS,
        started_at_ms=AT_MS,
        inputs_digest=DIGEST,
    ),
    StateChanged(state="suspended", waits=(Wait("deferred", "awk:ok"), Wait("timeout", "timeout:awk:ok", AT_MS))),
    StateChanged(state="clock_scheduled", waits=(Wait("sleep", "sleep:sleep", AT_MS),)),
    StepRetracted(step="charge"),
    StepRetracted(step="charge", reason="the card was wrong"),
    StateChanged(state="cancel_requested", reason="too late", requested_at_ms=AT_MS),
    WorkflowResurrected(reason="mended"),
    RunLinked(child="wf:orders-7", parent="wf:day-2", seq=10),
    RunUnlinked(child="wf:orders-7", parent="wf:day-2"),
    WorkflowCompleted(result=Raw(b'"done"')),
    WorkflowCompleted(handoff="wf:orders-7#3"),
    WorkflowFailed(failure=FAILURE),
    WorkflowRetried(attempt=1, failure=FAILURE, next_attempt_at_ms=AT_MS),
    WorkflowCancelled(),
    WorkflowCancelled(reason="not needed"),
]
each_example = pytest.mark.parametrize(
    "event", EXAMPLES, ids=[f"{event.TOPIC}-{index}" for index, event in enumerate(EXAMPLES)]
)


@pytest.fixture
def mapper() -> EventMapper:
    return EventMapper()


def test_every_engine_event_has_an_example() -> None:
    assert {type(event) for event in EXAMPLES} == set(ENGINE_EVENTS.values())


@each_example
def test_an_engine_event_comes_back_from_its_stored_form(event: Event, mapper: EventMapper) -> None:
    """WF-11."""
    topic, payload = mapper.encode(event)

    read = mapper.decode(topic, payload, RUN, 5, AT_MS)

    assert topic == type(event).__name__
    assert read == placed(event, RUN, 5, AT_MS)
    assert blank(read) == event
    assert type(read) is type(event)


@each_example
def test_what_the_journal_has_in_columns_is_not_in_the_json(event: Event, mapper: EventMapper) -> None:
    stored = mapper.encode(placed(event, RUN, 5, AT_MS))

    fields = msgspec.json.decode(stored[1])

    assert stored == mapper.encode(event)
    assert not fields.keys() & {"originator_id", "originator_version", "timestamp", "topic"}


def test_the_plain_success_of_a_step_is_stored_as_little() -> None:
    event = StepRecorded(step="charge", result=Raw(b'{"paid":true}'))

    assert EventMapper().encode(event) == ("StepRecorded", '{"step":"charge","result":{"paid":true}}')


def test_fields_that_a_newer_version_added_are_passed_over(mapper: EventMapper) -> None:
    read = mapper.decode("StepRecorded", '{"step":"a","result":1,"colour":{"r":1}}', RUN, 2, AT_MS)

    assert blank(read) == StepRecorded(step="a", result=Raw(b"1"))


@pytest.mark.parametrize("topic", ["ClockScheduled", "nobody_knows:ItemAdded", ":", "a:b:c"])
def test_an_event_without_a_class_here_is_opaque_and_keeps_its_json(topic: str, mapper: EventMapper) -> None:
    payload = '{"sku":"x","deep":{"n":[1]}}'

    read = mapper.decode(topic, payload, RUN, 3, AT_MS)

    assert isinstance(read, OpaqueEvent)
    assert (read.topic, bytes(read.data).decode()) == (topic, payload)
    assert (read.originator_id, read.originator_version, read.timestamp) == (RUN, 3, time_of(AT_MS))
    assert mapper.encode(read) == (topic, payload)


@pytest.mark.parametrize("payload", ["", "{", "[]", "{}", '{"step":1,"result":2}', '{"step":"a"}'])
def test_json_that_does_not_fit_its_topic_names_the_event(payload: str, mapper: EventMapper) -> None:
    with pytest.raises(DecodeFailed, match=r"event 9 of wf:orders-7 \(StepRecorded\)") as caught:
        mapper.decode("StepRecorded", payload, RUN, 9, AT_MS)

    assert caught.value.where == "StepRecorded"


def test_an_event_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        EXAMPLES[0].originator_version = 2  # type: ignore[misc]


def test_events_satisfy_the_protocol_of_the_library() -> None:
    assert all(isinstance(event, DomainEventProtocol) for event in EXAMPLES)
    assert all(type(event).originator_id_type is str for event in EXAMPLES)


# The library's mapper


@each_example
def test_the_librarys_mapper_has_the_same_stored_form(event: Event, mapper: EventMapper) -> None:
    library = JournalMapper(mapper)
    event = placed(event, RUN, 5, AT_MS)

    stored = library.to_stored_event(event)

    assert (stored.topic, stored.state.decode()) == mapper.encode(event)
    assert (stored.originator_id, stored.originator_version, stored.recorded_at_ms) == (RUN, 5, AT_MS)
    assert library.to_domain_event(stored) == event


def test_the_librarys_mapper_reads_a_plain_stored_event(mapper: EventMapper) -> None:
    stored = StoredEvent(originator_id=RUN, originator_version=4, topic="WorkflowCancelled", state=b"{}")

    read = JournalMapper(mapper).to_domain_event(stored)

    assert read == WorkflowCancelled(originator_id=RUN, originator_version=4)
    assert not isinstance(stored, JournalEvent)


def test_the_librarys_mapper_refuses_foreign_events(mapper: EventMapper) -> None:
    class Foreign:
        originator_id = RUN
        originator_version = 1

    with pytest.raises(InvalidCall, match="not an event of a run"):
        JournalMapper(mapper).to_stored_event(Foreign())


# Times


@given(st.integers(0, 253_402_300_799_999))
def test_milliseconds_are_exact(ms: int) -> None:
    time = time_of(ms)

    assert time.tzinfo is UTC
    assert time.microsecond % 1000 == 0
    assert ms_of(time) == ms


def test_a_time_past_the_calendar_is_its_last_millisecond() -> None:
    assert time_of(2**53 - 1) == datetime(9999, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC)


def test_the_millisecond_of_a_time_is_the_one_it_lies_in() -> None:
    assert ms_of(datetime(1970, 1, 1, 0, 0, 1, 999_999, tzinfo=UTC)) == 1999


# Ids

GOLDEN: dict[str, str] = {
    "keiro:workflow:orderFulfillment:wf-1:0:charge-card": "1618b21a-5321-536f-998b-99f88f078148",
    "keiro:workflow:orderFulfillment:wf-1:1:charge-card": "ddbf5d19-df0d-50f7-9aa2-9c8214bfde00",
    "keiro:workflow:orderFulfillment:wf-1:0:__workflow_completed__": "5ac985e8-4168-5705-91bc-5523833d3f60",
    "keiro:workflow:orderFulfillment:wf-1:0:__workflow_cancelled__": "52493d94-d35a-5a7e-8ce9-40e1111c45f9",
    "keiro:workflow:orderFulfillment:wf-1:0:__workflow_failed__": "b7ed900d-0fac-54dd-87b1-a01f6782a298",
    "keiro:workflow:orderFulfillment:wf-1:0:__workflow_continued_as_new__": ("338f8962-ef47-5992-a4e0-c314358a2f05"),
    "keiro:workflow:orderFulfillment:wf-1:0:__workflow_seed__": "268c2031-b026-564a-be24-85cab59c3ce7",
    "keiro:workflow:orderFulfillment:wf-1:0:__workflow_patches__": "c188a7f9-617d-59e5-8e09-4498d7daf477",
    "keiro:workflow:orderFulfillment:wf-1:0:patch:new-tax": "64de4580-0a2d-522b-b397-e25c6ee3eacc",
    "keiro:workflow:orderFulfillment:wf-1:0:sleep:cool": "e3a009bd-f287-5331-9f72-8e273f0040cf",
    "keiro:workflow-sleep:orderFulfillment:wf-1:sleep:cool": "cfebe58e-b34c-5031-af98-18e71e6f4cfa",
    "keiro:workflow-sleep:orderFulfillment:wf-1:1:sleep:cool": "e9696450-3993-59da-902e-4e5ebcfd1ab0",
    "keiro:workflow-sleep:orderFulfillment:wf-1:2:sleep:cool": "6affc998-5cf2-51d0-9bbb-22e792581433",
}


def step_id(workflow: str, key: str, round: int, step: str) -> uuid.UUID:
    return uuid.UUID(bytes=StepIds(workflow, key, round)(step))


@pytest.mark.parametrize(("text", "expected"), GOLDEN.items())
def test_ids_are_those_of_every_process_before(text: str, expected: str) -> None:
    """WF-170."""
    kind, workflow, key, *rest = text.removeprefix("keiro:").split(":", 4 if ":workflow:" in text else 3)
    if kind == "workflow":
        found = step_id(workflow, key, int(rest[0]), rest[1])
    else:
        round, _, step = rest[0].partition(":") if rest[0][0].isdigit() else ("0", "", rest[0])
        found = sleep_id(workflow, key, int(round), step)

    assert str(found) == expected
    assert found.version == 5


def test_parts_that_read_alike_when_joined_have_different_ids() -> None:
    """WF-171: names and keys cannot hold the separators, so no two runs share the id of a step."""
    ids = [
        step_id("a", "b-c", 0, "s"),
        step_id("a.b", "c", 0, "s"),
        step_id("a", "b", 1, "s"),
        step_id("a", "b", 0, "1:s"),
        step_id("a", "b", 0, "s"),
        step_id("a", "b", 0, "s#1"),
    ]

    assert len(set(ids)) == len(ids)


def test_the_parts_of_an_id_are_positional() -> None:
    """WF-172."""
    assert step_id("one", "two", 0, "s") != step_id("two", "one", 0, "s")


@pytest.mark.parametrize(("left", "right"), [("caf\u00e9", "cafe"), ("\u0141", "A"), ("\u4e16", "\x16")])
def test_step_names_that_agree_modulo_256_have_different_ids(left: str, right: str) -> None:
    """F37: ids are made of UTF-8 bytes."""
    assert step_id("w", "k", 0, left) != step_id("w", "k", 0, right)
    assert step_id("w", "k", 0, left) == uuid.uuid5(uuid.NAMESPACE_URL, f"keiro:workflow:w:k:0:{left}")


@given(step=st.text(max_size=40).filter(lambda text: text.isprintable()), round=st.integers(0, 10**6))
def test_ids_are_plain_uuid5(step: str, round: int) -> None:
    text = f"keiro:workflow:orders:7:{round}:{step}"

    assert step_id("orders", "7", round, step) == uuid.uuid5(uuid.NAMESPACE_URL, text)
