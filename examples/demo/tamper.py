"""Damage to blocks behind the tiers' back, as a failing disk or a stray write does it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_MAGIC = b"\x89KVTIER\n"
"""First bytes of every frame; see :mod:`tiering.medium.frame`."""
_KEY_OFFSET = 72
"""Where a frame has its key; see :mod:`tiering.medium.frame`."""

_INTO_FRAME = 9_000
"""Bytes from the beginning of a frame to the one that is flipped: behind any header, inside the block."""


def flip_blocks(directory: Path, keys: Iterable[bytes]) -> int:
    """Flip one byte of every copy of the blocks ``keys`` in the files under ``directory``.

    Returns:
        The number of flipped bytes.
    """
    flipped = 0
    for path in sorted(file for file in directory.rglob("*") if file.is_file()):
        data = path.read_bytes()
        for key in keys:
            position = data.find(key)
            while position >= 0:
                start = position - _KEY_OFFSET
                if start >= 0 and data[start : start + len(_MAGIC)] == _MAGIC and start + _INTO_FRAME < len(data):
                    with path.open("r+b") as file:
                        file.seek(start + _INTO_FRAME)
                        file.write(bytes([data[start + _INTO_FRAME] ^ 0x40]))
                    flipped += 1
                position = data.find(key, position + 1)
    return flipped
