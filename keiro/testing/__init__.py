"""What users import in their own tests. Nothing in keiro outside this package depends on it, but for the command line.

The plugin for pytest is `keiro.testing.plugin`, which an installed keiro registers by itself.
"""

from keiro.testing.clock import SkippingClock as SkippingClock
from keiro.testing.crash import CrashPoints as CrashPoints
from keiro.testing.forced import force_replay as force_replay
from keiro.testing.replayer import Problem as Problem
from keiro.testing.replayer import Replayed as Replayed
from keiro.testing.replayer import dump_history as dump_history
from keiro.testing.replayer import load_history as load_history
from keiro.testing.replayer import replay as replay
from keiro.testing.steps import replace_steps as replace_steps

__all__ = (
    "CrashPoints",
    "Problem",
    "Replayed",
    "SkippingClock",
    "dump_history",
    "force_replay",
    "load_history",
    "replace_steps",
    "replay",
)
