"""The block frame: a written frame is recognised, and any other content is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from tiering.api.namespace import FORMAT_VERSION
from tiering.medium.frame import (
    HEADER_BYTES,
    MAX_INLINE_KEY,
    Codec,
    CorruptReason,
    FrameError,
    FrameHeader,
    SequenceSource,
    encode_header,
    parse_header,
    verify,
    verify_raw,
)

KEY = bytes(range(36))
FINGERPRINT = b"n" * 16
RAW = bytes(range(256)) * 4


def header_of(
    key: bytes = KEY, raw: bytes = RAW, *, codec: Codec = Codec.RAW, stored: int | None = None, sequence: int = 7
) -> memoryview:
    view = memoryview(bytearray(HEADER_BYTES))
    encode_header(
        view,
        key=key,
        fingerprint=FINGERPRINT,
        sequence=sequence,
        raw_length=len(raw),
        digest=xxh3_128_digest(raw),
        codec=codec,
        stored_length=stored,
    )
    return view


def refusal(
    view: memoryview, raw: bytes = RAW, key: bytes = KEY, fingerprint: bytes = FINGERPRINT
) -> CorruptReason | None:
    """Return the reason why a frame is refused; None if it is accepted."""
    try:
        verify_raw(verify(view, key=key, fingerprint=fingerprint, raw_length=len(RAW)), memoryview(raw), key)
    except FrameError as error:
        return error.reason
    return None


def resealed(view: memoryview, offset: int, data: bytes) -> memoryview:
    """Return a header with other bytes at ``offset`` and a matching checksum."""
    view[offset : offset + len(data)] = data
    view[120:128] = xxh3_64_intdigest(view[:120]).to_bytes(8, "little")
    return view


@given(
    key=st.binary(min_size=1, max_size=MAX_INLINE_KEY),
    raw=st.binary(min_size=1, max_size=300),
    sequence=st.integers(0, 2**64 - 1),
    stored=st.integers(0, 2**64 - 1),
    codec=st.sampled_from(Codec),
)
def test_a_header_says_what_was_put_into_it(key: bytes, raw: bytes, sequence: int, stored: int, codec: Codec) -> None:
    header = parse_header(header_of(key, raw, codec=codec, stored=stored, sequence=sequence))
    assert header == FrameHeader(
        codec, len(raw), stored, sequence, xxh3_128_digest(raw), FINGERPRINT, key, len(key), b""
    )


@given(bit=st.integers(0, HEADER_BYTES * 8 - 1))
def test_any_flipped_bit_of_a_header_is_refused(bit: int) -> None:
    view = header_of()
    view[bit // 8] ^= 1 << (bit % 8)
    assert isinstance(parse_header(view), CorruptReason)
    assert refusal(view) in {CorruptReason.MAGIC, CorruptReason.VERSION, CorruptReason.HEADER}


@given(bit=st.integers(0, len(RAW) * 8 - 1))
def test_any_flipped_bit_of_a_block_is_refused(bit: int) -> None:
    raw = bytearray(RAW)
    raw[bit // 8] ^= 1 << (bit % 8)
    assert refusal(header_of(), bytes(raw)) is CorruptReason.PAYLOAD


@given(data=st.binary(max_size=2 * HEADER_BYTES))
def test_arbitrary_bytes_are_never_a_header_and_never_raise(data: bytes) -> None:
    assert isinstance(parse_header(memoryview(data)), CorruptReason)


@given(length=st.integers(0, HEADER_BYTES - 1))
def test_a_truncated_header_is_refused(length: int) -> None:
    assert parse_header(header_of()[:length]) is CorruptReason.LENGTH


def test_a_frame_is_accepted_for_what_it_is() -> None:
    assert refusal(header_of()) is None


def test_a_truncated_block_is_refused() -> None:
    assert refusal(header_of(), RAW[:-1]) is CorruptReason.LENGTH


def test_an_empty_slot_is_no_frame() -> None:
    assert refusal(memoryview(bytes(HEADER_BYTES))) is CorruptReason.MAGIC


def test_another_key_is_refused() -> None:
    assert refusal(header_of(), key=KEY[:-1] + b"\xff") is CorruptReason.KEY


def test_a_key_that_continues_with_zeros_is_another_key() -> None:
    assert refusal(header_of(key=b"abc"), key=b"abc\0") is CorruptReason.KEY


def test_another_namespace_is_refused() -> None:
    assert refusal(header_of(), fingerprint=b"m" * 16) is CorruptReason.NAMESPACE


def test_another_version_is_refused_with_a_right_checksum() -> None:
    assert refusal(resealed(header_of(), 8, (FORMAT_VERSION + 1).to_bytes(2, "little"))) is CorruptReason.VERSION


def test_an_unknown_codec_is_refused_with_a_right_checksum() -> None:
    assert refusal(resealed(header_of(), 10, b"\x63")) is CorruptReason.CODEC


def test_a_block_of_another_length_is_refused() -> None:
    assert refusal(header_of(raw=RAW + b"x")) is CorruptReason.LENGTH


@pytest.mark.parametrize("stored", [0, len(RAW) - 1, len(RAW) + 1, 2**64 - 1])
def test_a_raw_block_is_stored_in_its_own_length(stored: int) -> None:
    assert refusal(header_of(stored=stored)) is CorruptReason.LENGTH


def test_a_compressed_block_is_never_longer_than_the_block() -> None:
    assert refusal(header_of(codec=Codec.ZSTD, stored=len(RAW) + 1)) is CorruptReason.LENGTH


def test_a_key_too_long_for_a_header_is_verified_but_not_named() -> None:
    key = bytes(range(MAX_INLINE_KEY + 1))
    view = header_of(key)
    header = parse_header(view)
    assert isinstance(header, FrameHeader)
    assert header.key is None
    assert refusal(view, key=key) is None
    assert refusal(view, key=key[:-1] + b"\xff") is CorruptReason.KEY
    assert refusal(view, key=key + b"\0") is CorruptReason.KEY


def test_the_digest_of_a_long_key_is_not_taken_for_a_short_key() -> None:
    key = bytes(range(MAX_INLINE_KEY + 1))
    assert refusal(header_of(key), key=xxh3_128_digest(key)) is CorruptReason.KEY


def test_an_error_names_the_block_and_the_reason() -> None:
    with pytest.raises(FrameError, match=f"{KEY.hex()} refused: another namespace") as caught:
        verify(header_of(), key=KEY, fingerprint=b"m" * 16, raw_length=len(RAW))
    assert caught.value.reason is CorruptReason.NAMESPACE
    assert not caught.value.temporary


def test_sequence_numbers_only_grow() -> None:
    source = SequenceSource(10)
    assert source.take(3) == 10
    assert source.take(1) == 13
    source.advance_past(99)
    assert source.take(1) == 100
    source.advance_past(50)
    assert source.take(1) == 101


def test_sequence_numbers_of_a_later_process_are_higher() -> None:
    earlier = SequenceSource()
    used = earlier.take(1000) + 999
    later = SequenceSource()
    later.advance_past(used)
    assert later.take(1) > used


def test_the_bytes_of_a_header_are_those_of_the_format() -> None:
    key, digest = bytes(range(1, 37)), xxh3_128_digest(RAW)
    view = header_of(key, codec=Codec.ZSTD_SPLIT16, stored=700, sequence=2**40 + 3)
    fields = (
        b"\x89KVTIER\n"
        + FORMAT_VERSION.to_bytes(2, "little")
        + b"\x02\0"
        + (36).to_bytes(4, "little")
        + (1024).to_bytes(8, "little")
        + (700).to_bytes(8, "little")
        + (2**40 + 3).to_bytes(8, "little")
        + digest
        + FINGERPRINT
        + key
        + bytes(12)
    )
    assert bytes(view) == fields + xxh3_64_intdigest(fields).to_bytes(8, "little")


def test_the_numbers_of_codecs_are_those_on_the_media() -> None:
    assert {codec.name: int(codec) for codec in Codec} == {"RAW": 0, "ZSTD": 1, "ZSTD_SPLIT16": 2}


def test_the_longest_key_that_a_header_names_has_48_bytes() -> None:
    named, digested = parse_header(header_of(bytes(48))), parse_header(header_of(bytes(49)))
    assert isinstance(named, FrameHeader)
    assert isinstance(digested, FrameHeader)
    assert (named.key, named.key_digest) == (bytes(48), b"")
    assert (digested.key, digested.key_length, digested.key_digest) == (None, 49, xxh3_128_digest(bytes(49)))


def test_a_header_is_followed_by_other_bytes() -> None:
    view = memoryview(bytes(header_of()) + b"more")
    assert refusal(view) is None


@pytest.mark.parametrize("key", [b"\0" * 36, b"\xff" * 36])
def test_a_key_below_or_above_the_block_s_own_is_another_key(key: bytes) -> None:
    assert refusal(header_of(), key=key) is CorruptReason.KEY


@pytest.mark.parametrize("length", [49, 50, 300])
@pytest.mark.parametrize("other", [49, 50, 300])
def test_a_long_key_is_known_by_its_length_and_its_digest(length: int, other: int) -> None:
    view, asked = header_of(b"k" * length), b"k" * other
    resealed(view, 72, xxh3_128_digest(asked))
    assert refusal(view, key=asked) is (None if length == other else CorruptReason.KEY)


@pytest.mark.parametrize("digest", [bytes(16), b"\xff" * 16])
def test_a_long_key_with_another_digest_is_another_key(digest: bytes) -> None:
    key = b"k" * 60
    assert refusal(resealed(header_of(key), 72, digest), key=key) is CorruptReason.KEY


@pytest.mark.parametrize("fingerprint", [b"\0" * 16, b"\xff" * 16])
def test_a_namespace_below_or_above_the_asked_one_is_another_namespace(fingerprint: bytes) -> None:
    assert refusal(header_of(), fingerprint=fingerprint) is CorruptReason.NAMESPACE


@pytest.mark.parametrize("magic", [b"\0" * 8, b"\xff" * 8])
def test_bytes_below_or_above_the_magic_are_no_frame(magic: bytes) -> None:
    assert refusal(resealed(header_of(), 0, magic)) is CorruptReason.MAGIC


@pytest.mark.parametrize("version", [0, FORMAT_VERSION - 1, FORMAT_VERSION + 1, 2**16 - 1])
def test_older_and_newer_versions_are_refused(version: int) -> None:
    assert refusal(resealed(header_of(), 8, version.to_bytes(2, "little"))) is CorruptReason.VERSION


@pytest.mark.parametrize("raw_length", [0, len(RAW) - 1, len(RAW) + 1, 2**64 - 1])
def test_a_raw_length_other_than_the_block_s_is_refused_by_the_header_alone(raw_length: int) -> None:
    view = resealed(header_of(codec=Codec.ZSTD, stored=1), 16, raw_length.to_bytes(8, "little"))
    with pytest.raises(FrameError, match="wrong length"):
        verify(view, key=KEY, fingerprint=FINGERPRINT, raw_length=len(RAW))


@pytest.mark.parametrize("codec", [Codec.ZSTD, Codec.ZSTD_SPLIT16])
@pytest.mark.parametrize("stored", [1, len(RAW) - 1, len(RAW)])
def test_a_compressed_block_may_be_shorter_than_the_block(codec: Codec, stored: int) -> None:
    header = verify(header_of(codec=codec, stored=stored), key=KEY, fingerprint=FINGERPRINT, raw_length=len(RAW))
    assert (header.codec, header.stored_length) == (codec, stored)


def test_a_raw_length_is_compared_by_value() -> None:
    raw = bytes(100_000)
    header = verify(header_of(raw=raw), key=KEY, fingerprint=FINGERPRINT, raw_length=int("100000"))
    assert header.raw_length == len(raw)


@pytest.mark.parametrize("length", [len(RAW) - 1, len(RAW) + 1])
def test_a_block_shorter_or_longer_than_its_header_says_is_refused(length: int) -> None:
    header = verify(header_of(), key=KEY, fingerprint=FINGERPRINT, raw_length=len(RAW))
    with pytest.raises(FrameError, match="wrong length"):
        verify_raw(header, memoryview((RAW + b"x")[:length]), KEY)
