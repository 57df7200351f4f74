"""What each command does, given the loaded state: pure generators, the only place these rules are written.

A command is data. Its decision asks for what it must know, one `Need` after the other, and ends with an outcome and
the events to write, of one run or of several; stores load and write, and decide nothing. The fold that a decision
makes of a run's row is also made ahead of it, by the owner of the run in memory: there the store only checks that the
memory was current.

None of these values refers back to itself, so the garbage collector is told to leave them alone: with thousands of
runs under way its rounds would take longer than the decisions.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from itertools import takewhile
from typing import Any, Final, TypeAlias

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from keiro.events import (
    Event,
    RunLinked,
    RunUnlinked,
    StateChanged,
    StepRecorded,
    StepRetracted,
    WorkflowCancelled,
    WorkflowCompleted,
    WorkflowFailed,
    WorkflowResurrected,
    WorkflowRetried,
    WorkflowStarted,
)
from keiro.failures import Failure
from keiro.identity import (
    StepIds,
    again,
    begun_step,
    child_result_step,
    child_step,
    deferred_step,
    parse_run_id,
    suspended_step,
)
from keiro.projections import run_parents
from keiro.projections.run_parents import Edge
from keiro.projections.runs import claimed, project
from keiro.projections.waits import Change, Exit, Spawned, changes, exit_of
from keiro.rows import Head, Run, Status

CANCELLED: Final = "__workflow_cancelled__"
REQUESTED: Final = "__workflow_cancel_requested__"


class _SpawnRecorded(msgspec.Struct, frozen=True, gc=False):
    """Of the event that records a spawn: which child it was."""

    result: Spawned


_encoder: Final = msgspec.json.Encoder()
_decode_spawned: Final = msgspec.json.Decoder(_SpawnRecorded).decode
_decode_state: Final = msgspec.json.Decoder(StateChanged).decode
_sorted: Final = msgspec.json.Encoder(order="sorted").encode


class New(msgspec.Struct, frozen=True, gc=False):
    """An event to append: the event, its 16-byte id and its stored JSON."""

    event: Event
    event_id: bytes
    payload: str


def new(event: Event, event_id: bytes) -> New:
    """`event` as it will be appended."""
    return New(event, event_id, _encoder.encode(event).decode())


class Start(msgspec.Struct, frozen=True, gc=False):
    """Create a run. With `owner`, the run is born owned by that worker in epoch 1."""

    run_id: str
    started: New
    at_ms: int
    owner: int | None = None


class Append(msgspec.Struct, frozen=True, gc=False):
    """Append events to an existing run.

    With `owner`, only if that worker owns the run in `epoch`. `expected` is the version the sender saw: the owner's is
    a hint that saves the load, or with `exact` the only version it may be; a stranger's (`owner` None) is a condition:
    no command of the aggregate came after it. `run` is the owner's copy of the row after the events, where they change
    it. `alone` says that the events touch no row but those of the run itself.
    """

    run_id: str
    events: tuple[New, ...]
    at_ms: int
    run_key: int = 0
    owner: int | None = None
    epoch: int = 0
    expected: int | None = None
    run: Run | None = None
    exact: bool = False
    alone: bool = True


class Deliver(msgspec.Struct, frozen=True, gc=False):
    """Record a step of the newest round of a lineage from outside: the completion of a deferred. `run_id` is round 0's.

    With `secret`, only if that is the recorded result of the step `secret_step` in the round it was given in. `owner`
    is a worker that has room for the run: if it is parked and goes on with this, it is that worker's at once.
    """

    run_id: str
    step: str
    result: bytes
    at_ms: int
    secret: tuple[str, str] | None = None
    owner: int | None = None


class Spawn(msgspec.Struct, frozen=True, gc=False):
    """Record in `parent`, fenced as any append of its owner, that it has the child that `start` creates."""

    parent: Append
    start: Start

    @property
    def run_id(self) -> str:
        """The parent's."""
        return self.parent.run_id


class Rotate(msgspec.Struct, frozen=True, gc=False):
    """End a round, fenced as any append of its owner, and begin the next one; what deferreds were completed with and
    the body did not take (`consumed` are those it took) is carried over."""

    ending: Append
    start: Start
    consumed: frozenset[str] = frozenset()

    @property
    def run_id(self) -> str:
        """The ending round's."""
        return self.ending.run_id


class Cancel(msgspec.Struct, frozen=True, gc=False):
    """Cancel the newest round of a lineage, and children of it that are to be cancelled with it; where a run has a
    cleanup, ask it to end. `requested_at_ms` is when that was asked of the parent it has it from."""

    run_id: str
    at_ms: int
    reason: str | None = None
    requested_at_ms: int | None = None


class EndGrace(msgspec.Struct, frozen=True, gc=False):
    """Cancel a run that was asked to end and has not, if its grace is over."""

    run_id: str
    at_ms: int


class Link(msgspec.Struct, frozen=True, gc=False):
    """Record that the lineage `run_id` has the lineage `parent_id` as a parent. If that is cancelled, or asked to end,
    so is the child with all that is below it."""

    run_id: str
    parent_id: str
    at_ms: int


class Unlink(msgspec.Struct, frozen=True, gc=False):
    """Take back that the lineage `run_id` was linked to the parent `parent_id`."""

    run_id: str
    parent_id: str
    at_ms: int


class Resurrect(msgspec.Struct, frozen=True, gc=False):
    """Let a failed run go on."""

    run_id: str
    at_ms: int
    reason: str | None = None


class Retract(msgspec.Struct, frozen=True, gc=False):
    """Let what was recorded of a step of the newest round count no more."""

    run_id: str
    step: str
    at_ms: int
    reason: str | None = None


