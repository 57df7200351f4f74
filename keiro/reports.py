"""What an engine logs, to the logger `keiro`: one sentence for each thing an operator should know."""

from __future__ import annotations

import logging
import time
from typing import Final

log: Final = logging.getLogger("keiro")

AGAIN_S: Final = 10.0
"""How often an outage that goes on is told of."""

SENTENCES: Final[dict[str, tuple[int, str]]] = {
    "attempt_failed": (logging.WARNING, "step {step!r} of {run_id} failed at attempt {attempt}: {error}; {then}"),
    "run_failed": (logging.ERROR, "{run_id} failed: {error}"),
    "cleanup_failed": (
        logging.ERROR,
        "{run_id} was asked to end, and its body failed: {error}. It ends as cancelled; look what is left to undo",
    ),
    "grace_over": (logging.WARNING, "{run_id} was asked to end and has not in time: it is cancelled"),
    "run_retried": (logging.WARNING, "{run_id} failed at attempt {attempt}: {error}; it is run again in {seconds:g} s"),
    "run_resumed": (logging.INFO, "{run_id} goes on here, after {steps} recorded events"),
    "never_awaited": (
        logging.WARNING,
        "the body of {run_id} called {steps} steps that it never awaited: they were not run. Await what run.step "
        "returns",
    ),
    "never_asked_for": (
        logging.WARNING,
        "{run_id} ended without asking for steps that are recorded: {steps}. Was a step renamed or removed, or does "
        "the body depend on something that is no step?",
    ),
    "handoff_swallowed": (
        logging.WARNING,
        "the body of {run_id} swallowed what run.continue_as_new raises and went on; its round has ended all the same, "
        "and nothing it did since is recorded. Let it leave the body",
    ),
    "inputs_differ": (
        logging.WARNING,
        "step {step!r} of {run_id} was recorded with other inputs than it is called with now; what is recorded counts",
    ),
    "fence_lost": (logging.INFO, "{run_id} is driven by another worker now; it was stopped here"),
    "already_ended": (logging.INFO, "{run_id} has {status} meanwhile; it was stopped here"),
    "store_away": (logging.WARNING, "the store does not answer, the engine waits for it: {error}"),
    "store_back": (logging.WARNING, "the store answers again"),
    "worker_fault": (logging.ERROR, "the worker met an unexpected fault and tries again: {error}"),
    "loop_blocked": (
        logging.WARNING,
        "the event loop stood still for {seconds:.0f} s, in which no run here went on. Make what blocks a plain "
        "function, which runs in a thread",
    ),
    "lease_lost": (
        logging.WARNING,
        "this worker's lease was not renewed in time: its runs were stopped, others may take them; it begins again",
    ),
    "worker_buried": (logging.INFO, "worker {worker} (process {pid}) is gone: its runs are taken over"),
    "strays_released": (logging.WARNING, "{runs} runs that were owned here and not driven are handed back"),
    "unregistered_workflow": (
        logging.WARNING,
        "runs of workflow {workflow!r} wait here, and this engine does not have it: pass it in workflows=[...], or "
        "start a worker that has it",
    ),
    "unregistered_version": (
        logging.WARNING,
        "runs of workflow {workflow!r} that were started under the version {version!r} wait here, and this engine is "
        "pinned to others: start a worker that has that version, or one that is not pinned",
    ),
    "still_running": (logging.WARNING, "{runs} bodies refuse to be cancelled; nothing of theirs is recorded any more"),
    "not_handed_back": (logging.WARNING, "runs could not be handed back, their lease ends by itself: {error}"),
    "snapshot_failed": (
        logging.WARNING,
        "no snapshot of {run_id} was kept, a replay will read its events: {error}",
    ),
    "record_refused": (logging.ERROR, "a record of {run_id} is refused by a projection and sent again: {error}"),
    "run_mended": (logging.WARNING, "of {run_id} the {kind} was not what the journal says, and was mended: {what}"),
    "projection_mended": (logging.WARNING, "rows of projection {projection} differed from the journal and were mended"),
    "projection_failed": (logging.ERROR, "projection {projection} cannot go on and tries again: {error}"),
}


def report(event: str, run_id: str, fields: dict[str, object]) -> None:
    """Log what happened; `fields` are also the record's attribute `keiro`, with `event` and `run_id`."""
    level, sentence = SENTENCES[event]
    if log.isEnabledFor(level):
        log.log(
            level,
            sentence.format(run_id=run_id, **fields),
            extra={"keiro": {"event": event, "run_id": run_id, **fields}},
        )


class Outage:
    """Whether operators take the store for away. They are told now and then, however many runs run into it."""

    def __init__(self) -> None:
        self.away = False
        self._told: dict[str, float] = {}

    def is_news(self, error: str) -> bool:
        """Whether to tell of this error: it is a new one, or was told long ago."""
        now = time.monotonic()
        if now - self._told.get(error, -AGAIN_S) < AGAIN_S:
            return False
        self._told[error] = now
        self.away = True
        return True
