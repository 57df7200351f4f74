"""A basket that customers fill while its run waits: an aggregate with commands, in the same journal as the workflow.

    python examples/basket.py

The commands are methods; each is recorded once, whoever sends it, and an ordinary eventsourcing repository reads the
basket back.
"""

import asyncio

import keiro


class Basket(keiro.WorkflowRun, name="basket"):
    def __init__(self) -> None:
        self.items: list[str] = []
        self.closed = False

    @keiro.event("ItemAdded")
    def add(self, sku: str) -> None:
        if self.closed:
            raise ValueError("the basket is closed")
        self.items.append(sku)

    @keiro.event("CheckedOut")
    def check_out(self) -> None:
        if not self.items:
            raise ValueError("there is nothing in the basket")
        self.closed = True

    async def execute(self, customer: str) -> str:
        try:
            await self.until(lambda: self.closed, timeout=86_400)
        except TimeoutError:
            return "abandoned"
        return await self.step(charge, customer, self.items)


@keiro.step
async def charge(customer: str, items: list[str]) -> str:
    print(f"charging {customer} for {', '.join(items)}")
    return f"receipt for {len(items)} items"


async def main() -> None:
    async with keiro.Engine("sqlite:///baskets.db", workflows=[Basket]) as engine:
        handle = await engine.start(Basket, "Ada", id="7")
        await engine.command(handle.run_id, Basket.add, "lamp", id="click-1")
        await engine.command(handle.run_id, Basket.add, "desk", id="click-2")
        await engine.command(handle.run_id, Basket.add, "desk", id="click-2")  # the same click: recorded once
        await engine.command(handle.run_id, Basket.check_out, id="click-3")
        print("result:", await handle.result())
        basket = await asyncio.to_thread(engine.repository.get, handle.run_id)  # it blocks: not on the event loop
        print("read back:", basket.items)


asyncio.run(main())
