"""Waiting for a condition in a test, instead of for some time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

POLL_SECONDS = 0.002


def until(predicate: Callable[[], object], timeout: float = 10.0) -> bool:
    """Call ``predicate`` until it is true; returns True.  Raises :class:`TimeoutError` after ``timeout`` seconds of real time."""
    end = time.monotonic() + timeout
    pause = threading.Event()
    while not predicate():
        if time.monotonic() >= end:
            raise TimeoutError(f"not true within {timeout:g} s: {getattr(predicate, '__qualname__', predicate)}")
        pause.wait(POLL_SECONDS)
    return True
