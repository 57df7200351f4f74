"""Recorders in memory, the model of the other two. Each recorder has its own data, gone with the recorder.

There is no database whose transaction `save(…, connection=…)` could join, so that is refused rather than
ignored.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any
from uuid import UUID

from eventsourcing.persistence import (
    AggregateRecorder,
    ApplicationRecorder,
    IntegrityError,
    Notification,
    ProcessRecorder,
    StoredEvent,
    Subscription,
    Tracking,
)

from keiro.stores.recorders.common import (
    Channel,
    RecorderFactory,
    RecorderSubscription,
    UnusableConnection,
    WaitingTrackingRecorder,
)

# Nothing but its own process can write here; this is how often a subscription sees that the main thread has
# ended.
_POLL_INTERVAL_S = 1.0


class _Stream:
    """The events of one aggregate, ordered by version."""

    __slots__ = ("events", "versions")

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.events: list[StoredEvent] = []

    def has(self, version: int) -> bool:
        versions = self.versions
        if not versions or version > versions[-1]:
            return False
        return versions[bisect_right(versions, version) - 1] == version

    def add(self, event: StoredEvent) -> None:
        at = bisect_right(self.versions, event.originator_version)
        self.versions.insert(at, event.originator_version)
        self.events.insert(at, event)


class MemoryRecorder:
    """Holds the lock of a recorder's data."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.RLock()


class MemoryAggregateRecorder(MemoryRecorder, AggregateRecorder):
    """Events of aggregates; also snapshots."""

    def __init__(self) -> None:
        super().__init__()
        self._streams: dict[str, _Stream] = {}

    def insert_events(self, stored_events: Sequence[StoredEvent], **kwargs: Any) -> Sequence[int] | None:
        """Record all or nothing; `IntegrityError` for a version that is recorded already."""
        _refuse_connection(kwargs)
        with self._lock:
            self._check_new(stored_events)
            self._add(stored_events)
        return None

    def _check_new(self, stored_events: Sequence[StoredEvent]) -> None:
        batch = set()
        for event in stored_events:
            key = str(event.originator_id), event.originator_version
            stream = self._streams.get(key[0])
            if key in batch or (stream is not None and stream.has(key[1])):
                raise IntegrityError(
                    f"version {key[1]} of aggregate {key[0]} is recorded already; get the aggregate again and repeat"
                    " the change"
                )
            batch.add(key)

    def _add(self, stored_events: Sequence[StoredEvent]) -> None:
        for event in stored_events:
            key = str(event.originator_id)
            stream = self._streams.get(key)
            if stream is None:
                stream = self._streams[key] = _Stream()
            stream.add(event)

    def select_events(
        self,
        originator_id: UUID | str,
        *,
        gt: int | None = None,
        lte: int | None = None,
        desc: bool = False,
        limit: int | None = None,
    ) -> Sequence[StoredEvent]:
        """The events of one aggregate, by version."""
        with self._lock:
            stream = self._streams.get(str(originator_id))
            if stream is None:
                return []
            first = 0 if gt is None else bisect_right(stream.versions, gt)
            last = len(stream.versions) if lte is None else bisect_right(stream.versions, lte)
            found = stream.events[first:last]
        if desc:
            found.reverse()
        return found if limit is None else found[:limit]


class MemoryApplicationRecorder(MemoryAggregateRecorder, ApplicationRecorder):
    """Events of aggregates, numbered in the order they were recorded."""

    def __init__(self) -> None:
        super().__init__()
        self._log: list[StoredEvent] = []
        self._channel = Channel()

    def insert_events(self, stored_events: Sequence[StoredEvent], **kwargs: Any) -> Sequence[int] | None:
        """Record all or nothing and return the positions; `IntegrityError` for a version that exists."""
        _refuse_connection(kwargs)
        with self._lock:
            self._check_new(stored_events)
            ids = self._append(stored_events)
        self._channel.publish()
        return ids

    def _append(self, stored_events: Sequence[StoredEvent]) -> list[int]:
        self._add(stored_events)
        first = len(self._log) + 1
        ids = list(range(first, first + len(stored_events)))
        self._log.extend(stored_events)
        return ids

    def select_notifications(
        self,
        start: int | None,
        limit: int,
        stop: int | None = None,
        topics: Sequence[str] = (),
        *,
        inclusive_of_start: bool = True,
    ) -> Sequence[Notification]:
        """Up to `limit` events by position, from `start` to `stop`, only those of the topics if any are
        given.
        """
        first = 0 if start is None else max(start - inclusive_of_start, 0)
        with self._lock:
            last = len(self._log) if stop is None else max(min(stop, len(self._log)), 0)
            positions: Iterable[int] = range(first, last)
            if topics:
                wanted = frozenset(topics)
                positions = (at for at in positions if self._log[at].topic in wanted)
            found = [(at + 1, self._log[at]) for at in islice(positions, limit)]
        return [
            Notification(e.originator_id, e.originator_version, e.topic, e.state, position) for position, e in found
        ]

    def max_notification_id(self) -> int | None:
        """The last position, `None` when nothing is recorded."""
        with self._lock:
            return len(self._log) or None

    def subscribe(self, gt: int | None = None, topics: Sequence[str] = ()) -> Subscription[ApplicationRecorder]:
        """Iterate over all events after position `gt`, waiting for more."""
        return RecorderSubscription(self, self._channel, gt=gt, topics=topics, poll_interval=_POLL_INTERVAL_S)


