"""A trip whose bookings are taken back in reverse order when one of them fails: a saga.

    python examples/saga.py

Each booking and each compensation is a recorded step, so a process that dies in the middle goes on taking back where it
was, and takes nothing back twice.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import keiro


class SoldOut(Exception):
    """There is nothing left to book."""


async def book_flight(trip: str) -> str:
    print("booking the flight")
    return f"flight of {trip}"


async def cancel_flight(booking: str) -> None:
    print(f"cancelling the {booking}")


async def book_hotel(trip: str) -> str:
    print("booking the hotel")
    return f"hotel of {trip}"


async def cancel_hotel(booking: str) -> None:
    print(f"cancelling the {booking}")


async def book_car(trip: str) -> str:
    raise SoldOut(f"no car for {trip}")


async def cancel_car(booking: str) -> None:
    print(f"cancelling the {booking}")


BOOKINGS: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (book_flight, cancel_flight),
    (book_hotel, cancel_hotel),
    (book_car, cancel_car),
]
KEEP_TRYING = keiro.Retry(10, initial=0.1)


@keiro.workflow
async def travel(run: keiro.WorkflowRun, trip: str) -> list[str]:
    booked: list[str] = []
    undo: list[tuple[Callable[..., Any], str]] = []
    try:
        for book, cancel in BOOKINGS:
            booking = await run.step(book, trip)
            booked.append(booking)
            undo.append((cancel, booking))
    except SoldOut as error:
        # What a step raised is raised again at every replay, so the compensations are the same ones.
        for cancel, booking in reversed(undo):
            await run.step(cancel, booking, retry=KEEP_TRYING)
        return [f"given up: {error}"]
    return booked


async def main() -> None:
    async with keiro.Engine("sqlite:///trips.db", workflows=[travel]) as engine:
        print("result:", await engine.execute(travel, "Lisbon", id="lisbon"))


asyncio.run(main())
