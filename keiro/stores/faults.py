"""What drivers report, as errors of keiro's: what was wrong, where, and what to do.

Whether a fault is worth another try is decided here too, by code and not by text, so that every store agrees.
"""

from __future__ import annotations

import os
import sqlite3
from typing import Any, Final

from keiro.errors import KeiroError, MigrationRequired, StoreBusy, StoreError, StoreUnavailable

# PROTOCOL is a race of several connections to set up the WAL, lost too often in a row.
_SQLITE_LOCKED: Final = frozenset((sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL))

_SQLITE_REFUSALS: Final = frozenset(
    (
        sqlite3.SQLITE_ERROR,
        sqlite3.SQLITE_CONSTRAINT,
        sqlite3.SQLITE_MISMATCH,
        sqlite3.SQLITE_TOOBIG,
        sqlite3.SQLITE_RANGE,
    )
)
_BAD_CALL: Final = (sqlite3.ProgrammingError, sqlite3.InterfaceError)
_PG_REFUSALS: Final = frozenset(("0A", "21", "22", "23", "42"))
_UNSENDABLE: Final = frozenset(("ProgrammingError", "DataError", "NotSupportedError"))

_CONFLICTS: Final = frozenset(("40001", "40P01", "55P03"))
_DISCONNECTS: Final = frozenset(("57P01", "57P02", "57P03"))
_LOGIN_REFUSED: Final = ("authentication failed", "no password supplied", "pg_hba.conf", 'role "')


def is_busy(error: BaseException) -> bool:
    """Whether SQLite refused because another connection holds a lock: nothing was written, try again.

    Follows wrappers and causes; a lost `BEGIN` that shows as a rollback without a transaction counts too.
    """
    found = sqlite_error(error)
    return found is not None and _code(found) in _SQLITE_LOCKED


def is_conflict(sqlstate: str | None) -> bool:
    """Whether Postgres refused a transaction that may succeed when all of it is tried again, on this
    connection: a serialization failure, a deadlock, or a lock that was not to be had in time."""
    return sqlstate in _CONFLICTS


def is_disconnect(sqlstate: str | None) -> bool:
    """Whether the connection to Postgres is gone or was never made. What the client library itself reports
    has no SQLSTATE."""
    return sqlstate is None or sqlstate.startswith("08") or sqlstate in _DISCONNECTS


def is_conflict_error(error: BaseException | None) -> bool:
    """Whether an error is, wraps or was caused by a conflict with another transaction, on any store: all of the
    transaction may be tried again, by who began it."""
    while error is not None:
        if is_conflict(getattr(error, "sqlstate", None)) or (isinstance(error, sqlite3.Error) and is_busy(error)):
            return True
        error = getattr(error, "orig", None) or error.__cause__
    return False


def is_outage(error: BaseException) -> bool:
    """Whether what a user's own SQL raised says that the database is away, full or damaged, rather than that it
    refused a statement."""
    if getattr(error, "connection_invalidated", False):
        return True
    found = sqlite_error(error)
    return found is not None and not is_refusal(found) and not is_busy(found)


def is_transient(sqlstate: str | None) -> bool:
    """Whether another try may succeed by itself: a conflict, or a server that comes back."""
    return is_conflict(sqlstate) or is_disconnect(sqlstate)


def is_refusal(error: BaseException) -> bool:
    """Whether the statement itself was refused (a violated constraint, no such table, a value that its column cannot
    take) rather than the store being away, busy or full: every other try would end the same."""
    found: Any = getattr(error, "orig", None) or error
    if isinstance(found, sqlite3.Error):
        code = _code(found)
        return code in _SQLITE_REFUSALS if code is not None else isinstance(found, _BAD_CALL)
    sqlstate = getattr(found, "sqlstate", None)
    if sqlstate:
        return sqlstate[:2] in _PG_REFUSALS
    # What a driver cannot even send: psycopg says ProgrammingError, others a built-in error.
    return isinstance(found, ValueError | TypeError | OverflowError) or type(found).__name__ in _UNSENDABLE


def sqlite_error(error: BaseException | None) -> sqlite3.Error | None:
    """The error of the driver that `error` is, wraps or was caused by."""
    while error is not None:
        if isinstance(error, sqlite3.Error):
            # Where no transaction had begun, the ROLLBACK that failed hides the fault that matters.
            if "no transaction is active" not in str(error) or error.__context__ is None:
                return error
            error = error.__context__
        else:
            error = getattr(error, "orig", None) or error.__cause__
    return None


