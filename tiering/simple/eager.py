"""The eager mode: every confirmed block is stored once, soon after it was computed."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

from tiering.api.keys import OffloadKey
from tiering.offload.protocols import EngineRequest
from tiering.simple.block_pool import CPUBlockPool
from tiering.simple.hits import GroupNeeds
from tiering.simple.protocols import GPUBlockPool
from tiering.simple.requests import GroupState, RequestState

Offer = tuple[OffloadKey, int]
"""A block's name and its GPU block."""

Record = Callable[[EngineRequest, int, Sequence[int], Sequence[OffloadKey]], None]
"""A function that records blocks before they are stored, for KV events.

Its arguments are the request, the index of the KV-cache group, the indexes of the blocks in that group (ascending), and
the blocks' names.
"""


class _LeftOver(NamedTuple):
    """A block of a request that has ended, not stored yet."""

    key: OffloadKey
    block: int
    """GPU block."""
    request: EngineRequest
    group: int
    """Index of the KV-cache group."""
    place: int
    """Index of the block in the request's group."""


class EagerStores:
    """The choice of the blocks that each step stores.

    The CPU pool may evict a block whose request still runs. The block is offered again when its store evicts no block
    of another running request. A pool that is smaller than the KV of all running requests would otherwise do nothing
    but copy.
    """

    def __init__(
        self,
        cpu: CPUBlockPool,
        needs: Sequence[GroupNeeds],
        record: Record | None = None,
        suspects: Container[int] = (),
    ) -> None:
        """Create the eager mode.

        Args:
            cpu: the CPU pool.
            needs: the needs of each KV-cache group.
            record: called with the blocks of each store, for KV events; default: None.
            suspects: GPU blocks that may not be stored; default: none.
        """
        self._cpu = cpu
        self._suspects = suspects
        self._record = record
        self._needs = needs
        self._running: dict[OffloadKey, GroupState | set[GroupState]] = {}
        """Name → the running request's group that has offered the block, or a set of several such groups.

        Nearly all blocks have one owner, and need no set of their own.
        """
        self._places: dict[OffloadKey, int] = {}
        """Name → the block's index, the same in all groups: a name covers all tokens before its block."""
        self._left_over: list[_LeftOver] = []
        self.restored = 0
        """Blocks that were offered again after an eviction."""
        self.dropped = 0
        """Blocks of finished requests that could not be stored any more."""

    @property
    def idle(self) -> bool:
        """True if no running request has offered a block that is still tracked."""
        return not self._running and not self._places

    def offers(self, state: RequestState, pool: GPUBlockPool, room: int) -> list[Offer]:
        """Return a request's new blocks to store now; blocks without room are offered again next time.

        Args:
            state: the request.
            pool: the engine's pool.
            room: largest number of blocks.
        """
        chosen: list[Offer] = []
        if not state.policy.store or state.is_withheld:
            return chosen
        confirmed = state.confirmed_tokens()
        limit = confirmed if state.policy.max_store_tokens is None else min(confirmed, state.policy.max_store_tokens)
        next_at = 1 << 62
        for number, (group, need) in enumerate(zip(state.groups, self._needs, strict=True)):
            start, end = group.cursor, min(limit // need.gpu_block_size, len(group.keys), len(group.block_ids))
            if start < end:
                keys, blocks = group.keys[start:end], group.block_ids[start:end]
                if not need.is_full:
                    blocks = self._still_there(state, need, start, keys, blocks, pool)
                null, cached, pending = pool.null_block.block_id, self._cpu.cached, self._cpu.pending
                missing = [
                    (index, key)
                    for index, key in enumerate(keys)
                    if key not in cached and key not in pending and blocks[index] != null
                ]
                if len(missing) > room:
                    end = start + missing[room][0]
                    del missing[room:]
                chosen += [(key, blocks[index]) for index, key in missing]
                if self._record is not None and missing:
                    self._record(
                        state.request, number, [start + index for index, _ in missing], [key for _, key in missing]
                    )
                room -= len(missing)
                self._advance(group, end)
            next_at = min(next_at, (group.cursor + 1) * need.gpu_block_size)
        state.next_store_at = next_at
        return chosen

    def lost(self, state: RequestState, pool: GPUBlockPool) -> list[Offer]:
        """Return the blocks of ``state`` that the CPU pool has evicted and has room for again."""
        chosen: list[Offer] = []
        cpu, running = self._cpu, self._running
        wanted = sum(len(group.lost) for group in state.groups)
        idle = takewhile(lambda key: key not in running, islice(cpu.victims(), wanted))
        room = cpu.num_blank_blocks + sum(1 for _ in idle)
        if not room:
            return chosen
        for number, (group, need) in enumerate(zip(state.groups, self._needs, strict=True)):
            for index in sorted(group.lost):
                if index >= group.cursor:  # The block's tokens were replaced; it is offered when it is computed again.
                    group.lost.discard(index)
                    continue
                key = group.keys[index]
                if key in cpu.cached or key in cpu.pending:
                    group.lost.discard(index)
                elif len(chosen) < room:
                    group.lost.discard(index)
                    (block,) = self._still_there(state, need, index, [key], [group.block_ids[index]], pool)
                    if block != pool.null_block.block_id:
                        chosen.append((key, block))
                        if self._record is not None:
                            self._record(state.request, number, (index,), (key,))
        self.restored += len(chosen)
        return chosen

    def evicted(self, keys: Iterable[OffloadKey]) -> None:
        """Mark evicted blocks as lost in the running requests that have them."""
        running, places = self._running, self._places
        for key in keys:
            owner = running.get(key)
            if owner is None:
                continue
            place, stale = places[key], True
            for group in owner if isinstance(owner, set) else (owner,):
                if place < group.cursor and group.keys[place] == key:
                    group.lost.add(place)
                    stale = False
            if stale:  # All owners have other tokens there now.
                del running[key], places[key]

    def forget(self, state: RequestState) -> None:
        """Drop the record of a request that gives its blocks back or has ended."""
        running, places = self._running, self._places
        for group in state.groups:
            for key in group.keys[: group.cursor]:
                owner = running.get(key)
                if isinstance(owner, set):
                    owner.discard(group)
                    if len(owner) == 1:
                        running[key] = owner.pop()
                elif owner is group:
                    del running[key], places[key]
            group.cursor = 0
            group.lost.clear()
        state.look_again()

    def leave_over(self, state: RequestState) -> None:
        """Keep the blocks of a finished request that are not stored yet.

        Later steps store them, as long as the GPU blocks keep their content.
        """
        if not state.policy.store or state.is_withheld:
            return
        confirmed = state.confirmed_tokens()
        if state.policy.max_store_tokens is not None:
            confirmed = min(confirmed, state.policy.max_store_tokens)
        for number, (group, need) in enumerate(zip(state.groups, self._needs, strict=True)):
            end = min(confirmed // need.gpu_block_size, len(group.keys), len(group.block_ids))
            self._left_over += [
                _LeftOver(group.keys[index], group.block_ids[index], state.request, number, index)
                for index in range(group.cursor, end)
            ]

    def left_over(self, pool: GPUBlockPool, room: int) -> list[Offer]:
        """Return blocks of finished requests to store now, at most ``room`` of them."""
        if not self._left_over:
            return []
        cpu, blocks = self._cpu, pool.blocks
        # A GPU block keeps its name exactly as long as it keeps its content.
        alive = [
            item
            for item in self._left_over
            if blocks[item.block].block_hash == item.key
            and not blocks[item.block].is_null
            and item.block not in self._suspects
        ]
        self.dropped += len(self._left_over) - len(alive)
        waiting = list(
            {item.key: item for item in alive if item.key not in cpu.cached and item.key not in cpu.pending}.values()
        )
        chosen, self._left_over = waiting[:room], waiting[room:]
        if self._record is not None:
            for item in chosen:
                self._record(item.request, item.group, (item.place,), (item.key,))
        return [(item.key, item.block) for item in chosen]

    def reset(self, states: Iterable[RequestState]) -> None:
        """Drop all blocks that were computed so far; none of them is stored any more."""
        self._left_over.clear()
        for state in states:
            self.forget(state)

    def _advance(self, group: GroupState, end: int) -> None:
        """Record that the blocks of ``group`` before ``end`` were offered."""
        running, keys = self._running, group.keys[group.cursor : end]
        self._places.update(zip(keys, range(group.cursor, end), strict=True))
        for key in keys:
            owner = running.setdefault(key, group)
            if isinstance(owner, set):
                owner.add(group)
            elif owner is not group:
                running[key] = {owner, group}
        group.cursor = end

    @staticmethod
    def _still_there(
        state: RequestState,
        need: GroupNeeds,
        start: int,
        keys: Sequence[OffloadKey],
        blocks: Sequence[int],
        pool: GPUBlockPool,
    ) -> list[int]:
        """Return ``blocks`` with the null block in place of each block that may have lost its content.

        The engine takes back blocks that a window or a state has passed, and overwrites a running state in place. A
        block whose name in the engine's prefix cache is its key still has its content.

        Args:
            state: the request.
            need: the needs of the group.
            start: index of the first block in the group.
            keys: names of the blocks.
            blocks: GPU blocks, co-indexed with ``keys``.
            pool: the engine's pool.
        """
        held_from = need.first_needed(state.request.num_computed_tokens)
        null, all_blocks = pool.null_block.block_id, pool.blocks
        return [
            block if (not need.is_state and start + index >= held_from) or all_blocks[block].block_hash == key else null
            for index, (key, block) in enumerate(zip(keys, blocks, strict=True))
        ]
