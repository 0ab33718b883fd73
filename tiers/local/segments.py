"""The segment files: reads and writes of runs of slots, descriptors, syncs, and damage.

The kernel reports a failed write-back once per descriptor; the next sync succeeds although data was lost. A ledger
therefore records which writes a successful sync covers.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiering import DeviceError
from tiering.tier import Files
from tiers.local.layout import PAGE, SegmentGeometry, entries_of

logger = logging.getLogger("kv_tiering.local")

MAX_OPEN = 256
"""Segments whose descriptors stay open.

Others are opened for each call, which takes a few microseconds.
"""

BUFFERS_PER_CALL = min(os.sysconf("SC_IOV_MAX"), 1024)
"""Buffers that one vectored call may have."""

READ_CALL = 640 << 10
"""Most bytes that one call reads of several slots, unless a single slot is larger.

Larger calls cost less CPU time. But the kernel merges adjacent slots to requests above a megabyte, and a virtual disk
answered those a tenth slower than requests of half a megabyte. Slots above this bound make large requests in any case.
"""

_DROP_AFTER = 64 << 20


class UnsyncedError(DeviceError):
    """A sync failed after this block was written. This or another block of its file is not on the device."""


class SyncLedger:
    """The syncs of one file, one at a time. Any thread may call.

    After a failed sync, every write since the last successful sync is suspect, on all threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failed = 0
        self._begun = 0
        self._succeeded = 0
        """Number of the last successful sync."""

    def begin_write(self) -> int:
        """Return a ticket for :meth:`end_write`. Call this before the write."""
        return self._failed

    def end_write(self, ticket: int, sync: Callable[[], None]) -> None:
        """Return once the writes since :meth:`begin_write` are durable.

        Args:
            ticket: the result of :meth:`begin_write`.
            sync: syncs the file. Not called if another thread's sync covers the writes.

        Raises:
            OSError: ``sync`` raised it, or another sync of this file failed since :meth:`begin_write`.
        """
        begun = self._begun
        with self._lock:
            if self._failed == ticket and self._succeeded <= begun:
                self._run(sync)
            if self._failed != ticket:
                raise OSError(errno.EIO, f"{os.strerror(errno.EIO)} in a sync that ran for another write")

    def sync(self, sync: Callable[[], None]) -> None:
        """Call ``sync`` for a reason other than a write's durability.

        Raises:
            OSError: ``sync`` raised it. Writes that wait for a sync of this file fail, too.
        """
        with self._lock:
            self._run(sync)

    def _run(self, sync: Callable[[], None]) -> None:
        self._begun += 1
        number = self._begun
        try:
            sync()
        except OSError:
            self._failed += 1
            raise
        self._succeeded = number


@dataclass(frozen=True, slots=True)
class Damage:
    """The damage of one segment's file."""

    number: int
    identity: tuple[int, int]
    """Device and inode of the file before the damage."""
    reason: str
    """The damage as text for people; continues a sentence that begins with the file's name."""
    dropped: bool = False
    """True if this tier emptied the file itself, to make room; default: False."""


Move = Callable[[int, Sequence[memoryview], int], int]
"""A read or write at an offset: descriptor, buffers, offset in bytes; returns the bytes moved."""


Read = tuple[int, int, Sequence[memoryview], int]
"""Read of neighbouring slots: segment, offset in bytes, whole pages to fill, and their bytes."""


