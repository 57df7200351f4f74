"""One asyncio connection to Postgres that drives libpq itself, through the `pq` layer of psycopg.

It exists for speed: a statement is one send, one future and one reader callback, with no task, lock or cursor
in between. The rule it keeps: nothing is sent before the server has answered all that was sent before, so
whatever happens to a caller (an error, a cancellation), the next call starts on a clean connection or raises.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import pq
from psycopg.adapt import AdaptersMap, PyFormat, Transformer
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types.string import TextLoader

if TYPE_CHECKING:
    from psycopg.pq.abc import PGconn, PGresult

Param = str | int | bytes | None
"""A statement's parameter. `str`, `int` and `bool` travel as text. `bytes` travel as the value's binary form,
which for bytea, text and json is the value itself; give a number or a jsonb as `int` or `str`."""

_ANSWERED = frozenset((pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK, pq.ExecStatus.EMPTY_QUERY))
_COPY = frozenset((pq.ExecStatus.COPY_IN, pq.ExecStatus.COPY_OUT, pq.ExecStatus.COPY_BOTH))
_SYNC = pq.ExecStatus.PIPELINE_SYNC
_IDLE = pq.TransactionStatus.IDLE
_FAILED = pq.TransactionStatus.INERROR
_BAD = pq.ConnStatus.BAD
_SQLSTATE = pq.DiagnosticField.SQLSTATE

_STALE = frozenset((b"0A000", b"26000"))
"""What a prepared statement answers after others changed its tables' columns, or deallocated it."""

_REPEATABLE = frozenset((b"BEGIN", b"SET", b"LOCK", b"SELECT", b"INSERT", b"UPDATE", b"DELETE", b"MERGE"))
"""Commands whose rows are gone once their transaction is rolled back."""

_MAX_PREPARED = 256

_REPLAN = 1 << 16
"""Once so many bytes of parameters were sent, and whenever they have doubled, statements are planned anew: a plan that
was made for empty tables, which the server keeps until it has looked at them, scans them however long they get."""

_PLAIN = frozenset((str, int, bool, bytes))

_NUL = "Postgres cannot hold NUL (\\0) in text"

_AS_TEXT = AdaptersMap()
_AS_TEXT.register_loader(0, TextLoader)


class ConnectionLost(Exception):
    """The connection could not be made, or is gone: every later call raises this too.

    Whether a statement that was under way took effect is unknown.
    """


class StatementError(Exception):
    """The server refused a statement. A transaction that was open is rolled back; the connection goes on.

    `sqlstate` is the server's five-character code; `message`, `detail` and `constraint` are its texts;
    `position` is the statement's place in its pipeline, from 0.
    """

    def __init__(self, refusal: PGresult, position: int) -> None:
        def field(code: pq.DiagnosticField) -> str | None:
            value = refusal.error_field(code)
            return None if value is None else value.decode("utf-8", "replace")

        self.sqlstate = field(pq.DiagnosticField.SQLSTATE) or ""
        self.message = field(pq.DiagnosticField.MESSAGE_PRIMARY) or refusal.get_error_message()
        self.detail = field(pq.DiagnosticField.MESSAGE_DETAIL)
        self.constraint = field(pq.DiagnosticField.CONSTRAINT_NAME)
        self.position = position
        super().__init__(f"{self.sqlstate} {self.message}" + (f" ({self.detail})" if self.detail else ""))


class Result:
    """What the server answered to one statement."""

    __slots__ = ("_answer", "_rows")

    def __init__(self, answer: PGresult) -> None:
        self._answer = answer
        self._rows: list[tuple[str | None, ...]] | None = None

    @property
    def rows(self) -> list[tuple[str | None, ...]]:
        """The rows in Postgres's text form, NULL as None; decoded when first read."""
        if self._rows is None:
            # psycopg's row loader, told to leave every type as text: a fourth of the cost of get_value.
            loader = Transformer(_AS_TEXT)
            loader.set_pgresult(self._answer)
            self._rows = loader.load_rows(0, self._answer.ntuples, tuple)
        return self._rows

    @property
    def values(self) -> list[tuple[Any, ...]]:
        """The rows as psycopg gives them to programs: numbers, dates and UUIDs are such."""
        loader = Transformer()
        loader.set_pgresult(self._answer)
        return loader.load_rows(0, self._answer.ntuples, tuple)

    @property
    def rowcount(self) -> int:
        """How many rows the statement returned, inserted, updated or deleted."""
        return self._answer.command_tuples or 0


