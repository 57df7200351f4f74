"""Encoding payloads: one call of msgspec, and a closer look only where the text has what refused values leave in it.

The rule: a payload is stored exactly or not at all.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final

from keiro.codec.hooks import encode_binary, encode_json, encode_sorted
from keiro.codec.refusals import find
from keiro.errors import PayloadRejected

PAYLOAD_LIMIT: Final = 8 * 1024 * 1024
"""Default limit of one encoded payload, in bytes."""

MAX_DEPTH: Final = 500
"""Levels a payload may be nested. Python stops at 1000, and whoever reads it may be deep in calls already."""


def encode(value: Any, *, where: str, limit: int = PAYLOAD_LIMIT) -> bytes:
    """`value` as JSON in UTF-8.

    Raises `PayloadRejected`, naming `where` and the path in the value, for what could not be read back as it is:
    NaN and infinities, NUL characters, lone surrogates, types without a JSON form, cycles, more than `MAX_DEPTH`
    levels, more than `limit` bytes.
    """
    if value is None:
        return b"null"
    try:
        data = encode_json(value)
    except Exception as error:
        raise _refused(value, where, error) from error
    # Searching text costs a third of searching bytes, and a search for one character next to nothing.
    text = data.decode()
    size = len(data)
    if (
        "null" in text
        or ("\\" in text and "\\u0000" in text)
        or _may_name_no_number(text)
        or size > 2 * MAX_DEPTH
        or size > limit
    ):
        _examine(value, data, text, where, limit)
    return data


def digest(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """16 hex digits that differ when the inputs of a step differ.

    None without inputs, or with one that has no JSON form: a step may take a connection or a client.
    """
    if not args and not kwargs:
        return None
    try:
        data = encode_sorted((args, kwargs))
    except Exception:
        return None
    return blake2b(data, digest_size=8).hexdigest()


_FLOAT_NOT_FINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]").search
"""A float in MessagePack with all bits of its exponent set."""
_DECIMAL_NOT_FINITE = re.compile(r'"-?(?:s?NaN\d*|Infinity)"').search
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000").search
"""An escaped NUL, not an escaped backslash followed by `u0000`."""


def _examine(value: Any, data: bytes, text: str, where: str, limit: int) -> None:
    if len(data) > limit:
        raise PayloadRejected(
            f"{where} cannot be stored: $ takes {len(data):,} bytes as JSON, and {limit:,} are allowed. Store large"
            " data elsewhere and pass a reference, or raise the engine's payload limit",
            where=where,
            path="$",
        )
    if (len(data) > 2 * MAX_DEPTH and _too_deep(data)) or ("\\" in text and "\\u0000" in text and _NUL(text)):
        raise _refused(value, where)
    # msgspec writes NaN as null. MessagePack keeps the float's bits: searching them is no walk in Python.
    suspect = "null" in text and _maybe_not_finite(value)
    suspect = suspect or (_may_name_no_number(text) and _DECIMAL_NOT_FINITE(text) is not None)
    if suspect and (found := find(value, MAX_DEPTH)):
        raise _rejected(where, *found)


def _may_name_no_number(text: str) -> bool:
    return ("N" in text and "NaN" in text) or ("I" in text and "Infinity" in text)


def _maybe_not_finite(value: Any) -> bool:
    try:
        return _FLOAT_NOT_FINITE(encode_binary(value)) is not None
    except Exception:  # an integer of more than 64 bits: MessagePack has none
        return True


_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_ALL_BUT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_ALL_BUT_BRACKETS_AND_QUOTES = bytes(set(range(256)) - set(b'"[]{}'))


def _too_deep(data: bytes) -> bool:
    """Whether the JSON has more than `MAX_DEPTH` levels, without walking it in Python."""
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return False
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    shape = data.translate(_ONE_KIND, _ALL_BUT_BRACKETS_AND_QUOTES).replace(b'""', b"")
    if b'"' in shape:
        # A quote without its partner: some string holds brackets. Every second piece is the inside of a string.
        shape = b"".join(data.split(b'"')[::2]).translate(_ONE_KIND, _ALL_BUT_BRACKETS)
    # Taking the innermost pairs away lowers the depth by one, and leaves little of what is wide and flat.
    levels = 0
    while shape and levels < 8:
        shape = shape.replace(b"[]", b"")
        levels += 1
    steps = (1 if byte == 0x5B else -1 for byte in shape)
    return levels + max(itertools.accumulate(steps), default=0) > MAX_DEPTH


def _refused(value: Any, where: str, error: Exception | None = None) -> PayloadRejected:
    found = find(value, MAX_DEPTH)
    if found is None:
        # A value that changes while it is looked at, or a call stack that is already nearly used up.
        problem = "holds a NUL character" if error is None else f"cannot be encoded ({error!r})"
        found = "$", problem, "Pass plain data that nothing else changes meanwhile"
    return _rejected(where, *found)


def _rejected(where: str, path: str, problem: str, advice: str) -> PayloadRejected:
    return PayloadRejected(f"{where} cannot be stored: {path} {problem}. {advice}", where=where, path=path)
