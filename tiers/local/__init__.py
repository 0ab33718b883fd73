"""The local tier: blocks in slots of preallocated files on a local disk (NVMe), kept over restarts.

Guarantees:

- A stored block survives kill -9 at any moment; with ``durability: fsync`` also a loss of power. Recovery never makes a
  damaged block readable, because every read is verified. Headers hold keys of at most 48 bytes; a block with a longer
  key is recovered from a checkpoint only.
- The directory never holds more than ``capacity`` bytes. Blocks of other namespaces are dropped before this namespace's
  blocks.
- One process owns the directory. Files are readable by their owner only.

``tiers.local.layout`` describes the directory. Other processes may read it while an engine uses it, but not write.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from tiering.tier import TierAdmin, TierContext, TierDefinition
from tiers.local.local_options import LocalOptions
from tiers.local.tier import LocalTier

logger = logging.getLogger("kv_tiering.local")


def _build(options: LocalOptions, context: TierContext) -> LocalTier:
    if not Path(options.path).expanduser().is_absolute():
        logger.warning(
            "tier %s: path %s is relative, and means %s in this working directory: write an absolute path, or an "
            "engine that starts elsewhere finds no block",
            context.name,
            options.path,
            _location(options),
        )
    return LocalTier(context, options)


def _admin(options: LocalOptions, replica: str | None) -> TierAdmin:
    from tiers.local.admin import LocalAdmin

    return LocalAdmin(options, replica)


def _location(options: LocalOptions) -> str:
    """Return the directory's absolute path, from its spelling alone.

    A look at the disk could hang on a mount and block the validation of a stack. Two spellings of one directory (a
    symbolic link, a second mount) are detected when the directory is locked.
    """
    return os.path.abspath(os.path.expanduser(options.path))  # noqa: PTH100, PTH111


LOCAL_TIER = TierDefinition(
    options=LocalOptions, build=_build, persistent=True, location=_location, distance="machine", admin=_admin
)
