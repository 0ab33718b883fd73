"""The owner thread of a manager, whose state has no lock.

A second thread would corrupt the state silently.
"""

from __future__ import annotations

import threading
from threading import get_ident

from tiering.errors import WrongThreadError


class OwnerThread:
    """The first thread that uses an object. Other threads are refused while that thread is alive.

    Callers compare ``ident`` with their own thread id and call :meth:`claim` if the two differ, so the common case
    costs one comparison.

    Args:
        enabled: False if the callers ensure themselves that no two threads use the object at the same time; default
            True. The owner is then the last thread that used the object, and none is refused.
    """

    __slots__ = ("_enabled", "_name", "ident")

    def __init__(self, *, enabled: bool = True) -> None:
        self.ident = 0
        """Thread id of the owner; 0 before the first use and after :meth:`hand_over`."""
        self._name = ""
        self._enabled = enabled

    def claim(self) -> None:
        """Make the calling thread the owner.

        Raises:
            WrongThreadError: another thread is the owner and is alive.
        """
        ident = get_ident()
        if ident == self.ident:
            return
        if self._enabled and self.ident and any(thread.ident == self.ident for thread in threading.enumerate()):
            raise WrongThreadError(
                f"this manager belongs to thread {self._name!r}, which used it first, and was called by thread "
                f"{threading.current_thread().name!r}: drive it from one thread, or call hand_over() in the first one "
                "before the second one begins"
            )
        self.ident, self._name = ident, threading.current_thread().name

    def check(self) -> None:
        """Refuse another thread than the owner, as :meth:`claim`, but leave an object without owner as it is.

        For methods that one thread may call before another one begins to use the object.

        Raises:
            WrongThreadError: another thread is the owner and is alive.
        """
        if self.ident:
            self.claim()

    def hand_over(self) -> None:
        """Let the next thread that uses the object become its owner.

        Raises:
            WrongThreadError: another thread is the owner now and is alive.
        """
        if self.ident != get_ident():
            self.claim()
        self.ident = 0