class Connection:
    """A connection with one user at a time: a second call while one is under way raises RuntimeError.

    Cancelling a call abandons its answer, not its statement: that runs to its end in the background, and the
    next call waits for it. Whether it took effect is unknown to the caller, except that a transaction the
    cancelled call leaves open is rolled back, because nobody is left to end it.

    A statement that fails inside an explicit transaction ends it: it is rolled back before the call raises.
    """

    def __init__(
        self,
        pgconn: PGconn,
        on_notify: Callable[[str, str], None] | None,
        on_lost: Callable[[ConnectionLost], None] | None,
    ) -> None:
        self._pgconn = pgconn
        self._on_notify = on_notify
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        # A duplicate to watch: libpq closes its own as soon as it finds the connection gone, and an event
        # loop cannot let go of a descriptor that is closed, or by then belongs to another socket.
        self._socket = socket.socket(fileno=os.dup(pgconn.socket))
        self._lost: str | None = None
        self._last_words: str | None = None
        self._in_call = False
        self._asked_at = 0.0  # by the event loop's clock
        # What is under way. The waiter is the caller's future, and already done if the caller has gone.
        self._waiter: asyncio.Future[list[PGresult]] | None = None
        self._answers: list[PGresult] = []
        self._rolling_back = False
        self._drained: asyncio.Future[None] | None = None
        self._prepared: dict[str, bytes] = {}
        self._names = itertools.count(1)
        self._outdated = False
        self._sent = 0  # bytes of parameters
        self._replan_at = _REPLAN
        pgconn.notice_handler = self._heard
        self._loop.add_reader(self._socket, self._readable)

    @classmethod
    async def connect(
        cls,
        conninfo: str,
        *,
        on_notify: Callable[[str, str], None] | None = None,
        on_lost: Callable[[ConnectionLost], None] | None = None,
        connect_timeout: float = 10,
    ) -> Connection:
        """Connect to a libpq conninfo string or a postgresql:// URL.

        Every address of every host is tried in turn, for `connect_timeout` seconds each. `on_notify(channel,
        payload)` is called for each NOTIFY, also while idle; `on_lost(error)` once, if the connection goes
        without `close`. Raises ConnectionLost.
        """
        failures: list[str] = []
        try:
            hosts = _hosts(conninfo)
        except psycopg.Error as error:
            raise ConnectionLost(f"cannot connect to Postgres: {error}") from error
        for options in hosts:
            try:
                async with asyncio.timeout(connect_timeout):
                    addresses = await _addresses(options)
            except (OSError, UnicodeError) as error:
                failures.append(f"host {options['host']}: {str(error) or 'its address was not found in time'}")
                continue
            for address in addresses:
                target = make_conninfo(**{**options, "hostaddr": address})
                try:
                    async with asyncio.timeout(connect_timeout):
                        return cls(await _open(target), on_notify, on_lost)
                except TimeoutError:
                    failures.append(f"{address or options.get('host')}: no answer in {connect_timeout:g} s")
                except psycopg.Error as error:
                    failures.append(str(error))
        raise ConnectionLost(f"cannot connect to Postgres: {'; '.join(failures)}")

    @property
    def closed(self) -> bool:
        """Whether the connection was closed or lost."""
        return self._lost is not None

    @property
    def in_transaction(self) -> bool:
        """Whether the last call left an explicit transaction open."""
        return self._lost is None and self._pgconn.transaction_status != _IDLE

    @property
    def unanswered_s(self) -> float:
        """For how many seconds the server has owed an answer."""
        return 0.0 if self._waiter is None else self._loop.time() - self._asked_at

    def give_up(self, reason: str) -> None:
        """Take the connection for lost: a call under way raises ConnectionLost."""
        self._lose(reason)

    async def execute(self, sql: str, params: Sequence[Param] = ()) -> Result:
        """Run one statement in one round trip; outside an explicit transaction it is then committed.

        The statement is prepared on its first use on this connection. Raises StatementError, ConnectionLost,
        and ValueError for text that Postgres cannot hold (NUL, lone surrogates), then with nothing sent.
        """
        return (await self.pipeline(((sql, params),)))[0]

    async def pipeline(self, statements: Sequence[tuple[str, Sequence[Param]]]) -> list[Result]:
        """Run statements in one round trip, as one transaction unless they say BEGIN and COMMIT themselves.

        The first one to fail raises StatementError and the server skips those after it. Raises as `execute`.
        """
        calls = [(sql, *_encode(params)) for sql, params in statements]
        self._enter()
        try:
            if self._waiter is not None:
                await self._drain()
            outside = self._pgconn.transaction_status == _IDLE
            answers = await self._exchange(calls)
            refused = _first_refused(answers)
            if refused is not None and answers[refused].error_field(_SQLSTATE) in _STALE:
                self._forget_prepared()
                # Only where everything before it was undone may the whole be sent a second time.
                if outside and all(_command(answer) in _REPEATABLE for answer in answers[:refused]):
                    answers = await self._exchange(calls)
                    refused = _first_refused(answers)
        finally:
            self._in_call = False
        if refused is not None:
            raise StatementError(answers[refused], refused)
        return [Result(answer) for answer in answers]

    async def simple(self, sql: str) -> None:
        """Run a script of statements without parameters, as one transaction unless it says otherwise.

        Raises StatementError (its `position` counts within the script) and ConnectionLost.
        """
        script = sql.encode()
        self._enter()
        try:
            if self._waiter is not None:
                await self._drain()
            answers = await self._round_trip(self._pgconn.send_query, script)
        finally:
            self._in_call = False
        refused = _first_refused(answers)
        if refused is not None:
            raise StatementError(answers[refused], refused)

    async def close(self) -> None:
        """Close the connection; a call under way raises ConnectionLost. Closing twice does nothing."""
        self._on_lost = None
        self._lose("it was closed")

    # One call

    def _enter(self) -> None:
        if self._in_call:
            raise RuntimeError("this connection is already in a call: one task may use it at a time")
        self._in_call = True

    async def _drain(self) -> None:
        """Wait for the end of a statement whose caller was cancelled."""
        self._drained = self._loop.create_future()
        try:
            await self._drained
        finally:
            self._drained = None

    async def _exchange(self, calls: list[_Call]) -> list[PGresult]:
        """Send the calls, each prepared if it is not yet, and return one answer for each."""
        prepared = self._prepared
        for _, values, _ in calls:
            self._sent += sum([len(value) for value in values if value is not None])
        # Not within a transaction: a statement that has failed there is sent once more only outside.
        if self._sent > self._replan_at and self._pgconn.transaction_status == _IDLE:
            self._replan_at = 2 * self._sent
            self._forget_prepared()
        if len(calls) == 1 and (name := prepared.get(calls[0][0])) is not None:
            _, values, formats = calls[0]
            return await self._round_trip(self._pgconn.send_query_prepared, name, values, formats)

        new = {sql for sql, _, _ in calls} - prepared.keys()
        if len(prepared) + len(new) > _MAX_PREPARED:
            self._forget_prepared()
            new = {sql for sql, _, _ in calls}
        if self._outdated:
            await self._round_trip(self._pgconn.send_query, b"DEALLOCATE ALL")
            self._outdated = False
        names = {sql: b"k%d" % next(self._names) for sql in new}
        sends: list[Callable[[], None]] = []
        prepares: list[str | None] = []  # for each send the text it prepares, None where it runs a statement
        for sql, values, formats in calls:
            if sql in new:
                new.remove(sql)
                sends.append(partial(self._pgconn.send_prepare, names[sql], sql.encode()))
                prepares.append(sql)
            name = prepared.get(sql) or names[sql]
            sends.append(partial(self._pgconn.send_query_prepared, name, values, formats))
            prepares.append(None)
        try:
            answers = await self._round_trip(self._send_pipeline, sends)
        except asyncio.CancelledError:
            if names:  # nobody will read which of them the server has prepared
                self._forget_prepared()
            raise

        executed: list[PGresult] = []
        failed_prepare = None
        for prepared_text, answer in zip(prepares, answers, strict=True):
            if prepared_text is None:
                executed.append(failed_prepare or answer)
                failed_prepare = None
            elif answer.status in _ANSWERED:
                prepared[prepared_text] = names[prepared_text]
            else:
                failed_prepare = answer
        return executed

    def _send_pipeline(self, sends: list[Callable[[], None]]) -> None:
        self._pgconn.enter_pipeline_mode()
        for send in sends:
            send()
        self._pgconn.pipeline_sync()

    def _forget_prepared(self) -> None:
        """Prepare every statement anew from now on; the server forgets the old ones before the first."""
        self._prepared.clear()
        self._outdated = True

    async def _round_trip(self, send: Callable[..., None], *args: object) -> list[PGresult]:
        """Send, and return the answers once the server is ready for more."""
        if self._lost is not None:
            raise ConnectionLost(self._lost)
        waiter: asyncio.Future[list[PGresult]] = self._loop.create_future()
        self._waiter = waiter
        self._asked_at = self._loop.time()
        try:
            send(*args)
            self._flush()
        except psycopg.Error as error:
            self._lose(str(error))
        try:
            return await waiter
        except asyncio.CancelledError:
            # If the answers had come just before the cancellation, an open transaction is still to be ended.
            if self._waiter is None and self.in_transaction:
                self._waiter = waiter
                try:
                    self._roll_back()
                except psycopg.Error as error:
                    self._lose(str(error))
            raise

    def _roll_back(self) -> None:
        self._rolling_back = True
        self._pgconn.send_query(b"ROLLBACK")
        self._flush()

    def _flush(self) -> None:
        if self._pgconn.flush():
            self._loop.add_writer(self._socket, self._writable)

    # What the socket brings

    def _readable(self) -> None:
        try:
            self._pgconn.consume_input()
            self._receive()
        except psycopg.Error as error:
            self._lose(str(error))

    def _writable(self) -> None:
        try:
            if not self._pgconn.flush():
                self._loop.remove_writer(self._socket)
        except psycopg.Error as error:
            self._lose(str(error))

    def _receive(self) -> None:
        """Take what libpq has read: answers to the call under way, and notifications."""
        pgconn = self._pgconn
        waiter, finished = self._waiter, False
        while waiter is not None and not finished and not pgconn.is_busy():
            answer = pgconn.get_result()
            if answer is None:
                finished = not pgconn.pipeline_status  # in a pipeline it only ends one statement's answers
            elif answer.status == _SYNC:
                pgconn.exit_pipeline_mode()
                finished = True
            elif answer.status in _COPY:
                # libpq would offer this answer for ever: the protocol can only go on by copying.
                raise psycopg.NotSupportedError("COPY cannot be run through this connection")
            else:
                self._answers.append(answer)
        while (notification := pgconn.notifies()) is not None:
            if self._on_notify is not None:
                channel, payload = notification.relname.decode(), notification.extra.decode()
                self._loop.call_soon(self._on_notify, channel, payload)
        if pgconn.status == _BAD:  # libpq could make no sense of what it read, and closed the socket
            raise psycopg.OperationalError(pgconn.get_error_message())
        if waiter is not None and finished:
            self._finish(waiter)

    def _finish(self, waiter: asyncio.Future[list[PGresult]]) -> None:
        """The server has answered everything: hand it over, once no failed transaction is left open."""
        if self._rolling_back:
            self._rolling_back = False
            self._answers.pop()
        else:
            status = self._pgconn.transaction_status
            if status == _FAILED or (status != _IDLE and waiter.done()):
                self._roll_back()
                return
        answers, self._answers, self._waiter = self._answers, [], None
        if not waiter.done():
            waiter.set_result(answers)
        elif self._drained is not None:
            _release(self._drained)

    def _heard(self, notice: PGresult) -> None:
        """Keep the reason that the server gives before it hangs up."""
        if notice.error_field(pq.DiagnosticField.SEVERITY_NONLOCALIZED) in (b"FATAL", b"PANIC"):
            self._last_words = notice.get_error_message()

    def _lose(self, reason: str) -> None:
        if self._lost is not None:
            return
        if self._answers:
            self._heard(self._answers[-1])
        self._lost = f"the connection to Postgres is gone: {self._last_words or reason}"
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._pgconn.finish()
        self._socket.close()
        for future in (self._waiter, self._drained):
            if future is not None and not future.done():
                future.set_exception(ConnectionLost(self._lost))
        self._waiter = None
        if self._on_lost is not None:
            self._loop.call_soon(self._on_lost, ConnectionLost(self._lost))