class Fire(msgspec.Struct, frozen=True, gc=False):
    """Record the clocks that are due of a run that was parked with its event number `version`."""

    run_id: str
    version: int
    at_ms: int


class Collect(msgspec.Struct, frozen=True, gc=False):
    """Delete a lineage that ended at `before_ms` or earlier and that nobody can ask for any more. `parent` is the
    lineage that attached to it, where it was not born as a child. A `preview` takes for deleted what goes before it in
    the same collection: old rounds, and failed parents."""

    run_id: str
    before_ms: int
    parent: str | None = None
    preview: bool = False


class Trim(msgspec.Struct, frozen=True, gc=False):
    """Delete rounds of a lineage that nothing needs any more and that ended at `before_ms` or earlier: the oldest ones,
    `most` at most. The lineage stays, whether it goes on or not."""

    run_id: str
    before_ms: int
    most: int


class Stored(msgspec.Struct, frozen=True, gc=False):
    """A row of the journal. `position` orders all events of the store, `version` those of the run."""

    position: int
    run_key: int
    version: int
    event_id: bytes
    topic: str
    payload: str
    recorded_at_ms: int
    run_id: str = ""


class Loaded(msgspec.Struct, gc=False):
    """What a decision is given of a run: the row, the head, the stored event that has the id asked for, and whether an
    event of the user's aggregate came after the version asked about."""

    run: Run
    head: Head
    present: Stored | None = None
    overtaken: bool = False


class One(msgspec.Struct, frozen=True, gc=False):
    """Asks for a run: answered with a `Loaded`, or None if there is no such run."""

    run_id: str
    event_id: bytes | None = None
    after: int | None = None


class Newest(msgspec.Struct, frozen=True, gc=False):
    """Asks for the newest round of a lineage, by the run id of round 0: answered as `One`."""

    lineage_id: str


class Completions(msgspec.Struct, frozen=True, gc=False):
    """Asks for what deferreds of a round were completed with: answered with (name, JSON) pairs."""

    run_id: str


class EndedChildren(msgspec.Struct, frozen=True, gc=False):
    """Asks for the round 0 of each child that a lineage has spawned and that has ended: answered with rows, oldest
    first."""

    lineage_id: str


class Below(msgspec.Struct, frozen=True, gc=False):
    """Asks for the round 0 of each lineage that has this one as a parent, whether it was spawned or linked, and that
    may not have ended: answered with rows, in the order of the edges."""

    lineage_id: str


class Above(msgspec.Struct, frozen=True, gc=False):
    """Asks for all edges above a lineage: answered with pairs, child and parent, in their order."""

    lineage_id: str


class Numbered(msgspec.Struct, frozen=True, gc=False):
    """Asks for the number of an edge: answered with it, or None if there is no such edge."""

    child_id: str
    parent_id: str


class LastEdge(msgspec.Struct, frozen=True, gc=False):
    """Asks for the highest number of an edge: answered with it, 0 if there is none."""


class Acted(msgspec.Struct, frozen=True, gc=False):
    """Asks whether a step or a command was recorded in a run after the version `after`."""

    run_id: str
    after: int


class Rounds(msgspec.Struct, frozen=True, gc=False):
    """Asks for the rounds of a lineage after round 0: answered with rows, the oldest first, `most` at most."""

    lineage_id: str
    most: int


class Links(msgspec.Struct, frozen=True, gc=False):
    """Asks which children have this key: answered with pairs, the child's lineage and that of its parent."""

    key: str


Need: TypeAlias = (
    One | Newest | Completions | EndedChildren | Below | Above | Numbered | LastEdge | Acted | Rounds | Links
)
Command: TypeAlias = (
    Start
    | Append
    | Deliver
    | Spawn
    | Rotate
    | Cancel
    | EndGrace
    | Link
    | Unlink
    | Resurrect
    | Retract
    | Fire
    | Collect
    | Trim
)


class Appended(msgspec.Struct, frozen=True, gc=False):
    """The events are in the journal; `version` is that of the last one. `run` is the row of a run that was born."""

    version: int
    run: Run | None = None


class AlreadyPresent(msgspec.Struct, frozen=True, gc=False):
    """An event with this id is there already (first writer wins); `stored` is it."""

    stored: Stored


class Existing(msgspec.Struct, frozen=True, gc=False):
    """A run with this id and an equal input exists; nothing was written."""

    run: Run


class InputDiffers(msgspec.Struct, frozen=True, gc=False):
    """A run with this id exists and was started with another input; nothing was written."""

    run: Run


class RefusedTerminal(msgspec.Struct, frozen=True, gc=False):
    """The run has ended; nothing was written."""

    status: str


class FenceLost(msgspec.Struct, frozen=True, gc=False):
    """The sender does not own the run (any more); nothing was written."""


class VersionConflict(msgspec.Struct, frozen=True, gc=False):
    """Something came after what the sender saw; the run is at `version` now; nothing was written."""

    version: int


class UnknownRun(msgspec.Struct, frozen=True, gc=False):
    """No run has this id; nothing was written, nothing is created."""


class Refused(msgspec.Struct, frozen=True, gc=False):
    """The command contradicts what is there, for the reason given; nothing was written."""

    reason: str


class Linked(msgspec.Struct, frozen=True, gc=False):
    """The edge is there, with this number: `new`, or from before."""

    seq: int
    new: bool


class NotLinked(msgspec.Struct, frozen=True, gc=False):
    """There is no such edge; nothing was written."""


class Cyclic(msgspec.Struct, frozen=True, gc=False):
    """The edge would close a cycle: `path` goes from the child down to the parent. Nothing was written."""

    path: tuple[str, ...]


