"""What a stack file may say about a local tier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from tiering.api.units import Directory, Duration, Size
from tiering.secondary.options import TierOptions


class LocalOptions(TierOptions):
    """A directory on a local disk (NVMe) that this engine owns.

    ``capacity`` bounds everything in the directory, blocks of other namespaces included.
    """

    unsupported: ClassVar[Mapping[str, str]] = {
        "compression": "its slots have one size, so a block that shrinks gains nothing; compress in an object store tier",
        "ttl": "its blocks leave by eviction when room is needed, and age alone does not make one wrong; set capacity instead",
        "lookup_deadline": "it answers lookups from memory, at once",
    }

    path: Directory
    """The directory; created, readable by its owner only.  Data-parallel replicas use a subdirectory each."""
    capacity: Size
    durability: Literal["none", "fsync"] = "none"
    """What a block that was reported stored survives: "none": kill -9 of the engine; "fsync": also a loss of power."""
    segment_size: Size = 1 << 30
    """Bytes of one preallocated file of slots; smaller when the capacity is below four of them."""
    checkpoint_interval: Duration = 300.0
    """Seconds between two checkpoints of the table; a restart scans what was written since the last one."""
