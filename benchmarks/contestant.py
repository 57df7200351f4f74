"""What every contestant offers to the runner, and where it is asked to do it.

A contestant does the work and nothing else: clocks, repetitions and statistics belong to child.py and the
runner, so that all are measured by the same hand. What a contestant cannot do it refuses with NotOffered and
a reason, which the report prints in its place.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

Store = Literal["memory", "sqlite-full", "sqlite-normal", "postgres"]

STORES: tuple[Store, ...] = ("sqlite-full", "sqlite-normal", "postgres", "memory")


@dataclass(frozen=True)
class Place:
    """An empty database: a file path for SQLite, a URL for Postgres, nothing for memory."""

    store: Store
    at: str = ""

    @property
    def url(self) -> str:
        if self.store == "memory":
            return "memory://"
        return self.at if self.store == "postgres" else f"sqlite:///{self.at}"

    @property
    def is_sqlite(self) -> bool:
        return self.store in ("sqlite-full", "sqlite-normal")


class NotOffered(Exception):
    """The contestant has nothing that does this; the message says what it lacks."""


class Contestant(ABC):
    """One engine under one group of settings."""

    async def prepare(self, place: Place) -> None:
        """Create tables ahead of time, where the contestant does not do so at open."""

    @abstractmethod
    async def open(self, place: Place) -> None:
        """Open the engine on a place, ready to start runs."""

    async def open_client(self, place: Place) -> None:
        """Open beside an engine of another process, and drive nothing."""
        raise NotOffered("no clients")

    @abstractmethod
    async def close(self) -> None:
        """Release everything, so that another place can be opened."""

    @abstractmethod
    async def run_one(self, steps: int) -> None:
        """Start one run of sequential no-op steps and wait for its result."""

    async def run_many(self, runs: int, steps: int, bodies: bool) -> None:
        """Start runs at once and wait for all; with `bodies` each step waits 0 to 2 ms, else not."""
        raise NotOffered("no concurrent runs")

    async def enqueue(self, runs: int) -> None:
        """Hand over one-step runs, each durably accepted before the next, and wait until all are done."""
        raise NotOffered("no queue")

    async def fill_finished(self, place: Place, runs: int) -> None:
        """Store `runs` finished one-step runs by plain SQL before the engine opens."""
        raise NotOffered("not filled")

    async def begin_waits(self, runs: int) -> None:
        """Start runs that wait for a value from outside and then do a step; return when all are parked."""
        raise NotOffered("no values from outside")

    async def complete_waits(self, runs: int, in_turn: bool) -> list[float]:
        """Give the values, each a moment after the one before; with `in_turn` after that one's run has ended. When
        each was given, by the clock of all processes."""
        raise NotOffered("no values from outside")

    async def end_waits(self, runs: int) -> list[float]:
        """Wait for the ends of the runs that waited; when the step of each began."""
        raise NotOffered("no values from outside")

    async def family(self, children: int) -> None:
        """Run a parent with so many children of one step each, and wait for its result."""
        raise NotOffered("no children")

    async def clocks(self, runs: int, seconds: float) -> float:
        """Start runs that sleep until the same moment, `seconds` from now; by how much the last of the clocks fired
        later than that."""
        raise NotOffered("no clocks")

    async def fill_parked(self, place: Place, runs: int) -> None:
        """Store `runs` parked runs by plain SQL before the engine opens."""
        raise NotOffered("not filled")

    async def begin_held(self, runs: int, steps: int) -> None:
        """Start runs that do `steps` steps and then hang in one more; return when all hang there."""
        raise NotOffered("no recovery")

    async def finish_held(self, runs: int) -> None:
        """In a new process, after open: wait until the runs that hung have been recovered and are done."""
        raise NotOffered("no recovery")

    async def reach_gate(self, runs: int) -> float:
        """In a new process, after open: wait until all hung runs are replayed up to the hanging step.

        Returns the seconds since this call that are not replay (waiting for a poll to come round).
        """
        raise NotOffered("no recovery")


class Gate:
    """The step in which a held run hangs: counts arrivals, and hangs only while it is shut."""

    def __init__(self) -> None:
        self.shut = False
        self.arrived = 0
        self._wanted = 0
        self._reached = asyncio.Event()
        self._never = asyncio.Event()

    def expect(self, arrivals: int, shut: bool) -> None:
        """Start counting afresh."""
        self.shut, self.arrived, self._wanted = shut, 0, arrivals
        self._reached = asyncio.Event()
        self._never = asyncio.Event()

    async def all_arrived(self) -> None:
        await self._reached.wait()

    async def __call__(self) -> int:
        """The body of the step."""
        self.arrived += 1
        if self.arrived == self._wanted:
            self._reached.set()
        if self.shut:
            await self._never.wait()
        return 0


#: The gate of this process. child.py sets it before a contestant opens, because recovery begins at once.
GATE = Gate()


def body_seconds(step: int) -> float:
    """How long a step with a body waits: spread evenly over 0 to 2 ms, the same in every contestant."""
    return (step * 7919 % 2000) / 1_000_000
