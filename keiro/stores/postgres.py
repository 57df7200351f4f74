"""The store in a Postgres database, shared by any number of processes and machines.

One batching writer per process: everything queued while a batch commits forms the next batch, and a batch is one
statement. It takes the store's one advisory lock, so positions are committed in order, and fences each run by an
UPDATE: a SELECT in the same statement would read the snapshot taken before the lock was granted.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from asyncio import Future
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from keiro.codec import Codec
from keiro.decisions import Append, Appended, Command, Outcome, Start, Stored, Taken, born, releases
from keiro.errors import KeiroError, StoreError, StoreUnavailable
from keiro.lanes import pinned
from keiro.limits import NO_LIMITS, Limits, let_through
from keiro.limits import Queue as Limited
from keiro.mapper import EventMapper
from keiro.projections.base import ReadModel
from keiro.projections.run_parents import RunParent, to_edge
from keiro.projections.waits import ChildRow
from keiro.reports import log
from keiro.rows import Head, Run
from keiro.stores import migrate
from keiro.stores.base import (
    Candidate,
    Incarnation,
    Listener,
    Pending,
    Queue,
    WorkerRow,
    is_plain,
    known_and_left,
    published,
    refused_when_closed,
    tell,
)
from keiro.stores.blocking import RunTables, SqlRunTables
from keiro.stores.caller import Joined, execute_of_psycopg, join_postgres, which_database
from keiro.stores.connections import Connections, on_postgres
from keiro.stores.faults import is_transient, postgres_fault, postgres_target
from keiro.stores.kept import Kept
from keiro.stores.kept_sql import Inline, SqlKept
from keiro.stores.listing import Listing
from keiro.stores.listing_sql import SqlListing
from keiro.stores.pq import Connection, ConnectionLost, Param, Result, StatementError, array, sendable
from keiro.stores.recorders.postgres import (
    PostgresFactory as PostgresFactory,  # the module serves as PERSISTENCE_MODULE too
)
from keiro.stores.sets import Last, gathered
from keiro.stores.sql import MUTABLE, Execute, Program, Sql
from keiro.stores.transaction import GatedQueue, Snapshot

T = TypeVar("T")


LOCK_KEY: Final = 0x6B_65_69_72_6F  # "keiro": one lock per database, taken last and held for one batch
RECONNECT_S: Final = 5.0
FAREWELL_S: Final = 10.0
"""How long a store that is closed waits for a server that may not answer to commit what is queued."""
LOCK_LIMIT_S: Final = 15.0
"""How long a batch waits for the lock, which a caller's own transaction may hold. Whoever waits is told then."""
SILENT_S: float = 10.0
"""A server that owes an answer for longer is asked, by a new connection, whether it is there at all."""
FEW: Final = 4
"""Up to so many commands, statements without arrays in one round trip cost less than one with arrays."""
CHANNEL: Final = "keiro"
_BEGIN: Final[tuple[tuple[str, Sequence[Param]], ...]] = (
    ("BEGIN", ()),
    ("SELECT pg_advisory_xact_lock($1)", (LOCK_KEY,)),
)
_COMMIT: Final[tuple[tuple[str, Sequence[Param]], ...]] = (("COMMIT", ()),)
# Whatever the default of the database or the role. Under a stricter isolation the look after the lock would still see
# what was before it, and a mere read could be refused for what others write.
_READ_COMMITTED: Final = "SET default_transaction_isolation = 'read committed'"
_NOW: Final = "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint"

_LOCK: Final = f"l AS MATERIALIZED (SELECT pg_advisory_xact_lock({LOCK_KEY}))"
_EVENT: Final = "(run_key, version, event_id, topic, payload, recorded_at_ms)"

# IS TRUE keeps a condition from being looked up by: every run of a worker has its owner in common.
# The three batches of one command that a run consists of, without arrays: a run on its own is nothing else.
_STEP: Final = (
    f"WITH {_LOCK}, u AS (UPDATE keiro.keiro_run_heads h SET version = h.version + 1 FROM l"
    " WHERE h.run_key = $1 AND h.version = $2 AND (h.owner = $3) IS TRUE AND h.epoch = $4"
    " RETURNING h.run_key, h.version)"
    f" INSERT INTO keiro.keiro_journal {_EVENT}"
    " SELECT u.run_key, u.version, $5, $6, $7, $8 FROM u RETURNING run_key"
)
_END: Final = (
    f"WITH {_LOCK}, u AS (UPDATE keiro.keiro_run_heads h SET version = h.version + 1, owner = NULL FROM l"
    " WHERE h.run_key = $1 AND h.version = $2 AND (h.owner = $3) IS TRUE AND h.epoch = $4"
    " RETURNING h.run_key, h.version),"
    f" r AS (UPDATE keiro.keiro_runs r SET {', '.join(f'{c} = ${n}' for n, c in enumerate(MUTABLE, 9))}"
    " FROM u WHERE r.run_key = u.run_key)"
    f" INSERT INTO keiro.keiro_journal {_EVENT}"
    " SELECT u.run_key, u.version, $5, $6, $7, $8 FROM u RETURNING run_key"
)
_BIRTH_COLUMNS: Final = (
    "run_id", "workflow", "key", "status", "version_tag", "input_json", "created_at_ms", "started_at_ms"
)  # fmt: skip
_START: Final = (
    f"WITH {_LOCK}, s AS (INSERT INTO keiro.keiro_runs ({', '.join(_BIRTH_COLUMNS)}, lineage_id)"
    " SELECT $1::text, $2, $3, $4, $5, $6, $7::bigint, $8::bigint, $1 FROM l ON CONFLICT DO NOTHING RETURNING run_key),"
    " h AS (INSERT INTO keiro.keiro_run_heads (run_key, version, owner, epoch)"
    " SELECT run_key, 1, $9::bigint, CASE WHEN $9 IS NULL THEN 0 ELSE 1 END FROM s)"
    f" INSERT INTO keiro.keiro_journal {_EVENT}"
    " SELECT run_key, 1, $10::uuid, 'WorkflowStarted', $11, $7 FROM s RETURNING run_key"
)
_ROW_TYPES: Final = {name: "bigint" if name.endswith("_at_ms") or name == "attempts" else "text" for name in MUTABLE}


