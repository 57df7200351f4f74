"""A worker process of the crash tests: `python -m tests.crash.worker URL FOLDER`, until killed or told to stop."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import keiro
from tests.crash import workload


async def main(url: str, folder: Path) -> None:
    workload.use_log(folder)
    async with keiro.Engine(url, workflows=[workload.chain], grace=5) as engine:
        workload.note("workers", "ready")
        await engine.serve()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
