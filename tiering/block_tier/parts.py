"""Parts that the members of a block tier share, and the hooks that its subclasses may override."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tiering.api.namespace import Namespace
from tiering.block_tier.event_log import EventLog
from tiering.block_tier.intake import Intake
from tiering.index.tier_index import TierIndex
from tiering.medium.block_store import BlockStore, Place
from tiering.medium.side import IoSide
from tiering.secondary.contract import TierContext, TransferJob
from tiering.secondary.options import BlockTierOptions
from tiering.secondary.tier_stats import TierStats


@dataclass(frozen=True, slots=True)
class TierParts:
    """Parts of one tier, which its members share."""

    context: TierContext
    options: BlockTierOptions
    store: BlockStore
    """The medium, without layers."""
    index: TierIndex
    io: IoSide
    intake: Intake
    events: EventLog
    stats: TierStats
    """Counters that the scheduler's thread updates."""


class TierHooks(ABC):
    """Hooks of a block tier, which subclasses override; the scheduler's thread calls them."""

    def on_opened(self, namespace: Namespace) -> None:
        """Hook: the store is open for the first time and serves ``namespace``; the place to start recovery."""

    def on_left(self) -> None:
        """Hook: a reset has begun; the tier has no namespace, and the index is about to be emptied."""

    def on_epoch(self, namespace: Namespace) -> None:
        """Hook: a reset has begun the epoch of ``namespace``.

        The index is empty, and all blocks on the medium are foreign.
        """

    def on_step(self) -> float | None:
        """Hook: a step has ended; the place to start periodic work.

        Start such work with :meth:`tiering.medium.chore.Chore.tick`.

        Returns:
            Seconds for which the hook need not be called unless a job or task ends
            (:attr:`tiering.secondary.contract.StepEnd.rest`); None: it is called in every step.
        """
        return math.inf

    def on_result(self, job: TransferJob) -> None:
        """Hook: a job has ended, and the index has not recorded its outcomes yet."""

    def before_close(self, deadline: float) -> None:
        """Hook: jobs have ended or their time is over, and the store is still open.

        May block until ``deadline``.
        """

    @property
    def recovering(self) -> bool:
        """True while the content of the medium is not entirely known (for subclasses with recovery)."""
        return False

    def revoked_places(self) -> Collection[Place]:
        """Return places that the medium lost while jobs ran; blocks written there do not count."""
        return ()

    @abstractmethod
    def retire(self, places: Sequence[Place]) -> None:
        """Take ``places`` with a device error out of use; their blocks are lost."""
