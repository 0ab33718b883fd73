"""The local tier: blocks in slots of preallocated files on a local disk (NVMe), kept over restarts.

What it guarantees:

- A block that was reported stored survives kill -9 at any moment; with ``durability: fsync`` also a loss of power.
  Recovery never makes a broken block readable: every read is verified.  (A key longer than the 48 bytes that a header
  holds is found again through a checkpoint only.)
- Everything in the directory together stays within ``capacity``; blocks of other namespaces go before our own.
- One process owns the directory.  Files are readable by their owner only.

``tiers.local.layout`` says what is where in the directory; it can be read (not written) while an engine works in it.
"""

from __future__ import annotations

import os

from tiering.secondary.contract import TierContext
from tiering.secondary.definition import TierDefinition
from tiering.secondary.files import Files
from tiers.local.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from tiers.local.layout import Geometry, tier_directory
from tiers.local.options import LocalOptions
from tiers.local.store import LocalStore
from tiers.local.tier import LocalTier

__all__ = [
    "LOCAL_TIER",
    "Checkpoint",
    "Files",
    "Geometry",
    "LocalOptions",
    "LocalStore",
    "LocalTier",
    "read_checkpoint",
    "tier_directory",
    "write_checkpoint",
]


def _build(options: LocalOptions, context: TierContext) -> LocalTier:
    return LocalTier(context, options)


def _location(options: LocalOptions) -> str:
    """The directory's absolute path, from its spelling alone: a hung mount must not block the validation of a stack.

    Two spellings of one directory (a symbolic link, a second mount) are found when the directory is locked.
    """
    return os.path.abspath(os.path.expanduser(options.path))  # noqa: PTH100, PTH111


LOCAL_TIER = TierDefinition(options=LocalOptions, build=_build, persistent=True, location=_location, distance="machine")
"""How the framework makes a local tier."""
