"""CPU cost of an object's methods, measured from outside."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any


class CallClock:
    """CPU seconds of the calling thread that methods take, by method."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inside = False

    def watch(self, subject: Any, methods: Iterable[str]) -> None:
        """Count every call of ``methods`` of ``subject`` from now on, with all calls that it makes itself."""
        for name in methods:
            setattr(subject, name, self._timed(name, getattr(subject, name)))

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return call(*args, **kwargs)
            self._inside = True
            start = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self._inside = False
                self.seconds[name] = self.seconds.get(name, 0.0) + time.thread_time() - start

        return timed
