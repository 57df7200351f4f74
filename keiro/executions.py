"""What an application asks of the listing of executions: pages, observations of single runs, the changes since.

Every answer is brought up to what was committed before the question, so whoever asks sees what it has written itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, TypedDict, TypeVar, Unpack

import msgspec

from keiro.errors import InvalidCursor, InvalidOptions, SourceChanged
from keiro.events import ms_of
from keiro.lister import Lister
from keiro.projections import executions
from keiro.projections.executions import Execution, Query
from keiro.rows import Status
from keiro.stores.kept import Report
from keiro.stores.listing import Entry, Listing, Seen

T = TypeVar("T")

MOST_LISTED: Final = 200
MOST_OBSERVED: Final = 200
MOST_CHANGES: Final = 1000
LONGEST_CURSOR: Final = 65_536
"""UTF-16 code units of a cursor."""
LONGEST: Final = 1024
"""Characters of a value that is filtered by."""
_LAST_MS: Final = 2**53 - 1


class Filters(TypedDict, total=False):
    """What runs are listed or counted. What is left out does not matter; None is a value: `parent=None` are runs
    without a parent, `waiting=None` runs that wait for nothing.

    `created_after` and `created_before` are both inclusive, in milliseconds since the epoch or as an aware datetime.
    `attributes` are values that all must be equal. `id_prefix` begins the run id (`wf:basket-`). `failure` is text:
    all of its words must be in what the run failed with, in any order, however they are written.
    """

    status: str
    workflow: str
    parent: str | None
    lineage: str
    waiting: str | None
    created_after: int | datetime
    created_before: int | datetime
    attributes: Mapping[str, Any]
    id_prefix: str
    failure: str


class Options(Filters, total=False):
    """As `Filters`; and at most `limit` runs (1 to 200, by default 100), from behind `cursor`, the oldest first, or
    with `newest` the newest."""

    newest: bool
    limit: int
    cursor: str | None


class Page(msgspec.Struct, frozen=True):
    """Some runs of a listing. `cursor` is for the next page, None at the end.

    All of it is of one moment: when `revision` was the newest change in the database `source`.
    """

    items: tuple[Execution, ...]
    cursor: str | None
    source: str
    revision: int


class Observed(msgspec.Struct, frozen=True):
    """A run as it was when `revision` was its newest change."""

    execution: Execution
    source: str
    revision: int

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return self.execution.run_id


class Missing(msgspec.Struct, frozen=True):
    """There is no such run: it was `deleted` by that revision, or never was, until that one."""

    run_id: str
    deleted: bool
    source: str
    revision: int


class Changes(msgspec.Struct, frozen=True):
    """Runs that changed, each once, in the order of their newest changes; those that were deleted are `Missing`.

    Go on from `revision`. With `more` there are others.
    """

    items: tuple[Observed | Missing, ...]
    source: str
    revision: int
    more: bool


def is_newer(one: Observed | Missing, other: Observed | Missing) -> bool:
    """Whether `one` says what became of the same run after `other`. What two databases say cannot be compared."""
    return (one.run_id, one.source) == (other.run_id, other.source) and one.revision > other.revision


class Executions:
    """The runs of a store, as a listing: `await engine.executions.list(status="failed")`."""

    def __init__(self, listing: Listing, lister: Lister, check_open: Callable[[], object]) -> None:
        self._listing = listing
        self._lister = lister
        self._check_open = check_open

    async def list(self, **options: Unpack[Options]) -> Page:
        """A page of runs, in the order of their creation, then of their ids.

        Go on with the page's `cursor` and the same options; `limit` may be another. Runs that come, change or go in
        between are seen as they are when the page with their place is read. Raises `InvalidOptions`, `InvalidCursor`,
        and `SourceChanged` for a cursor of another database.
        """
        self._check_open()
        given: dict[str, Any] = dict(options)
        limit, newest, text = given.pop("limit", 100), given.pop("newest", False), given.pop("cursor", None)
        if type(limit) is not int or not 1 <= limit <= MOST_LISTED:
            raise InvalidOptions(f"limit={limit!r}: a page has 1 to {MOST_LISTED} runs")
        if not isinstance(newest, bool):
            raise InvalidOptions(f"newest={newest!r}: newest is True or False")
        query = msgspec.structs.replace(self._query(given), newest=newest, limit=limit)
        cursor = None if text is None else _read_cursor(text, query)
        if cursor is not None:
            query = msgspec.structs.replace(query, place=(cursor.created_at_ms, cursor.run_id))
        seen = await self._current(lambda: self._listing.page(query))
        if cursor is not None and cursor.source != seen.source:
            raise SourceChanged("the cursor is of another database: begin again without it")
        more = len(seen.items) > limit
        items = tuple(seen.items[:limit])
        following = _write_cursor(seen.source, query, items[-1]) if more else None
        return Page(items, following, seen.source, seen.revision)

    async def counts(self, **filters: Unpack[Filters]) -> dict[Status, int]:
        """How many runs have each status, of those that a listing would give; a status that none has is 0."""
        self._check_open()
        query = self._query(dict(filters))
        seen = await self._current(lambda: self._listing.counts(query))
        counts = dict.fromkeys(Status, 0)
        for status, runs in seen.items:
            counts[Status(status)] += runs
        return counts

    async def observe(self, run_ids: Iterable[str]) -> Sequence[Observed | Missing]:
        """What there is of each of at most 200 runs, in their order, all of one moment. Raises `InvalidOptions`."""
        self._check_open()
        if isinstance(run_ids, str) or not isinstance(run_ids, Iterable):
            raise InvalidOptions(f"observe({run_ids!r}): pass a list of run ids")
        names = [_text("run_ids", name) for name in run_ids]
        if len(names) > MOST_OBSERVED:
            raise InvalidOptions(f"observe: {len(names)} run ids; at most {MOST_OBSERVED} at once")
        if not names:
            return ()
        seen = await self._current(lambda: self._listing.observe(names))
        return tuple(_told(entry, seen) for entry in seen.items)

    async def changes_since(self, revision: int = 0, *, source: str | None = None, limit: int = 1000) -> Changes:
        """The runs that changed after `revision`, which is that of a `Page` or of the `Changes` before; from the first
        one by default.

        A run that changed often is there once, as it is now. What was deleted stays known for ever. `source` is where
        the revision is from: raises `SourceChanged` if that is another database, or one that was set back since.
        """
        self._check_open()
        if type(revision) is not int or not 0 <= revision <= _LAST_MS:
            raise InvalidOptions(f"revision={revision!r}: a revision is a whole number from 0")
        if type(limit) is not int or not 1 <= limit <= MOST_CHANGES:
            raise InvalidOptions(f"limit={limit!r}: 1 to {MOST_CHANGES} changes are given at once")
        if source is not None and not isinstance(source, str):
            raise InvalidOptions(f"source={source!r}: pass the source of a page, or None")
        seen = await self._current(lambda: self._listing.changes(revision, limit + 1))
        if source is not None and source != seen.source:
            raise SourceChanged("the revision is of another database: list all runs anew")
        if revision > seen.revision:
            raise SourceChanged(
                f"revision {revision} is none of this database yet, its newest is {seen.revision}: it was set back. "
                "List all runs anew"
            )
        items = tuple(_told(entry, seen) for entry in seen.items[:limit])
        more = len(seen.items) > limit
        return Changes(items, seen.source, items[-1].revision if more else seen.revision, more)

    async def rebuild(self) -> Report:
        """See `Engine.rebuild`."""
        whole = Report()
        after: int | None = 0
        while after is not None:
            part, after = await self._listing.rebuild(after)
            whole = _sum(whole, part)
        return whole

    async def _current(self, ask: Callable[[], Awaitable[Seen[T]]]) -> Seen[T]:
        """An answer that has everything that was committed before it was asked for."""
        seen = await ask()
        if seen.current:
            return seen
        await self._lister.catch_up(seen.head)
        return await ask()

    def _query(self, given: dict[str, Any]) -> Query:
        unknown = given.keys() - Filters.__annotations__.keys()
        if unknown:
            known = ", ".join(Options.__annotations__)
            raise InvalidOptions(f"a listing has no option {', '.join(sorted(unknown))}; it has: {known}")
        equal: list[tuple[int, str | None]] = []
        for number, name in enumerate(("status", "workflow", "parent", "lineage", "waiting")):
            if name in given:
                value = given[name]
                if value is None and name not in ("parent", "waiting"):
                    raise InvalidOptions(f"{name}=None: every run has a {name}; leave it out to list all")
                equal.append((number, None if value is None else _text(name, value)))
        status = given.get("status", Status.PENDING)
        if status not in set(Status):
            raise InvalidOptions(f"{status!r} is no status; there are: {', '.join(Status)}")
        return Query(
            equal=tuple(equal),
            after_ms=_time("created_after", given),
            before_ms=_time("created_before", given),
            attributes=_attributes(given.get("attributes", {})),
            prefix=_text("id_prefix", given["id_prefix"]) if "id_prefix" in given else None,
            words=self._words(given["failure"]) if "failure" in given else (),
        )

    def _words(self, text: Any) -> tuple[str, ...]:
        if not self._listing.searchable:
            raise InvalidOptions("failure=...: payloads are encrypted or compressed here, so they cannot be searched")
        words = executions.words(_text("failure", text))
        if not words:
            raise InvalidOptions(f"failure={text!r}: there is no word in it")
        return tuple(words)


class _Cursor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    source: str
    query: str
    created_at_ms: int
    run_id: str


_decode_cursor: Final = msgspec.json.Decoder(_Cursor).decode
_VERSION: Final = 1


def _bound(query: Query) -> str:
    """What of a query a cursor belongs to: all but where it is and how long its pages are."""
    return msgspec.json.encode(
        [
            query.equal,
            query.after_ms,
            query.before_ms,
            sorted(query.attributes),
            query.prefix,
            query.words,
            query.newest,
        ]
    ).decode()


def _write_cursor(source: str, query: Query, last: Execution) -> str:
    cursor = _Cursor(_VERSION, source, _bound(query), last.created_at_ms, last.run_id)
    return msgspec.json.encode(cursor).decode()


def _read_cursor(text: Any, query: Query) -> _Cursor:
    if not isinstance(text, str):
        raise InvalidCursor(f"cursor={text!r}: pass the cursor of a page")
    if len(text) > LONGEST_CURSOR or len(text.encode("utf-16-le", "surrogatepass")) > 2 * LONGEST_CURSOR:
        raise InvalidCursor(f"the cursor is longer than {LONGEST_CURSOR} code units: pass the cursor of a page")
    try:
        cursor = _decode_cursor(text)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise InvalidCursor(f"this is no cursor ({error}): pass the cursor of a page") from error
    if cursor.version != _VERSION:
        raise InvalidCursor(f"the cursor has version {cursor.version}, which this keiro does not know: begin anew")
    if not 0 <= cursor.created_at_ms <= _LAST_MS or not 0 < len(cursor.run_id) <= LONGEST:
        raise InvalidCursor("the cursor names no place in a listing: pass the cursor of a page")
    if cursor.query != _bound(query):
        raise InvalidCursor("the cursor is of a listing with other options: pass the same ones, or begin anew")
    return cursor


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidOptions(f"{name}={value!r}: {name} is a text")
    if not 0 < len(value) <= LONGEST:
        raise InvalidOptions(f"{name}: a text of 1 to {LONGEST} characters, not of {len(value)}")
    if "\0" in value or any(0xD800 <= ord(one) < 0xE000 for one in value):
        raise InvalidOptions(f"{name}={value!r}: nothing that is stored has such characters")
    return str(value)


def _time(name: str, given: Mapping[str, Any]) -> int | None:
    if name not in given:
        return None
    value = given[name]
    if isinstance(value, datetime) and value.tzinfo is not None:
        value = ms_of(value)
    if type(value) is not int or not 0 <= value <= _LAST_MS:
        raise InvalidOptions(f"{name}={value!r}: milliseconds since the epoch, or a datetime with its zone")
    return value


def _attributes(given: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(given, Mapping):
        raise InvalidOptions(f"attributes={given!r}: pass a dict of names and values")
    found: list[tuple[str, str]] = []
    for name, value in given.items():
        text = executions.attribute_text(value)
        if text is None:
            raise InvalidOptions(f"attributes: {name}={value!r} is neither text, number, truth nor an aware datetime")
        found.append((_text("attributes", name), text))
    return tuple(sorted(found))


def _told(entry: Entry, seen: Seen[Any]) -> Observed | Missing:
    if entry.execution is not None and entry.revision is not None:
        return Observed(entry.execution, seen.source, entry.revision)
    # What never was there may come any time: it is missing as of the newest change.
    revision = seen.revision if entry.revision is None else entry.revision
    return Missing(entry.run_id, entry.deleted, seen.source, revision)


def _sum(one: Report, other: Report) -> Report:
    return Report(**{name: getattr(one, name) + getattr(other, name) for name in Report.__struct_fields__})
