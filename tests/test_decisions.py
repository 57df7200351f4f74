"""What each command does, asked of `decide` alone: a few dictionaries answer what a store would load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec import Raw
from msgspec.structs import replace

from keiro.decisions import (
    Above,
    Acted,
    AlreadyPresent,
    Append,
    Appended,
    Below,
    Cancel,
    Command,
    Completions,
    Cyclic,
    Decision,
    Deliver,
    EndedChildren,
    EndGrace,
    FenceLost,
    LastEdge,
    Links,
    Loaded,
    Need,
    Newest,
    Numbered,
    One,
    Refused,
    RefusedTerminal,
    Resurrect,
    Retract,
    Rotate,
    Spawn,
    Start,
    Stored,
    UnknownRun,
    VersionConflict,
    decide,
    new,
)
from keiro.events import (
    Event,
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
)
from keiro.failures import capture
from keiro.identity import StepIds, child_result_step, child_step, parse_run_id, run_id
from keiro.projections.run_parents import Edge, edge_of
from keiro.projections.waits import Spawned
from keiro.rows import Head, Run, Status

PARENT, CHILD, GRANDCHILD = "wf:order-p", "wf:ship-c", "wf:pack-g"
WORKER = 7
FAILURE = capture(ValueError("no"))


class Journal:
    """What runs, heads and events there are; it answers needs, and takes what was decided."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.heads: dict[str, Head] = {}
        self.events: dict[str, list[Event]] = {}
        self.stored: dict[tuple[str, bytes], Stored] = {}
        self.edges: dict[Edge, int] = {}

    def send(self, command: Command) -> Decision:
        """Decide a command and write what comes of it."""
        deciding = decide(command)
        try:
            need = next(deciding)
            while True:
                need = deciding.send(self.answer(need))
        except StopIteration as stop:
            decision: Decision = stop.value
        for write in decision.writes:
            name = write.run_id
            self.runs[name], self.heads[name] = write.run, write.head
            for one in write.events:
                assert (name, one.event_id) not in self.stored, "an id is written once"
                events = self.events.setdefault(name, [])
                events.append(one.event)
                stored = Stored(1, 1, len(events), one.event_id, one.event.TOPIC, one.payload, write.at_ms, name)
                self.stored[name, one.event_id] = stored
                if (edge := edge_of(one.event, name)) is not None:
                    self.edges.setdefault((edge.child_id, edge.parent_id), edge.seq)
            assert len(self.events[name]) == write.head.version
        return decision

    def answer(self, need: Need) -> Any:
        match need:
            case One(name, event_id):
                if name not in self.runs:
                    return None
                present = None if event_id is None else self.stored.get((name, event_id))
                return Loaded(self.runs[name], self.heads[name], present)
            case Newest(lineage):
                rounds = [run for run in self.runs.values() if run.lineage_id == lineage]
                return self.answer(One(max(rounds, key=lambda run: run.round_ordinal).run_id)) if rounds else None
            case Acted(name, after):
                since = self.events[name][after:]
                return any(isinstance(event, StepRecorded) or ":" in event.TOPIC for event in since)
            case Completions(name):
                return [
                    (event.step.removeprefix("awk:"), bytes(event.result).decode())
                    for event in self.events[name]
                    if isinstance(event, StepRecorded) and event.step.startswith("awk:")
                ]
            case Links(key):
                return [
                    (msgspec.json.decode(event.result, type=Spawned).run_id, self.runs[name].lineage_id)
                    for name, events in self.events.items()
                    for event in events
                    if isinstance(event, StepRecorded) and event.step == child_step(key)
                ]
            case EndedChildren(lineage):
                below = [run for run in self.runs.values() if run.parent_run_id == lineage and not run.round_ordinal]
                return [run for run in below if self.answer(Newest(run.run_id)).run.terminal]
            case Below(lineage):
                return [self.runs[child] for child, parent in self.edges if parent == lineage]
            case Above(lineage):
                above, todo = [], [lineage]
                while todo:
                    child = todo.pop(0)
                    more = [edge for edge in self.edges if edge[0] == child and edge not in above]
                    above += more
                    todo += [parent for _, parent in more]
                return sorted(above, key=self.edges.__getitem__)
            case Numbered(child, parent):
                return self.edges.get((child, parent))
            case LastEdge():
                return max(self.edges.values(), default=0)

    def own(self, name: str) -> None:
        """Let the worker have a run."""
        self.runs[name] = replace(self.runs[name], status=Status.RUNNING)
        self.heads[name] = replace(self.heads[name], owner=WORKER, epoch=self.heads[name].epoch + 1)

    def steps(self, name: str) -> dict[str, Any]:
        """The steps that count, with their results."""
        found: dict[str, Any] = {}
        for event in self.events[name]:
            if isinstance(event, StepRecorded):
                found[event.step] = msgspec.json.decode(event.result)
            elif isinstance(event, StepRetracted):
                del found[event.step]
        return found


