"""The block frame: what makes a block on a medium say by itself what it is, so that nothing else is ever taken for it.

A frame is a header of 128 bytes, zeros up to the store's ``header_bytes``, and the payload.  All numbers are little-endian::

    offset  bytes  field
         0      8  magic
         8      2  format version (tiering.api.namespace.FORMAT_VERSION)
        10      1  codec of the payload (Codec)
        11      1  zero
        12      4  length of the key
        16      8  raw length: bytes of the block
        24      8  stored length: bytes of the payload, alignment padding left out
        32      8  sequence number: of two frames of one key, the higher is the newer
        40     16  xxh3-128 of the RAW block (checked after decoding)
        56     16  namespace fingerprint
        72     48  the key, zero padded; of a key longer than 48 bytes, its xxh3-128 instead
       120      8  xxh3-64 of the 120 bytes before

A key longer than 48 bytes is verified on reads like any other, but a scan of headers alone cannot name it.  The
checksums detect accidents (flips, truncation, misdirected and torn writes), not somebody who forges frames.
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
"""Bytes of a header, checksum included."""

MAX_INLINE_KEY = 48
"""Longest key, in bytes, that a header holds itself."""

MAGIC = b"\x89KVTIER\n"

_HEADER = struct.Struct("<8sHBxIQQQ16s16s48sQ")
_CHECKSUM = struct.Struct("<Q")
_CHECKED_BYTES = HEADER_BYTES - _CHECKSUM.size


class Codec(enum.IntEnum):
    """How the payload of a frame is encoded."""

    RAW = 0
    """The block as it is."""
    ZSTD = 1
    """One zstd frame."""
    ZSTD_SPLIT16 = 2
    """Elements of two bytes: all low bytes as they are, then one zstd frame of all high bytes."""


_KNOWN_CODECS = frozenset(int(codec) for codec in Codec)


class CorruptReason(enum.Enum):
    """Why a frame was refused."""

    MAGIC = "no frame there"
    VERSION = "another format version"
    HEADER = "header checksum"
    NAMESPACE = "another namespace"
    KEY = "another block's key"
    LENGTH = "wrong length"
    CODEC = "unknown codec or malformed compressed data"
    PAYLOAD = "payload checksum"


class FrameError(CorruptBlockError):
    """A frame that was refused, and why."""

    def __init__(self, reason: CorruptReason, key: bytes = b"") -> None:
        super().__init__(f"block {key.hex()} refused: {reason.value}" if key else f"frame refused: {reason.value}")
        self.reason = reason


class FrameHeader(NamedTuple):
    """A header whose checksum was right.  ``key`` is None if it is too long to be held in a header (see ``key_digest``)."""

    codec: int
    raw_length: int
    stored_length: int
    sequence: int
    digest: bytes
    fingerprint: bytes
    key: bytes | None
    key_length: int
    key_digest: bytes

    def names(self, key: bytes) -> bool:
        """Whether this is a frame of ``key``."""
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
    """Write a header into the first 128 bytes of ``into``; what follows them is left alone.

    ``digest``: xxh3-128 of the raw block, 16 bytes.  ``stored_length`` is ``raw_length`` if left out.
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
    """The header at the start of ``view``, or why there is none.  Never raises, whatever the bytes are."""
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


def parse_headers(buffer: memoryview, stride: int) -> list[FrameHeader | CorruptReason]:
    """The headers at every ``stride`` bytes of ``buffer`` (format "B"): the batch form of :func:`parse_header`, for scans."""
    return [parse_header(buffer[start : start + HEADER_BYTES]) for start in range(0, len(buffer), stride)]


def verify(view: memoryview, *, key: bytes, fingerprint: bytes, raw_length: int) -> FrameHeader:
    """The header at the start of ``view``, which must be that of a block of ``key`` in this namespace.

    Raises :class:`FrameError` otherwise.  The payload is yet to be checked: :func:`verify_raw`.
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
    """Raises :class:`FrameError` unless ``raw`` is the block that ``header`` describes."""
    if len(raw) != header.raw_length:
        raise FrameError(CorruptReason.LENGTH, key)
    if xxh3_128_digest(raw) != header.digest:
        raise FrameError(CorruptReason.PAYLOAD, key)


class SequenceSource:
    """Sequence numbers that only grow, over restarts too.

    They begin at the wall clock's nanoseconds, which a process cannot overtake by counting frames; a medium that finds
    higher ones (the clock was set back) says so with :meth:`advance_past` before it writes.  Any thread may call.
    """

    def __init__(self, first: int | None = None) -> None:
        self._next = time.time_ns() if first is None else first
        self._lock = threading.Lock()

    def take(self, count: int) -> int:
        """The first of ``count`` numbers that nobody else gets."""
        with self._lock:
            first = self._next
            self._next = first + count
        return first

    def advance_past(self, seen: int) -> None:
        """Hand out only numbers above ``seen`` from now on."""
        with self._lock:
            self._next = max(self._next, seen + 1)


SEQUENCE = SequenceSource()
"""The process's source of sequence numbers."""
