"""The segment files: open descriptors, reads and writes of runs of slots, and files made ahead of need."""

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
"""Segments whose descriptors are kept; the others are opened for each call (a few microseconds)."""

BUFFERS_PER_CALL = min(os.sysconf("SC_IOV_MAX"), 1024)
"""Buffers that one vectored call may have."""

FILL_BYTES = 4 << 20
"""One piece of what is written ahead."""

_DROP_AFTER = 64 << 20

_Vectored = Callable[[int, Sequence[memoryview], int], int]


@dataclass(frozen=True, slots=True)
class Damage:
    """What became of the file of a segment: its number, device and inode as they were, and the reason, for people."""

    number: int
    identity: tuple[int, int]
    reason: str


class Segments:
    """The segment files of one directory and shape.  Reads and writes may come from any thread; they raise :class:`OSError`.

    ``read_only``: on a medium that takes no writes.
    """

    def __init__(self, directory: Path, geometry: Geometry, files: Files, *, read_only: bool = False) -> None:
        self.directory = directory
        self.geometry = geometry
        self.read_only = read_only
        self.direct = False
        """With O_DIRECT; otherwise through the page cache, which is dropped behind."""
        self.files = files
        self._lock = threading.Lock()
        self._room = threading.Lock()
        self._identities: dict[int, tuple[int, int]] = {}
        """Device and inode of each segment in use."""
        self._fds: dict[int, int] = {}
        self._unsynced: dict[int, list[tuple[int, int]]] = {}
        """Offset and length of what was written to each segment through the page cache since its last sync."""
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
            # The file system was made read-only since this tier was opened: what it holds can be read all the same.
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
        """A descriptor of ``segment``; None if ``refused`` is true and the file system is read-only.

        Raises :class:`OSError`, with ENOENT if another file is in the segment's place.
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
            raise OSError(errno.ENOENT, "the segment is not the file that it was", str(path))
        return fd

    def close(self) -> None:
        """Close all descriptors; no call is running."""
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
                raise OSError(errno.EIO, "nothing more could be written")
            if not self.direct:
                self._drop_behind(segment, fd, offset, written)

    def read(self, segment: int, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill ``buffers``, whole pages, from ``offset`` on; fewer bytes than they have only at the end of the file."""
        with self._descriptor(segment, reading=True) as fd:
            done = self._move(self.files.preadv, fd, list(buffers), offset)
            if not self.direct:
                self.files.drop_cached(fd, offset, done)
            return done

    def sync(self, segment: int) -> None:
        """Wait until what was written to ``segment`` is on the device.  Whose writes that covers is for :meth:`ledger` to say."""
        with self._descriptor(segment) as fd:
            self.files.fdatasync(fd)

    def forget_cached(self, segment: int, offset: int, length: int) -> None:
        """Let the next read of a range come from the device."""
        if not self.direct:
            with self._descriptor(segment) as fd:
                self.files.drop_cached(fd, offset, length)

    def ledger(self, segment: int) -> SyncLedger:
        """Who has synced ``segment``, and how that ended."""
        ledger = self._ledgers.get(segment)
        return ledger if ledger is not None else self._ledgers.setdefault(segment, SyncLedger())

    def _move(self, call: _Vectored, fd: int, buffers: list[memoryview], offset: int) -> int:
        """Repeat ``call`` until all is moved or nothing moves; bytes moved.  A short call is taken up at the page it stopped in."""
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
        """Keep written pages from filling the page cache: only clean ones can be dropped, so write them out first.

        Raises :class:`OSError` if that fails: all that was written since the last time is suspect then
        (:meth:`take_suspects`).
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
        """Slots that were written through the page cache and may not have reached the device, each once."""
        slots: list[int] = []
        while self._suspects:
            segment, offset, length = self._suspects.popleft()
            first = segment * self.geometry.slots_per_segment + offset // self.geometry.slot_bytes
            slots += range(first, first + -(-length // self.geometry.slot_bytes))
        return slots

    # ------------------------------------------------------------------------------------------------ files on the disk

    def adopt(self) -> list[int]:
        """Take into use the complete segments that are there and that the capacity allows; their numbers."""
        for entry in _entries(self.directory):
            number = self.geometry.segment_number(entry.name)
            if number is None or number >= self.geometry.max_segments:
                continue
            found = entry.stat(follow_symlinks=False)
            damage = self._repair(number, found)
            if damage is None:
                self._identities[number] = (found.st_dev, found.st_ino)
            else:
                logger.warning("%s: %s %s and is not used; what it held is lost", self.directory, entry.name, damage)
        return self.existing()

    def existing(self) -> list[int]:
        """The numbers of the segments in use."""
        return sorted(self._identities)

    def inspect(self) -> tuple[Damage, ...]:
        """Segments in use that are no longer the files that they were.  They stay in use until :meth:`disown`."""
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
        """Take a damaged segment out of use; False if that was done before.

        Its descriptor stays open until :meth:`create` or :meth:`close`: calls may be running.
        """
        with self._lock:
            if self._identities.get(damage.number) != damage.identity:
                return False
            del self._identities[damage.number]
            return True

    def _repair(self, number: int, found: os.stat_result) -> str | None:
        """What is wrong with segment ``number``; None if nothing is, or not any more."""
        if not stat.S_ISREG(found.st_mode):
            return "is not a regular file"
        if found.st_uid != os.geteuid():
            return f"belongs to user {found.st_uid}, not to this process's user {os.geteuid()},"
        size, path = self.geometry.segment_bytes, self.directory / self.geometry.segment_name(number)
        if found.st_size < size:
            return f"was cut to {found.st_size} of its {size} bytes"
        if found.st_size > size:
            logger.warning("%s: %s was extended; it is cut to its %d bytes again", self.directory, path.name, size)
            fd = self.files.open(path, os.O_RDWR)
            try:
                self.files.truncate(fd, size)
            finally:
                self.files.close(fd)
        return None

    def modified(self) -> dict[int, tuple[int, int]]:
        """Inode of each segment in use, and when it was last written (nanoseconds since 1970); without those that are gone."""
        states: dict[int, tuple[int, int]] = {}
        for number in self.existing():
            with contextlib.suppress(FileNotFoundError):
                found = self.files.status(self.directory / self.geometry.segment_name(number))
                states[number] = (found.st_ino, found.st_mtime_ns)
        return states

    def next_number(self, taken: Collection[int]) -> int | None:
        """The lowest number that a new segment may have; None if the capacity allows no more.  ``taken``: numbers not to use."""
        for number in range(self.geometry.max_segments):
            if number in self._identities or number in taken:
                continue
            if not (self.directory / self.geometry.segment_name(number)).is_dir():
                return number
        return None

    def strangers(self) -> list[Path]:
        """Files with the names of segments that are not in use: to be deleted when room is needed, oldest first."""
        mine = {self.geometry.segment_name(number) for number in self._identities}
        found: list[tuple[float, Path]] = []
        for entry in _entries(self.directory):
            if is_segment(entry.name) and entry.name not in mine and not entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    found.append((entry.stat(follow_symlinks=False).st_mtime, Path(entry.path)))
        return [path for _, path in sorted(found)]

    def make_room(self, capacity: int, needed: int) -> bool:
        """Delete strangers until ``needed`` more bytes keep the directory within ``capacity``; whether they do.

        One caller at a time: what one of them deletes the other must not count.
        """
        with self._room:
            return self.delete_strangers(used_bytes(self.directory) + needed - capacity)

    def trim(self, capacity: int) -> None:
        """Delete strangers until the segments alone are within ``capacity``: without a look at the other files, which may be many."""
        used = len(self._identities) * self.geometry.segment_bytes
        used += sum(self.files.status(stranger).st_blocks * 512 for stranger in self.strangers())
        self.delete_strangers(used - capacity)

    def delete_strangers(self, excess: int) -> bool:
        """Delete strangers of ``excess`` bytes or more; False if there are not so many."""
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

    def remove_leftovers(self) -> None:
        """Delete what an interrupted process left half made."""
        for entry in _entries(self.directory):
            if entry.name.endswith(FRESH) and not entry.is_dir(follow_symlinks=False):
                self.files.unlink(Path(entry.path))

    def create(self, segment: int, pace: Pace) -> None:
        """Make ``segment``: reserved, and written once as far as ``pace`` says (the first write to an extent is slow).

        The file has its name only when it is whole.  Raises :class:`OSError`, with nothing left behind.
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
            logger.warning("%s: %s, which is not in use, gives way to a new segment", self.directory, final.name)
        self.files.rename(fresh, final)
        with self._lock:
            self._identities[segment] = identity
            before = self._fds.pop(segment, None)
        if before is not None:
            self.files.close(before)

    def _reserve(self, fd: int, pace: Pace) -> None:
        """Give the new file its bytes: reserved, and written as far as ``pace`` says; written wholly where nothing can be reserved."""
        try:
            self.files.allocate(fd, self.geometry.segment_bytes)
        except OSError as error:
            if error.errno not in {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}:
                raise
            if not self._unreserved:
                self._unreserved = True
                logger.warning(
                    "%s: the file system reserves no space (fallocate); segments are written first", self.directory
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
    """What is in ``directory``, without a look at each."""
    with os.scandir(directory) as entries:
        yield from entries


def _tail(buffers: Sequence[memoryview], skip: int) -> list[memoryview]:
    """``buffers`` without their first ``skip`` bytes."""
    tail: list[memoryview] = []
    for buffer in buffers:
        if skip < len(buffer):
            tail.append(buffer[skip:] if skip else buffer)
        skip = max(0, skip - len(buffer))
    return tail


class Pace:
    """How fast a segment is written ahead: it takes at most ``share`` of the time, and stops when it is needed at once.

    ``pieces``: how many pieces are written at most (None: all).
    """

    def __init__(self, share: float = 0.5, pieces: int | None = None) -> None:
        self._share = share
        self._pieces = pieces
        self._hurry = threading.Event()
        self.abandoned = False
        """Nobody needs the segment any more."""
        self._began: float | None = None

    def proceed(self) -> bool:
        """Wait for one's turn before the next piece; False: leave the rest unwritten."""
        if self._pieces is not None:
            self._pieces -= 1
            if self._pieces < 0:
                return False
        if self._began is not None and self._share < 1:
            self._hurry.wait((time.monotonic() - self._began) * (1 - self._share) / self._share)
        self._began = time.monotonic()
        return not self._hurry.is_set()

    def hurry(self) -> None:
        """The segment is needed now, written or not."""
        self._hurry.set()

    def abandon(self) -> None:
        """The segment is not needed any more: a file that could not be reserved is not written to its end."""
        self.abandoned = True
        self._hurry.set()