class Collected(msgspec.Struct, frozen=True, gc=False):
    """So many rounds are deleted: all of a lineage, or with `Trim` old ones."""

    rounds: int


Outcome: TypeAlias = (
    Appended
    | AlreadyPresent
    | Existing
    | InputDiffers
    | RefusedTerminal
    | FenceLost
    | VersionConflict
    | UnknownRun
    | Refused
    | Linked
    | NotLinked
    | Cyclic
    | Collected
)


class Write(msgspec.Struct, frozen=True, gc=False):
    """Events of one run, and its row and head after them. `before` is the row before, None for a run that is born."""

    run_id: str
    events: tuple[New, ...]
    at_ms: int
    before: Run | None
    run: Run
    head: Head

    @property
    def takes(self) -> bool:
        """Whether the run gets an owner, which it had not before."""
        before = self.before
        return before is not None and before.status == Status.SUSPENDED and self.run.status == Status.RUNNING

    def changes(self) -> Iterator[Change]:
        """The changes of other rows that the events bring about."""
        yield from changes(self.run, [one.event for one in self.events], self.at_ms)
        for one in self.events:
            yield from run_parents.changes(one.event, self.run_id)


class Taken(msgspec.Struct, frozen=True, gc=False):
    """A parked run that has gone on as the sender's, without a claim. Where the answer to that was lost, and the
    command came again, it is not `sure`: the sender may have heard of it, and of more since."""

    run: Run
    head: Head
    sure: bool = True


class Decision(msgspec.Struct, frozen=True, gc=False):
    """An outcome and what must be written with it, in one transaction; of the run the command names first. `found` is
    a run that its sender owns and may not know of: a start whose first answer was lost. `own` says that the first write
    is its owner's. `gone` are the rounds of a lineage that are deleted, the newest first: all, or neighbours. `taken`
    is a parked run that goes on as its sender's."""

    outcome: Outcome
    writes: tuple[Write, ...] = ()
    found: Run | None = None
    own: bool = False
    gone: tuple[Run, ...] = ()
    taken: Taken | None = None

    @property
    def changed(self) -> list[Run]:
        """The rows of runs that are not as they were."""
        changed = [write.run for write in self.writes if write.run is not write.before]
        return changed if self.found is None else [*changed, self.found]

    @property
    def touched(self) -> list[str]:
        """The runs that somebody drives and others than their owners appended to."""
        others = self.writes[1:] if self.own else self.writes
        return [write.run_id for write in others if write.before is not None and write.head.owner is not None]


Deciding: TypeAlias = Generator[Need, Any, Decision]


def decide(command: Command) -> Deciding:
    """What `command` does: a generator of what it needs to know, whose value is the decision."""
    match command:
        case Start():
            return _start(command)
        case Append():
            return _append(command)
        case Deliver():
            return _deliver(command)
        case Spawn():
            return _spawn(command)
        case Rotate():
            return _rotate(command)
        case Cancel():
            return _cancel(command)
        case EndGrace():
            return _end_grace(command)
        case Link():
            return _link(command)
        case Unlink():
            return _unlink(command)
        case Resurrect():
            return _resurrect(command)
        case Retract():
            return _retract(command)
        case Fire():
            return _fire(command)
        case Collect():
            return _collect(command)
        case Trim():
            return _trim(command)


def first_needs(command: Command) -> tuple[Need, ...]:
    """What the decision of `command` asks first, so that it can be loaded together with that of others; and what it
    will ask then, as far as that can be told before: that is no reason for a round trip of its own."""
    first = next(decide(command))
    match command:
        case Spawn():
            return (first, LastEdge())
        case Deliver():
            # Most lineages have one round: what it will ask of that one.
            return (first, One(command.run_id, StepIds(*parse_run_id(command.run_id))(command.step)))
    return (first,)


def _start(command: Start) -> Deciding:
    started = command.started.event
    assert isinstance(started, WorkflowStarted)
    loaded: Loaded | None = yield One(command.run_id, command.started.event_id)
    if loaded is None:
        write = _birth(command)
        return Decision(Appended(1, write.run), (write,))
    if loaded.present is not None:
        # Our own start, committed before its answer was lost: tell the sender as if it had been told then.
        mine = command.owner is not None and loaded.head.owner == command.owner and loaded.head.epoch == 1
        return Decision(Appended(1, loaded.run), found=loaded.run if mine else None)
    if same_json(loaded.run.input_json, bytes(started.input).decode()):
        return Decision(Existing(loaded.run))
    return Decision(InputDiffers(loaded.run))


def _birth(command: Start) -> Write:
    head = Head(run_key=0, version=1, owner=command.owner, epoch=0 if command.owner is None else 1)
    return Write(command.run_id, (command.started,), command.at_ms, None, born(command), head)


def born(command: Start) -> Run:
    """The row of a run that does not exist yet."""
    run = project(None, command.started.event, command.at_ms)
    assert run is not None
    if command.owner is None:
        return run
    return replace(run, status=Status.RUNNING, started_at_ms=command.at_ms)


def _append(command: Append) -> Deciding:
    after = command.expected if command.owner is None else None
    loaded: Loaded | None = yield One(command.run_id, command.events[-1].event_id, after)
    refused = _refused(command, loaded)
    if refused is not None:
        return Decision(refused)
    assert loaded is not None
    write = _write(loaded, command.events, command.at_ms)
    writes = [write]
    if write.run.terminal:
        yield from _tell_parent(writes, write)
    return Decision(Appended(write.head.version), tuple(writes), own=command.owner is not None)


