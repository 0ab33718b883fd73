"""Which writes a successful sync covers: the kernel tells of a failed write-back once per descriptor, and then says that all is well."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable

from tiering.errors import DeviceError


class UnsyncedError(DeviceError):
    """A sync failed after this block was written: it, or another block of the same file, is not on the device."""


class SyncLedger:
    """The syncs of one file, one at a time.  Any thread may call.

    After a failed sync everything that was written since the last successful one is suspect, whoever wrote it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failed = 0
        self._begun = 0
        self._succeeded = 0
        """The number of the last sync that succeeded."""

    def begin_write(self) -> int:
        """To be called before a write; what it returns is given to :meth:`end_write`."""
        return self._failed

    def end_write(self, ticket: int, sync: Callable[[], None]) -> None:
        """Return once what was written since :meth:`begin_write` is durable, by calling ``sync`` unless another thread's call covers it.

        Raises :class:`OSError` if ``sync`` does, or if any sync of this file failed since :meth:`begin_write`.
        """
        begun = self._begun
        with self._lock:
            if self._failed == ticket and self._succeeded <= begun:
                self._run(sync)
            if self._failed != ticket:
                raise OSError(errno.EIO, f"{os.strerror(errno.EIO)} in a sync that another write had asked for")

    def sync(self, sync: Callable[[], None]) -> None:
        """Call ``sync`` for a reason other than a write's durability.  Raises what it raises, and others learn of that, too."""
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
