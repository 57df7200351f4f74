"""Where journals live: one interface, three stores, chosen by one URL."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING
from urllib.parse import unquote

from keiro.errors import InvalidCall, StoreUnavailable

if TYPE_CHECKING:
    from keiro.stores.base import Store

_FORMS = "memory://, sqlite:///relative.db, sqlite:////absolute.db or postgresql://user:password@host/database"


def open_store(url: str, *, durability: str = "full") -> Store:
    """The store that `url` names, not yet opened. Raises `InvalidCall` for anything else."""
    if durability not in ("full", "normal"):
        raise InvalidCall(f"durability is 'full' or 'normal', not {durability!r}")
    scheme = url.partition(":")[0] if isinstance(url, str) else ""
    # Imported here: a program that uses one store does not pay for the drivers of the others.
    from keiro.codec import Codec

    codec = Codec.from_env(os.environ)
    if scheme == "memory":
        from keiro.stores.memory import MemoryStore

        return MemoryStore(url.removeprefix("memory://"))
    if scheme == "sqlite" and url.startswith("sqlite:///") and len(url) > len("sqlite:///"):
        from keiro.stores.sqlite import SQLiteStore

        path = unquote(url.removeprefix("sqlite:///"))
        if "\0" in path:
            raise InvalidCall(f"{url!r} names no file: a path has no NUL character")
        return SQLiteStore(path, durability=durability, codec=codec)
    if scheme in ("postgresql", "postgres"):
        try:
            from keiro.stores.postgres import PostgresStore
        except ImportError as error:
            raise StoreUnavailable(
                f"Postgres needs psycopg ({error}): pip install 'keiro-durable[postgres]'."
            ) from error

        return PostgresStore(url, codec=codec)
    raise InvalidCall(f"{shown(repr(url))} names no store: use {_FORMS}")


def shown(url: str) -> str:
    """A URL as messages have it: what stands before the last @ may be a password."""
    return re.sub("//.*@", "//…@", url, flags=re.DOTALL)
