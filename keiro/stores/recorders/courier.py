"""Carries wake-ups between processes over LISTEN and NOTIFY, in one background thread with a connection of
its own.

A notification is sent after the commit it announces and never inside it: there it would make all commits of
the database wait for each other. It may be lost, with its process or its connection, so whoever waits for
one must also look from time to time.
"""

from __future__ import annotations

import logging
import os
import selectors
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import psycopg
from psycopg.sql import SQL, Identifier

from keiro.stores.recorders.common import Channel

logger = logging.getLogger(__name__)

_SEND_INTERVAL_S: Final = 0.005
"""The commits of this long share one notification: each costs the server a transaction."""

_RECONNECT_S: Final = (0.05, 0.2, 0.5, 1.0, 2.0, 5.0)


class Courier:
    """Sends and receives notifications; starts its thread and connects when first used.

    It reconnects when its connection is lost, and then wakes everybody, because what happened meanwhile was
    not heard. The thread is a daemon and never holds up the exit of the interpreter.
    """

    def __init__(self, connect: Callable[[], psycopg.Connection[Any]]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._to_send: set[str] = set()
        self._channels: dict[str, Channel] = {}
        self._closing = False
        self._thread: threading.Thread | None = None
        self._bell, self._ring = -1, -1

    def send(self, name: str) -> None:
        """Notify the processes that listen to `name`, soon. Never blocks and never fails."""
        with self._lock:
            # One that waits to be sent covers this commit too: it is sent after now.
            if name not in self._to_send and not self._closing:
                self._to_send.add(name)
                self._wake()

    def listen(self, name: str, channel: Channel) -> None:
        """From now on publish on `channel` what other connections send to `name`."""
        with self._lock:
            if name not in self._channels and not self._closing:
                self._channels[name] = channel
                self._wake()

    def close(self) -> None:
        """Send what is due and disconnect; waits at most a second."""
        with self._lock:
            self._closing = True
            thread = self._thread
            if thread is not None:
                os.write(self._ring, b"!")
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=1.0)

    def _wake(self) -> None:
        if self._thread is None:
            self._bell, self._ring = os.pipe()
            os.set_blocking(self._bell, False)
            os.set_blocking(self._ring, False)
            self._thread = threading.Thread(target=self._run, name="keiro-courier", daemon=True)
            self._thread.start()
        else:
            with suppress(BlockingIOError):  # it rings already
                os.write(self._ring, b"!")

    def _run(self) -> None:
        failures = 0
        try:
            with selectors.DefaultSelector() as bell:
                bell.register(self._bell, selectors.EVENT_READ)
                while True:
                    try:
                        with self._connect() as connection:
                            failures = 0
                            self._serve(connection)
                        return
                    except psycopg.Error as error:
                        if self._closing:
                            return
                        logger.warning("notifications are off until Postgres is reached again: %s", error)
                    pause = _RECONNECT_S[min(failures, len(_RECONNECT_S) - 1)]
                    failures += 1
                    deadline = time.monotonic() + pause
                    while not self._closing and (remaining := deadline - time.monotonic()) > 0:
                        bell.select(remaining)
                        self._drain_bell()
        finally:
            with self._lock:
                self._closing = True
                os.close(self._bell)
                os.close(self._ring)
                self._thread = None

    def _serve(self, connection: psycopg.Connection[Any]) -> None:
        # A notification that a crash of the server loses is made up for by the next look.
        connection.execute("SET synchronous_commit = off; SET application_name = 'keiro courier'")
        own_pid = connection.info.backend_pid
        listening: set[str] = set()
        sent_at = 0.0
        with selectors.DefaultSelector() as ready:
            ready.register(self._bell, selectors.EVENT_READ)
            ready.register(connection.fileno(), selectors.EVENT_READ)
            while True:
                self._drain_bell()
                with self._lock:
                    closing = self._closing
                    channels = dict(self._channels)
                    send_in = sent_at + _SEND_INTERVAL_S - time.monotonic() if self._to_send else None
                for name in channels.keys() - listening:
                    connection.execute(SQL("LISTEN {}").format(Identifier(name)))
                    listening.add(name)
                    channels[name].publish()
                if send_in is not None and (send_in <= 0 or closing):
                    self._send_all(connection)
                    sent_at, send_in = time.monotonic(), None
                if closing:
                    return
                for notification in connection.notifies(timeout=0):
                    channel = channels.get(notification.channel)
                    if channel is not None and notification.pid != own_pid:
                        channel.publish()
                ready.select(send_in)

    def _send_all(self, connection: psycopg.Connection[Any]) -> None:
        with self._lock:
            names, self._to_send = self._to_send, set()
        try:
            for name in names:
                connection.execute(SQL("NOTIFY {}").format(Identifier(name)))
        except psycopg.Error:
            with self._lock:
                self._to_send |= names
            raise

    def _drain_bell(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._bell, 4096)