@lru_cache(maxsize=8)
def _batch_sql(starts: bool, rows: bool) -> str:
    """Advances of any number of runs, with their events; with changed rows and births of runs where there are any."""
    ctes = [
        _LOCK,
        # $1..$6: run, version seen, owner, epoch, events, whether the owner gives the run up
        "u AS (UPDATE keiro.keiro_run_heads h SET version = h.version + t.n,"
        " owner = CASE WHEN t.gives_up THEN NULL ELSE h.owner END"
        " FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bool[])"
        " AS t(run_key, version, owner, epoch, n, gives_up), l"
        " WHERE h.run_key = t.run_key AND h.version = t.version AND (h.owner = t.owner) IS TRUE AND h.epoch = t.epoch"
        " RETURNING h.run_key)",
        # $7..$12: the events
        "e AS (SELECT e.* FROM unnest($7::bigint[], $8::bigint[], $9::uuid[], $10::text[], $11::text[], $12::bigint[])"
        " WITH ORDINALITY AS e(run_key, version, event_id, topic, payload, at_ms, n) JOIN u ON u.run_key = e.run_key)",
    ]
    n = 12
    events = "SELECT run_key, version, event_id, topic, payload, at_ms, n FROM e"
    done = "SELECT run_key, NULL::text FROM u"
    if rows:
        columns = [*MUTABLE, "run_key"]
        types = [*(_ROW_TYPES[name] for name in MUTABLE), "bigint"]
        arrays = ", ".join(f"${n + i}::{kind}[]" for i, kind in enumerate(types, 1))
        n += len(columns)
        ctes.append(
            f"r AS (UPDATE keiro.keiro_runs r SET {', '.join(f'{c} = t.{c}' for c in MUTABLE)}"
            f" FROM unnest({arrays}) AS t({', '.join(columns)})"
            # IS TRUE makes it a look into a hash: joined, every row of `t` would be held against every one of `u`.
            " WHERE r.run_key = t.run_key AND (t.run_key IN (SELECT run_key FROM u)) IS TRUE)"
        )
    if starts:
        columns = list(_BIRTH_COLUMNS)
        types = ["text"] * 6 + ["bigint"] * 2 + ["bigint", "uuid", "text"]
        arrays = ", ".join(f"${n + i}::{kind}[]" for i, kind in enumerate(types, 1))
        ctes += [
            f"t AS (SELECT * FROM unnest({arrays}) WITH ORDINALITY"
            f" AS t({', '.join(columns)}, owner, event_id, payload, n))",
            f"s AS (INSERT INTO keiro.keiro_runs ({', '.join(columns)}, lineage_id)"
            f" SELECT {', '.join(f't.{c}' for c in columns)}, t.run_id FROM t, l ORDER BY t.n"
            " ON CONFLICT DO NOTHING RETURNING run_key, run_id)",
            "h AS (INSERT INTO keiro.keiro_run_heads (run_key, version, owner, epoch)"
            " SELECT s.run_key, 1, t.owner, CASE WHEN t.owner IS NULL THEN 0 ELSE 1 END"
            " FROM s JOIN t ON t.run_id = s.run_id)",
        ]
        events += (
            " UNION ALL SELECT s.run_key, 1, t.event_id, 'WorkflowStarted', t.payload, t.created_at_ms, 1000000 + t.n"
            " FROM s JOIN t ON t.run_id = s.run_id"
        )
        done += " UNION ALL SELECT run_key, run_id FROM s"
    ctes.append(
        f"j AS (INSERT INTO keiro.keiro_journal {_EVENT} SELECT q.run_key, q.version, q.event_id, q.topic, q.payload,"
        f" q.at_ms FROM ({events}) q ORDER BY q.n)"
    )
    return f"WITH {', '.join(ctes)} {done}"


