"""Parts of a local tier that its background work shares."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from tiering.tier import IoSide, SlotIndex
from tiers.local.store import LocalStore


@dataclass(frozen=True, slots=True)
class LocalParts:
    """Parts of one tier. The scheduler's thread owns the index and the work; tasks run on the I/O side."""

    name: str
    """Name of the tier, for log lines."""
    store: LocalStore
    """Store of the tier."""
    index: SlotIndex
    """Index of the tier."""
    io: IoSide
    """I/O side that runs the tasks."""
    clock: Callable[[], float]
    """Function that returns monotonic seconds."""
    stop: threading.Event
    """Event that is set when the tier shuts down."""
