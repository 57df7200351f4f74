#!/usr/bin/env python3
"""Sets up this checkout and runs one thing in it: `python3 dev.py demo` or `python3 dev.py test`.

It needs Python 3.11 or newer and a package index, nothing else: not even pip, which Debian's Python comes
without. What follows the first word is passed on. The virtual environment is .venv, or the folder that
$KEIRO_VENV names.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
ENVIRONMENT = Path(os.environ.get("KEIRO_VENV") or ROOT / ".venv").absolute()
PYTHON = ENVIRONMENT / "bin" / "python"

# The extra that a task needs, and its command.
TASKS = {
    "demo": ("cli", [str(ENVIRONMENT / "bin" / "keiro"), "demo"]),
    # Each process has a Postgres of its own.
    "test": ("test", [str(PYTHON), "-m", "pytest", "-n", "auto", "--maxprocesses", "4", "--dist", "worksteal"]),
}


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - any Python may be the one that is called here
        sys.exit(f"keiro needs Python 3.11 or newer, and this is {sys.version.split()[0]}.")
    if len(sys.argv) < 2 or sys.argv[1] not in TASKS:
        sys.exit("usage: python3 dev.py {demo,test} [ARGUMENT ...]")
    extra, command = TASKS[sys.argv[1]]
    install(extra)
    os.execv(command[0], [*command, *sys.argv[2:]])


def install(extra: str) -> None:
    """Install this checkout with one extra, unless that is done: the mark holds what it was done for."""
    state = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + str(ROOT).encode()).hexdigest()
    mark = ENVIRONMENT / f"keiro-{extra}"
    if mark.exists() and mark.read_text() == state and PYTHON.exists():
        return
    print(f"dev.py: installing keiro with its {extra} extra into {ENVIRONMENT}", file=sys.stderr, flush=True)
    if not PYTHON.exists() or run(PYTHON, "-m", "pip", "--version", quiet=True) != 0:
        create_environment()
    if run(PYTHON, "-m", "pip", "install", "-qq", "--editable", f"{ROOT}[{extra}]") != 0:
        sys.exit("dev.py: pip could not install keiro; its message is above. Is the package index reachable?")
    mark.write_text(state)


def create_environment() -> None:
    venv.EnvBuilder(clear=True, symlinks=True, with_pip=False).create(ENVIRONMENT)
    if run(PYTHON, "-m", "ensurepip", "--default-pip", quiet=True) != 0:
        with tempfile.TemporaryDirectory() as folder:
            wheel = download_pip(Path(folder))
            # A wheel of pip is a program too: it installs itself.
            if run(PYTHON, wheel / "pip", "install", "--quiet", "--no-index", wheel) != 0:
                sys.exit("dev.py: pip could not be installed; its message is above.")


def download_pip(folder: Path) -> Path:
    """Fetch the newest pip from the package index and check it against the index's digest."""
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/") + "/pip/"
    link = re.compile(r'href="([^"]*/(pip-([0-9.]+)-py3-none-any\.whl)[^"]*)"')
    try:
        with urllib.request.urlopen(index, timeout=60) as answer:
            found = link.findall(answer.read().decode())
        target, name, _ = max(found, key=lambda each: [int(part) for part in each[2].split(".")])
        address, _, digest = urllib.parse.urljoin(index, target).partition("#sha256=")
        with urllib.request.urlopen(address, timeout=60) as answer:
            content = answer.read()
    except (OSError, ValueError) as error:
        sys.exit(f"dev.py: this Python has no pip, and it could not be fetched from {index}: {error}")
    if digest and hashlib.sha256(content).hexdigest() != digest:
        sys.exit(f"dev.py: {address} is not the file its index describes")
    (folder / name).write_bytes(content)
    return folder / name


def run(*command: "str | Path", quiet: bool = False) -> int:
    output = subprocess.DEVNULL if quiet else None
    words = [str(word) for word in command]
    return subprocess.run(words, stdout=output, stderr=output, check=False).returncode


if __name__ == "__main__":
    main()
