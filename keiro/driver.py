"""Drives one run in this process: replays its journal, executes what is new, records, and settles it.

A step whose record is in the history returns it without running. Everything else is appended under the fence of this
worker; once the run is sealed (fence lost, shutdown) every call of the body raises `RunSealed` and nothing is recorded.
"""

from __future__ import annotations

import asyncio
import copy
import random
import uuid
from asyncio import Future, Task
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any, Final, Protocol
from weakref import ReferenceType, ref

import msgspec
from msgspec import Raw

from keiro import codec
from keiro.decisions import (
    AlreadyPresent,
    Append,
    Appended,
    FenceLost,
    New,
    Outcome,
    RefusedTerminal,
    Stored,
    fold,
    new,
)
from keiro.definition import Step, Workflow
from keiro.errors import (
    DecodeFailed,
    InvalidCall,
    NonDeterminism,
    PayloadRejected,
    ProjectionFailed,
    RunSealed,
    StepNameClash,
    StoreError,
)
from keiro.events import (
    AttemptFailed,
    Event,
    StepRecorded,
    WorkflowCompleted,
    WorkflowFailed,
    WorkflowRetried,
)
from keiro.failures import capture, revive, summary
from keiro.identity import StepIds
from keiro.mapper import EventMapper
from keiro.reports import SENTENCES
from keiro.retry import Retry
from keiro.rows import Head, Run
from keiro.run import WorkflowRun, aggregate_of, apply_event, bind, new_events
from keiro.stores.base import Store
from keiro.threads import in_thread

COMPLETED: Final = "__workflow_completed__"
FAILED: Final = "__workflow_failed__"
STORE_RETRY_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class Host(Protocol):
    """What a driver needs of the engine that hosts it."""

    store: Store
    mapper: EventMapper
    strict: bool
    payload_limit: int

    def wall_ms(self) -> int:
        """The time events are recorded at."""

    def holds(self) -> bool:
        """Whether this process still owns its runs, so that an effect may begin; if not, it seals them."""

    def report(self, event: str, run_id: str, **fields: object) -> None:
        """Tell operators something they should know."""


class Handle(Protocol):
    """Who is told of the end of a run that it started."""

    ended: Run | None


class Strand:
    """One asyncio task of a run: where it stands in time and in its own stream of random numbers.

    Strands are named by the path of their creation (`0`, `0.1`, `0.1.2`), which a replay repeats, not by the order in
    which they happened to run.
    """

    __slots__ = ("children", "driver", "now_ms", "path", "rng", "task")

    def __init__(self, driver: Driver, task: ReferenceType[Task[Any]], path: str, now_ms: int) -> None:
        self.driver = driver
        self.task = task
        self.path = path
        self.now_ms = now_ms
        self.children = 0
        self.rng: random.Random | None = None


_strand: ContextVar[Strand | None] = ContextVar("keiro_strand", default=None)


# A run without commands needs no queue of its own: an empty deque takes more memory than the rest of the driver.
_NO_EVENTS: Final[deque[Stored]] = deque(maxlen=0)


