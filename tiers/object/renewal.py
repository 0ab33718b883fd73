"""The renewal of blocks in use: an old object is copied onto itself, and is young again.

A lifecycle rule counts from an object's last write, and not from its use. Without renewal the heads of all
prefixes would expire first: they are the oldest blocks, and the CPU tier serves them without a look at the bucket.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from tiering import StoreError
from tiering.tier import ThreadPool

logger = logging.getLogger("kv_tiering.object")

PER_SECOND = 8.0
"""Objects that one process looks at or copies per second."""

MOST_WAITING = 4096
"""Maximum number of objects that wait; beyond it, further ones are left to their next use.

Prefixes come from their head on, so the tails are left out.
"""

MOST_SETTLED = 1 << 15
"""Maximum number of objects whose next due time is remembered."""

FAILED_SECONDS = 600.0
"""Seconds after a failure for which nothing is renewed."""


class Renewal:
    """Renews objects in use, on a thread of its own. Any thread may call.

    Args:
        after: age in seconds from which on an object in use is renewed.
        modified: returns the time of an object's last write in seconds since 1970; None: there is no such object.
        copy: copies an object onto itself.
        clock: function that returns seconds since 1970; default: this machine's.
        pause: seconds between two objects; default: by :data:`PER_SECOND`.
    """

    def __init__(
        self,
        after: float,
        modified: Callable[[str], float | None],
        copy: Callable[[str], None],
        clock: Callable[[], float] = time.time,
        pause: float = 1.0 / PER_SECOND,
    ) -> None:
        self._after = after
        self._modified = modified
        self._copy = copy
        self._clock = clock
        self._pause = pause
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, None] = OrderedDict()
        self._settled: OrderedDict[int, float] = OrderedDict()
        """Hash of a name → time until which the object is young enough."""
        self._works = False
        self._rest_until = 0.0
        self._stopped = threading.Event()
        self._threads = ThreadPool("object-renewal", 1)

    def saw(self, name: str, modified: float) -> None:
        """Note that an object in use was last written at ``modified``."""
        if self._clock() - modified >= self._after:
            self.use([name])

    def use(self, names: Iterable[str]) -> None:
        """Note that objects are in use, heads first. Their ages are looked up."""
        now = self._clock()
        with self._lock:
            if self._stopped.is_set() or now < self._rest_until:
                return
            for name in names:
                if len(self._waiting) >= MOST_WAITING:
                    break
                if self._settled.get(hash(name), 0.0) <= now:
                    self._waiting[name] = None
            begins = bool(self._waiting) and not self._works
            self._works = self._works or begins
        if begins:
            self._threads.run(self._work, self._refused)

    def stop(self) -> None:
        """End the work after the object in hand."""
        self._stopped.set()
        self._threads.stop()

    def _refused(self, error: StoreError) -> None:
        with self._lock:
            self._works = False

    def _work(self) -> None:
        while (name := self._next()) is not None:
            try:
                self._settle(name, self._renew(name))
            except StoreError as error:
                self._fail(error)
            self._stopped.wait(self._pause)

    def _next(self) -> str | None:
        with self._lock:
            if self._stopped.is_set() or not self._waiting:
                self._works = False
                return None
            return self._waiting.popitem(last=False)[0]

    def _renew(self, name: str) -> float:
        """Renew an object if it is old enough, and return the time until which it is young."""
        found = self._modified(name)
        if found is None:
            return self._clock() + FAILED_SECONDS
        if self._clock() - found < self._after:
            return found + self._after
        self._copy(name)
        return self._clock() + self._after

    def _settle(self, name: str, until: float) -> None:
        with self._lock:
            self._settled[hash(name)] = until
            if len(self._settled) > MOST_SETTLED:
                self._settled.popitem(last=False)

    def _fail(self, error: StoreError) -> None:
        with self._lock:
            self._waiting.clear()
            self._rest_until = self._clock() + FAILED_SECONDS
        log = logger.debug if error.temporary else logger.warning
        log("blocks in use are not renewed for %.0f minutes, and may expire: %s", FAILED_SECONDS / 60, error)
