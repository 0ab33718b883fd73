"""The freeing of large dictionaries and arrays away from the scheduler's thread.

A dictionary with millions of keys is freed in most of a second, with the interpreter lock held. The thread of this
module therefore removes a few keys at a time, and rests in between. The thread ends when nothing is left. A log of
rows (:mod:`tiering.table.policies.recency`) comes here as a dictionary of its parts.

Arrays of numbers are freed without the lock.

While no thread can be started, tables that are being filled free twice as many keys as they receive. What waits is thus
gone before such a table is as large.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, MutableMapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tiering.runtime.pool import ThreadPool
from tiering.table.row_array import LARGE_ARRAY, free_pages

SLICE = 256
"""Keys that are removed without a rest. That takes about 30 us, and 0.4 ms for parts of a log of rows."""

REST_SECONDS = 0.0002
"""Seconds between two slices; 10 million keys are freed in about 15 s."""

AT_ONCE = 1024
"""Largest number of keys that are freed at once, without the thread."""

Table: TypeAlias = MutableMapping[Any, Any]


class Disposal:
    """Dictionaries and arrays to be freed, and the thread that frees them.

    Args:
        rest: waits for the given seconds; default: :func:`time.sleep`.
    """

    def __init__(self, rest: Callable[[float], object] = time.sleep) -> None:
        self._rest = rest
        self._waiting: deque[Table | NDArray[Any]] = deque()
        self._pool: ThreadPool | None = None
        self.needs_help = False
        """True if no thread could be started and tables wait: :meth:`help` frees keys of these."""

    def add_array(self, array: NDArray[Any]) -> None:
        """Free an array of numbers, which the caller does not use any more. Returns at once."""
        if array.nbytes >= LARGE_ARRAY:
            self.add([array])

    def add(self, tables: Iterable[Table | NDArray[Any]]) -> None:
        """Free ``tables``, which the caller does not use any more. Returns at once.

        If no thread can be started, the tables wait for :meth:`help` and the next call.
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

    def help(self, added: int) -> None:
        """Free keys in place of the thread that cannot be started.

        Args:
            added: number of keys that the caller adds to another table; twice as many are freed.
        """
        left = 2 * added
        while left > 0:
            try:
                table = self._waiting.popleft()
            except IndexError:
                self.needs_help = False
                return
            left -= free_some(table, left)
            if len(table) and not isinstance(table, np.ndarray):
                self._waiting.appendleft(table)

    def _refused(self, error: BaseException) -> None:
        self._pool = None
        self.needs_help = True

    def _run(self) -> None:
        self.needs_help = False
        while True:
            try:
                table = self._waiting.popleft()
            except IndexError:
                # The thread is not counted any more from here on; what has arrived since is taken all the same.
                self._pool = None
                if not self._waiting:
                    return
                continue
            while free_some(table, SLICE) and not isinstance(table, np.ndarray):
                self._rest(REST_SECONDS)


def free_some(table: Table | NDArray[Any], most: int) -> int:
    """Remove up to ``most`` keys, or free a whole array, and return how many entries there were."""
    if isinstance(table, np.ndarray):
        free_pages(table)
        return len(table)
    count = min(most, len(table))
    for _ in range(count):
        table.popitem()
    return count


DISPOSAL = Disposal()
"""The freeing of this process."""
