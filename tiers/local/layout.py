"""The layout of a local tier's directory.

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
