"""Attributes of a run: a few typed values that it is found by, set at its start and by its body.

They are JSON: text, numbers, truth values, and times as text in UTC. They stay readable where payloads are encrypted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from keiro.errors import InvalidCall
from keiro.projections.executions import attribute_text

STEP: Final = "attributes:"
"""What the names of the steps begin with that record attributes."""
MOST: Final = 64
"""So many attributes a run has at most."""
LONGEST_NAME: Final = 128
LONGEST_VALUE: Final = 1024
"""Characters of a value as JSON."""


def checked(given: Any, where: str, *, removing: bool = False) -> dict[str, Any]:
    """The attributes as they are stored. With `removing`, None stands for one that is taken away.

    Raises `InvalidCall` for what is no mapping of names to values, or too much.
    """
    if not isinstance(given, Mapping):
        raise InvalidCall(f"{where}={given!r}: pass a dict of names and values")
    found: dict[str, Any] = {}
    for name, value in given.items():
        if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not _storable(name):
            raise InvalidCall(f"{where}: an attribute has a name of 1 to {LONGEST_NAME} characters, not {name!r:.200}")
        if value is None and removing:
            found[name] = None
            continue
        if isinstance(value, str) and not _storable(value):
            raise InvalidCall(f"{where}: {name}={value!r:.200}: no database holds NUL or half a character")
        text = attribute_text(value)
        if text is None:
            raise InvalidCall(
                f"{where}: {name}={value!r:.200} is neither text, number, truth value nor a datetime with its zone"
            )
        if len(text) > LONGEST_VALUE:
            raise InvalidCall(
                f"{where}: {name} is longer than {LONGEST_VALUE} characters: runs are found by whole values"
            )
        found[name] = msgspec.json.decode(text)
    if len(found) > MOST:
        raise InvalidCall(f"{where}: {len(found)} attributes; a run has at most {MOST}")
    return found


def merged(attributes_json: str | None, changes: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a run has after `changes`; None for nothing."""
    attributes: dict[str, Any] = {} if attributes_json is None else msgspec.json.decode(attributes_json)
    for name, value in changes.items():
        if value is None:
            attributes.pop(name, None)
        else:
            attributes[name] = value
    return attributes or None


def _storable(text: str) -> bool:
    return "\0" not in text and not any(0xD800 <= ord(one) < 0xE000 for one in text)
