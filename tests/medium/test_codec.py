"""Compression: round trips, blocks that stay raw, and refusal of all malformed data."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.errors import ConfigError
from tiering.medium.codec import BlockCodec
from tiering.medium.frame import Codec, CorruptReason, FrameError

CODEC16, CODEC8 = BlockCodec(2), BlockCodec(1)


def bf16_like(count: int, seed: int = 0) -> bytes:
    """Return ``count`` numbers as bf16: the upper halves of float32 numbers."""
    numbers = np.random.default_rng(seed).normal(size=count).astype(np.float32)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def encode(codec: BlockCodec, raw: bytes) -> tuple[Codec, bytes]:
    into = memoryview(bytearray(len(raw)))
    kind, length = codec.encode(memoryview(raw), into)
    return kind, raw if kind is Codec.RAW else bytes(into[:length])


def decode(codec: BlockCodec, kind: int, stored: bytes, size: int) -> bytes:
    """Decode into a row between canaries, and check that the canaries are unchanged."""
    memory = memoryview(bytearray(b"\xa5" * (size + 64)))
    memory[32 : 32 + min(len(stored), size)] = stored[:size]
    try:
        codec.decode(kind, memory[32 : 32 + size], len(stored), b"k")
    finally:
        assert bytes(memory[:32]) == bytes(memory[-32:]) == b"\xa5" * 32
    return bytes(memory[32 : 32 + size])


@given(raw=st.binary(min_size=1, max_size=50), repeat=st.integers(1, 400), element_size=st.sampled_from([1, 2]))
def test_what_was_encoded_comes_back(raw: bytes, repeat: int, element_size: int) -> None:
    codec = CODEC16 if element_size == 2 else CODEC8
    block = raw * repeat
    kind, stored = encode(codec, block)
    assert len(stored) <= (len(block) if kind is Codec.RAW else len(block) * 9 // 10)
    if kind is not Codec.RAW:
        assert decode(codec, kind, stored, len(block)) == block


def test_numbers_of_two_bytes_are_split_and_shrink_by_a_quarter_and_more() -> None:
    raw = bf16_like(1 << 20)
    kind, stored = encode(CODEC16, raw)
    assert kind is Codec.ZSTD_SPLIT16
    assert len(stored) < 0.75 * len(raw)
    assert decode(CODEC16, kind, stored, len(raw)) == raw


def test_a_block_of_one_codec_can_be_read_by_a_reader_set_to_another() -> None:
    raw = bytes(10_000)
    for writer, reader in ((CODEC8, CODEC16), (CODEC16, CODEC8)):
        kind, stored = encode(writer, raw)
        assert decode(reader, kind, stored, len(raw)) == raw


@pytest.mark.parametrize("size", [1, 100, 4096, 1 << 20])
def test_noise_is_left_raw(size: int) -> None:
    noise = np.random.default_rng(1).integers(0, 256, size, np.uint8).tobytes()
    assert encode(CODEC16, noise)[0] is Codec.RAW
    assert encode(CODEC8, noise)[0] is Codec.RAW


def test_a_block_of_odd_length_is_compressed_whole() -> None:
    assert encode(CODEC16, bytes(10_001))[0] is Codec.ZSTD


@given(data=st.data(), element_size=st.sampled_from([1, 2]))
def test_a_damaged_block_never_crashes_and_never_writes_beside_the_row(data: st.DataObject, element_size: int) -> None:
    codec = CODEC16 if element_size == 2 else CODEC8
    raw = bf16_like(2000)
    kind, stored = encode(codec, raw if element_size == 2 else bytes(4000))
    damaged = bytearray(stored)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(1, len(damaged)))
    try:
        assert len(decode(codec, kind, bytes(damaged[:cut]), 4000)) == 4000
    except FrameError as error:
        assert error.reason is CorruptReason.CODEC  # noqa: PT017


@given(stored=st.binary(min_size=1, max_size=200), kind=st.sampled_from([1, 2, 3, 250]))
def test_rubbish_is_refused(stored: bytes, kind: int) -> None:
    with pytest.raises(FrameError) as caught:
        decode(CODEC16, kind, stored, 300)
    assert caught.value.reason is CorruptReason.CODEC


@pytest.mark.parametrize("claimed", [3999, 4001, 1 << 40])
def test_a_frame_of_another_length_is_refused_before_memory_is_taken_for_it(claimed: int) -> None:
    kind, stored = encode(CODEC8, bytes(4000))
    forged = bytearray(stored[:4]) + bytes([0xE0]) + claimed.to_bytes(8, "little") + stored[7:]
    with pytest.raises(FrameError):
        decode(CODEC8, kind, bytes(forged), 4000)


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match="with its extra s3"):
        BlockCodec(2)
