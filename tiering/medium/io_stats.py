"""Counters of a tier's I/O side, written by its threads and read by the scheduler's without a lock."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass(slots=True)
class IoStats:
    """Counters since the start."""

    read_bytes: int = 0
    """Bytes read from the medium, headers included."""
    read_seconds: float = 0.0
    """Seconds spent in reads, summed over threads."""
    written_bytes: int = 0
    """Bytes written to the medium, headers included."""
    written_seconds: float = 0.0
    """Seconds spent in writes, summed over threads."""
    requests: int = 0
    """Blocks requested of the medium, including failed attempts, probes and deletions."""
    retries: int = 0
    """Blocks that were sent again."""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    """Lock to hold for writing, never for reading."""