class Segments:
    """The segment files of one directory and shape.

    Reads and writes may come from any thread. Methods raise :class:`OSError`.

    Args:
        directory: the tier's directory.
        geometry: the shape of the segments.
        files: file operations to use.
        read_only: the file system takes no writes; default: False.
    """

    def __init__(self, directory: Path, geometry: SegmentGeometry, files: Files, *, read_only: bool = False) -> None:
        self.directory = directory
        self.geometry = geometry
        self.read_only = read_only
        self.direct = False
        """True with O_DIRECT. The default is False.

        Without it, calls use the page cache and drop their pages afterwards.
        """
        self.files = files
        self._lock = threading.Lock()
        self._identities: dict[int, tuple[int, int]] = {}
        """Device and inode of each segment in use."""
        self.dropped: set[int] = set()
        """Segments that were emptied to make room, and are in use until :meth:`disown`."""
        self._fds: dict[int, int] = {}
        self._unsynced: dict[int, list[tuple[int, int]]] = {}
        """Offset and length of the writes through the page cache to each segment since its last sync."""
        self._suspects: deque[tuple[int, int, int]] = deque()
        self._ledgers: dict[int, SyncLedger] = {}

    @property
    def flags(self) -> int:
        """Flags with which segment files are opened."""
        return (os.O_RDONLY if self.read_only else os.O_RDWR) | (os.O_DIRECT if self.direct else 0)

    @contextlib.contextmanager
    def _descriptor(self, segment: int, *, reading: bool = False) -> Iterator[int]:
        fd = self._fds.get(segment)
        if fd is None and len(self._fds) < MAX_OPEN:
            with self._lock:
                fd = self._fds.get(segment)
                if fd is None and (fd := self._try_open(segment, reading=reading)) is not None:
                    self._fds[segment] = fd
        if fd is not None:
            yield fd
            return
        passing = self._try_open(segment, reading=reading)
        if passing is None:
            # The file system was made read-only since this tier was opened. Its blocks can still be read.
            passing = self._open(segment, os.O_RDONLY | self.flags & os.O_DIRECT)
        try:
            yield passing
        finally:
            self.files.close(passing)

    def _try_open(self, segment: int, *, reading: bool) -> int | None:
        """Return a descriptor of ``segment``; None if the file system is read-only and ``reading`` is True."""
        try:
            return self._open(segment, self.flags)
        except OSError as error:
            if reading and error.errno == errno.EROFS:
                return None
            raise

    def _open(self, segment: int, flags: int) -> int:
        """Return a descriptor of ``segment``.

        Raises:
            OSError: the file cannot be opened; with ENOENT if another file is in the segment's place.
        """
        path = self.directory / self.geometry.segment_name(segment)
        fd = self.files.open(path, flags)
        found = os.fstat(fd)
        if self._identities.get(segment) != (found.st_dev, found.st_ino):
            self.files.close(fd)
            raise OSError(errno.ENOENT, "the segment's file was replaced by another file", str(path))
        return fd

    def close(self) -> None:
        """Close all descriptors. No call may be running."""
        while self._fds:
            self.files.close(self._fds.popitem()[1])

    def write(self, segment: int, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write ``buffers``, whole pages, one after another at ``offset``."""
        if self.read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        with self._descriptor(segment) as fd:
            written = self._move(self.files.pwritev, fd, buffers, offset)
            if written < sum(map(len, buffers)):
                raise OSError(errno.EIO, "only a part of the bytes could be written")
            if not self.direct:
                self._drop_behind(segment, fd, offset, written)

    def read(self, segment: int, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill ``buffers``, whole pages, from ``offset`` on, and return the bytes read.

        The result is less than the buffers' length only at the end of the file.
        """
        with self._descriptor(segment, reading=True) as fd:
            done = self._move(self.files.preadv, fd, buffers, offset)
            if not self.direct:
                self.files.drop_cached(fd, offset, done)
            return done

    def read_each(self, reads: Sequence[Read]) -> list[int | OSError]:
        """Run several reads one after another, as :meth:`read` does, and return the result or error of each.

        The thread sleeps in each read while others compute, and finds cold caches: the loop is as short as can be.
        """
        results: list[int | OSError] = []
        descriptors, preadv, direct = self._fds, self.files.preadv, self.direct
        for segment, offset, buffers, length in reads:
            fd = descriptors.get(segment)
            try:
                if fd is None or not direct or preadv(fd, buffers, offset) < length:
                    results.append(self.read(segment, offset, buffers))
                else:
                    results.append(length)
            except OSError as error:
                results.append(error)
        return results

    def sync(self, segment: int) -> None:
        """Wait until the writes to ``segment`` are on the device.

        :meth:`ledger` decides which writes that covers.
        """
        with self._descriptor(segment) as fd:
            self.files.fdatasync(fd)

    def drop_cached(self, segment: int, offset: int, length: int) -> None:
        """Make the next read of a range come from the device."""
        if not self.direct:
            with self._descriptor(segment) as fd:
                self.files.drop_cached(fd, offset, length)

    def ledger(self, segment: int) -> SyncLedger:
        """Return the record of the syncs of ``segment``."""
        ledger = self._ledgers.get(segment)
        return ledger if ledger is not None else self._ledgers.setdefault(segment, SyncLedger())

    def _move(self, call: Move, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
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
            OSError: the sync failed. All writes since the last sync are suspect then (:meth:`take_suspects`).
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

    def adopt(self) -> list[int]:
        """Take the complete segments within the capacity into use.

        Returns:
            The numbers of all segments in use.
        """
        for entry in entries_of(self.directory):
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
            if number in self.dropped:
                damaged.append(Damage(number, identity, "was dropped to make room", dropped=True))
            elif reason is not None:
                damaged.append(Damage(number, identity, reason))
        return tuple(damaged)

    def disown(self, damage: Damage) -> bool:
        """Take a damaged segment out of use. Return False if that was done before.

        Its descriptor stays open until :meth:`put_in_place` or :meth:`close`, because calls may be running.
        """
        with self._lock:
            if self._identities.get(damage.number) != damage.identity:
                return False
            del self._identities[damage.number]
            self.dropped.discard(damage.number)
            return True

    def _repair(self, number: int, found: os.stat_result) -> str | None:
        """Return the damage of segment ``number`` as text; None if there is none, or if it is repaired now."""
        if not stat.S_ISREG(found.st_mode):
            return "is not a regular file"
        if found.st_uid != os.geteuid():
            return f"belongs to user {found.st_uid}, not to this process's user {os.geteuid()},"
        if found.st_nlink > 1 and not self.read_only:
            return f"is a hard link, one of {found.st_nlink} names of the same file,"
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

    def put_in_place(self, segment: int, fresh: Path, identity: tuple[int, int]) -> None:
        """Give the complete file ``fresh`` the name of ``segment``, and take the segment into use.

        Args:
            segment: number of the segment.
            fresh: the file.
            identity: device and inode of ``fresh``.
        """
        final = self.directory / self.geometry.segment_name(segment)
        if os.path.lexists(final):
            logger.warning("%s: %s, which is not in use, is replaced by a new segment", self.directory, final.name)
        self.files.rename(fresh, final)
        with self._lock:
            self._identities[segment] = identity
            before = self._fds.pop(segment, None)
        if before is not None:
            self.files.close(before)


def _tail(buffers: Sequence[memoryview], skip: int) -> list[memoryview]:
    """Return ``buffers`` without their first ``skip`` bytes."""
    tail: list[memoryview] = []
    for buffer in buffers:
        if skip < len(buffer):
            tail.append(buffer[skip:] if skip else buffer)
        skip = max(0, skip - len(buffer))
    return tail
