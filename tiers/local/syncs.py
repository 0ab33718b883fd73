"""Bookkeeping of file syncs: which writes a successful sync covers.

The kernel reports a failed write-back once per descriptor; the next sync succeeds although data was lost.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable

from tiering import DeviceError


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
