"""The codec chain: every payload comes back whatever it looks like, and a missing key is said to be missing."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keiro.codec import Codec
from keiro.errors import DecodeFailed, KeiroError


class Cipher:
    """A toy that does what ciphers do: hides the text, and refuses what another key wrote."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.key = hashlib.sha256(environment["CIPHER_KEY"].encode()).digest()

    def encrypt(self, plaintext: bytes) -> bytes:
        return self.key[:4] + bytes(byte ^ self.key[0] for byte in plaintext)

    def decrypt(self, ciphertext: bytes) -> bytes:
        if ciphertext[:4] != self.key[:4]:
            raise ValueError("tag does not match")
        return bytes(byte ^ self.key[0] for byte in ciphertext[4:])


class Garbling(Cipher):
    """Without a check: another key gives other bytes."""

    def decrypt(self, ciphertext: bytes) -> bytes:
        return bytes(byte ^ 0x80 ^ self.key[0] for byte in ciphertext[4:])


class Squeeze:
    """A compressor that is a class."""

    def compress(self, data: bytes) -> bytes:
        return zlib.compress(data, 9)

    def decompress(self, data: bytes) -> bytes:
        return zlib.decompress(data)


KEY = {"CIPHER_TOPIC": f"{__name__}:Cipher", "CIPHER_KEY": "secret"}
ZIP = {"COMPRESSOR_TOPIC": "zlib"}

PLAIN = Codec.from_env({})
CHAINS = {
    "plain": PLAIN,
    "zip": Codec.from_env(ZIP),
    "enc": Codec.from_env(KEY),
    "both": Codec.from_env({**KEY, "COMPRESSOR_TOPIC": f"{__name__}:Squeeze"}),
}
LONG = msgspec.json.encode({"text": "again and " * 100}).decode()


def test_without_settings_a_payload_is_stored_as_it_is() -> None:
    assert PLAIN.seal(LONG) is LONG
    assert PLAIN.open(LONG) is LONG


def test_with_a_cipher_nothing_of_the_payload_can_be_read() -> None:
    for chain in (CHAINS["enc"], CHAINS["both"]):
        sealed = chain.seal('{"card":"4111"}')

        assert list(msgspec.json.decode(sealed)) == ["enc"]
        assert "4111" not in sealed
        assert chain.open(sealed) == '{"card":"4111"}'


def test_a_compressor_is_used_where_it_makes_the_text_shorter() -> None:
    sealed = CHAINS["zip"].seal(LONG)

    assert list(msgspec.json.decode(sealed)) == ["zip"]
    assert len(sealed) < len(LONG) / 5
    assert CHAINS["zip"].open(sealed) == LONG
    assert CHAINS["zip"].seal('{"a":1}') == '{"a":1}'


_WORDS = st.sampled_from(["enc", "zip", "raw"])
_VALUES = st.recursive(
    st.none() | st.integers() | st.text() | st.just("AAAA"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS | st.text(), inner, max_size=3),
)


@given(value=_VALUES, chain=st.sampled_from(sorted(CHAINS)))
def test_a_payload_comes_back_whatever_it_looks_like(value: Any, chain: str) -> None:
    text = msgspec.json.encode(value).decode()
    codec = CHAINS[chain]

    once = codec.seal(text)

    assert codec.open(once) == text
    assert codec.open(codec.open(codec.seal(once))) == text


@given(value=_VALUES, chain=st.sampled_from(sorted(CHAINS)))
@example(value={"longer": 1, "enc": "AAAA"}, chain="enc")
def test_a_database_may_reorder_and_space_what_is_stored(value: Any, chain: str) -> None:
    codec = CHAINS[chain]
    sealed = codec.seal(msgspec.json.encode(value).decode())

    def as_jsonb(text: str) -> str:
        def ordered(node: Any) -> Any:
            if isinstance(node, dict):
                return {key: ordered(node[key]) for key in sorted(node, key=lambda key: (len(key), key))}
            return list(map(ordered, node)) if isinstance(node, list) else node

        return json.dumps(ordered(msgspec.json.decode(text)), ensure_ascii=False)

    assert msgspec.json.decode(codec.open(as_jsonb(sealed))) == value


@pytest.mark.parametrize("honest", ['{"enc":"AAAA"}', '{"zip":"eJwzBAAAMgAy"}', '{"raw":1}', '{"enc":1}'])
def test_an_honest_payload_written_before_a_cipher_was_set_is_not_taken_for_a_sealed_one(honest: str) -> None:
    before = PLAIN.seal(honest)

    for later in CHAINS.values():
        assert later.open(before) == honest


def test_rows_written_before_a_setting_was_changed_are_read() -> None:
    written = [chain.seal(LONG) for chain in CHAINS.values()]

    assert [CHAINS["both"].open(text) for text in written] == [LONG] * 4


@pytest.mark.parametrize(
    ("writer", "reader", "advice"),
    [
        ("enc", PLAIN, "is encrypted. Set CIPHER_TOPIC and CIPHER_KEY"),
        ("zip", PLAIN, "is compressed. Set COMPRESSOR_TOPIC"),
        ("both", CHAINS["enc"], "is compressed. Set COMPRESSOR_TOPIC"),
        ("enc", Codec.from_env({**KEY, "CIPHER_KEY": "other"}), "cannot be decrypted .*another key.*CIPHER_KEY"),
        ("enc", Codec(cipher=Garbling({"CIPHER_KEY": "secret"})), "is no text once opened.*another key"),
    ],
)
def test_a_missing_or_wrong_setting_is_named(writer: str, reader: Codec, advice: str) -> None:
    sealed = CHAINS[writer].seal(LONG)

    with pytest.raises(DecodeFailed, match=f"input of wf:a-1 {advice}") as caught:
        reader.open(sealed, "input of wf:a-1")

    assert caught.value.where == "input of wf:a-1"


@pytest.mark.parametrize(
    "damaged", ['{"enc":"AAA', '{"enc":"AA!A"}', '{"zip":"%"}', '{"enc":1}', '{"zip":"AAAA"}', '{"enc":"AAAA"}']
)
def test_damaged_text_is_an_error_of_ours(damaged: str) -> None:
    with pytest.raises(DecodeFailed):
        CHAINS["both"].open(damaged)


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"COMPRESSOR_TOPIC": "no.such.module"}, "no.such.module"),
        ({"CIPHER_TOPIC": f"{__name__}:Nothing"}, "Nothing"),
        ({"CIPHER_TOPIC": f"{__name__}:Cipher"}, "CIPHER_KEY"),
    ],
)
def test_settings_that_cannot_be_used_are_an_error_that_names_them(env: dict[str, str], named: str) -> None:
    with pytest.raises(KeiroError, match=named):
        Codec.from_env(env)


def test_settings_with_our_prefix_come_first() -> None:
    codec = Codec.from_env(
        {"KEIRO_CIPHER_TOPIC": KEY["CIPHER_TOPIC"], "CIPHER_TOPIC": "no.such.module", "CIPHER_KEY": "k"}
    )

    assert codec.open(codec.seal("1")) == "1"
    assert codec.seal("1").startswith('{"enc"')
