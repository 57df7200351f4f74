"""The walk over all runs that finds rows which are not what the journal says, and mends them if it is told to.

What is wrong and what mends it is decided by `keiro.projections.invariants`; here is only the order, in small bites.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from msgspec.structs import asdict, replace

from keiro.projections.invariants import Finding
from keiro.stores.base import Store
from keiro.stores.kept import Kept


class Reporter(Protocol):
    """Where operators are told, and who looks for runs that can go on."""

    def report(self, event: str, run_id: str, **fields: object) -> None:
        """Tell operators something they should know."""

    def woken(self) -> None:
        """Something was written that may let runs go on."""


async def reconcile(store: Store, kept: Kept, reporter: Reporter, *, fix: bool) -> list[Finding]:
    """Everything that is wrong, oldest runs first; with `fix`, what was wrong."""
    found: list[Finding] = []
    after: int | None = 0
    while after is not None:
        some, after = await kept.examine(after, fix=fix)
        found += some
        await asyncio.sleep(0)
    if not fix or not found:
        return found
    if any(one.kind == "owner" for one in found):
        await store.adopt_orphans()
    found = [replace(one, fixed=True) for one in found]
    for one in found:
        reporter.report("run_mended", one.run_id, **{name: asdict(one)[name] for name in ("kind", "what")})
    reporter.woken()
    return found
