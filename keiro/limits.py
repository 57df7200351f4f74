"""How many runs of a queue may be driven at once, and how many may be started in a time.

A queue is a name that workflows share (`@keiro.workflow(queue="mail")`); an engine says with `Queue` what it lets
through. The rules here are pure: a claim counts in its own transaction what is taken, and these say what is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from keiro.errors import InvalidCall
from keiro.identity import WORKFLOW_NAME
from keiro.lanes import lane_in
from keiro.rows import Head, Run

LONGEST_S: Final = 86_400
"""The longest time of a rate, in seconds: for so long it is kept what was started."""
LOWEST: Final = 2**31 - 1
"""Priorities are whole numbers from -LOWEST to LOWEST."""


class Rate(msgspec.Struct, frozen=True):
    """At most `starts` runs are first started in any `per` seconds: in each such stretch of time, not only in those a
    clock divides."""

    starts: int
    per: float = 1.0

    def __post_init__(self) -> None:
        _count("Rate(starts=...)", self.starts)
        if isinstance(self.per, bool) or not isinstance(self.per, int | float) or not 0.001 <= self.per <= LONGEST_S:
            raise InvalidCall(f"Rate(per=...) is a time from 0.001 to {LONGEST_S} seconds, not {self.per!r}")

    @property
    def per_ms(self) -> int:
        """The time in milliseconds."""
        return round(self.per * 1000)


class Queue(msgspec.Struct, frozen=True):
    """What an engine lets through of the workflows with this `queue=`.

    `concurrency` is how many of their runs all workers of the store together may own, `per_worker` how many this one
    may, `rate` how many may be first started in a time. None is no limit. A parked run holds no slot.
    """

    name: str
    concurrency: int | None = None
    per_worker: int | None = None
    rate: Rate | None = None

    def __post_init__(self) -> None:
        check_queue_name(self.name)
        for what, number in (("concurrency", self.concurrency), ("per_worker", self.per_worker)):
            if number is not None:
                _count(f"Queue({self.name!r}, {what}=...)", number)
        if self.rate is not None and not isinstance(self.rate, Rate):
            raise InvalidCall(f"Queue({self.name!r}, rate=...) is a keiro.Rate, not {self.rate!r}")


Limits = Mapping[str, Queue]
"""The queues of workflows, by the lanes of the workflows; one without a queue is not among them."""
NO_LIMITS: Final[Limits] = {}


class Use(msgspec.Struct, frozen=True):
    """What is taken of a queue: the runs all workers own, those the asking one owns, the starts in its rate's time."""

    owned: int = 0
    mine: int = 0
    started: int = 0


class Left(msgspec.Struct):
    """What a queue still lets through: runs, and among them ones that start for the first time."""

    runs: int
    starts: int


def left(queue: Queue, use: Use, limit: int) -> Left:
    """What the queue lets through, at most `limit` runs."""
    runs = limit
    if queue.concurrency is not None:
        runs = min(runs, queue.concurrency - use.owned)
    if queue.per_worker is not None:
        runs = min(runs, queue.per_worker - use.mine)
    starts = limit if queue.rate is None else queue.rate.starts - use.started
    return Left(max(runs, 0), max(starts, 0))


def begins(run: Run) -> bool:
    """Whether a claim of this run takes a token of a rate: it was never driven, and is no later round."""
    return run.started_at_ms is None and run.round_ordinal == 0


def admitted(
    due: Sequence[tuple[Run, Head]],
    pending: Sequence[tuple[Run, Head]],
    limits: Limits,
    lefts: dict[str, Left],
    limit: int,
) -> list[tuple[Run, Head]]:
    """Those of the parked runs that are `due`, and of the `pending` ones, that are claimed, in this order; at most
    `limit`. However many there are of the one kind, the other gets half. `lefts` is counted down."""
    taken: list[tuple[Run, Head]] = []
    half = max((limit + 1) // 2, limit - len(pending))
    for most, candidates in ((min(half, limit), due), (limit, pending)):
        for run, head in candidates:
            if len(taken) == most:
                break
            queue = queue_of(limits, run)
            if queue is not None:
                of = lefts[queue.name]
                first = begins(run)
                if of.runs == 0 or (first and of.starts == 0):
                    continue
                of.runs -= 1
                of.starts -= first
            taken.append((run, head))
    return taken


def queue_of(limits: Limits, run: Run) -> Queue | None:
    """The queue whose limits a run keeps."""
    own = lane_in(limits, run)
    return None if own is None else limits[own]


def queues_of(limits: Limits) -> dict[str, tuple[Queue, list[str]]]:
    """Each queue once, by its name, with the lanes of the workflows in it."""
    found: dict[str, tuple[Queue, list[str]]] = {}
    for workflow, queue in limits.items():
        found.setdefault(queue.name, (queue, []))[1].append(workflow)
    return found


def let_through(workflows: Sequence[str], limits: Limits, lefts: Mapping[str, Left]) -> list[str]:
    """The workflows of which something may be claimed: none of a full queue."""
    return [name for name in workflows if name not in limits or lefts[limits[name].name].runs > 0]


def check_queue_name(name: Any) -> str:
    """The name, if a queue can be called so: as workflows are."""
    if not isinstance(name, str) or not WORKFLOW_NAME.fullmatch(name):
        raise InvalidCall(f"{name!r:.300} cannot name a queue: use 1 to 128 of the characters A-Z a-z 0-9 _ .")
    return name


def check_priority(priority: Any) -> int:
    """The priority, or raise `InvalidCall`."""
    if isinstance(priority, bool) or not isinstance(priority, int) or not -LOWEST <= priority <= LOWEST:
        raise InvalidCall(
            f"priority is a whole number from {-LOWEST} to {LOWEST}, the lower the sooner, not {priority!r:.300}"
        )
    return priority


def limits_of(queues: Iterable[Any], workflows: Iterable[tuple[str, str | None]], *, claims: bool) -> dict[str, Queue]:
    """The limits of an engine: of its `queues`, for the lanes of its workflows with the names of their queues.

    Raises `InvalidCall` for two different queues of one name, and where runs are to be claimed of a queue nobody
    described: they would be driven without the limits that others keep.
    """
    named: dict[str, Queue] = {}
    for queue in queues:
        if not isinstance(queue, Queue):
            raise InvalidCall(f"queues is a list of keiro.Queue, not of {queue!r:.300}")
        if named.setdefault(queue.name, queue) != queue:
            raise InvalidCall(f"two queues are named {queue.name!r}: an engine has one description of each")
    limits: dict[str, Queue] = {}
    for workflow, name in workflows:
        if name is None:
            continue
        if name in named:
            limits[workflow] = named[name]
        elif claims:
            raise InvalidCall(
                f"workflow {workflow!r} has queue={name!r}, which this engine does not describe: "
                f"add keiro.Queue({name!r}, ...) to Engine(queues=[...])"
            )
    return limits


def _count(what: str, number: Any) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= LOWEST:
        raise InvalidCall(f"{what} is a whole number from 1 on, not {number!r:.300}")
