"""Finding out by trying whether a file system takes O_DIRECT."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path

from tiering.secondary.files import Files
from tiers.local.layout import FRESH, PAGE


def probe_direct(files: Files, directory: Path, segment: Path | None, *, read_only: bool = False) -> bool:
    """Whether files in ``directory`` take O_DIRECT with addresses, offsets and lengths that are multiples of a page; by doing it.

    With a ``segment`` that is there already nothing is written, so that a full disk does not matter.  Raises
    :class:`OSError` if not even a plain file can be used there.
    """
    view = memoryview(mmap.mmap(-1, 3 * PAGE))
    if segment is not None:
        flags = os.O_RDONLY if read_only else os.O_RDWR
        return _takes_direct(
            files, segment, flags, lambda fd: files.preadv(fd, [view[:PAGE], view[PAGE : 2 * PAGE]], PAGE) >= 0
        )
    header, row, back = view[:PAGE], view[PAGE : 2 * PAGE], view[2 * PAGE :]
    header[:8], row[:8] = b"kvheader", b"kv block"
    path = directory / ("probe" + FRESH)

    def round_trip(fd: int) -> bool:
        written = files.pwritev(fd, [header, row], PAGE)
        return written == 2 * PAGE and files.preadv(fd, [back], 2 * PAGE) == PAGE and back[:8] == row[:8]

    try:
        files.unlink(path)
        files.close(files.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))
        return _takes_direct(files, path, os.O_RDWR, round_trip)
    finally:
        files.unlink(path)


def _takes_direct(files: Files, path: Path, flags: int, use: Callable[[int], bool]) -> bool:
    try:
        fd = files.open(path, flags | os.O_DIRECT)
    except OSError as error:
        return _plain_only(error)
    try:
        return use(fd)
    except OSError as error:
        return _plain_only(error)
    finally:
        files.close(fd)


def _plain_only(error: OSError) -> bool:
    """False if ``error`` is how a file system declines O_DIRECT; any other is raised again."""
    if error.errno in {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}:
        return False
    raise error
