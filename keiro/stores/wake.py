"""Wake-ups between processes on one host: one byte to a loopback datagram socket after a commit.

A hint, never a guarantee: whoever sleeps also looks at the store at a slow interval.
"""

from __future__ import annotations

import socket
from asyncio import AbstractEventLoop
from collections.abc import Callable, Sequence
from contextlib import suppress


class WakeSocket:
    """Listens on a port of 127.0.0.1 and sends to those of the other processes."""

    def __init__(self, loop: AbstractEventLoop, woken: Callable[[], None], met: Callable[[], None]) -> None:
        """`woken` is called when somebody has committed, `met` before it where that is nobody we would wake."""
        self._loop = loop
        self._woken = woken
        self._met = met
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self.address: str | None = None
        self._peers: list[tuple[str, int]] = []
        self._scheduled = False
        # Where there is no such address, all others find out what happens here by their slow look.
        with suppress(OSError):
            self._socket.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"
            loop.add_reader(self._socket, self._receive)

    def peers(self, addresses: Sequence[str | None]) -> None:
        """Whom to wake: addresses as the workers table has them, our own among them."""
        self._peers = []
        for address in addresses:
            if address and address != self.address:
                host, _, port = address.rpartition(":")
                self._peers.append((host, int(port)))

    def send(self) -> None:
        """Wake the others, once for all commits of this tick."""
        if self._peers and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        self._scheduled = False
        for peer in self._peers:
            # A peer that is gone, or whose buffer is full, is awake or will look by itself.
            with suppress(OSError):
                self._socket.sendto(b"w", peer)

    def _receive(self) -> None:
        senders = set()
        with suppress(OSError):
            while True:
                senders.add(self._socket.recvfrom(16)[1])
        # Who came since we last looked tells so: until then we would wake all but them.
        if not senders <= set(self._peers):
            self._met()
        self._woken()

    def close(self) -> None:
        """Listen no more."""
        self._loop.remove_reader(self._socket)
        self._socket.close()