class PostgresStore:
    """A journal in schema `keiro` of the database `url` names."""

    listener: Listener

    def __init__(self, url: str, *, codec: Codec) -> None:
        self.url = url
        self._target = postgres_target(url)
        self._sql = Sql("keiro.", codec)
        self.sql, self.dialect = self._sql, "postgresql"
        self._inline: Inline | None = None
        self._gated: GatedQueue[Pending] | None = None
        self._writer: Connection | None = None
        self._reader: Connection | None = None
        self._follower: Connection | None = None
        self._offset_ms = 0.0
        self._jobs: list[Callable[[], Awaitable[None]]] = []
        self._nudge: Future[None] | None = None
        self._closing = False
        self._given_up = False
        self._alone = True
        self._told = False
        self._me = uuid.uuid4().hex
        self._background: set[asyncio.Task[None]] = set()
        self._notifying = False

    # Opening and closing

    async def open(self, *, migrate: bool) -> None:
        """Connect, and bring the schema up to date or verify it."""
        self._loop = asyncio.get_running_loop()
        self._closing = self._given_up = False
        self._reading = asyncio.Lock()
        self._following = asyncio.Lock()
        self._queue = Queue(self._loop, self._wake_writer)
        self._connections = on_postgres(self.url, self._target)
        await self._ensure(migrate)
        try:
            self._writer = await self._connect()
            self._reader = await self._connect(listen=True)
            await self._read_clock()
        except BaseException:
            await self._disconnect()
            raise
        self._writing = self._loop.create_task(self._write_for_ever(), name="keiro writer")
        self._spawn(self._watch())

    async def _ensure(self, upgrade: bool) -> None:
        mode: migrate.Mode = "migrate" if upgrade else "verify"
        await asyncio.to_thread(migrate.ensure_postgres, self.url, mode=mode)

    async def _connect(self, *, listen: bool = False) -> Connection:
        conn: Connection | None = None
        try:
            if not listen:
                conn = await Connection.connect(self.url, connect_timeout=SILENT_S)
                # Arrays of any length take the same plan; planning these statements costs more than running them.
                await conn.simple(
                    f"SET plan_cache_mode = force_generic_plan; {_READ_COMMITTED};"
                    f" SET lock_timeout = {round(LOCK_LIMIT_S * 1000)}"
                )
                return conn
            conn = await Connection.connect(
                self.url, on_notify=self._heard, on_lost=self._deaf, connect_timeout=SILENT_S
            )
            await conn.simple(f"{_READ_COMMITTED}; LISTEN {CHANNEL}")
            return conn
        except BaseException as error:
            if conn is not None:
                await conn.close()  # nobody else knows of it, and the event loop would keep it for ever
            if isinstance(error, ConnectionLost | StatementError):
                raise self._fault(error) from error
            raise

    async def close(self) -> None:
        """Commit what is queued and disconnect. Where the server does not answer, who still waits is told so."""
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._finish()
        except TimeoutError:
            self._given_up = True
            await self._disconnect()
            await self._finish()
        for task in self._background:
            task.cancel()
        await self._disconnect()
        await self._connections.close()

    async def _finish(self) -> None:
        if self._gated is not None:
            await self._gated.drain()
        self._closing = True
        self._wake_writer()
        await asyncio.wait([self._writing])

    async def _disconnect(self) -> None:
        self._closing = True
        for conn in (self._writer, self._reader, self._follower):
            if conn is not None:
                await conn.close()

    def _fault(self, error: Exception) -> KeiroError:
        if isinstance(error, KeiroError):
            return error
        sqlstate = error.sqlstate if isinstance(error, StatementError) else None
        fault = postgres_fault(sqlstate, str(error), self._target)
        fault.__cause__ = error
        return fault

    # The clock: the database's, carried on by this process's monotonic one

    async def _read_clock(self) -> None:
        before = time.monotonic()
        ((text,),) = await self._select(_NOW, ())
        after = time.monotonic()
        self._offset_ms = int(text) - (before + after) * 500

    def now_ms(self) -> int:
        """The database's time."""
        return round(time.monotonic() * 1000 + self._offset_ms)

    # Wakes between processes

    async def _look_around(self) -> None:
        self._told = False
        alone = len(await self.workers()) <= 1
        # Who joined behind our look has told so meanwhile.
        self._alone = alone and not self._told

    def _heard(self, channel: str, payload: str) -> None:
        if payload != self._me:
            self._alone, self._told = False, True
            self.listener.woken()

    def _deaf(self, _: ConnectionLost) -> None:
        # While nobody listens a wake-up may be lost: connect again at once, then look.
        self._spawn(self._listen_again())

    async def _listen_again(self) -> None:
        while not self._closing:
            with suppress(StoreError):
                async with self._reading:
                    await self._reader_now()
                self.listener.woken()
                return
            await asyncio.sleep(0.5)

    async def _watch(self) -> None:
        """Let go of connections whose server has fallen silent: stopped, or behind a network that drops everything.

        Nothing else would end the wait of those who are on them. A statement that only takes its time is left alone.
        """
        while True:
            await asyncio.sleep(SILENT_S / 10)
            held = [one for one in (self._writer, self._reader, self._follower) if one is not None and not one.closed]
            owing = [one for one in held if one.unanswered_s > SILENT_S]
            if owing and not await self._answers():
                for one in owing:
                    if one.unanswered_s > SILENT_S:
                        one.give_up(f"the server has not answered for {one.unanswered_s:.0f} s")

    async def _answers(self) -> bool:
        """Whether the server says anything, be it that it takes no more connections."""
        try:
            async with asyncio.timeout(SILENT_S):
                probe = await Connection.connect(self.url, connect_timeout=SILENT_S)
                try:
                    await probe.execute("SELECT 1")
                finally:
                    await probe.close()
        except TimeoutError:
            return False
        except ConnectionLost as error:
            return "FATAL" in str(error)
        except StatementError:
            return True
        return True

    def _spawn(self, coroutine: Any) -> None:
        task = self._loop.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _published(self, changed: Sequence[Run], touched: Sequence[str] = (), taken: Sequence[Taken] = ()) -> None:
        tell(self.listener, changed, touched, taken)
        if (changed or touched) and not self._alone:
            self._notify()

    def _notify(self) -> None:
        # On the other connection, after the commit: inside the transaction it would serialise all commits.
        if not self._notifying:
            self._notifying = True
            self._spawn(self._send_notify())

    async def _send_notify(self) -> None:
        with suppress(StoreError):
            async with self._reading:
                self._notifying = False
                conn = await self._reader_now()
                with suppress(ConnectionLost, StatementError):
                    await conn.execute("SELECT pg_notify($1, $2)", (CHANNEL, self._me))

    # The append

    def submit(self, command: Command) -> Future[Outcome]:
        """Queue a command for the next batch."""
        if self._closing:
            return refused_when_closed(self._loop)
        if self._gated is not None and self._inline is not None and self._inline.gates(command):
            pending = Pending(command, self._loop.create_future())
            self._gated.put(pending)
            return pending.future
        return self._queue.put(command)

    def _wake_writer(self) -> None:
        if self._nudge is not None and not self._nudge.done():
            self._nudge.set_result(None)

    async def _write_for_ever(self) -> None:
        while True:
            if self._queue.waiting:
                await self._commit(self._queue.take())
            # After every batch, not after the last: under a steady load there always is another one, and a lease that
            # is not renewed meanwhile ends.
            if self._jobs:
                await self._jobs.pop(0)()
            elif self._queue.waiting:
                continue
            elif self._closing:
                return
            else:
                self._nudge = self._loop.create_future()
                await self._nudge

    async def _commit(self, batch: list[Pending]) -> None:
        try:
            left = await self._commit_known(batch)
        except Exception as error:
            # A lost connection may have committed all the same: the next look, under the lock, finds the events by
            # their ids. After any other failure nothing was written.
            log.info("a batch of %d commands goes one by one: %s", len(batch), error)
            left = batch
        if left and not await self._commit_each(left) and len(left) > 1:
            # One bad command must not take the others down.
            for pending in left:
                await self._commit_each([pending])

    async def _commit_known(self, batch: list[Pending]) -> list[Pending]:
        """Write, in one statement, commands whose senders know the state; return those that were wrong or do not."""
        writer = self._writer
        if writer is None or writer.closed:
            return batch
        conn: Connection | _Projecting = writer
        if self._inline is not None and self._inline.wants([pending.command for pending in batch]):
            conn = _Projecting(writer, self._inline)
        if len(batch) == 1 or (len(batch) <= FEW and conn is writer):
            return await self._commit_few(conn, batch)
        seal = self._sql.seal
        known, left = known_and_left(batch)
        heads: dict[int, list[Any]] = {}
        events: list[tuple[Any, ...]] = []
        rows: dict[int, Run] = {}
        births: dict[str, tuple[Pending, Run, Start]] = {}
        appends: list[tuple[Pending, Append]] = []
        for pending in known:
            command = pending.command
            if isinstance(command, Append):
                assert command.expected is not None
                head = heads.setdefault(command.run_key, [command.expected, command.owner, command.epoch, 0, False])
                version = command.expected
                for one in command.events:
                    version += 1
                    events.append(
                        (
                            command.run_key,
                            version,
                            one.event_id.hex(),
                            one.event.TOPIC,
                            seal(one.payload),
                            command.at_ms,
                        )
                    )
                head[3] += len(command.events)
                if command.run is not None:
                    rows[command.run_key] = command.run
                    head[4] = head[4] or releases(command.events, command.run)
                appends.append((pending, command))
            else:
                assert isinstance(command, Start)
                births[command.run_id] = (pending, born(command), command)
        if not heads and not births:
            return left
        params: list[Any] = [array(list(heads))]
        params += [array([head[i] for head in heads.values()]) for i in range(5)]
        params += [array(column) for column in (zip(*events, strict=True) if events else [()] * 6)]
        if rows:
            changed_rows = [self._sql.changed_values(run) for run in rows.values()]
            params += [array(column) for column in zip(*changed_rows, strict=True)]
        if births:
            born_rows = [self._birth(run, start) for _, run, start in births.values()]
            params += [array(column) for column in zip(*born_rows, strict=True)]
        result = await conn.execute(_batch_sql(bool(births), bool(rows)), params)
        changed: list[Run] = []
        keys: set[int] = set()
        for key, name in result.rows:
            if name is None:
                keys.add(int(key or 0))
            else:
                pending, run, _ = births.pop(name)
                run = replace(run, run_key=int(key or 0))
                changed.append(run)
                pending.settle(Appended(1, run))
        for pending, append in appends:
            if append.run_key in keys:
                assert append.expected is not None
                pending.settle(Appended(append.expected + len(append.events)))
            else:
                left.append(pending)
        left += [pending for pending, _, _ in births.values()]
        changed += [run for key, run in rows.items() if key in keys]
        self._published(changed)
        if len(left) > 1:
            came = {pending: n for n, pending in enumerate(batch)}
            left.sort(key=came.__getitem__)
        return left

    async def _commit_few(self, conn: Connection | _Projecting, batch: list[Pending]) -> list[Pending]:
        """Write a handful of commands, each by its own statement, all in one round trip and one transaction."""
        statements = [self._alone_statement(pending.command) for pending in batch]
        known = [(one, statement) for one, statement in zip(batch, statements, strict=True) if statement is not None]
        if len(known) < len(batch):
            # Those that need a look come after those that do not, but never before an earlier one of the same run.
            first = statements.index(None)
            known = known[:first]
        if not known:
            return batch
        if isinstance(conn, _Projecting):
            [(_, (sql, params, _))] = known
            results = [await conn.execute(sql, params)]
        else:
            results = await conn.pipeline([(sql, params) for _, (sql, params, _) in known])
        left: list[Pending] = []
        changed: list[Run] = []
        for (pending, (_, _, run)), result in zip(known, results, strict=True):
            command = pending.command
            if not result.rowcount:
                left.append(pending)
            elif isinstance(command, Start):
                assert run is not None
                run = replace(run, run_key=int(result.rows[0][0] or 0))
                changed.append(run)
                pending.settle(Appended(1, run))
            else:
                assert isinstance(command, Append) and command.expected is not None
                if run is not None:
                    changed.append(run)
                pending.settle(Appended(command.expected + 1))
        self._published(changed)
        return left + batch[len(known) :]

    def _alone_statement(self, command: Command) -> tuple[str, list[Any], Run | None] | None:
        """The statement that writes a command by itself, with the row it changes; None if the sender does not know
        enough for it."""
        if isinstance(command, Start):
            run = born(command)
            return (_START, self._birth(run, command), run) if is_plain(command) else None
        if not isinstance(command, Append) or not command.alone:
            return None
        if command.owner is None or command.expected is None or len(command.events) > 1:
            return None
        (one,) = command.events
        params: list[Any] = [
            command.run_key,
            command.expected,
            command.owner,
            command.epoch,
            one.event_id.hex(),
            one.event.TOPIC,
            self._sql.seal(one.payload),
            command.at_ms,
        ]
        changed = command.run
        if changed is None:
            return _STEP, params, None
        if releases(command.events, changed):
            return _END, params + self._sql.changed_values(changed)[:-1], changed
        return None

    def _birth(self, run: Run, start: Start) -> list[Any]:
        return [
            run.run_id,
            run.workflow,
            run.key,
            run.status,
            run.version_tag,
            self._sql.seal(run.input_json),
            run.created_at_ms,
            run.started_at_ms,
            start.owner,
            start.started.event_id.hex(),
            self._sql.seal(start.started.payload),
        ]

    async def _commit_each(self, batch: list[Pending], snapshot: Snapshot | None = None) -> bool:
        """Load, decide and write one command after the other in one transaction; again after a lost connection.

        False: one of several commands cannot be written, and none was. A single one is told why. With `snapshot` the
        gate of rows in memory is held: they are projected too, and accepted with the commit.
        """
        deadline = self._loop.time() + RECONNECT_S
        inline = self._inline
        while True:
            try:
                if snapshot is not None:
                    snapshot.rewind()
                conn = await self._writer_now()
                commands = [pending.command for pending in batch]
                if inline is None:
                    decisions = await _transact(conn, self._sql.execute(commands))
                else:
                    await conn.pipeline(_BEGIN)
                    after = await _drive(conn, inline.head(), typed=True)
                    decisions = await _drive(conn, self._sql.execute(commands))
                    await _drive(conn, inline.project(after, memory=snapshot is not None), typed=True)
                    await conn.execute("COMMIT")
                if snapshot is not None:
                    snapshot.accept()
                break
            except Exception as error:
                await self._roll_back()
                if _again(error):
                    if self._loop.time() < deadline and not self._closing:
                        await asyncio.sleep(0.05)
                        continue
                elif len(batch) > 1:
                    return False
                fault = self._fault(error)
                for pending in batch:
                    pending.fail(fault)
                return True
        for pending, decision in zip(batch, decisions, strict=True):
            pending.settle(decision.outcome)
        self._published(*published(decisions))
        return True

    async def _roll_back(self) -> None:
        conn = self._writer
        if conn is not None and not conn.closed and conn.in_transaction:
            with suppress(ConnectionLost, StatementError):
                await conn.execute("ROLLBACK")

    async def _writer_now(self) -> Connection:
        if self._writer is None or self._writer.closed:
            if self._given_up:
                raise StoreUnavailable(f"{self._target} did not answer before the engine was closed")
            self._writer = await self._connect()
        return self._writer

    def _check_open(self) -> None:
        # Connected again after the end, nobody would ever disconnect.
        if self._closing:
            raise StoreUnavailable("the engine is closed")

    async def _reader_now(self) -> Connection:
        if self._reader is None or self._reader.closed:
            self._check_open()
            self._reader = await self._connect(listen=True)
            self._alone = False  # we may have missed who came
        return self._reader

    async def _locked(self, program: Callable[[], Program[T]], *, typed: bool = False) -> T:
        """Run a writing program under the lock, in its turn among the batches."""

        async def job() -> T:
            deadline = self._loop.time() + RECONNECT_S
            while True:
                try:
                    return await _transact(await self._writer_now(), program(), typed=typed)
                except Exception as error:
                    await self._roll_back()
                    if not _again(error) or self._loop.time() > deadline or self._given_up:
                        raise self._fault(error) from error
                await asyncio.sleep(0.05)

        return await self._in_turn(job)

    async def _in_turn(self, work: Callable[[], Awaitable[T]]) -> T:
        """Let the writer do something between two batches."""
        done: Future[T] = self._loop.create_future()

        async def job() -> None:
            try:
                result = await work()
            except Exception as error:
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(result)

        if self._closing:
            raise StoreUnavailable("the engine is closed: nothing can be written any more")
        self._jobs.append(job)
        self._wake_writer()
        return await done

    def run_tables(self) -> RunTables:
        """Blocking access to runs."""

        def connect() -> tuple[Execute, Callable[[], None]]:
            import psycopg

            conn = psycopg.connect(self.url, autocommit=True)
            return execute_of_psycopg(conn), conn.close

        def fault(error: Exception) -> KeiroError:
            return postgres_fault(getattr(error, "sqlstate", None), str(error), self._target)

        return SqlRunTables(self._sql, connect, fault, _NOW)

    # Rows of projections, and transactions of callers

    def keep(self, models: Sequence[ReadModel], mapper: EventMapper) -> Kept:
        """Keep the rows of these projections from now on."""
        kept = SqlKept(self, models, mapper)
        self._inline = kept.inline
        self._gated = None if kept.gate is None else GatedQueue(kept.gate, self._commit_gated)
        return kept

    async def _commit_gated(self, batch: list[Pending], snapshot: Snapshot) -> None:
        if not await self._in_turn(lambda: self._commit_each(batch, snapshot)):
            raise StoreError(f"one of {len(batch)} commands cannot be written; none was")

    def listing(self, mapper: EventMapper) -> Listing:
        """The listing of executions."""
        return SqlListing(self, mapper)

    async def transact(self, program: Callable[[], Program[T]], *, locked: bool) -> T:
        """Run a program in a transaction. What needs no lock does not wait for the batches."""
        if locked:
            return await self._locked(program, typed=True)
        deadline = self._loop.time() + RECONNECT_S
        async with self._following:
            while True:
                try:
                    conn = await self._follower_now()
                    await conn.execute("BEGIN")
                    result = await _drive(conn, program(), typed=True)
                    await conn.execute("COMMIT")
                    return result
                except Exception as error:
                    if self._follower is not None and not self._follower.closed and self._follower.in_transaction:
                        with suppress(ConnectionLost, StatementError):
                            await self._follower.execute("ROLLBACK")
                    if not _again(error) or self._loop.time() > deadline:
                        raise self._fault(error) from error
                await asyncio.sleep(0.05)

    async def _follower_now(self) -> Connection:
        if self._follower is None or self._follower.closed:
            self._check_open()
            self._follower = await self._connect()
        return self._follower

    async def query(self, program: Callable[[], Program[T]]) -> T:
        """Run a program that only reads."""
        async with self._reading:
            for last in (False, True):
                conn = await self._reader_now()
                try:
                    return await _drive(conn, program(), typed=True)
                except ConnectionLost as error:
                    if last:
                        raise self._fault(error) from error
                except StatementError as error:
                    raise self._fault(error) from error
        raise AssertionError("unreachable")

    async def create_tables(self, models: Sequence[ReadModel], *, create: bool) -> None:
        """Create the tables of projections, or check them."""
        import psycopg

        from keiro.stores.tables import create_on_postgres

        connect = partial(psycopg.connect, self.url)
        await asyncio.to_thread(create_on_postgres, connect, models, create=create, target=self._target)

    def announce(self) -> None:
        """A transaction that was not ours to commit has ended: look, here and in other processes, what it wrote."""
        self.listener.woken()
        if not self._alone:
            self._notify()

    def join(self, connection: Any) -> Joined:
        """The journal through a caller's connection."""
        return join_postgres(connection, self._database, self._target, self._sql, self._inline, LOCK_KEY)

    def connections(self) -> Connections:
        """Connections to the database, for transactional steps."""
        return self._connections

    async def _database(self) -> tuple[Any, ...]:
        ((row,),) = await self.query(lambda: which_database())
        return tuple(row)

    # Reading

    async def _select(self, sql: str, values: Sequence[Any]) -> list[Any]:
        async with self._reading:
            for last in (False, True):
                conn = await self._reader_now()
                try:
                    return list((await conn.execute(_numbered(sql), _adapted(values))).rows)
                except ConnectionLost as error:
                    if last:
                        raise self._fault(error) from error
                except StatementError as error:
                    raise self._fault(error) from error
        raise AssertionError("unreachable")

    async def run(self, run_id: str) -> Run | None:
        """The row of a run."""
        rows = await self._select(self._sql.text.load_keys, (run_id,))
        return self._sql.to_run(rows[0]) if rows else None

    async def head(self, run_id: str) -> tuple[Run, Head] | None:
        """The row and the head of a run."""
        rows = await self._select(self._sql.text.load, (run_id,))
        return self._sql.to_owned(rows[0]) if rows else None

    async def runs(
        self, *, status: str | None = None, workflow: str | None = None, before: int | None = None, limit: int
    ) -> list[Run]:
        """Runs, newest first."""
        sql, values = self._sql.list_runs(status, workflow, before, limit)
        return [self._sql.to_run(row) for row in await self._select(sql, values)]

    async def ended(self, run_ids: Sequence[str]) -> list[Run]:
        """The terminal ones of these runs."""
        return [self._sql.to_run(row) for row in await self._select(*self._sql.named(self._sql.text.ended, run_ids))]

    async def history(self, run_keys: Sequence[int], after: int = 0) -> dict[int, list[Stored]]:
        """The events of runs."""
        found: dict[int, list[Stored]] = {key: [] for key in run_keys}
        unseal, fromhex = self._sql.unseal, bytes.fromhex
        # What a replay waits for: a row is read without a call that could be spared.
        for row in await self._select(_HISTORIES, (array(list(run_keys)), after)):
            position, key, version, event_id, topic, payload, at_ms = row
            run_key = int(key)
            found[run_key].append(
                Stored(int(position), run_key, int(version), fromhex(event_id), topic, unseal(payload), int(at_ms))
            )
        return found

    async def step_maps(self, run_key: int) -> list[str]:
        """Snapshots of a run's history."""
        return [self._sql.unseal(row[0]) for row in await self._select(self._sql.text.step_maps, (run_key,))]

    async def keep_step_map(self, run_key: int, until: int, state: str) -> None:
        """Keep a snapshot."""
        await self._locked(lambda: self._sql.keep_step_map(run_key, until, state))

    async def snapshot(self, run_key: int, after: int, until: int) -> None:
        """Keep a snapshot of a stretch of the journal."""
        await self._locked(lambda: self._sql.snapshot(run_key, after, until))

    async def drop_step_maps(self, run_key: int) -> None:
        """Delete the snapshots."""
        await self._locked(lambda: self._sql.drop_step_maps(run_key))

    async def read(self, after: int, limit: int) -> list[Stored]:
        """Events by position."""
        return [self._sql.to_stored(row) for row in await self._select(self._sql.text.read, (after, limit))]

    # Retention

    async def consider(self, commands: Sequence[Command]) -> list[Outcome]:
        """What commands would do."""
        return await self._locked(lambda: self._sql.consider(commands))

    async def existing(self, run_ids: Sequence[str]) -> set[str]:
        """Those of these runs that there are."""
        return {row[0] for row in await self._select(*self._sql.named(self._sql.text.existing, run_ids))}

    async def ended_before(self, before_ms: int, after: tuple[int, int], limit: int) -> list[Candidate]:
        """Lineages that have ended."""
        rows = await self._select(*self._sql.ended_before(before_ms, after, limit))
        return [self._sql.to_candidate(row) for row in rows]

    async def handed_off_before(self, before_ms: int, after: tuple[int, int], limit: int) -> list[Candidate]:
        """Old rounds."""
        rows = await self._select(*self._sql.handed_off_before(before_ms, after, limit))
        return [self._sql.to_candidate(row) for row in rows]

    # Workers

    async def register(self, incarnation: Incarnation) -> int:
        """Enter a worker."""
        # Anew: the clock this process carried on may have stood still while the machine slept.
        await self._read_clock()
        key = await self._locked(lambda: self._sql.register(incarnation, None, self.now_ms()))
        await self._look_around()
        if not self._alone:
            self._notify()  # the others learn that they are not alone any more
        return key

    async def renew(self, worker_key: int) -> bool:
        """Extend a lease."""
        await self._read_clock()
        renewed = await self._locked(lambda: self._sql.renew(worker_key, self.now_ms()))
        await self._look_around()
        return renewed

    async def workers(self) -> list[WorkerRow]:
        """All workers."""
        return self._sql.to_workers(await self._select(self._sql.text.list_workers, ()))

    async def claim(
        self, worker_key: int, workflows: Sequence[str], limit: int, limits: Limits = NO_LIMITS
    ) -> list[tuple[Run, Head]]:
        """Take pending runs."""
        # Looking needs no lock: an idle worker must not stop the others from writing.
        now, open_now = self.now_ms(), workflows
        if limits:
            uses = [await self._select(*look) for look in self._sql.uses(worker_key, limits, now)]
            open_now = let_through(workflows, limits, self._sql.to_lefts(limits, uses, limit))
        if not await self._select(*self._sql.any_claimable(open_now, now)):
            return []
        return await self._locked(lambda: self._sql.claim(worker_key, workflows, limit, self.now_ms(), limits))

    async def opens_ms(self, queue: Limited, at_ms: int) -> int | None:
        """When a rate that was used up has room again."""
        if queue.rate is None:
            return None
        rows = await self._select(*self._sql.opens(queue.name, at_ms - queue.rate.per_ms, queue.rate.starts))
        return int(rows[0][0]) + queue.rate.per_ms if rows else None

    async def due(self, workflows: Sequence[str]) -> list[tuple[str, int]]:
        """Parked runs whose time has come."""
        rows = await self._select(*self._sql.due(workflows, self.now_ms()))
        return [(run_id, int(version)) for run_id, version in rows]

    async def asked(self) -> list[tuple[str, int]]:
        """Runs that are asked to end."""
        return [(run_id, int(over)) for run_id, over in await self._select(self._sql.text.asked, ())]

    async def next_due_ms(self, workflows: Sequence[str]) -> int | None:
        """When the next paced run is due."""
        ((found,),) = await self._select(*self._sql.next_due(workflows))
        return None if found is None else int(found)

    async def unregistered(self, workflows: Sequence[str]) -> list[str]:
        """Lanes with runs to be driven that are not among these."""
        now = self.now_ms()
        rows = await self._select(*self._sql.unregistered(workflows, now))
        versions = await self._select(*self._sql.versions(workflows, now)) if pinned(workflows) else []
        return self._sql.to_unregistered(rows, workflows, versions)

    async def release(self, worker_key: int, run_keys: Sequence[int]) -> None:
        """Hand runs back."""
        await self._locked(lambda: self._sql.release(worker_key, run_keys))
        if not self._alone:
            self._notify()

    async def owned(self, worker_key: int) -> dict[int, int]:
        """What a worker owns."""
        return {int(key): int(version) for key, version in await self._select(self._sql.text.owned, (worker_key,))}

    async def newest(self, lineage_id: str) -> Run | None:
        """The newest round."""
        rows = await self._select(self._sql.text.newest, (lineage_id,))
        return self._sql.to_run(rows[0]) if rows else None

    async def children(self, workflow: str, key: str) -> list[ChildRow]:
        """The children of a run."""
        rows = await self._select(self._sql.text.list_children, (key, workflow))
        return [self._sql.to_child(row) for row in rows]

    async def parents_of(self, lineage_id: str) -> list[RunParent]:
        """The edges to parents."""
        return [to_edge(row) for row in await self._select(self._sql.text.parents_of, (lineage_id,))]

    async def children_of(self, lineage_id: str) -> list[RunParent]:
        """The edges from children."""
        return [to_edge(row) for row in await self._select(self._sql.text.children_of, (lineage_id,))]

    async def bury(self, worker: WorkerRow) -> bool:
        """Remove a dead worker as it was seen."""
        buried = await self._locked(lambda: self._sql.bury(worker))
        await self._look_around()
        return buried

    async def adopt_orphans(self) -> bool:
        """Make pending what is owned by no listed worker."""
        return await self._locked(self._sql.adopt_orphans)


