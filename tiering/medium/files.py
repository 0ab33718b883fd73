"""File operations of media that are files, with typed errors; tests replace the class :class:`Files`.

Calls release the interpreter lock while the kernel works. Python retries calls that a signal interrupts.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from tiering.errors import (
    DeviceError,
    OutOfSpaceError,
    PermanentStoreError,
    ReadOnlyError,
    StoreError,
    TemporaryStoreError,
)

FILE_MODE = 0o600

Vectored = Callable[[int, Sequence[memoryview], int], int]
"""A read or write at an offset: descriptor, buffers, offset in bytes; returns the bytes moved."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_TEMPORARY = frozenset(
    {errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ETIMEDOUT}
)
_DEVICE = frozenset({errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EREMOTEIO, errno.EBADMSG})
"""Errors by which a bad sector is reported: EIO by the page cache, others by direct I/O."""
_HINTS = {
    errno.ENOSPC: "the file system is full",
    errno.EDQUOT: "the quota is used up",
    errno.EROFS: "the file system is read-only (also after an error of the device: see the kernel's log)",
    errno.EACCES: "the directory must be writable for the engine's user",
    errno.EPERM: "the directory must be writable for the engine's user",
    **dict.fromkeys(_DEVICE, "the device reports an error: see the kernel's log"),
    errno.ENODEV: "the device is gone",
    errno.EMFILE: "too many open files: raise the limit (ulimit -n)",
    errno.ELOOP: "symbolic links are not followed here: put the file itself in its place, or remove the link",
}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def store_error(error: OSError, what: str) -> StoreError:
    """Return ``error`` as a typed error, for the caller to raise or return.

    Args:
        error: error of a file operation.
        what: the operation, for the message.
    """
    number = error.errno or 0
    hint = _HINTS.get(number)
    text = f"{what}: {error.strerror or error}" + (f" ({hint})" if hint else "")
    if number in _FULL:
        return OutOfSpaceError(text)
    if number == errno.EROFS:
        return ReadOnlyError(text)
    if number in _DEVICE:
        return DeviceError(text)
    return TemporaryStoreError(text) if number in _TEMPORARY else PermanentStoreError(text)


@contextlib.contextmanager
def store_errors(what: str) -> Iterator[None]:
    """Raise each OSError in the context as the typed error that :func:`store_error` returns for it."""
    try:
        yield
    except OSError as error:
        raise store_error(error, what) from error


def open_plain(path: Path, flags: int) -> int:
    """Open or create ``path``, a regular file of this user, private to its owner; return the descriptor.

    Symbolic links are not followed, and a FIFO does not block. A file with another name is not opened for writing,
    because what is written would change that file, too.

    Raises:
        OSError: the file cannot be opened; EEXIST if there is something other than a regular file of this user.
    """
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, FILE_MODE)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EEXIST, "something that is not a regular file is in its place; remove it", str(path))
        if found.st_uid != os.geteuid():
            reason = (
                f"it belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}; "
                "run as that user, change the file's owner, or remove the file"
            )
            raise OSError(errno.EEXIST, reason, str(path))
        if found.st_nlink > 1 and flags & os.O_ACCMODE != os.O_RDONLY:
            reason = f"it is a hard link, one of {found.st_nlink} names of the same file; remove this name"
            raise OSError(errno.EEXIST, reason, str(path))
        os.set_blocking(fd, True)
    except OSError:
        os.close(fd)
        raise
    return fd


