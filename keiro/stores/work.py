"""One transaction of the journal in SQL: load what the commands need, decide them in order, write it all at once.

Commands of one batch decide against the batch's running state. What all of them ask first is loaded in one round trip,
and what they write goes in another, however many they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from keiro.decisions import (
    Acted,
    Appended,
    Children,
    Command,
    Completions,
    Decision,
    Existing,
    InputDiffers,
    Loaded,
    Need,
    Newest,
    One,
    Stored,
    Write,
    decide,
    first_need,
)
from keiro.identity import parse_run_id
from keiro.projections.waits import SEALED, TIMESTAMPS, Change, Forget, Put, timestamp
from keiro.projections.waits import Set as SetColumns
from keiro.rows import Head, Run

if TYPE_CHECKING:
    from keiro.stores.sql import Program, Row, Sql, Statement


def execute(sql: Sql, commands: Sequence[Command]) -> Program[list[Decision]]:
    """Decide and write commands one after the other; the decisions, with the keys that rows of new runs were given."""
    work = _Work(sql)
    yield from work.load([first_need(command) for command in commands])
    decisions: list[Decision] = []
    for command in commands:
        deciding = decide(command)
        try:
            need = next(deciding)
            while True:
                if not work.has(need):
                    yield from work.load([need])
                need = deciding.send(work.answer(need))
        except StopIteration as stop:
            decision: Decision = stop.value
        work.apply(decision)
        decisions.append(decision)
    yield from work.flush()
    return [work.keyed(decision) for decision in decisions]


class _Work:
    def __init__(self, sql: Sql) -> None:
        self._sql = sql
        self._runs: dict[str, tuple[Run, Head] | None] = {}
        self._newest: dict[str, str | None] = {}
        self._present: dict[tuple[str, bytes], Stored | None] = {}
        self._overtaken: dict[tuple[str, int], bool] = {}
        self._user_events: dict[str, int] = {}  # the version of the newest event of the user's aggregate, of this batch
        self._listed: dict[Need, Any] = {}
        self._writes: list[Write] = []
        self._keys: dict[str, int] = {}

    # Loading

    def has(self, need: Need) -> bool:
        """Whether the answer is known."""
        match need:
            case One(run_id, event_id, after):
                if run_id not in self._runs:
                    return False
                if self._runs[run_id] is None:
                    return True
                if event_id is not None and (run_id, event_id) not in self._present:
                    return False
                return after is None or (run_id, after) in self._overtaken
            case Newest(lineage_id):
                return lineage_id in self._newest
        return False

    def load(self, needs: Sequence[Need]) -> Program[None]:
        """Load what is not known yet."""
        if any(isinstance(need, Completions | Children | Acted) for need in needs):
            yield from self.flush()  # what the batch has written so far is part of the answer
        text = self._sql.text
        statements: list[Statement] = []
        asked: list[Need] = []
        for need in dict.fromkeys(needs):
            if self.has(need):
                continue
            asked.append(need)
            match need:
                case One(run_id, event_id, after):
                    statements.append((text.load, (run_id,)))
                    if event_id is not None:
                        statements.append((text.load_event, (run_id, event_id)))
                    if after is not None:
                        statements.append((text.overtaken, (run_id, after)))
                case Newest(lineage_id):
                    statements += [(text.load, (lineage_id,)), (text.newest, (lineage_id,))]
                case Completions(run_id):
                    statements.append((text.completions, (run_id,)))
                case Children(lineage_id, ended):
                    of = parse_run_id(lineage_id)
                    statements.append((text.ended_children if ended else text.children, (of.key, of.workflow)))
                case Acted(run_id, after):
                    statements.append((text.acted, (run_id, after)))
        if not statements:
            return
        results = iter((yield statements))
        for need in asked:
            self._loaded(need, results)

    def _loaded(self, need: Need, results: Any) -> None:
        match need:
            case One(run_id, event_id, after):
                self._know(run_id, next(results))
                if event_id is not None:
                    found = next(results)
                    key = (run_id, event_id)
                    self._present.setdefault(key, self._sql.to_stored(found[0]) if found else None)
                if after is not None:
                    since = self._user_events.get(run_id, 0) > after
                    self._overtaken[run_id, after] = bool(next(results)) or since
            case Newest(lineage_id):
                first, last = next(results), next(results)
                self._know(lineage_id, first)
                newest = lineage_id if self._runs[lineage_id] is not None else None
                if last:
                    newest = self._sql.to_run(last[0]).run_id
                    self._know(newest, last)
                self._newest.setdefault(lineage_id, newest)
            case Completions():
                self._listed[need] = [(row[0], self._sql.unseal(row[1])) for row in next(results)]
            case Acted():
                self._listed[need] = bool(next(results))
            case Children():
                self._listed[need] = [self._sql.to_run(row) for row in next(results)]

    def _know(self, run_id: str, rows: Sequence[Row]) -> None:
        # What the batch has made of the run counts, not what was loaded again.
        if run_id not in self._runs:
            self._runs[run_id] = self._sql.to_owned(rows[0]) if rows else None

    def answer(self, need: Need) -> Any:
        """What a decision is told."""
        match need:
            case One(run_id, event_id, after):
                return self._of(
                    run_id,
                    None if event_id is None else self._present.get((run_id, event_id)),
                    after is not None and self._overtaken.get((run_id, after), False),
                )
            case Newest(lineage_id):
                newest = self._newest[lineage_id]
                return None if newest is None else self._of(newest, None, False)
        return self._listed.pop(need)

    def _of(self, run_id: str, present: Stored | None, overtaken: bool) -> Loaded | None:
        known = self._runs[run_id]
        return None if known is None else Loaded(known[0], known[1], present, overtaken)

    # Writing

    def apply(self, decision: Decision) -> None:
        """Let the commands that follow see what was decided."""
        for write in decision.writes:
            run_id = write.run_id
            self._runs[run_id] = (write.run, write.head)
            if write.before is None:
                self._newest[write.run.lineage_id] = run_id
            first = write.head.version - len(write.events) + 1
            for version, one in enumerate(write.events, first):
                stored = Stored(
                    0, write.run.run_key, version, one.event_id, one.event.TOPIC, one.payload, write.at_ms, run_id
                )
                self._present[run_id, one.event_id] = stored
                if ":" in one.event.TOPIC:
                    self._user_events[run_id] = version
                    self._overtaken = {key: True if key[0] == run_id else seen for key, seen in self._overtaken.items()}
            self._writes.append(write)

    def flush(self) -> Program[None]:
        """Write what was decided since the last time."""
        writes, self._writes = self._writes, []
        if not writes:
            return
        text, sql = self._sql.text, self._sql
        statements: list[Statement] = []
        births: list[tuple[int, str]] = []
        for write in writes:
            run, head = write.run, write.head
            key = run.run_key or self._keys.get(run.run_id, 0)
            if write.before is None:
                births.append((len(statements), run.run_id))
                statements.append((text.insert_run, sql.run_values(run)))
                statements.append((text.insert_born_head, (run.run_id, head.version, head.owner, head.epoch)))
            elif key:
                statements.append((text.update_head, (head.version, head.owner, key)))
            else:  # born in this very batch
                statements.append((text.update_born_head, (head.version, head.owner, run.run_id)))
            if write.before is not None and run is not write.before:
                *values, _ = sql.changed_values(run)
                statements.append(
                    (text.update_run, [*values, key]) if key else (text.update_born, [*values, run.run_id])
                )
            insert = text.insert_event if key else text.insert_born_event
            statements += [
                (
                    insert,
                    (
                        key or run.run_id,
                        version,
                        one.event_id,
                        one.event.TOPIC,
                        sql.seal(one.payload),
                        write.at_ms,
                    ),
                )
                for version, one in enumerate(write.events, head.version - len(write.events) + 1)
            ]
            statements += [self._change(change) for change in write.changes()]
        results = yield statements
        for place, run_id in births:
            self._keys[run_id] = int(results[place][0][0])

    def _change(self, change: Change) -> Statement:
        text, schema = _change_text, self._sql.schema
        keys = tuple(change.key)
        if isinstance(change, Forget):
            return text(schema, "forget", change.table, keys, (), None), tuple(change.key.values())
        columns = tuple(change.values)
        values = [self._value(name, value) for name, value in change.values.items()]
        if isinstance(change, Put):
            return text(schema, "put", change.table, keys, columns, None), (*change.key.values(), *values)
        assert isinstance(change, SetColumns)
        statement = text(schema, "set", change.table, keys, columns, change.unless_set)
        return statement, (*values, *change.key.values())

    def _value(self, name: str, value: Any) -> Any:
        if value is None:
            return None
        if name in SEALED:
            return self._sql.seal(value)
        return timestamp(value) if name in TIMESTAMPS else value

    def keyed(self, decision: Decision) -> Decision:
        """The decision with the keys of runs that were born, by it or earlier in the batch."""
        if not self._keys:
            return decision
        writes = tuple(
            write if write.run.run_key else replace(write, run=self._keyed(write.run)) for write in decision.writes
        )
        outcome, found = decision.outcome, decision.found
        if isinstance(outcome, Appended | Existing | InputDiffers) and outcome.run is not None:
            outcome = replace(outcome, run=self._keyed(outcome.run))
        return replace(decision, outcome=outcome, writes=writes, found=None if found is None else self._keyed(found))

    def _keyed(self, run: Run) -> Run:
        return run if run.run_key else replace(run, run_key=self._keys[run.run_id])


@lru_cache(maxsize=64)
def _change_text(
    schema: str, verb: str, table: str, keys: tuple[str, ...], columns: tuple[str, ...], unless_set: str | None
) -> str:
    where = " AND ".join(f"{name} = ?" for name in keys)
    if verb == "forget":
        return f"DELETE FROM {schema}{table} WHERE {where}"
    if verb == "put":
        names = (*keys, *columns)
        marks = ", ".join("?" * len(names))
        return f"INSERT INTO {schema}{table} ({', '.join(names)}) VALUES ({marks}) ON CONFLICT DO NOTHING"
    if unless_set is not None:
        where += f" AND {unless_set} IS NULL"
    return f"UPDATE {schema}{table} SET {', '.join(f'{name} = ?' for name in columns)} WHERE {where}"
