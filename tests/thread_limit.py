"""A process that cannot start threads, for tests: a start fails as at the limit of a container."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest


class ThreadLimit:
    """A limit that refuses to start threads.

    Attributes:
        refuse: called with the name of each thread that is started; True refuses the thread. Default: none is refused.
        refused: names of the refused threads.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refuse: Callable[[str], bool] = lambda name: False
        self.refused: list[str] = []
        start = threading.Thread.start

        def limited(thread: threading.Thread) -> None:
            if self.refuse(thread.name):
                self.refused.append(thread.name)
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", limited)

    def reach(self, *parts: str) -> None:
        """Refuse all threads from now on, or those whose name contains one of ``parts``."""
        self.refuse = lambda name: not parts or any(part in name for part in parts)

    def leave(self) -> None:
        """Refuse no thread any more."""
        self.refuse = lambda name: False


class HeldStarts:
    """Starts of threads that take until the test releases them, except those on the test's own thread.

    Args:
        only: beginning of the names of the threads whose starts are held; default: all.

    Attributes:
        own: names of the threads that the thread of the test started itself.
        held: names of the threads whose start began to wait.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, only: str = "") -> None:
        self.own: list[str] = []
        self.held: list[str] = []
        self._released = threading.Event()
        test = threading.get_ident()
        start = threading.Thread.start

        def slow(thread: threading.Thread) -> None:
            if threading.get_ident() == test:
                self.own.append(thread.name)
            elif thread.name.startswith(only):
                self.held.append(thread.name)
                self._released.wait()
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", slow)

    def release(self) -> None:
        """Let all starts go on."""
        self._released.set()
