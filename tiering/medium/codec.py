"""Compression of blocks with zstd on the I/O side; of two-byte elements, only the high bytes.

The low bytes of bf16 and fp16 numbers are noise and are stored unchanged. Only the plane of high bytes (sign and
exponent) is compressed, with parameters that were best in measurements. Elements of other sizes are compressed whole.
Blocks that do not shrink by a tenth are stored raw. Compressing a sample detects most such blocks cheaply.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiering.errors import ConfigError
from tiering.medium.frame import (
    HEADER_BYTES,
    Codec,
    CorruptReason,
    FrameError,
    FrameHeader,
    parse_header,
    verify_raw,
)

MAX_BLOCK_BYTES = 1 << 32
"""Longest block in bytes that a header may announce; a longer one counts as damaged."""

_SAMPLE_BYTES = 1 << 16
_MAX_WINDOW = 1 << 23
_FRAME_HEADER_MAX = 18

Bytes = NDArray[np.uint8]


def load_zstandard() -> Any:
    """Return the ``zstandard`` package.

    Raises:
        ConfigError: the package is not installed.
    """
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError(
            "compression: zstd needs the zstandard package; "
            "install kv-tiering with its extra s3 (in a clone: pip install '.[s3]')"
        ) from error
    return zstandard


class BlockCodec:
    """Compresses and restores blocks; for one thread, because it keeps zstd contexts and scratch memory.

    Args:
        element_size: bytes of one KV element; 2 selects the split into byte planes.

    Raises:
        ConfigError: the ``zstandard`` package is not installed.
    """

    def __init__(self, element_size: int) -> None:
        self._zstd = load_zstandard()
        self._split = element_size == 2
        self._compressor = self._zstd.ZstdCompressor(
            compression_params=self._zstd.ZstdCompressionParameters(
                strategy=1, min_match=7, hash_log=6, write_content_size=1
            )
        )
        self._decompressor = self._zstd.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        self._high: Bytes = np.empty(0, np.uint8)
        self._low: Bytes = np.empty(0, np.uint8)

    def encode(self, raw: memoryview, into: memoryview) -> tuple[Codec, int]:
        """Encode ``raw`` into ``into``, and return the codec and the bytes written.

        If compression does not pay, nothing is written, and the result is (RAW, len(raw)). ``into`` is at least as long
        as ``raw``.
        """
        source = np.frombuffer(raw, np.uint8)
        target = np.frombuffer(into, np.uint8)
        size = len(source)
        keep_raw = (Codec.RAW, size)
        split = self._split and size % 2 == 0
        plain = size // 2 if split else 0
        largest = size * 9 // 10 - plain
        if split:
            packed = self._scratch_high(plain)
            np.right_shift(source.view(np.uint16), 8, out=packed, casting="unsafe")
        else:
            packed = source
        if len(packed) > 4 * _SAMPLE_BYTES:
            middle = len(packed) // 2
            sample = self._compressor.compress(packed[middle : middle + _SAMPLE_BYTES])
            if len(sample) * len(packed) > largest * _SAMPLE_BYTES:
                return keep_raw
        compressed = self._compressor.compress(packed)
        if len(compressed) > largest:
            return keep_raw
        if split:
            np.copyto(target[:plain], source.view(np.uint16), casting="unsafe")
        np.copyto(target[plain : plain + len(compressed)], np.frombuffer(compressed, np.uint8))
        return (Codec.ZSTD_SPLIT16 if split else Codec.ZSTD), plain + len(compressed)

    def decode(self, codec: int, row: memoryview, stored_length: int, key: bytes) -> None:
        """Replace the payload in ``row[:stored_length]`` by the decoded block of ``len(row)`` bytes.

        Writes only to ``row``.

        Raises:
            FrameError: the payload is not the encoding of exactly ``len(row)`` bytes.
        """
        target = np.frombuffer(row, np.uint8)
        size = len(target)
        if codec == Codec.ZSTD and stored_length <= size:
            packed = self._scratch_high(stored_length)
            np.copyto(packed, target[:stored_length])
            self._inflate(packed, target, key)
        elif codec == Codec.ZSTD_SPLIT16 and size % 2 == 0 and size // 2 < stored_length <= size:
            plain = size // 2
            if len(self._low) < plain:
                self._low = np.empty(plain, np.uint8)
            low = self._low[:plain]
            high = self._scratch_high(plain)
            np.copyto(low, target[:plain])
            self._inflate(target[plain:stored_length], high, key)
            words = target.view(np.uint16)
            np.copyto(words, high)
            np.left_shift(words, 8, out=words)
            np.bitwise_or(words, low, out=words)
        else:
            raise FrameError(CorruptReason.CODEC, key)

    def _inflate(self, packed: Bytes, into: Bytes, key: bytes) -> None:
        try:
            frame = self._zstd.get_frame_parameters(packed[:_FRAME_HEADER_MAX].tobytes())
            if frame.content_size != len(into) or frame.dict_id or frame.window_size > max(len(into), _MAX_WINDOW):
                raise FrameError(CorruptReason.CODEC, key)
            written = self._decompressor.stream_reader(packed).readinto(into.data)
        except self._zstd.ZstdError as error:
            raise FrameError(CorruptReason.CODEC, key) from error
        if written != len(into):
            raise FrameError(CorruptReason.CODEC, key)

    def _scratch_high(self, size: int) -> Bytes:
        if len(self._high) < size:
            self._high = np.empty(size, np.uint8)
        return self._high[:size]


class FrameVerifier:
    """Verifies stored blocks outside of loads: every checksum, after decoding.

    For one thread, because it keeps buffers.
    """

    def __init__(self) -> None:
        self._codec: BlockCodec | None = None

    def verify(
        self, header: memoryview, stored: memoryview, *, fingerprint: str = "", key: bytes | None = None
    ) -> FrameHeader:
        """Return the header of a block after its checksums, lengths and owner were verified.

        Args:
            header: stored bytes that begin with the header.
            stored: the payload as stored, possibly followed by padding.
            fingerprint: expected fingerprint in hexadecimal; default: any.
            key: expected key; default: any.

        Raises:
            FrameError: the block is damaged, or another one.
            ConfigError: the block is compressed, and the package for that is not installed.
        """
        found = parse_header(header[:HEADER_BYTES])
        if isinstance(found, CorruptReason):
            raise FrameError(found)
        name = found.key or found.key_digest
        if fingerprint and found.fingerprint.hex() != fingerprint:
            raise FrameError(CorruptReason.NAMESPACE, name)
        if key is not None and not found.names(key):
            raise FrameError(CorruptReason.KEY, name)
        payload = stored[: found.stored_length]
        if len(payload) != found.stored_length or found.raw_length > MAX_BLOCK_BYTES:
            raise FrameError(CorruptReason.LENGTH, name)
        verify_raw(found, self._decoded(found, payload, name), name)
        return found

    def _decoded(self, header: FrameHeader, payload: memoryview, name: bytes) -> memoryview:
        if header.codec == Codec.RAW:
            return payload
        if header.stored_length > header.raw_length:
            raise FrameError(CorruptReason.LENGTH, name)
        if self._codec is None:
            self._codec = BlockCodec(2)
        row = memoryview(bytearray(header.raw_length))
        row[: len(payload)] = payload
        self._codec.decode(header.codec, row, header.stored_length, name)
        return row
