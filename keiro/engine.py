"""What an application calls: an `Engine` over one store, and a `Handle` for each run."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from asyncio import Future
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from weakref import ref

import msgspec
from msgspec import Raw

from keiro import codec, errors
from keiro.attributes import checked
from keiro.decisions import (
    AlreadyPresent,
    Append,
    Appended,
    Cancel,
    Command,
    Deliver,
    EndGrace,
    Existing,
    InputDiffers,
    New,
    Outcome,
    Refused,
    RefusedTerminal,
    Resurrect,
    Retract,
    Start,
    Taken,
    UnknownRun,
    VersionConflict,
    new,
)
from keiro.definition import Workflow, patience
from keiro.driver import Driver
from keiro.errors import InvalidCall, KeiroError, RunConflict, RunEnded, RunNotFound, UnknownWorkflow
from keiro.events import Event, StepRecorded, WorkflowCancelled, WorkflowStarted
from keiro.executions import Executions
from keiro.failures import Failure, capture, describe, revive, summary
from keiro.feed import Feed
from keiro.follower import ProjectionStatus
from keiro.history import History
from keiro.identity import (
    check_command_id,
    check_key,
    check_step_name,
    check_workflow_name,
    deferred_step,
    lineage_of,
    parse_run_id,
    parse_token,
    run_id,
    token_step,
)
from keiro.lanes import lane_in
from keiro.limits import Queue, check_priority, limits_of
from keiro.lister import Lister
from keiro.mapper import EventMapper
from keiro.projections.attempts import AttemptRow
from keiro.projections.attempts import attempts as fold_attempts
from keiro.projections.base import Projection
from keiro.projections.invariants import Finding
from keiro.projections.steps import StepRow
from keiro.projections.steps import steps as fold_steps
from keiro.projections.waits import ChildRow, Exit
from keiro.readmodels import ReadModels
from keiro.reconciliation import reconcile
from keiro.reports import Outage, log, report
from keiro.repository import RunRepository, repository
from keiro.retention import Collection, collect
from keiro.rows import Head, Run, Status
from keiro.run import advance, fold, new_events, workflow_of
from keiro.run_parents import RunParents
from keiro.schedule import ScheduleRun
from keiro.schedules import Schedules
from keiro.stores import open_store, shown
from keiro.stores.base import Store
from keiro.stores.blocking import RunTables
from keiro.stores.kept import Report
from keiro.threads import in_thread
from keiro.transactions import Body, Transactions
from keiro.worker import Worker

T = TypeVar("T")

STUBBORN_S: Final = 5.0
BULK: Final = 2000
"""So many runs are started in one transaction."""
SNAPSHOT_EVERY: int = 500
"""So many events of a run are folded at most for a command, where its class can be restored from snapshots."""
GONE_S: Final = 0.5
"""How often at most to look whether runs that are waited for are still there."""
FAREWELL_S: Final = 15.0
"""How long a closing engine waits for a store that may not answer to take back its runs."""
DEFAULT_URL: Final = "sqlite:///keiro.db"
NOTHING: Final = History((), [])
_NOT_OPEN: Final = "the engine is not open: use it inside `async with engine:`"


class Engine:
    """Runs workflows over the journal at `url`.

    `url` is `memory://`, `sqlite:///file.db` or `postgresql://…`; by default `$KEIRO_URL`, else `sqlite:///keiro.db`.
    Use it as an async context manager: entering migrates the schema (on Postgres only with `migrate=True`, else it is
    verified) and, unless `worker=False`, begins to drive runs of `workflows`, also those other processes left behind.
    Leaving gives steps under way `grace` seconds to end and hands all other runs back.

    `durability="normal"` (SQLite only) acknowledges before the disk has flushed: a power cut may take the newest
    commits, a crash of the process takes none. `strict=True` makes a replay raise `NonDeterminism` when a step is
    called with other inputs than it was recorded with. `concurrency` is how many runs may be resident at once.
    `queues` describe the limits of the workflows that have a `queue`; this engine keeps them whenever it claims.
    Several versions of one workflow may be given if each is pinned to its `version`.

    `projections` are read models of your own, classes or instances of `keiro.Projection`. Their tables are created
    where the schema is migrated, else they must be there.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        workflows: Sequence[Any] = (),
        projections: Sequence[Projection | type[Projection]] = (),
        worker: bool = True,
        durability: str = "full",
        migrate: bool | None = None,
        strict: bool = False,
        grace: float = 10.0,
        concurrency: int = 1000,
        queues: Sequence[Queue] = (),
        payload_limit: int = codec.PAYLOAD_LIMIT,
    ) -> None:
        _check_options(worker=worker, strict=strict, **({} if migrate is None else {"migrate": migrate}))
        _check_counts(concurrency=concurrency, payload_limit=payload_limit)
        self.url = url if url is not None else os.environ.get("KEIRO_URL") or DEFAULT_URL
        self.store: Store = open_store(self.url, durability=durability)
        self._shown_url = shown(self.url)
        self.store.listener = self
        self.strict = strict
        self.payload_limit = payload_limit
        self._grace = patience(grace, "Engine(grace=...)")
        self._concurrency = concurrency
        self._migrate = migrate if migrate is not None else not self.url.startswith("postgres")
        self._claims = worker
        self._workflows: dict[str, Workflow] = {}  # by lane
        self._newest: dict[str, Workflow] = {}  # by name: of several versions the one given last
        for one in _listed("workflows", workflows):
            self._register(workflow_of(one))
        self._register(workflow_of(ScheduleRun))
        self._limits = limits_of(
            _listed("queues", queues), ((one.lane, one.queue) for one in self._workflows.values()), claims=worker
        )
        self.mapper = EventMapper(self._workflows.values())
        self._read_models = ReadModels(_listed("projections", projections), self.store, self.mapper, self)
        listing = self.store.listing(self.mapper)
        self._lister = Lister(listing, self)
        self._executions = Executions(listing, self._lister, self._opened)
        self._transactions = Transactions(
            self.store, self._read_models.kept.gate, self.store.announce, self._callback_failed
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._worker: Worker | None = None
        self._repository: RunRepository | None = None
        self._run_tables: RunTables | None = None
        self._resident: dict[str, Driver] = {}
        self._tasks: dict[asyncio.Task[None], Driver] = {}
        self._waiting: dict[str, set[Future[Run]]] = {}
        self._moved: set[asyncio.Event] = set()
        self._looking: asyncio.Task[None] | None = None
        self._outage = Outage()
        self._look_again = False
        self._looked_for_gone = 0.0
        self._has_collected = False
        self._births: set[Future[Outcome]] = set()
        self._closer: asyncio.Task[None] | None = None
        self.driver_type: type[Driver] = Driver  # the testing kit drives runs with others

    def _register(self, workflow: Workflow) -> None:
        other = self._newest.get(workflow.name, workflow)
        self._newest[workflow.name] = workflow
        if self._workflows.setdefault(workflow.lane, workflow) is not workflow or not (
            other is workflow or (other.pinned and workflow.pinned)
        ):
            raise InvalidCall(
                f"two workflows are named {workflow.name!r}: give one of them another name=, or, where they are "
                "versions of one workflow, give each its own version= and pinned=True"
            )
        if other is not workflow and (other.aggregate, workflow.aggregate) != (None, None):
            # Commands and repositories know one class of a name, and would fold the events of both with it.
            raise InvalidCall(
                f"two versions of {workflow.name!r} are classes: run each version of a class in a process of its own"
            )

    # Life

    async def __aenter__(self) -> Self:
        if self._loop is not None:
            raise InvalidCall("the engine is open already: open it once and share it, or make another Engine(...)")
        self._loop = asyncio.get_running_loop()
        try:
            await self.store.open(migrate=self._migrate)
        except BaseException:
            self._loop = None
            raise
        try:
            await self._read_models.open(create=self._migrate, moved=self._moved)
            self._moved.add(self._lister.moved)
            self._lister.start()
            self._worker = Worker(self, list(self._workflows), self._limits, claims=self._claims)
            await self._worker.start()
        except BaseException:
            self._worker = None
            await self._lister.stop()
            await self._read_models.close()
            await self.store.close()
            self._loop = None
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """Stop driving runs. Steps under way get `grace` seconds (default: the engine's) to end and be recorded; then
        the runs are handed back: pending again, for the next start or another process. Closing a closed engine does
        nothing."""
        grace = patience(grace, "close(grace=...)")
        if self._worker is not None:
            worker = self._opened()
            if self._closer is None:
                self._closer = asyncio.create_task(self._close(worker, grace), name="keiro close")
        closer = self._closer
        if closer is None:
            return
        try:
            await asyncio.shield(closer)
        except asyncio.CancelledError:
            # The caller waits no longer, so nobody gets any more grace. The rest is done all the same: a lease that
            # goes on would keep the runs from everybody else.
            self.seal_all()
            await asyncio.wait([closer])
            raise

    async def _close(self, worker: Worker, grace: float | None) -> None:
        await worker.stop_claiming()
        drivers = list(self._resident.values())
        for driver in drivers:
            driver.drain()
        tasks = list(self._tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=self._grace if grace is None else grace)
        self.seal_all()
        if tasks:
            # A body may refuse to be cancelled; sealed, it records nothing any more, so nobody has to wait for it.
            _, stubborn = await asyncio.wait(tasks, timeout=STUBBORN_S)
            if stubborn:
                self.report("still_running", "", runs=len(stubborn))
        await asyncio.sleep(0)  # their done-callbacks have run
        mine = [driver.run.run_key for driver in drivers if not driver.lost]
        try:
            # A store that does not answer is as good as one that is away.
            async with asyncio.timeout(FAREWELL_S):
                await self.births_over()
                if mine:
                    await self.store.release(worker.key, mine)
        except (errors.StoreError, TimeoutError) as failed:
            # The lease ends by itself; whoever claims then continues.
            self.report("not_handed_back", "", error=str(failed) or "the store does not answer")
        await worker.stop()
        # From here on nobody begins to wait for what will not be told any more.
        self._worker = None
        for waiting in self._waiting.values():
            for future in waiting:
                if not future.done():
                    future.set_exception(errors.StoreUnavailable("the engine was closed while waiting for a result"))
        self._waiting.clear()
        for event in self._moved:
            event.set()
        if self._looking is not None:
            self._looking.cancel()
        await self._lister.stop()
        await self._read_models.close()
        if self._run_tables is not None:
            self._run_tables.close()
            self._run_tables = self._repository = None
        await self.store.close()
        self._loop = self._closer = None

    def _opened(self) -> Worker:
        worker = self._worker
        if worker is None:
            raise InvalidCall(_NOT_OPEN)
        if asyncio.get_running_loop() is not self._loop:
            raise InvalidCall(
                "the engine was opened in another event loop: call it there, or from other threads by keiro.blocking"
            )
        return worker

    # Starting and waiting

    async def start(
        self,
        workflow: Any,
        /,
        *args: Any,
        id: str | None = None,
        delay: float | timedelta | None = None,
        priority: int = 0,
        attributes: Mapping[str, Any] | None = None,
        connection: Any = None,
        **kwargs: Any,
    ) -> Handle:
        """Start a run and return its handle. On return the run and its input are durable and it will be driven to its
        end. `id` is its key within the workflow (default: a random one); starting a key that exists returns the
        existing run if the input is equal, else raises `RunConflict`. With `delay` (seconds) it is first driven when
        that time has gone by. Of the runs that wait for a worker, those with the lowest `priority` come first, then the
        oldest; it is kept through all rounds. `attributes` are what the run is found by, see `run.set_attributes`.

        With `connection`, a SQLAlchemy, sqlite3 or psycopg connection to the same database (or what `transact` gives
        its body), the run is part of the transaction open on it: it exists once the caller commits, and never if the
        caller rolls back. Make it the last thing before the commit: from here on nobody else can write. A commit
        through SQLAlchemy is seen at once, that of a raw connection within a second. Raises `InvalidCall` for a
        connection elsewhere or without a transaction, `StoreBusy` where all of the transaction is to be tried again.
        """
        worker = self._opened()
        definition = self._startable(workflow)
        after = patience(delay, "start(delay=...)")
        owned = (
            definition.lane in self._workflows
            and worker.leased
            and connection is None
            and not after
            and definition.queue is None  # whose limits are counted where runs are claimed
            and self.free_slots() > 0
        )
        command = self._start_of(
            definition, args, kwargs, id, worker.key if owned else None, after, priority, attributes
        )
        if owned:
            outcome = await self.submit_birth(command)
        else:
            outcome = await self._submit(command, connection)
        handle = self._started(definition, command, outcome)
        if (driver := self._resident.get(handle.run_id)) is not None:
            driver.handle = ref(handle)
        return handle

    async def start_many(
        self,
        workflow: Any,
        inputs: Iterable[Any],
        /,
        *,
        ids: Iterable[str] | None = None,
        priority: int = 0,
        attributes: Mapping[str, Any] | None = None,
    ) -> list[Handle]:
        """Start many runs of one workflow at once; their handles, in the order of `inputs`.

        Each input is the tuple of the body's arguments, or the one argument itself. `ids` are their keys (default:
        random ones). All are checked before the first is written, and they are written in few transactions; called
        again with the same ids, what exists is found and the rest is started. Raises `RunConflict` if one exists with
        another input, after the others were started. All get the same `attributes`.
        """
        self._opened()
        definition = self._startable(workflow)
        given = [one if isinstance(one, tuple) else (one,) for one in _listed("inputs", inputs)]
        keys = [None] * len(given) if ids is None else _listed("ids", ids)
        if len(keys) != len(given):
            raise InvalidCall(f"start_many: {len(given)} inputs and {len(keys)} ids: give one id for each input")
        commands = [
            self._start_of(definition, args, {}, key, None, priority=priority, attributes=attributes)
            for args, key in zip(given, keys, strict=True)
        ]
        handles: list[Handle] = []
        conflict: RunConflict | None = None
        for at in range(0, len(commands), BULK):
            batch = commands[at : at + BULK]
            for command, outcome in zip(batch, await asyncio.gather(*map(self.store.submit, batch)), strict=True):
                try:
                    handles.append(self._started(definition, command, outcome))
                except RunConflict as error:
                    conflict = conflict or error
        if conflict is not None:
            raise conflict
        return handles

    def _startable(self, workflow: Any) -> Workflow:
        definition = workflow_of(workflow)
        registered = self._workflows.get(definition.lane)
        if registered is not definition and (self._claims or definition.name in self._newest):
            of = f"version {definition.version!r} of " if definition.pinned else ""
            raise UnknownWorkflow(
                f"{of}workflow {definition.name!r} is not one of this engine's: pass it in Engine(..., workflows=[...])"
            )
        return definition

    def _start_of(
        self,
        definition: Workflow,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        id: str | None,
        owner: int | None,
        after: float | None = None,
        priority: int = 0,
        attributes: Mapping[str, Any] | None = None,
    ) -> Start:
        at_ms = self.wall_ms()
        key = check_key(id) if id is not None else uuid.uuid4().hex
        started = WorkflowStarted(
            workflow=definition.name,
            key=key,
            input=Raw(definition.input.encode(args, kwargs, limit=self.payload_limit)),
            start_at_ms=at_ms + round(after * 1000) if after else None,
            version=definition.version,
            patches=definition.patches,
            priority=priority if priority == 0 and type(priority) is int else check_priority(priority),
            cleanup_ms=definition.cleanup_ms,
            attributes=checked(attributes, "start(attributes=...)") or None if attributes is not None else None,
        )
        return Start(run_id(definition.name, key), new(started, uuid.uuid4().bytes), at_ms, owner)

    def _started(self, definition: Workflow, command: Start, outcome: Outcome) -> Handle:
        match outcome:
            case Appended(run=Run() as run) | Existing(run):
                pass
            case InputDiffers(run) if definition.input.same(run.input_json, _input_of(command)):
                # Another order of what has none: the elements of a set, in the order of this process's hashes.
                pass
            case InputDiffers(run):
                raise RunConflict(
                    f"{run.run_id} exists and was started with another input: use another id, or the same input"
                )
            case _:
                raise KeiroError(f"starting {command.run_id} was answered with {outcome!r}")
        return Handle(self, run.run_id, definition)

    async def execute(self, workflow: Any, /, *args: Any, id: str | None = None, **kwargs: Any) -> Any:
        """Start a run (or find the one that exists) and wait for its result."""
        handle = await self.start(workflow, *args, id=id, **kwargs)
        return await handle.result()

    def handle(self, run_id: str) -> Handle:
        """The handle of a run by its id, whether or not it exists and whoever drives it. It follows the run through its
        rounds."""
        return Handle(self, run_id, self._newest.get(parse_run_id(run_id).workflow))

    # From outside

    async def complete(
        self,
        run_id: str | None = None,
        name: str | None = None,
        value: Any = None,
        *,
        token: str | None = None,
        connection: Any = None,
    ) -> bool:
        """Complete the deferred `name` of a run with `value`, or the one that `token` stands for; before, while or
        after its body asks for it. On return it is durable. Whether it was this call that did: the first one counts.

        Raises `RunNotFound`, `RunEnded`, `PayloadRejected`; `InvalidName` for a token that never was one,
        `RunConflict` for one of an earlier round. `connection` is as for `start`.
        """
        raw = Raw(codec.encode(value, where=f"value of deferred {name!r}", limit=self.payload_limit))
        return await self._resolve(run_id, name, token, Exit(ok=raw), connection)

    async def fail(
        self,
        run_id: str | None = None,
        name: str | None = None,
        error: BaseException | None = None,
        *,
        token: str | None = None,
        connection: Any = None,
    ) -> bool:
        """As `complete`, but what asks for the deferred raises `error`."""
        if not isinstance(error, BaseException):
            raise InvalidCall(f"fail(error={error!r}): give an exception")
        return await self._resolve(run_id, name, token, Exit(failed=capture(error)), connection)

    async def cancel_deferred(
        self,
        run_id: str | None = None,
        name: str | None = None,
        reason: str | None = None,
        *,
        token: str | None = None,
        connection: Any = None,
    ) -> bool:
        """As `complete`, but what asks for the deferred raises `DeferredCancelled`."""
        return await self._resolve(run_id, name, token, Exit(cancelled=_reason(reason)), connection)

    async def _resolve(
        self, run_id: str | None, name: str | None, token: str | None, end: Exit, connection: Any
    ) -> bool:
        self._opened()
        secret = None
        if token is not None:
            if run_id is not None or name is not None:
                raise InvalidCall("give a token, or a run id and a name; not both")
            run_id, name, key = parse_token(token)
            secret = (token_step(name), key)
        elif run_id is None or name is None:
            raise InvalidCall("give the run id and the name of the deferred, or token=")
        else:
            parse_run_id(run_id)
            for part in name.split("/") if isinstance(name, str) else (name,):
                check_step_name(part)
        deliver = Deliver(lineage_of(run_id), deferred_step(name), msgspec.json.encode(end), self.wall_ms(), secret)
        workflow = self._workflows.get(parse_run_id(run_id).workflow)
        if connection is None and workflow is not None and (owner := self.birth_owner(workflow)) is not None:
            # Where it makes a parked run go on, that run needs no claim.
            outcome = await self.submit_birth(msgspec.structs.replace(deliver, owner=owner))
        else:
            outcome = await self._submit(deliver, connection)
        return self._told(run_id, outcome)

    async def cancel(
        self, run_id: str, *, reason: str | None = None, wait: bool = False, connection: Any = None
    ) -> bool:
        """Cancel a run, and its children that were not spawned with `on_cancel="detach"`. On return it is durable, and
        nothing more of them is recorded; their bodies are interrupted here at once, elsewhere when those processes hear
        of it. With `wait`, return when the body has ended here. Whether it was this call that did: False if the run had
        ended before. Raises `RunNotFound`.

        A run of a workflow with `cleanup=True` is asked to end instead: on return the request is durable. It ends as
        cancelled when its body has, or its grace is over; with `wait`, return after that. False if it was asked before.
        """
        self._opened()
        parse_run_id(run_id)
        command = Cancel(lineage_of(run_id), self.wall_ms(), _reason(reason))
        outcome = await self._submit(command, connection)
        if wait and connection is None:
            await self._asked_has_ended(run_id)
        if wait:
            tasks = [task for task, driver in self._tasks.items() if driver.run.lineage_id == lineage_of(run_id)]
            if tasks:
                await asyncio.wait(tasks)
        if isinstance(outcome, RefusedTerminal):
            return False
        return self._told(run_id, outcome)

    async def _asked_has_ended(self, run_id: str) -> None:
        """Return when a run that is asked to end has ended; where nobody else does, end it when its grace is over."""
        while True:
            run = await self.store.run(lineage_of(run_id))
            if run is not None and run.handoff_run_id is not None:
                run = await self.store.newest(run.run_id)
            over = None if run is None or run.terminal else run.grace_over_ms
            if run is None or over is None:
                return
            now = self.wall_ms()
            if over <= now:
                await self.store.submit(EndGrace(run.run_id, now))
                continue
            with suppress(TimeoutError):
                await self.wait_ended(run_id, (over - now) / 1000)

    async def resurrect(self, run_id: str, *, reason: str | None = None, connection: Any = None) -> bool:
        """Let a failed run go on where it failed: what is recorded stays, steps that failed for good get another
        chance, and what its parent was told is taken back. Whether it had failed. Raises `RunNotFound`.
        """
        self._opened()
        parse_run_id(run_id)
        command = Resurrect(lineage_of(run_id), self.wall_ms(), _reason(reason))
        outcome = await self._submit(command, connection)
        if isinstance(outcome, RefusedTerminal):
            return False
        return self._told(run_id, outcome)

    async def retract_step(self, run_id: str, step: str, *, reason: str | None = None, connection: Any = None) -> bool:
        """Let what is recorded of a step count no more, in a run that nobody drives just now: it runs again, or is
        waited for again. Raises `RunNotFound`, `RunEnded`, and `RunConflict` where the step is not recorded or the run
        is driven.
        """
        self._opened()
        parse_run_id(run_id)
        command = Retract(lineage_of(run_id), step, self.wall_ms(), _reason(reason))
        return self._told(run_id, await self._submit(command, connection))

    def _told(self, run_id: str, outcome: Outcome) -> bool:
        match outcome:
            case Appended():
                return True
            case AlreadyPresent():
                return False
            case RefusedTerminal(status):
                raise RunEnded(f"{run_id} has {status}: it takes nothing any more")
            case Refused(reason):
                raise RunConflict(f"{run_id}: {reason}")
            case _:
                raise RunNotFound(f"there is no run {run_id!r} at {self._shown_url}: start it first, or check its id")

    @property
    def children(self) -> Children:
        """The children of runs: `await engine.children.of(run_id)`."""
        return Children(self)

    @property
    def run_parents(self) -> RunParents:
        """Which run is below which others: `await engine.run_parents.link(child, parent)`, `.of(run_id)`."""
        return RunParents(self)

    @property
    def executions(self) -> Executions:
        """The listing of runs: `await engine.executions.list(status="failed", workflow="fulfil")`."""
        return self._executions

    @property
    def events(self) -> Feed:
        """The journal as a stream: `async for entry in engine.events.follow(after=position): ...`."""
        return Feed(self.store, self._read_models.kept, self.mapper, self, self._moved, self._opened)

    @property
    def schedules(self) -> Schedules:
        """The cron schedules of the store: `await engine.schedules.put("nightly", report, cron="0 2 * * *")`."""
        return Schedules(self)

    async def perform(
        self, call: Callable[[Any], Awaitable[bytes]], record: Callable[[bytes], Command], *, is_async: bool
    ) -> tuple[bytes, Outcome] | Outcome:
        """Call `call` with a connection to the journal's database and execute the command that records what it gave,
        in one transaction. For drivers."""
        return await self._transactions.perform(call, record, is_async=is_async)

    async def child_cancelled(self, run_id: str) -> bool:
        """Cancel a run; whether it was this call that did."""
        return await self.cancel(run_id)

    async def child_status(self, run_id: str) -> str:
        """Where a run stands."""
        return str(await self.handle(run_id).status())

    async def _submit(self, command: Command, connection: Any) -> Outcome:
        if connection is None:
            return await self.store.submit(command)
        return await self._transactions.submit(command, connection)

    async def transact(self, body: Body[T], *, connection: Any) -> T:
        """Run `body(transaction)` in one transaction on a SQLAlchemy connection, and commit it.

        `transaction.connection` is the connection, for the body's own SQL and for the engine's methods, and
        `transaction.on_commit(callback)` calls back after the commit. What the body raises rolls everything back,
        rows of projections in memory included. A conflict with another transaction (busy, 40001, 40P01, 55P03) runs the
        body again, with growing pauses, and at last raises `StoreBusy`. Called within a body, on its connection, it
        is a savepoint. On SQLite the write lock is taken at the beginning.
        """
        self._opened()
        return await self._transactions.transact(body, connection)

    async def command(
        self, run_id: str, method: Any, /, *args: Any, id: str | None = None, connection: Any = None, **kwargs: Any
    ) -> int:
        """Send a command to the aggregate of a run: `await engine.command("wf:basket-7", Basket.add, "sku-1")`.

        The method runs on the aggregate as it is now; on return its events are in the run's journal. Returns the
        version of the last one. With `id`, the same command sent twice is recorded once. What the method raises rejects
        the command: nothing is recorded. `connection` is as for `start`. Raises `RunNotFound`, `RunEnded`.
        """
        self._opened()
        journal = self.store if connection is None else self._transactions.joined(connection)
        if isinstance(run_id, Handle):
            raise InvalidCall(f"command({run_id!r}): pass its run_id")
        own = parse_run_id(run_id)
        aggregate = self.mapper.aggregate(own.workflow)
        if aggregate is None:
            raise InvalidCall(
                f"{run_id}: {own.workflow!r} is no workflow class of this engine, and commands are methods of one: "
                "pass the class in Engine(..., workflows=[...]), with worker=False where none are to be driven"
            )
        event_id = None
        if id is not None:
            event_id = uuid.uuid5(
                uuid.NAMESPACE_URL, f"keiro:command:{lineage_of(run_id)}:{check_command_id(id)}"
            ).bytes
        while True:
            found = await journal.head(run_id)
            if found is None and (later := await self._oldest_after(run_id)) is not None:
                run_id = later
                continue
            if found is None:
                raise RunNotFound(f"there is no run {run_id!r} at {self._shown_url}: start it first, or check its id")
            run, _ = found
            if run.handoff_run_id is not None and event_id is None:
                # A command is for the run, whichever round it is in; the next look finds one that begins just now.
                last = await self.store.newest(run.lineage_id)
                run_id = run.handoff_run_id if last is None else last.run_id
                continue
            state = None
            if found[1].version > SNAPSHOT_EVERY:
                if event_id is not None and (sent := await self._sent(run, event_id, connection)) is not None:
                    return sent
                if run.handoff_run_id is None:
                    # In a thread, where it may block: it reads from the newest snapshot on, with a connection of its
                    # own. Inside a caller's transaction it takes none, for which it would wait for that one's end.
                    every = SNAPSHOT_EVERY if connection is None else 2**62
                    state = await in_thread(self.repository.current, (run_id, every), {})
            rows = (await journal.history([run.run_key], 0 if state is None else state.version))[run.run_key]
            if event_id is not None:
                for row in rows:
                    if row.event_id == event_id:
                        return row.version
            if run.handoff_run_id is not None:
                run_id = run.handoff_run_id  # one round after the other: it may have been recorded in any
                continue
            events = [self.mapper.decode_row(row, run_id) for row in rows]
            state = fold(aggregate, events) if state is None else advance(state, events)
            seen: int = state.version
            triggered = new_events(state, method, args, kwargs)
            if not triggered:
                return seen
            # The last event has the id of the command: who finds it there has found all of them.
            ids = [*(uuid.uuid4().bytes for _ in triggered[1:]), event_id or uuid.uuid4().bytes]
            news = tuple(
                New(event, one, self.mapper.encode(event)[1]) for event, one in zip(triggered, ids, strict=True)
            )
            append = Append(run_id, news, self.wall_ms(), run.run_key, expected=seen)
            outcome = await self._submit(append, connection)
            match outcome:
                case Appended(version):
                    return version
                case AlreadyPresent(stored):
                    return stored.version
                case VersionConflict():
                    continue
                case RefusedTerminal(status):
                    again = await journal.head(run_id)
                    if again is not None and again[0].handoff_run_id is not None:
                        continue  # it ended a round meanwhile, and goes on in the next
                    raise RunEnded(f"{run_id} has {status}: it takes no commands any more")
                case UnknownRun():
                    continue  # it was deleted meanwhile, or only this round of it

    async def _sent(self, run: Run, event_id: bytes, connection: Any) -> int | None:
        """The version of the event with this id, if it is in the run. The append holds at no version: it only asks."""
        asks = (new(StepRecorded(step="", result=msgspec.Raw(b"null")), event_id),)
        outcome = await self._submit(Append(run.run_id, asks, 0, run.run_key, expected=-1, exact=True), connection)
        return outcome.stored.version if isinstance(outcome, AlreadyPresent) else None

    @property
    def repository(self) -> RunRepository:
        """The runs as aggregates of the `eventsourcing` library: `engine.repository.get(run_id)`, from any thread.

        It reads the journal where it is called and blocks there; in a coroutine call it in a thread.
        """
        if self._worker is None:
            raise InvalidCall(_NOT_OPEN)
        if self._repository is None:
            self._run_tables = self.store.run_tables()
            self._repository = repository(self._run_tables.read, self.mapper, self._run_tables.snapshots)
        return self._repository

    async def runs(
        self, *, status: str | None = None, workflow: str | None = None, before: int | None = None, limit: int = 100
    ) -> list[Run]:
        """Runs, newest first, at most `limit`; go on from the last one's `run_key` with `before`."""
        if status is not None and status not in set(Status):
            raise InvalidCall(f"{status!r} is no status; there are: {', '.join(Status)}")
        self._opened()
        _check_counts(limit=limit, **({} if before is None else {"before": before}))
        if workflow is not None:
            check_workflow_name(workflow)
        return await self.store.runs(status=status, workflow=workflow, before=before, limit=limit)

    # Read models

    async def steps(self, run_id: str) -> list[StepRow]:
        """The steps of a run, in the order in which they were first recorded. Raises `RunNotFound`."""
        parse_run_id(run_id)
        run = await self._row(run_id)
        stored = (await self.store.history([run.run_key]))[run.run_key]
        return fold_steps(self.mapper.decode_row(row, run_id) for row in stored)

    async def attempts(self, run_id: str) -> list[AttemptRow]:
        """The attempts of the steps of a run, in the order in which something was first recorded of each. Raises
        `RunNotFound`."""
        parse_run_id(run_id)
        run = await self._row(run_id)
        stored = (await self.store.history([run.run_key]))[run.run_key]
        return fold_attempts(self.mapper.decode_row(row, run_id) for row in stored)

    async def rows(self, projection: Projection | type[Projection] | str, /, **equals: Any) -> list[Any]:
        """The rows of a projection, by its class or name, whose columns have the given values; by primary key.

        They are frozen structs with the table's column names.
        """
        self._opened()
        return await self._read_models.rows(projection, equals)

    async def projections(self) -> list[ProjectionStatus]:
        """How each projection of this engine stands."""
        self._opened()
        return await self._read_models.status()

    async def caught_up(self, projection: Projection | type[Projection] | str, /, timeout: float | None = None) -> None:
        """Return once a following projection has everything that was in the journal at the call; at once for others.

        Raises `ProjectionFailed` while a fold of it fails, `TimeoutError` after `timeout` seconds.
        """
        self._opened()
        await self._read_models.caught_up(projection, patience(timeout, "caught_up(timeout=...)"))

    async def gc(self, older_than: float | timedelta, *, dry_run: bool = False) -> Collection:
        """Delete runs that ended at least `older_than` (seconds) ago, each with its rounds, events, waits and
        snapshots; with `dry_run` only list them. What is deleted is gone for good, and its key may be started anew.
        Of runs that stay, rounds that handed off so long ago go, but for the first one and the two newest.

        A child stays while its parent may still ask how it ended; a child that still runs when its parent goes, goes on
        alone. Small transactions, one after the other: after a crash in between, call it again. Raises `InvalidCall`
        for an age that is no finite number from 0, `StoreUnavailable` and `StoreBusy`.
        """
        self._opened()
        _check_options(dry_run=dry_run)
        found = await collect(self.store, older_than, dry_run=dry_run)
        if not dry_run:
            for run_id in found.collected:
                self._forgotten(run_id)
        return found

    def _forgotten(self, lineage_id: str) -> None:
        """A run was deleted: what is remembered of ends counts no more, and nobody waits for this one."""
        self._has_collected = True
        told = f"{lineage_id!r} at {self._shown_url} had ended, and was deleted while it was waited for"
        for future in self._waiting.get(lineage_id, ()):
            if not future.done():
                future.set_exception(RunNotFound(told))

    async def reconcile(self, *, fix: bool = False) -> list[Finding]:
        """Compare the rows of all runs, their clocks and deferreds with the journal; with `fix` mend them.

        The journal is read once, in bites of `BITE` runs; the lock is held only for runs that seem wrong, and what is
        wrong is mended in the transaction that finds it, durably. Others may work on meanwhile. Raises
        `StoreUnavailable` and `StoreBusy`; what was mended before stays so.
        """
        self._opened()
        return await reconcile(self.store, self._read_models.kept, self, fix=fix)

    async def rebuild(self, projection: Projection | type[Projection] | str, /) -> Report:
        """Compute the rows of a projection from the journal and make the kept ones the same, while others write on.

        `"runs"` is the table of runs itself, whose owners, leases and `started_at_ms` are no part of the journal, and
        `"run_parents"` that of the edges between runs; `"executions"` is the listing. An append-only table gets the
        rows it lacks; others that differ are counted as `unmended`.
        """
        self._opened()
        if projection == "executions" and not self._read_models.has(projection):
            report = await self._executions.rebuild()
        else:
            report = await self._read_models.rebuild(projection)
        if report.differences:
            self.report("projection_mended", "", projection=str(projection), **msgspec.structs.asdict(report))
            self.woken()
        return report

    def _callback_failed(self, error: BaseException) -> None:
        log.error("a callback after a commit raised; what was committed stays", exc_info=error)

    async def _row(self, run_id: str) -> Run:
        self._opened()
        run = await self.store.run(run_id)
        if run is None:
            raise RunNotFound(f"there is no run {run_id!r} at {self._shown_url}: start it first, or check its id")
        return run

    async def _last(self, run_id: str) -> Run:
        """The row of the newest round of a run."""
        self._opened()
        run = await self.store.run(run_id)
        if run is None or run.handoff_run_id is not None:
            last = await self.store.newest(lineage_of(run_id))
            # A round that was deleted has handed off: the run is where its newest one is.
            if last is not None and last.round_ordinal >= parse_run_id(run_id).round:
                return last
        return run or await self._row(run_id)

    async def _oldest_after(self, run_id: str) -> str | None:
        """Of the rounds that stayed, the oldest one after a round that was deleted; None where none was."""
        run = await self.store.newest(lineage_of(run_id))
        if run is None or run.round_ordinal <= parse_run_id(run_id).round:
            return None
        while run.parent_run_id is not None and (before := await self.store.run(run.parent_run_id)) is not None:
            run = before
        return run.run_id

    # Waiting for ends

    async def wait_ended(self, run_id: str, timeout: float | None = None, known: Run | None = None) -> Run:
        """The row of a run once it has ended. Raises `TimeoutError` after `timeout` seconds, `RunNotFound`."""
        self._opened()
        timeout = patience(timeout, "result(timeout=...)")
        # One that failed may have been resurrected, and one that was deleted here must not be found.
        if known is not None and known.status == Status.COMPLETED and not self._has_collected:
            return known
        future: Future[Run] = asyncio.get_running_loop().create_future()
        lineage = lineage_of(run_id)
        waiting = self._waiting.setdefault(lineage, set())
        waiting.add(future)
        try:
            # Registered first, then looked: an end between the two is not missed.
            driver = self._resident.get(run_id)
            if driver is None or driver.sealed or driver.run.terminal:
                run = await self._last(run_id)
                if run.terminal:
                    return run
            async with asyncio.timeout(timeout) as limit:
                return await future
        except TimeoutError:
            if limit.expired():
                raise TimeoutError(
                    f"{run_id} has not ended within {timeout:g} s; it goes on, and its result can be asked for again"
                ) from None
            raise
        finally:
            waiting.discard(future)
            if not waiting and self._waiting.get(lineage) is waiting:
                del self._waiting[lineage]

    async def serve(self) -> None:
        """Return when the process is told to stop (SIGTERM or SIGINT): the end of the `async with` block then gives the
        steps under way their grace and hands the runs back. Call it from the main thread."""
        self._opened()
        loop = asyncio.get_running_loop()
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
        try:
            await stopped.wait()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _definition_of(self, run: Run, known: Workflow | None) -> Workflow | None:
        """The code of a run's own version if it is here: a start may have found a run of another one."""
        own = lane_in(self._workflows, run)
        return known if own is None else self._workflows[own]

    def birth_owner(self, workflow: Workflow) -> int | None:
        """The worker that a new run of this workflow may be born as owned by, if it has room."""
        worker = self._worker
        if worker is None or not worker.leased or self._workflows.get(workflow.lane) is not workflow:
            return None
        if workflow.queue is not None:
            return None  # its limits are counted where runs are claimed
        return worker.key if self.free_slots() > 0 else None

    def submit_birth(self, command: Command) -> Future[Outcome]:
        """Send a command with which a run may be born as ours."""
        birth = self.store.submit(command)
        self._births.add(birth)
        birth.add_done_callback(self._born)
        return birth

    # What the store and the worker tell

    def committed(self, changed: Sequence[Run], touched: Sequence[str] = (), taken: Sequence[Taken] = ()) -> None:
        """A commit of this process: resolve who waits for the end of a run, wake the claims for what is pending."""
        if self._outage.away:
            self._outage.away = False
            self.report("store_back", "")
        for name in touched:
            if (driver := self._resident.get(name)) is not None:
                driver.wake()
        if self._limits and self._worker is not None and any(map(self._frees, changed)):
            self._worker.wake()
        took = {one.run.run_id for one in taken}
        for run in changed:
            if run.terminal and run.handoff_run_id is None:
                driver = self._resident.get(run.run_id)
                if driver is not None and run.status == Status.CANCELLED:
                    driver.seal()
                if driver is not None and driver.handle is not None and (handle := driver.handle()) is not None:
                    handle.ended = run
                for future in self._waiting.get(run.lineage_id, ()):
                    if not future.done():
                        future.set_result(run)
            elif self._worker is None or run.terminal:
                continue
            elif run.status == Status.PENDING and run.next_attempt_at_ms is not None:
                self._worker.expect(run.next_attempt_at_ms)
            elif run.status == Status.PENDING:
                self._worker.wake()
            elif run.status == Status.SUSPENDED:
                if run.wake_at_ms is not None:
                    self._worker.expect(run.wake_at_ms)
            elif run.run_id not in self._resident and run.run_id not in took:
                # Born as this worker's. Driven from here and not by `start`: its caller may be gone by now, and a run
                # owned by a living worker that does not drive it would never go on.
                self.adopt(run, Head(run_key=run.run_key, version=1, owner=self._worker.key, epoch=1), NOTHING)
        if taken and self._worker is not None:
            self._worker.take(taken)
        for event in self._moved:
            event.set()

    def _frees(self, run: Run) -> bool:
        """Whether a slot of a queue may have become free: of a workflow that is not ours it is not known."""
        own = lane_in(self._workflows, run)
        return run.status != Status.RUNNING and (own is None or own in self._limits)

    def woken(self) -> None:
        """Another process committed: look for what may concern us."""
        if self._worker is not None:
            self._worker.wake()
            self._worker.look_after()
        self.tick()

    def tick(self) -> None:
        """Look whether runs that others drive have ended."""
        for event in self._moved:
            event.set()
        self._look_again = True
        if self._waiting and (self._looking is None or self._looking.done()):
            self._looking = asyncio.get_running_loop().create_task(self._look())

    async def _look(self) -> None:
        try:
            while self._look_again:  # woken during a look: the end it was for may have come after the answer
                self._look_again = False
                # A sealed run may be driven to its end elsewhere while its body here still refuses to stop.
                names = [
                    name for name in self._waiting if (driver := self._resident.get(name)) is None or driver.sealed
                ]
                for at in range(0, len(names), 500):
                    for run in await self.store.ended(names[at : at + 500]):
                        last = run if run.handoff_run_id is None else await self.store.newest(run.lineage_id)
                        if last is not None and last.terminal:
                            self.committed([last])
                await self._look_for_gone(names)
        except errors.StoreError as error:
            self.report("store_away", "", error=str(error))

    async def _look_for_gone(self, names: Sequence[str]) -> None:
        """Tell who waits for a run that another process deleted before its end was heard of here; now and then, because
        it is rare."""
        now = asyncio.get_running_loop().time()
        if now - self._looked_for_gone < GONE_S:
            return
        self._looked_for_gone = now
        for at in range(0, len(names), 500):
            some = names[at : at + 500]
            there = await self.store.existing(some)
            for name in some:
                if name not in there:
                    self._forgotten(name)

    # Driving

    def adopt(self, run: Run, head: Head, history: History) -> None:
        """Drive a run this engine's worker owns."""
        if self._worker is None or not self._worker.leased:
            return  # nobody would seal or await it any more; the end of the incarnation hands it back
        own = lane_in(self._workflows, run)
        assert own is not None  # only such runs are claimed, or born as ours
        driver = self.driver_type(self, self._workflows[own], run, head, history)
        if head.epoch > 1:
            self.report("run_resumed", run.run_id, steps=head.version)
        self._resident[run.run_id] = driver
        task = asyncio.get_running_loop().create_task(driver.drive(), name=run.run_id)
        self._tasks[task] = driver
        task.add_done_callback(self._left)

    def _left(self, task: asyncio.Task[None]) -> None:
        driver = self._tasks.pop(task)
        if self._resident.get(driver.run.run_id) is driver:
            del self._resident[driver.run.run_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            # A fault of the engine or of the store, not of the body: the run goes back after the next renewal.
            log.error("%s could not be driven on; it will be handed back", driver.run.run_id, exc_info=error)
        self._freed()

    def _born(self, birth: Future[Outcome]) -> None:
        self._births.discard(birth)
        self._freed()

    async def births_over(self) -> None:
        """Return when all starts under way have committed or failed."""
        while self._births:
            await asyncio.wait(self._births)

    def _freed(self) -> None:
        if self._worker is not None and self.free_slots() == 1:
            self._worker.wake()

    def free_slots(self) -> int:
        """How many more runs may be resident; those that are being born or claimed count."""
        claiming = 0 if self._worker is None else self._worker.claiming + self._worker.taking
        return self._concurrency - len(self._resident) - len(self._births) - claiming

    def look_at(self, keys: set[int], versions: Mapping[int, int]) -> None:
        """Tell the drivers of these runs what the store has of them: the versions of those that are still ours."""
        for driver in list(self._resident.values()):
            key = driver.run.run_key
            if key not in keys:
                continue
            if key not in versions:
                if not driver.over:
                    driver.lost = True
                    driver.seal()
                    self.report("fence_lost", driver.run.run_id)
            elif versions[key] > driver.version:
                driver.wake()

    def resident_keys(self) -> set[int]:
        """The run_keys of the runs that are driven here."""
        return {driver.run.run_key for driver in self._resident.values()}

    def seal_all(self) -> None:
        """Stop all resident runs before their next effect."""
        for driver in list(self._resident.values()):
            driver.seal()

    def holds(self) -> bool:
        """Whether the lease of this engine's worker covers an effect that begins now."""
        return self._worker is not None and self._worker.holds()

    def wall_ms(self) -> int:
        """The time events are recorded at: the store's."""
        return self.store.now_ms()

    def report(self, event: str, run_id: str, **fields: object) -> None:
        """Log something an operator should know: see `keiro.reports`."""
        if event != "store_away" or self._outage.is_news(str(fields.get("error"))):
            report(event, run_id, fields)


class Children:
    """The children of runs, as rows."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def of(self, run_id: str) -> list[ChildRow]:
        """The children of a run and of its other rounds, oldest first. Raises `InvalidName` for what is no run id."""
        self._engine._opened()
        parent = parse_run_id(run_id)
        return await self._engine.store.children(parent.workflow, parent.key)


class Handle:
    """A run, seen from outside."""

    __slots__ = ("__weakref__", "_engine", "_workflow", "ended", "run_id")

    def __init__(self, engine: Engine, run_id: str, workflow: Workflow | None) -> None:
        self._engine = engine
        self._workflow = workflow
        self.run_id = run_id
        self.ended: Run | None = None  # the row, where this process drove the run to its end

    async def result(self, timeout: float | None = None) -> Any:
        """What the body returned, read from the journal: it is never run again for it.

        Raises `WorkflowFailed` (the original exception is its `__cause__`) or `WorkflowCancelled` if the run ended so,
        `TimeoutError` after `timeout` seconds, `RunNotFound`.
        """
        run = await self._engine.wait_ended(self.run_id, timeout, self.ended)
        if run.status == Status.COMPLETED:
            assert run.result_json is not None
            raw = run.result_json.encode()
            workflow = self._engine._definition_of(run, self._workflow)
            return msgspec.json.decode(raw) if workflow is None else workflow.decode_result(raw)
        if run.status == Status.CANCELLED:
            raise errors.WorkflowCancelled(f"{self.run_id} was cancelled{await self._because(run)}")
        assert run.failure_json is not None
        failure = msgspec.json.decode(run.failure_json, type=Failure)
        failed = errors.WorkflowFailed(f"{self.run_id} failed: {summary(failure)}", failure)
        failed.add_note(describe(failure))
        raise failed from revive(failure)

    async def _because(self, run: Run) -> str:
        """The reason a run was cancelled for. It is in the journal only, in the last event, which nothing follows."""
        found = await self._engine.store.head(run.run_id)
        if found is not None:
            for row in (await self._engine.store.history([run.run_key], found[1].version - 1))[run.run_key]:
                event = self._engine.mapper.decode_row(row, run.run_id)
                if isinstance(event, WorkflowCancelled) and event.reason:
                    return f": {event.reason}"
        return ""

    async def run(self) -> Run:
        """The operational row of the run; of its newest round."""
        return await self._engine._last(self.run_id)

    async def cancel(self, *, reason: str | None = None, wait: bool = False) -> bool:
        """Cancel the run; see `Engine.cancel`."""
        return await self._engine.cancel(self.run_id, reason=reason, wait=wait)

    async def children(self) -> list[ChildRow]:
        """The children of the run, oldest first."""
        return await self._engine.children.of(self.run_id)

    async def status(self) -> Status:
        """Where the run stands."""
        return Status((await self.run()).status)

    async def events(self, after: int = 0) -> AsyncIterator[Event]:
        """The events of the run with a version above `after`, in order."""
        run = await self.run()
        if isinstance(after, bool) or not isinstance(after, int) or after < 0:
            raise InvalidCall(f"events(after={after!r}): after is a version, a whole number from 0")
        for row in (await self._engine.store.history([run.run_key], after))[run.run_key]:
            yield self._engine.mapper.decode_row(row, self.run_id)

    def __repr__(self) -> str:
        return f"<handle of {self.run_id}>"


def _input_of(command: Start) -> bytes:
    started = command.started.event
    assert isinstance(started, WorkflowStarted)
    return bytes(started.input)


def _reason(reason: str | None) -> str | None:
    if reason is not None and not isinstance(reason, str):
        raise InvalidCall(f"reason={reason!r}: a reason is a text, or None")
    return reason


def _check_options(**options: object) -> None:
    for name, value in options.items():
        if not isinstance(value, bool):
            raise InvalidCall(f"{name}={value!r}: {name} is True or False")


def _check_counts(**counts: object) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**63:
            raise InvalidCall(f"{name}={value!r}: {name} is a whole number from 1")


def _listed(name: str, value: Any) -> list[Any]:
    if isinstance(value, str | type) or not isinstance(value, Iterable):
        raise InvalidCall(f"{name}={value!r}: pass a list, {name}=[...]")
    return list(value)
