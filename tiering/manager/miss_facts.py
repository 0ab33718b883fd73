"""Facts about misses that only the manager has, for their explanation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tiering.api.keys import OffloadKey
from tiering.api.manager import LookupOutcome, OffloadingManager, Unstored
from tiering.api.request import ReqContext
from tiering.manager.requests import Request
from tiering.manager.tiers import SecondaryTiers


class MissFacts(OffloadingManager):
    """The part of a manager of tiers that reports facts about misses."""

    _known: Mapping[str, Request]
    _tiers: SecondaryTiers

    def keep_unstored(self) -> None:
        """Keep the blocks that tiers do not take for :meth:`take_unstored`, which is called in every step."""
        self._tiers.unstored = []

    def lookup_outcome(self, key: OffloadKey, req_context: ReqContext) -> LookupOutcome | None:
        request = self._known.get(req_context.req_id)
        return None if request is None else request.outcome_of(key)

    def take_unstored(self) -> Sequence[Unstored]:
        unstored = self._tiers.unstored
        if not unstored:
            return ()
        self._tiers.unstored = []
        return unstored
