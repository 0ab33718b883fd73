"""What the I/O side of a tier counts.  Written by its threads, read by the scheduler's without a lock."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass(slots=True)
class IoStats:
    """Counters since the start.

    Bytes are those that moved to or from the medium, headers included.  Seconds are summed over threads.  ``requests``
    counts blocks asked of the medium, attempts that failed, probes and deletions included; ``retries`` blocks that were
    sent again; ``corrupt`` blocks refused; ``overdue`` blocks whose deadline passed before an attempt.  ``lock``: held
    to write, never to read.
    """

    read_bytes: int = 0
    read_seconds: float = 0.0
    written_bytes: int = 0
    written_seconds: float = 0.0
    requests: int = 0
    retries: int = 0
    corrupt: int = 0
    overdue: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
