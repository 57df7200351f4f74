"""The command line: `keiro run`, `demo`, `list`, `show`, `journal` and `migrate`."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the `keiro` command."""
    try:
        from keiro.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit("keiro's command line needs two more packages: pip install 'keiro-durable[cli]'")
    app()