class _Projecting:
    """Stands in for the writer's connection where a batch concerns inline projections: the one statement of the batch
    becomes a transaction, under the lock from its beginning, that projects what the statement appended."""

    closed = False

    def __init__(self, conn: Connection, inline: Inline) -> None:
        self._conn = conn
        self._inline = inline

    async def execute(self, sql: str, params: Sequence[Param]) -> Result:
        """Run the statement, project, commit. Raises `ProjectionFailed`, then with nothing written."""
        conn = self._conn
        try:
            *_, before, result = await conn.pipeline([*_BEGIN, (self._inline.head_sql, ()), (sql, params)])
            after = int(before.rows[0][0] or 0)
            await _drive(conn, self._inline.project(after, memory=False), typed=True)
            await conn.execute("COMMIT")
        except BaseException:
            if not conn.closed and conn.in_transaction:
                with suppress(ConnectionLost, StatementError):
                    await conn.execute("ROLLBACK")
            raise
        return result


async def _drive(conn: Connection, program: Program[T], *, typed: bool = False) -> T:
    """Run a program; `typed`, its values and rows are of any type psycopg knows, else of ours as text."""
    return await _run(conn, program, (), typed=typed)


async def _transact(conn: Connection, program: Program[T], *, typed: bool = False) -> T:
    """Run a program in a transaction of its own, under the lock, with no round trip for its beginning and, where the
    program knows its end, none for that."""
    return await _run(conn, program, _BEGIN, typed=typed)