def _refused(command: Append, loaded: Loaded | None) -> Outcome | None:
    if loaded is None:
        return UnknownRun()
    run, head = loaded.run, loaded.head
    # The fence comes before everything else: a former owner must not be answered with its successor's work.
    if command.owner is not None and (head.owner != command.owner or head.epoch != command.epoch):
        return FenceLost()
    if loaded.present is not None:
        return AlreadyPresent(loaded.present)
    if run.terminal:
        return RefusedTerminal(run.status)
    # Steps of the run do not change what a command was decided on; another command does.
    if loaded.overtaken or (command.exact and head.version != command.expected):
        return VersionConflict(head.version)
    # Once it is asked to end, a run ends in one way: its owner, who has not heard of it, reads on and finds out.
    if run.cancel_requested_at_ms is not None and isinstance(command.events[-1].event, _OTHER_ENDS):
        return VersionConflict(head.version)
    return None


_OTHER_ENDS: Final = (WorkflowCompleted, WorkflowFailed, WorkflowRetried)


def _write(loaded: Loaded, events: tuple[New, ...], at_ms: int) -> Write:
    run, head = loaded.run, loaded.head
    after = fold(run, events, at_ms)
    owner = None if releases(events, after) else head.owner
    return Write(
        run.run_id,
        events,
        at_ms,
        run,
        after,
        Head(run_key=head.run_key, version=head.version + len(events), owner=owner, epoch=head.epoch),
    )


def _recorded(run: Run, step: str, result: bytes) -> Generator[Need, Any, tuple[Loaded, New | None]]:
    """The event that records `step` of `run` from outside, None where it is recorded (`present`) and not retracted."""
    ids = StepIds(run.workflow, run.key, run.round_ordinal)
    retractions = 0
    while True:
        event_id = ids(again(step, retractions))
        loaded: Loaded = yield One(run.run_id, event_id)
        if loaded.present is None:
            return loaded, new(StepRecorded(step=step, result=Raw(result)), event_id)
        found: Loaded = yield One(run.run_id, ids(_retraction(step, retractions + 1)))
        if found.present is None:
            return loaded, None
        retractions += 1


def _retraction(step: str, number: int) -> str:
    return f"__workflow_retracted__/{step}#{number}"


def _tell_parent(writes: list[Write], ended: Write) -> Generator[Need, Any, None]:
    """Record in the parent of a run that has ended how it ended: in the same transaction, whoever ended it."""
    run = ended.run
    if run.handoff_run_id is not None or run.parent_run_id is None:
        return
    # The parent of a later round is the round before; who spawned the lineage is round 0's.
    above = (yield from _above(run)) if run.round_ordinal else run.parent_run_id
    if above is None:
        return
    parent: Loaded | None = yield Newest(above)
    if parent is None or parent.run.terminal or any(write.run_id == parent.run.run_id for write in writes):
        return
    payload = _encoder.encode(exit_of(ended.events[-1].event))
    loaded, told = yield from _recorded(parent.run, child_result_step(run.key), payload)
    if told is not None:
        writes.append(_write(loaded, (told,), ended.at_ms))


def _above(run: Run) -> Generator[Need, Any, str | None]:
    """The lineage that has the one of `run` as its child: it spawned it, or attached to it when it had ended."""
    first: Loaded | None = yield One(run.lineage_id)
    if first is not None and first.run.parent_run_id is not None:
        return first.run.parent_run_id
    return (yield from _attached(run))


def _attached(run: Run) -> Generator[Need, Any, str | None]:
    links: list[tuple[str, str]] = yield Links(run.key)
    return dict(links).get(run.lineage_id)


def _deliver(command: Deliver) -> Deciding:
    newest: Loaded | None = yield Newest(command.run_id)
    if newest is None:
        return Decision(UnknownRun())
    run = newest.run
    if command.secret is not None:
        step, secret = command.secret
        ids = StepIds(run.workflow, run.key, run.round_ordinal)
        loaded: Loaded = yield One(run.run_id, ids(step))
        if loaded.present is None or _secret(loaded.present.payload) != secret:
            return Decision(Refused("the token is of another round, or was never given out"))
    loaded, event = yield from _recorded(run, command.step, command.result)
    if event is None:
        assert loaded.present is not None
        mine = command.owner is not None and loaded.head.owner == command.owner
        return Decision(
            AlreadyPresent(loaded.present), taken=Taken(loaded.run, loaded.head, sure=False) if mine else None
        )
    if run.terminal:
        return Decision(RefusedTerminal(run.status))
    write = _write(loaded, (event,), command.at_ms)
    if command.owner is None or not goes_on(write):
        return Decision(Appended(write.head.version), (write,))
    head = replace(write.head, owner=command.owner, epoch=write.head.epoch + 1)
    write = replace(write, run=claimed(write.run, command.at_ms), head=head)
    return Decision(Appended(head.version), (write,), taken=Taken(write.run, head))


def goes_on(write: Write) -> bool:
    """Whether a run that nobody owns was parked, and is not any more."""
    before = write.before
    return before is not None and before.status == Status.SUSPENDED and write.run.status == Status.PENDING


def _secret(payload: str) -> str | None:
    found = msgspec.json.decode(payload).get("result")
    return found if isinstance(found, str) else None