class MemoryTrackingRecorder(MemoryRecorder, WaitingTrackingRecorder):
    """How far each upstream application has been processed. Base class of views."""

    def __init__(self) -> None:
        super().__init__()
        self._positions: dict[str, int] = {}
        self.tracking_channel = Channel()

    @contextmanager
    def transaction(self, tracking: Tracking | None = None) -> Iterator[None]:
        """Hold the view's lock; record `tracking` at the end unless the block raises.

        Raises `IntegrityError` before the block runs if the position was processed already. What the block
        changed before it raised stays changed: raise first, change after.
        """
        with self._lock:
            if tracking is not None:
                self._check_later(tracking)
            yield
            if tracking is not None:
                self._positions[tracking.application_name] = tracking.notification_id
        self.tracking_channel.publish()

    def insert_tracking(self, tracking: Tracking) -> None:
        """Record a position; `IntegrityError` unless it is above the last one of its application."""
        with self.transaction(tracking):
            pass

    def _check_later(self, tracking: Tracking) -> None:
        last = self._positions.get(tracking.application_name)
        if last is not None and last >= tracking.notification_id:
            raise IntegrityError(
                f"position {tracking.notification_id} of application '{tracking.application_name}' was processed"
                f" already: the last one is {last}"
            )

    def max_tracking_id(self, application_name: str) -> int | None:
        """The last processed position of an application, `None` if there is none."""
        with self._lock:
            return self._positions.get(application_name)


class MemoryProcessRecorder(MemoryTrackingRecorder, MemoryApplicationRecorder, ProcessRecorder):
    """Records events and the position they were made from together."""

    def insert_events(self, stored_events: Sequence[StoredEvent], **kwargs: Any) -> Sequence[int] | None:
        """Record events and the `tracking` position, both or neither."""
        _refuse_connection(kwargs)
        with self.transaction(kwargs.get("tracking")):
            self._check_new(stored_events)
            ids = self._append(stored_events)
        self._channel.publish()
        return ids


class MemoryFactory(RecorderFactory[MemoryTrackingRecorder]):
    """Constructs recorders in memory."""

    def aggregate_recorder(self, purpose: str = "events") -> AggregateRecorder:
        """A recorder of events or snapshots without positions."""
        return MemoryAggregateRecorder()

    def application_recorder(self) -> ApplicationRecorder:
        """An application's recorder, of the class `APPLICATION_RECORDER_TOPIC` names if set."""
        return self.recorder_class(MemoryApplicationRecorder, self.APPLICATION_RECORDER_TOPIC)()

    def tracking_recorder(
        self, tracking_recorder_class: type[MemoryTrackingRecorder] | None = None
    ) -> MemoryTrackingRecorder:
        """A view; raises `UnsupportedRecorder` for the class of another store."""
        kind = self.recorder_class(MemoryTrackingRecorder, self.TRACKING_RECORDER_TOPIC, tracking_recorder_class)
        return kind()

    def process_recorder(self) -> ProcessRecorder:
        """A recorder of events with tracking."""
        return self.recorder_class(MemoryProcessRecorder, self.PROCESS_RECORDER_TOPIC)()


Factory = MemoryFactory


def _refuse_connection(kwargs: dict[str, Any]) -> None:
    if kwargs.get("connection") is not None:
        raise UnusableConnection(
            "keiro.stores.memory has no database, so save(…, connection=…) cannot join a transaction of one; leave"
            " connection= out, or configure keiro.stores.sqlite or keiro.stores.postgres"
        )
