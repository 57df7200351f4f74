"""A workflow that is changed while runs of it wait: the old runs go on the old way, new ones the new way.

    python examples/changed_workflow.py

The program before and after the change are both in here; a second start goes on with the one that was last deployed.
`run.patched(name)` holds for rounds that began with a program which has the patch. Before it is deployed, the replayer
says whether recorded runs would go on with the new code.
"""

import asyncio
from typing import Any

import keiro
from keiro.testing import replay

URL = "sqlite:///letters.db"


@keiro.step
async def greet(name: str) -> str:
    return f"Hello, {name}!"


@keiro.step
async def look_up_title(name: str) -> str:
    return f"Dr. {name}"


async def old_body(run: keiro.WorkflowRun, name: str) -> str:
    greeting = await run.step(greet, name)
    await run.deferred("sign", str).result()
    return greeting


async def careless_body(run: keiro.WorkflowRun, name: str) -> str:
    name = await run.step(look_up_title, name)  # a run that has begun never asked for this
    greeting = await run.step(greet, name)
    await run.deferred("signature", str).result()
    return greeting


async def new_body(run: keiro.WorkflowRun, name: str) -> str:
    if run.patched("titles"):
        name = await run.step(look_up_title, name)
    greeting = await run.step(greet, name)
    await run.deferred("sign", str).result()
    return greeting


def letter(body: Any, *patches: str) -> keiro.Workflow:
    return keiro.workflow(name="letter", patches=patches)(body)


async def main() -> None:
    before, after = letter(old_body), letter(new_body, "titles")
    async with keiro.Engine(URL, worker=False) as client:
        changed = "wf:letter-new" in [run.run_id for run in await client.runs(workflow="letter")]

    if not changed:
        # The program as it was. Where it has been replaced it must not come back: it does not know the patch, and would
        # drive runs that began with it the old way. (Versions that are pinned may run side by side.)
        async with keiro.Engine(URL, workflows=[before]) as engine:
            old = await engine.start(before, "Ada", id="old")
            while await old.status() in ("pending", "running"):
                await asyncio.sleep(0.05)

    async with keiro.Engine(URL, worker=False) as client:
        history = [event async for event in client.handle("wf:letter-old").events()]
    for name, program in (("careless", letter(careless_body)), ("patched", after)):
        found = await replay(history, program)
        print(f"{name}: {'would go on' if found.ok else [problem.kind for problem in found.problems]}")

    async with keiro.Engine(URL, workflows=[after]) as engine:
        new = await engine.start(after, "Grace", id="new")
        for handle in (engine.handle("wf:letter-old"), new):
            await engine.complete(handle.run_id, "sign", "yours")
            print(handle.run_id, "->", await handle.result())


asyncio.run(main())