class Driver:
    """One resident run."""

    __slots__ = (
        "__weakref__",
        "_begun",
        "_called",
        "_history",
        "_ids",
        "_in_flight",
        "_instance",
        "_known",
        "_loop",
        "_names",
        "_root",
        "_stored",
        "_unseen",
        "_version",
        "draining",
        "epoch",
        "handle",
        "host",
        "lost",
        "over",
        "owner",
        "run",
        "sealed",
        "task",
        "workflow",
    )

    def __init__(self, host: Host, workflow: Workflow, run: Run, head: Head, stored: list[Stored]) -> None:
        self.host = host
        self.workflow = workflow
        self.run = run
        self.owner = head.owner
        self.epoch = head.epoch
        self.sealed = False
        self.over = False
        self.draining: asyncio.Event | None = None
        self.handle: Callable[[], Handle | None] | None = None  # a weak reference to that of its start
        self._in_flight = 0
        self._called = 0
        self._begun = 0
        self.lost = False
        self.task: Task[None] | None = None
        self._version = head.version
        self._loop = asyncio.get_running_loop()
        self._names: dict[str, Any] = {}
        self._ids = StepIds(run.workflow, run.key, run.round_ordinal)
        self._stored: list[Stored] = stored
        self._history: dict[str, Recorded] = {}
        self._unseen = _NO_EVENTS
        self._known = head.version
        self._root: Strand | None = None
        self._instance: WorkflowRun

    # Life

    async def drive(self) -> None:
        """Run the body to its end and settle the run, unless it is sealed before."""
        task = asyncio.current_task()
        assert task is not None
        self.task = task
        if self.sealed:
            return  # before its first tick: there was no task to cancel yet
        self._remember()
        self._root = Strand(self, ref(task), "0", self.run.created_at_ms)
        _strand.set(self._root)
        try:
            self._instance = instance = aggregate_of(self.workflow, self.run)
            bind(instance, self)
            args, kwargs = self.workflow.input.decode(self.run.input_json.encode())
            result = await self.workflow.body(instance, *args, **kwargs)
            if self.sealed:
                return  # the body swallowed the seal and went on to its end: whatever it returned is not the run's
            self._check_replayed()
            payload = codec.encode(
                result, where=f"result of workflow {self.run.workflow!r}", limit=self.host.payload_limit
            )
            # A result that nobody could read would make the run completed, and every look at it an error.
            self.workflow.decode_result(payload)
            event: Event = WorkflowCompleted(result=Raw(payload))
        except RunSealed:
            return
        except asyncio.CancelledError as error:
            # Cancelled from outside (shutdown, the loop's end): the run is handed back, it has not failed. Without a
            # request to cancel this task, the body awaited something that was cancelled: that is its own failure.
            if self.sealed or task.cancelling():
                self.sealed = True
                raise
            event = self._failed(error)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise  # the process, or this coroutine, is about to end: nothing has been decided about the run
        except BaseException as error:
            # Also what is no Exception: left to the engine, it would be driven into again and again, and never end.
            event = self._failed(error)
        finally:
            # From here on no task that the body has left behind begins an effect, whose record would be refused.
            self.over = True
        try:
            await self._settle(event)
        except RunSealed:
            return  # what a sealed body raises is not the run's either

    def _check_replayed(self) -> None:
        """Whether the body that has returned is the one that was recorded."""
        if self._called != self._begun:
            self._doubt("never_awaited", self._called - self._begun)
        if self._history:
            self._doubt("never_asked_for", ", ".join(sorted(self._history)[:10]))

    def _doubt(self, what: str, steps: object) -> None:
        if self.host.strict:
            raise NonDeterminism(SENTENCES[what][1].format(run_id=self.run.run_id, steps=steps))
        self.host.report(what, self.run.run_id, steps=steps)

    def _remember(self) -> None:
        """Read the history, here and not where runs are adopted: one that cannot be read stops no other run."""
        stored, self._stored = self._stored, []
        check_contiguous(self.run.run_id, stored, after=1, until=self._known)
        if stored:
            # More than the head had at the claim, where somebody appended before the history was read.
            self._version = self._known = stored[-1].version
        self._history = history_of(self.run.run_id, stored)
        if self.workflow.aggregate is not None:
            self._unseen = deque(row for row in stored if ":" in row.topic)

    def _failed(self, error: BaseException) -> Event:
        policy = self.workflow.retry
        attempt = self.run.attempts + 1
        delay = None
        if policy is not None and not isinstance(error, PayloadRejected):
            delay = policy.delay(attempt, error, random.random())
        failure = capture(error)
        if delay is None:
            return WorkflowFailed(failure=failure)
        due = self.host.wall_ms() + round(delay * 1000)
        return WorkflowRetried(attempt=attempt, failure=failure, next_attempt_at_ms=due)

    async def _settle(self, event: Event) -> None:
        # A failure may be followed by another one after a resurrection or a retry, so its id is fresh each time.
        event_id = self._ids(COMPLETED) if isinstance(event, WorkflowCompleted) else uuid.uuid4().bytes
        await self._record(new(event, event_id))
        match event:
            case WorkflowFailed():
                self.host.report("run_failed", self.run.run_id, error=summary(event.failure))
            case WorkflowRetried():
                seconds = (event.next_attempt_at_ms - self.host.wall_ms()) / 1000
                failure = summary(event.failure)
                self.host.report(
                    "run_retried", self.run.run_id, attempt=event.attempt, error=failure, seconds=round(seconds, 1)
                )

    def seal(self) -> None:
        """Stop the body before its next effect; from now on nothing is recorded."""
        if not self.sealed:
            self.sealed = True
            if self.draining is not None:
                self.draining.set()
            if self.task is not None and not self.task.done():
                self.task.cancel()

    def drain(self) -> None:
        """Let the steps under way end and be recorded, begin no other, then stop."""
        self.draining = asyncio.Event()
        if not self._in_flight:
            self.seal()

    # Recording

    async def _record(self, *events: New) -> tuple[Outcome, int]:
        """Append events under the fence, however often the store is away meanwhile; and when they were recorded."""
        pauses = iter(STORE_RETRY_S)
        while True:
            if self.sealed:
                raise RunSealed(_sealed(self.run.run_id))
            at_ms = self.host.wall_ms()
            try:
                outcome = await self._send(events, at_ms)
            except (StoreError, ProjectionFailed) as error:
                # The effect has happened: its record must not be lost to an outage, or to a read model that cannot fold
                # it. Nothing was written (or it was, and its id tells), so the same event is sent again, at the version
                # the run now has.
                if self.over and self.run.terminal and events[0].event.__class__ in (StepRecorded, AttemptFailed):
                    # A task that the body left behind, while or after the run's end is recorded: its record would be
                    # refused for that, so neither an engine that closes nor an outage is news to it.
                    raise RunSealed(_sealed(self.run.run_id)) from error
                what = "record_refused" if isinstance(error, ProjectionFailed) else "store_away"
                self.host.report(what, self.run.run_id, error=str(error))
                await asyncio.sleep(next(pauses, STORE_RETRY_S[-1]))
                await self._reload()
                continue
            if type(outcome) is Appended:
                if outcome.version > self._version:
                    # Somebody else appended to this run meanwhile; the store decided anew, on what is there now.
                    self._version = outcome.version
                return outcome, at_ms
            if isinstance(outcome, AlreadyPresent):
                self._version = max(self._version, outcome.stored.version)
                return outcome, outcome.stored.recorded_at_ms
            self.lost = True
            self.seal()
            match outcome:
                case FenceLost():
                    self.host.report("fence_lost", self.run.run_id)
                case RefusedTerminal():
                    self.host.report("already_ended", self.run.run_id, status=outcome.status)
            raise RunSealed(_sealed(self.run.run_id))

    def _send(self, events: tuple[New, ...], at_ms: int) -> Future[Outcome]:
        run = self.run
        after = run if type(events[0].event) is StepRecorded else fold(run, events, at_ms)
        expected = self._version
        self._version = expected + len(events)
        changed = None
        if after is not run:
            self.run = changed = after
        return self.host.store.submit(
            Append(run.run_id, events, at_ms, run.run_key, self.owner, self.epoch, expected, changed)
        )

    async def _reload(self) -> None:
        pauses = iter(STORE_RETRY_S)
        while True:
            if self.sealed:
                raise RunSealed(_sealed(self.run.run_id))
            try:
                found = await self.host.store.head(self.run.run_id)
            except StoreError:
                await asyncio.sleep(next(pauses, STORE_RETRY_S[-1]))
                continue
            if found is not None:
                self._version = found[1].version
            return

    # What a body calls

    def step(
        self,
        step: Step,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        name: str,
        retry: Retry | None,
        timeout: float | None,
    ) -> Coroutine[Any, Any, Any]:
        """Reserve the step's name now; the coroutine returns its result."""
        strand = self._here()
        name = self._reserve(name, strand)
        self._called += 1
        found = self._history.pop(name, None)
        if found is None:
            return self._execute(strand, step, name, args, kwargs, retry or step.retry, timeout or step.timeout, 1)
        return self._replay(strand, found, step, name, args, kwargs, retry, timeout)

    def _reserve(self, name: str, strand: Strand) -> str:
        seen = self._names.get(name)
        if seen is None:
            self._names[name] = [strand.path, 1]
            return name
        if seen[0] != strand.path:
            raise StepNameClash(
                f"step {name!r} of {self.run.run_id} is used by two tasks at once, a replay could not tell them apart: "
                "pass key= to name each call, or use run.scope(key) or run.map(...)"
            )
        seen[1] += 1
        return f"{name}#{seen[1]}"

    async def _replay(
        self,
        strand: Strand,
        found: Recorded,
        step: Step,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        retry: Retry | None,
        timeout: float | None,
    ) -> Any:
        self._begun += 1
        if found.inputs_digest is not None and found.inputs_digest != codec.digest(args, kwargs):
            problem = f"step {name!r} of {self.run.run_id} was recorded with other inputs than it is called with now"
            if self.host.strict:
                raise NonDeterminism(f"{problem}: the body must call it with the same values at every replay")
            self.host.report("inputs_differ", self.run.run_id, step=name)
        failed = found.failed
        if failed is not None and failed.next_attempt_at_ms is not None:
            await self._pause(failed.next_attempt_at_ms)
            self._called += 1
            return await self._execute(
                strand, step, name, args, kwargs, retry or step.retry, timeout or step.timeout, failed.attempt + 1
            )
        strand.now_ms = found.at_ms
        if self._unseen:
            await self._deliver(found.version)
        if failed is not None:
            raise revive(failed.failure)
        return step.decode(found.result)

    async def _execute(
        self,
        strand: Strand,
        step: Step,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        retry: Retry | None,
        timeout: float | None,
        attempt: int,
    ) -> Any:
        host = self.host
        self._begun += 1
        # An annotation that no JSON can be read as is refused before the effect, not after it.
        step.decode.compile()
        digest = codec.digest(args, kwargs) if args or kwargs else None
        while True:
            if self.draining is not None:
                # Steps of other tasks are still to end and be recorded: raising here could stop the body before.
                await self.draining.wait()
            if self.sealed or self.over or not host.holds():
                raise RunSealed(_sealed(self.run.run_id))
            started = host.wall_ms()
            self._in_flight += 1
            try:
                try:
                    if timeout is not None:
                        value = await _limited(step, args, kwargs, timeout)
                    elif step.is_async:
                        value = await step.fn(*args, **kwargs)
                    else:
                        value = await in_thread(step.fn, args, kwargs)
                    payload = codec.encode(value, where=f"result of step {name!r}", limit=host.payload_limit)
                except Exception as error:
                    failed = AttemptFailed(
                        step=name,
                        attempt=attempt,
                        failure=capture(error),
                        next_attempt_at_ms=self._next_attempt(retry, attempt, error),
                        started_at_ms=started,
                        inputs_digest=digest,
                    )
                    outcome, strand.now_ms = await self._record(new(failed, uuid.uuid4().bytes))
                    again_at = failed.next_attempt_at_ms
                    then = "it is raised in the body" if again_at is None else "it is tried again"
                    told = summary(failed.failure)
                    host.report("attempt_failed", self.run.run_id, step=name, attempt=attempt, error=told, then=then)
                    if self.workflow.aggregate is not None:
                        await self._deliver(self._version_of(outcome))
                    if again_at is None:
                        # Raised as a replay will raise it, so that the body sees the same now.
                        again = revive(failed.failure)
                        raise again.with_traceback(error.__traceback__) from again.__cause__
                else:
                    recorded = StepRecorded(
                        step=name, result=Raw(payload), attempt=attempt, started_at_ms=started, inputs_digest=digest
                    )
                    outcome, strand.now_ms = await self._record(new(recorded, self._ids(name)))
                    if type(outcome) is AlreadyPresent:
                        # Another writer recorded this step first: its value is the step's.
                        payload = bytes(_decode_step(outcome.stored.payload).result)
                    if self.workflow.aggregate is not None:
                        await self._deliver(self._version_of(outcome))
                    # Decoded only now: a value that its own annotation cannot read raises every time, but its effect
                    # is not repeated.
                    return step.decode(payload)
            finally:
                self._in_flight -= 1
                if self.draining is not None and not self._in_flight:
                    self.seal()
            await self._pause(again_at)
            attempt += 1

    def _next_attempt(self, retry: Retry | None, attempt: int, error: Exception) -> int | None:
        # A value that cannot be stored will not become storable by running the step again.
        if retry is None or isinstance(error, PayloadRejected):
            return None
        delay = retry.delay(attempt, error, random.random())
        return None if delay is None else self.host.wall_ms() + round(delay * 1000)

    async def _pause(self, until_ms: int) -> None:
        wait = until_ms - self.host.wall_ms()
        if wait > 0:
            await asyncio.sleep(wait / 1000)

    # Commands of the aggregate

    def apply(
        self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str
    ) -> Coroutine[Any, Any, None]:
        """Reserve the command's name now; the coroutine records its events and delivers them to the body's instance."""
        strand = self._here()
        name = self._reserve(name, strand)
        return self._apply(strand, self._history.pop(name, None), method, args, kwargs, name)

    async def _apply(
        self,
        strand: Strand,
        found: Recorded | None,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str,
    ) -> None:
        if found is None:
            # What the command decides on is what the body sees: a copy of its instance, as it is now.
            triggered = new_events(copy.deepcopy(self._instance), method, args, kwargs)
            events = [self._user_event(event) for event in triggered]
            recorded = StepRecorded(step=name, result=Raw(b"null"), started_at_ms=self.host.wall_ms())
            # The step goes last: an event without it would be applied twice after a crash between the two.
            outcome, strand.now_ms = await self._record(*events, new(recorded, self._ids(name)))
            version = self._version_of(outcome)
        else:
            strand.now_ms, version = found.at_ms, found.version
        await self._deliver(version)

    def _user_event(self, event: Event) -> New:
        return New(event, uuid.uuid4().bytes, self.host.mapper.encode(event)[1])

    def _version_of(self, outcome: Outcome) -> int:
        if isinstance(outcome, Appended):
            return outcome.version
        return outcome.stored.version if isinstance(outcome, AlreadyPresent) else self._version

    async def _deliver(self, version: int) -> None:
        """Bring the body's instance to `version`: a replay delivers the same events at the same places."""
        while version > (known := self._known):
            rows = await self._read_on(known)
            if self._known == known:  # else another task of the body has read on meanwhile
                check_contiguous(self.run.run_id, rows, after=known, until=version)
                self._unseen.extend(row for row in rows if ":" in row.topic)
                self._known = rows[-1].version
        while self._unseen and self._unseen[0].version <= version:
            apply_event(self._instance, self.host.mapper.decode_row(self._unseen.popleft(), self.run.run_id))

    async def _read_on(self, after: int) -> list[Stored]:
        """The events of the run since version `after`, however often the store is away meanwhile: they are recorded,
        and an outage between that and this is no failure of the body's."""
        pauses = iter(STORE_RETRY_S)
        while True:
            if self.sealed:
                raise RunSealed(_sealed(self.run.run_id))
            try:
                return (await self.host.store.history([self.run.run_key], after))[self.run.run_key]
            except StoreError as error:
                self.host.report("store_away", self.run.run_id, error=str(error))
            await asyncio.sleep(next(pauses, STORE_RETRY_S[-1]))

    @property
    def info(self) -> Info:
        """What is known about the run as it is driven here."""
        run = self.run
        return Info(
            run_id=run.run_id,
            attempt=run.attempts + 1,
            version_tag=run.version_tag,
            parent_run_id=run.parent_run_id,
            created_at_ms=run.created_at_ms,
        )

    # Deterministic values

    def _here(self) -> Strand:
        parent = _strand.get()
        task = asyncio.current_task(self._loop)
        if parent is not None and parent.driver is self and parent.task() is task:
            if self.sealed or self.over:
                raise RunSealed(_sealed(self.run.run_id))
            return parent
        # A new task of the body has inherited the strand of the one that made it. Whoever has none, or one of another
        # run, comes from outside, and a replay would not meet it.
        if parent is None or parent.driver is not self or task is None or asyncio._get_running_loop() is not self._loop:
            raise InvalidCall(
                f"{self.run.run_id}: run.* was called from outside its body, by {_caller(task)}. Only the body and the "
                "tasks it starts may call it, in their event loop: pass them what they need, or start a run of its own"
            )
        if self.sealed or self.over:
            raise RunSealed(_sealed(self.run.run_id))
        parent.children += 1
        strand = Strand(self, ref(task), f"{parent.path}.{parent.children}", parent.now_ms)
        _strand.set(strand)
        return strand

    def now_ms(self) -> int:
        """The time of the last event delivered to this task."""
        return self._here().now_ms

    def rng(self) -> random.Random:
        """This task's own stream of random numbers, the same at every replay."""
        strand = self._here()
        if strand.rng is None:
            strand.rng = random.Random(f"{self.run.run_id}/{strand.path}")
        return strand.rng

    def random(self) -> float:
        """A number in [0, 1)."""
        return self.rng().random()

    def uuid4(self) -> uuid.UUID:
        """A random UUID."""
        return uuid.UUID(int=self.rng().getrandbits(128), version=4)


