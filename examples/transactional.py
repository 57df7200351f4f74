"""An application's own table and a run in one transaction: an outbox without a table for it, effects exactly once.

    python examples/transactional.py

Either the order is stored and will be confirmed, or neither; so with what completes it. The run changes the table in a
step whose SQL and whose record are one commit.
"""

import asyncio
import sqlite3

import sqlalchemy as sa

import keiro

PATH = "shop.db"


@keiro.step
def ship(connection: sa.Connection, order: str) -> str:
    connection.execute(sa.text("UPDATE orders SET status = 'shipped' WHERE id = :id"), {"id": order})
    return "shipped"


@keiro.step
async def send_mail(order: str) -> str:
    print(f"mail: order {order} is on its way")
    return "sent"


@keiro.workflow
async def confirm(run: keiro.WorkflowRun, order: str) -> str:
    await run.deferred("packed").result()
    await run.transaction(ship, order)
    return await run.step(send_mail, order)


async def place(engine: keiro.Engine, connection: sqlite3.Connection, order: str, *, fails: bool = False) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.execute("INSERT INTO orders VALUES (?, 'new') ON CONFLICT DO NOTHING", (order,))
        await engine.start(confirm, order, id=order, connection=connection)
        if fails:
            raise RuntimeError("the customer has gone")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


async def packed(engine: keiro.Engine, connection: sqlite3.Connection, order: str) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        connection.execute("UPDATE orders SET status = 'packed' WHERE id = ?", (order,))
        await engine.complete(f"wf:confirm-{order}", "packed", None, connection=connection)
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


async def main() -> None:
    async with keiro.Engine(f"sqlite:///{PATH}", workflows=[confirm]) as engine:
        connection = sqlite3.connect(PATH, isolation_level=None)
        connection.execute("CREATE TABLE IF NOT EXISTS orders (id TEXT PRIMARY KEY, status TEXT NOT NULL)")
        try:
            await place(engine, connection, "2", fails=True)
        except RuntimeError as error:
            print("rolled back:", error)
        await place(engine, connection, "1")
        await packed(engine, connection, "1")
        print("result:", await engine.handle("wf:confirm-1").result())
        print("orders:", connection.execute("SELECT * FROM orders").fetchall())
        print("runs:", [run.run_id for run in await engine.runs()])
        connection.close()


asyncio.run(main())
