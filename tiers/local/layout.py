"""The layout of a local tier's directory, and the shape of its segments.

   <path>[/replica-<r>]/
     lock                                      the owner of the directory
     slots-<slot bytes>-<slots>-<number>       a segment: <slots> slots, one after another
     checkpoint, written-<generation>          the block table at one moment, and the segments written since
     documents/<name>                          the namespaces' documents, and the list of bad slots

Slot s is slot s % slots of segment s // slots. A slot is one page with the frame's header, then the row.

Segments with another slot size or count belong to another layout. This engine cannot use them, and deletes them, oldest
first, when room is needed. All namespaces share the segments of one shape; each block's header names its namespace.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tiering import ConfigError

PAGE = 4096
"""Bytes of a slot's header. Every offset, length and address of O_DIRECT is a multiple of this number."""

REPLICA_PREFIX = "replica-"
"""Begins the names of the subdirectories of data-parallel replicas. They share the directory above."""

DIRECTORY_MODE = 0o700
"""Permissions of directories: their owner's alone."""

FRESH = ".new"
"""Ends the name of a file that is not complete yet."""

_REPLICA = re.compile(r"[A-Za-z0-9_.-]{1,64}")

_NUMBER = "(0|[1-9][0-9]{0,15})"
_SEGMENT = re.compile(rf"slots-{_NUMBER}-{_NUMBER}-([0-9]{{6,16}})")
_MIN_SEGMENTS = 4
MAX_SEGMENTS = 65_536
"""Most segments of one directory, unless they have at least :data:`LARGE_SEGMENT` bytes."""
LARGE_SEGMENT = 1 << 30
"""Bytes of a segment that is large enough for a disk of any size."""
_BOOKKEEPING_PER_SLOT = 256
"""Bytes of bookkeeping per slot: a key and a few numbers in each of two checkpoints (old and new)."""
_BOOKKEEPING = 64 * 1024