def sqlite_fault(error: BaseException, path: str) -> KeiroError:
    """The error to raise for what SQLite (or a wrapper around it) reported about the file `path`."""
    found = sqlite_error(error) or error
    match _code(found):
        case code if code in _SQLITE_LOCKED:
            return StoreBusy(
                f"{path} is locked by another connection; nothing was written. Try again; if it lasts, find "
                "the process that holds a transaction open."
            )
        case sqlite3.SQLITE_CANTOPEN:
            return StoreUnavailable(_why_not_opened(path))
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM | sqlite3.SQLITE_AUTH:
            return StoreUnavailable(
                f"{path} cannot be written ({found}). The file and its folder, where SQLite keeps two more "
                "files, must be writable for this user, and the file must not be moved or replaced while in "
                "use."
            )
        case sqlite3.SQLITE_FULL:
            return StoreUnavailable(f"no space is left for {path}; nothing was written. Free some, then try again.")
        case sqlite3.SQLITE_NOTADB:
            return StoreUnavailable(
                f"{path} is not an SQLite database, or is encrypted. Give the path of another file; one that "
                "does not exist is created."
            )
        case sqlite3.SQLITE_CORRUPT:
            return StoreUnavailable(
                f"{path} is damaged ({found}). Stop all processes that use it, copy it with its -wal and "
                "-shm files, then restore a backup or run `sqlite3 FILE .recover`."
            )
        case sqlite3.SQLITE_IOERR:
            return StoreUnavailable(
                f"reading or writing {path} failed ({found}, {getattr(found, 'sqlite_errorname', '')}). "
                "Check the disk, its free space and limits on file sizes; the file belongs on a local disk."
            )
    return StoreError(f"SQLite refused a statement on {path}: {found}")


def postgres_fault(sqlstate: str | None, message: str, target: str) -> KeiroError:
    """The error to raise for what Postgres, or the client library (`sqlstate` None), reported about `target`.

    `target` is shown to the user: give it without the password, as `postgres_target` does.
    """
    reason = " ".join(message.split()).rstrip(".?")
    if sqlstate == "55P03":
        return StoreBusy(
            f"{target} was locked by another session for too long ({reason}); nothing was written. Try again; if it "
            "lasts, find the session that holds a transaction open (pg_stat_activity, idle in transaction)."
        )
    if is_conflict(sqlstate):
        return StoreBusy(f"{target} could not finish beside others ({reason}); nothing was written. Try again.")
    # A refused connection carries its reason in words only, so the words are read where there is no code.
    match sqlstate:
        case "28P01" | "28000":
            return StoreUnavailable(_refused(target, reason))
        case None if any(words in reason for words in _LOGIN_REFUSED):
            return StoreUnavailable(_refused(target, reason))
        case "3D000":
            return StoreUnavailable(_no_database(target, reason))
        case None if 'database "' in reason and "does not exist" in reason:
            return StoreUnavailable(_no_database(target, reason))
        case "42501":
            return StoreUnavailable(
                f"{target}: {reason}. To migrate, the role needs CREATE on the database; to run, USAGE on "
                "schema keiro and SELECT, INSERT, UPDATE and DELETE on its tables. Grant them, or let the "
                f"owner run `keiro migrate --url {target}`."
            )
        case "3F000" | "42P01" | "42703":
            return MigrationRequired(
                f"{target} lacks what keiro keeps there ({reason}). Run `keiro migrate --url {target}`, or "
                "restore the schema keiro from a backup."
            )
        case "25006":
            return StoreUnavailable(
                f"{target} takes no writes ({reason}): it is a standby, or read-only by its settings. "
                "Connect to the primary."
            )
        case "53100":
            return StoreUnavailable(f"{target} has no disk space left ({reason}); nothing was written. Free some.")
        case "57014":
            return StoreUnavailable(
                f"{target} cancelled a statement ({reason}); nothing was written. They wait for each other at times: "
                "raise statement_timeout for this role if it is that."
            )
        case "53300":
            return StoreUnavailable(
                f"{target} has no connection left ({reason}). Raise max_connections or close other clients."
            )
    if is_disconnect(sqlstate):
        return StoreUnavailable(
            f"cannot reach {target}: {reason}. Check that a server runs there and lets this machine in."
        )
    return StoreError(f"{target} refused a statement ({sqlstate}): {reason}")


def postgres_target(conninfo: str) -> str:
    """How messages name a database: the URL of `conninfo` without its password.

    Raises StoreUnavailable where `conninfo` is neither a Postgres URL nor a libpq connection string.
    """
    from psycopg import ProgrammingError
    from psycopg.conninfo import conninfo_to_dict

    try:
        parts = conninfo_to_dict(conninfo)
    except ProgrammingError:
        # Neither the address nor what libpq says of it is repeated: both may hold the password.
        raise StoreUnavailable(
            "the address of the Postgres database is not understood: it must read "
            "postgresql://USER:PASSWORD@HOST:PORT/DATABASE, with special characters percent-encoded."
        ) from None
    user = f"{parts['user']}@" if parts.get("user") else ""
    port = f":{parts['port']}" if parts.get("port") else ""
    return f"postgresql://{user}{parts.get('host') or ''}{port}/{parts.get('dbname') or ''}"


def _code(error: BaseException) -> int | None:
    """The primary result code: the low byte of the extended one."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def _why_not_opened(path: str) -> str:
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        return f"{path} is a folder. Give the path of a file in it; one that does not exist is created."
    if not os.path.isdir(folder):
        return f"{path} cannot be opened: there is no folder {folder}. Create it, or give another path."
    return (
        f"{path} cannot be opened. Check the path, and that this user may read and write the file and its "
        f"folder {folder}."
    )


def _refused(target: str, reason: str) -> str:
    return f"{target} refused the login: {reason}. Check the user, the password and the server's pg_hba.conf."


def _no_database(target: str, reason: str) -> str:
    return f"{target}: {reason}. Create it (`createdb`), or give the name of one that exists."
