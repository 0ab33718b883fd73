"""A local tier on a disk that fails repeatably: ``type: tests.mini_engine.bad_disk:BAD_DISK``."""

from __future__ import annotations

import errno
import random
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from tests.device import FaultyDevice
from tiering.block_tier.definition import TierDefinition
from tiering.secondary.contract import TierContext
from tiers.local.local_options import LocalOptions
from tiers.local.tier import LocalTier

_ERRORS = {
    "read": (errno.EIO, errno.EAGAIN),
    "write": (errno.ENOSPC, errno.EIO, errno.EAGAIN),
    "allocate": (errno.ENOSPC,),
}


class BadDisk(FaultyDevice):
    """Real files on a disk that is full, broken or busy, or whose reads have a flipped bit."""

    seed: ClassVar[int] = 0
    """Seed of the next disk."""
    injected_in_all: ClassVar[int] = 0
    """Number of faults so far, on all disks."""

    def __init__(self) -> None:
        super().__init__()
        self.dice = random.Random(self.seed)
        self.fail = self._fail

    def _fail(self, operation: str, path: Path) -> None:
        if path.name.startswith("slots-") and operation in _ERRORS and self.dice.random() < 0.06:
            BadDisk.injected_in_all += 1
            raise OSError(self.dice.choice(_ERRORS[operation]), "injected")

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        done = super().preadv(fd, buffers, offset)
        if self.dice.random() < 0.1 and done:
            BadDisk.injected_in_all += 1
            target = self.dice.choice([buffer for buffer in buffers if len(buffer)])
            target.cast("B")[self.dice.randrange(len(target))] ^= 1 << self.dice.randrange(8)
        return done


def build(options: LocalOptions, context: TierContext) -> LocalTier:
    return LocalTier(context, options, files=BadDisk())


BAD_DISK = TierDefinition(options=LocalOptions, build=build, persistent=True)
