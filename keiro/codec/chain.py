"""The codec chain between the JSON of a payload and the text in its column: compression, then encryption."""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from typing import Final, Protocol

import msgspec

from keiro.codec.decoding import decode_object
from keiro.errors import DecodeFailed, KeiroError


class Compressor(Protocol):
    """As the eventsourcing library's: a class, or a module such as `zlib`."""

    def compress(self, data: bytes, /) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


class Cipher(Protocol):
    """As the eventsourcing library's."""

    def encrypt(self, plaintext: bytes, /) -> bytes: ...

    def decrypt(self, ciphertext: bytes, /) -> bytes: ...


class Codec:
    """Seals payloads for their columns and opens them again.

    Without compressor and cipher, the text is stored as it is. With a cipher it is `{"enc":"<base64>"}`; with a
    compressor alone it is `{"zip":"<base64>"}` where that is shorter. A payload that could be taken for one of
    these is stored as `{"raw":<payload>}`, so the outermost wrapper in a column is always ours. Every form is
    read whatever is configured now, if what it needs is there: a cipher may be added to a store that has rows.
    """

    __slots__ = ("_cipher", "_compressor")

    def __init__(self, compressor: Compressor | None = None, cipher: Cipher | None = None) -> None:
        self._compressor = compressor
        self._cipher = cipher

    @classmethod
    def from_env(cls, env: Mapping[str, str], name: str = "keiro") -> Codec:
        """The chain of `COMPRESSOR_TOPIC`, `CIPHER_TOPIC` and `CIPHER_KEY`, as the eventsourcing library has them.

        A variable with the prefix `<NAME>_` comes first. Raises `KeiroError` for one that cannot be used.
        """

        def setting(key: str) -> str | None:
            return env.get(f"{name.upper()}_{key}") or env.get(key) or None

        compressor_topic = setting("COMPRESSOR_TOPIC")
        cipher_topic = setting("CIPHER_TOPIC") or (_AES if setting("CIPHER_KEY") else None)
        if compressor_topic is None and cipher_topic is None:
            return cls()
        from eventsourcing.utils import Environment, resolve_topic

        compressor = cipher = None
        try:
            topic = compressor_topic
            if compressor_topic is not None:
                compressor = resolve_topic(compressor_topic)
                compressor = compressor() if isinstance(compressor, type) else compressor
            topic = cipher_topic
            if cipher_topic is not None:
                cipher = resolve_topic(cipher_topic)(Environment(name, env))
        except Exception as error:
            raise KeiroError(
                f"{topic!r} cannot seal payloads ({type(error).__name__}: {error}). Check COMPRESSOR_TOPIC,"
                " CIPHER_TOPIC and CIPHER_KEY, and that the packages they need are installed"
            ) from error
        return cls(compressor, cipher)

    @property
    def plain(self) -> bool:
        """Whether payloads are stored as they are."""
        return self._cipher is None and self._compressor is None

    def seal(self, text: str) -> str:
        """The text to store for the JSON `text`."""
        if self._cipher is not None:
            data = text.encode()
            if self._compressor is not None:
                # No JSON begins with this byte, so a reader knows what to do whatever its own settings are.
                data = b"\0" + self._compressor.compress(data)
            return f'{{"enc":"{_base64(self._cipher.encrypt(data))}"}}'
        if self._compressor is not None:
            packed = f'{{"zip":"{_base64(self._compressor.compress(text.encode()))}"}}'
            if len(packed) < len(text):
                return packed
        return f'{{"raw":{text}}}' if text[:6] in _WRAPPERS else text

    def open(self, text: str, where: str = "a stored payload") -> str:
        """The JSON sealed as `text`; raises `DecodeFailed` without the key or compressor it was sealed with."""
        if text[:6] not in _WRAPPERS:
            return text
        try:
            stored = decode_object(text)
        except msgspec.DecodeError as error:
            raise DecodeFailed(f"{where} is no JSON ({error}): it was changed or cut off", where=where) from error
        if len(stored) != 1:
            # A database that reorders members (jsonb) moved one of the payload's own to the front.
            return text
        [(wrapper, content)] = stored.items()
        if wrapper == "raw":
            return bytes(content).decode()
        try:
            data = binascii.a2b_base64(msgspec.json.decode(content, type=str), strict_mode=True)
        except ValueError as error:
            raise DecodeFailed(f"{where} is damaged: {error}", where=where) from error
        if wrapper == "enc":
            data = self._decrypt(data, where)
        if wrapper == "zip" or data[:1] == b"\0":
            data = self._decompress(data.removeprefix(b"\0") if wrapper == "enc" else data, where)
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise _unreadable(where, "is no text once opened", error) from error

    def _decrypt(self, data: bytes, where: str) -> bytes:
        if self._cipher is None:
            raise DecodeFailed(
                f"{where} is encrypted. Set CIPHER_TOPIC and CIPHER_KEY as they were when it was written",
                where=where,
            )
        try:
            return self._cipher.decrypt(data)
        except Exception as error:
            raise _unreadable(where, "cannot be decrypted", error) from error

    def _decompress(self, data: bytes, where: str) -> bytes:
        if self._compressor is None:
            raise DecodeFailed(
                f"{where} is compressed. Set COMPRESSOR_TOPIC as it was when it was written", where=where
            )
        try:
            return self._compressor.decompress(data)
        except Exception as error:
            raise _unreadable(where, "cannot be decompressed", error) from error


_WRAPPERS: Final = frozenset(('{"enc"', '{"zip"', '{"raw"'))
_AES: Final = "eventsourcing.cipher:AESCipher"


def _base64(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode()


def _unreadable(where: str, problem: str, error: Exception) -> DecodeFailed:
    return DecodeFailed(
        f"{where} {problem} ({type(error).__name__}: {error}). It was written with another key or class, or is"
        " damaged: check CIPHER_TOPIC, CIPHER_KEY and COMPRESSOR_TOPIC",
        where=where,
    )
