"""The stores of states that an engine hands over, each in the step at whose end the state is complete.

An engine with aligned states (Mamba, linear attention, short convolution) keeps the state of a request in one block. It
copies the state to another block at the end of a block of tokens, and takes the old block back some steps later. A
request's block table therefore does not tell which block has which state. The engine names the states that its own
prefix cache keeps, with their block, in the step that computes them. No other state is ever stored. A tail is handed
over in the step behind it or, if the request ends there (a client has gone), with the end of the request.

The block keeps the state until the engine allocates it again, and the fences let the copy end before that.

A state inside of a block is the tail of a prompt (:class:`tiering.connector.hits.Tails`). The attention blocks that are
filled up to it are stored with it, from their places in the request's block table. Tokens that are computed meanwhile
are written behind that end, where no hit reads them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from tiering.api.keys import OffloadKey
from tiering.api.manager import OffloadingManager
from tiering.api.transfer import as_rows
from tiering.connector.groups import OffloadGroup
from tiering.connector.hits import Tails
from tiering.connector.jobs import BlockFences
from tiering.connector.metadata import ReqId, TransferOrder
from tiering.connector.requests import RequestState
from tiering.connector.stores import Offer, StorePlanner

Handed = tuple[int, int, int]
"""A state that the engine hands over: KV-cache group, GPU block, and number of tokens before it."""

Place = tuple[int, int]
"""A place of a request: KV-cache group and end in tokens."""


class HandedStates:
    """Planner that orders the stores of handed-over states; a state without room now is dropped.

    A state is stored under these conditions:

    - Its request runs in this step, may store the tokens, and no block of the request is distrusted.
    - It is a state of tokens that are confirmed at the end of the step. Inside of a block, the states of all groups are
      handed over there, and hits may end there.
    - Its hash exists, and no load writes its block.

    Args:
        groups: the KV-cache groups.
        manager: accepts blocks and assigns rows.
        fences: fences of the GPU blocks.
        stores: planner of the other stores, which opens the jobs and counts the states that find no room.
        tails: the hits that end inside of a block; None if there are none.
    """

    def __init__(
        self,
        groups: Sequence[OffloadGroup],
        manager: OffloadingManager,
        fences: BlockFences,
        stores: StorePlanner,
        tails: Tails | None,
    ) -> None:
        self._groups = groups
        self._manager = manager
        self._fences = fences
        self._stores = stores
        self._tails = tails

    def plan(self, output: Any, states: Mapping[ReqId, RequestState]) -> dict[ReqId, TransferOrder]:
        """Return the orders for the states that the engine hands over with a step, by request.

        Args:
            output: the schedule of the step.
            states: the requests by id.
        """
        block_state = getattr(output, "kv_connector_block_state", None)
        offers: Mapping[ReqId, Sequence[Handed]] = getattr(block_state, "boundary_state_offloads", None) or {}
        orders: dict[ReqId, TransferOrder] = {}
        gone = set(output.preempted_req_ids or ()).union(output.finished_req_ids)
        for req_id, handed in offers.items():
            state, tokens = states.get(req_id), output.num_scheduled_tokens.get(req_id)
            if state is None or not tokens or req_id in gone:
                continue
            if state.policy.store and state.invalid_from is None and (order := self._order(state, handed, tokens)):
                orders[req_id] = order
        return orders

    def plan_last(self, state: RequestState, handed: Iterable[Handed]) -> None:
        """Order the tail that a request ends at, for :meth:`~tiering.connector.stores.StorePlanner.take_last`.

        No hit reaches a tail behind blocks that wait for room. Their last offer goes out instead.
        """
        if not state.pace.waiting and (order := self._order(state, handed, 0)) is not None:
            self._stores.last[state.ctx.req_id] = order

    def _order(self, state: RequestState, handed: Iterable[Handed], scheduled_tokens: int) -> TransferOrder | None:
        request = state.request
        placeholders: int = getattr(request, "num_output_placeholders", 0)
        computed = min(request.num_computed_tokens + scheduled_tokens - placeholders, request.num_tokens)
        state.extend_keys(self._groups)
        places = self._usable(state, handed, min(computed, state.store_limit))
        if not places or self._fences.is_written([block for _, block in places.values()]):
            return None
        offers = [self._offer(group, places) for group in self._groups]
        keys = list(chain.from_iterable(offer.keys for offer in offers))
        stored = self._manager.prepare_store(keys, state.ctx)
        if stored is None:
            self._stores.refused_offers += 1
            return None
        for group, end in places:
            whole, tail = divmod(end, self._groups[group].offloaded_block_size)
            if not tail:
                state.groups[group].cursor = max(state.groups[group].cursor, whole)
        if self._stores.sessions is not None:
            self._stores.sessions.computed(keys, state.hints.session, frozenset(stored.keys_to_store))
        if not len(stored.keys_to_store):
            return None
        return self._stores.order(state, offers, keys, stored.keys_to_store, stored.store_spec, describes=False)

    @staticmethod
    def _offer(group: OffloadGroup, places: Mapping[Place, tuple[OffloadKey, int]]) -> Offer:
        ends = [end for index, end in places if index == group.group_idx]
        offered = [places[group.group_idx, end] for end in ends]
        positions = [(end - 1) // group.offloaded_block_size for end in ends]
        return Offer(positions, [key for key, _ in offered], as_rows([block for _, block in offered]))

    def _usable(self, state: RequestState, handed: Iterable[Handed], limit: int) -> dict[Place, tuple[OffloadKey, int]]:
        """Return the key and the GPU block of each block to store, in the order of their places."""
        blocks: dict[Place, int] = {}
        twice = set()
        for index, block, end in handed:
            known = 0 <= index < len(self._groups) and self._groups[index].is_state
            if known and block and 0 < end <= limit and blocks.setdefault((index, end), block) != block:
                twice.add((index, end))  # which of the two blocks has the state is not known
        usable: dict[Place, tuple[OffloadKey, int]] = {}
        for place, block in blocks.items():
            whole, tail = divmod(place[1], self._groups[place[0]].offloaded_block_size)
            keys = state.keys[place[0]]
            if not tail and place not in twice and whole <= len(keys):
                usable[place] = (keys[whole - 1], block)
        if self._tails is not None:
            for end in {end for _, end in blocks}:
                usable |= self._tail(state, self._tails.keys(state, end), end, blocks, twice)
        return {place: usable[place] for place in sorted(usable)}

    def _tail(
        self,
        state: RequestState,
        keys: Sequence[OffloadKey],
        end: int,
        blocks: Mapping[Place, int],
        twice: Collection[Place],
    ) -> dict[Place, tuple[OffloadKey, int]]:
        """Return key and GPU block of each group for the tail at ``end``; none if a group lacks its block."""
        found: dict[Place, tuple[OffloadKey, int]] = {}
        for group, key in zip(self._groups, keys, strict=False):
            place, table = (group.group_idx, end), state.groups[group.group_idx].block_ids
            block = blocks.get(place, 0)
            if group.is_full:
                position = end // group.gpu_block_size
                block = table[position] if position < len(table) else 0
            if not block or place in twice:
                return {}
            found[place] = (key, block)
        return found
