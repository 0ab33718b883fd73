"""The segment files: reads and writes of runs of slots, open descriptors, and creation ahead of need."""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from tiering.secondary.files import Files
from tiers.local.layout import FRESH, PAGE, Geometry, is_segment, used_bytes
from tiers.local.syncs import SyncLedger

logger = logging.getLogger("kv_tiering.local")

MAX_OPEN = 256
"""Segments whose descriptors stay open.

Others are opened for each call, which takes a few microseconds.
"""

BUFFERS_PER_CALL = min(os.sysconf("SC_IOV_MAX"), 1024)
"""Buffers that one vectored call may have."""

FILL_BYTES = 4 << 20
"""Bytes of one piece when a new segment is written ahead."""

_DROP_AFTER = 64 << 20

_Vectored = Callable[[int, Sequence[memoryview], int], int]


@dataclass(frozen=True, slots=True)
class Damage:
    """The damage of one segment's file."""

    number: int
    """Number of the segment."""
    identity: tuple[int, int]
    """Device and inode of the file before the damage."""
    reason: str
    """The damage as text for people; continues a sentence that begins with the file's name."""


class Segments:
    """The segment files of one directory and shape.

    Reads and writes may come from any thread. Methods raise :class:`OSError`.

    Args:
        directory: The tier's directory.
        geometry: The shape of the segments.
        files: File operations to use.
        read_only: The file system takes no writes (default: False).
    """

    def __init__(self, directory: Path, geometry: Geometry, files: Files, *, read_only: bool = False) -> None:
        self.directory = directory
        self.geometry = geometry
        self.read_only = read_only
        self.direct = False
        """True with O_DIRECT. The default is False.

        Without it, calls use the page cache and drop their pages afterwards.
        """
        self.files = files
        self._lock = threading.Lock()
        self._room = threading.Lock()
        self._identities: dict[int, tuple[int, int]] = {}
        """Device and inode of each segment in use."""
        self._fds: dict[int, int] = {}
        self._unsynced: dict[int, list[tuple[int, int]]] = {}
        """Offset and length of the writes through the page cache to each segment since its last sync."""
        self._suspects: deque[tuple[int, int, int]] = deque()
        self._ledgers: dict[int, SyncLedger] = {}
        self._unreserved = False

    # ------------------------------------------------------------------------------------------------------ descriptors

    @property
    def _flags(self) -> int:
        return (os.O_RDONLY if self.read_only else os.O_RDWR) | (os.O_DIRECT if self.direct else 0)

    @contextlib.contextmanager
    def _descriptor(self, segment: int, *, reading: bool = False) -> Iterator[int]:
        fd = self._fds.get(segment)
        if fd is None and len(self._fds) < MAX_OPEN:
            with self._lock:
                fd = self._fds.get(segment)
                if fd is None and (fd := self._open(segment, self._flags, refused=reading)) is not None:
                    self._fds[segment] = fd
        if fd is not None:
            yield fd
            return
        passing = self._open(segment, self._flags, refused=reading)
        if passing is None:
            # The file system was made read-only since this tier was opened. Its blocks can still be read.
            passing = self._open(segment, os.O_RDONLY | self._flags & os.O_DIRECT)
        try:
            yield passing
        finally:
            self.files.close(passing)

    @overload
    def _open(self, segment: int, flags: int) -> int: ...

    @overload
    def _open(self, segment: int, flags: int, *, refused: bool) -> int | None: ...

    def _open(self, segment: int, flags: int, *, refused: bool = False) -> int | None:
        """Return a descriptor of ``segment``; None if ``refused`` is True and the file system is read-only.

        Raises:
            OSError: The file cannot be opened; with ENOENT if another file is in the segment's place.
        """
        path = self.directory / self.geometry.segment_name(segment)
        try:
            fd = self.files.open(path, flags)
        except OSError as error:
            if refused and error.errno == errno.EROFS:
                return None
            raise
        found = os.fstat(fd)
        if self._identities.get(segment) != (found.st_dev, found.st_ino):
            self.files.close(fd)
            raise OSError(errno.ENOENT, "the segment's file was replaced by another file", str(path))
        return fd

    def close(self) -> None:
        """Close all descriptors. No call may be running."""
        while self._fds:
            self.files.close(self._fds.popitem()[1])

    # ------------------------------------------------------------------------------------------------------------- data

    def write(self, segment: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write ``buffers``, whole pages, one after another at ``offset``."""
        if self.read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        with self._descriptor(segment) as fd:
            written = self._move(self.files.pwritev, fd, list(buffers), offset)
            if written < sum(map(len, buffers)):
                raise OSError(errno.EIO, "only a part of the bytes could be written")
            if not self.direct:
                self._drop_behind(segment, fd, offset, written)

    def read(self, segment: int, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill ``buffers``, whole pages, from ``offset`` on, and return the bytes read.

        The result is less than the buffers' length only at the end of the file.
        """
        with self._descriptor(segment, reading=True) as fd:
            done = self._move(self.files.preadv, fd, list(buffers), offset)
            if not self.direct:
                self.files.drop_cached(fd, offset, done)
            return done

    def sync(self, segment: int) -> None:
        """Wait until the writes to ``segment`` are on the device.

        :meth:`ledger` decides which writes that covers.
        """
        with self._descriptor(segment) as fd:
            self.files.fdatasync(fd)

    def forget_cached(self, segment: int, offset: int, length: int) -> None:
        """Make the next read of a range come from the device."""
        if not self.direct:
            with self._descriptor(segment) as fd:
                self.files.drop_cached(fd, offset, length)

    def ledger(self, segment: int) -> SyncLedger:
        """Return the record of the syncs of ``segment``."""
        ledger = self._ledgers.get(segment)
        return ledger if ledger is not None else self._ledgers.setdefault(segment, SyncLedger())

    def _move(self, call: _Vectored, fd: int, buffers: list[memoryview], offset: int) -> int:
        """Repeat ``call`` until everything is moved or nothing moves, and return the bytes moved.

        With O_DIRECT, a short call is continued at the start of the page in which it stopped.
        """
        total = sum(map(len, buffers))
        done = call(fd, buffers, offset)
        if done == total:
            return done
        while 0 < done < total:
            start = done // PAGE * PAGE if self.direct else done
            more = call(fd, _tail(buffers, start), offset + start)
            if start + more <= done:
                break
            done = start + more
        return done

    def _drop_behind(self, segment: int, fd: int, offset: int, count: int) -> None:
        """Keep written pages from filling the page cache.

        Only clean pages can be dropped, so the pages are synced first.

        Raises:
            OSError: The sync failed. All writes since the last sync are suspect then (:meth:`take_suspects`).
        """
        with self._lock:
            written = self._unsynced.setdefault(segment, [])
            written.append((offset, count))
            if sum(length for _, length in written) < _DROP_AFTER:
                return
            del self._unsynced[segment]
        try:
            self.ledger(segment).sync(lambda: self.files.fdatasync(fd))
        except OSError:
            self._suspects.extend((segment, start, length) for start, length in written)
            raise
        self.files.drop_cached(fd, 0, 0)

    def take_suspects(self) -> list[int]:
        """Return the slots that were written through the page cache and may not be on the device, each once."""
        slots: list[int] = []
        while self._suspects:
            segment, offset, length = self._suspects.popleft()
            first = segment * self.geometry.slots_per_segment + offset // self.geometry.slot_bytes
            slots += range(first, first + -(-length // self.geometry.slot_bytes))
        return slots

    # ------------------------------------------------------------------------------------------------ files on the disk

    def adopt(self) -> list[int]:
        """Take the complete segments within the capacity into use.

        Returns:
            The numbers of all segments in use.
        """
        for entry in _entries(self.directory):
            number = self.geometry.segment_number(entry.name)
            if number is None or number >= self.geometry.max_segments:
                continue
            found = entry.stat(follow_symlinks=False)
            damage = self._repair(number, found)
            if damage is None:
                self._identities[number] = (found.st_dev, found.st_ino)
            else:
                logger.warning("%s: %s %s and is not used; its blocks are lost", self.directory, entry.name, damage)
        return self.existing()

    def existing(self) -> list[int]:
        """Return the numbers of the segments in use."""
        return sorted(self._identities)

    def inspect(self) -> tuple[Damage, ...]:
        """Return the damage of segments in use whose files have changed.

        They stay in use until :meth:`disown`.
        """
        damaged: list[Damage] = []
        for number, identity in list(self._identities.items()):
            try:
                found = self.files.status(self.directory / self.geometry.segment_name(number))
            except FileNotFoundError:
                reason: str | None = "was removed"
            else:
                same = (found.st_dev, found.st_ino) == identity
                reason = self._repair(number, found) if same else "was replaced by another file"
            if reason is not None:
                damaged.append(Damage(number, identity, reason))
        return tuple(damaged)

    def disown(self, damage: Damage) -> bool:
        """Take a damaged segment out of use. Return False if that was done before.

        Its descriptor stays open until :meth:`create` or :meth:`close`, because calls may be running.
        """
        with self._lock:
            if self._identities.get(damage.number) != damage.identity:
                return False
            del self._identities[damage.number]
            return True

    def _repair(self, number: int, found: os.stat_result) -> str | None:
        """Return the damage of segment ``number`` as text; None if there is none, or if it is repaired now."""
        if not stat.S_ISREG(found.st_mode):
            return "is not a regular file"
        if found.st_uid != os.geteuid():
            return f"belongs to user {found.st_uid}, not to this process's user {os.geteuid()},"
        size, path = self.geometry.segment_bytes, self.directory / self.geometry.segment_name(number)
        if found.st_size < size:
            return f"was cut to {found.st_size} of its {size} bytes"
        if found.st_size > size:
            logger.warning("%s: %s was extended; it is truncated to its %d bytes", self.directory, path.name, size)
            fd = self.files.open(path, os.O_RDWR)
            try:
                self.files.truncate(fd, size)
            finally:
                self.files.close(fd)
        return None

    def modified(self) -> dict[int, tuple[int, int]]:
        """Return inode and time of the last write (nanoseconds since 1970) of each segment in use.

        Segments whose files are gone are left out.
        """
        states: dict[int, tuple[int, int]] = {}
        for number in self.existing():
            with contextlib.suppress(FileNotFoundError):
                found = self.files.status(self.directory / self.geometry.segment_name(number))
                states[number] = (found.st_ino, found.st_mtime_ns)
        return states

    def next_number(self, taken: Collection[int]) -> int | None:
        """Return the lowest number for a new segment; None if the capacity allows no more segments.

        Args:
            taken: Numbers not to use.
        """
        for number in range(self.geometry.max_segments):
            if number in self._identities or number in taken:
                continue
            if not (self.directory / self.geometry.segment_name(number)).is_dir():
                return number
        return None

    def strangers(self) -> list[Path]:
        """Return the files with names of segments that are not in use, oldest first.

        They are deleted when room is needed.
        """
        mine = {self.geometry.segment_name(number) for number in self._identities}
        found: list[tuple[float, Path]] = []
        for entry in _entries(self.directory):
            if is_segment(entry.name) and entry.name not in mine and not entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    found.append((entry.stat(follow_symlinks=False).st_mtime, Path(entry.path)))
        return [path for _, path in sorted(found)]

    def make_room(self, capacity: int, needed: int) -> bool:
        """Delete strangers until ``needed`` more bytes fit into ``capacity``. Return True if they fit.

        One caller at a time: files that one caller deletes must not be counted by another.
        """
        with self._room:
            return self.delete_strangers(used_bytes(self.directory) + needed - capacity)

    def trim(self, capacity: int) -> None:
        """Delete strangers until the segments alone are within ``capacity``.

        Other files are not counted, because there may be very many.
        """
        used = len(self._identities) * self.geometry.segment_bytes
        used += sum(self.files.status(stranger).st_blocks * 512 for stranger in self.strangers())
        self.delete_strangers(used - capacity)

    def delete_strangers(self, excess: int) -> bool:
        """Delete strangers of at least ``excess`` bytes. Return False if there are too few."""
        if excess <= 0:
            return True
        for stranger in self.strangers():
            try:
                size = self.files.status(stranger).st_blocks * 512
            except FileNotFoundError:
                continue
            logger.info(
                "%s: removing %s, which this engine cannot use, to keep the capacity", self.directory, stranger.name
            )
            self.files.unlink(stranger)
            excess -= size
            if excess <= 0:
                return True
        return False

    def give_up_one(self) -> bool:
        """Free the space of one segment: the oldest that is not in use, or else the oldest of several in use.

        A segment in use is emptied, because open descriptors would keep a deleted file's space. The next inspection
        reports the segment as damaged. Return False if there is no segment to give up.
        """
        for stranger in self.strangers():
            if self.files.status(stranger).st_blocks:
                logger.warning("%s is full: removing %s, which is not in use", self.directory, stranger.name)
                self.files.unlink(stranger)
                return True
        modified = self.modified()
        if len(modified) < 2:
            return False
        oldest = min(modified, key=lambda number: (modified[number][1], number))
        path = self.directory / self.geometry.segment_name(oldest)
        logger.warning("%s is full: giving up %s", self.directory, path.name)
        fd = self.files.open(path, os.O_RDWR)
        try:
            self.files.truncate(fd, 0)
            self.files.fdatasync(fd)
        finally:
            self.files.close(fd)
        return True

    def remove_leftovers(self) -> None:
        """Delete the incomplete files of an interrupted process."""
        for entry in _entries(self.directory):
            if entry.name.endswith(FRESH) and not entry.is_dir(follow_symlinks=False):
                self.files.unlink(Path(entry.path))

    def create(self, segment: int, pace: Pace) -> None:
        """Create ``segment``: its space is reserved, and ``pace`` limits how much of it is written once.

        The first write to an extent is slow, so it is done ahead. The file gets its name only when it is complete.

        Args:
            segment: Number of the new segment.
            pace: Speed and amount of the writes.

        Raises:
            OSError: The file cannot be created. Nothing is left behind.
        """
        final = self.directory / self.geometry.segment_name(segment)
        fresh = final.with_name(final.name + FRESH)
        try:
            self.files.unlink(fresh)
            fd = self.files.open(fresh, self._flags | os.O_CREAT | os.O_EXCL)
            try:
                self._reserve(fd, pace)
                self.files.fdatasync(fd)
                if not self.direct:
                    self.files.drop_cached(fd, 0, 0)
                created = os.fstat(fd)
            finally:
                self.files.close(fd)
            self._put_in_place(segment, fresh, final, (created.st_dev, created.st_ino))
            self.files.sync_directory(self.directory)
        except OSError:
            self.files.unlink(fresh)
            raise

    def _put_in_place(self, segment: int, fresh: Path, final: Path, identity: tuple[int, int]) -> None:
        if os.path.lexists(final):
            logger.warning("%s: %s, which is not in use, is replaced by a new segment", self.directory, final.name)
        self.files.rename(fresh, final)
        with self._lock:
            self._identities[segment] = identity
            before = self._fds.pop(segment, None)
        if before is not None:
            self.files.close(before)

    def _reserve(self, fd: int, pace: Pace) -> None:
        """Reserve the new file's space, and write as much of it as ``pace`` allows.

        On file systems that reserve no space, the whole file is written.
        """
        try:
            self.files.allocate(fd, self.geometry.segment_bytes)
        except OSError as error:
            if error.errno not in {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}:
                raise
            if not self._unreserved:
                self._unreserved = True
                logger.warning(
                    "%s: the file system reserves no space (fallocate); segments are written as a whole first",
                    self.directory,
                )
            self._fill(fd, pace, wholly=True)
        else:
            self._fill(fd, pace)

    def _fill(self, fd: int, pace: Pace, *, wholly: bool = False) -> None:
        zeros = memoryview(mmap.mmap(-1, min(FILL_BYTES, self.geometry.segment_bytes)))
        offset, end = 0, self.geometry.segment_bytes
        while offset < end and (pace.proceed() or wholly):
            if pace.abandoned:
                raise OSError(errno.ECANCELED, "the tier is closing")
            part = zeros[: end - offset]
            self.files.write_all(fd, part, offset)
            offset += len(part)


def _entries(directory: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of ``directory`` without a look at each file."""
    with os.scandir(directory) as entries:
        yield from entries


def _tail(buffers: Sequence[memoryview], skip: int) -> list[memoryview]:
    """Return ``buffers`` without their first ``skip`` bytes."""
    tail: list[memoryview] = []
    for buffer in buffers:
        if skip < len(buffer):
            tail.append(buffer[skip:] if skip else buffer)
        skip = max(0, skip - len(buffer))
    return tail


class Pace:
    """The speed at which a new segment is written ahead.

    Args:
        share: Largest share of the time that writing may take (default: 0.5).
        pieces: Pieces written at most (default: all).
    """

    def __init__(self, share: float = 0.5, pieces: int | None = None) -> None:
        self._share = share
        self._pieces = pieces
        self._hurry = threading.Event()
        self.abandoned = False
        """True if the segment is not needed any more."""
        self._began: float | None = None

    def proceed(self) -> bool:
        """Wait until the next piece may be written. Return False if the rest stays unwritten."""
        if self._pieces is not None:
            self._pieces -= 1
            if self._pieces < 0:
                return False
        if self._began is not None and self._share < 1:
            self._hurry.wait((time.monotonic() - self._began) * (1 - self._share) / self._share)
        self._began = time.monotonic()
        return not self._hurry.is_set()

    def hurry(self) -> None:
        """End the writing ahead, because the segment is needed now."""
        self._hurry.set()

    def abandon(self) -> None:
        """End the creation, because the segment is not needed any more.

        A file whose space could not be reserved is not written to its end then.
        """
        self.abandoned = True
        self._hurry.set()
