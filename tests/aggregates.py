"""An aggregate for tests, and journals of it without any store."""

from __future__ import annotations

from typing import Any

from msgspec import Raw

from keiro.commands import event
from keiro.events import Event, WorkflowStarted, placed
from keiro.mapper import EventMapper
from keiro.run import WorkflowRun, workflow_of

RUN = "wf:basket-7"
AT_MS = 1_700_000_000_000


class Basket(WorkflowRun, name="basket"):
    """The example of the documentation, with a command that decides."""

    def __init__(self) -> None:
        self.items: list[str] = []

    @event("ItemAdded")
    def add(self, sku: str, quantity: int = 1) -> None:
        self.items.extend([sku] * quantity)

    @event("Emptied")
    def empty(self) -> None:
        self.items.clear()

    def replace_all(self, skus: list[str]) -> None:
        if not skus:
            raise ValueError("at least one")
        self.empty()
        for sku in skus:
            self.add(sku)

    async def execute(self, customer: str) -> int:
        return len(self.items)


def started(workflow: str = "basket", **fields: Any) -> WorkflowStarted:
    return WorkflowStarted(workflow=workflow, key="7", input=Raw(b"{}"), **fields)


def history(*events: Event, run_id: str = RUN) -> list[Event]:
    """Events as they stand in the journal of a run, with WorkflowStarted before them."""
    first = started(run_id.removeprefix("wf:").split("-")[0])
    return [placed(one, run_id, version, AT_MS + version) for version, one in enumerate([first, *events], 1)]


def stored(cls: type[WorkflowRun], *events: Event) -> list[Event]:
    """The same, but through the stored form: what a fold of the journal reads."""
    mapper = EventMapper([workflow_of(cls)])
    run_id = f"wf:{workflow_of(cls).name}-7"
    rows = [mapper.encode(one) for one in history(*events, run_id=run_id)]
    return [mapper.decode(*row, run_id, version, AT_MS + version) for version, row in enumerate(rows, 1)]
