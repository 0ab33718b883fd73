"""Frame of a block on a medium, which identifies the block and protects it with checksums.

A reader can therefore never take other bytes for the block. A frame is a header of 128 bytes, zeros up to the store's
``header_bytes``, and the payload. All numbers are little-endian::

    offset  bytes  field
         0      8  magic
         8      2  format version (tiering.api.namespace.FORMAT_VERSION)
        10      1  codec of the payload (Codec)
        11      1  zero
        12      4  length of the key
        16      8  raw length: bytes of the block
        24      8  stored length: bytes of the payload, alignment padding left out
        32      8  sequence number: of two frames of one key, the higher is newer
        40     16  xxh3-128 of the RAW block (checked after decoding)
        56     16  namespace fingerprint
        72     48  the key, zero padded; of a key longer than 48 bytes, its xxh3-128 instead
       120      8  xxh3-64 of the 120 bytes before

A key longer than 48 bytes is verified on reads like any other, but a scan of headers alone cannot recover it. The
checksums detect accidents (flips, truncation, misdirected and torn writes), not forged frames.
"""

from __future__ import annotations

import enum
import struct
import threading
import time
from typing import NamedTuple

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from tiering.api.namespace import FORMAT_VERSION
from tiering.errors import CorruptBlockError

HEADER_BYTES = 128
"""Length of a header in bytes, checksum included."""

MAX_INLINE_KEY = 48
"""Length in bytes of the longest key that a header contains in full."""

MAGIC = b"\x89KVTIER\n"
"""First bytes of every frame."""

_HEADER = struct.Struct("<8sHBxIQQQ16s16s48sQ")
_CHECKSUM = struct.Struct("<Q")
_CHECKED_BYTES = HEADER_BYTES - _CHECKSUM.size


class Codec(enum.IntEnum):
    """Encoding of a frame's payload."""

    RAW = 0
    """The block unchanged."""
    ZSTD = 1
    """One zstd frame."""
    ZSTD_SPLIT16 = 2
    """Elements of two bytes: all low bytes as they are, then one zstd frame of all high bytes."""


_KNOWN_CODECS = frozenset(int(codec) for codec in Codec)


class CorruptReason(enum.Enum):
    """Reason why a frame was refused."""

    MAGIC = "no frame there"
    VERSION = "another format version"
    HEADER = "header checksum"
    NAMESPACE = "another namespace"
    KEY = "another block's key"
    LENGTH = "wrong length"
    CODEC = "unknown codec or malformed compressed data"
    PAYLOAD = "payload checksum"


class FrameError(CorruptBlockError):
    """Refusal of a frame, with the reason."""

    def __init__(self, reason: CorruptReason, key: bytes = b"") -> None:
        super().__init__(f"block {key.hex()} refused: {reason.value}" if key else f"frame refused: {reason.value}")
        self.reason = reason
        """Reason of the refusal."""


class FrameHeader(NamedTuple):
    """Fields of a header with a correct checksum."""

    codec: int
    """Encoding of the payload (:class:`Codec`)."""
    raw_length: int
    """Bytes of the block."""
    stored_length: int
    """Bytes of the payload, without alignment padding."""
    sequence: int
    """Sequence number; of two frames of one key, the higher is newer."""
    digest: bytes
    """xxh3-128 of the raw block, 16 bytes."""
    fingerprint: bytes
    key: bytes | None
    """Key of the block; None if it is longer than :data:`MAX_INLINE_KEY` bytes (see ``key_digest``)."""
    key_length: int
    key_digest: bytes
    """xxh3-128 of a key that is longer than :data:`MAX_INLINE_KEY` bytes; empty for other keys."""

    def names(self, key: bytes) -> bool:
        """Return True if this is a frame of ``key``."""
        if self.key is not None:
            return self.key == key
        return self.key_length == len(key) and self.key_digest == xxh3_128_digest(key)