def ids(name: str) -> StepIds:
    return StepIds(*parse_run_id(name))


def start(name: str, n: int = 0, **more: Any) -> Start:
    parts = parse_run_id(name)
    event = WorkflowStarted(workflow=parts.workflow, key=parts.key, input=Raw(b'{"n":%d}' % n), **more)
    return Start(name, new(event, ids(name)(f"start {n} {more}")), 1)


def owned(journal: Journal, name: str, event: Event, step: str, **more: Any) -> Append:
    """An append of the owner of a run."""
    head = journal.heads[name]
    one = new(event, ids(name)(step))
    options: dict[str, Any] = {"owner": head.owner, "epoch": head.epoch, "expected": head.version, **more}
    return Append(name, (one,), 2, **options)


def spawn(
    journal: Journal,
    parent: str,
    child: str,
    n: int = 0,
    on_cancel: str = "cancel",
    cleanup_ms: int | None = None,
    **more: Any,
) -> Spawn:
    parts = parse_run_id(child)
    link = Spawned(child, parts.workflow, parts.key, on_cancel)
    event = StepRecorded(step=child_step(parts.key), result=Raw(msgspec.json.encode(link)))
    append = owned(journal, parent, event, child_step(parts.key), alone=False, **more)
    lineage = journal.runs[parent].lineage_id
    return Spawn(append, start(child, n, parent=lineage, on_cancel=on_cancel, cleanup_ms=cleanup_ms))


def ended(journal: Journal, name: str, event: Event) -> Append:
    """The end of a run, as its owner sends it."""
    return owned(journal, name, event, f"end {journal.heads[name].version}", alone=False)


@pytest.fixture
def journal() -> Journal:
    """A parent, owned by the worker."""
    journal = Journal()
    journal.send(start(PARENT))
    journal.own(PARENT)
    return journal


@pytest.fixture
def family(journal: Journal) -> Journal:
    """A parent with a child with a child; the worker owns all three."""
    for parent, child in ((PARENT, CHILD), (CHILD, GRANDCHILD)):
        journal.send(spawn(journal, parent, child))
        journal.own(child)
    return journal


def park(journal: Journal, name: str, step: str) -> Decision:
    event = StateChanged(state="suspended", waits=(Wait(kind="deferred", step=step),))
    return journal.send(owned(journal, name, event, f"park {journal.heads[name].version}", exact=True))


RESULT = child_result_step("c")
COMPLETED = WorkflowCompleted(result=Raw(b'"parcel"'))


# Delivery


def test_of_two_deliveries_the_first_wins_and_wakes(journal: Journal) -> None:
    park(journal, PARENT, "awk:a")

    first = journal.send(Deliver(PARENT, "awk:a", b'{"ok":1}', 3))
    second = journal.send(Deliver(PARENT, "awk:a", b'{"ok":2}', 3))

    assert isinstance(first.outcome, Appended)
    assert journal.runs[PARENT].status == Status.PENDING
    assert isinstance(second.outcome, AlreadyPresent)
    assert msgspec.json.decode(second.outcome.stored.payload)["result"] == {"ok": 1}
    assert second.writes == ()


def test_what_comes_before_the_run_parks_is_not_slept_through(journal: Journal) -> None:
    late = owned(journal, PARENT, StateChanged(state="suspended", waits=(Wait(kind="deferred", step="awk:a"),)), "park")
    journal.send(Deliver(PARENT, "awk:a", b'{"ok":1}', 3))

    decision = journal.send(replace(late, exact=True))

    assert decision.outcome == VersionConflict(2)
    assert journal.runs[PARENT].status == Status.RUNNING


