"""Durable removal of a document, also on a full disk or after a failed removal."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from tiering.secondary.files import Files

logger = logging.getLogger("kv_tiering.local")


def remove_durably(files: Files, path: Path) -> None:
    """Make the content of ``path`` unreadable, also after a loss of power. An absent file needs nothing.

    Three ways without need of disk space are tried in turn: remove the file, overwrite it in place, rename its
    directory.

    Raises:
        OSError: All three ways failed; the error is that of the first.
    """
    ways: list[Callable[[Files, Path], None]] = [_unlink, _overwrite, _rename_directory]
    refusal: OSError | None = None
    for way in ways:
        try:
            way(files, path)
        except OSError as error:
            refusal = refusal or error
        else:
            if refusal is not None:
                logger.warning("%s could not be removed (%s) and was overwritten or renamed instead", path, refusal)
            return
    if refusal is not None:
        raise refusal


def _unlink(files: Files, path: Path) -> None:
    files.unlink(path)
    with contextlib.suppress(FileNotFoundError):
        files.sync_directory(path.parent)


def _overwrite(files: Files, path: Path) -> None:
    fd = files.open(path, os.O_WRONLY | os.O_NOFOLLOW)
    try:
        files.write_all(fd, memoryview(bytes(os.fstat(fd).st_size)), 0)
        files.fdatasync(fd)
    finally:
        files.close(fd)


def _rename_directory(files: Files, path: Path) -> None:
    files.rename(path.parent, path.parent.with_name(f"{path.parent.name}-given-up-{secrets.token_hex(4)}"))
    files.sync_directory(path.parent.parent)
