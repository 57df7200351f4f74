"""`python -m keiro.cli` is the same as `keiro`."""

from keiro.cli import main

main()
