"""Stages of a job in a tier: a store is planned, and then runs on the I/O side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tiering.api.keys import OffloadKey
from tiering.medium.block_store import Place
from tiering.medium.messages import IoJob
from tiering.secondary.contract import TransferJob


class PlannedStore(NamedTuple):
    """A store whose places are reserved; all sequences but ``held`` are co-indexed."""

    job: TransferJob
    """The job as the manager submitted it."""
    held: list[OffloadKey]
    """Keys that need no I/O, because the medium holds them already."""
    keys: Sequence[OffloadKey]
    """Keys to store."""
    rows: list[int]
    """Primary row of each block."""
    places: list[Place]
    """Reserved place of each block."""
    sizes: list[int]
    """Raw bytes of each block."""

    def split(self, granted: Sequence[bool]) -> tuple[PlannedStore, PlannedStore]:
        """Return the part of this store that is granted, and the part that is not."""
        return self._part(granted), self._part([not grant for grant in granted])

    def _part(self, chosen: Sequence[bool]) -> PlannedStore:
        at = [position for position, choice in enumerate(chosen) if choice]
        return PlannedStore(
            self.job,
            self.held,
            [self.keys[position] for position in at],
            [self.rows[position] for position in at],
            [self.places[position] for position in at],
            [self.sizes[position] for position in at],
        )


class RunningJob(NamedTuple):
    """Job that runs on the I/O side."""

    job: TransferJob
    """The job as the manager submitted it."""
    held: list[OffloadKey]
    """Keys that need no I/O, because the medium holds them already."""
    io: IoJob
    """The job as it was submitted to the I/O side."""
    epochs: int
    """Number of epochs that the tier had left when the job was submitted."""