def _spawn(command: Spawn) -> Deciding:
    append, start = command.parent, command.start
    parent: Loaded | None = yield One(append.run_id, append.events[-1].event_id)
    refused = _refused(append, parent)
    if refused is not None:
        return Decision(refused)
    assert parent is not None
    if parent.run.cancel_requested_at_ms is not None:
        # Its children were cancelled with the request: a later one would be left alone.
        return Decision(VersionConflict(parent.head.version))
    lineage = parent.run.lineage_id
    if start.run_id == lineage:
        return Decision(Cyclic((lineage,)))
    started = start.started.event
    assert isinstance(started, WorkflowStarted)
    child: Loaded | None = yield One(start.run_id)
    if parent.run.round_ordinal:
        # An end is told by the key: one of a child of another workflow, from an earlier round, would be taken for this.
        links: list[tuple[str, str]] = yield Links(started.key)
        for other, above in links:
            if above == lineage and other != start.run_id:
                return Decision(Refused(f"its child {started.key!r} is {other}: give {start.run_id} an id of its own"))
    if child is None:
        last: int = yield LastEdge()
        birth = _birth(replace(start, started=new(replace(started, parent_seq=last + 1), start.started.event_id)))
        write = _write(parent, append.events, append.at_ms)
        return Decision(Appended(write.head.version), (write, birth), own=True)
    linked = child.run.parent_run_id
    if linked is None:
        linked = yield from _attached(child.run)
    if linked not in (None, lineage):
        return Decision(Refused(f"{start.run_id} is a child of {linked}"))
    if not same_json(child.run.input_json, bytes(started.input).decode()):
        return Decision(Refused(f"{start.run_id} exists and was started with another input"))
    newest: Loaded = yield Newest(start.run_id)
    if not newest.run.terminal:
        if linked is None:
            return Decision(Refused(f"{start.run_id} was started on its own and has not ended"))
        write = _write(parent, append.events, append.at_ms)
        return Decision(Appended(write.head.version), (write,), own=True)
    events = [*append.events]
    if (yield Numbered(start.run_id, lineage)) is None:
        edge = yield from _edge(start.run_id, lineage, parent)
        if isinstance(edge, Cyclic):
            return Decision(edge)
        events.append(edge)
    # It has ended: nobody will tell this round of the parent, so it is told now.
    _, told = yield from _recorded(parent.run, child_result_step(child.run.key), _encoder.encode(_ended(newest.run)))
    if told is not None:
        events.append(told)
    write = _write(parent, tuple(events), append.at_ms)
    return Decision(Appended(write.head.version), (write,), own=True)


def _ended(run: Run) -> Exit:
    """How a run ended, from its row."""
    if run.status == Status.COMPLETED:
        assert run.result_json is not None
        return Exit(ok=Raw(run.result_json.encode()))
    if run.status == Status.FAILED:
        assert run.failure_json is not None
        return Exit(failed=msgspec.json.decode(run.failure_json, type=Failure))
    return Exit(cancelled=None)


def _rotate(command: Rotate) -> Deciding:
    ending, start = command.ending, command.start
    loaded: Loaded | None = yield One(ending.run_id, ending.events[-1].event_id)
    refused = _refused(ending, loaded)
    if refused is not None:
        return Decision(refused)
    assert loaded is not None
    carried: list[tuple[str, str]] = yield Completions(ending.run_id)
    end, birth = _write(loaded, ending.events, ending.at_ms), _birth(start)
    ids = StepIds(birth.run.workflow, birth.run.key, birth.run.round_ordinal)
    over = tuple(
        new(StepRecorded(step=deferred_step(name), result=Raw(exit_json.encode())), ids(deferred_step(name)))
        for name, exit_json in carried
        if name not in command.consumed
    )
    head = replace(birth.head, version=1 + len(over))
    writes = (end, replace(birth, events=birth.events + over, head=head))
    return Decision(Appended(end.head.version, birth.run), writes, own=True)


def _cancel(command: Cancel) -> Deciding:
    newest: Loaded | None = yield Newest(command.run_id)
    if newest is None:
        return Decision(UnknownRun())
    if newest.run.terminal:
        return Decision(RefusedTerminal(newest.run.status))
    event = yield from _stopped(newest, command)
    if event is None:
        asked: Loaded = yield One(newest.run.run_id, _ids_of(newest.run)(REQUESTED))
        assert asked.present is not None
        return Decision(AlreadyPresent(asked.present))
    appended: _Appended = {newest.run.run_id: (newest, [event])}
    yield from _go_along(appended, newest, command)
    writes = yield from _ends_told(appended, command.at_ms)
    return Decision(Appended(writes[0].head.version, writes[0].run), tuple(writes))


_Appended: TypeAlias = dict[str, tuple[Loaded, list[New]]]
"""All that is appended, by run, until it is known: one that lives on is told of what ends below it."""


def _go_along(appended: _Appended, top: Loaded, command: Cancel) -> Generator[Need, Any, None]:
    """Cancel what is below a run, spawned or linked, each once: except what was spawned to be left alone, what has
    ended, and what is below those."""
    todo = [top]
    seen = {top.run.lineage_id}
    while todo:
        below: list[Run] = yield Below(todo.pop().run.lineage_id)
        for child in below:
            if child.on_cancel == "detach" or child.run_id in seen:
                continue
            seen.add(child.run_id)
            last: Loaded = yield Newest(child.run_id)
            if last.run.terminal:
                continue
            todo.append(last)
            event = yield from _stopped(last, command)
            if event is not None:
                appended[last.run.run_id] = (last, [event])


def _ends_told(appended: _Appended, at_ms: int) -> Generator[Need, Any, list[Write]]:
    """The writes of what is appended. Whoever has spawned a run that ends is told, unless it ends itself."""
    for loaded, events in list(appended.values()):
        if not isinstance(events[-1].event, WorkflowCancelled):
            continue
        above = yield from _above(loaded.run)
        parent: Loaded | None = None if above is None else (yield Newest(above))
        if parent is None or parent.run.terminal:
            continue
        _, more = appended.get(parent.run.run_id, (parent, []))
        if any(isinstance(one.event, WorkflowCancelled) for one in more):
            continue
        payload = _encoder.encode(exit_of(events[-1].event))
        _, told = yield from _recorded(parent.run, child_result_step(loaded.run.key), payload)
        if told is not None:
            appended.setdefault(parent.run.run_id, (parent, more))[1].append(told)
    return [_write(loaded, tuple(events), at_ms) for loaded, events in appended.values()]