def test_a_delivery_needs_the_token_that_this_round_gave_out(journal: Journal) -> None:
    secret = ("awkid:a", "token")
    early = journal.send(Deliver(PARENT, "awk:a", b"{}", 3, secret))
    journal.send(owned(journal, PARENT, StepRecorded(step="awkid:a", result=Raw(b'"token"')), "awkid:a"))

    wrong = journal.send(Deliver(PARENT, "awk:a", b"{}", 3, ("awkid:a", "other")))
    right = journal.send(Deliver(PARENT, "awk:a", b"{}", 3, secret))

    assert isinstance(early.outcome, Refused)
    assert isinstance(wrong.outcome, Refused)
    assert isinstance(right.outcome, Appended)


def test_nothing_is_delivered_to_what_has_ended_or_never_was(journal: Journal) -> None:
    journal.send(ended(journal, PARENT, COMPLETED))

    assert journal.send(Deliver(PARENT, "awk:a", b"{}", 3)).outcome == RefusedTerminal(Status.COMPLETED)
    assert journal.send(Deliver("wf:order-x", "awk:a", b"{}", 3)).outcome == UnknownRun()
    assert "wf:order-x" not in journal.runs


# Children


@pytest.mark.parametrize(
    ("event", "told"),
    [
        (COMPLETED, {"ok": "parcel"}),
        (WorkflowFailed(failure=FAILURE), {"failed": msgspec.json.decode(msgspec.json.encode(FAILURE))}),
        (WorkflowCancelled(reason="asked"), {"cancelled": "asked"}),
    ],
)
def test_a_parent_is_told_in_the_decision_that_ends_the_child(family: Journal, event: Event, told: Any) -> None:
    park(family, PARENT, RESULT)

    decision = family.send(ended(family, CHILD, event))

    assert [write.run_id for write in decision.writes] == [CHILD, PARENT]
    assert family.steps(PARENT)[RESULT] == told
    assert family.runs[PARENT].status == Status.PENDING
    assert family.runs[PARENT] in decision.changed and decision.touched == []  # nobody drives it


def test_a_parent_that_has_ended_is_told_nothing(family: Journal) -> None:
    family.send(ended(family, PARENT, COMPLETED))

    decision = family.send(ended(family, CHILD, COMPLETED))

    assert [write.run_id for write in decision.writes] == [CHILD]


def test_the_end_of_a_later_round_is_told_to_who_spawned_the_first(family: Journal) -> None:
    following = rotated(family, CHILD)

    decision = family.send(ended(family, following, COMPLETED))

    assert [write.run_id for write in decision.writes] == [following, PARENT]
    assert family.steps(PARENT)[RESULT] == {"ok": "parcel"}


def test_a_child_spawned_again_in_a_later_round_is_attached_to(family: Journal) -> None:
    following = rotated(family, PARENT)
    assert RESULT not in family.steps(PARENT), "a handoff is no end of anything"

    decision = family.send(spawn(family, following, CHILD))
    family.send(ended(family, CHILD, COMPLETED))

    assert [write.run_id for write in decision.writes] == [following]
    assert family.steps(following)[RESULT] == {"ok": "parcel"}


def test_a_child_that_has_ended_tells_at_once_when_it_is_spawned_again(family: Journal) -> None:
    family.send(ended(family, CHILD, COMPLETED))
    following = rotated(family, PARENT)

    decision = family.send(spawn(family, following, CHILD))

    assert decision.outcome == Appended(3)
    assert list(family.steps(following)) == [child_step("c"), RESULT]


def other_parent(journal: Journal) -> Spawn:
    journal.send(start("wf:order-q"))
    journal.own("wf:order-q")
    return spawn(journal, "wf:order-q", CHILD)


def alone(journal: Journal) -> Spawn:
    journal.send(start("wf:ship-x"))
    return spawn(journal, PARENT, "wf:ship-x")


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (other_parent, "is a child of wf:order-p"),
        (lambda journal: spawn(journal, rotated(journal, PARENT), CHILD, n=1), "another input"),
        (alone, "started on its own and has not ended"),
    ],
)
def test_a_spawn_that_contradicts_what_is_there_is_refused(
    family: Journal, made: Callable[[Journal], Spawn], why: str
) -> None:
    decision = family.send(made(family))

    assert isinstance(decision.outcome, Refused)
    assert why in decision.outcome.reason
    assert decision.writes == ()


def test_a_run_is_no_child_of_itself(family: Journal) -> None:
    """CH-64."""
    decision = family.send(spawn(family, CHILD, CHILD))

    assert decision.outcome == Cyclic((CHILD,))
    assert decision.writes == ()


