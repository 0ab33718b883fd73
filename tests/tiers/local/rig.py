"""A local tier for tests, ways to end it, and direct access to its segment files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tiering.api.keys import OffloadKey
from tiering.medium.files import Files
from tiering.secondary.contract import TierContext
from tiering.testing.tier_rig import PATIENCE_SECONDS, TierRig
from tiers.local.layout import PAGE
from tiers.local.local_options import LocalOptions
from tiers.local.tier import LocalTier

BLOCK_BYTES = 8 << 10
SLOT_BYTES = BLOCK_BYTES + PAGE
CAPACITY = 1 << 20


def writes_checkpoint(tier: LocalTier) -> bool:
    """Return True if a checkpoint is being written or about to be written."""
    checkpoints = tier.checkpoints
    due = checkpoints.changed and tier.context.clock() >= checkpoints.due
    return checkpoints.running or checkpoints.copying or due


class LocalRig(TierRig):
    """A tier in directory ``path``, with options as in a stack file."""

    tier: LocalTier

    def __init__(
        self,
        path: Path,
        *,
        files: Files | None = None,
        model: str = "model-a",
        group_bytes: tuple[int, ...] = (BLOCK_BYTES,),
        events: bool = False,
        num_rows: int = 256,
        revision: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        **options: object,
    ) -> None:
        self.local_options = make_options(path, **options)

        def make_tier(context: TierContext) -> LocalTier:
            return LocalTier(context, self.local_options, files=files)

        super().__init__(
            make_tier,
            group_bytes=group_bytes,
            model=model,
            events=events,
            num_rows=num_rows,
            revision=revision,
            clock=clock,
        )

    def open(self) -> LocalRig:
        super().open()
        self.wait(lambda: not self.tier.recovering)
        return self

    def checkpoint(self) -> None:
        """Write a checkpoint now."""
        self.tier.checkpoints.request()
        self.wait(lambda: not writes_checkpoint(self.tier))

    def drop(self) -> None:
        """End like a killed process: no checkpoint, no cleanup."""
        self.tier.io.close(self.context.clock() + PATIENCE_SECONDS)
        self.tier.store.close()

    def held(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return those of ``keys`` that the tier holds."""
        return [key for key in keys if self.lookup([key])]

    def place(self, key: OffloadKey) -> int:
        """Return the slot of a held key."""
        (place,) = self.tier.index.begin_load([key])
        if not isinstance(place, int):
            raise TypeError(f"{key.hex()} is not held")
        self.tier.index.end_load([key], [place], [False], 0.0)
        return place

    def location(self, slot: int) -> tuple[Path, int]:
        """Return the file and the offset of a slot."""
        geometry = self.tier.store.geometry
        number, offset = geometry.locate(slot)
        return self.tier.store.directory / geometry.segment_name(number), offset


def make_options(path: Path, **options: object) -> LocalOptions:
    """Return options for a small tier in ``path``."""
    return LocalOptions.model_validate({"type": "local", "path": str(path), "capacity": CAPACITY, **options})


@contextmanager
def opened(path: Path, **options: object) -> Iterator[LocalRig]:
    """A tier in service in ``path``, shut down at the end."""
    rig = LocalRig(path, **options).open()  # type: ignore[arg-type]
    try:
        yield rig
    finally:
        rig.close()


def segment_files(path: Path) -> list[Path]:
    """Return the segment files in ``path``."""
    return sorted(path.glob("slots-*"))