def encode_header(
    into: memoryview,
    *,
    key: bytes,
    fingerprint: bytes,
    sequence: int,
    raw_length: int,
    digest: bytes,
    codec: Codec = Codec.RAW,
    stored_length: int | None = None,
) -> None:
    """Write a header into the first 128 bytes of ``into``, and leave the other bytes unchanged.

    Args:
        into: buffer of at least 128 bytes.
        key: key of the block.
        fingerprint: fingerprint of the namespace.
        sequence: sequence number of the frame.
        raw_length: bytes of the block.
        digest: xxh3-128 of the raw block, 16 bytes.
        codec: encoding of the payload; default raw.
        stored_length: bytes of the payload; default ``raw_length``.
    """
    _HEADER.pack_into(
        into,
        0,
        MAGIC,
        FORMAT_VERSION,
        codec,
        len(key),
        raw_length,
        raw_length if stored_length is None else stored_length,
        sequence,
        digest,
        fingerprint,
        key if len(key) <= MAX_INLINE_KEY else xxh3_128_digest(key),
        0,
    )
    _CHECKSUM.pack_into(into, _CHECKED_BYTES, xxh3_64_intdigest(into[:_CHECKED_BYTES]))


def parse_header(view: memoryview) -> FrameHeader | CorruptReason:
    """Return the header at the start of ``view``, or the reason why there is none; never raises."""
    if len(view) < HEADER_BYTES:
        return CorruptReason.LENGTH
    magic, version, codec, key_length, raw, stored, sequence, digest, fingerprint, key, checksum = _HEADER.unpack_from(
        view
    )
    if magic != MAGIC:
        return CorruptReason.MAGIC
    if version != FORMAT_VERSION:
        return CorruptReason.VERSION
    if xxh3_64_intdigest(view[:_CHECKED_BYTES]) != checksum:
        return CorruptReason.HEADER
    if codec not in _KNOWN_CODECS:
        return CorruptReason.CODEC
    if key_length <= MAX_INLINE_KEY:
        return FrameHeader(codec, raw, stored, sequence, digest, fingerprint, key[:key_length], key_length, b"")
    return FrameHeader(codec, raw, stored, sequence, digest, fingerprint, None, key_length, key[:16])


def verify(view: memoryview, *, key: bytes, fingerprint: bytes, raw_length: int) -> FrameHeader:
    """Return the header at the start of ``view`` after verifying that it belongs to the expected block.

    The payload remains to be verified with :func:`verify_raw`.

    Args:
        view: buffer that begins with the header.
        key: expected key.
        fingerprint: expected fingerprint of the namespace.
        raw_length: expected bytes of the block.

    Raises:
        FrameError: there is no valid header, or it belongs to another block.
    """
    header = parse_header(view)
    if isinstance(header, CorruptReason):
        raise FrameError(header, key)
    if header.fingerprint != fingerprint:
        raise FrameError(CorruptReason.NAMESPACE, key)
    if not header.names(key):
        raise FrameError(CorruptReason.KEY, key)
    if header.raw_length != raw_length:
        raise FrameError(CorruptReason.LENGTH, key)
    if header.stored_length > raw_length or (header.codec == Codec.RAW and header.stored_length != raw_length):
        raise FrameError(CorruptReason.LENGTH, key)
    return header


def verify_raw(header: FrameHeader, raw: memoryview, key: bytes) -> None:
    """Verify that ``raw`` is the block that ``header`` describes.

    Raises:
        FrameError: it is not.
    """
    if len(raw) != header.raw_length:
        raise FrameError(CorruptReason.LENGTH, key)
    if xxh3_128_digest(raw) != header.digest:
        raise FrameError(CorruptReason.PAYLOAD, key)


class SequenceSource:
    """Source of sequence numbers that only grow, also over restarts; any thread may call it.

    The numbers begin at the wall clock's nanoseconds, which a process cannot overtake by counting frames. If a medium
    holds higher numbers (the clock was set back), its tier calls :meth:`advance_past` before it writes.
    """

    def __init__(self, first: int | None = None) -> None:
        self._next = time.time_ns() if first is None else first
        self._lock = threading.Lock()

    def take(self, count: int) -> int:
        """Return the first of ``count`` numbers that no other caller gets."""
        with self._lock:
            first = self._next
            self._next = first + count
        return first

    def advance_past(self, seen: int) -> None:
        """Return only numbers above ``seen`` from now on."""
        with self._lock:
            self._next = max(self._next, seen + 1)


SEQUENCE = SequenceSource()
"""Source of sequence numbers of this process."""
