"""The same program in memory, on SQLite and on Postgres: only the URL differs.

python examples/anywhere.py                                    # in memory, for a test
python examples/anywhere.py --url sqlite:///reports.db         # survives a kill
python examples/anywhere.py --url postgresql://localhost/shop  # and is shared by many machines
"""

import argparse
import asyncio

import keiro


@keiro.step
async def part(number: int) -> int:
    return number * number


@keiro.workflow
async def report(run: keiro.WorkflowRun, parts: int) -> int:
    numbers = [await run.step(part, number) for number in range(parts)]
    await run.sleep(0.2)
    return sum(numbers)


async def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--url", default="memory://")
    url = options.parse_args().url
    # On Postgres the schema is only verified unless it is asked for: `keiro migrate` does it once for all.
    async with keiro.Engine(url, workflows=[report], migrate=True) as engine:
        handle = await engine.start(report, 10, id="squares")
        print(f"{url.partition(':')[0]}: {await handle.result()}")


asyncio.run(main())
