"""The one thread that may drive a manager: its state has no lock, and a second thread would corrupt it silently."""

from __future__ import annotations

import threading
from threading import get_ident

from tiering.errors import WrongThreadError


class OwnerThread:
    """Remembers the first thread that uses an object, and refuses others while that one is alive.

    Users compare ``ident`` with the calling thread's and call :meth:`claim` if they differ: the common case costs a
    comparison.
    """

    __slots__ = ("_enabled", "_name", "ident")

    def __init__(self, *, enabled: bool = True) -> None:
        """``enabled``: False if the callers see to it themselves that no two threads use the object at the same time."""
        self.ident = 0
        """The owner's thread id; 0 before the first use and after :meth:`hand_over`."""
        self._name = ""
        self._enabled = enabled

    def claim(self) -> None:
        """Make the calling thread the owner.  Raises :class:`WrongThreadError` if another thread is, and is alive."""
        ident = get_ident()
        if not self._enabled or ident == self.ident:
            return
        if self.ident and any(thread.ident == self.ident for thread in threading.enumerate()):
            raise WrongThreadError(
                f"this manager belongs to thread {self._name!r}, which used it first, and was called by thread "
                f"{threading.current_thread().name!r}: drive it from one thread, or call hand_over() in the first one before the "
                "second one begins"
            )
        self.ident, self._name = ident, threading.current_thread().name

    def hand_over(self) -> None:
        """Let the next thread that uses the object own it.  Raises :class:`WrongThreadError` if another thread owns it now."""
        if self.ident != get_ident():
            self.claim()
        self.ident = 0
