"""The start of obstore's runtime with few threads.

The runtime starts once per process, with one thread per core unless the environment's TOKIO_WORKER_THREADS has another
number. Idle threads wake each other for every piece of a body. With one thread instead of two on two cores, gets from
rclone took a fifth less CPU. These threads only receive and send; the tier's own threads compute checksums, run codecs
and copy.
"""

from __future__ import annotations

import os
import threading

import obstore
from obstore.store import MemoryStore

MOST_THREADS = 4
"""Most threads of obstore's runtime, on machines of 16 cores and more."""
_CORES_PER_THREAD = 4
_VARIABLE = "TOKIO_WORKER_THREADS"

_lock = threading.Lock()
_started = False


def start_runtime() -> None:
    """Start obstore's runtime with few threads, unless it runs already or the environment sets a number."""
    global _started  # noqa: PLW0603
    with _lock:
        if _started:
            return
        _started = True
        if _VARIABLE in os.environ:
            return
        threads = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // _CORES_PER_THREAD))
        os.environ[_VARIABLE] = str(threads)
        try:
            obstore.put(MemoryStore(), "first-use", b"", use_multipart=False)
        finally:
            del os.environ[_VARIABLE]
