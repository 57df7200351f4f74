"""The programs of the guide run as they are printed, and its links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUIDES = sorted((ROOT / "docs").glob("*.md"))
PROGRAM = re.compile(r"^## (.+?)$|^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PYTEST = ["-m", "pytest", "-q", "-p", "keiro.testing.plugin", "-o", "asyncio_mode=auto"]
# Older versions of pytest-asyncio ask for it.
PYTEST += ["-o", "asyncio_default_fixture_loop_scope=function"]


def programs() -> list[tuple[str, str]]:
    """Each program with the page and the heading it stands under."""
    found = []
    for page in GUIDES:
        heading = ""
        for title, program in PROGRAM.findall(page.read_text()):
            if title:
                heading = title
            else:
                found.append((f"{page.stem}: {heading}", program))
    return found


@pytest.mark.parametrize(("heading", "program"), programs(), ids=[heading for heading, _ in programs()])
def test_a_program_of_the_guide_runs(heading: str, program: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(program)
    # One that consists of tests is run as its users run it.
    runner = PYTEST if re.search("^(async )?def test_", program, re.MULTILINE) else []
    done = subprocess.run(
        [sys.executable, "-W", "error", *runner, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "examples" / "README.md", *GUIDES], ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.is_file(), f"{target}: there is no such file"
        assert not anchor or anchor in anchors(linked), f"{target}: {linked.name} has no such heading"


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_readme_leads_to_every_page(page: Path) -> None:
    assert f"](docs/{page.name})" in (ROOT / "README.md").read_text()
