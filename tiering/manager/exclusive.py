"""An exclusive primary tier, which prefers the blocks that the engine's own cache does not hold."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from threading import get_ident

from tiering.api.keys import PRIMARY_TIER, OffloadKey
from tiering.api.manager import PrepareStoreOutput
from tiering.api.request import LATE_STORE
from tiering.manager.cascade_queue import NOBODY
from tiering.manager.parts import ManagerParts

_log = logging.getLogger("kv_tiering.manager")

SPARES_BELOW = 2.5
"""Rows per GPU block below which blocks that a tier has take no row before their second use.

A larger CPU tier would lose hits of an inclusive one by this.
"""


class ManagerExclusive(ManagerParts):
    """The part of a manager of tiers that follows the engine's own cache, and stores what leaves it."""

    def hold_exclusively(self, holds: Callable[[Sequence[OffloadKey]], Sequence[bool]] | None, blocks: int = 0) -> bool:
        self._owner.claim()
        if self._exclusive and holds is None:
            _log.warning("primary.inclusion: is inclusive, because the engine does not show what its own cache holds")
        elif self._exclusive and holds is not None:
            self.primary_tier.begin_first_victims(holds, blocks / 2)
            self._is_exclusive = True
            if self._advisor is not None:
                self._advisor.exclude(PRIMARY_TIER, blocks)
            self._missing = {}
            self._jobs.late_copies.most = 2 * (blocks or self.primary_tier.num_rows)
            self._jobs.late_copies.enough = blocks / 4
            self._jobs.late_copies.spares = self.primary_tier.num_rows < SPARES_BELOW * blocks or not blocks
            self._further_copies = self._most_further_copies(blocks)
        return self._is_exclusive

    def _most_further_copies(self, blocks: int) -> float:
        """Return the copies that are allowed for each of an inclusive tier's, in addition; 0: any number.

        With secondary tiers, an inclusive tier computes no more than this one. Without, or with small ones only, it
        does so the more, the smaller it is; of the size of the engine's cache, its copies are as many as unbounded ones
        are here.
        """
        rows, sizes = self.primary_tier.num_rows, [state.traits.capacity_blocks for state in self._states]
        if sizes and (rows > blocks or any(size is None or size >= rows for size in sizes)):
            return min(1.0, blocks)
        return blocks / (2 * max(1, rows - blocks)) if rows > blocks else 0.0

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
        left = self._jobs.late_copies.chosen(self.primary_tier.unknown(keys))
        self._jobs.late_copies.discard(keys)
        return len(left)

    def lacked(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        return self.primary_tier.unknown(keys)

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
        copied, late, wanting, readable = keys, self._jobs.late_copies, self._wanting, self._readable
        if late:
            chosen = frozenset(late.chosen(keys, self.primary_tier.copy_credit))
            copied = [key for key in keys if key in chosen or key in readable or key in wanting]
        output = self.primary_tier.prepare_store(copied, LATE_STORE)
        if output is not None:
            self._broker.evicted(output.evicted_keys)
            if self._further_copies:
                self._count_copies(output.keys_to_store)
            late.discard(keys)
            if 0 < len(output.keys_to_store) < len(keys):
                late.leaving[output.keys_to_store[0]] = keys
        return output

    def _make_recent(self, stores: Iterable[Sequence[OffloadKey]]) -> None:
        """Make the blocks recent in the order in which they leave, because stores of some of them have ended.

        The head of a prompt must stay more recent than its new blocks: these are useless without it.
        """
        for keys in stores:
            if keys and (leaving := self._jobs.late_copies.leaving.pop(keys[0], None)) is not None:
                self.primary_tier.refresh_readable(leaving)

    def _count_copies(self, keys: Sequence[OffloadKey]) -> None:
        """Add to the credit what late copies cost.

        Without secondary tiers, the copy of a computed block is the one that an inclusive tier makes as well.
        """
        number = len(keys)
        returned = number if self._states else self._jobs.late_copies.count(keys)
        self.primary_tier.grant_copies(self._further_copies * (number - returned) - returned)