class Info(msgspec.Struct, frozen=True):
    """A run as it is driven here. `attempt` counts the body's attempts under the workflow's retry policy, from 1."""

    run_id: str
    attempt: int
    version_tag: str | None
    parent_run_id: str | None
    created_at_ms: int


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


_decode_step: Final = msgspec.json.Decoder(Recorded).decode
_decode_failure: Final = msgspec.json.Decoder(AttemptFailed).decode


def history_of(run_id: str, stored: list[Stored]) -> dict[str, Recorded]:
    """The newest word of the journal on each step.

    A retry of the workflow gives its failed steps a new chance; what succeeded stays.
    """
    history: dict[str, Recorded] = {}
    try:
        for row in stored:
            if row.topic == "StepRecorded":
                found = _decode_step(row.payload)
                found.at_ms = row.recorded_at_ms
                found.version = row.version
                history[found.step] = found
            elif row.topic == "AttemptFailed":
                failed = _decode_failure(row.payload)
                history[failed.step] = Recorded(
                    failed.step,
                    inputs_digest=failed.inputs_digest,
                    at_ms=row.recorded_at_ms,
                    version=row.version,
                    failed=failed,
                )
            elif row.topic == "WorkflowRetried":
                for name in [name for name, found in history.items() if found.failed is not None]:
                    del history[name]
    except msgspec.DecodeError as error:
        raise DecodeFailed(
            f"event {row.version} of {run_id} ({row.topic}) cannot be read: {error}. Nothing of the run is "
            "replayed without it: restore the journal from a backup, or update keiro if a newer one wrote it",
            where=row.topic,
        ) from error
    return history


