"""The demonstration: size, SHA-256, line count and compressed size of every file of a folder, in batched steps."""

from __future__ import annotations

import hashlib
import os
import stat
import sysconfig
import zlib
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote_to_bytes

import msgspec

from keiro.definition import step, workflow
from keiro.errors import InvalidCall
from keiro.run import WorkflowRun
from keiro.scope import ScopedRun
from keiro.stores import open_store
from keiro.stores.sqlite import SQLiteStore

BATCH: Final = 20
AT_ONCE: Final = 4
PAYLOAD_LIMIT: Final = 512 * 1024 * 1024
"""For the list of a folder's files, which is one step."""
_NOT_OF_THE_LIBRARY: Final = ("__pycache__", "site-packages", "dist-packages")


class FileFacts(msgspec.Struct):
    """What is recorded of a file; sizes in bytes. `problem` says why a file could not be read."""

    path: str
    size: int = 0
    sha256: str = ""
    lines: int = 0
    compressed: int = 0
    problem: str | None = None


class Group(msgspec.Struct):
    """All files with one suffix; sizes in bytes."""

    suffix: str
    files: int = 0
    size: int = 0
    lines: int = 0
    compressed: int = 0


class Summary(msgspec.Struct):
    """The result of the demonstration. `digest` is over all paths and hashes, so two runs can be compared."""

    folder: str
    files: int
    size: int
    lines: int
    compressed: int
    unreadable: int
    digest: str
    groups: list[Group]


def arguments(folder: Path | None, url: str) -> tuple[list[Any], dict[str, Any]]:
    """The input of a run: the folder to measure, and what in it is left alone. Raises `InvalidCall`."""
    root = (folder or Path(sysconfig.get_paths()["stdlib"])).resolve()
    if not root.is_dir():
        raise InvalidCall(f"{root} is not a folder: give the path of one that exists")
    # Reading the journal's own files would drop the locks that this process holds on them.
    own = [f"{file}{end}" for file in _journal(url) for end in ("", "-wal", "-shm", "-journal")]
    return [str(root), own, list(_NOT_OF_THE_LIBRARY) if folder is None else []], {}


def _journal(url: str) -> list[str]:
    store = open_store(url)
    return [os.path.realpath(store.path)] if isinstance(store, SQLiteStore) else []


def summary_of(result_json: str) -> Summary:
    """The result of a run."""
    return msgspec.json.decode(result_json, type=Summary)


@step
def scan(folder: str, own: list[str], skipped: list[str]) -> list[list[str]]:
    """All files below the folder, as paths relative to it, in batches. Folders that cannot be listed are among them."""
    paths: list[str] = []

    def unreadable(error: OSError) -> None:
        paths.append(error.filename)

    for where, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = sorted(name for name in folders if name not in skipped)
        paths += [path for name in names if os.path.realpath(path := os.path.join(where, name)) not in own]
    stored = sorted(_stored(os.path.relpath(path, folder)) for path in paths)
    return [stored[at : at + BATCH] for at in range(0, len(stored), BATCH)]


def _stored(path: str) -> str:
    """The path as text. One that is no UTF-8 is percent-encoded after `//`, with which no relative path begins."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return f"//{quote(os.fsencode(path))}"
    return path


@step
def measure(folder: str, paths: list[str]) -> list[FileFacts]:
    """Measure one batch of files."""
    return [_measure(folder, path) for path in paths]


def _measure(folder: str, path: str) -> FileFacts:
    digest = hashlib.sha256()
    packer = zlib.compressobj()
    facts = FileFacts(path)
    name = unquote_to_bytes(path[2:]) if path.startswith("//") else os.fsencode(path)
    try:
        # Without waiting: a pipe that nobody writes to would hold the demonstration for ever.
        opened = os.open(os.path.join(os.fsencode(folder), name), os.O_RDONLY | os.O_NONBLOCK)
        with open(opened, "rb") as file:
            if not stat.S_ISREG(os.fstat(opened).st_mode):
                return FileFacts(path, problem="no regular file")
            while block := file.read(1 << 20):
                digest.update(block)
                facts.size += len(block)
                facts.lines += block.count(b"\n")
                facts.compressed += len(packer.compress(block))
    except OSError as error:
        return FileFacts(path, problem=f"{type(error).__name__}: {error.strerror}")
    facts.compressed += len(packer.flush())
    facts.sha256 = digest.hexdigest()
    return facts


@workflow(name="keiro.demo")
async def measure_folder(run: WorkflowRun, folder: str, own: list[str], skipped: list[str]) -> Summary:
    """Record facts about every file below a folder and add them up."""
    batches = await run.step(scan, folder, own, skipped)

    async def batch(scope: ScopedRun, paths: list[str]) -> list[FileFacts]:
        return await scope.step(measure, folder, paths)

    measured = await run.map(batch, batches, limit=AT_ONCE)
    return summarise(folder, [facts for part in measured for facts in part])


def summarise(folder: str, facts: list[FileFacts]) -> Summary:
    """Add up what was recorded."""
    groups: dict[str, Group] = {}
    digest = hashlib.sha256()
    for one in facts:
        digest.update(f"{one.path}\0{one.sha256}\n".encode())
        suffix = Path(one.path).suffix or "(none)"
        group = groups.setdefault(suffix, Group(suffix))
        group.files += 1
        group.size += one.size
        group.lines += one.lines
        group.compressed += one.compressed
    ordered = sorted(groups.values(), key=lambda group: (-group.size, group.suffix))
    return Summary(
        folder,
        len(facts),
        sum(group.size for group in ordered),
        sum(group.lines for group in ordered),
        sum(group.compressed for group in ordered),
        sum(1 for one in facts if one.problem is not None),
        digest.hexdigest(),
        ordered,
    )
