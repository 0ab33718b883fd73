"""Verification of stored blocks outside of loads: every checksum, after decoding."""

from __future__ import annotations

from tiering.medium.codec import BlockCodec
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


class FrameVerifier:
    """Verifies frames; for one thread, because it keeps buffers."""

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