class Files:
    """File operations of the operating system.

    Every method raises :class:`OSError`; callers turn it into a typed error.
    """

    # The system's own functions, so that reads and writes cost no second call.
    pwritev: Vectored = staticmethod(os.pwritev)
    """Write buffers to a descriptor at an offset, and return the bytes written; may write less than all."""
    preadv: Vectored = staticmethod(os.preadv)
    """Read from a descriptor at an offset into buffers, and return the bytes read; may read less than all."""

    def open(self, path: Path, flags: int) -> int:
        """Open or create a regular file of this user; see :func:`open_plain`."""
        return open_plain(path, flags)

    def status(self, path: Path) -> os.stat_result:
        """Return the status of ``path`` itself, also if it is a symbolic link."""
        return path.lstat()

    def close(self, fd: int) -> None:
        """Close a descriptor; an error of the close may be one of earlier writes."""
        os.close(fd)

    def allocate(self, fd: int, length: int) -> None:
        """Reserve the first ``length`` bytes of a file.

        Raises:
            OSError: the reservation failed; EOPNOTSUPP on file systems without it, where the C library would write
                every block one by one.
        """
        while _libc.fallocate(fd, 0, 0, length):
            number = ctypes.get_errno()
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number))

    def truncate(self, fd: int, length: int) -> None:
        """Set the size of a file to ``length`` bytes."""
        os.ftruncate(fd, length)

    def fdatasync(self, fd: int) -> None:
        """Wait until the file's written data is on the device."""
        os.fdatasync(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Replace ``target`` by ``source`` atomically."""
        source.rename(target)

    def unlink(self, path: Path) -> None:
        """Remove a file, if it exists."""
        path.unlink(missing_ok=True)

    def sync_directory(self, path: Path) -> None:
        """Wait until the directory's entries are on the device."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def size_of_disk(self, path: Path) -> int:
        """Return the bytes of the file system that holds ``path``, used and free."""
        found = os.statvfs(path)
        return found.f_blocks * found.f_frsize

    def drop_cached(self, fd: int, offset: int, length: int) -> None:
        """Advise the kernel to drop clean cached pages of a range (length 0: to the end)."""
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)

    # ---------------------------------------------------------------------------- operations made of those above

    def write_all(self, fd: int, data: memoryview, offset: int) -> None:
        """Write ``data`` at ``offset``, in several calls if one writes only a part."""
        while len(data):
            done = self.pwritev(fd, [data], offset)
            if done <= 0:
                raise OSError(errno.EIO, "nothing could be written")
            data, offset = data[done:], offset + done

    def read_all(self, path: Path, limit: int) -> memoryview:
        """Return the content of ``path``.

        Raises:
            OSError: the file cannot be read; EMSGSIZE, with nothing read, if it is longer than ``limit`` bytes.
        """
        fd = open_plain(path, os.O_RDONLY)
        try:
            size = os.fstat(fd).st_size
            if size > limit:
                raise OSError(errno.EMSGSIZE, f"its {size} bytes are more than the {limit} that it may have", str(path))
            # Not a bytearray: clearing and copying one would hold the interpreter lock.
            data = memoryview(mmap.mmap(-1, size)) if size else memoryview(b"")
            done = 0
            while done < size and (count := os.preadv(fd, [data[done:]], done)) > 0:
                done += count
            return data[:done]
        finally:
            os.close(fd)

    def replace(
        self,
        path: Path,
        parts: Iterable[bytes | memoryview],
        *,
        durable: bool = True,
    ) -> None:
        """Replace the content of ``path`` atomically: readers see all of the old or all of the new content.

        This also holds after a crash, if ``durable``.

        Args:
            path: file to replace or create.
            parts: new content, in order.
            durable: wait until the content is on the device; default True.
        """
        fresh = fresh_name(path)
        self.unlink(fresh)
        fd = self.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            offset = 0
            for part in parts:
                view = memoryview(part).cast("B")
                self.write_all(fd, view, offset)
                offset += len(view)
            if durable:
                self.fdatasync(fd)
        finally:
            self.close(fd)
        self._put(path, durable)

    def complete(self, path: Path, start: bytes) -> None:
        """Write ``start`` over the first bytes of the :func:`fresh_name` of ``path``, which it then replaces.

        The replacement is atomic and durable.
        """
        fd = self.open(fresh_name(path), os.O_WRONLY)
        try:
            self.write_all(fd, memoryview(start), 0)
            self.fdatasync(fd)
        finally:
            self.close(fd)
        self._put(path, durable=True)

    def _put(self, path: Path, durable: bool) -> None:
        self.rename(fresh_name(path), path)
        if durable:
            self.sync_directory(path.parent)


def fresh_name(path: Path) -> Path:
    """Return the name under which the new content of ``path`` is written."""
    return path.with_name(path.name + ".new")
