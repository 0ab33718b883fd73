"""The options of the local tier in a stack file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from tiering.tier import BlockTierOptions, Directory, Duration, Size, SlotOptions


class LocalOptions(BlockTierOptions, SlotOptions):
    """A directory on a local disk (NVMe) that this engine owns."""

    unsupported: ClassVar[Mapping[str, str]] = {
        "compression": (
            "its slots have one size, so a block that shrinks gains nothing; compress in an object store tier"
        ),
        "ttl": "blocks leave by eviction when room is needed, and age alone makes no block wrong; set capacity instead",
        "lookup_deadline": "it answers lookups from memory, at once",
    }

    path: Directory
    """The directory.

    The tier creates it, readable by its owner only; data-parallel replicas use a subdirectory each.
    """
    capacity: Size
    """Bytes of everything in the directory, blocks of other namespaces included."""
    durability: Literal["none", "fsync"] = "none"
    """Failures that a stored block survives; default "none".

    "none" covers kill -9 of the engine; "fsync" also covers a loss of power.
    """
    segment_size: Size = 1 << 30
    """Bytes of one preallocated file of slots; default 1 GiB.

    A capacity below four of them reduces the size. A directory has at most 65,536 files smaller than 1 GiB.
    """
    checkpoint_interval: Duration = 300.0
    """Seconds between two checkpoints of the block table; default 300.

    A restart reads the headers of the segments that were written since the last checkpoint.
    """
