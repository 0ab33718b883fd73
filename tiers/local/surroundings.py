"""Warnings about a tier's directory: the size of its file system, and access to it."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

from tiering.secondary.files import Files

logger = logging.getLogger("kv_tiering.local")


def warn_of_small_disk(files: Files, directory: Path, capacity: int) -> None:
    """Warn of a capacity that the file system can never hold. The tier grows until the disk is full then.

    Args:
        files: file operations to use.
        directory: the tier's directory.
        capacity: bytes of everything in the directory.
    """
    size = files.size_of_disk(directory)
    if size < capacity:
        logger.warning(
            "%s: the capacity of %d bytes is above the %d bytes of its file system: "
            "the disk will be full before eviction begins; lower the capacity, or use a larger disk",
            directory,
            capacity,
            size,
        )


class Access:
    """Reasons for which a directory cannot be written, or other users can change it.

    Args:
        directory: the tier's directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._warned_of_mode = False

    def warn(self, *, read_only: bool) -> None:
        """Warn of a read-only file system, and once of a directory that other users may write."""
        if read_only:
            logger.warning(
                "%s: the file system is read-only; its blocks are served, and none are stored", self._directory
            )
        mode = stat.S_IMODE(self._directory.stat().st_mode)
        if mode & (stat.S_IWGRP | stat.S_IWOTH) and not self._warned_of_mode:
            self._warned_of_mode = True
            logger.warning(
                "%s may be written by other users (mode %03o); they could remove or replace blocks: chmod go-w",
                self._directory,
                mode,
            )
