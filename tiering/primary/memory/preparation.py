"""The preparation of one side's rows, beside the start of the engine if there is much to prepare.

The kernel takes seconds to give a large region its pages, and so does a driver to pin them. Until all sides have
prepared theirs, no row is given to a block: a write to a page that has no memory yet could end the process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger("kv_tiering.region")

PREPARING, PREPARED, FAILED = 0, 1, 2
"""States of a side."""

Work = Callable[[Callable[[], bool]], None]
"""A part of the preparation. Its argument returns True once the part is to end early."""


class Preparation:
    """The parts of one side's preparation, which run one after the other on one thread.

    Args:
        state: one byte that the other sides see: :data:`PREPARING`, :data:`PREPARED` or :data:`FAILED`.
    """

    def __init__(self, state: NDArray[np.uint8]) -> None:
        self._state = state
        self._parts: deque[Work] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._began = time.monotonic()
        state[0] = PREPARING

    def run(self, part: Work) -> None:
        """Run a part now. A preparation without other parts has ended then; an error is the caller's."""
        part(self._closed.is_set)
        with self._lock:
            if self._thread is None:
                self._state[0] = PREPARED

    def begin(self, part: Work) -> None:
        """Run a part behind those that have begun before, beside the caller.

        A part that raises ends the preparation: the error is logged, and the rows are never used. Without a thread the
        part runs now.
        """
        with self._lock:
            if self._closed.is_set() or self._state[0] == FAILED:
                return
            self._state[0] = PREPARING
            self._parts.append(part)
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._work, name="kv-tiering-prepare", daemon=True)
        try:
            self._thread.start()
        except (RuntimeError, MemoryError) as error:
            logger.warning(
                "the engine's start waits for the primary tier's memory: no thread can be started: %s", error
            )
            self._work()

    def close(self) -> None:
        """End the preparation early, and wait for the part that runs."""
        self._closed.set()
        thread = self._thread
        if thread is not None and thread.ident is not None:
            thread.join()
        with self._lock:
            self._parts.clear()
            self._state = self._state.copy()  # the shared byte would keep the rows' memory mapped

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._parts or self._closed.is_set():
                    self._thread = None
                    if not self._closed.is_set():
                        self._state[0] = PREPARED
                        logger.info(
                            "the primary tier's memory is prepared, after %.1f s", time.monotonic() - self._began
                        )
                    return
                part = self._parts.popleft()
            try:
                part(self._closed.is_set)
            except BaseException as error:
                with self._lock:
                    self._parts.clear()
                    self._state[0], self._thread = FAILED, None
                logger.error("the engine runs without its primary tier, whose memory could not be prepared: %s", error)
                return
