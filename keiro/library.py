"""The one place that imports the `eventsourcing` library's internals for the engine.

A new version of the library is met here: whatever it renames or moves is adapted in this module.
"""

from eventsourcing.application import AggregateNotFoundError as AggregateNotFoundError
from eventsourcing.application import Repository as Repository
from eventsourcing.domain import BaseAggregate as BaseAggregate
from eventsourcing.domain import CanMutateAggregate as CanMutateAggregate
from eventsourcing.domain import CanSnapshotAggregate as CanSnapshotAggregate
from eventsourcing.domain import CommandMethodDecorator as CommandMethodDecorator
from eventsourcing.domain import DomainEventProtocol as DomainEventProtocol
from eventsourcing.domain import MetaAggregate as MetaAggregate
from eventsourcing.persistence import AggregateRecorder as AggregateRecorder
from eventsourcing.persistence import EventStore as EventStore
from eventsourcing.persistence import JSONTranscoder as JSONTranscoder
from eventsourcing.persistence import Mapper as Mapper
from eventsourcing.persistence import StoredEvent as StoredEvent