def check_contiguous(run_id: str, stored: list[Stored], *, after: int, until: int) -> None:
    """Raise `StoreError` unless `stored` is every event of the run from version `after` + 1 to `until` at least.

    A step that is missing from a history would run again, as if it had never happened.
    """
    last = stored[-1].version if stored else after
    if last != after + len(stored) or last < until:
        raise StoreError(
            f"the journal of {run_id} has {len(stored)} events after version {after} and the last is {last}, but the "
            f"run has reached {max(last, until)}: some are missing. Restore them from a backup; it is not driven on"
        )


async def _limited(step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], seconds: float) -> Any:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(seconds if step.is_async else None) as limit:
            if step.is_async:
                return await step.fn(*args, **kwargs)
            # Counted from when a thread is free for it: until then the step has not taken any time.
            return await in_thread(step.fn, args, kwargs, lambda: limit.reschedule(loop.time() + seconds))
    except TimeoutError:
        if limit.expired():
            raise TimeoutError(f"step {step.name!r} took longer than its timeout of {seconds:g} s") from None
        raise


def _sealed(run_id: str) -> str:
    return f"{run_id} has ended or is no longer driven by this process; nothing more is recorded here"


def _caller(task: Task[Any] | None) -> str:
    return "no task" if task is None else f"task {task.get_name()}"
