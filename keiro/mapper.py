"""Between events and what the journal stores: a short topic and a JSON text.

Topics resolve through registered workflows, never by module path. A topic this process has no class for is
read as an `OpaqueEvent`, so every process can read every journal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec
from msgspec import Raw

from keiro import codec
from keiro.commands import UserEvent, aggregates, reader, upcast
from keiro.definition import Workflow
from keiro.errors import DecodeFailed, InvalidCall
from keiro.events import ENGINE_EVENTS, Event, OpaqueEvent, blank, ms_of, place
from keiro.library import DomainEventProtocol, JSONTranscoder, Mapper, StoredEvent

Reader = Callable[[str], Event]


class StoredRow(Protocol):
    """A row of the journal, as far as it says what happened."""

    @property
    def topic(self) -> str: ...
    @property
    def payload(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def recorded_at_ms(self) -> int: ...


class EventMapper:
    """Encodes and decodes the events of runs.

    `workflows` are those of the engine; of others, classes that this process has defined are used.
    """

    def __init__(self, workflows: Iterable[Workflow] = ()) -> None:
        self._aggregates: dict[str, type[Any] | None] = {}
        for workflow in workflows:
            self.register(workflow)

    def register(self, workflow: Workflow) -> None:
        """Let this workflow's class, if it has one, resolve its topics."""
        self._aggregates[workflow.name] = workflow.aggregate

    def aggregate(self, workflow: str) -> type[Any] | None:
        """The aggregate class of a workflow; None for one that is a function, or unknown here."""
        if workflow in self._aggregates:
            return self._aggregates[workflow]
        return aggregates.get(workflow)

    def can_occur(self, topic: str) -> bool:
        """Whether an event may have this topic, as far as this process knows."""
        workflow, _, name = topic.partition(":")
        if not name:
            return topic in ENGINE_EVENTS
        aggregate = self.aggregate(workflow)
        return aggregate is None or name in aggregate._keiro_commands.events

    def encode(self, event: Event) -> tuple[str, str]:
        """Topic and stored JSON of an event; raise `PayloadRejected` if a user's value cannot be stored."""
        event = blank(event)
        if isinstance(event, UserEvent):
            return event.TOPIC, encode_user(event).decode()
        if isinstance(event, OpaqueEvent):
            return event.topic, bytes(event.data).decode()
        return event.TOPIC, _encode(event).decode()

    def decode(self, topic: str, payload: str, run_id: str, version: int, recorded_at_ms: int) -> Event:
        """The event in a row of the journal; raise `DecodeFailed` if the JSON does not fit the topic."""
        read = _READERS.get(topic)
        try:
            event = self._user(topic, payload) if read is None else read(payload)
        except (msgspec.DecodeError, DecodeFailed) as error:
            raise DecodeFailed(f"event {version} of {run_id} ({topic}): {error}", where=topic) from error
        place(event, run_id, version, recorded_at_ms)
        return event

    def decode_row(self, row: StoredRow, run_id: str) -> Event:
        """The event in a row of the journal of `run_id`."""
        return self.decode(row.topic, row.payload, run_id, row.version, row.recorded_at_ms)

    def _user(self, topic: str, payload: str) -> Event:
        workflow, _, name = topic.partition(":")
        aggregate = self.aggregate(workflow) if name else None
        found: type[UserEvent] | None = None if aggregate is None else aggregate._keiro_commands.events.get(name)
        if found is None:
            return OpaqueEvent(topic=topic, data=Raw(payload))
        return decode_user(found, payload)


@dataclass(frozen=True)
class JournalEvent(StoredEvent):
    """The library's stored event with the time that the journal keeps in a column."""

    recorded_at_ms: int = 0


class JournalMapper(Mapper[str]):
    """The library's mapper over the same stored form, for its event stores."""

    def __init__(self, events: EventMapper) -> None:
        super().__init__(JSONTranscoder())
        self.events = events

    def to_stored_event(self, domain_event: DomainEventProtocol[str]) -> JournalEvent:
        """The stored form of an event of a run."""
        if not isinstance(domain_event, Event):
            raise InvalidCall(f"{domain_event!r} is not an event of a run: a run's journal holds keiro events only")
        topic, payload = self.events.encode(domain_event)
        return JournalEvent(
            originator_id=domain_event.originator_id,
            originator_version=domain_event.originator_version,
            topic=topic,
            state=payload.encode(),
            recorded_at_ms=ms_of(domain_event.timestamp),
        )

    def to_domain_event(self, stored_event: StoredEvent) -> Event:
        """The event in a stored one."""
        return self.events.decode(
            stored_event.topic,
            stored_event.state.decode(),
            str(stored_event.originator_id),
            stored_event.originator_version,
            stored_event.recorded_at_ms if isinstance(stored_event, JournalEvent) else 0,
        )


def encode_user(event: UserEvent) -> bytes:
    """The stored JSON of a user's event, which says its class version where that is not 1."""
    body = codec.encode(event, where=f"event {event.TOPIC}")
    version = type(event).class_version
    if version == 1:
        return body
    head = b'{"class_version":%d' % version
    return head + b"}" if body == b"{}" else head + b"," + body[1:]


def decode_user(cls: type[UserEvent], payload: str) -> UserEvent:
    """The event in a stored JSON of any version up to that of the class, upcast where it is older."""
    read: Callable[[str | bytes], UserEvent] = cls.READER or reader(cls)
    known = cls.class_version
    if known == 1 and '"class_version"' not in payload:
        return read(payload)
    stored = _class_version(payload).class_version
    if stored == known:
        return read(payload)
    if stored > known:
        raise DecodeFailed(
            f"it was stored by version {stored} of its class, here it has version {known}: update the program",
            where=cls.TOPIC,
        )
    state: dict[str, Any] = msgspec.json.decode(payload)
    state.pop("class_version", None)
    upcast(cls, state, stored)
    return read(codec.encode(state, where=f"event {cls.TOPIC}"))


_encode: Final = msgspec.json.Encoder().encode
_READERS: Final[dict[str, Reader]] = {topic: msgspec.json.Decoder(cls).decode for topic, cls in ENGINE_EVENTS.items()}


class _ClassVersion(msgspec.Struct):
    class_version: int = 1


_class_version: Final = msgspec.json.Decoder(_ClassVersion).decode
