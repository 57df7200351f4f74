"""How the testing kit gets between an engine and its runs: drivers that differ in one respect."""

from __future__ import annotations

from keiro.driver import Driver
from keiro.engine import Engine


def drive_with(engine: Engine, kind: type[Driver], **attributes: object) -> None:
    """Let runs that the engine drives from now on have this kind of driver too, beside those it has been given."""
    given = engine.driver_type
    bases = (given,) if issubclass(given, kind) else (kind, given)
    engine.driver_type = type(kind.__name__.lstrip("_"), bases, attributes)