def _stopped(loaded: Loaded, command: Cancel) -> Generator[Need, Any, New | None]:
    """The event that a cancellation appends to a run: its end; where it has a cleanup, a request; None where it has
    been asked already and has time left."""
    run, over = loaded.run, loaded.run.grace_over_ms
    if run.cleanup_ms is None:
        return new(WorkflowCancelled(reason=command.reason), _ids_of(run)(CANCELLED))
    if over is None:
        since = command.requested_at_ms
        asked = StateChanged(state="cancel_requested", reason=command.reason, requested_at_ms=since)
        return new(asked, _ids_of(run)(REQUESTED))
    return None if command.at_ms < over else (yield from _given_up(run))


def _given_up(run: Run) -> Generator[Need, Any, New]:
    """The end of a run whose grace is over, for the reason it was asked to end for."""
    asked: Loaded = yield One(run.run_id, _ids_of(run)(REQUESTED))
    assert asked.present is not None
    reason = _decode_state(asked.present.payload).reason
    return new(WorkflowCancelled(reason=reason), _ids_of(run)(CANCELLED))


def _link(command: Link) -> Deciding:
    child: Loaded | None = yield Newest(command.run_id)
    parent: Loaded | None = yield Newest(command.parent_id)
    if child is None or parent is None:
        return Decision(UnknownRun())
    number: int | None = yield Numbered(command.run_id, command.parent_id)
    if number is not None:
        return Decision(Linked(number, new=False))
    holder = child if not child.run.terminal else parent
    edge = yield from _edge(command.run_id, command.parent_id, holder)
    if isinstance(edge, Cyclic):
        return Decision(edge)
    if holder.run.terminal:
        return Decision(Refused(_BOTH_ENDED))
    appended: _Appended = {holder.run.run_id: (holder, [edge])}
    if holder is child:
        yield from _inherit(appended, child, parent, command.at_ms)
    writes = yield from _ends_told(appended, command.at_ms)
    assert isinstance(edge.event, RunLinked)
    return Decision(Linked(edge.event.seq, new=True), tuple(writes))


_BOTH_ENDED: Final = "it has ended, and so has the parent: neither journal takes anything any more"


def _edge(child_id: str, parent_id: str, holder: Loaded) -> Generator[Need, Any, New | Cyclic]:
    """The event that records an edge in the journal of `holder`."""
    above: list[Edge] = [] if child_id == parent_id else (yield Above(parent_id))
    path = run_parents.cycle(child_id, parent_id, above)
    if path is not None:
        return Cyclic(path)
    last: int = yield LastEdge()
    return new(RunLinked(child=child_id, parent=parent_id, seq=last + 1), _fresh(holder, "__workflow_linked__"))


def _inherit(appended: _Appended, child: Loaded, parent: Loaded, at_ms: int) -> Generator[Need, Any, None]:
    """Let a child that came too late to be cancelled with a parent be cancelled now, with all that is below it."""
    run = parent.run
    asked = not run.terminal and run.cancel_requested_at_ms is not None
    if not asked and run.status != Status.CANCELLED:
        return
    first: Loaded = yield One(child.run.lineage_id)
    if first.run.on_cancel == "detach":
        return
    cause: Loaded = yield One(run.run_id, _ids_of(run)(REQUESTED if asked else CANCELLED))
    assert cause.present is not None
    reason = msgspec.json.decode(cause.present.payload).get("reason")
    command = Cancel(child.run.lineage_id, at_ms, reason, run.cancel_requested_at_ms if asked else None)
    event = yield from _stopped(child, command)
    if event is not None:
        appended[child.run.run_id][1].append(event)
    yield from _go_along(appended, child, command)


def _unlink(command: Unlink) -> Deciding:
    child: Loaded | None = yield Newest(command.run_id)
    parent: Loaded | None = yield Newest(command.parent_id)
    if child is None or parent is None:
        return Decision(UnknownRun())
    if (yield Numbered(command.run_id, command.parent_id)) is None:
        return Decision(NotLinked())
    if (yield from _above(child.run)) == command.parent_id:
        return Decision(Refused(f"{command.parent_id} has spawned it, and stays its parent"))
    holder = child if not child.run.terminal else parent
    if holder.run.terminal:
        return Decision(Refused(_BOTH_ENDED))
    event = RunUnlinked(child=command.run_id, parent=command.parent_id)
    write = _write(holder, (new(event, _fresh(holder, "__workflow_unlinked__")),), command.at_ms)
    return Decision(Appended(write.head.version), (write,))


def _end_grace(command: EndGrace) -> Deciding:
    loaded: Loaded | None = yield One(command.run_id)
    if loaded is None:
        return Decision(UnknownRun())
    if loaded.run.terminal:
        return Decision(RefusedTerminal(loaded.run.status))
    over = loaded.run.grace_over_ms
    if over is None or command.at_ms < over:
        return Decision(Refused("it is not asked to end, or has time left"))
    event = yield from _given_up(loaded.run)
    writes = [_write(loaded, (event,), command.at_ms)]
    yield from _tell_parent(writes, writes[0])
    return Decision(Appended(writes[0].head.version, writes[0].run), tuple(writes))


