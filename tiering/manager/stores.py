"""Stores of a manager of tiers, and the cascades that follow them."""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident

from tiering.api.keys import OffloadKey
from tiering.api.manager import PrepareStoreOutput
from tiering.api.misses import Unstored
from tiering.api.request import LATE_STORE, WANTED_STORE, ReqContext
from tiering.api.transfer import CPULoadStoreSpec, Rows
from tiering.manager.exclusive import ManagerExclusive
from tiering.manager.requests import Request


class ManagerStores(ManagerExclusive):
    """The part of a manager of tiers that gives rows to stores, and offers stored blocks to the tiers."""

    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, is_last: bool = False
    ) -> PrepareStoreOutput | None:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        self._rest.until = None
        if not self._jobs.collected:
            self._jobs.collect()
        request = self._known.get(req_context.req_id)
        if request is None or request.finished:
            self._requests.warn_of_late(req_context)
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        if not request.policy.store:
            return PrepareStoreOutput([], CPULoadStoreSpec([]), [])
        output = None
        if is_last or not self._broker.refuses(request, keys):
            output = self.primary_tier.prepare_store(keys, req_context)
            if output is None:
                self._jobs.collect()
                output = self.primary_tier.prepare_store(keys, req_context)
                if output is None and self._broker.take_rows(keys, request, is_last=is_last):
                    output = self.primary_tier.prepare_store(keys, req_context)
        if output is None:
            self._stats.stores_without_room += 1
            if request.refused_since is None:
                request.refused_since = self._clock()
            return None
        if output.keys_to_store:
            request.refused_since = None
            if self._further_copies:
                self.primary_tier.grant_copies(self._further_copies * len(output.keys_to_store))
        self._broker.evicted(output.evicted_keys)
        if len(output.keys_to_store) < len(keys) and request.wants_all:
            self._jobs.cascade_held(request.wants_all, keys, req_context)
            self._jobs.await_others(request, keys, output.keys_to_store)
        return output

    def complete_store(self, keys: Sequence[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        self.complete_stores(((keys, req_context, success),))

    def complete_stores(self, stores: Sequence[tuple[Sequence[OffloadKey], ReqContext, bool]]) -> None:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        self._rest.until = None
        finish = self.primary_tier.finish_store
        ended: list[tuple[Sequence[OffloadKey], Rows, ReqContext]] = []
        for keys, ctx, success in stores:
            stored, rows = finish(keys, ctx.req_id, success)
            if stored:
                ended.append((stored, rows, ctx))
        if ended:
            self.news.announce()  # Lookups that wait for these blocks may be repeated.
            if self._advisor is not None:
                self._advisor.stored(
                    [key for stored, _, _ in ended for key in stored] if len(ended) > 1 else ended[0][0]
                )
            if self._states:
                self._cascade_ended(ended)
            if self._is_exclusive:
                for stored, _, ctx in ended:
                    if ctx is not LATE_STORE:
                        self.primary_tier.mark_held(stored)
        if self._jobs.late_copies.leaving:
            self._make_recent([keys for keys, _, _ in stores])
        if self._jobs.awaited:
            self._cascade_awaited()
        for _, ctx, _ in stores:
            request = self._known.get(ctx.req_id)
            if request is not None and request.finished:
                self._close_if_done(request)

    def _cascade_ended(self, stores: Sequence[tuple[Sequence[OffloadKey], Rows, ReqContext]]) -> None:
        """Offer the blocks of stores that have ended in one step to the tiers of their requests."""
        jobs, several = self._jobs, len(stores) > 1
        if several:
            jobs.begin_together(sum([len(keys) for keys, _, _ in stores]))
        try:
            for keys, rows, ctx in stores:
                jobs.note_refilled(rows)
                if ctx is WANTED_STORE:
                    self._cascade_wanted(keys)
                elif ctx is not LATE_STORE:
                    request = self._known.get(ctx.req_id)
                    tiers = self._states if request is None else request.tiers
                    jobs.cascade(tiers, keys, rows, ctx)
                    if self.primary_tier.keeper is not None and len(tiers) == len(self._states):
                        # What a request keeps from a tier may be private to this process.
                        self.primary_tier.keeper.report(keys, rows)
        finally:  # nothing may stay gathered: its rows are not pinned
            if several:
                jobs.submit_together()

    def _close_if_done(self, request: Request) -> bool:
        """Close a finished request, unless its blocks are still being stored; return True if it is closed."""
        if self.primary_tier.has_open_stores(request.ctx.req_id) or request in self._jobs.awaited:
            return False
        self._close(request)
        return True

    def _close(self, request: Request) -> None:
        request.finished = True
        self._jobs.drop_awaited(request)
        self._promotions.release(request)
        if request.released:
            self._stats.blocks_released += self.primary_tier.release(request.released)
        for kept in request.kept:
            blocks = self.primary_tier.keep(kept, self._clock)
            self._stats.blocks_pinned += blocks if kept.is_pin else 0
            self._stats.blocks_retained += 0 if kept.is_pin else blocks
        self._requests.end(request)

    def _cascade_awaited(self) -> None:
        for request in self._jobs.cascade_awaited():
            self._close_if_done(request)

    def keep_unstored(self) -> None:
        """Keep the blocks that tiers do not take for :meth:`take_unstored`, which is called in every step."""
        self._owner.check()
        self._tiers.unstored = []

    def take_unstored(self) -> Sequence[Unstored]:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        unstored = self._tiers.unstored
        if not unstored:
            return ()
        self._tiers.unstored = []
        return unstored