def test_a_spawn_is_fenced_as_its_parent_is(journal: Journal) -> None:
    stale = journal.send(spawn(journal, PARENT, CHILD, epoch=0))
    late = journal.send(spawn(journal, PARENT, CHILD, expected=0, exact=True))

    assert stale.outcome == FenceLost()
    assert late.outcome == VersionConflict(1)
    assert CHILD not in journal.runs


# Cancelling


def test_cancelling_takes_children_along_but_those_that_are_detached(family: Journal) -> None:
    family.send(spawn(family, PARENT, "wf:ship-d", on_cancel="detach"))

    decision = family.send(Cancel(PARENT, 5, "asked"))

    assert [write.run_id for write in decision.writes] == [PARENT, CHILD, GRANDCHILD]
    assert {write.run.status for write in decision.writes} == {Status.CANCELLED}
    assert {write.head.owner for write in decision.writes} == {None}
    assert family.runs["wf:ship-d"].status == Status.PENDING
    assert family.send(Cancel(PARENT, 6)).outcome == RefusedTerminal(Status.CANCELLED)


def test_cancelling_a_child_tells_its_parent(family: Journal) -> None:
    family.send(Cancel(CHILD, 5, "asked"))

    assert family.steps(PARENT)[RESULT] == {"cancelled": "asked"}
    assert family.runs[GRANDCHILD].status == Status.CANCELLED
    assert family.runs[PARENT].status == Status.RUNNING


def test_cancelling_ends_the_newest_round(journal: Journal) -> None:
    following = rotated(journal, PARENT)

    journal.send(Cancel(PARENT, 5))

    assert journal.runs[following].status == Status.CANCELLED
    assert journal.runs[PARENT].status == Status.COMPLETED


# Asking to end


@pytest.fixture
def tidy(journal: Journal) -> Journal:
    """A run with a cleanup of 100 ms, which owns a child without and a child with one; all three are owned."""
    journal.send(start("wf:tidy-t", cleanup_ms=100))
    journal.own("wf:tidy-t")
    journal.send(spawn(journal, "wf:tidy-t", CHILD))
    journal.send(spawn(journal, "wf:tidy-t", "wf:tidy-u", cleanup_ms=50))
    journal.own(CHILD)
    journal.own("wf:tidy-u")
    return journal


TIDY = "wf:tidy-t"


def test_a_run_with_a_cleanup_is_asked_once_and_stays_with_its_owner(tidy: Journal) -> None:
    asked = tidy.send(Cancel(TIDY, 5, "enough"))
    again = tidy.send(Cancel(TIDY, 6, "more"))

    run = tidy.runs[TIDY]
    assert isinstance(asked.outcome, Appended) and isinstance(again.outcome, AlreadyPresent)
    assert again.writes == ()
    assert (run.status, run.cancel_requested_at_ms, tidy.heads[TIDY].owner) == (Status.RUNNING, 5, WORKER)
    requests = [event for event in tidy.events[TIDY] if isinstance(event, StateChanged)]
    assert [(event.state, event.reason) for event in requests] == [("cancel_requested", "enough")]


def test_children_of_a_run_that_is_asked_are_cancelled_or_asked_too(tidy: Journal) -> None:
    decision = tidy.send(Cancel(TIDY, 5, "enough"))

    assert [write.run_id for write in decision.writes] == [TIDY, CHILD, "wf:tidy-u"]
    assert tidy.runs[CHILD].status == Status.CANCELLED
    assert tidy.runs["wf:tidy-u"].cancel_requested_at_ms == 5
    assert tidy.steps(TIDY)[RESULT] == {"cancelled": "enough"}
    assert child_result_step("u") not in tidy.steps(TIDY)
    tidy.send(owned(tidy, "wf:tidy-u", WorkflowCancelled(reason="enough"), "__workflow_cancelled__", alone=False))
    assert tidy.steps(TIDY)[child_result_step("u")] == {"cancelled": "enough"}


def test_a_child_is_asked_where_its_parent_is_cancelled(journal: Journal) -> None:
    journal.send(spawn(journal, PARENT, "wf:tidy-u", cleanup_ms=50))

    journal.send(Cancel(PARENT, 5, "enough"))

    assert journal.runs[PARENT].status == Status.CANCELLED
    assert journal.runs["wf:tidy-u"].status == Status.PENDING
    assert journal.runs["wf:tidy-u"].cancel_requested_at_ms == 5


