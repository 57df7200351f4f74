"""The listing of executions in a SQL store: programs over its tables, and the text of its queries.

A query reads the index of its filters from where it begins and is one statement, so that a page and the number of the
newest change are of one moment. Rows are written by `advance` alone, one of all processes at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from msgspec.structs import replace

from keiro.errors import StoreError
from keiro.mapper import EventMapper
from keiro.projections import executions
from keiro.projections.executions import COLUMNS, FILTERS, FIXED, RUN_COLUMNS, TRACKING, Changes, Execution, Query
from keiro.projections.rebuilt import ComputedRuns, mended
from keiro.rows import RUN_COLUMNS as WHOLE_RUN
from keiro.rows import Status
from keiro.stores.kept import Report, decoded
from keiro.stores.listing import Advanced, Entry, Seen, report
from keiro.stores.sets import PerRow, inserted, updated
from keiro.stores.sql import Program, Row, Sql, Statement

T = TypeVar("T")

By: TypeAlias = tuple[str, Any] | None
"""What rows are found by: `prefix`, `word` or `attribute`, and which; None for the filters of the listing."""

BITE: Final = 500
"""So many runs are rebuilt in one transaction."""
FEW: Final = 2000
"""So many runs are counted at most to see what the fewest have."""
_SEEN: Final = 5
_BETWEEN: Final = "run_id >= ? AND run_id < ?"
_FAILURE: Final = COLUMNS.index("failure_json")


class SqlStore(Protocol):
    """What the listing needs of a SQL store."""

    sql: Sql

    async def transact(self, program: Callable[[], Program[T]], *, locked: bool) -> T:
        """Run a program in a transaction, under the lock of the journal or without it."""

    async def query(self, program: Callable[[], Program[T]]) -> T:
        """Run a program that only reads, outside any transaction."""


class Text:
    """SQL text of the listing, for one dialect."""

    def __init__(self, schema: str) -> None:
        self.remote = bool(schema)
        self.executions, self.attributes, self.words, self.counts, self.marks = (
            f"{schema}keiro_{name}"
            for name in (
                "executions", "execution_attributes", "execution_words", "execution_counts", "execution_marks",
            )
        )  # fmt: skip
        self.source, self.changes, self.runs, self.heads, self.journal, tracking = (
            f"{schema}keiro_{name}"
            for name in ("run_source", "run_changes", "runs", "run_heads", "journal", "projection_tracking")
        )
        self.row = ", ".join(f"e.{name}" for name in COLUMNS)
        head = f"(SELECT coalesce(max(position), 0) FROM {self.journal})"
        # The oldest mark by its key: a look at the whole table would step over all that were taken since its vacuum.
        marked = f"EXISTS (SELECT 1 FROM {self.marks} ORDER BY mark LIMIT 1)"
        tracked = f"(SELECT position FROM {tracking} WHERE name = '{TRACKING}')"
        # A query is joined to where everything stands, so that all of it is of one moment. It gives a row in any case.
        self.answer = (
            f"SELECT s.source, s.revision, {tracked}, {head}, {marked}, q.*"
            f" FROM {self.source} s LEFT JOIN ({{query}}) q ON true"
        )
        self.track = (
            f"INSERT INTO {tracking} (name, position) VALUES ('{TRACKING}', ?)"
            " ON CONFLICT (name) DO UPDATE SET position = excluded.position"
        )
        self.take_marks = (
            f"DELETE FROM {self.marks} WHERE mark IN (SELECT mark FROM {self.marks} ORDER BY mark LIMIT ?)"
            " RETURNING run_id"
        )
        self.changed = f"SELECT DISTINCT run_key FROM {self.journal} WHERE position > ? AND position <= ?"
        keys, names = self._list("bigint", "run_key"), self._list("text", "run_id")
        self.parents = f"{schema}keiro_run_parents"
        first_parent = (
            f"(SELECT p.parent_id FROM {self.parents} p WHERE p.child_id = {{}}.run_id"
            " ORDER BY p.child_id, p.seq, p.parent_id LIMIT 1)"
        )
        self.first_parents = f"SELECT k.run_id, {first_parent.format('k')} FROM {names}"
        parent = f"coalesce(r.parent_run_id, {first_parent.format('r')})"
        run = ", ".join(parent if name == "parent_run_id" else f"r.{name}" for name in RUN_COLUMNS)
        failure = "CASE WHEN r.status = 'failed' THEN r.failure_json END"
        # What a list has is few for a plan: it looks each up, and reads no table from one end to the other.
        beside = f"{run}, {failure}, {self.row}"
        self.by_key = (
            f"SELECT r.run_id, {beside} FROM {keys} JOIN {self.runs} r ON r.run_key = k.run_key"
            f" LEFT JOIN {self.executions} e ON e.run_id = r.run_id"
        )
        self.by_name = (
            f"SELECT k.run_id, {beside} FROM {names} LEFT JOIN {self.runs} r ON r.run_id = k.run_id"
            f" LEFT JOIN {self.executions} e ON e.run_id = k.run_id"
        )
        insert = f"INSERT INTO {self.executions} ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))})"
        self.insert = inserted(insert, self.executions, COLUMNS)
        self.delete = f"DELETE FROM {self.executions} WHERE run_id = ?"
        self.number = f"UPDATE {self.source} SET revision = revision + ? RETURNING revision"
        change = ("run_id", "revision", "deleted")
        taken = " ON CONFLICT (run_id) DO UPDATE SET revision = excluded.revision, deleted = excluded.deleted"
        self.note = inserted(
            f"INSERT INTO {self.changes} ({', '.join(change)}) VALUES (?, ?, ?){taken}", self.changes, change, taken
        )
        self.forget_attributes = f"DELETE FROM {self.attributes} WHERE run_id = ?"
        self.forget_words = f"DELETE FROM {self.words} WHERE run_id = ?"
        attribute, word = ("run_id", "name", "value", "created_at_ms"), ("run_id", "word", "created_at_ms")
        self.insert_attribute = inserted(
            f"INSERT INTO {self.attributes} ({', '.join(attribute)}) VALUES (?, ?, ?, ?)", self.attributes, attribute
        )
        self.insert_word = inserted(f"INSERT INTO {self.words} ({', '.join(word)}) VALUES (?, ?, ?)", self.words, word)
        self.count = (
            f"INSERT INTO {self.counts} AS c (execution_flow, status, runs) VALUES (?, ?, ?)"
            " ON CONFLICT (execution_flow, status) DO UPDATE SET runs = c.runs + excluded.runs"
        )
        self.discount = (
            f"UPDATE {self.counts} SET runs = CASE WHEN runs > ? THEN runs - ? ELSE 0 END"
            " WHERE execution_flow = ? AND status = ?"
        )
        self.observe = (
            f"SELECT k.run_id, c.revision, c.deleted, {self.row} FROM {names}"
            f" LEFT JOIN {self.changes} c ON c.run_id = k.run_id"
            f" LEFT JOIN {self.executions} e ON e.run_id = k.run_id"
        )
        self.changes_after = (
            f"SELECT c.run_id, c.revision, c.deleted, {self.row} FROM {self.changes} c"
            f" LEFT JOIN {self.executions} e ON e.run_id = c.run_id"
            " WHERE c.revision > ? ORDER BY c.revision LIMIT ?"
        )
        whole = ", ".join(f"r.{name}" for name in WHOLE_RUN)
        self.bite = (
            f"SELECT {whole}, h.version, h.owner, h.epoch FROM {self.runs} r"
            f" JOIN {self.heads} h ON h.run_key = r.run_key WHERE r.run_key > ? ORDER BY r.run_key LIMIT ?"
        )
        self.of_runs = (
            "SELECT j.position, j.run_key, j.version, j.event_id, j.topic, j.payload, j.recorded_at_ms, r.run_id"
            f" FROM {keys} JOIN {self.runs} r ON r.run_key = k.run_key JOIN {self.journal} j ON j.run_key = k.run_key"
            " ORDER BY j.run_key, j.version"
        )
        self.kept_attributes = f"SELECT a.run_id, a.name, a.value FROM {names} JOIN {self.attributes} a USING (run_id)"
        self.kept_words = f"SELECT w.run_id, w.word FROM {names} JOIN {self.words} w USING (run_id)"
        self.ghosts = (
            f"SELECT e.run_id FROM {self.executions} e"
            f" WHERE NOT EXISTS (SELECT 1 FROM {self.runs} r WHERE r.run_id = e.run_id)"
        )
        self.recount = (
            f"INSERT INTO {self.counts} (execution_flow, status, runs)"
            f" SELECT execution_flow, status, count(*) FROM {self.executions} GROUP BY execution_flow, status"
        )
        self.uncount = f"DELETE FROM {self.counts}"

    def _list(self, kind: str, name: str) -> str:
        if self.remote:
            return f"unnest(?::{kind}[]) AS k({name})"
        return f"(SELECT value AS {name} FROM json_each(?)) AS k"

    def update(self, columns: Sequence[str]) -> PerRow:
        """Write these columns of one row."""
        sets = ", ".join(f"{name} = ?" for name in columns)
        one = f"UPDATE {self.executions} SET {sets} WHERE run_id = ?"
        return updated(one, self.executions, columns, ("run_id",))

    def page(self, query: Query, by: By = None) -> Statement:
        """A page, and one row more; found by something that few runs have, if there is such a thing."""
        select = Select(self, query, by)
        values = [*select.values, query.limit + 1]
        if query.prefix is None or by is not None or self.remote:
            return f"SELECT {self.row} {select.body} ORDER BY {select.order} LIMIT ?", values
        # The index has the ids: SQLite would look up the row of each that has another beginning.
        ids = f"SELECT e.run_id AS found {select.body} ORDER BY {select.order} LIMIT ?"
        return f"SELECT {self.row} FROM ({ids}) CROSS JOIN {self.executions} AS e ON e.run_id = found", values

    def counts_of(self, query: Query, by: By = None) -> Statement:
        """How many of the runs that a query finds have each status."""
        given = dict(query.equal)
        if query == Query(equal=query.equal, limit=query.limit) and given.keys() <= {0, 1}:
            where = " AND ".join(f"{FILTERS[number]} = ?" for number in given) or "true"
            text = f"SELECT status, sum(runs) FROM {self.counts} WHERE {where} GROUP BY status"
            return text, list(given.values())
        texts: list[str] = []
        values: list[Any] = []
        # Each status by itself: with it, the index of the filters has all that is asked for.
        for status in (given[0],) if 0 in given else Status:
            select = Select(self, replace(query, equal=tuple(sorted({**given, 0: str(status)}.items()))), by)
            texts.append(f"SELECT '{status}' AS status, count(*) {select.body}")
            values += select.values
        return " UNION ALL ".join(texts), values

    def how_many(self, query: Query) -> tuple[list[By], Statement]:
        """The things that a query could be found by, and how many runs have each, counted as far as `FEW`."""
        things: list[By] = []
        looks: list[str] = []
        values: list[Any] = []

        def look(thing: By, table: str, where: str, *wanted: Any) -> None:
            things.append(thing)
            looks.append(f"(SELECT count(*) FROM (SELECT 1 FROM {table} WHERE {where} LIMIT {FEW + 1}) q)")
            values.extend(wanted)

        if query.prefix is not None:
            end = executions.prefix_end(query.prefix)
            where, wanted = ("run_id >= ?", [query.prefix]) if end is None else (_BETWEEN, [query.prefix, end])
            look(("prefix", None), self.executions, where, *wanted)
        for word in query.words:
            look(("word", word), self.words, "word = ?", word)
        for attribute in query.attributes:
            look(("attribute", attribute), self.attributes, "name = ? AND value = ?", *attribute)
        return things, (f"SELECT {', '.join(looks)}", values)


class Select:
    """What finds the rows of a query in their order: `FROM … WHERE …`, its values, and the order.

    One table is read in order from where the page begins: of words, of attributes, or the listing by the index of its
    filters. Whatever else is asked for is looked up for each row.
    """

    def __init__(self, text: Text, query: Query, by: By) -> None:
        self._text = text
        self.values: list[Any] = []
        self._where: list[str] = []
        kind, thing = (None, ()) if by is None else by
        # SQLite takes the index it is told; a plus keeps it from taking another. Postgres chooses by itself.
        tell = not text.remote
        leading: list[str] = []
        if kind == "word":
            first, tables = "w", self._beside(text.words, "w", "keiro_execution_words_idx")
            self._add("w.word = ?", thing)
        elif kind == "attribute":
            first, tables = "a", self._beside(text.attributes, "a", "keiro_execution_attributes_idx")
            self._add("a.name = ? AND a.value = ?", *thing)
        else:
            first, tables = "e", f"{text.executions} AS e"
            if kind is None:
                leading = [f"e.{FILTERS[number]}" for number, _ in query.equal]
                tables += f" INDEXED BY keiro_executions_listing_{query.mask}" if tell else ""
        plus = "+" if tell and kind is not None else ""
        for number, wanted in query.equal:
            column = f"{plus}e.{FILTERS[number]}"
            # `IS NOT DISTINCT FROM` would use no index on Postgres.
            self._add(f"{column} IS NULL") if wanted is None else self._add(f"{column} = ?", wanted)
        self._bound(query, f"{plus if first == 'e' else ''}{first}.created_at_ms", f"{first}.run_id")
        if query.prefix is not None:
            column = f"{'+' if tell and kind != 'prefix' else ''}{first}.run_id"
            self._add(f"{column} >= ?", query.prefix)
            if (end := executions.prefix_end(query.prefix)) is not None:
                self._add(f"{column} < ?", end)
        for attribute in query.attributes:
            if attribute != thing:
                of = f"SELECT 1 FROM {text.attributes} o WHERE o.run_id = {first}.run_id AND o.name = ? AND o.value = ?"
                self._add(f"EXISTS ({of})", *attribute)
        for word in query.words:
            if word != thing:
                of = f"SELECT 1 FROM {text.words} o WHERE o.run_id = {first}.run_id AND o.word = ?"
                self._add(f"EXISTS ({of})", word)
        self.body = f"FROM {tables} WHERE {' AND '.join(self._where) or 'true'}"
        # A column that is NULL is none that Postgres need not sort by: all that stand before the time in the index are
        # named, or the whole of what is found would be sorted for a page.
        way = " DESC" if query.newest else ""
        self.order = ", ".join(f"{name}{way}" for name in [*leading, f"{first}.created_at_ms", f"{first}.run_id"])

    def _add(self, condition: str, *values: Any) -> None:
        self._where.append(condition)
        self.values += values

    def _bound(self, query: Query, time: str, run_id: str) -> None:
        place = query.place
        if place is not None:
            self._add(f"({time}, {run_id}) {'<' if query.newest else '>'} (?, ?)", *place)
        # A place is within the bounds, so that it stands for the one on its side.
        if query.after_ms is not None and (place is None or query.newest):
            self._add(f"{time} >= ?", query.after_ms)
        if query.before_ms is not None and (place is None or not query.newest):
            self._add(f"{time} <= ?", query.before_ms)

    def _beside(self, table: str, alias: str, index: str) -> str:
        join = f"{self._text.executions} AS e ON e.run_id = {alias}.run_id"
        if self._text.remote:
            return f"{table} AS {alias} JOIN {join}"
        # CROSS keeps the order of the tables.
        return f"{table} AS {alias} INDEXED BY {index} CROSS JOIN {join}"


class SqlListing:
    """`Listing` in a SQL store."""

    def __init__(self, store: SqlStore, mapper: EventMapper) -> None:
        self._store = store
        self._sql = store.sql
        self._mapper = mapper
        self.text = Text(store.sql.schema)
        self.searchable = store.sql.plain
        self._updates: dict[tuple[str, ...], PerRow] = {}

    # Reading

    async def page(self, query: Query) -> Seen[Execution]:
        """See `Listing`."""
        seen, rows = await self._answer(self.text.page(query, await self._by(query)))
        found = [self._execution(row) for row in rows]
        # They come in order, but a join promises none.
        found.sort(key=executions.place_of, reverse=query.newest)
        return _with(seen, found)

    async def observe(self, run_ids: Sequence[str]) -> Seen[Entry]:
        """See `Listing`."""
        asked = list(dict.fromkeys(run_ids))
        seen, rows = await self._answer((self.text.observe, (self._listed(asked),)))
        entries = {entry.run_id: entry for entry in map(self._entry, rows)}
        return _with(seen, [entries[run_id] for run_id in run_ids])

    async def changes(self, after: int, limit: int) -> Seen[Entry]:
        """See `Listing`."""
        seen, rows = await self._answer((self.text.changes_after, (after, limit)))
        return _with(seen, sorted(map(self._entry, rows), key=lambda entry: entry.revision or 0))

    async def counts(self, query: Query) -> Seen[tuple[str, int]]:
        """See `Listing`."""
        seen, rows = await self._answer(self.text.counts_of(query, await self._by(query)))
        return _with(seen, [(status, int(runs)) for status, runs in rows if int(runs)])

    async def _by(self, query: Query) -> By:
        """What the fewest runs have of that which a query asks for beside its filters."""
        things, look = self.text.how_many(query)
        if not things:
            return None
        if len(things) == 1 and query.prefix is None:
            return things[0]
        (row,) = await self._rows(look)
        # Where many have a prefix, they are met soon enough in the order of the listing; by it they had to be sorted.
        counted = [(int(n), thing) for n, thing in zip(row, things, strict=True)]
        usable = [one for one in counted if one[1] is not None and (one[1][0] != "prefix" or one[0] <= FEW)]
        return min(usable, key=itemgetter(0))[1] if usable else None

    async def _rows(self, statement: Statement) -> list[Row]:
        def program() -> Program[list[Row]]:
            (rows,) = yield [statement]
            return rows

        return await self._store.query(program)

    async def _answer(self, query: Statement) -> tuple[Row, list[Row]]:
        """Where everything stands, and the rows of a query."""
        text, values = query
        rows = await self._rows((self.text.answer.format(query=text), values))
        # The first of a row of a query is never NULL, unless there is none.
        return _first(rows)[:_SEEN], [row[_SEEN:] for row in rows if row[_SEEN] is not None]

    def _execution(self, row: Sequence[Any]) -> Execution:
        if row[_FAILURE] is not None:
            row = [*row[:_FAILURE], self._sql.unseal(row[_FAILURE])]
        return Execution(*row)

    def _entry(self, row: Row) -> Entry:
        run_id, revision, deleted, *execution = row
        return Entry(run_id, revision, bool(deleted), None if execution[0] is None else self._execution(execution))

    def _listed(self, values: Sequence[Any]) -> str:
        """A list as one parameter."""
        if not self._sql.remote:
            return json.dumps(values)
        from keiro.stores.pq import array  # needs a driver that SQLite does without

        return array(values)

    # Following

    async def advance(self, most: int) -> Advanced:
        """See `Listing`."""
        return await self._store.transact(lambda: self._advance(most), locked=False)

    def _begin(self) -> Program[None]:
        """Let nobody else write rows until the commit, and see one state of everything."""
        if self._sql.remote:
            # The lock comes before the state: a look behind another process's rows would write them once more.
            yield [
                ("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ", ()),
                (f"LOCK TABLE {self.text.source} IN EXCLUSIVE MODE", ()),
            ]

    def _advance(self, most: int) -> Program[Advanced]:
        text = self.text
        yield from self._begin()
        (found,) = yield [(text.answer.format(query="SELECT 1 AS one"), ())]
        seen = _with(_first(found)[:_SEEN], list[int]())
        if seen.current:
            return Advanced(seen.position, seen.head, 0, True)
        until = min(seen.head, seen.position + most)
        marks: list[Row] = []
        if seen.marked:
            (marks,) = yield [(text.take_marks, (most,))]
        marked = list(dict.fromkeys(row[0] for row in marks))
        (rows,) = yield [(text.changed, (seen.position, until))]
        looks: list[Statement] = []
        if rows:
            looks.append((text.by_key, (self._listed([int(row[0]) for row in rows]),)))
        if marked:
            looks.append((text.by_name, (self._listed(marked),)))
        answers = yield looks
        changes = Changes()
        gone: list[str] = []
        for row in {row[0]: row for rows in answers for row in rows}.values():
            kept, wanted = self._compared(row)
            if kept is None and wanted is None:
                gone.append(row[0])  # it came and went in between
            changes.compare(kept, wanted)
        yield from self._write(changes, gone)
        yield [(text.track, (until,))]
        return Advanced(until, seen.head, len(changes), len(marks) < most)

    def _compared(self, row: Row) -> tuple[Execution | None, Execution | None]:
        """A row as it is kept and as it should be, by a row of `by_key` or `by_name`."""
        run, (failure, *kept) = row[1 : 1 + len(RUN_COLUMNS)], row[1 + len(RUN_COLUMNS) :]
        if failure is not None:
            failure = self._sql.unseal(failure)
        return (
            None if kept[0] is None else self._execution(kept),
            None if run[0] is None else executions.listed(run, failure),
        )

    def _write(self, changes: Changes, gone: Sequence[str] = ()) -> Program[None]:
        """Write rows, and number what changed; `gone` had no row and never will."""
        text, writes = self.text, list[Statement]()
        deleted = dict.fromkeys((*gone, *changes.deleted), True)
        changed = dict.fromkeys(
            (row.run_id for rows in (changes.inserted, *changes.updated.values()) for row in rows), False
        )
        numbered = deleted | changed  # what was deleted and is there again is there
        if numbered:
            # Not by a trigger: SQLite would keep a copy of all pages of all indexes for each row, to undo it alone.
            (last,) = yield [(text.number, (len(numbered),))]
            first = int(_first(last)[0]) - len(numbered) + 1
            writes += [(text.note, (name, n, gone)) for n, (name, gone) in enumerate(numbered.items(), first)]
        writes += [(text.delete, (run_id,)) for run_id in changes.deleted]
        writes += [(text.insert, self._values(row, COLUMNS)) for row in changes.inserted]
        for columns, rows in changes.updated.items():
            names = [name for name in columns if name not in FIXED]
            update = self._updates.get(columns)
            if update is None:
                update = self._updates[columns] = text.update(names)
            writes += [(update, [*self._values(row, names), row.run_id]) for row in rows]
        for row in changes.attributes.values():
            writes.append((text.forget_attributes, (row.run_id,)))
        for row in changes.failures.values():
            writes.append((text.forget_words, (row.run_id,)))
        for row in changes.attributes.values():
            for name, value in executions.attribute_values(row.attributes_json).items():
                writes.append((text.insert_attribute, (row.run_id, name, value, row.created_at_ms)))
        if self.searchable:
            for row in changes.failures.values():
                for word in executions.words(row.failure):
                    writes.append((text.insert_word, (row.run_id, word, row.created_at_ms)))
        for (flow, status), change in changes.counts.items():
            if change > 0:
                writes.append((text.count, (flow, status, change)))
            elif change < 0:
                writes.append((text.discount, (-change, -change, flow, status)))
        if writes:
            yield writes

    def _values(self, row: Execution, columns: Iterable[str]) -> list[Any]:
        if row.failure_json is None:
            return [getattr(row, name) for name in columns]
        sealed = replace(row, failure_json=self._sql.seal(row.failure_json))
        return [getattr(sealed, name) for name in columns]

    # Rebuilding

    async def rebuild(self, after: int) -> tuple[Report, int | None]:
        """See `Listing`."""
        return await self._store.transact(lambda: self._rebuild(after), locked=False)

    def _rebuild(self, after: int) -> Program[tuple[Report, int | None]]:
        text, sql = self.text, self._sql
        yield from self._begin()
        (rows,) = yield [(text.bite, (after, BITE))]
        if not rows:
            return (yield from self._rebuild_rest()), None
        owned = [sql.to_owned(row) for row in rows]
        names = self._listed([run.run_id for run, _ in owned])
        keys = self._listed([run.run_key for run, _ in owned])
        journal, parents, kept_rows, attributes, words = yield [
            (text.of_runs, (keys,)),
            (text.first_parents, (names,)),
            (text.by_name, (names,)),
            (text.kept_attributes, (names,)),
            (text.kept_words, (names,)),
        ]
        computed = ComputedRuns({})
        computed.fold(decoded(self._mapper, map(sql.to_stored, journal)))
        kept_of = {row[0]: self._compared(row) for row in kept_rows}
        first_parents: dict[str, str | None] = dict(parents)
        found: dict[str, dict[str, str]] = {}
        for run_id, name, value in attributes:
            found.setdefault(run_id, {})[name] = value
        found_words: dict[str, set[str]] = {}
        for run_id, word in words:
            found_words.setdefault(run_id, set()).add(word)
        changes = Changes()
        for run, head in owned:
            kept, _ = kept_of[run.run_id]
            should_be = mended(run, computed.runs.get(run.run_id), head.owner is not None)
            wanted = executions.listed_run(should_be, first_parents[run.run_id])
            changes.compare(kept, wanted)
            if found.get(run.run_id, {}) != executions.attribute_values(wanted.attributes_json):
                changes.attributes[run.run_id] = wanted
            if self.searchable and found_words.get(run.run_id, set()) != set(executions.words(wanted.failure)):
                changes.failures[run.run_id] = wanted
        yield from self._write(changes)
        return report(changes, len(owned)), owned[-1][0].run_key

    def _rebuild_rest(self) -> Program[Report]:
        """Delete the rows of what is no run, and count again."""
        text = self.text
        (ghosts,) = yield [(text.ghosts, ())]
        yield [
            *((text.delete, (run_id,)) for (run_id,) in ghosts),
            (text.uncount, ()),
            (text.recount, ()),
        ]
        return Report(deleted=len(ghosts))


def _first(rows: Sequence[Row]) -> Row:
    """The row that has what `keiro_run_source` says."""
    if not rows:
        raise StoreError(
            "keiro_run_source has no row, so changes of the listing have no numbers. Restore the table from a backup, "
            "or insert a row with a new source and the highest revision of keiro_run_changes"
        )
    return rows[0]


def _with(seen: Row, items: list[T]) -> Seen[T]:
    source, revision, position, head, marked = seen
    return Seen(source, int(revision), 0 if position is None else int(position), int(head), bool(marked), items)
