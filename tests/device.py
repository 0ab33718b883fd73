"""Devices that fail: one loses writes that were not synced, one fails on command, one has bad sectors."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiering.medium.files import Files

_PAGE = 4096


@dataclass(frozen=True, slots=True)
class _Overwritten:
    """A page that was written and not synced, and its content before."""

    path: Path
    offset: int
    before: bytes | None
    """The bytes before the write; None if the page was beyond the end of the file."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A change of a directory that was not synced."""

    path: Path
    before: bytes | None
    """Content of ``path`` before the change; None if there was no file."""
    moved_from: Path | None = None
    """Source of a rename; None for other changes."""


class UnsyncedDevice(Files):
    """Real files that lose unsynced changes at :meth:`lose_power`, as a device with a volatile cache does.

    A random choice of the pages written since the file's last ``fdatasync`` survives. So does a random leading part of
    the changes (creations, renames, removals) made in a directory since its last sync, in their order.

    Args:
        seed: seed of the random choices.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._paths: dict[int, Path] = {}
        self._pages: list[_Overwritten] = []
        self._entries: list[_Entry] = []
        self.dropped = 0
        """Number of changes that were undone."""

    # ------------------------------------------------------------------------------------------------------- operations

    def open(self, path: Path, flags: int) -> int:
        with self._lock:
            if flags & os.O_CREAT and not path.exists():
                self._entries.append(_Entry(path, None))
            fd = super().open(path, flags)
            self._paths[fd] = path
        return fd

    def close(self, fd: int) -> None:
        with self._lock:
            self._paths.pop(fd, None)
            super().close(fd)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._lock:
            path = self._paths[fd]
            end = offset + sum(map(len, buffers))
            with path.open("rb") as file:
                for start in range(offset // _PAGE * _PAGE, end, _PAGE):
                    file.seek(start)
                    self._pages.append(_Overwritten(path, start, file.read(_PAGE) or None))
            return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        with self._lock:
            super().fdatasync(fd)
            path = self._paths[fd]
            self._pages = [page for page in self._pages if page.path != path]

    def rename(self, source: Path, target: Path) -> None:
        with self._lock:
            self._entries.append(_Entry(target, target.read_bytes() if target.exists() else None, source))
            super().rename(source, target)
            self._paths = {fd: target if path == source else path for fd, path in self._paths.items()}
            self._pages = [
                page if page.path != source else _Overwritten(target, page.offset, page.before) for page in self._pages
            ]

    def unlink(self, path: Path) -> None:
        with self._lock:
            if path.exists():
                self._entries.append(_Entry(path, path.read_bytes()))
            super().unlink(path)

    def sync_directory(self, path: Path) -> None:
        with self._lock:
            super().sync_directory(path)
            self._entries = [entry for entry in self._entries if entry.path.parent != path]

    # --------------------------------------------------------------------------------------------------- the power goes

    def lose_power(self) -> None:
        """Undo a random part of the unsynced changes. No thread may be using the files."""
        with self._lock:
            for page in reversed(self._pages):
                if self._rng.random() < 0.5 and page.path.exists():
                    self._undo_page(page)
            kept = self._rng.randint(0, len(self._entries))
            for entry in reversed(self._entries[kept:]):
                self._undo_entry(entry)
            self._pages, self._entries, self._paths = [], [], {}

    def _undo_page(self, page: _Overwritten) -> None:
        self.dropped += 1
        with page.path.open("r+b") as file:
            if page.before is None:
                if page.path.stat().st_size <= page.offset + _PAGE:
                    file.truncate(page.offset)
                return
            file.seek(page.offset)
            file.write(page.before)

    def _undo_entry(self, entry: _Entry) -> None:
        self.dropped += 1
        if entry.moved_from is not None and entry.path.exists():
            entry.path.rename(entry.moved_from)
        if entry.before is None:
            entry.path.unlink(missing_ok=True)
        else:
            entry.path.write_bytes(entry.before)


class FaultyDevice(Files):
    """Real files that fail on command."""

    def __init__(self) -> None:
        self.fail: Callable[[str, Path], None] = lambda operation, path: None
        """Called before each operation with its name and path.

        An :class:`OSError` that it raises fails the operation.
        """
        self.errors: dict[str, int] = {}
        """Number of the error of each operation that fails on all paths, by its name; default: none fails."""
        self.limit = 0
        """Bytes that one read or write moves at most; default: 0, no limit."""
        self.direct = True
        """True if files can be opened with O_DIRECT; default: True."""
        self.calls: list[tuple[str, Path]] = []
        """(operation, path) of every operation that was tried."""
        self._paths: dict[int, Path] = {}

    def open(self, path: Path, flags: int) -> int:
        self._try("open", path)
        if flags & os.O_DIRECT and not self.direct:
            raise OSError(22, "no O_DIRECT here")
        fd = super().open(path, flags)
        self._paths[fd] = path
        return fd

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._try("write", self._paths[fd])
        return super().pwritev(fd, self._limited(buffers), offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._try("read", self._paths[fd])
        return super().preadv(fd, self._limited(buffers), offset)

    def allocate(self, fd: int, length: int) -> None:
        self._try("allocate", self._paths[fd])
        super().allocate(fd, length)

    def fdatasync(self, fd: int) -> None:
        self._try("sync", self._paths[fd])
        super().fdatasync(fd)

    def rename(self, source: Path, target: Path) -> None:
        self._try("rename", target)
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._try("unlink", path)
        super().unlink(path)

    def _try(self, operation: str, path: Path) -> None:
        self.calls.append((operation, path))
        self.fail(operation, path)
        if number := self.errors.get(operation, 0):
            raise OSError(number, os.strerror(number))

    def _limited(self, buffers: Sequence[memoryview]) -> Sequence[memoryview]:
        if not self.limit:
            return buffers
        left, limited = self.limit, []
        for buffer in buffers:
            limited.append(buffer[:left])
            left -= len(limited[-1])
            if not left:
                break
        return limited


@dataclass(frozen=True, slots=True)
class _BadRange:
    """Bytes [start, stop) of a file that cannot be read or not be written."""

    path: Path
    start: int
    stop: int
    reads: bool
    writes: bool


class BadSectorDevice(FaultyDevice):
    """Real files with bad sectors that stay bad until :meth:`heal`.

    Direct reads and writes of a bad range fail with EIO. A write through the page cache succeeds, but its data is lost
    when the page is written back (:meth:`write_back`, or a sync). As in Linux, the next ``fdatasync`` on each open
    descriptor then fails once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ranges: list[_BadRange] = []
        self._through_cache: set[int] = set()
        self._doomed: set[Path] = set()
        """Files with written pages that cannot be written back."""
        self._errors: dict[Path, int] = {}
        """Number of failed write-backs of each file."""
        self._told: dict[int, int] = {}
        """Number of failed write-backs that each descriptor has reported."""
        self._state = threading.Lock()

    def damage(self, path: Path, start: int, length: int, *, reads: bool = True, writes: bool = True) -> None:
        """Make a range of a file bad.

        Args:
            path: the file.
            start: first bad byte.
            length: number of bad bytes.
            reads: reads of the range fail; default: True.
            writes: writes to the range fail; default: True.
        """
        self._ranges.append(_BadRange(path, start, start + length, reads, writes))

    def heal(self) -> None:
        """Make every sector good again, as a device that remaps them does."""
        self._ranges.clear()

    def write_back(self) -> None:
        """Write dirty pages to the device, as the kernel does by itself after a while."""
        with self._state:
            for path in self._doomed:
                self._errors[path] = self._errors.get(path, 0) + 1
            self._doomed.clear()

    def open(self, path: Path, flags: int) -> int:
        fd = super().open(path, flags)
        with self._state:
            self._through_cache.discard(fd)
            if not flags & os.O_DIRECT:
                self._through_cache.add(fd)
            self._told[fd] = self._errors.get(path, 0)
        return fd

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        path = self._paths[fd]
        size = sum(map(len, buffers))
        if any(bad.writes for bad in self._touched(path, offset, size)):
            self._try("write", path)
            if fd not in self._through_cache:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            with self._state:
                self._doomed.add(path)
            return size
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        path = self._paths[fd]
        if any(bad.reads for bad in self._touched(path, offset, sum(map(len, buffers)))):
            self._try("read", path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().preadv(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        super().fdatasync(fd)
        path = self._paths[fd]
        with self._state:
            if path in self._doomed:
                self._doomed.discard(path)
                self._errors[path] = self._errors.get(path, 0) + 1
            errors = self._errors.get(path, 0)
            if self._told[fd] < errors:
                self._told[fd] = errors
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _touched(self, path: Path, offset: int, size: int) -> list[_BadRange]:
        return [bad for bad in self._ranges if bad.path == path and bad.start < offset + size and offset < bad.stop]
