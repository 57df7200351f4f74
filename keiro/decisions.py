"""What each command does, given the loaded state: pure functions, the only place these rules are written.

A command is data. A decision is its outcome together with the events and rows to write; stores write them and decide
nothing. The same functions run under the store's lock and, ahead of it, on what the owner of a run holds in memory:
there the store only checks that the memory was current.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec
from msgspec.structs import replace

from keiro.events import Event, WorkflowRetried, WorkflowStarted
from keiro.projections.runs import project
from keiro.rows import Head, Run, Status

_encoder: Final = msgspec.json.Encoder()
_sorted: Final = msgspec.json.Encoder(order="sorted").encode


class New(msgspec.Struct, frozen=True):
    """An event to append: the event, its 16-byte id and its stored JSON."""

    event: Event
    event_id: bytes
    payload: str


def new(event: Event, event_id: bytes) -> New:
    """`event` as it will be appended."""
    return New(event, event_id, _encoder.encode(event).decode())


class Start(msgspec.Struct, frozen=True):
    """Create a run. With `owner`, the run is born owned by that worker in epoch 1."""

    run_id: str
    started: New
    at_ms: int
    owner: int | None = None


class Append(msgspec.Struct, frozen=True):
    """Append events to an existing run.

    With `owner`, only if that worker owns the run in `epoch`. `expected` is the version the sender saw: the owner's is
    a hint that saves the load; a stranger's (`owner` None) is a condition: no command of the aggregate came after it.
    `run` is the owner's copy of the row after the events, where they change it.
    """

    run_id: str
    events: tuple[New, ...]
    at_ms: int
    run_key: int = 0
    owner: int | None = None
    epoch: int = 0
    expected: int | None = None
    run: Run | None = None


Command: TypeAlias = Start | Append


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


class Loaded(msgspec.Struct):
    """What a decision may look at: the row, the head, the stored event that has the command's own event id, and whether
    an event of the user's aggregate came after the version the command expects."""

    run: Run
    head: Head
    present: Stored | None = None
    overtaken: bool = False


class Appended(msgspec.Struct, frozen=True):
    """The events are in the journal; `version` is that of the last one. `run` is the row of a run that was born."""

    version: int
    run: Run | None = None


class AlreadyPresent(msgspec.Struct, frozen=True):
    """An event with this id is there already (first writer wins); `stored` is it."""

    stored: Stored


class Existing(msgspec.Struct, frozen=True):
    """A run with this id and an equal input exists; nothing was written."""

    run: Run


class InputDiffers(msgspec.Struct, frozen=True):
    """A run with this id exists and was started with another input; nothing was written."""

    run: Run


class RefusedTerminal(msgspec.Struct, frozen=True):
    """The run has ended; nothing was written."""

    status: str


class FenceLost(msgspec.Struct, frozen=True):
    """The sender does not own the run (any more); nothing was written."""


class VersionConflict(msgspec.Struct, frozen=True):
    """A command of the aggregate came after what the sender saw; the run is at `version` now; nothing was written."""

    version: int


class UnknownRun(msgspec.Struct, frozen=True):
    """No run has this id; nothing was written, nothing is created."""


Outcome: TypeAlias = (
    Appended | AlreadyPresent | Existing | InputDiffers | RefusedTerminal | FenceLost | VersionConflict | UnknownRun
)


class Decision(msgspec.Struct, frozen=True):
    """An outcome and what must be written with it, in one transaction. No events: nothing to write."""

    outcome: Outcome
    run_id: str = ""
    events: tuple[New, ...] = ()
    at_ms: int = 0
    before: Run | None = None
    run: Run | None = None
    head: Head | None = None


def decide(command: Command, loaded: Loaded | None) -> Decision:
    """What `command` does to the run loaded as `loaded` (None: no such run)."""
    match command:
        case Start():
            return _start(command, loaded)
        case Append():
            return _append(command, loaded)


def _start(command: Start, loaded: Loaded | None) -> Decision:
    started = command.started.event
    assert isinstance(started, WorkflowStarted)
    if loaded is None:
        run = born(command)
        head = Head(run_key=0, version=1, owner=command.owner, epoch=0 if command.owner is None else 1)
        return Decision(Appended(1, run), command.run_id, (command.started,), command.at_ms, None, run, head)
    if loaded.present is not None:
        # Our own start, committed before its answer was lost: tell the sender as if it had been told then.
        mine = command.owner is not None and loaded.head.owner == command.owner and loaded.head.epoch == 1
        return Decision(Appended(1, loaded.run), run=loaded.run if mine else None)
    if same_json(loaded.run.input_json, bytes(started.input).decode()):
        return Decision(Existing(loaded.run))
    return Decision(InputDiffers(loaded.run))


def born(command: Start) -> Run:
    """The row of a run that does not exist yet."""
    run = project(None, command.started.event, command.at_ms)
    assert run is not None
    if command.owner is None:
        return run
    return replace(run, status=Status.RUNNING, started_at_ms=command.at_ms)


def _append(command: Append, loaded: Loaded | None) -> Decision:
    if loaded is None:
        return Decision(UnknownRun())
    run, head = loaded.run, loaded.head
    # The fence comes before everything else: a former owner must not be answered with its successor's work.
    if command.owner is not None and (head.owner != command.owner or head.epoch != command.epoch):
        return Decision(FenceLost())
    if loaded.present is not None:
        return Decision(AlreadyPresent(loaded.present))
    if run.terminal:
        return Decision(RefusedTerminal(run.status))
    # Steps of the run do not change what a command was decided on; another command does.
    if command.owner is None and loaded.overtaken:
        return Decision(VersionConflict(head.version))
    after = fold(run, command.events, command.at_ms)
    version = head.version + len(command.events)
    owner = None if releases(command.events, after) else head.owner
    return Decision(
        Appended(version),
        command.run_id,
        command.events,
        command.at_ms,
        run,
        after,
        Head(run_key=head.run_key, version=version, owner=owner, epoch=head.epoch),
    )


def fold(run: Run, events: tuple[New, ...], at_ms: int) -> Run:
    """The row after `events`; the same object where they do not change it."""
    after: Run | None = run
    for one in events:
        after = project(after, one.event, at_ms)
    assert after is not None
    return after


def releases(events: tuple[New, ...], after: Run) -> bool:
    """Whether the owner gives the run up with these events: it has ended, or waits for its next attempt."""
    return after.terminal or isinstance(events[-1].event, WorkflowRetried)


def same_json(left: str, right: str) -> bool:
    """Whether two JSON texts say the same, whatever the order of members; 1, 1.0 and true are three values."""
    return left == right or _sorted(msgspec.json.decode(left)) == _sorted(msgspec.json.decode(right))
