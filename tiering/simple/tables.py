"""The GPU blocks of each request through the engine's steps, and the KV that must not be stored."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tiering.offload.protocols import SchedulerOutput
from tiering.offload.suspects import SuspectBlocks
from tiering.simple.eager import EagerStores
from tiering.simple.hits import GroupNeeds
from tiering.simple.lazy import LazyStores
from tiering.simple.protocols import GPUBlockPool
from tiering.simple.request_state import BlockIds, RequestState


class BlockTables:
    """The block tables of all requests; changes are passed on to the eager and lazy modes."""

    def __init__(
        self,
        states: Mapping[str, RequestState],
        needs: Sequence[GroupNeeds],
        suspects: SuspectBlocks,
        eager: EagerStores,
        lazy: LazyStores | None,
    ) -> None:
        """Create the tables.

        Args:
            states: the requests by id; the caller adds and removes them.
            needs: the needs of each KV-cache group.
            suspects: GPU blocks whose KV may be wrong.
            eager: the eager mode.
            lazy: the lazy mode; None in the eager mode.
        """
        self._states = states
        self._needs = needs
        self._suspects = suspects
        self._eager = eager
        self._lazy = lazy
        self._step = 0

    def allocated(self, state: RequestState, block_ids: BlockIds) -> None:
        """Set the blocks that the engine has allocated to a waiting request for the next step.

        Args:
            state: the request.
            block_ids: all of its GPU blocks, per group.
        """
        state.allocated_at_step = self._step + 1
        self._assign(state, block_ids)

    def given_up(self, state: RequestState) -> None:
        """Take a request's blocks when it ends or starts over; steps in flight may leave them unfilled."""
        self._suspects.give_up(state.tables, self._step)
        state.lose_blocks()

    def follow(self, output: SchedulerOutput) -> None:
        """Update the tables with the schedule of the next step."""
        self._step += 1
        for req_id in output.preempted_req_ids or ():
            state = self._states.get(req_id)
            if state is not None:
                self._eager.forget(state)
                if state.allocated_at_step != self._step:  # Otherwise the request has got new blocks already.
                    self.given_up(state)
        for new in output.scheduled_new_reqs:
            state = self._states.get(new.req_id)
            if state is not None:
                self._start(state, new.block_ids, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for req_id, block_ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            state = self._states.get(req_id)
            if state is None or block_ids is None:
                continue
            if req_id in cached.resumed_req_ids:
                self._eager.forget(state)
                self._start(state, block_ids, computed)
            else:
                self._suspects.filled(block_ids, state.invalid_from)
                if self._lazy is not None:
                    self._handed_out(state, block_ids, [len(group.blocks) for group in state.groups])
                state.append_blocks(block_ids)
        for req_id, tokens in output.num_scheduled_tokens.items() if self._suspects else ():
            state = self._states.get(req_id)
            if state is not None:
                self._go_back(state, tokens)

    def distrust(self, unfilled: Collection[int]) -> set[int]:
        """Distrust blocks that the loads of other connectors did not fill.

        Args:
            unfilled: the GPU blocks that were not filled.

        Returns:
            These blocks and all blocks that were computed on top of them.
        """
        states = list(self._states.values())
        wrong = self._suspects.spread(unfilled, [state.tables for state in states], self._step)
        for state in states:
            invalid_from = self._suspects.first_token(state.tables, wrong)
            if invalid_from is not None:
                self._eager.forget(state)
                state.distrust(invalid_from)
        return wrong

    def reset(self, pool: GPUBlockPool | None) -> None:
        """Distrust all blocks of requests and of the engine's cache, because the tier was reset.

        Args:
            pool: the engine's pool; None if it is not bound yet.
        """
        self._suspects.reset(pool)
        for state in self._states.values():
            if state.has_blocks:
                state.distrust(0)

    def _assign(self, state: RequestState, block_ids: BlockIds) -> None:
        """Set all GPU blocks of a request."""
        state.invalid_from = self._suspects.assigned(state.tables, block_ids, state.found_tokens, state.invalid_from)
        if self._lazy is not None:
            # Known blocks were handed out before; another request may have got them as well since.
            starts = [
                len(g.blocks) if g.blocks == ids[: len(g.blocks)] else 0
                for g, ids in zip(state.groups, block_ids, strict=True)
            ]
            self._handed_out(state, [ids[start:] for ids, start in zip(block_ids, starts, strict=True)], starts)
        for group, ids in zip(state.groups, block_ids, strict=True):
            group.blocks = list(ids)

    def _start(self, state: RequestState, block_ids: BlockIds, computed: int) -> None:
        """Start a request, for the first time or again after a preemption, with ``computed`` tokens."""
        self._assign(state, block_ids)
        state.scheduled = True
        found = state.found_tokens or 0
        if self._suspects and len(self._needs) > 1 and computed > found + state.loaded_tokens:
            # The engine's cache of a hybrid model may copy a part of a cached block into a new block.
            state.distrust(found)

    def _go_back(self, state: RequestState, tokens: int) -> None:
        """Trust withheld tokens again that the engine recomputes in this step.

        Args:
            state: the request.
            tokens: number of tokens that the step computes of it.
        """
        if state.invalid_from is not None and not state.is_withheld:
            end = state.request.num_computed_tokens + tokens
            state.invalid_from = self._suspects.recomputed(state.tables, state.invalid_from, end)

    def _handed_out(self, state: RequestState, block_ids: BlockIds, starts: Sequence[int]) -> None:
        """Pass new GPU blocks of a request on to the lazy mode, with the part of them that may be stored.

        Args:
            state: the request.
            block_ids: the new blocks, per group.
            starts: index of the first new block in the request's block table, per group.
        """
        if self._lazy is None:
            return
        limit = state.policy.max_store_tokens if state.policy.store else 0
        if limit is None:
            self._lazy.handed_out(block_ids)
            return
        sizes = [need.block_size for need in self._needs]
        self._lazy.handed_out(
            block_ids,
            [max(0, limit // size - start) for size, start in zip(sizes, starts, strict=True)],
            [max(0, (state.found_tokens or 0) // size - start) for size, start in zip(sizes, starts, strict=True)],
        )
