"""A process that may have no more threads, for tests: starting one fails as it does at the limit of a container or a
user."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest


class ThreadLimit:
    """Refuses to start threads while :attr:`refuse` says so.

    ``refuse``: called with the name of each thread that is started (default: none is refused).  ``refused``: names of
    those refused.
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
        """Refuse none any more."""
        self.refuse = lambda name: False
