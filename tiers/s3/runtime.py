"""The threads that obstore works on: a handful, whatever the machine has.

obstore's runtime starts once per process, with a thread per core unless the environment's TOKIO_WORKER_THREADS says
otherwise.  More threads than are busy only wake each other, for every piece of a body: on two cores, one thread instead
of two took a fifth off the CPU that gets from rclone cost.  They only receive and send; checksums, codecs and copies
are done by the tier's own threads.
"""

from __future__ import annotations

import os
import threading

import obstore
from obstore.store import MemoryStore

MOST_THREADS = 4
_CORES_PER_THREAD = 4
_VARIABLE = "TOKIO_WORKER_THREADS"

_lock = threading.Lock()
_started = False


def start_runtime() -> None:
    """Start obstore's runtime with few threads, unless it runs already or the environment has its own number."""
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
