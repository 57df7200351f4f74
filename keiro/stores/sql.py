"""The store's transactions as SQL programs, written once for every SQL dialect and driver.

A program is a generator that yields lists of statements and is sent the rows of each; whoever drives it (blocking
sqlite3, asynchronous libpq, a caller's connection) owns the transaction. Placeholders are `?`; the drivers rewrite
them. A program runs under the journal lock where it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from operator import itemgetter
from typing import Any, Final, TypeAlias, TypeVar

from keiro.codec import Codec
from keiro.decisions import Command, Decision, Outcome, Stored
from keiro.errors import StoreError
from keiro.history import snapshot_of
from keiro.identity import run_id
from keiro.lanes import lane, pinned, split
from keiro.limits import LONGEST_S, NO_LIMITS, Left, Limits, Use, admitted, begins, left, queue_of, queues_of
from keiro.projections.runs import claimed
from keiro.projections.waits import TIMESTAMPS, ChildRow
from keiro.rows import PAYLOAD_COLUMNS, RUN_COLUMNS, Head, Run, Status
from keiro.stores.base import LEASE_MS, MOST_CLAIMED, MOST_WRITTEN, Candidate, Incarnation, WorkerRow
from keiro.stores.sets import Last, PerRow, deleted, inserted, updated
from keiro.stores.work import consider, execute

Row: TypeAlias = tuple[Any, ...]
Statement: TypeAlias = tuple[str, Sequence[Any]]
T = TypeVar("T")
Execute: TypeAlias = Callable[[str, Sequence[Any]], list[Row]]
"""Runs one statement on a blocking connection."""
Program: TypeAlias = Generator[list[Statement], list[list[Row]], T]

_WRITTEN: Final = RUN_COLUMNS[1:]  # the key is the database's to give
MUTABLE: Final = (
    "status",
    "attributes_json",
    "result_json",
    "failure_json",
    "attempts",
    "finished_at_ms",
    "next_attempt_at_ms",
    "wake_at_ms",
    "waiting_reason",
    "waiting_token",
    "cancel_requested_at_ms",
    "handoff_run_id",
)
_INTEGERS: Final = tuple(
    name
    for name in RUN_COLUMNS
    if name.endswith("_at_ms") or name in ("run_key", "round_ordinal", "attempts", "priority", "cleanup_ms")
)
MOST_KEYS: Final = 10_000
"""Of so many runs a statement speaks at most: Postgres takes 65 535 parameters, SQLite 32 766."""
_STATUSES: Final = frozenset(Status)


class Tables:
    """SQL text for one dialect: `schema` is `keiro.` on Postgres and empty on SQLite."""

    def __init__(self, schema: str) -> None:
        runs, heads, journal, workers = (
            f"{schema}keiro_{name}" for name in ("runs", "run_heads", "journal", "workers")
        )
        self.runs, self.heads, self.journal, self.workers = runs, heads, journal, workers
        children = f"{schema}keiro_workflow_children"
        run = ", ".join(f"r.{name}" for name in RUN_COLUMNS)
        marks = ", ".join("?" * len(_WRITTEN))
        self.insert_run = f"INSERT INTO {runs} ({', '.join(_WRITTEN)}) VALUES ({marks}) RETURNING run_key"
        self.insert_run_if_new = (
            f"INSERT INTO {runs} ({', '.join(_WRITTEN)}) VALUES ({marks}) ON CONFLICT DO NOTHING RETURNING run_key"
        )
        self.update_run = f"UPDATE {runs} SET {', '.join(f'{c} = ?' for c in MUTABLE)} WHERE run_key = ?"
        self.link_run = f"UPDATE {runs} SET parent_run_id = ?, on_cancel = ? WHERE run_key = ?"
        self.insert_head = f"INSERT INTO {heads} (run_key, version, owner, epoch) VALUES (?, ?, ?, ?)"
        self.update_head = f"UPDATE {heads} SET version = ?, owner = ? WHERE run_key = ?"
        self.take_head = f"UPDATE {heads} SET version = ?, owner = ?, epoch = epoch + 1 WHERE run_key = ?"
        # The fence, the version and the proof that the owner's memory is current, in one statement.
        self.advance = f"UPDATE {heads} SET version = ? WHERE run_key = ? AND version = ? AND owner = ? AND epoch = ?"
        self.advance_and_release = self.advance.replace("version = ?", "version = ?, owner = NULL", 1)
        self.insert_event = (
            f"INSERT INTO {journal} (run_key, version, event_id, topic, payload, recorded_at_ms)"
            " VALUES (?, ?, ?, ?, ?, ?)"
        )
        # Of a run that is born in the same round trip, whose key nobody has seen yet.
        born = f"(SELECT run_key FROM {runs} WHERE run_id = ?)"
        self.insert_born_head = f"INSERT INTO {heads} (run_key, version, owner, epoch) VALUES ({born}, ?, ?, ?)"
        self.insert_born_event = (
            f"INSERT INTO {journal} (run_key, version, event_id, topic, payload, recorded_at_ms)"
            f" VALUES ({born}, ?, ?, ?, ?, ?)"
        )
        self.load = (
            f"SELECT {run}, h.version, h.owner, h.epoch FROM {runs} r JOIN {heads} h ON h.run_key = r.run_key"
            " WHERE r.run_id = ?"
        )
        self.newest = (
            f"SELECT {run}, h.version, h.owner, h.epoch FROM {runs} r JOIN {heads} h ON h.run_key = r.run_key"
            " WHERE r.lineage_id = ? AND r.round_ordinal > 0 ORDER BY r.round_ordinal DESC LIMIT 1"
        )
        self.ended_children = (
            f"SELECT {run} FROM {runs} r JOIN {children} c ON c.child_id = r.key AND c.child_name = r.workflow"
            " WHERE c.parent_id = ? AND c.parent_name = ? AND c.status <> 'running' AND r.round_ordinal = 0"
            " ORDER BY r.run_key"
        )
        self.links = f"SELECT child_name, parent_name, parent_id FROM {children} WHERE child_id = ?"
        edges = f"{schema}keiro_run_parents"
        self.last_edge = f"SELECT COALESCE(max(seq), 0) FROM {edges}"
        self.edge = f"SELECT seq FROM {edges} WHERE child_id = ? AND parent_id = ?"
        self.parents_of = f"SELECT child_id, parent_id, seq FROM {edges} WHERE child_id = ? ORDER BY seq, parent_id"
        self.children_of = f"SELECT child_id, parent_id, seq FROM {edges} WHERE parent_id = ? ORDER BY seq, child_id"
        self.below = (
            f"SELECT {run} FROM {edges} e JOIN {runs} r ON r.run_id = e.child_id WHERE e.parent_id = ?"
            " AND (r.finished_at_ms IS NULL OR r.handoff_run_id IS NOT NULL) ORDER BY e.seq, e.child_id"
        )
        # UNION leaves out what was reached before, so that a cycle which should not be there has an end.
        self.above = (
            f"WITH RECURSIVE up(child_id, parent_id, seq) AS (SELECT child_id, parent_id, seq FROM {edges}"
            " WHERE child_id = ? UNION SELECT e.child_id, e.parent_id, e.seq FROM up"
            f" JOIN {edges} e ON e.child_id = up.parent_id) SELECT child_id, parent_id FROM up ORDER BY seq, parent_id"
        )
        self.completions = (
            f"SELECT deferred_name, exit_json FROM {schema}keiro_deferred_completions WHERE execution_id = ?"
            " ORDER BY completed_at_ms, deferred_name"
        )
        maps = f"{schema}keiro_step_maps"
        self.step_maps = f"SELECT state FROM {maps} WHERE run_key = ? ORDER BY until_version"
        self.keep_step_map = (
            f"INSERT INTO {maps} (run_key, until_version, state) VALUES (?, ?, ?)"
            " ON CONFLICT (run_key, until_version) DO UPDATE SET state = excluded.state"
        )
        # By the database itself: reading the events here would cost a run as much as some of its steps.
        number, quoted = ("?::bigint", "to_json({}::text)::text") if schema else ("?", "json_quote({})")
        joined, order = ("string_agg", " ORDER BY version") if schema else ("group_concat", "")
        place = "'[' || version || ',' || recorded_at_ms || ','"
        step = f"CASE WHEN topic = 'StepRecorded' THEN {place} || payload || ']' END"
        texts = f"{quoted.format('topic')} || ',' || {quoted.format('payload')}"
        other = f"CASE WHEN topic <> 'StepRecorded' THEN {place} || {texts} || ']' END"
        lists = " || '],[' || ".join(f"COALESCE({joined}({one}, ','{order}), '')" for one in (step, other))
        self.snapshot = (
            f"INSERT INTO {maps} (run_key, until_version, state) SELECT {number}, {number},"
            f" '[' || {number} || ',' || {number} || ',[' || {lists} || ']]'"
            f" FROM (SELECT * FROM {journal} WHERE run_key = ? AND version > ? AND version <= ? ORDER BY version) e"
            " WHERE true ON CONFLICT (run_key, until_version) DO UPDATE SET state = excluded.state"
        )
        self.drop_step_maps = f"DELETE FROM {maps} WHERE run_key = ?"
        self.rounds = (
            f"SELECT {run} FROM {runs} r WHERE r.lineage_id = ? AND r.round_ordinal > 0"
            " ORDER BY r.round_ordinal LIMIT ?"
        )
        self.free = f"UPDATE {runs} SET parent_run_id = NULL WHERE parent_run_id = ?"
        self.delete_run = f"DELETE FROM {runs} WHERE run_key = ?"
        # How many rounds there are, and how many events in all of them, is asked only where there is more than one.
        later = f"FROM {runs} x JOIN {heads} y ON y.run_key = x.run_key WHERE x.lineage_id = r.lineage_id"
        later += " AND x.round_ordinal > 0"
        zero = f"SELECT y.version FROM {runs} x JOIN {heads} y ON y.run_key = x.run_key WHERE x.run_id = r.lineage_id"
        rounds = f"CASE WHEN r.round_ordinal = 0 THEN 1 ELSE (SELECT 1 + count(*) {later}) END"
        events = f"CASE WHEN r.round_ordinal = 0 THEN h.version ELSE ({zero}) + (SELECT sum(y.version) {later}) END"
        self.ended_before = (
            f"SELECT r.lineage_id, r.finished_at_ms, r.run_key, {rounds}, {events}, c.parent_id, c.parent_name"
            f" FROM {runs} r JOIN {heads} h ON h.run_key = r.run_key"
            f" LEFT JOIN {children} c ON c.child_id = r.key AND c.child_name = r.workflow"
            " WHERE r.finished_at_ms IS NOT NULL AND r.handoff_run_id IS NULL AND r.finished_at_ms <= ?"
            " AND (r.finished_at_ms, r.run_key) > (?, ?) ORDER BY r.finished_at_ms, r.run_key LIMIT ?"
        )
        self.handed_off_before = (
            f"SELECT r.lineage_id, r.finished_at_ms, r.run_key, 1, h.version, NULL, NULL FROM {runs} r"
            f" JOIN {heads} h ON h.run_key = r.run_key"
            " WHERE r.handoff_run_id IS NOT NULL AND r.round_ordinal > 0 AND r.finished_at_ms <= ?"
            " AND (r.finished_at_ms, r.run_key) > (?, ?)"
            f" AND EXISTS (SELECT 1 FROM {runs} n WHERE n.lineage_id = r.lineage_id AND n.round_ordinal > 0"
            " AND n.round_ordinal > r.round_ordinal + 1) ORDER BY r.finished_at_ms, r.run_key LIMIT ?"
        )
        self.existing = f"SELECT r.run_id FROM {runs} r WHERE r.run_id IN ({{names}})"
        self.load_keys = f"SELECT {run} FROM {runs} r WHERE r.run_id = ?"
        stored = "j.position, j.run_key, j.version, j.event_id, j.topic, j.payload, j.recorded_at_ms"
        self.load_event = (
            f"SELECT {stored}, r.run_id FROM {journal} j JOIN {runs} r ON r.run_key = j.run_key"
            " WHERE r.run_id = ? AND j.event_id = ?"
        )
        snapshots = f"{schema}keiro_snapshots"
        # The order and the limit are the reader's to add.
        self.run_events = (
            f"SELECT {stored}, r.run_id FROM {journal} j JOIN {runs} r ON r.run_key = j.run_key"
            " WHERE r.run_id = ? AND j.version > ? AND j.version <= ? ORDER BY j.version "
        )
        self.snapshots = (
            f"SELECT originator_id, originator_version, topic, state FROM {snapshots}"
            " WHERE originator_id = ? AND originator_version > ? AND originator_version <= ?"
            " ORDER BY originator_version "
        )
        self.put_snapshot = (
            f"INSERT INTO {snapshots} (originator_id, originator_version, topic, state) VALUES (?, ?, ?, ?)"
            " ON CONFLICT (originator_id, originator_version)"
            " DO UPDATE SET topic = excluded.topic, state = excluded.state"
        )
        self.overtaken = (
            f"SELECT 1 FROM {journal} j JOIN {runs} r ON r.run_key = j.run_key"
            " WHERE r.run_id = ? AND j.version > ? AND j.topic LIKE '%:%' LIMIT 1"
        )
        self.acted = (
            f"SELECT 1 FROM {journal} j JOIN {runs} r ON r.run_key = j.run_key"
            " WHERE r.run_id = ? AND j.version > ? AND (j.topic = 'StepRecorded' OR j.topic LIKE '%:%') LIMIT 1"
        )
        self.read = (
            f"SELECT {stored}, r.run_id FROM {journal} j JOIN {runs} r ON r.run_key = j.run_key"
            " WHERE j.position > ? ORDER BY j.position LIMIT ?"
        )
        self.history = f"SELECT {stored} FROM {journal} j WHERE j.run_key = ? AND j.version > ? ORDER BY j.version"
        self.list_runs = f"SELECT {run} FROM {runs} r WHERE r.run_key < ?{{filters}} ORDER BY r.run_key DESC LIMIT ?"
        self.insert_worker = (
            f"INSERT INTO {workers}"
            " (worker_id, host, pid, process_started, address, started_at_ms, lease_expires_at_ms)"
            " VALUES (?, ?, ?, ?, ?, ?, ?) RETURNING worker_key"
        )
        self.renew = f"UPDATE {workers} SET lease_expires_at_ms = ? WHERE worker_key = ? RETURNING worker_key"
        self.lives = f"SELECT worker_key FROM {workers} WHERE worker_key = ?"
        self.list_workers = (
            "SELECT worker_key, worker_id, host, pid, process_started, address, started_at_ms, lease_expires_at_ms"
            f" FROM {workers} ORDER BY worker_key"
        )
        self.delete_worker = (
            f"DELETE FROM {workers} WHERE worker_key = ? AND lease_expires_at_ms = ? RETURNING worker_key"
        )
        # Postgres would rather read the whole table for the running ones than look those few up, but not from an array.
        those = "= ANY (ARRAY({found}))" if schema else "IN ({found})"
        among = those.format(found=f"SELECT run_key FROM {heads} WHERE {{which}}")
        of_heads = f"UPDATE {runs} SET status = 'pending' WHERE status = 'running' AND run_key {among}"
        self.orphan_runs = of_heads.format(which="owner = ?")
        # A new epoch, so that nothing the dead owner still has under way can ever match again.
        self.orphan_heads = f"UPDATE {heads} SET owner = NULL, epoch = epoch + 1 WHERE owner = ?"

        # Each of a workflow's three queues has an index of its own, in its order. A query of several workflows, or of
        # several queues, would be given a plan that reads the table as soon as much of it seems to match.
        def queue(condition: str, order: str, shown: str = "SELECT {}priority, {}run_key") -> str:
            return (
                f"{shown.replace('{}', '')} FROM ({shown.replace('DISTINCT ', '').replace('{}', 'r.')} FROM {runs} r"
                f" WHERE r.workflow = ? AND {condition} ORDER BY {order}"
                f" LIMIT {MOST_CLAIMED}) {'' if schema == '' else 'AS '}q"
            )

        queues = (
            # By an order that no other index has: by its key alone a plan might go through the whole table in order.
            ("r.status = 'pending' AND r.next_attempt_at_ms IS NULL", "r.priority, r.created_at_ms, r.run_key"),
            ("r.status = 'pending' AND r.next_attempt_at_ms <= ?", "r.next_attempt_at_ms"),
            ("r.status = 'suspended' AND r.wake_at_ms <= ?", "r.wake_at_ms"),
        )
        self.ready, self.paced, self.parked = (queue(*of) for of in queues)
        self.versions = tuple(queue(*of, "SELECT DISTINCT {}workflow, {}version_tag") for of in queues)
        self.due = (
            f"SELECT * FROM (SELECT r.run_id, h.version, r.wake_at_ms FROM {runs} r JOIN {heads} h"
            " ON h.run_key = r.run_key WHERE r.workflow = ? AND r.status = 'suspended' AND r.wake_at_ms <= ?"
            f" ORDER BY r.wake_at_ms LIMIT {MOST_WRITTEN}) AS q"
        )
        oldest = those.format(found="SELECT run_key FROM ({queues}) a ORDER BY priority, run_key LIMIT {most}")
        self.found = (
            f"SELECT {run}, h.version, h.owner, h.epoch FROM {runs} r JOIN {heads} h ON h.run_key = r.run_key"
            f" WHERE r.run_key {oldest} ORDER BY r.priority, r.run_key"
        )
        # Where a rate lets nothing begin, what has begun goes on: of one priority it is older, and so among the first.
        in_order = " ORDER BY r.priority, r.run_key"
        self.found_begun = self.found.replace(
            in_order, f" AND (r.started_at_ms IS NOT NULL OR r.round_ordinal > 0){in_order}"
        )
        starts, held = f"{schema}keiro_queue_starts", f"FROM {heads} WHERE queue = ? AND owner"
        self.use = (
            f"SELECT (SELECT count(*) {held} IS NOT NULL), (SELECT count(*) {held} = ?),"
            f" (SELECT COALESCE(sum(started), 0) FROM {starts} WHERE queue = ? AND at_ms > ?)"
        )
        self.take_starts = (
            f"INSERT INTO {starts} AS s (queue, at_ms, started) VALUES (?, ?, ?)"
            " ON CONFLICT (queue, at_ms) DO UPDATE SET started = s.started + excluded.started"
        )
        self.forget_starts = f"DELETE FROM {starts} WHERE queue = ? AND at_ms <= ?"
        self.opens = f"SELECT min(at_ms) FROM {starts} WHERE queue = ? AND at_ms > ? HAVING sum(started) >= ?"
        self.claim_run = (
            f"UPDATE {runs} SET status = 'running', started_at_ms = COALESCE(started_at_ms, ?),"
            " next_attempt_at_ms = NULL, wake_at_ms = NULL, waiting_reason = NULL, waiting_token = NULL"
            " WHERE run_key IN ({keys})"
        )
        self.claim_head = f"UPDATE {heads} SET owner = ?, epoch = epoch + 1, queue = ? WHERE run_key IN ({{keys}})"
        self.next_paced = (
            f"SELECT min(r.next_attempt_at_ms) AS due FROM {runs} r"
            " WHERE r.workflow = ? AND r.status = 'pending' AND r.next_attempt_at_ms IS NOT NULL"
        )
        self.next_parked = (
            f"SELECT min(r.wake_at_ms) AS due FROM {runs} r"
            " WHERE r.workflow = ? AND r.status = 'suspended' AND r.wake_at_ms IS NOT NULL"
        )
        # From one name to the next by the index, however many runs of each there are.
        waiting = (
            ("pending", "status = 'pending' AND {r}.next_attempt_at_ms IS NULL", None),
            ("paced", "status = 'pending' AND {r}.next_attempt_at_ms IS NOT NULL", "next_attempt_at_ms"),
            ("parked", "status = 'suspended' AND {r}.wake_at_ms IS NOT NULL", "wake_at_ms"),
        )
        walks, parts = [], []
        for queue_name, which, due in waiting:
            first = f"SELECT min(r.workflow) FROM {runs} r WHERE r.{which.format(r='r')}"
            walks.append(
                f"{queue_name}(name) AS ({first} UNION ALL SELECT ({first} AND r.workflow > {queue_name}.name)"
                f" FROM {queue_name} WHERE {queue_name}.name IS NOT NULL)"
            )
            part = f"SELECT name FROM {queue_name} WHERE name IS NOT NULL AND name NOT IN ({{names}})"
            if due is not None:
                # The first of the name in the index is the one that is due first.
                part += (
                    f" AND EXISTS (SELECT 1 FROM {runs} r WHERE r.workflow = {queue_name}.name"
                    f" AND r.{which.format(r='r')} AND r.{due} <= ?)"
                )
            parts.append(part)
        self.unregistered = f"WITH RECURSIVE {', '.join(walks)} {' UNION '.join(parts)}"
        self.asked = (
            f"SELECT run_id, cancel_requested_at_ms + cleanup_ms FROM {runs}"
            " WHERE cancel_requested_at_ms IS NOT NULL AND finished_at_ms IS NULL"
        )
        self.owned = f"SELECT run_key, version FROM {heads} WHERE owner = ?"
        shown = "to_char({} AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.MS\"+00:00\"')" if schema else "{}"
        columns = [shown.format(name) if name in TIMESTAMPS else name for name in ChildRow.__struct_fields__]
        self.list_children = (
            f"SELECT {', '.join(columns)} FROM {children} WHERE parent_id = ? AND parent_name = ?"
            " ORDER BY created_at, child_id"
        )
        self.release_runs = of_heads.format(which="owner = ? AND run_key IN ({keys})")
        self.release_heads = (
            f"UPDATE {heads} SET owner = NULL, epoch = epoch + 1 WHERE owner = ? AND run_key IN ({{keys}})"
        )
        # Runs born owned by a worker that was buried meanwhile would belong to nobody for ever.
        nobody = f"owner IS NOT NULL AND owner NOT IN (SELECT worker_key FROM {workers})"
        self.adopt_runs = of_heads.format(which=nobody)
        self.adopt_heads = f"UPDATE {heads} SET owner = NULL, epoch = epoch + 1 WHERE {nobody} RETURNING run_key"
        self.ended = (
            f"SELECT {run} FROM {runs} r"
            " WHERE r.run_id IN ({names}) AND r.status IN ('completed', 'failed', 'cancelled')"
        )

        if schema:
            self._over_arrays(run, stored)

    def _over_arrays(self, run: str, stored: str) -> None:
        """What a unit of work asks and writes of one run, also for many at once."""
        runs, heads, journal = self.runs, self.heads, self.journal
        first, second = itemgetter(0), itemgetter(1)
        names = ", ".join(_WRITTEN)
        self.insert_run = PerRow.of(
            self.insert_run,
            _WRITTEN,
            f"INSERT INTO {runs} ({names}) SELECT {names} FROM {{t}} ORDER BY n RETURNING run_key, run_id",
            first,
            second,
        )
        owned = f"SELECT {run}, h.version, h.owner, h.epoch"
        self.load = PerRow.of(
            self.load,
            ["run_id"],
            f"{owned} FROM {{t}} JOIN {runs} r ON r.run_id = t.run_id JOIN {heads} h ON h.run_key = r.run_key",
            first,
            itemgetter(RUN_COLUMNS.index("run_id")),
        )
        self.newest = PerRow.of(
            self.newest,
            ["lineage_id"],
            f"{owned} FROM {{t}} CROSS JOIN LATERAL (SELECT * FROM {runs} r WHERE r.lineage_id = t.lineage_id"
            " AND r.round_ordinal > 0 ORDER BY r.round_ordinal DESC LIMIT 1) r"
            f" JOIN {heads} h ON h.run_key = r.run_key",
            first,
            itemgetter(RUN_COLUMNS.index("lineage_id")),
        )
        self.load_event = PerRow.of(
            self.load_event,
            ["run_id", "event_id"],
            f"SELECT {stored}, r.run_id FROM {{t}} JOIN {runs} r ON r.run_id = t.run_id"
            # Joined, a plan may go through all events of a long run for each id, by the index that sorts them.
            f" CROSS JOIN LATERAL (SELECT * FROM {journal} j WHERE j.run_key = r.run_key"
            " AND j.event_id = t.event_id LIMIT 1) j",
            lambda values: (values[0], _id_bytes(values[1])),
            lambda row: (row[7], _id_bytes(row[3])),
        )
        event = ("version", "event_id", "topic", "payload", "recorded_at_ms")
        self.insert_event = inserted(self.insert_event, journal, ("run_key", *event))
        of_born = f"FROM {{t}} JOIN {runs} r ON r.run_id = t.run_id ORDER BY t.n"
        for name, table, columns in (
            ("insert_born_event", journal, event),
            ("insert_born_head", heads, ("version", "owner", "epoch")),
        ):
            listed = ", ".join(f"t.{column}" for column in columns)
            insert = f"INSERT INTO {table} (run_key, {', '.join(columns)}) SELECT r.run_key, {listed} {of_born}"
            setattr(self, name, PerRow.of(getattr(self, name), ["run_id", *columns], insert))
        self.update_head = updated(self.update_head, heads, ("version", "owner"), ("run_key",))
        self.update_run = updated(self.update_run, runs, MUTABLE, ("run_key",))
        self.delete_run = deleted(self.delete_run, runs, ("run_key",))


class Sql:
    """Rows to structs and back, and the store's transactions as programs, for one dialect."""

    def __init__(self, schema: str, codec: Codec) -> None:
        self.schema = schema
        self.remote = bool(schema)
        """Whether a statement is a round trip, so that what is needed had better be foreseen."""
        self.text = Tables(schema)
        self.plain = codec.plain
        self.seal = self._seal = codec.seal
        self.unseal = self._open = codec.open

    # Rows

    def run_values(self, run: Run) -> list[Any]:
        """The values of `INSERT` of a run, without its key."""
        return [
            self._seal(value) if name in PAYLOAD_COLUMNS and value is not None else value
            for name, value in zip(_WRITTEN, _values(run, _WRITTEN), strict=True)
        ]

    def changed_values(self, run: Run) -> list[Any]:
        """The values of `UPDATE` of a run, and its key."""
        values = [
            self._seal(value) if name in PAYLOAD_COLUMNS and value is not None else value
            for name, value in zip(MUTABLE, _values(run, MUTABLE), strict=True)
        ]
        values.append(run.run_key)
        return values

    def to_run(self, row: Row) -> Run:
        """A row of `keiro_runs`."""
        values: dict[str, Any] = dict(zip(RUN_COLUMNS, row, strict=False))
        if type(row[0]) is not int:  # a driver that gives everything as text
            for name in _INTEGERS:
                if values[name] is not None:
                    values[name] = int(values[name])
        for name in PAYLOAD_COLUMNS:
            if values[name] is not None:
                values[name] = self._open(values[name])
        if values["status"] not in _STATUSES:
            # Whatever it means, it must not look as if the run could go on.
            raise StoreError(
                f"{values['run_id']} has the status {values['status']!r}, which this version of keiro does not know. "
                "Update keiro if a newer one wrote it, else correct the row"
            )
        return Run(**values)

    def to_owned(self, row: Row) -> tuple[Run, Head]:
        """A row of `keiro_runs` with its head."""
        run = self.to_run(row)
        version, owner, epoch = row[len(RUN_COLUMNS) :]
        return run, Head(
            run_key=run.run_key, version=int(version), owner=None if owner is None else int(owner), epoch=int(epoch)
        )

    def to_child(self, row: Row) -> ChildRow:
        """A row of `keiro_workflow_children`."""
        values = dict(zip(ChildRow.__struct_fields__, row, strict=True))
        values["failed"] = values["failed"] in (1, True, "t")
        for name in ("result", "failure_reason"):
            if values[name] is not None:
                values[name] = self._open(values[name])
        return ChildRow(**values)

    def to_stored(self, row: Row) -> Stored:
        """A row of the journal."""
        position, run_key, version, event_id, topic, payload, recorded_at_ms, *run_id = row
        if type(position) is int:  # a driver that gives values as they are stored
            payload = self._open(payload)
            if type(event_id) is bytes:
                return Stored(position, run_key, version, event_id, topic, payload, recorded_at_ms, *run_id)
            return Stored(position, run_key, version, _id_bytes(event_id), topic, payload, recorded_at_ms, *run_id)
        return Stored(
            int(position),
            int(run_key),
            int(version),
            _id_bytes(event_id),
            topic,
            self._open(payload),
            int(recorded_at_ms),
            *run_id,
        )

    # Programs

    def execute(self, commands: Sequence[Command]) -> Program[list[Decision]]:
        """Load what the commands need, decide them one after the other, write."""
        return execute(self, commands)

    def keep_step_map(self, run_key: int, until: int, state: str) -> Program[None]:
        """Keep a snapshot of a run's history."""
        yield [(self.text.keep_step_map, (run_key, until, self.seal(state)))]

    def snapshot(self, run_key: int, after: int, until: int) -> Program[None]:
        """Keep a snapshot of the events of a run behind `after` and up to `until`."""
        if self.plain:
            yield [(self.text.snapshot, (run_key, until, after, until, run_key, after, until))]
            return
        (rows,) = yield [(self.text.history, (run_key, after))]
        stored = [self.to_stored(row) for row in rows[: until - after]]
        yield from self.keep_step_map(run_key, until, snapshot_of(stored))

    def drop_step_maps(self, run_key: int) -> Program[None]:
        """Delete the snapshots of a run's history."""
        yield [(self.text.drop_step_maps, (run_key,))]

    def consider(self, commands: Sequence[Command]) -> Program[list[Outcome]]:
        """What commands would do, each by itself."""
        return consider(self, commands)

    def register(self, who: Incarnation, address: str | None, now: int) -> Program[int]:
        """Enter a worker."""
        values = (who.worker_id, who.host, who.pid, who.process_started, address, now, now + LEASE_MS)
        ((row,),) = yield [(self.text.insert_worker, values)]
        return int(row[0])

    def renew(self, worker_key: int, now: int) -> Program[bool]:
        """Extend a lease."""
        (rows,) = yield [(self.text.renew, (now + LEASE_MS, worker_key))]
        return bool(rows)

    def workers(self) -> Program[list[WorkerRow]]:
        """List the workers."""
        (rows,) = yield [(self.text.list_workers, ())]
        return self.to_workers(rows)

    def to_workers(self, rows: Sequence[Row]) -> list[WorkerRow]:
        """Rows of `keiro_workers`."""
        return [WorkerRow(int(r[0]), r[1], r[2], int(r[3]), r[4], r[5], int(r[6]), int(r[7])) for r in rows]

    def claim(
        self, worker_key: int, workflows: Sequence[str], limit: int, now: int, limits: Limits = NO_LIMITS
    ) -> Program[list[tuple[Run, Head]]]:
        """Take pending runs."""
        text = self.text
        # A worker that was buried since it last renewed must not claim: nobody would ever take the runs from it.
        if not workflows:
            return []
        lefts: dict[str, Left] = {}
        if limits:
            # Under the lock of the claim: what is counted here nobody else can take.
            lefts = self.to_lefts(limits, (yield self.uses(worker_key, limits, now)), limit)
        looks = [self.pending(free, now), self.parked(free, now)] if (free := unlimited(workflows, limits)) else []
        for name, (_, names) in queues_of(limits).items():
            looks += self.limited(names, now, lefts[name])
        listed, *found = yield [(text.lives, (worker_key,)), *looks]
        if not listed:
            return []
        candidates = {int(row[0]): self.to_owned(row) for rows in found for row in rows}
        ordered = sorted(candidates.values(), key=lambda one: (one[0].priority, one[0].run_key))
        taken = admitted(
            [one for one in ordered if one[0].status == Status.SUSPENDED],
            [one for one in ordered if one[0].status != Status.SUSPENDED],
            limits,
            lefts,
            limit,
        )
        if not taken:
            return []
        keys = [run.run_key for run, _ in taken]
        writes: list[Statement] = [(_many(text.claim_run, "keys", len(keys)), (now, *keys))]
        of_queues: dict[str | None, list[Run]] = {}
        for run, _ in taken:
            kept = queue_of(limits, run)
            of_queues.setdefault(None if kept is None else kept.name, []).append(run)
        for queue, runs in of_queues.items():
            writes.append(
                (_many(text.claim_head, "keys", len(runs)), (worker_key, queue, *(run.run_key for run in runs)))
            )
            if queue is not None and (started := sum(map(begins, runs))):
                # In the transaction that makes them running: a crash takes both or none.
                writes.append((text.take_starts, (queue, now, started)))
                writes.append((text.forget_starts, (queue, now - LONGEST_S * 1000)))
        yield Last(writes)
        return [
            (
                claimed(run, now),
                Head(run_key=head.run_key, version=head.version, owner=worker_key, epoch=head.epoch + 1),
            )
            for run, head in taken
        ]

    def uses(self, worker_key: int, limits: Limits, now: int) -> list[Statement]:
        """What is taken of each queue."""
        return [
            (
                self.text.use,
                (name, name, worker_key, name, now - queue.rate.per_ms if queue.rate is not None else 2**53),
            )
            for name, (queue, _) in queues_of(limits).items()
        ]

    def to_lefts(self, limits: Limits, uses: Sequence[Sequence[Row]], limit: int) -> dict[str, Left]:
        """The rows of `uses` as what each queue lets through."""
        return {
            name: left(queue, Use(*map(int, rows[0])), limit)
            for (name, (queue, _)), rows in zip(queues_of(limits).items(), uses, strict=True)
        }

    def limited(self, workflows: Sequence[str], now: int, of: Left) -> list[Statement]:
        """The runs of a queue's workflows that it may let through; a full one is not read at all."""
        if of.runs == 0:
            return []
        looks = [self.parked(workflows, now, of.runs), self.pending(workflows, now, min(of.runs, of.starts))]
        if of.starts < of.runs:
            looks.append(self.pending(workflows, now, begun=True))
        return looks

    def opens(self, queue: str, since_ms: int, starts: int) -> Statement:
        """The oldest start that keeps a rate shut, if it is."""
        return self.text.opens, (queue, since_ms, starts)

    def release(self, worker_key: int, run_keys: Sequence[int]) -> Program[bool]:
        """Hand runs back."""
        for at in range(0, len(run_keys), MOST_KEYS):
            keys = run_keys[at : at + MOST_KEYS]
            yield [
                (_many(self.text.release_runs, "keys", len(keys)), (worker_key, *keys)),
                (_many(self.text.release_heads, "keys", len(keys)), (worker_key, *keys)),
            ]
        return True

    def bury(self, worker: WorkerRow) -> Program[bool]:
        """Remove a dead worker as it was seen."""
        (gone,) = yield [(self.text.delete_worker, (worker.worker_key, worker.lease_expires_at_ms))]
        if not gone:
            return False
        yield Last([(self.text.orphan_runs, (worker.worker_key,)), (self.text.orphan_heads, (worker.worker_key,))])
        return True

    def adopt_orphans(self) -> Program[bool]:
        """Make pending what is owned by no listed worker."""
        _, heads = yield [(self.text.adopt_runs, ()), (self.text.adopt_heads, ())]
        return bool(heads)

    def pending(
        self, workflows: Sequence[str], now: int, most: int = MOST_CLAIMED, *, begun: bool = False
    ) -> Statement:
        """The pending runs that may be driven now, by priority and age; at most `most`. With `begun` those of
        `MOST_CLAIMED` that were driven before."""
        queues, values = _looks(workflows, (self.text.ready,), (self.text.paced, now))
        found = self.text.found_begun if begun else self.text.found
        return found.replace("{most}", str(most)).replace("{queues}", queues), values

    def parked(self, workflows: Sequence[str], now: int, most: int = MOST_CLAIMED) -> Statement:
        """The parked runs whose time has come; at most `most`."""
        queues, values = _looks(workflows, (self.text.parked, now))
        return self.text.found.replace("{most}", str(most)).replace("{queues}", queues), values

    def any_claimable(self, workflows: Sequence[str], now: int) -> Statement:
        """Whether there is anything to claim, without a lock."""
        if not workflows:
            return "SELECT 1 WHERE 1 = 0", ()
        queues, values = _looks(workflows, (self.text.ready,), (self.text.paced, now), (self.text.parked, now))
        return f"SELECT 1 FROM ({queues}) a LIMIT 1", values

    def due(self, workflows: Sequence[str], now: int) -> Statement:
        """The parked runs whose time has come, the longest due first; at most `MOST_WRITTEN`."""
        if not workflows:
            return "SELECT 1 WHERE 1 = 0", ()
        queues, values = _looks(workflows, (self.text.due, now))
        return f"SELECT run_id, version FROM ({queues}) a ORDER BY wake_at_ms LIMIT {MOST_WRITTEN}", values

    def next_due(self, workflows: Sequence[str]) -> Statement:
        """When the next paced or parked run is due."""
        if not workflows:
            return "SELECT NULL", ()
        dues, values = _looks(workflows, (self.text.next_paced,), (self.text.next_parked,))
        return f"SELECT min(due) FROM ({dues}) dues", values

    def list_runs(self, status: str | None, workflow: str | None, before: int | None, limit: int) -> Statement:
        """A page of runs."""
        values: list[Any] = [2**63 - 1 if before is None else before]
        filters = ""
        for column, wanted in (("status", status), ("workflow", workflow)):
            if wanted is not None:
                filters += f" AND r.{column} = ?"
                values.append(wanted)
        return self.text.list_runs.replace("{filters}", filters), (*values, limit)

    def ended_before(self, before_ms: int, after: tuple[int, int], limit: int) -> Statement:
        """A page of lineages that have ended, in the order of their ends."""
        return self.text.ended_before, (before_ms, *after, limit)

    def handed_off_before(self, before_ms: int, after: tuple[int, int], limit: int) -> Statement:
        """A page of old rounds, in the order of their ends."""
        return self.text.handed_off_before, (before_ms, *after, limit)

    def to_candidate(self, row: Row) -> Candidate:
        """A row of `ended_before`, or of `handed_off_before`."""
        lineage_id, finished_at_ms, run_key, rounds, events, parent_key, parent_name = row
        parent = None if parent_key is None else run_id(parent_name, parent_key)
        return Candidate(lineage_id, int(finished_at_ms), int(run_key), int(rounds), int(events), parent)

    def unregistered(self, workflows: Sequence[str], now_ms: int) -> Statement:
        """Names of other workflows with runs to be driven."""
        names = tuple(dict.fromkeys(split(lane)[0] for lane in workflows)) or ("",)
        return _many(self.text.unregistered, "names", len(names)), (*names, *names, now_ms, *names, now_ms)

    def versions(self, workflows: Sequence[str], now_ms: int) -> Statement:
        """The versions at the front of the queues of the pinned workflows, one at least. What nobody takes stays at
        the front, so that what is stuck is seen there once what moves has gone; the whole of a long queue is never
        read."""
        ready, paced, parked = self.text.versions
        return _looks(pinned(workflows), (ready,), (paced, now_ms), (parked, now_ms))

    def to_unregistered(self, names: Sequence[Row], workflows: Sequence[str], versions: Sequence[Row]) -> list[str]:
        """The rows of `unregistered` and of `versions` as lanes that are not among those of `workflows`."""
        lanes = {lane(name, version) for name, version in versions}
        return sorted({row[0] for row in names} | lanes.difference(workflows))

    def named(self, sql: str, names: Sequence[Any]) -> Statement:
        """A statement over a list of names."""
        return _many(sql, "names", len(names)), tuple(names)


def _looks(lanes: Sequence[str], *queues: tuple[Any, ...]) -> Statement:
    """Each of these queries, a text and the values after its first, for each lane. Of a pinned workflow the version is
    part of what is looked up, with indexes of its own: a queue of other versions, however long, is not read."""
    parts: list[str] = []
    values: list[Any] = []
    for one in lanes:
        workflow, version = split(one)
        for text, *more in queues:
            if version is None:
                parts.append(text)
                values += [workflow, *more]
            else:
                parts.append(text.replace("r.workflow = ?", "r.workflow = ? AND r.version_tag = ?", 1))
                values += [workflow, version, *more]
    return " UNION ALL ".join(parts), values


def unlimited(workflows: Sequence[str], limits: Limits) -> list[str]:
    """The workflows without a queue."""
    return [name for name in workflows if name not in limits]


def _values(run: Run, columns: Sequence[str]) -> list[Any]:
    return [getattr(run, name) for name in columns]


def _many(sql: str, what: str, n: int) -> str:
    # An empty list matches nothing; `IN ()` is no SQL on Postgres.
    return sql.replace("{" + what + "}", ", ".join("?" * n) if n else "NULL")


def _id_bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    return bytes.fromhex(str(value).replace("-", ""))
