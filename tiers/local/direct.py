"""A test by trial for O_DIRECT support of a file system."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path

from tiering.tier import Files
from tiers.local.layout import FRESH, PAGE


def probe_direct(files: Files, directory: Path, segment: Path | None, *, read_only: bool = False) -> bool:
    """Return True if files in ``directory`` take O_DIRECT with page-aligned transfers.

    Addresses, offsets and lengths are multiples of a page.

    Args:
        files: file operations to use.
        directory: directory for a short-lived file to try with.
        segment: an existing file to try with instead (None: no such file). Nothing is written then, so a full disk does
            not matter.
        read_only: True if the file system takes no writes; default: False.

    Raises:
        OSError: not even a plain file can be used in ``directory``.
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
    """Return False if the file system declines O_DIRECT with ``error``; raise any other error again."""
    if error.errno in {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}:
        return False
    raise error