def _resurrect(command: Resurrect) -> Deciding:
    newest: Loaded | None = yield Newest(command.run_id)
    if newest is None:
        return Decision(UnknownRun())
    run = newest.run
    if run.status != Status.FAILED:
        return Decision(RefusedTerminal(run.status))
    above = yield from _above(run)
    parent: Loaded | None = None if above is None else (yield Newest(above))
    event = WorkflowResurrected(reason=command.reason)
    if parent is not None and run.parent_run_id is None:
        # It had ended before it was attached to. It has a parent now, which is told of its next end.
        spawned: Loaded = yield One(parent.run.run_id, _ids_of(parent.run)(child_step(run.key)))
        on_cancel = None if spawned.present is None else _decode_spawned(spawned.present.payload).result.on_cancel
        event = WorkflowResurrected(reason=command.reason, parent=above, on_cancel=on_cancel)
    events = [new(event, _fresh(newest, "__workflow_resurrected__"))]
    ended: list[Run] = yield EndedChildren(run.lineage_id)
    for child in ended:
        # One that ended while the run had failed could tell it nothing then, and nobody would ever again.
        _, unknown = yield from _recorded(run, child_step(child.key), b"null")
        last: Loaded = yield Newest(child.run_id)
        if unknown is None and last.run.terminal:
            _, told = yield from _recorded(run, child_result_step(child.key), _encoder.encode(_ended(last.run)))
            if told is not None:
                events.append(told)
    write = _write(newest, tuple(events), command.at_ms)
    writes = [write]
    if parent is not None and parent.run.status not in (Status.COMPLETED, Status.CANCELLED):
        # What the parent was told of the failure counts no more, or it would fail of it again.
        yield from _retracted(
            writes, parent.run, child_result_step(run.key), command.at_ms, "child resurrected", unless_acted=True
        )
    return Decision(Appended(write.head.version, write.run), tuple(writes))


def _retract(command: Retract) -> Deciding:
    newest: Loaded | None = yield Newest(command.run_id)
    if newest is None:
        return Decision(UnknownRun())
    if newest.run.status in (Status.COMPLETED, Status.CANCELLED):
        return Decision(RefusedTerminal(newest.run.status))
    if newest.head.owner is not None:
        return Decision(Refused("a worker drives the run: what its body has seen cannot be taken back"))
    writes: list[Write] = []
    told = yield from _told_again(newest.run, command.step)
    yield from _retracted(writes, newest.run, command.step, command.at_ms, command.reason, told=told)
    if not writes:
        return Decision(Refused(f"no step {command.step!r} is recorded"))
    return Decision(Appended(writes[0].head.version, writes[0].run), tuple(writes))


def _told_again(run: Run, step: str) -> Generator[Need, Any, StepRecorded | None]:
    """How a child ended, where `step` is the record of that: nobody would say so again to who waits for it anew."""
    kind, _, rest = step.partition(":")
    key, _, what = rest.partition(":")
    if (kind, what) != ("child", "result"):
        return None
    spawned: Loaded = yield One(run.run_id, _ids_of(run)(child_step(key)))
    if spawned.present is None:
        return None
    child: Loaded | None = yield Newest(_decode_spawned(spawned.present.payload).result.run_id)
    if child is None or not child.run.terminal:
        return None
    return StepRecorded(step=step, result=Raw(_encoder.encode(_ended(child.run))))


def _fire(command: Fire) -> Deciding:
    ids = StepIds(*parse_run_id(command.run_id))
    loaded: Loaded | None = yield One(command.run_id, ids(suspended_step(command.version - 1)))
    if loaded is None:
        return Decision(UnknownRun())
    if loaded.present is None or loaded.run.status != Status.SUSPENDED or loaded.head.version != command.version:
        # Something came after it was parked: whoever drives the run on decides what was first.
        return Decision(VersionConflict(loaded.head.version))
    waits = _decode_state(loaded.present.payload).waits
    due = sorted(
        (wait.due_at_ms, wait.step, wait.retracted)
        for wait in waits
        if wait.kind in ("sleep", "timeout") and wait.due_at_ms is not None and wait.due_at_ms <= command.at_ms
    )
    # None of them was recorded when the run was parked, and nothing was since.
    events = [
        new(StepRecorded(step=step, result=Raw(b"null")), ids(again(step, retracted))) for _, step, retracted in due
    ]
    if not events:
        return Decision(VersionConflict(loaded.head.version))
    write = _write(loaded, tuple(events), command.at_ms)
    return Decision(Appended(write.head.version), (write,))


MOST_ROUNDS: Final = 100
"""So many rounds are deleted in one transaction, besides round 0."""


def spent(one: Run, newest: Run, before_ms: int) -> bool:
    """Whether nothing needs a round any more, though its lineage stays: it handed off at `before_ms` or earlier, and it
    is neither the first, nor the newest, nor the one before that.

    Round 0 has the key and the input that a start is compared with, and is what parents, children and handles refer to.
    The newest goes on, or is what all ask how the lineage ended. The one before it is where the newest has come from:
    it may read how that ended, and attach to its children. Of any other round, what was to be kept was carried over
    when it ended, or is of the lineage: children are told, asked for and cancelled by round 0's id.
    """
    handed_off = one.handoff_run_id is not None and one.finished_at_ms is not None and one.finished_at_ms <= before_ms
    return handed_off and 0 < one.round_ordinal < newest.round_ordinal - 1


