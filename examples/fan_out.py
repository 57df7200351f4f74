"""Every file of a folder, many at once: a fan-out whose finished parts are never done again.

    python examples/fan_out.py [FOLDER]

By default the folder is the standard library of this Python. Kill it and start it again: only the files that were not
recorded are read.
"""

import asyncio
import hashlib
import sys
import sysconfig
from pathlib import Path

import keiro


@keiro.step
def digest(path: str) -> tuple[int, str]:
    """A plain function: it runs in a thread."""
    data = Path(path).read_bytes()
    return len(data), hashlib.sha256(data).hexdigest()


@keiro.step
def listing(folder: str) -> list[str]:
    """What there is may change while the run goes on, so the list is recorded too."""
    return sorted(str(path) for path in Path(folder).glob("*.py"))


@keiro.workflow
async def measure(run: keiro.WorkflowRun, folder: str) -> dict[str, int]:
    paths = await run.step(listing, folder)

    async def one(part: keiro.ScopedRun, path: str) -> int:
        size, _ = await part.step(digest, path)
        return size

    sizes = await run.map(one, paths, key=lambda path: Path(path).name, limit=16)
    return {"files": len(sizes), "bytes": sum(sizes)}


async def main() -> None:
    folder = sys.argv[1] if len(sys.argv) > 1 else sysconfig.get_paths()["stdlib"]
    async with keiro.Engine("sqlite:///files.db", workflows=[measure]) as engine:
        handle = await engine.start(measure, folder, id=hashlib.sha256(folder.encode()).hexdigest()[:12])
        print(await handle.result())
        print("recorded steps:", len(await engine.steps(handle.run_id)))


asyncio.run(main())
