"""Warnings about a tier's directory: the size of its file system, and access to it."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

from tiering.tier import Files

logger = logging.getLogger("kv_tiering.local")


class Surroundings:
    """Conditions of a directory that its operator can correct.

    Each is logged when it begins, and not again while it lasts.

    Args:
        directory: the tier's directory.
        capacity: bytes of everything in the directory.
        files: file operations to use.
    """

    def __init__(self, directory: Path, capacity: int, files: Files) -> None:
        self._directory = directory
        self._capacity = capacity
        self._files = files
        self._logged: set[str] = set()

    def warn(self, *, read_only: bool) -> None:
        """Warn of a small disk, a read-only file system, and a directory that other users may write.

        Raises:
            OSError: the directory cannot be looked at.
        """
        size = self._files.size_of_disk(self._directory)
        self._log(
            size < self._capacity,
            "%s: the capacity of %d bytes is above the %d bytes of its file system: "
            "the disk will be full before eviction begins; lower the capacity, or use a larger disk",
            self._capacity,
            size,
        )
        self._log(read_only, "%s: the file system is read-only; its blocks are served, and none are stored")
        mode = stat.S_IMODE(self._directory.stat().st_mode)
        self._log(
            mode & (stat.S_IWGRP | stat.S_IWOTH) != 0,
            "%s may be written by other users (mode %03o); they could remove or replace blocks: chmod go-w",
            mode,
        )

    def _log(self, holds: bool, text: str, *details: int) -> None:
        """Log a line about the directory if a condition holds now and did not at the last call."""
        if not holds:
            self._logged.discard(text)
        elif text not in self._logged:
            self._logged.add(text)
            logger.warning(text, self._directory, *details)
