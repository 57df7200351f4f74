"""An order that waits for an approval, for a day at most: a value from outside, a timeout, and a child.

    python examples/order_fulfilment.py            # nobody approves within a second: it gives up
    python examples/order_fulfilment.py approve    # it ships
    python examples/order_fulfilment.py wait       # waits for a day, and ships when this is said in another terminal:
    keiro complete wf:fulfil-order-wait approved --value true --url sqlite:///orders.db

Kill it at any moment and start it again: what was recorded does not happen twice.
"""

import asyncio
import sys
from dataclasses import dataclass

import keiro


@dataclass
class Order:
    sku: str
    cents: int


@keiro.step(retry=keiro.Retry(3, initial=0.1))
async def reserve(order: Order) -> str:
    print(f"reserving {order.sku}")
    return f"reservation of {order.sku}"


@keiro.step
async def release(reservation: str) -> None:
    print(f"releasing the {reservation}")


@keiro.step
async def hand_to_carrier(order: Order) -> str:
    print(f"handing {order.sku} to the carrier")
    return f"parcel-{order.sku}"


@keiro.workflow
async def ship(run: keiro.WorkflowRun, order: Order) -> str:
    return await run.step(hand_to_carrier, order)


@keiro.workflow
async def fulfil(run: keiro.WorkflowRun, order: Order, patience: float) -> str:
    reservation = await run.step(reserve, order)
    try:
        approved = await run.deferred("approved", bool).result(timeout=patience)
    except TimeoutError:
        approved = False
    if not approved:
        await run.step(release, reservation)
        return "not approved"
    parcel = await run.spawn(ship, order, id=f"{run.key}-shipment")
    return await parcel.result()


async def main() -> None:
    mode = sys.argv[1] if len(sys.argv) > 1 else "give-up"
    async with keiro.Engine("sqlite:///orders.db", workflows=[fulfil, ship]) as engine:
        patience = 1 if mode == "give-up" else 86_400
        order = await engine.start(fulfil, Order("lamp", 4900), patience, id=f"order-{mode}")
        if mode == "approve":
            await engine.complete(order.run_id, "approved", True)  # before, while or after it is waited for
        print("result:", await order.result())


asyncio.run(main())
