"""The freeing of large dictionaries away from the scheduler's thread.

A dictionary with millions of keys is freed in most of a second, with the interpreter lock held. The thread of this
module therefore removes a few keys at a time, and rests in between. The thread ends when nothing is
left.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, TypeAlias

from tiering.runtime.pool import ThreadPool

SLICE = 256
"""Keys that are removed without a rest. That takes about 30 us."""

REST_SECONDS = 0.0002
"""Seconds between two slices; 10 million keys are freed in about 15 s."""

AT_ONCE = 1024
"""Largest number of keys that are freed at once, without the thread."""

Table: TypeAlias = MutableMapping[bytes, Any]


class Disposal:
    """Dictionaries to be freed, and the thread that frees them.

    Args:
        rest: waits for the given seconds; default: :func:`time.sleep`.
    """

    def __init__(self, rest: Callable[[float], object] = time.sleep) -> None:
        self._rest = rest
        self._waiting: deque[Table] = deque()
        self._pool: ThreadPool | None = None

    def add(self, tables: Iterable[Table]) -> None:
        """Free ``tables``, which the caller does not use any more. Returns at once.

        If no thread can be started, the tables wait for the next call.
        """
        self._waiting.extend(tables)
        if len(self._waiting) <= 2 and sum(map(len, self._waiting)) <= AT_ONCE:
            self._waiting.clear()
        elif self._waiting and not self.busy:
            self._pool = pool = ThreadPool("kv-free", 1)
            pool.run(self._run, self._refused)
            pool.stop()  # the thread ends after this work

    @property
    def busy(self) -> bool:
        """True while the thread runs or is about to start."""
        return self._pool is not None and not self._pool.join(0.0)

    def _refused(self, error: BaseException) -> None:
        self._pool = None

    def _run(self) -> None:
        while True:
            try:
                table = self._waiting.popleft()
            except IndexError:
                # The thread is not counted any more from here on; what has arrived since is taken all the same.
                self._pool = None
                if not self._waiting:
                    return
                continue
            while table:
                free_slice(table)
                self._rest(REST_SECONDS)


def free_slice(table: Table) -> None:
    """Remove up to :data:`SLICE` keys."""
    for _ in range(min(SLICE, len(table))):
        table.popitem()


DISPOSAL = Disposal()
"""The freeing of this process."""
