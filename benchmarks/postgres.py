"""A Postgres for the benchmark: the one named by a URL, or one started here and stopped at the end.

The server started here is durable (fsync, synchronous_commit and full_page_writes on) and otherwise as
shipped, because the figures are worth nothing when an acknowledged commit could be lost.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from urllib.parse import quote, urlencode

import psycopg
from psycopg.conninfo import conninfo_to_dict

from keiro.testing.postgres import PostgresServer


class Postgres:
    """A reachable server in which every measurement gets a database of its own."""

    def __init__(self, url: str) -> None:
        self.url = url

    def create_database(self) -> str:
        """Create an empty database and return its URL."""
        name = f"bench_{uuid.uuid4().hex[:12]}"
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"'.encode())
        return self._url_of(name)

    def drop_database(self, url: str) -> None:
        """Drop a database made by create_database, ending what is still connected to it."""
        name = conninfo_to_dict(url)["dbname"]
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)'.encode())

    def checkpoint(self) -> None:
        """Flush what earlier measurements left dirty, so that the next one does not pay for it."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute("CHECKPOINT")

    def settings(self) -> dict[str, str]:
        """The version and the settings that decide what an acknowledged commit means."""
        names = ["server_version", "fsync", "synchronous_commit", "full_page_writes", "shared_buffers"]
        with psycopg.connect(self.url, autocommit=True) as connection:
            rows = [connection.execute("SELECT current_setting(%s)", [name]).fetchone() for name in names]
        return {name: str(row[0]) for name, row in zip(names, rows, strict=True) if row}

    def _url_of(self, database: str) -> str:
        # Asked of a connection, because a URL may leave any part of it to the environment.
        with psycopg.connect(self.url) as connection:
            info = connection.info
            account = quote(info.user) + (f":{quote(info.password)}" if info.password else "")
            return f"postgresql://{account}@/{database}?{urlencode({'host': info.host, 'port': info.port})}"


@contextlib.contextmanager
def running_postgres(url: str | None) -> Iterator[Postgres]:
    """Yield the server at `url`, or start one and stop it afterwards.

    Raises keiro.testing.postgres.PostgresNotFound when no URL is given and no server can be started.
    """
    if url is not None:
        yield Postgres(url)
        return
    with PostgresServer(durable=True) as server:
        yield Postgres(server.url())
