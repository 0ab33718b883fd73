"""Block tables: the GPU blocks of each request, followed through the engine's steps.

The tables also determine the first token of each request whose KV must not be stored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain

from tiering.connector.groups import OffloadGroup
from tiering.connector.metadata import BlockIdsByGroup, ReqId
from tiering.connector.request_state import RequestState
from tiering.offload.protocols import SchedulerOutput
from tiering.offload.suspects import EngineBlockPool, SuspectBlocks


class BlockTables:
    """Block tables of all requests, with marks for the blocks that must not be stored.

    Args:
        groups: the KV-cache groups.
        states: the requests by id; the caller adds and removes them.
    """

    def __init__(self, groups: Sequence[OffloadGroup], states: Mapping[ReqId, RequestState]) -> None:
        self._groups = groups
        self._states = states
        self._suspects = SuspectBlocks(group.gpu_block_size for group in groups)
        self._step = 0
        self._allocated: list[RequestState] = []
        """Requests that got blocks since the last step was built."""

    def allocated(self, state: RequestState, block_ids: BlockIdsByGroup) -> None:
        """Record all blocks of a waiting request after the engine has allocated blocks to it.

        The allocation belongs to the step that is built next.
        """
        self._assign(state, block_ids)
        state.allocated_at_step = self._step + 1
        self._allocated.append(state)

    def given_up(self, state: RequestState) -> None:
        """Record that a request ends or starts over, and so loses its blocks.

        Steps in flight may still report that a load did not fill some of these blocks.
        """
        if state.has_blocks:
            self._suspects.give_up(state.tables, self._step)

    def follow(self, output: SchedulerOutput) -> list[int]:
        """Process the schedule of the next step; return all GPU blocks that the step newly allocates.

        Blocks of a request's computed prefix are only read, unless a load fills them; then they were newly allocated
        for the load. A request may be preempted and get new blocks for the same step. The request keeps these new
        blocks.
        """
        self._step += 1
        taken: list[int] = []
        for state in self._allocated:
            if state.ctx.req_id not in output.num_scheduled_tokens:  # a load of any connector comes first
                self._extend_unfilled(taken, state.tables, state.found_tokens or 0)
        self._allocated.clear()
        for req_id in output.preempted_req_ids or ():
            preempted = self._states.get(req_id)
            if preempted is not None and preempted.allocated_at_step != self._step:
                self.given_up(preempted)
                preempted.preempted()
        for new in output.scheduled_new_reqs:
            self._start(taken, new.req_id, new.block_ids, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for req_id, block_ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if block_ids is None:
                continue
            if req_id in cached.resumed_req_ids:
                self._start(taken, req_id, block_ids, computed)
                continue
            running = self._states.get(req_id)
            if running is not None:
                self._suspects.filled(block_ids, running.invalid_from)
                running.append_blocks(block_ids)
            taken.extend(chain.from_iterable(block_ids))
        return taken

    def has_gone_back(self, state: RequestState, tokens: int) -> bool:
        """Return True if all KV of a request may be stored, or is computed again in this step.

        Args:
            state: the request.
            tokens: tokens of the request that the step computes.
        """
        start, invalid_from = state.request.num_computed_tokens, state.invalid_from
        if invalid_from is None:
            return True
        if start > invalid_from:
            return False
        state.invalid_from = self._suspects.recomputed(state.tables, invalid_from, start + tokens)
        return True

    def distrust(self, unfilled: Collection[int]) -> set[int]:
        """Mark blocks that loads of other connectors did not fill, and all blocks computed on top of them.

        Returns:
            All marked blocks.
        """
        states = list(self._states.values())
        wrong = self._suspects.spread(unfilled, [state.tables for state in states], self._step)
        for state in states:
            invalid_from = self._suspects.first_token(state.tables, wrong)
            if invalid_from is not None:
                state.distrust(invalid_from)
        return wrong

    def reset(self, pool: EngineBlockPool | None) -> None:
        """Mark all KV that requests and the engine's cache hold now, because the tiers were reset.

        Args:
            pool: the engine's block pool; None: all blocks become suspects.
        """
        self._suspects.reset(pool)
        for state in self._states.values():
            if state.has_blocks:
                state.distrust(0)

    def _start(self, taken: list[int], req_id: ReqId, block_ids: BlockIdsByGroup, computed: int) -> None:
        """Process a request that runs for the first time, or again after a preemption."""
        state = self._states.get(req_id)
        if state is not None:
            self._assign(state, block_ids)
            if self._suspects and len(self._groups) > 1 and computed > state.filled_tokens:
                # The engine's cache of a hybrid model may copy a part of a cached block into a new block.
                state.distrust(state.found_tokens or 0)
            computed = min(computed, state.filled_tokens)
            state.scheduled = True
            state.look_again()
        self._extend_unfilled(taken, block_ids, computed)

    def _assign(self, state: RequestState, block_ids: BlockIdsByGroup) -> None:
        """Replace all GPU blocks of the request."""
        state.invalid_from = self._suspects.assigned(state.tables, block_ids, state.found_tokens, state.invalid_from)
        state.set_blocks(block_ids)

    def _extend_unfilled(self, taken: list[int], block_ids: Sequence[list[int]], filled: int) -> None:
        for group, ids in zip(self._groups, block_ids, strict=True):
            taken += ids[filled // group.gpu_block_size :]