async def _run(
    conn: Connection, program: Program[T], begin: Sequence[tuple[str, Sequence[Param]]], *, typed: bool
) -> T:
    adapted, loaded = (sendable, attrgetter("values")) if typed else (_adapted, attrgetter("rows"))
    first, end = begin, (_COMMIT if begin else ())
    committed = False
    try:
        statements = next(program)
        while True:
            try:
                sent = list(gathered([(sql, adapted(values)) for sql, values in statements], array))
                last = end if isinstance(statements, Last) else ()
                calls = [(_numbered(one.sql), one.params) for one in sent]
                results = (await conn.pipeline([*first, *calls, *last]))[len(first) :]
                first, committed = (), bool(last)
            except Exception as error:
                statements = program.throw(error)
            else:
                answers = zip(sent, results[: len(sent)], strict=True)
                statements = program.send([rows for one, result in answers for rows in one.apart(list(loaded(result)))])
    except StopIteration as stop:
        value: T = stop.value
    if end and not committed and not first:
        await conn.execute("COMMIT")
    return value


_HISTORIES: Final = (
    "SELECT j.position, j.run_key, j.version, encode(uuid_send(j.event_id), 'hex'), j.topic, j.payload,"
    " j.recorded_at_ms FROM keiro.keiro_journal j WHERE j.run_key = ANY(?::bigint[]) AND j.version > ?"
    " ORDER BY j.run_key, j.version"
)


def _again(error: Exception) -> bool:
    """Whether the same transaction may succeed when sent again; what it writes is safe to send twice."""
    if isinstance(error, StatementError):
        return is_transient(error.sqlstate)
    return isinstance(error, ConnectionLost | StoreUnavailable)


@lru_cache(maxsize=512)
def _numbered(sql: str) -> str:
    """`?` placeholders as Postgres numbers them; our statements contain no other question mark."""
    parts = sql.split("?")
    return "".join(part + (f"${i}" if i < len(parts) else "") for i, part in enumerate(parts, 1))


def _adapted(values: Sequence[Any]) -> list[Any]:
    return [value.hex() if isinstance(value, bytes) else value for value in values]
