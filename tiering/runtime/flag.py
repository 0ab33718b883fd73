"""A flag that the scheduler's thread sets for a thread that waits for it.

``threading.Event.set`` takes a lock, which the waiting thread holds whenever its wait begins or ends. If that thread
loses the processor then, the scheduler's thread would wait for it.
"""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, SimpleQueue


class Flag:
    """A flag with the methods of ``threading.Event``.

    Any thread may call them; only one thread may wait at a time.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._tokens: SimpleQueue[None] = SimpleQueue()
        """Wakes the waiting thread; a token that is left over ends one wait early."""

    def is_set(self) -> bool:
        """Return True after :meth:`set`, until :meth:`clear`."""
        return self._is_set

    def set(self) -> None:
        """Set the flag, and wake the thread that waits; never waits."""
        if not self._is_set:
            self._is_set = True
            self._tokens.put(None)

    def clear(self) -> None:
        """Take the flag back; the waiting thread calls this method before it looks for what was done.

        A call of :meth:`set` that this call may undo has begun before: its caller's work is visible afterwards.
        """
        self._is_set = False
        with suppress(Empty):
            while True:
                self._tokens.get_nowait()

    def wait(self, timeout: float) -> bool:
        """Wait until the flag is set, and return True if it is.

        Args:
            timeout: longest wait in seconds; zero or less does not wait.
        """
        if not self._is_set:
            with suppress(Empty):
                self._tokens.get(timeout=max(0.0, timeout))
        return self._is_set
