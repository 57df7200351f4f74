"""The command line keeps the limits that a module describes."""

from __future__ import annotations

import keiro
from keiro.cli.driving import described_queues

queues = [keiro.Queue("mail", concurrency=3)]
other = keiro.Queue("other", per_worker=1)


@keiro.workflow(queue="mail")
async def mails(run: keiro.WorkflowRun) -> None: ...


def test_the_queues_of_a_workflows_module_are_found() -> None:
    assert described_queues([mails]) == [*queues, other]
    keiro.Engine("memory://", workflows=[mails], queues=described_queues([mails, mails]))