def test_what_was_asked_to_end_ends_in_no_other_way(tidy: Journal) -> None:
    tidy.send(Cancel(TIDY, 5))
    version = tidy.heads[TIDY].version

    for event in (COMPLETED, WorkflowFailed(failure=FAILURE)):
        assert tidy.send(ended(tidy, TIDY, event)).outcome == VersionConflict(version)
    retried = WorkflowRetried(attempt=1, failure=FAILURE, next_attempt_at_ms=9)
    assert tidy.send(ended(tidy, TIDY, retried)).outcome == VersionConflict(version)
    assert tidy.send(spawn(tidy, TIDY, "wf:ship-late")).outcome == VersionConflict(version)
    following = ended(tidy, TIDY, WorkflowCompleted(handoff="wf:tidy-t#1"))
    assert tidy.send(Rotate(following, start("wf:tidy-t#1", round=1, lineage=TIDY, parent=TIDY))).outcome == (
        VersionConflict(version)
    )
    step = tidy.send(owned(tidy, TIDY, StepRecorded(step="undo", result=Raw(b"1")), "undo"))
    assert isinstance(step.outcome, Appended)
    marker = owned(tidy, TIDY, WorkflowCancelled(), "__workflow_cancelled__", alone=False)
    assert isinstance(tidy.send(marker).outcome, Appended)
    assert tidy.runs[TIDY].status == Status.CANCELLED


def test_an_end_that_came_first_is_not_asked(tidy: Journal) -> None:
    tidy.send(ended(tidy, TIDY, COMPLETED))

    assert tidy.send(Cancel(TIDY, 5)).outcome == RefusedTerminal(Status.COMPLETED)


def test_a_parked_or_paced_run_that_is_asked_is_to_be_driven_now(journal: Journal) -> None:
    for name, event in (
        ("wf:tidy-a", StateChanged(state="suspended", waits=(Wait("sleep", "sleep:x", 90),))),
        ("wf:tidy-b", WorkflowRetried(attempt=1, failure=FAILURE, next_attempt_at_ms=90)),
    ):
        journal.send(start(name, cleanup_ms=100))
        journal.own(name)
        journal.send(owned(journal, name, event, "leaves", alone=False))
        journal.send(Cancel(name, 5))
        run = journal.runs[name]
        assert (run.status, run.next_attempt_at_ms, run.wake_at_ms) == (Status.PENDING, None, None)
        assert (run.waiting_reason, run.waiting_token, journal.heads[name].owner) == (None, None, None)
    journal.send(start("wf:tidy-c", cleanup_ms=100, start_at_ms=90))
    journal.send(Cancel("wf:tidy-c", 5))
    assert journal.runs["wf:tidy-c"].next_attempt_at_ms is None


@pytest.mark.parametrize(
    "command", [lambda at: EndGrace(TIDY, at), lambda at: Cancel(TIDY, at, "again")], ids=["a worker", "who cancels"]
)
def test_whoever_finds_the_grace_over_ends_the_run(tidy: Journal, command: Callable[[int], Command]) -> None:
    tidy.send(Cancel(TIDY, 5, "enough"))

    early = tidy.send(command(104))
    late = tidy.send(command(105))

    assert early.writes == () and isinstance(late.outcome, Appended)
    assert tidy.runs[TIDY].status == Status.CANCELLED and tidy.heads[TIDY].owner is None
    assert tidy.events[TIDY][-1] == WorkflowCancelled(reason="enough")
    assert tidy.send(EndGrace(TIDY, 200)).outcome == RefusedTerminal(Status.CANCELLED)
    assert tidy.send(EndGrace(PARENT, 200)).writes == ()
    assert tidy.send(EndGrace("wf:tidy-nobody", 200)).outcome == UnknownRun()


def test_a_request_is_for_the_newest_round(tidy: Journal) -> None:
    following = rotated(tidy, TIDY)

    tidy.send(Cancel(TIDY, 5))

    assert tidy.runs[following].cancel_requested_at_ms == 5
    assert tidy.runs[TIDY].status == Status.COMPLETED


# Rounds


def rotated(journal: Journal, name: str, *consumed: str) -> str:
    """The next round of a run, owned by the worker."""
    run = journal.runs[name]
    following = run_id(run.workflow, run.key, run.round_ordinal + 1)
    ending = ended(journal, name, WorkflowCompleted(handoff=following))
    begun = start(
        following, round=run.round_ordinal + 1, lineage=run.lineage_id, parent=name, cleanup_ms=run.cleanup_ms
    )
    decision = journal.send(Rotate(ending, replace(begun, owner=WORKER), frozenset(consumed)))
    assert isinstance(decision.outcome, Appended)
    return following


