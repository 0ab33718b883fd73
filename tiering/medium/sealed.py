"""Small documents beside the blocks: a magic word, fields, content, and a checksum of all of them."""

from __future__ import annotations

import struct
from typing import Any

from xxhash import xxh3_128_digest

_DIGEST_BYTES = 16


class SealedLayout:
    """The layout of one kind and version of documents.

    Args:
        magic: the first bytes of each document, which name its kind and version.
        fields: the fields behind them, in the notation of :mod:`struct`, little-endian and without gaps.
    """

    def __init__(self, magic: bytes, fields: str) -> None:
        self._magic = magic
        self._fields = struct.Struct(f"<{fields}")
        self._start = len(magic) + self._fields.size
        self.size = self._start + _DIGEST_BYTES
        """Size of a document without content in bytes."""

    def pack(self, *values: Any, content: bytes = b"") -> bytes:
        """Return a document with these values of the fields, and with ``content`` behind them."""
        body = b"".join([self._magic, self._fields.pack(*values), content])
        return body + xxh3_128_digest(body)

    def parse(self, data: bytes) -> tuple[tuple[Any, ...], bytes] | None:
        """Return fields and content of a document; None if it is damaged, or of another kind or version.

        Args:
            data: bytes of the document, of any origin.
        """
        end = len(data) - _DIGEST_BYTES
        if (
            end < self._start
            or not data.startswith(self._magic)
            or xxh3_128_digest(memoryview(data)[:end]) != data[end:]
        ):
            return None
        return self._fields.unpack_from(data, len(self._magic)), data[self._start : end]
