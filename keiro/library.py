"""The one place that imports the `eventsourcing` library's domain classes for the engine."""

from eventsourcing.domain import BaseAggregate as BaseAggregate
from eventsourcing.domain import CanMutateAggregate as CanMutateAggregate
