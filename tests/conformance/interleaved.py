"""Two commands in one batch, in the order one likes: an interleaving by construction and not by luck."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Callable

import keiro
from keiro.decisions import Append, Command, Outcome


class Interleaved:
    """When the engine sends the first command that `when` holds for, `other` goes with it, right before or right
    after it; `outcome` is what it came to."""

    outcome: Future[Outcome]

    def __init__(
        self, engine: keiro.Engine, when: Callable[[Command], bool], order: str, other: Callable[[], Command]
    ) -> None:
        self._engine = engine
        self._submit = engine.store.submit
        self._when = when
        self._order = order
        self._other = other
        self.sent = False
        engine.store.submit = self.submit  # type: ignore[method-assign]
        # The first of the two must not be committed before the second is sent.
        engine.store._queue._at_once = None  # type: ignore[attr-defined]

    def submit(self, command: Command) -> Future[Outcome]:
        if self.sent or not self._when(command):
            return self._submit(command)
        self.sent = True
        if self._order == "before":
            self.outcome = self._submit(self._other())
            return self._submit(command)
        mine = self._submit(command)
        self.outcome = self._submit(self._other())
        return mine


def records(run_id: str, topic: str, step: str | None = None) -> Callable[[Command], bool]:
    """Whether a command appends this to a run."""

    def when(command: Command) -> bool:
        return (
            isinstance(command, Append)
            and command.run_id == run_id
            and any(
                topic == one.event.TOPIC and (step is None or getattr(one.event, "step", None) == step)
                for one in command.events
            )
        )

    return when
