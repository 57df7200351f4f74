"""Snapshots: the state of an aggregate at one version, as JSON, so that a fold can begin there.

A snapshot is never more than a shortcut. One that cannot be read back exactly is refused when it is taken;
one that the code of today cannot use is passed over, and the fold begins at the first event.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any, Final, Self

import msgspec
from msgspec import Raw

from keiro.classes import Field
from keiro.codec import encode
from keiro.commands import upcast
from keiro.errors import DecodeFailed, InvalidCall, PayloadRejected
from keiro.events import ms_of, time_of
from keiro.library import CanSnapshotAggregate


class RunSnapshot(msgspec.Struct, CanSnapshotAggregate[str], frozen=True, kw_only=True):
    """The state of an aggregate at `originator_version`. `topic` is the name of its workflow."""

    originator_id: str
    originator_version: int
    timestamp: datetime
    topic: str
    state: dict[str, Any]
    """The fields of the aggregate, as they will be read back."""
    created_on: datetime
    modified_on: datetime
    class_version: int = 1

    @classmethod
    def take(cls, aggregate: Any) -> Self:
        """The snapshot of an aggregate; raise `InvalidCall` if its state would not be read back as it is."""
        kind = type(aggregate)
        return cls(
            originator_id=aggregate.id,
            originator_version=aggregate.version,
            timestamp=datetime.now(UTC),
            topic=aggregate.workflow,
            state={name: _exact(kind, name, value) for name, value in vars(aggregate).items()},
            created_on=aggregate.created_on,
            modified_on=aggregate.modified_on,
            class_version=kind.class_version,
        )

    def mutate(self, _: None) -> Any:
        """The aggregate, of the class its workflow is defined by in this process."""
        from keiro.run import restored

        return restored(self)


class Document(msgspec.Struct, frozen=True, omit_defaults=True):
    """A snapshot as it is stored."""

    state: dict[str, Raw]
    created_at_ms: int
    modified_at_ms: int
    taken_at_ms: int
    class_version: int = 1


def encode_snapshot(snapshot: RunSnapshot) -> str:
    """The JSON of a snapshot."""
    where = f"snapshot of {snapshot.originator_id}"
    document = Document(
        state={name: Raw(encode(value, where=f"{where}, field {name!r}")) for name, value in snapshot.state.items()},
        created_at_ms=ms_of(snapshot.created_on),
        modified_at_ms=ms_of(snapshot.modified_on),
        taken_at_ms=ms_of(snapshot.timestamp),
        class_version=snapshot.class_version,
    )
    return _encoder.encode(document).decode()


def decode_snapshot(
    text: str, topic: str, run_id: str, version: int, aggregate_class: type[Any], initial: Collection[str]
) -> RunSnapshot:
    """The snapshot in a stored JSON.

    Raises `DecodeFailed` where the class of today cannot go on from it: a newer class took it, an upcast is
    missing or fails, a field does not fit its annotation, or it lacks one of the `initial` fields. The code
    has changed since then, and only the events know what the field should hold.
    """
    where = f"snapshot {version} of {run_id}"
    try:
        document = _decoder.decode(text)
    except msgspec.DecodeError as error:
        raise DecodeFailed(f"{where}: {error}", where=where) from error
    if document.class_version > aggregate_class.class_version:
        raise DecodeFailed(f"{where} was taken by version {document.class_version} of its class", where=where)
    stored = document.state
    if document.class_version < aggregate_class.class_version:
        plain = {name: msgspec.json.decode(raw) for name, raw in stored.items()}
        upcast(aggregate_class, plain, document.class_version)
        stored = {name: Raw(encode(value, where=where)) for name, value in plain.items()}
    if missing := set(initial) - stored.keys():
        raise DecodeFailed(f"{where} has no {', '.join(sorted(missing))}", where=where)
    return RunSnapshot(
        originator_id=run_id,
        originator_version=version,
        timestamp=time_of(document.taken_at_ms),
        topic=topic,
        state={name: _decode(aggregate_class, name, raw) for name, raw in stored.items()},
        created_on=time_of(document.created_at_ms),
        modified_on=time_of(document.modified_at_ms),
        class_version=aggregate_class.class_version,
    )


_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(Document)


def _decode(cls: type[Any], name: str, data: bytes | Raw) -> Any:
    field: Field | None = cls._keiro_fields.get(name)
    return msgspec.json.decode(data) if field is None else field.decode(data)


def _exact(cls: type[Any], name: str, value: Any) -> Any:
    where = f"field {name!r} of {cls.__qualname__}"
    try:
        read = _decode(cls, name, encode(value, where=where))
        if _same(read, value):
            return read
        problem = f"a snapshot would give {read!r} back for {value!r}"
    except (PayloadRejected, DecodeFailed) as error:
        problem = str(error)
    raise InvalidCall(
        f"no snapshot of this {cls.__qualname__}: {where} would not be restored as it is ({problem}); "
        f"declare its type in the class, with a default: `{name}: {type(value).__name__} = ...`"
    )


def _same(read: Any, value: Any) -> bool:
    """Whether two values are equal and of the same types: `==` takes a str enum for its text."""
    if type(read) is not type(value):
        return False
    match value:
        case list() | tuple():
            return len(read) == len(value) and all(map(_same, read, value))
        case dict():
            return list(map(type, read)) == list(map(type, value)) and all(
                key in read and _same(read[key], item) for key, item in value.items()
            )
    return bool(read == value)
