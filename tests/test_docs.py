"""The programs of the guide run as they are printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[1] / "docs" / "guide.md"
PROGRAMS = re.findall(r"^## (.+?)$|^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)


def programs() -> list[tuple[str, str]]:
    """Each program with the heading it stands under."""
    found, heading = [], ""
    for title, program in PROGRAMS:
        if title:
            heading = title
        else:
            found.append((heading, program))
    return found


@pytest.mark.parametrize(("heading", "program"), programs(), ids=[heading for heading, _ in programs()])
def test_a_program_of_the_guide_runs(heading: str, program: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