def test_what_the_body_did_not_take_is_carried_over(journal: Journal) -> None:
    for name in ("a", "b"):
        journal.send(Deliver(PARENT, f"awk:{name}", b'{"ok":"%s"}' % name.encode(), 3))

    following = rotated(journal, PARENT, "a")

    assert journal.runs[PARENT].handoff_run_id == following
    assert journal.steps(following) == {"awk:b": {"ok": "b"}}
    assert isinstance(journal.send(Deliver(PARENT, "awk:b", b"{}", 4)).outcome, AlreadyPresent)
    assert isinstance(journal.send(Deliver(PARENT, "awk:a", b"{}", 4)).outcome, Appended)
    assert "awk:a" in journal.steps(following)


# Resurrection and retraction


def test_resurrection_takes_back_what_the_parent_was_told(family: Journal) -> None:
    family.send(ended(family, CHILD, WorkflowFailed(failure=FAILURE)))
    family.send(ended(family, PARENT, WorkflowFailed(failure=FAILURE)))

    decision = family.send(Resurrect(CHILD, 5, "mended"))

    assert [write.run_id for write in decision.writes] == [CHILD, PARENT]
    assert isinstance(family.events[CHILD][-1], WorkflowResurrected)
    assert family.runs[CHILD].status == Status.PENDING
    assert RESULT not in family.steps(PARENT)
    family.own(CHILD)
    family.send(Resurrect(PARENT, 5))
    family.send(ended(family, CHILD, COMPLETED))
    assert family.steps(PARENT)[RESULT] == {"ok": "parcel"}


def test_a_parent_that_has_recorded_something_since_keeps_what_it_was_told(family: Journal) -> None:
    family.send(ended(family, CHILD, WorkflowFailed(failure=FAILURE)))
    family.send(Deliver(PARENT, "awk:a", b"{}", 4))

    decision = family.send(Resurrect(CHILD, 5, "mended"))

    assert [write.run_id for write in decision.writes] == [CHILD]
    assert "failed" in family.steps(PARENT)[RESULT]


def test_a_run_may_fail_and_be_resurrected_as_often_as_it_likes(family: Journal) -> None:
    for _ in range(3):
        family.send(ended(family, CHILD, WorkflowFailed(failure=FAILURE)))
        assert isinstance(family.send(Resurrect(CHILD, 5)).outcome, Appended)
        family.own(CHILD)

    assert family.runs[CHILD].status == Status.RUNNING


def test_a_resurrected_parent_is_told_what_ended_while_it_had_failed(family: Journal) -> None:
    family.send(ended(family, PARENT, WorkflowFailed(failure=FAILURE)))
    family.send(ended(family, CHILD, COMPLETED))
    assert RESULT not in family.steps(PARENT)

    family.send(Resurrect(PARENT, 5))

    assert family.steps(PARENT)[RESULT] == {"ok": "parcel"}
    assert family.runs[PARENT].status == Status.PENDING


def test_only_what_has_failed_is_resurrected(family: Journal) -> None:
    assert family.send(Resurrect(PARENT, 5)).outcome == RefusedTerminal(Status.RUNNING)
    assert family.send(Resurrect("wf:order-x", 5)).outcome == UnknownRun()


def test_a_step_is_retracted_once_and_recorded_anew_under_a_fresh_id(journal: Journal) -> None:
    park(journal, PARENT, "awk:a")
    journal.send(Deliver(PARENT, "awk:a", b'{"ok":1}', 3))

    for n in (2, 3):
        first, second = (journal.send(Retract(PARENT, "awk:a", 5)).outcome for _ in range(2))
        assert isinstance(first, Appended)
        assert isinstance(second, Refused)
        assert "awk:a" not in journal.steps(PARENT)
        assert isinstance(journal.send(Deliver(PARENT, "awk:a", b'{"ok":%d}' % n, 6)).outcome, Appended)
        assert journal.steps(PARENT)["awk:a"] == {"ok": n}


def test_nothing_is_retracted_from_a_run_that_is_driven_or_done(journal: Journal) -> None:
    journal.send(Deliver(PARENT, "awk:a", b"{}", 3))
    driven = journal.send(Retract(PARENT, "awk:a", 5))
    journal.send(ended(journal, PARENT, COMPLETED))

    assert isinstance(driven.outcome, Refused)
    assert journal.send(Retract(PARENT, "awk:a", 5)).outcome == RefusedTerminal(Status.COMPLETED)
