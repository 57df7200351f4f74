"""The README is true: its example runs as printed, and its commands are the ones that CI and dev.py run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def block(marker: str) -> str:
    """The fenced block that follows the comment of this name."""
    found = re.search(rf"^<!-- {re.escape(marker)} -->\n```\w*\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert found, f"README.md has no block after <!-- {marker} -->"
    return found[1]


def test_example_runs_as_printed(tmp_path: Path) -> None:
    # given the example in a file, and a folder without a store
    (tmp_path / "orders.py").write_text(block("example"))
    command = [sys.executable, "-X", "dev", "-W", "error", "orders.py"]

    # when it runs twice
    first = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    second = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    # then it prints what the README says, and the second time only the recorded result
    assert (first.stdout, said(first)) == (block("output"), "")
    assert (second.stdout, said(second)) == (block("output of the second time"), "")


def said(process: subprocess.CompletedProcess[str]) -> str:
    """What it wrote to standard error, but for what asyncio's debug mode says of a machine that is busy."""
    return re.sub(r"^Executing <.* took [\d.]+ seconds\n", "", process.stderr, flags=re.MULTILINE)


def test_example_is_short() -> None:
    code = [line for line in block("example").splitlines() if line.strip()]
    assert len(code) <= 20


def test_readme_begins_with_the_two_commands() -> None:
    commands = re.findall(r"^```sh\n(.*?)\n```$", README, re.MULTILINE | re.DOTALL)
    assert commands[:2] == [block("demo").strip(), block("tests").strip()]
    assert all("\n" not in command for command in commands[:2])
    assert README.index("```sh") < README.index("\n## ")


def test_ci_takes_its_test_command_from_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    # The words of the command are not in the script: it reads the block, so the two cannot differ.
    assert "$(readme tests)" in script
    assert block("tests").strip() not in script


def test_commands_of_the_readme_are_those_of_dev_py() -> None:
    usage = subprocess.run([sys.executable, "dev.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    offered = re.search(r"\{(.*?)\}", usage.stderr)

    assert offered
    for marker in ("demo", "tests"):
        program, script, task = block(marker).split()
        assert (program, script) == ("python3", "dev.py")
        assert task in offered[1].split(",")
