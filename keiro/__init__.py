"""keiro: durable workflows as event-sourced aggregates, inside your own program.

The public names, nothing else; stores are imported when an engine opens.
"""

from keiro.attempts import Attempt as Attempt
from keiro.attempts import attempt as attempt
from keiro.attempts import heartbeat as heartbeat
from keiro.blocking import blocking as blocking
from keiro.commands import event as event
from keiro.definition import Workflow as Workflow
from keiro.definition import step as step
from keiro.definition import workflow as workflow
from keiro.engine import Engine as Engine
from keiro.engine import Handle as Handle
from keiro.errors import ChildCancelled as ChildCancelled
from keiro.errors import ChildFailed as ChildFailed
from keiro.errors import CleanupOnly as CleanupOnly
from keiro.errors import DecodeFailed as DecodeFailed
from keiro.errors import DeferredCancelled as DeferredCancelled
from keiro.errors import EffectUnknown as EffectUnknown
from keiro.errors import FenceLost as FenceLost
from keiro.errors import InvalidCall as InvalidCall
from keiro.errors import InvalidCursor as InvalidCursor
from keiro.errors import InvalidName as InvalidName
from keiro.errors import InvalidOptions as InvalidOptions
from keiro.errors import KeiroError as KeiroError
from keiro.errors import MigrationRequired as MigrationRequired
from keiro.errors import NonDeterminism as NonDeterminism
from keiro.errors import PayloadRejected as PayloadRejected
from keiro.errors import ProjectionFailed as ProjectionFailed
from keiro.errors import RunConflict as RunConflict
from keiro.errors import RunEnded as RunEnded
from keiro.errors import RunNotFound as RunNotFound
from keiro.errors import RunParentCycle as RunParentCycle
from keiro.errors import RunSealed as RunSealed
from keiro.errors import SourceChanged as SourceChanged
from keiro.errors import StepFailed as StepFailed
from keiro.errors import StepNameClash as StepNameClash
from keiro.errors import StoreBusy as StoreBusy
from keiro.errors import StoreError as StoreError
from keiro.errors import StoreUnavailable as StoreUnavailable
from keiro.errors import UnknownWorkflow as UnknownWorkflow
from keiro.errors import WorkflowCancelled as WorkflowCancelled
from keiro.errors import WorkflowFailed as WorkflowFailed
from keiro.feed import JournalEntry as JournalEntry
from keiro.limits import Queue as Queue
from keiro.limits import Rate as Rate
from keiro.projections.base import Projection as Projection
from keiro.projections.base import position_of as position_of
from keiro.projections.run_parents import RunParent as RunParent
from keiro.retry import Retry as Retry
from keiro.retry import RetryAfter as RetryAfter
from keiro.rows import Run as Run
from keiro.rows import Status as Status
from keiro.run import WorkflowRun as WorkflowRun
from keiro.schedules import TICK as TICK
from keiro.schedules import ScheduleRow as ScheduleRow
from keiro.scope import Child as Child
from keiro.scope import Deferred as Deferred
from keiro.scope import First as First
from keiro.scope import ScopedRun as ScopedRun

__version__ = "0.1.0"

__all__ = (
    "TICK",
    "Child",
    "ChildCancelled",
    "ChildFailed",
    "CleanupOnly",
    "DecodeFailed",
    "Deferred",
    "DeferredCancelled",
    "Engine",
    "FenceLost",
    "First",
    "Handle",
    "InvalidCall",
    "InvalidName",
    "KeiroError",
    "MigrationRequired",
    "NonDeterminism",
    "PayloadRejected",
    "Projection",
    "ProjectionFailed",
    "Queue",
    "Rate",
    "Retry",
    "RetryAfter",
    "Run",
    "RunConflict",
    "RunEnded",
    "RunNotFound",
    "RunParent",
    "RunParentCycle",
    "RunSealed",
    "ScheduleRow",
    "ScopedRun",
    "Status",
    "StepFailed",
    "StepNameClash",
    "StoreBusy",
    "StoreError",
    "StoreUnavailable",
    "UnknownWorkflow",
    "Workflow",
    "WorkflowCancelled",
    "WorkflowFailed",
    "WorkflowRun",
    "blocking",
    "event",
    "position_of",
    "step",
    "workflow",
)