def _trim(command: Trim) -> Deciding:
    newest: Loaded | None = yield Newest(command.run_id)
    if newest is None:
        return Decision(UnknownRun())
    rounds: list[Run] = yield Rounds(command.run_id, command.most)
    # From the oldest on, without a gap: so one round at most has lost the one before it.
    gone = list(takewhile(lambda one: spent(one, newest.run, command.before_ms), rounds))
    if not gone:
        return Decision(Refused("each of its rounds is needed, or ended later"))
    return Decision(Collected(len(gone)), gone=tuple(reversed(gone)))


def _collect(command: Collect) -> Deciding:
    kept = yield from _kept(command.run_id, command.before_ms, command.parent, preview=command.preview)
    if kept is not None:
        return Decision(Refused(kept))
    newest: Loaded = yield Newest(command.run_id)
    if not newest.run.round_ordinal:
        # Most have one round, which is known: no further question, and so no round trip under the lock.
        return Decision(Collected(1), gone=(newest.run,))
    first: Loaded = yield One(command.run_id)
    rounds: list[Run] = yield Rounds(command.run_id, MOST_ROUNDS + 1)
    if len(rounds) > MOST_ROUNDS and not command.preview:
        return Decision(Refused(f"it has more than {MOST_ROUNDS} rounds: trim it first"))
    return Decision(Collected(1 + len(rounds)), gone=(*reversed(rounds), first.run))


def _kept(
    lineage_id: str, before_ms: int, attached: str | None = None, *, preview: bool
) -> Generator[Need, Any, str | None]:
    """Why a lineage cannot be collected, if it cannot."""
    newest: Loaded | None = yield Newest(lineage_id)
    if newest is None:
        return "there is no such run"
    if not newest.run.terminal or newest.run.finished_at_ms is None:
        return "it has not ended"
    if newest.run.finished_at_ms > before_ms:
        return "it ended later"
    first: Loaded | None = (yield One(lineage_id)) if newest.run.round_ordinal else newest
    above = attached if first is None else first.run.parent_run_id or attached
    if first is None or above is None:
        return None
    parent: Loaded | None = yield Newest(above)
    if parent is None or parent.run.status in (Status.COMPLETED, Status.CANCELLED):
        return None
    ids, key = _ids_of(parent.run), first.run.key
    spawned: Loaded = yield One(parent.run.run_id, ids(child_step(key)))
    told: Loaded = yield One(parent.run.run_id, ids(child_result_step(key)))
    if parent.run.status != Status.FAILED:
        if spawned.present is None and told.present is None and not (yield from _had(parent.run, key)):
            # It was begun after the child had ended and been told of: it does not hold it, or the children of a run
            # that rotates for ever would stay for ever.
            return None
        return f"{parent.run.run_id} may ask for it"
    if spawned.present is None or told.present is not None:
        return None
    # Resurrected, the parent would be told then how the child ended: it goes after the parent. Not with it: of two
    # deletions one may fail, or be the last before a crash.
    if preview and (yield from _kept(parent.run.lineage_id, before_ms, preview=True)) is None:
        return None
    return f"{parent.run.run_id} has failed and was not told how it ended"


def _had(run: Run, key: str) -> Generator[Need, Any, bool]:
    """Whether the round before had to do with the child `key`: one that has just begun may be about to attach to it."""
    if not run.round_ordinal or run.parent_run_id is None:
        return False
    ids = StepIds(run.workflow, run.key, run.round_ordinal - 1)
    for step in (child_step(key), child_result_step(key)):
        before: Loaded | None = yield One(run.parent_run_id, ids(step))
        if before is not None and before.present is not None:
            return True
    return False


def _retracted(
    writes: list[Write],
    run: Run,
    step: str,
    at_ms: int,
    reason: str | None,
    *,
    unless_acted: bool = False,
    told: StepRecorded | None = None,
) -> Generator[Need, Any, None]:
    """Retract the newest record of a step; with `unless_acted`, only while the run has recorded nothing since: what it
    did then, it may have done because of that record. `told` is recorded in its place."""
    ids = _ids_of(run)
    number = 0
    while True:
        recorded: Loaded = yield One(run.run_id, ids(again(step, number)))
        if recorded.present is None:
            # One that has no result may have attempts that keep it from being run again.
            recorded = yield One(run.run_id, ids(begun_step(step, number)))
        if recorded.present is None:
            return
        number += 1
        loaded: Loaded = yield One(run.run_id, ids(_retraction(step, number)))
        if loaded.present is None:
            if unless_acted and (yield Acted(run.run_id, recorded.present.version)):
                return
            events = [new(StepRetracted(step=step, reason=reason), ids(_retraction(step, number)))]
            if told is not None:
                events.append(new(told, ids(again(step, number))))
            writes.append(_write(loaded, tuple(events), at_ms))
            return


def _ids_of(run: Run) -> StepIds:
    return StepIds(run.workflow, run.key, run.round_ordinal)


def _fresh(loaded: Loaded, what: str) -> bytes:
    # One that may come again has an id of its own each time, and the same one each time it is decided.
    return _ids_of(loaded.run)(f"{what}#{loaded.head.version}")


def fold(run: Run, events: tuple[New, ...], at_ms: int) -> Run:
    """The row after `events`; the same object where they do not change it."""
    after: Run | None = run
    for one in events:
        after = project(after, one.event, at_ms)
    assert after is not None
    return after


def releases(events: tuple[New, ...], after: Run) -> bool:
    """Whether the owner gives the run up with these events: it has ended, is parked, or waits for its next attempt."""
    return after.terminal or after.status == Status.SUSPENDED or isinstance(events[-1].event, WorkflowRetried)


def same_json(left: str, right: str) -> bool:
    """Whether two JSON texts say the same, whatever the order of members; 1, 1.0 and true are three values."""
    return left == right or _sorted(msgspec.json.decode(left)) == _sorted(msgspec.json.decode(right))
