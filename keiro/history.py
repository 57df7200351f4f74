"""A run's history as a replay needs it, and snapshots of it: what was recorded of each step, in order.

A snapshot holds a stretch of the journal in a form that is read in a fifth of the time. It is advisory: the journal
decides, and a snapshot that is missing or cannot be read costs nothing but time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Final, NamedTuple, Protocol

import msgspec
from msgspec import UNSET, Raw, UnsetType

from keiro.decisions import Stored
from keiro.errors import DecodeFailed, StoreError
from keiro.events import AttemptFailed, AttemptProgressed, AttemptStarted, StateChanged, StepRetracted

EVERY: int = 2000
"""So many events make a snapshot."""
IRREVERSIBLE: Final = "irreversible"
MOST_BYTES: Final = 4 << 20
"""A run whose events are larger than that gets none: reading them is what takes the time, in whatever form."""


class Recorded(msgspec.Struct, gc=False):
    """What the journal says about a step, as far as a replay asks: decoded straight from StepRecorded, without the
    event around it, then told when it was recorded and at which version of the run. `failed` is set instead of a
    result.
    """

    step: str
    result: Raw = Raw(b"null")
    inputs_digest: str | None = None
    at_ms: int = 0
    version: int = 0
    failed: AttemptFailed | None = None


class _Step(msgspec.Struct, array_like=True, gc=False):
    """A recorded step in a snapshot."""

    version: int
    at_ms: int
    recorded: Recorded


class _Other(msgspec.Struct, array_like=True, gc=False):
    """Any other event in a snapshot."""

    version: int
    at_ms: int
    topic: str
    payload: str


class Snapshot(msgspec.Struct, array_like=True, gc=False):
    """The events of a run with the versions from `after` + 1 to `until`."""

    after: int
    until: int
    steps: list[_Step]
    others: list[_Other]

    def events(self, run_key: int) -> list[Stored]:
        """The events that are no recorded steps."""
        return [Stored(0, run_key, one.version, b"", one.topic, one.payload, one.at_ms) for one in self.others]


class History(NamedTuple):
    """All that is recorded of a run: stretches that are snapshots, and the events after them."""

    snapshots: Sequence[Snapshot]
    stored: list[Stored]


class Request(NamedTuple):
    """That a run is asked to end: by which event, when, and why."""

    version: int
    at_ms: int
    reason: str | None


class Begun(msgspec.Struct, gc=False):
    """An attempt of a step that the journal knows of though the step has no result: its number, and what its next
    execution needs. `failed` where it has ended; else its process was interrupted."""

    attempt: int
    tier: str | None = None
    key: str | None = None
    preimage: Raw | UnsetType = UNSET
    checkpoint: Raw | None = None
    failed: bool = False


class Past(NamedTuple):
    """What the journal says of a run: the newest word on each step, when its clocks are due, how often each step was
    retracted, which deferreds the body is said to have taken, whether it is asked to end, and the attempts that have
    begun of steps without a result."""

    steps: dict[str, Recorded]
    clocks: dict[str, int] | None
    retracted: dict[str, int] | None
    consumed: set[str] | None
    request: Request | None
    begun: dict[str, Begun] | None = None


class Journal(Protocol):
    """What a store has of the histories of runs."""

    async def history(self, run_keys: Sequence[int], after: int = 0) -> dict[int, list[Stored]]:
        """The events of runs from version `after` + 1 on, in order."""

    async def step_maps(self, run_key: int) -> list[str]:
        """The snapshots of a run as JSON, in order."""


decode_step: Final = msgspec.json.Decoder(Recorded).decode
_decode_state: Final = msgspec.json.Decoder(StateChanged).decode
_decode_retracted: Final = msgspec.json.Decoder(StepRetracted).decode
_decode_failure: Final = msgspec.json.Decoder(AttemptFailed).decode
_decode_begun: Final = msgspec.json.Decoder(AttemptStarted).decode
_decode_progress: Final = msgspec.json.Decoder(AttemptProgressed).decode
_decode_snapshot: Final = msgspec.json.Decoder(Snapshot).decode
_encode: Final = msgspec.json.Encoder().encode


async def load(journal: Journal, run_key: int) -> History:
    """The history of a run, by its snapshots as far as they can be read."""
    snapshots: list[Snapshot] = []
    until = 0
    try:
        texts = await journal.step_maps(run_key)
    except DecodeFailed:
        texts = []  # sealed with a key that is not there: the events will say so, if they are too
    for text in texts:
        try:
            one = _decode_snapshot(text)
        except msgspec.DecodeError:
            break
        if one.after != until or len(one.steps) + len(one.others) != one.until - one.after:
            break
        snapshots.append(one)
        until = one.until
    return History(snapshots, (await journal.history([run_key], until))[run_key])


def snapshot_of(stored: Sequence[Stored]) -> str:
    """The JSON of a snapshot of events that follow each other."""
    steps = [f"[{row.version},{row.recorded_at_ms},{row.payload}]" for row in stored if row.topic == "StepRecorded"]
    others = [
        _Other(row.version, row.recorded_at_ms, row.topic, row.payload) for row in stored if row.topic != "StepRecorded"
    ]
    after, until = stored[0].version - 1, stored[-1].version
    return f"[{after},{until},[{','.join(steps)}],{_encode(others).decode()}]"


def read_step(row: Stored) -> Recorded:
    """The record of a step, from its event."""
    return _placed(decode_step(row.payload), row.version, row.recorded_at_ms)


def _placed(found: Recorded, version: int, at_ms: int) -> Recorded:
    found.version = version
    found.at_ms = at_ms
    return found


def past_of(run_id: str, stored: Sequence[Stored], snapshots: Sequence[Snapshot] = ()) -> Past:
    """What is to be known for a replay.

    A retry of the workflow, and a resurrection, give its failed steps a new chance; what succeeded stays.
    """
    fold = _Fold(run_id)
    for one in snapshots:
        if len(one.others) == 0:
            fold.steps(_placed(step.recorded, step.version, step.at_ms) for step in one.steps)
        else:
            fold.merged(one)
    fold.events(stored)
    return Past(fold.history, fold.clocks, fold.retracted, fold.consumed, fold.request, fold.begun)


class _Fold:
    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.history: dict[str, Recorded] = {}
        self.clocks: dict[str, int] | None = None
        self.retracted: dict[str, int] | None = None
        self.consumed: set[str] | None = None
        self.request: Request | None = None
        self.begun: dict[str, Begun] | None = None

    def steps(self, recorded: Iterable[Recorded]) -> None:
        history, clocks = self.history, self.clocks
        for found in recorded:
            history[found.step] = found
            if clocks is not None:
                clocks.pop(found.step, None)
            if self.begun is not None:
                self.begun.pop(found.step, None)

    def merged(self, snapshot: Snapshot) -> None:
        rows: list[_Step | _Other] = [*snapshot.steps, *snapshot.others]
        for one in sorted(rows, key=attrgetter("version")):
            if isinstance(one, _Step):
                self.steps([_placed(one.recorded, one.version, one.at_ms)])
            else:
                self.event(Stored(0, 0, one.version, b"", one.topic, one.payload, one.at_ms))

    def events(self, stored: Sequence[Stored]) -> None:
        history = self.history
        for row in stored:
            if row.topic == "StepRecorded":
                try:
                    found = decode_step(row.payload)
                except msgspec.DecodeError as error:
                    raise self._unreadable(row, error) from error
                found.at_ms = row.recorded_at_ms
                found.version = row.version
                history[found.step] = found
                if self.clocks is not None:
                    self.clocks.pop(found.step, None)
                if self.begun is not None:
                    self.begun.pop(found.step, None)
            else:
                self.event(row)

    def event(self, row: Stored) -> None:
        try:
            self._event(row)
        except msgspec.DecodeError as error:
            raise self._unreadable(row, error) from error

    def _event(self, row: Stored) -> None:
        match row.topic:
            case "StateChanged":
                changed = _decode_state(row.payload)
                if changed.consumed:
                    self.consumed = {*(self.consumed or ()), *changed.consumed}
                if changed.state == "cancel_requested":
                    self.request = request_of(row, changed)
                elif changed.state == "clock_scheduled":
                    clocks = self.clocks = {} if self.clocks is None else self.clocks
                    for wait in changed.waits:
                        clocks.setdefault(wait.step, wait.due_at_ms or 0)
            case "StepRetracted":
                step = _decode_retracted(row.payload).step
                self.history.pop(step, None)
                retracted = self.retracted = {} if self.retracted is None else self.retracted
                retracted[step] = retracted.get(step, 0) + 1
                if self.clocks is not None:
                    self.clocks.pop(step, None)
                if self.begun is not None:
                    self.begun.pop(step, None)
            case "AttemptStarted":
                started = _decode_begun(row.payload)
                self.begun = {} if self.begun is None else self.begun
                before = self.begun.get(started.step)
                checkpoint = None if before is None else before.checkpoint
                self.begun[started.step] = Begun(
                    started.attempt, started.tier, started.idempotency_key, started.preimage, checkpoint
                )
            case "AttemptProgressed":
                progress = _decode_progress(row.payload)
                if (known := self.history.get(progress.step)) is not None and known.failed is None:
                    return  # it was on its way when the result was recorded
                self.begun = {} if self.begun is None else self.begun
                begun = self.begun.setdefault(progress.step, Begun(progress.attempt))
                begun.checkpoint = progress.checkpoint
                if progress.attempt > begun.attempt:  # else it was on its way when the attempt failed
                    begun.attempt, begun.failed = progress.attempt, False
            case "AttemptFailed":
                failed = _decode_failure(row.payload)
                if self.begun is not None and (ended := self.begun.get(failed.step)) is not None:
                    ended.attempt, ended.failed = failed.attempt, True
                self.history[failed.step] = Recorded(
                    failed.step,
                    inputs_digest=failed.inputs_digest,
                    at_ms=row.recorded_at_ms,
                    version=row.version,
                    failed=failed,
                )
            case "WorkflowRetried" | "WorkflowResurrected":
                for name in [name for name, found in self.history.items() if found.failed is not None]:
                    del self.history[name]
                if self.begun is not None:
                    # What cannot be taken back stays known, whatever gets another chance.
                    self.begun = {name: one for name, one in self.begun.items() if one.tier == IRREVERSIBLE}

    def _unreadable(self, row: Stored, error: Exception) -> DecodeFailed:
        return DecodeFailed(
            f"event {row.version} of {self.run_id} ({row.topic}) cannot be read: {error}. Nothing of the run is "
            "replayed without it: restore the journal from a backup, or update keiro if a newer one wrote it",
            where=row.topic,
        )


def request_of(row: Stored, asked: StateChanged) -> Request:
    """The request to end that an event records."""
    at_ms = row.recorded_at_ms if asked.requested_at_ms is None else asked.requested_at_ms
    return Request(row.version, at_ms, asked.reason)


def check_contiguous(run_id: str, stored: Sequence[Stored], *, after: int, until: int) -> None:
    """Raise `StoreError` unless `stored` is every event of the run from version `after` + 1 to `until` at least.

    A step that is missing from a history would run again, as if it had never happened.
    """
    last = stored[-1].version if stored else after
    if last != after + len(stored) or last < until:
        raise StoreError(
            f"the journal of {run_id} has {len(stored)} events after version {after} and the last is {last}, but the "
            f"run has reached {max(last, until)}: some are missing. Restore them from a backup; it is not driven on"
        )