def sendable(values: Sequence[Any]) -> list[Param]:
    """Values of any type psycopg can send, as parameters. Raises psycopg.ProgrammingError for one it cannot."""
    dumper = Transformer()
    params: list[Param] = []
    for value in values:
        if value is None or type(value) in _PLAIN:
            params.append(value)
        elif isinstance(value, psycopg.Binary):
            params.append(bytes(value.obj))
        else:
            (text,) = dumper.dump_sequence([value], [PyFormat.TEXT])
            params.append(None if text is None else bytes(text).decode())
    return params


def array(values: Sequence[Param]) -> str:
    """The text of a one-dimensional Postgres array, to pass as one parameter (`unnest($1::text[])`).

    Elements are str, int, bool, bytes (as bytea) and None; others raise TypeError, NUL in text ValueError.
    """
    kinds = set(map(type, values))
    if kinds == {int}:
        return f"{{{','.join(map(str, values))}}}"
    if kinds == {str}:
        # All elements are quoted in one pass: NUL, which Postgres cannot hold, marks the joints meanwhile.
        joined = "\0".join(values)  # type: ignore[arg-type]
        if joined.count("\0") >= len(values):
            raise ValueError(_NUL)
        return '{"' + joined.replace("\\", "\\\\").replace('"', '\\"').replace("\0", '","') + '"}'
    return f"{{{','.join(map(_element, values))}}}"


