"""The command line: `keiro run`, `demo`, `list`, `show`, `journal`, `replay` and `migrate`."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Entry point of the `keiro` command."""
    _open_standard_streams()
    try:
        from keiro.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print("keiro's command line needs two more packages: pip install 'keiro-durable[cli]'", file=sys.stderr)
        sys.exit(2)
    app(prog_name="keiro")


def _open_standard_streams() -> None:
    # Started with one of them closed, the next file to be opened would take its place and get what is printed.
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nothing = os.open(os.devnull, os.O_RDWR)
            if nothing != number:
                os.dup2(nothing, number)
                os.close(nothing)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
