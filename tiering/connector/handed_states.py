"""The stores of states that an engine hands over, each in the step at whose end the state is complete.

An engine with aligned states (Mamba, linear attention, short convolution) keeps the state of a request in one block. It
copies the state to another block at the end of a block of tokens, and takes the old block back some steps later. A
request's block table therefore does not tell which block has which state. The engine names the states that its own
prefix cache keeps, with their block, in the step that computes them. No other state is ever stored.

The block keeps the state until the engine allocates it again, and the fences let the copy end before that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from tiering.api.manager import OffloadingManager
from tiering.api.transfer import as_rows
from tiering.connector.groups import OffloadGroup
from tiering.connector.jobs import BlockFences
from tiering.connector.metadata import ReqId, TransferOrder
from tiering.connector.requests import RequestState
from tiering.connector.stores import Offer, StorePlanner

Handed = tuple[int, int, int]
"""A state that the engine hands over: KV-cache group, GPU block, and number of tokens before it."""


class HandedStates:
    """Planner that orders the stores of handed-over states; a state without room now is dropped.

    A state is stored under these conditions:

    - Its request runs in this step, may store the tokens, and no block of the request is distrusted.
    - It is a state of whole blocks, and of tokens that are confirmed at the end of the step.
    - Its hash exists, and no load writes its block.

    Args:
        groups: the KV-cache groups.
        manager: accepts blocks and assigns rows.
        fences: fences of the GPU blocks.
        stores: planner of the other stores, which opens the jobs and counts the states that find no room.
    """

    def __init__(
        self,
        groups: Sequence[OffloadGroup],
        manager: OffloadingManager,
        fences: BlockFences,
        stores: StorePlanner,
    ) -> None:
        self._groups = groups
        self._manager = manager
        self._fences = fences
        self._stores = stores

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

    def _order(self, state: RequestState, handed: Iterable[Handed], scheduled_tokens: int) -> TransferOrder | None:
        request = state.request
        placeholders: int = getattr(request, "num_output_placeholders", 0)
        computed = min(request.num_computed_tokens + scheduled_tokens - placeholders, request.num_tokens)
        state.extend_keys(self._groups)
        blocks = self._usable(state, handed, min(computed, state.store_limit))
        if not blocks or self._fences.is_written(list(blocks.values())):
            return None
        offers = [self._offer(state, group, blocks) for group in self._groups]
        keys = list(chain.from_iterable(offer.keys for offer in offers))
        stored = self._manager.prepare_store(keys, state.ctx)
        if stored is None:
            self._stores.refused_offers += 1
            return None
        for group, position in blocks:
            state.groups[group].cursor = max(state.groups[group].cursor, position + 1)
        if not len(stored.keys_to_store):
            return None
        return self._stores.order(state, offers, keys, stored.keys_to_store, stored.store_spec)

    @staticmethod
    def _offer(state: RequestState, group: OffloadGroup, blocks: Mapping[tuple[int, int], int]) -> Offer:
        positions = [position for group_idx, position in blocks if group_idx == group.group_idx]
        keys = [state.keys[group.group_idx][position] for position in positions]
        return Offer(positions, keys, as_rows([blocks[group.group_idx, position] for position in positions]))

    def _usable(self, state: RequestState, handed: Iterable[Handed], end: int) -> dict[tuple[int, int], int]:
        """Return the GPU block of each usable state, by group and position, in this order."""
        blocks: dict[tuple[int, int], int] = {}
        twice = set()
        for group_idx, block, tokens in handed:
            if not 0 <= group_idx < len(self._groups):
                continue
            group = self._groups[group_idx]
            position, tail = divmod(tokens, group.offloaded_block_size)
            if group.is_state and block and not tail and 0 < position <= len(state.keys[group_idx]) and tokens <= end:
                place = (group_idx, position - 1)
                if blocks.setdefault(place, block) != block:
                    twice.add(place)  # which of the two blocks has the state is not known
        return {place: blocks[place] for place in sorted(blocks) if place not in twice}
