"""Where things are in a local tier's directory, and the arithmetic of slots and segments.

    <path>[/replica-<r>]/
      lock                                      who owns the directory
      slots-<slot bytes>-<slots>-<number>       a segment: <slots> slots, one after another
      checkpoint, written-<generation>          the table as of a moment, and which segments were written since
      documents/<name>                          the namespaces' documents, and the list of bad slots

Slot s is slot s % slots of segment s // slots.  A slot is a page with the frame's header, then the row.  Segments of
another slot size or count are those of another layout: nobody here can use them, and they are deleted, oldest first,
when room is needed. Segments of the same shape are shared by all namespaces; the header of each block tells them apart.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from tiering.errors import ConfigError

PAGE = 4096
"""Bytes of a slot's header, and what every offset, length and address of O_DIRECT is a multiple of."""

REPLICA_PREFIX = "replica-"
"""Begins the names of the subdirectories of data-parallel replicas, which share the directory above them."""

FRESH = ".new"
"""The ending of a file that is not whole yet."""

_NUMBER = "(0|[1-9][0-9]{0,15})"
_SEGMENT = re.compile(rf"slots-{_NUMBER}-{_NUMBER}-([0-9]{{6,16}})")
_REPLICA = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MIN_SEGMENTS = 4
_BOOKKEEPING_PER_SLOT = 256
"""Bytes that a slot costs beside itself: two checkpoints (the old and the new one) of a key and a few numbers."""
_BOOKKEEPING = 64 * 1024


def round_up(size: int) -> int:
    """``size`` rounded up to a page."""
    return -(-size // PAGE) * PAGE


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of the segments: bytes of a slot, slots of a segment, segments that the capacity allows."""

    slot_bytes: int
    slots_per_segment: int
    max_segments: int

    @classmethod
    def plan(cls, capacity: int, block_bytes: int, segment_size: int) -> Geometry:
        """The shape for blocks of at most ``block_bytes``.

        It depends on ``capacity`` only when that is below four segments, so that a capacity can grow and shrink with
        the blocks kept.  Raises :class:`ConfigError` if ``capacity`` is below one block.
        """
        slot_bytes = PAGE + round_up(block_bytes)
        usable = (capacity - _BOOKKEEPING) * slot_bytes // (slot_bytes + _BOOKKEEPING_PER_SLOT)
        if usable < slot_bytes:
            least = slot_bytes + _BOOKKEEPING_PER_SLOT + _BOOKKEEPING
            raise ConfigError(
                f"capacity: {capacity} bytes is below one block; a block takes {slot_bytes}, so at least {least}"
            )
        target = segment_size
        if usable < _MIN_SEGMENTS * target:
            target = usable // _MIN_SEGMENTS
        slots = max(1, target // slot_bytes)
        return cls(slot_bytes, slots, usable // (slots * slot_bytes))

    @property
    def segment_bytes(self) -> int:
        """Bytes of a segment file."""
        return self.slot_bytes * self.slots_per_segment

    @property
    def num_slots(self) -> int:
        """Slots that the capacity allows."""
        return self.slots_per_segment * self.max_segments

    @property
    def bad_slots_document(self) -> str:
        """The name of the document that lists the bad slots of segments of this shape."""
        return f"bad-slots-{self.slot_bytes}-{self.slots_per_segment}"

    def locate(self, slot: int) -> tuple[int, int]:
        """(segment, byte offset in it) of ``slot``."""
        segment, position = divmod(slot, self.slots_per_segment)
        return segment, position * self.slot_bytes

    def segment_name(self, number: int) -> str:
        """The file name of segment ``number``."""
        return f"slots-{self.slot_bytes}-{self.slots_per_segment}-{number:06d}"

    def segment_number(self, name: str) -> int | None:
        """The number of the segment called ``name``; None if it is not one of this shape."""
        match = _SEGMENT.fullmatch(name)
        if match is None:
            return None
        number = int(match[3])
        return number if name == self.segment_name(number) else None


def is_segment(name: str) -> bool:
    """True for the exact name of a segment of any shape; a copy with another ending, or with other digits, is not one."""
    match = _SEGMENT.fullmatch(name)
    return match is not None and f"{int(match[3]):06d}" == match[3]


def tier_directory(path: str, replica: str | None) -> Path:
    """The directory of one engine.  Raises :class:`ConfigError` for a replica that cannot be part of a path."""
    root = Path(path).expanduser()
    if replica is None:
        return root
    if not _REPLICA.fullmatch(replica) or replica.strip(".") == "":
        raise ConfigError(
            f"replica: {replica!r} cannot name a subdirectory; allowed are letters, digits, '.', '_' and '-'"
        )
    return root / f"{REPLICA_PREFIX}{replica}"


def mount_point(directory: Path) -> Path:
    """Where the file system of ``directory``, which is there, is mounted."""
    path = directory.resolve()
    while not os.path.ismount(path):
        path = path.parent
    return path


def used_bytes(root: Path) -> int:
    """Bytes on the disk of everything in ``root``, other replicas' subdirectories aside.

    Directories that this user may not read (``lost+found`` of a file system's root) do not count.
    """
    return used_bytes_of_few(root, sys.maxsize) or 0


def used_bytes_of_few(root: Path, most: int) -> int | None:
    """The same, but None if there are more than ``most`` files: looking at each of very many takes seconds."""
    total = files = 0
    pending = [str(root)]
    for directory in pending:
        try:
            entries = os.scandir(directory)
        except (PermissionError, FileNotFoundError):
            if directory == pending[0]:
                raise
            continue
        with entries:
            for entry in entries:
                if entry.is_symlink():
                    continue
                if entry.is_dir(follow_symlinks=False):
                    if not (entry.name.startswith(REPLICA_PREFIX) and Path(entry.path).parent == root):
                        pending.append(entry.path)
                    continue
                files += 1
                if files > most:
                    return None
                try:
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                except FileNotFoundError:
                    continue
    return total
