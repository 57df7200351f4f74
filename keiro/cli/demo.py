"""The demonstration: size, SHA-256, line count and compressed size of every file of a folder, in batched steps."""

from __future__ import annotations

import hashlib
import os
import sysconfig
import zlib
from pathlib import Path
from typing import Final

import msgspec

from keiro.definition import step, workflow
from keiro.errors import InvalidCall
from keiro.run import WorkflowRun
from keiro.scope import ScopedRun

BATCH: Final = 20
AT_ONCE: Final = 4
_LEFT_OUT: Final = frozenset(("__pycache__", "site-packages", "dist-packages", ".git"))


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


def root(folder: Path | None) -> Path:
    """The folder to measure; raises `InvalidCall` if it is none."""
    found = (folder or Path(sysconfig.get_paths()["stdlib"])).resolve()
    if not found.is_dir():
        raise InvalidCall(f"{found} is not a folder")
    return found


@step
def scan(folder: str) -> list[list[str]]:
    """All files below the folder, as paths relative to it, in batches."""
    paths: list[str] = []
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _LEFT_OUT)
        paths += [os.path.relpath(os.path.join(where, name), folder) for name in names]
    # A name that is not Unicode cannot be stored; such a file is left out rather than renamed.
    paths = sorted(path for path in paths if path.isprintable() and "\ufffd" not in path and _is_text(path))
    return [paths[at : at + BATCH] for at in range(0, len(paths), BATCH)]


def _is_text(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


@step
def measure(folder: str, paths: list[str]) -> list[FileFacts]:
    """Measure one batch of files."""
    return [_measure(folder, path) for path in paths]


def _measure(folder: str, path: str) -> FileFacts:
    digest = hashlib.sha256()
    packer = zlib.compressobj()
    facts = FileFacts(path)
    try:
        with open(os.path.join(folder, path), "rb") as file:
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
async def measure_folder(run: WorkflowRun, folder: str) -> Summary:
    """Record facts about every file below a folder and add them up."""
    batches = await run.step(scan, folder)

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