def _element(value: Param) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, bytes):
        return f'"\\\\x{value.hex()}"'
    return _number(value)


def _number(value: int) -> str:
    if isinstance(value, int):
        return int.__repr__(value)
    raise TypeError(f"cannot send a {type(value).__name__} to Postgres: give it as str, int, bytes or None")


_Call = tuple[str, list[bytes | None], list[int] | None]


def _encode(params: Sequence[Param]) -> tuple[list[bytes | None], list[int] | None]:
    """The parameters' bytes, and their formats if one is binary."""
    values: list[bytes | None] = []
    formats: list[int] | None = None
    for param in params:
        if isinstance(param, str):
            text = param.encode()
            if b"\0" in text:  # libpq would cut the text there
                raise ValueError(_NUL)
            values.append(text)
        elif param is None:
            values.append(None)
        elif isinstance(param, bytes):
            values.append(param)
            formats = [int(isinstance(each, bytes)) for each in params]
        else:
            values.append(_number(param).encode())
    return values, formats


def _first_refused(answers: list[PGresult]) -> int | None:
    for position, answer in enumerate(answers):
        if answer.status not in _ANSWERED:
            return position
    return None


def _command(answer: PGresult) -> bytes:
    return (answer.command_status or b"").split(b" ", 1)[0]