@dataclass(frozen=True, slots=True)
class SegmentGeometry:
    """The shape of the segments."""

    slot_bytes: int
    """Bytes of a slot, header included."""
    slots_per_segment: int
    max_segments: int

    @classmethod
    def plan(cls, capacity: int, block_bytes: int, segment_size: int) -> SegmentGeometry:
        """Return the shape for blocks of at most ``block_bytes``.

        The shape depends on ``capacity`` only if that is below four segments. A larger capacity can therefore grow and
        shrink with its blocks kept.

        Args:
            capacity: bytes of everything in the directory.
            block_bytes: bytes of the largest block, without header.
            segment_size: bytes of a segment if the capacity allows four of them.

        Raises:
            ConfigError: ``capacity`` is below one block, or makes more than :data:`MAX_SEGMENTS` small segments.
        """
        slot_bytes = PAGE + -(-block_bytes // PAGE) * PAGE
        usable = (capacity - _BOOKKEEPING) * slot_bytes // (slot_bytes + _BOOKKEEPING_PER_SLOT)
        if usable < slot_bytes:
            least = cls(slot_bytes, 1, 1).least_capacity
            raise ConfigError(
                f"capacity: {capacity} bytes is below one block; a block takes {slot_bytes}, so set at least {least}"
            )
        target = segment_size
        if usable < _MIN_SEGMENTS * target:
            target = usable // _MIN_SEGMENTS
        slots = max(1, target // slot_bytes)
        if usable // (slots * slot_bytes) > MAX_SEGMENTS and segment_size < LARGE_SEGMENT:
            least = min(-(-usable // (slot_bytes * MAX_SEGMENTS)) * slot_bytes, LARGE_SEGMENT)
            raise ConfigError(
                f"segment_size: {segment_size} bytes would make {usable // (slots * slot_bytes)} segment files in a "
                f"capacity of {capacity} bytes; at most {MAX_SEGMENTS} are allowed, so set at least {least}"
            )
        return cls(slot_bytes, slots, usable // (slots * slot_bytes))

    @property
    def segment_bytes(self) -> int:
        """Bytes of a segment file."""
        return self.slot_bytes * self.slots_per_segment

    @property
    def least_capacity(self) -> int:
        """Smallest capacity that holds a block, in bytes."""
        return self.slot_bytes + _BOOKKEEPING_PER_SLOT + _BOOKKEEPING

    @property
    def num_slots(self) -> int:
        """Slots that the capacity allows."""
        return self.slots_per_segment * self.max_segments

    @property
    def bad_slots_document(self) -> str:
        """Name of the document that lists the bad slots of segments of this shape."""
        return f"bad-slots-{self.slot_bytes}-{self.slots_per_segment}"

    def locate(self, slot: int) -> tuple[int, int]:
        """Return (segment, byte offset in the segment) of ``slot``."""
        segment, position = divmod(slot, self.slots_per_segment)
        return segment, position * self.slot_bytes

    def segment_name(self, number: int) -> str:
        """Return the file name of segment ``number``."""
        return f"slots-{self.slot_bytes}-{self.slots_per_segment}-{number:06d}"

    def segment_number(self, name: str) -> int | None:
        """Return the number of the segment file ``name``; None if the name is not one of this shape."""
        slot_bytes, slots, number = parse_segment(name) or (0, 0, 0)
        return number if (slot_bytes, slots) == (self.slot_bytes, self.slots_per_segment) else None


def parse_segment(name: str) -> tuple[int, int, int] | None:
    """Return slot bytes, slots and number of the segment file ``name`` of any shape; None for other names.

    A copy with another ending or other digits is not a segment.
    """
    match = _SEGMENT.fullmatch(name)
    if match is None or f"{int(match[3]):06d}" != match[3]:
        return None
    return int(match[1]), int(match[2]), int(match[3])


def entries_of(directory: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of ``directory`` without a look at each file."""
    with os.scandir(directory) as entries:
        yield from entries


def tier_directory(path: str, replica: str | None) -> Path:
    """Return the directory of one engine.

    Args:
        path: the configured directory.
        replica: the data-parallel replica, which uses a subdirectory (None: no replica).

    Raises:
        ConfigError: ``replica`` cannot be part of a path.
    """
    try:
        # A change of the working directory must not lead to another directory.
        root = Path(path).expanduser().absolute()
    except FileNotFoundError as error:
        raise ConfigError(f"path: {path!r} is relative, and the working directory is gone; make it absolute") from error
    if replica is None:
        return root
    if not _REPLICA.fullmatch(replica) or replica.strip(".") == "":
        raise ConfigError(
            f"replica: {replica!r} cannot name a subdirectory; allowed are letters, digits, '.', '_' and '-'"
        )
    return root / f"{REPLICA_PREFIX}{replica}"


def replicas_in(directory: Path) -> list[str]:
    """Return the names of replicas with a subdirectory in ``directory``; others are no engine's."""
    names = (path.name.removeprefix(REPLICA_PREFIX) for path in directory.glob(f"{REPLICA_PREFIX}*"))
    return sorted(name for name in names if _REPLICA.fullmatch(name))


def mount_point(directory: Path) -> Path:
    """Return the mount point of the file system that contains the existing ``directory``."""
    path = directory.resolve()
    while not os.path.ismount(path):
        path = path.parent
    return path


def used_bytes(root: Path) -> int:
    """Return the bytes on disk of everything in ``root``; see :func:`used_bytes_of_few`."""
    return used_bytes_of_few(root, sys.maxsize) or 0


def used_bytes_of_few(root: Path, most: int) -> int | None:
    """Return the bytes on disk of everything in ``root``, or None if there are more than ``most`` files.

    A look at each of very many files takes seconds. Other replicas' subdirectories do not count, nor do directories
    that this user may not read (``lost+found`` of a file system's root).
    """
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
