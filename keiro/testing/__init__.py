"""What users import in their own tests. Nothing in keiro outside this package depends on it, but for the command line.

The plugin for pytest is `keiro.testing.plugin`, which an installed keiro registers by itself.
"""

from keiro.testing.clock import SkippingClock as SkippingClock
from keiro.testing.crash import CrashPoints as CrashPoints
from keiro.testing.forced import force_replay as force_replay
from keiro.testing.steps import replace_steps as replace_steps

__all__ = (
    "CrashPoints",
    "SkippingClock",
    "force_replay",
    "replace_steps",
)
