"""The stores of a step: from the blocks that a request has completed to a transfer order."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiering.api.keys import OffloadKey
from tiering.api.manager import OffloadingManager
from tiering.api.request import LATE_STORE, WANTED_STORE
from tiering.api.transfer import CPULoadStoreSpec, GPULoadStoreSpec, LoadStoreSpec, Rows, as_rows
from tiering.connector.engine_cache import EngineCache
from tiering.connector.events import OffloadingEventsTracker
from tiering.connector.groups import OffloadGroup
from tiering.connector.hit_ends import HitEnds
from tiering.connector.jobs import BlockFences, Job, JobTable
from tiering.connector.metadata import ReqId, TransferOrder
from tiering.connector.requests import RequestState
from tiering.connector.tracked import NEVER
from tiering.errors import ConfigError
from tiering.manager.sessions import Sessions
from tiering.runtime.ratelimit import LimitedWarning

logger = logging.getLogger("kv_tiering.connector")


class Offer(NamedTuple):
    """The blocks of one KV-cache group that are offered to the manager."""

    positions: Sequence[int]
    """Positions of the offloaded blocks in the request."""
    keys: list[OffloadKey]
    """Keys of the offloaded blocks."""
    block_ids: Rows
    """GPU blocks of the offloaded blocks, in logical order."""
    end: int = 0
    """Position of the first offloaded block of the group that cannot be offered yet."""


class StorePlanner:
    """Planner that offers each completed block to the manager once, and orders the stores.

    A block is offered under these conditions:

    - Its tokens are confirmed: computed at the end of the step, and with known values (no placeholders, no drafts that
      may be rejected).
    - Its tokens are not computed again (the volatile tail of a group), and do not follow a hole that a failed load
      left.
    - A hit can use the block, and is worth it (:mod:`tiering.connector.hit_ends`).
    - Its hash exists: the cursor of a group never passes a missing hash.

    Args:
        groups: the KV-cache groups.
        ends: the positions where hits may end.
        manager: accepts blocks and assigns rows.
        jobs: the connector's jobs, shared with the load planner.
        fences: fences of the GPU blocks, shared with the load planner.
        events: tracker of KV events.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        groups: Sequence[OffloadGroup],
        ends: HitEnds,
        manager: OffloadingManager,
        jobs: JobTable,
        fences: BlockFences,
        events: OffloadingEventsTracker,
        clock: Callable[[], float],
    ) -> None:
        self._groups = groups
        self._ends = ends
        self._windows = [group for group in groups if not group.is_full and not group.is_state]
        self._placed = [group for group in groups if not group.is_state]
        """The groups whose blocks are offered by their place. States are handed over instead."""
        self._manager = manager
        self._jobs = jobs
        self._fences = fences
        self._events = events
        self._described = [events.captures(group) for group in groups]
        """By KV-cache group: True if KV events describe the blocks of the group."""
        self._largest_block = max(group.offloaded_block_size for group in groups)
        self._no_offers = [Offer((), [], as_rows([]))] * len(groups)
        self._warn_full = LimitedWarning(logger, clock)
        self._holds_back = any(group.volatile_tokens for group in groups)
        self.last: dict[ReqId, TransferOrder] = {}
        """Last stores of requests that have ended; no worker has received these orders."""
        self.engine_cache: EngineCache | None = None
        """The blocks that the engine's own cache holds; None if the CPU tier is inclusive."""
        self.sessions: Sessions | None = None
        """The sessions that have computed the blocks; None if none is followed."""
        self.refused_offers = 0
        """Number of offers that found no room in the primary tier, since the start."""

    def plan(self, state: RequestState, scheduled_tokens: int, step: int) -> TransferOrder | None:
        """Return the store order for the blocks that this step completes.

        Args:
            state: the request.
            scheduled_tokens: tokens that the step computes after ``request.num_computed_tokens``.
            step: number of the step.

        Returns:
            The order; None if there is nothing to store, or no room now.
        """
        pace = state.pace
        if step < pace.retry_at_step:
            return None
        order, refused = self._plan(state, scheduled_tokens, pace.batch_tokens)
        if refused:
            self._refused(state, refused, step)
        return order

    def plan_last(self, state: RequestState) -> None:
        """Offer once more the remaining blocks of a request that ends.

        The remaining blocks are those that were not taken, and those of volatile tokens, which are final now. If there
        is no room for all of them, the first half is offered. :meth:`take_last` returns the order with the next step.
        """
        if not (state.pace.waiting or self._holds_back):
            return
        order, refused = self._plan(state, 0, NEVER, is_last=True)
        if refused:
            self.refused_offers += 1
            order, _ = self._plan(state, 0, max(self._largest_block, refused // 2), is_last=True)
        if order is not None:
            self.last[state.ctx.req_id] = order

    def take_last(
        self, reused: Collection[int], running: Collection[ReqId]
    ) -> tuple[dict[ReqId, TransferOrder], list[Job]]:
        """Return the orders of :meth:`plan_last` to send now, and the jobs that were withdrawn instead.

        Args:
            reused: jobs whose blocks this step overwrites before their copy could start.
            running: ids of the requests that run now; one of them may have the id of a request that has ended.
        """
        if not self.last:
            return {}, []
        last, self.last = self.last, {}
        withdrawn = [
            (req_id, self._jobs.withdraw(order.job_id))
            for req_id, order in last.items()
            if order.job_id in reused or req_id in running or self._jobs.has_failed(order.job_id)
        ]
        for req_id, _ in withdrawn:
            del last[req_id]
        return last, [job for _, job in withdrawn if job is not None]

    def _plan(
        self, state: RequestState, scheduled_tokens: int, most_tokens: int, *, is_last: bool = False
    ) -> tuple[TransferOrder | None, int]:
        """Return the order, and the number of tokens that found no room."""
        request = state.request
        start: int = request.num_computed_tokens
        placeholders: int = getattr(request, "num_output_placeholders", 0)
        computed = min(start + scheduled_tokens - placeholders, request.num_tokens)
        state.extend_keys(self._groups)
        for group in self._windows:
            gone = -(-group.skipped_blocks(start) // group.block_size_factor)
            group_state = state.groups[group.group_idx]
            group_state.cursor = max(group_state.cursor, gone)
        offered_from, store_limit = NEVER, state.store_limit
        for group in self._placed:
            offered_from = min(offered_from, state.groups[group.group_idx].cursor * group.offloaded_block_size)
        whole = min(computed, store_limit)
        limit = min(whole, offered_from + most_tokens)
        offers: list[Offer] = []
        for group in self._groups:
            offers.append(self._offer(state, group, limit if is_last else min(limit, computed - group.volatile_tokens)))
            if self._fences.is_written(offers[-1].block_ids):
                return None, 0
        order, stored = None, offers
        cache = self.engine_cache if state.variant is None else None
        offered, new = list[OffloadKey](), list[OffloadKey]()
        if cache is not None:
            if self.sessions is not None and (state.hints.session is not None or len(self.sessions)):
                offered = [key for offer in offers for key in offer.keys]
                new = list(self._manager.lacked([key for key in offered if key not in cache.blocks_of]))
            stored = self._not_noted(cache, offers, state)
        keys = [key for offer in stored for key in offer.keys]
        if keys:
            output = self._manager.prepare_store(keys, state.ctx, is_last=is_last)
            if output is None:
                return None, limit - offered_from
            state.pace.accepted(all_blocks=limit == whole)
            if len(output.keys_to_store):
                order = self.order(state, stored, keys, output.keys_to_store, output.store_spec)
            if cache is None:
                self._note_users(state, offers, keys, output.keys_to_store)
        if cache is not None:
            self._note_users(state, offers, offered, new)
            for group, offer in zip(self._groups, offers, strict=True):
                cache.note(state.request, group, offer.positions, offer.keys, offer.block_ids.tolist())
        state.next_store_at = NEVER
        for group, group_state, offer in zip(self._groups, state.groups, offers, strict=True):
            group_state.cursor = max(group_state.cursor, offer.end)
            end = (group_state.cursor + 1) * group.offloaded_block_size
            if end <= store_limit and not group.is_state:
                state.next_store_at = min(state.next_store_at, end + group.volatile_tokens)
        return order, 0

    def _note_users(
        self, state: RequestState, offers: Sequence[Offer], keys: Sequence[OffloadKey], new: Sequence[OffloadKey]
    ) -> None:
        """Note for sessions those of the offered blocks that the request has computed, and not found.

        Args:
            state: the request.
            offers: the blocks.
            keys: names of the blocks.
            new: those that no request has left in a cache before.
        """
        session, sessions = state.hints.session, self.sessions
        if sessions is None or (session is None and (len(new) == len(keys) or not len(sessions))):
            return  # the request's blocks were noted at its first match, and nobody can have computed these since
        filled, computed = state.filled_tokens, list[OffloadKey]()
        for group, offer in zip(self._groups, offers, strict=True):
            if len(offer.keys):
                computed += offer.keys[bisect_left(offer.positions, filled // group.offloaded_block_size) :]
        sessions.computed(computed, session, None if len(new) == len(keys) else frozenset(new))

    def _not_noted(self, cache: EngineCache, offers: Sequence[Offer], state: RequestState) -> list[Offer]:
        """Return the part of ``offers`` that an exclusive CPU tier stores now, to feed other tiers."""
        if not cache.feeds_tiers:
            return self._no_offers
        if state.request_level:
            return list(offers)
        chosen = []
        for group, offer in zip(self._groups, offers, strict=True):
            new = [key not in cache.blocks_of for key in offer.keys]
            ids = offer.block_ids.reshape(-1, group.block_size_factor)[np.array(new, np.bool_)].reshape(-1)
            chosen.append(Offer(list(compress(offer.positions, new)), list(compress(offer.keys, new)), ids))
        return chosen

    def plan_late(self, cache: EngineCache, stores: dict[ReqId, TransferOrder], *, walks: bool) -> None:
        """Add the order for blocks that are about to leave the engine's cache, or that other tiers want.

        Args:
            cache: the blocks that the engine's cache holds.
            stores: orders by request.
            walks: False while the walk rests.
        """
        ctx, late = LATE_STORE, cache.plan() if walks else None
        if late is None and cache.feeds_tiers:
            ctx, late = WANTED_STORE, cache.plan_wanted()
        if late is not None:
            job = self._jobs.open(ctx, late.keys)
            self._fences.fence(job.job_id, late.source.block_ids, writes=False)
            stores[LATE_STORE.req_id] = TransferOrder(job.job_id, (late.source, late.destination))

    def note_loaded(self, state: RequestState) -> None:
        """Note the blocks that a request has found and loaded, if they may be stored."""
        cache = self.engine_cache
        if cache is None or state.variant is not None or state.invalid_from is not None or not state.policy.store:
            return
        end = min(state.filled_tokens, state.store_limit)
        for group in self._placed:
            group_state = state.groups[group.group_idx]
            cursor, group_state.cursor = group_state.cursor, 0
            offer = self._offer(state, group, end)
            group_state.cursor = cursor
            cache.note(state.request, group, offer.positions, offer.keys, offer.block_ids.tolist())

    def _offer(self, state: RequestState, group: OffloadGroup, confirmed: int) -> Offer:
        """Return the blocks of ``group`` among the ``confirmed`` tokens that are to be offered now."""
        group_state, factor, end = state.groups[group.group_idx], group.block_size_factor, 0
        if not group.is_state and confirmed > 0:
            blocks = len(group_state.block_ids) // factor
            end = min(confirmed // group.offloaded_block_size, len(group_state.keys), blocks)
        first = min(group_state.cursor, end)
        table = group_state.block_ids[first * factor : end * factor]
        keys, block_ids = group_state.keys[first:end], np.array(table, dtype=np.int64)
        has_nulls = 0 in table
        wanted = None
        if group.selects and first < end:
            wanted = self._ends.stored(group, range(first, end), state, state.store_limit)
        if wanted is None and not has_nulls:
            return Offer(range(first, end), keys, block_ids, end)
        if wanted is None:
            wanted = np.ones(end - first, np.bool_)
        if has_nulls:
            wanted &= block_ids.reshape(-1, factor).all(axis=1)
        block_ids, taken = block_ids.reshape(-1, factor)[wanted].reshape(-1), wanted.tolist()
        return Offer(list(compress(range(first, end), taken)), list(compress(keys, taken)), block_ids, end)

    def order(
        self,
        state: RequestState,
        offers: Sequence[Offer],
        offered: list[OffloadKey],
        wanted: list[OffloadKey],
        destination: LoadStoreSpec,
        *,
        describes: bool = True,
    ) -> TransferOrder:
        """Open the job of a store, fence its GPU blocks, and return its transfer order.

        With ``describes``, KV events will describe the blocks: they are whole.
        """
        chosen: list[NDArray[np.bool_] | None] = [None] * len(offers)
        if wanted != offered:
            wanted, destination, chosen = _in_offered_order(offers, offered, wanted, destination)
        runs: list[Rows] = []
        firsts: list[int] = []
        for group, offer, mask, described in zip(self._groups, offers, chosen, self._described, strict=True):
            factor = group.block_size_factor
            positions, keys, ids, _ = offer
            if mask is not None:
                taken = mask.tolist()
                positions, keys = list(compress(positions, taken)), list(compress(keys, taken))
                ids = ids.reshape(-1, factor)[mask].reshape(-1)
            runs.append(ids)
            firsts.append(positions[0] * factor if positions else 0)
            if described and describes:
                self._events.record_stores(state.request, group, list(positions), keys)
        block_ids = runs[0] if len(runs) == 1 else np.concatenate(runs)
        job = self._jobs.open(state.ctx, list(wanted))
        self._fences.fence(job.job_id, block_ids, writes=False)
        return TransferOrder(job.job_id, (GPULoadStoreSpec(block_ids, [len(ids) for ids in runs], firsts), destination))

    def _refused(self, state: RequestState, tokens: int, step: int) -> None:
        """Record that an offer was not taken: if it found no room, a smaller part is offered at a later step."""
        self.refused_offers += 1
        state.pace.refused(tokens, step, self._largest_block)
        self._warn_full(
            "no room in the primary tier for %d tokens of request %s; they are offered again later "
            "(a larger primary capacity avoids this)",
            tokens,
            state.ctx.req_id,
        )


def _in_offered_order(
    offers: Sequence[Offer], offered: list[OffloadKey], wanted: list[OffloadKey], destination: LoadStoreSpec
) -> tuple[list[OffloadKey], LoadStoreSpec, list[NDArray[np.bool_] | None]]:
    """Return the wanted keys and their rows in the order of the offer, and a mask by group.

    The mask of a group is True for the wanted blocks of its offer.
    """
    place = dict(zip(offered, range(len(offered)), strict=True))
    places = np.fromiter(map(place.__getitem__, wanted), np.int64, len(wanted))
    if len(places) > 1 and (places[1:] < places[:-1]).any():
        order = np.argsort(places)
        places = places[order]
        wanted = [wanted[index] for index in order]
        if not isinstance(destination, CPULoadStoreSpec):
            raise ConfigError(
                f"the rows of a {destination.medium()} store cannot be reordered; "
                "return the keys in the order of the offer"
            )
        destination = CPULoadStoreSpec(destination.block_ids[order])
    mask = np.zeros(len(offered), np.bool_)
    mask[places] = True
    borders = np.cumsum([len(offer.keys) for offer in offers])[:-1]
    return wanted, destination, list(np.split(mask, borders))
