"""What a step can know and say of the attempt that runs it: its number, its idempotency key, how far it has come."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Final, Protocol

import msgspec

from keiro.errors import InvalidCall

MOST_BYTES: Final = 1 << 20
"""The size of a checkpoint as JSON."""


class Attempt(msgspec.Struct, frozen=True):
    """An attempt of a step, from 1. `idempotency_key` is the same for all attempts of the step, also after a crash:
    pass it to whoever performs the effect. `checkpoint` is what an earlier execution gave to `heartbeat` last, as JSON
    has it, and None where there was none."""

    run_id: str
    step: str
    number: int
    idempotency_key: str
    checkpoint: Any


class Driver(Protocol):
    """What drives the run of a step."""

    def attempt(self, step: str, number: int) -> Attempt:
        """What is known of an attempt that is under way."""

    def beat(self, step: str, number: int, *checkpoint: Any) -> None:
        """A sign of life of an attempt; from any thread."""


inside: ContextVar[Any] = ContextVar("keiro_strand", default=None)
"""Where the current task stands in the body of a run, or the driver, the name and the attempt of the step it is in."""


def attempt() -> Attempt:
    """The attempt that calls this. Raises `InvalidCall` outside a step."""
    driver, step, number = _here("attempt")
    found: Attempt = driver.attempt(step, number)
    return found


def heartbeat(*checkpoint: Any) -> None:
    """The step that calls this is alive: its `idle_timeout` begins anew.

    With a value, `heartbeat(page)`, that is where it has come to: it is recorded soon, the newest of several, and after
    a crash or a failure the next execution finds it as `attempt().checkpoint`. From any thread; returns at once. Raises
    `InvalidCall` outside a step, `PayloadRejected` for a value that cannot be stored or is larger than 1 MiB.
    """
    if len(checkpoint) > 1:
        raise InvalidCall("heartbeat(...) takes one checkpoint: put several values in a list")
    driver, step, number = _here("heartbeat")
    driver.beat(step, number, *checkpoint)


def _here(what: str) -> tuple[Driver, str, int]:
    found = inside.get()
    if not isinstance(found, tuple):
        raise InvalidCall(f"keiro.{what}() was called outside a step: call it in the function that run.step(...) runs")
    driver, step, number = found
    return driver, step, number
