"""Where journals live: one interface, three stores, chosen by one URL."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from keiro.errors import InvalidCall

if TYPE_CHECKING:
    from keiro.stores.base import Store

_FORMS = "memory://, sqlite:///relative.db, sqlite:////absolute.db or postgresql://user:password@host/database"


def open_store(url: str, *, durability: str = "full") -> Store:
    """The store that `url` names, not yet opened. Raises `InvalidCall` for anything else."""
    if durability not in ("full", "normal"):
        raise InvalidCall(f"durability is 'full' or 'normal', not {durability!r}")
    scheme = urlsplit(url).scheme
    # Imported here: a program that uses one store does not pay for the drivers of the others.
    from keiro.codec import Codec

    codec = Codec.from_env(os.environ)
    if scheme == "memory":
        from keiro.stores.memory import MemoryStore

        return MemoryStore(url.removeprefix("memory://"))
    if scheme == "sqlite" and url.startswith("sqlite:///") and len(url) > len("sqlite:///"):
        from keiro.stores.sqlite import SQLiteStore

        return SQLiteStore(unquote(url.removeprefix("sqlite:///")), durability=durability, codec=codec)
    if scheme in ("postgresql", "postgres"):
        from keiro.stores.postgres import PostgresStore

        return PostgresStore(url, codec=codec)
    raise InvalidCall(f"{url!r} names no store: use {_FORMS}")
