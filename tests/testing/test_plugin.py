"""The plugin for pytest as a user has it: in another project, with its own settings."""

from __future__ import annotations

import pytest

TEST = """
    import keiro, pytest

    async def work(): return 1

    @keiro.workflow
    async def flow(run): return await run.step(work)

    engines = []

    {mark}
    async def test_one(keiro_engine):
        engine = await keiro_engine(flow)
        engines.append(engine)
        assert await engine.execute(flow) == 1

    {mark}
    async def test_two(keiro_engine):
        with pytest.raises(keiro.InvalidCall, match="not open"):
            await engines[0].start(flow)
        other = await keiro_engine(flow, strict=False)
        assert not other.strict and await other.runs() == []
"""

LOOP = ["-o", "asyncio_default_fixture_loop_scope=function"]  # older versions of pytest-asyncio ask for it


@pytest.mark.parametrize(
    ("mark", "options"),
    [
        ("", ["-o", "asyncio_mode=auto", *LOOP]),
        ("@pytest.mark.asyncio", LOOP),
        ("@pytest.mark.anyio", ["-p", "no:asyncio"]),
    ],
    ids=["auto", "strict", "anyio"],
)
def test_engines_are_open_and_closed_at_the_end(pytester: pytest.Pytester, mark: str, options: list[str]) -> None:
    backend = "@pytest.fixture\n    def anyio_backend(): return 'asyncio'\n" if "anyio" in mark else ""
    pytester.makepyfile(TEST.format(mark=mark) + (f"\n    {backend}" if backend else ""))

    outcome = pytester.runpytest_subprocess("-p", "keiro.testing.plugin", "-W", "error", *options)

    outcome.assert_outcomes(passed=2)


def test_the_plugin_says_what_its_fixture_is_for(pytester: pytest.Pytester) -> None:
    outcome = pytester.runpytest_subprocess("-p", "keiro.testing.plugin", "--fixtures")
    outcome.stdout.fnmatch_lines(["keiro_engine*", "*Makes open engines*"])
