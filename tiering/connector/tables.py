"""Which GPU blocks each request has, followed through the engine's steps, and from which token on its KV must not be stored."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain

from tiering.connector.groups import OffloadGroup
from tiering.connector.metadata import BlockIdsByGroup, ReqId
from tiering.connector.request_state import RequestState
from tiering.offload.protocols import SchedulerOutput
from tiering.offload.suspects import EngineBlockPool, SuspectBlocks


class BlockTables:
    """Keeps the block tables of all requests up to date, and marks what may not be stored.

    ``states``: the requests by id; the caller adds and removes them.
    """

    def __init__(self, groups: Sequence[OffloadGroup], states: Mapping[ReqId, RequestState]) -> None:
        self._groups = groups
        self._states = states
        self._suspects = SuspectBlocks(group.gpu_block_size for group in groups)
        self._step = 0
        self._allocated: list[RequestState] = []
        """Requests that got blocks since the last step was built."""

    def allocated(self, state: RequestState, block_ids: BlockIdsByGroup) -> None:
        """The engine has allocated blocks to a waiting request for the step that is built next; these are all of its blocks."""
        self._assign(state, block_ids)
        state.allocated_at_step = self._step + 1
        self._allocated.append(state)

    def given_up(self, state: RequestState) -> None:
        """The request ends or starts over: it has its blocks no longer, though steps in flight may still fail to fill some."""
        if state.has_blocks:
            self._suspects.give_up(state.tables, self._step)

    def follow(self, output: SchedulerOutput) -> list[int]:
        """Take in the schedule of the next step; all GPU blocks that it newly allocates.

        Blocks of a request's computed prefix are only read, unless a load fills them: these were newly allocated for
        it.  A request may be preempted and get new blocks for the same step; these are not taken from it again.
        """
        self._step += 1
        taken: list[int] = []
        for state in self._allocated:
            if state.ctx.req_id not in output.num_scheduled_tokens:  # a load, whosever it is, comes first
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
        """True if nothing of a request is withheld, or the engine computes it anew in this step.

        ``tokens``: tokens of the request that the step computes.
        """
        start, invalid_from = state.request.num_computed_tokens, state.invalid_from
        if invalid_from is None:
            return True
        if start > invalid_from:
            return False
        state.invalid_from = self._suspects.recomputed(state.tables, invalid_from, start + tokens)
        return True

    def distrust(self, unfilled: Collection[int]) -> set[int]:
        """Loads of other connectors did not fill these blocks; returns them and all blocks that were computed on top of them."""
        states = list(self._states.values())
        wrong = self._suspects.spread(unfilled, [state.tables for state in states], self._step)
        for state in states:
            invalid_from = self._suspects.first_token(state.tables, wrong)
            if invalid_from is not None:
                state.distrust(invalid_from)
        return wrong

    def reset(self, pool: EngineBlockPool | None) -> None:
        """The tiers were reset: what requests and the engine's cache have now is from before it."""
        self._suspects.reset(pool)
        for state in self._states.values():
            if state.has_blocks:
                state.distrust(0)

    def _start(self, taken: list[int], req_id: ReqId, block_ids: BlockIdsByGroup, computed: int) -> None:
        """A request runs for the first time, or again after a preemption, with ``computed`` tokens."""
        state = self._states.get(req_id)
        if state is not None:
            self._assign(state, block_ids)
            if self._suspects and len(self._groups) > 1 and computed > state.filled_tokens:
                # The cache of a hybrid model may copy a part of a block that it has into a new block.
                state.distrust(state.found_tokens or 0)
            computed = min(computed, state.filled_tokens)
            state.scheduled = True
            state.look_again()
        self._extend_unfilled(taken, block_ids, computed)

    def _assign(self, state: RequestState, block_ids: BlockIdsByGroup) -> None:
        """These are all of the request's GPU blocks."""
        state.invalid_from = self._suspects.assigned(state.tables, block_ids, state.found_tokens, state.invalid_from)
        state.set_blocks(block_ids)

    def _extend_unfilled(self, taken: list[int], block_ids: Sequence[list[int]], filled: int) -> None:
        for group, ids in zip(self._groups, block_ids, strict=True):
            taken += ids[filled // group.gpu_block_size :]