def _hosts(conninfo: str) -> list[dict[str, Any]]:
    """The options of a conninfo, once for each host it lists."""
    options = conninfo_to_dict(conninfo, client_encoding="UTF8")
    hosts = str(options.get("host", "")).split(",")
    ports = str(options.get("port", "")).split(",")
    if len(hosts) == 1 or "hostaddr" in options or len(ports) not in (1, len(hosts)):
        return [options]
    if len(ports) == 1:
        ports *= len(hosts)
    return [{**options, "host": host, "port": port} for host, port in zip(hosts, ports, strict=True)]


async def _addresses(options: dict[str, Any]) -> list[str | None]:
    """The addresses of a host name. libpq would look it up itself, and block the event loop meanwhile."""
    host = options.get("host", "")
    if not host or host.startswith(("/", "@")) or "," in host or "hostaddr" in options:
        return [options.get("hostaddr")]
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _release(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


async def _open(conninfo: str) -> PGconn:
    loop = asyncio.get_running_loop()
    pgconn = pq.PGconn.connect_start(conninfo.encode())
    try:
        status = int(pq.PollingStatus.WRITING)
        while status != pq.PollingStatus.OK:
            if status == pq.PollingStatus.FAILED or pgconn.status == pq.ConnStatus.BAD:
                raise psycopg.OperationalError(pgconn.get_error_message())
            fd = pgconn.socket  # libpq may change it at each step
            ready: asyncio.Future[None] = loop.create_future()
            if status == pq.PollingStatus.READING:
                watch, unwatch = loop.add_reader, loop.remove_reader
            else:
                watch, unwatch = loop.add_writer, loop.remove_writer
            watch(fd, _release, ready)
            try:
                await ready
            finally:
                unwatch(fd)
            status = pgconn.connect_poll()
        pgconn.nonblocking = 1
    except BaseException:
        pgconn.finish()
        raise
    return pgconn
