"""An exclusive primary tier, which prefers the blocks that the engine's own cache does not hold."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from threading import get_ident

from tiering.api.keys import PRIMARY_TIER, OffloadKey
from tiering.api.manager import PrepareStoreOutput
from tiering.api.request import LATE_STORE
from tiering.manager.cascade_queue import NOBODY
from tiering.manager.parts import ManagerParts

_log = logging.getLogger("kv_tiering.manager")

COPIES_PER_BLOCK = 1.2
"""Copies per computed block, up to which an exclusive primary tier evicts held blocks first.

Blocks that left the engine's cache and had not been loaded into it were computed.
"""

BOUNDS_COPIES_FROM = 2.5
"""Rows per block of the engine's cache from which copies are bounded.

An inclusive tier of that size has most of the hits as well, and copies each computed block once. With secondary tiers,
computed blocks are copied in any case, and a second time only if no tier has them or after they were loaded.
"""


class ManagerExclusive(ManagerParts):
    """The part of a manager of tiers that follows the engine's own cache, and stores what leaves it."""

    def hold_exclusively(self, holds: Callable[[Sequence[OffloadKey]], Sequence[bool]] | None, blocks: int = 0) -> bool:
        self._owner.claim()
        if self._exclusive and holds is None:
            _log.warning("primary.inclusion: is inclusive, because the engine does not show what its own cache holds")
        elif self._exclusive and holds is not None:
            self.primary_tier.begin_first_victims(holds)
            self._is_exclusive = True
            if self._advisor is not None:
                self._advisor.exclude(PRIMARY_TIER, blocks)
            self._bounds_copies = not self._states and 0 < BOUNDS_COPIES_FROM * blocks <= self.primary_tier.num_rows
            self._missing = {}
            self._jobs.fed.most = blocks or self.primary_tier.num_rows
        return self._is_exclusive

    @property
    def stores_computed(self) -> bool:
        return not self._is_exclusive or bool(self._states)

    def engine_holds(self, keys: Sequence[OffloadKey]) -> None:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        self.primary_tier.mark_held(keys)

    def engine_dropped(self, keys: Sequence[OffloadKey]) -> int:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        self.primary_tier.unmark_held(keys)
        left = self._jobs.fed.others(self.primary_tier.unknown(keys))
        self._jobs.fed.discard(keys)
        return len(left)

    def take_wanted(self) -> Sequence[OffloadKey]:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        missing = self._missing
        if not missing:
            return ()
        self._wanting, self._missing = missing, {}
        keys = self.primary_tier.unknown(list(missing))
        self._cascade_wanted([key for key in missing if key in self._readable])
        return keys

    def _cascade_wanted(self, keys: Sequence[OffloadKey]) -> None:
        """Offer readable blocks to the tiers that want them."""
        for state in self._states:
            self._jobs.cascade_held((state,), [key for key in keys if self._wanting.get(key) is state], NOBODY)

    def prepare_late_store(self, keys: Sequence[OffloadKey]) -> PrepareStoreOutput | None:
        self._enter()
        self.primary_tier.unmark_held(keys)
        copied, fed, wanting, readable = keys, self._jobs.fed, self._wanting, self._readable
        if fed:
            others = frozenset(fed.others(keys))
            copied = [key for key in keys if key in others or key in readable or key in wanting]
        output = self.primary_tier.prepare_store(copied, LATE_STORE)
        if output is not None:
            fed.discard(keys)
            self._broker.evicted(output.evicted_keys)
            if self._bounds_copies:
                self.primary_tier.grant_copies(COPIES_PER_BLOCK * len(keys) - len(output.keys_to_store))
        return output
