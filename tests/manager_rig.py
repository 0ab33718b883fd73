"""A tiering manager over a small primary tier, with a clock that stands still."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tiering.api.keys import OffloadKey
from tiering.api.request import ReqContext
from tiering.manager.manager import TieringOffloadingManager
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.secondary.contract import SecondaryTierManager
from tiering.testing.clock import FakeClock
from tiering.testing.fake_tier import FakeTier


class ManagerRig:
    """A manager, its primary tier, its secondary tiers, and a first request "r1".

    Args:
        rows: number of primary rows, 16 bytes each; default 8.
        tiers: the secondary tiers, fastest first; default: none.
        options: options of the manager, as :class:`~tiering.TieringOffloadingManager` takes them.
    """

    def __init__(self, rows: int = 8, tiers: Sequence[SecondaryTierManager] = (), **options: Any) -> None:
        self.clock = FakeClock()
        self.buffer = np.zeros((rows, 16), np.uint8)
        self.primary = CPUPrimaryTierOffloadingManager(self.buffer.data, enable_events=True)
        self.tiers = list(tiers)
        """The secondary tiers, fastest first."""
        self.manager = TieringOffloadingManager(
            self.primary, self.tiers, enable_events=True, clock=self.clock, **options
        )
        self.ctx = self.request("r1")
        """A request without limits of its own."""

    def request(self, req_id: str, **params: object) -> ReqContext:
        """Announce a request to the manager and return its context.

        Args:
            req_id: the request's id.
            params: the request's ``kv_tiering`` parameters.
        """
        ctx = ReqContext(req_id, {"kv_tiering": params} if params else None)
        self.manager.on_new_request(ctx)
        return ctx

    def store(self, keys: Sequence[OffloadKey], ctx: ReqContext | None = None) -> None:
        """Store blocks, end the cascades of fake tiers, and end the step.

        Args:
            keys: the blocks.
            ctx: the request that stores; default: ``self.ctx``.

        Raises:
            AssertionError: the manager has no room for the blocks.
        """
        output = self.manager.prepare_store(keys, ctx or self.ctx)
        if output is None:
            raise AssertionError(f"the manager has no room for {len(keys)} blocks")
        self.manager.complete_store(output.keys_to_store, ctx or self.ctx)
        for tier in self.tiers:
            if isinstance(tier, FakeTier):
                for job in list(tier.stores):
                    tier.finish(job)
        self.step()

    def step(self) -> None:
        """End the engine's step."""
        self.manager.on_schedule_end()

    def stat(self, name: str) -> int:
        """Return a counter or gauge of :class:`~tiering.manager.manager_stats.ManagerStats` by its name."""
        return int(self.manager.get_stats()["manager"][name])
