"""Block tables: the GPU blocks of each request, followed through the engine's steps.

The tables also determine the first token of each request whose KV must not be stored.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Generic, TypeVar

from tiering.connector.groups import OffloadGroup
from tiering.connector.protocols import SchedulerOutput
from tiering.connector.suspects import EngineBlockPool, SuspectBlocks
from tiering.connector.tracked import BlockIds, TrackedRequest
from tiering.connector.variants import BlockOwners, Variant

Tracked = TypeVar("Tracked", bound=TrackedRequest[Any])


class BlockTables(Generic[Tracked]):
    """Block tables of all requests, with marks for the blocks that must not be stored.

    Subclasses extend the methods in the section "changes" to learn of blocks that change hands.

    Args:
        groups: the KV-cache groups.
        states: the requests by id; the caller adds and removes them.
    """

    def __init__(self, groups: Sequence[OffloadGroup], states: dict[str, Tracked]) -> None:
        self._states = [group for group in groups if group.is_state]
        """The groups that keep states.

        The engine moves their blocks, so a place in their tables means nothing.
        """
        attended = [group for group in groups if not group.is_state]
        self._attended = [group.group_idx for group in attended] if self._states else None
        """Indexes of the groups whose blocks have fixed places; None: all."""
        self.suspects = SuspectBlocks(group.gpu_block_size for group in attended)
        """GPU blocks whose KV must not be stored."""
        self.groups = groups
        """The KV-cache groups."""
        self.states = states
        """The requests by id; the caller adds and removes them."""
        self.running = 0
        """Number of requests that were scheduled and have not ended or lost their blocks."""
        self._owners = BlockOwners()
        self._step = 0
        """Number of the last step.

        A step in which no request gets blocks, starts or is preempted is only counted.
        """

    def allocated(self, state: Tracked, block_ids: BlockIds) -> None:
        """Record all blocks of a waiting request after the engine has allocated blocks to it.

        The allocation belongs to the step that is built next.
        """
        self._assign(state, block_ids)
        state.allocated_at_step = self._step + 1

    def given_up(self, state: Tracked) -> None:
        """Record that a request ends or starts over, and so loses its blocks.

        Steps in flight may still report that a load did not fill some of these blocks.
        """
        self.running -= state.scheduled
        self.suspects.give_up(self._places(state.tables), self._step)

    def start_over(self, state: Tracked) -> None:
        """Forget the blocks of a request that has not computed anything yet, or was preempted.

        Repeated calls are harmless.
        """
        self.given_up(state)
        state.restart()

    def follow(self, output: SchedulerOutput) -> None:
        """Process the schedule of the next step.

        A request may be preempted and get new blocks for the same step. The request keeps these new blocks.
        """
        self._step += 1
        for req_id in output.preempted_req_ids or ():
            state = self.states.get(req_id)
            if state is not None and state.allocated_at_step != self._step:
                self._preempted(state)
        for new in output.scheduled_new_reqs:
            self._started(new.req_id, new.block_ids, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for req_id, block_ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if block_ids is None:
                continue
            if req_id in cached.resumed_req_ids:
                self._started(req_id, block_ids, computed)
            else:
                self._grew(req_id, block_ids)

    def confirm_recomputed(self, state: Tracked, tokens: int) -> bool:
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
        state.invalid_from = self.suspects.recomputed(self._places(state.tables), invalid_from, start + tokens)
        return True

    def distrust(self, unfilled: Collection[int]) -> set[int] | None:
        """Mark blocks that loads of other connectors did not fill, and all blocks computed on top of them.

        Returns:
            All marked blocks; None: all blocks that hold KV now, because tables do not show the blocks behind a state.
        """
        if self._states:
            self.reset(None)
            return None
        states = list(self.states.values())
        wrong = self.suspects.spread(unfilled, [state.tables for state in states], self._step)
        for state in states:
            invalid_from = self.suspects.first_token(state.tables, wrong)
            if invalid_from is not None:
                self._distrusted(state, invalid_from)
        return wrong

    def reset(self, pool: EngineBlockPool | None) -> None:
        """Mark all KV that requests and the engine's cache hold now, because the tiers were reset.

        Args:
            pool: the engine's block pool; None: all blocks become suspects.
        """
        self.suspects.reset(pool)
        for state in self.states.values():
            if state.has_blocks:
                self._distrusted(state, 0)

    def _assign(self, state: Tracked, block_ids: BlockIds) -> None:
        """Replace all GPU blocks of a request."""
        if state.variant is not None:
            self._claim(state.variant, block_ids, state.found_tokens)
        if self.suspects or state.invalid_from is not None:
            known, tables = self._places(state.tables), self._places(block_ids)
            state.invalid_from = self.suspects.assigned(known, tables, state.found_tokens, state.invalid_from)
            if self._states and (self.suspects or state.invalid_from is not None):
                self._assign_states(state, block_ids)
        state.set_blocks(block_ids)

    def _assign_states(self, state: Tracked, block_ids: BlockIds) -> None:
        """Distrust a request that starts from a suspect state, and mark the blocks of its later states."""
        found = state.found_tokens
        for group in self._states:
            table = block_ids[group.group_idx]
            start = len(table) if found is None else found // group.gpu_block_size
            # A state replaces the states before it; if nothing is known, each of them may have been found.
            before = table if found is None else table[max(0, start - 1) : start]
            if any(block in self.suspects for block in before):
                state.distrust(0)
                self._suspect_behind(block_ids, found or 0)
                return
        self.suspects.filled(
            [block_ids[group.group_idx][(found or 0) // group.gpu_block_size :] for group in self._states],
            state.invalid_from,
        )

    def _suspect_behind(self, block_ids: BlockIds, found: int) -> None:
        """Mark the blocks that a request fills behind ``found`` tokens."""
        tables = zip(self.groups, block_ids, strict=True)
        self.suspects.filled([ids[found // group.gpu_block_size :] for group, ids in tables], found)

    def _places(self, tables: BlockIds) -> BlockIds:
        """Return those of a request's block tables whose blocks have fixed places."""
        return tables if self._attended is None else [tables[index] for index in self._attended]

    def _started(self, req_id: str, block_ids: BlockIds, computed: int) -> None:
        """Process a request that runs for the first time, or again after a preemption."""
        state = self.states.get(req_id)
        if state is None:
            return
        if state.allocated_at_step != self._step or state.tables != list(block_ids):
            self._assign(state, block_ids)
        if state.variant is not None and computed > state.filled_tokens:
            self._distrust_others_loads(state, computed)
        if self.suspects and len(self.groups) > 1 and computed > state.filled_tokens:
            # The engine's cache of a hybrid model may copy a part of a cached block into a new block.
            found = state.found_tokens or 0
            state.distrust(found)
            self._suspect_behind(block_ids, found)
        self.running += not state.scheduled
        state.scheduled = True
        state.look_again()

    def _grew(self, req_id: str, block_ids: BlockIds) -> None:
        """Process a running request that gets more blocks."""
        state = self.states.get(req_id)
        if state is not None:
            if state.variant is not None:
                self._owners.fill(block_ids, state.variant)
            self.suspects.filled(block_ids, state.invalid_from)
            state.append_blocks(block_ids)

    def _preempted(self, state: Tracked) -> None:
        """Process a request that was preempted and has no new blocks."""
        self.start_over(state)

    def _distrusted(self, state: Tracked, invalid_from: int) -> None:
        """Forbid stores of a request's tokens from ``invalid_from`` on."""
        state.distrust(invalid_from)

    def _claim(self, variant: Variant, tables: BlockIds, found_tokens: int | None) -> None:
        """Mark the blocks of other variants among those that a request found, and record those that it fills.

        Args:
            variant: the request's variant.
            tables: block tables of the request.
            found_tokens: tokens that the request found in the engine's cache; None: it may have found any block.
        """
        for group, table in zip(self.groups, tables, strict=True):
            filled_from = len(table) if found_tokens is None else found_tokens // group.gpu_block_size
            if foreign := self._owners.foreign(table[:filled_from], variant):
                self.suspects.filled([foreign], 0)
            self._owners.fill([table[filled_from:]], variant)

    def _distrust_others_loads(self, state: Tracked, computed: int) -> None:
        """Distrust the blocks that another connector has loaded for a request of a variant.

        That connector knows them by the engine's hashes, which do not cover the variant's content.
        """
        found = state.found_tokens or 0
        sizes = [group.gpu_block_size for group in self.groups]
        loaded = [table[found // size : -(-computed // size)] for table, size in zip(state.tables, sizes, strict=True)]
        self.distrust({block for blocks in loaded for block in blocks if block})
