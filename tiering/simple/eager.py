"""The eager mode: every confirmed block is stored once, soon after it was computed."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import compress, islice, takewhile

from tiering.api.keys import OffloadKey
from tiering.connector.groups import OffloadGroup
from tiering.connector.hit_ends import HitEnds
from tiering.connector.tracked import NEVER
from tiering.simple.block_pool import CPUBlockPool
from tiering.simple.protocols import GPUBlockPool
from tiering.simple.state import Offer, SimpleGroupState, SimpleRequestState


class EagerStores:
    """The choice of the blocks that each step stores.

    The CPU pool may evict a block whose request still runs. The block is offered again when its store evicts no block
    of another running request. A pool that is smaller than the KV of all running requests would otherwise do nothing
    but copy.
    """

    def __init__(
        self, cpu: CPUBlockPool, groups: Sequence[OffloadGroup], ends: HitEnds, suspects: Container[int] = ()
    ) -> None:
        """Create the eager mode.

        Args:
            cpu: the CPU pool.
            groups: the KV-cache groups.
            ends: the positions where hits may end.
            suspects: GPU blocks that may not be stored; default: none.
        """
        self._cpu = cpu
        self._groups = groups
        self._ends = ends
        self._suspects = suspects
        self._running: dict[OffloadKey, SimpleGroupState | set[SimpleGroupState]] = {}
        """Name → the running request's group that has offered the block, or a set of several such groups.

        Nearly all blocks have one owner, and need no set of their own.
        """
        self._places: dict[OffloadKey, int] = {}
        """Name → the block's index, the same in all groups: a name covers all tokens before its block."""
        self._left_over: list[Offer] = []
        self.dropped = 0
        """Blocks of finished requests that could not be stored any more."""

    @property
    def idle(self) -> bool:
        """True if no running request has offered a block that is still tracked."""
        return not self._running and not self._places

    def offers(self, state: SimpleRequestState, pool: GPUBlockPool, room: int, is_last: bool = False) -> list[Offer]:
        """Return a request's new blocks to store now; blocks without room are offered again next time.

        Args:
            state: the request.
            pool: the engine's pool.
            room: largest number of blocks.
            is_last: True if the request ends, so that none of its tokens is computed again; default: False.
        """
        chosen: list[Offer] = []
        limit, next_at = state.storable_tokens(), NEVER
        for state_of, group in zip(state.groups, self._groups, strict=True):
            start, end = state_of.cursor, self._end(state_of, group, limit - (0 if is_last else group.volatile_tokens))
            if start < end:
                keys, blocks = state_of.keys[start:end], state_of.block_ids[start:end]
                if not group.is_full:
                    blocks = self._still_there(state, group, start, keys, blocks, pool)
                null, cached, pending = pool.null_block.block_id, self._cpu.cached, self._cpu.pending
                missing = [
                    (index, key)
                    for index, key in self._worth(state, group, start, keys)
                    if key not in cached and key not in pending and blocks[index] != null
                ]
                if len(missing) > room:
                    end = start + missing[room][0]
                    del missing[room:]
                chosen += [
                    (key, blocks[index], state.request, group.group_idx, start + index) for index, key in missing
                ]
                room -= len(missing)
                self._advance(state_of, end)
            next_at = min(next_at, (state_of.cursor + 1) * group.gpu_block_size + group.volatile_tokens)
        state.next_store_at = next_at
        return chosen

    def lost(self, state: SimpleRequestState, pool: GPUBlockPool) -> list[Offer]:
        """Return the blocks of ``state`` that the CPU pool has evicted and has room for again."""
        chosen: list[Offer] = []
        cpu, running = self._cpu, self._running
        wanted = sum(len(group.lost) for group in state.groups)
        idle = takewhile(lambda key: key not in running, islice(cpu.victims(), wanted))
        room = cpu.num_blank_blocks + sum(1 for _ in idle)
        if not room:
            return chosen
        for state_of, group in zip(state.groups, self._groups, strict=True):
            for index in sorted(state_of.lost):
                if index >= state_of.cursor:  # The block's tokens were replaced; it is offered when computed again.
                    state_of.lost.discard(index)
                    continue
                key = state_of.keys[index]
                if cpu.knows(key):
                    state_of.lost.discard(index)
                elif len(chosen) < room:
                    state_of.lost.discard(index)
                    (block,) = self._still_there(state, group, index, [key], [state_of.block_ids[index]], pool)
                    if block != pool.null_block.block_id:
                        chosen.append((key, block, state.request, group.group_idx, index))
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

    def forget(self, state: SimpleRequestState) -> None:
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
            group.lost.clear()

    def leave_over(self, state: SimpleRequestState) -> None:
        """Keep the blocks of a finished request that are not stored yet.

        Later steps store them, as long as the GPU blocks keep their content.
        """
        for state_of, group in zip(state.groups, self._groups, strict=True):
            start, end = state_of.cursor, self._end(state_of, group, state.storable_tokens())
            self._left_over += [
                (key, state_of.block_ids[start + index], state.request, group.group_idx, start + index)
                for index, key in self._worth(state, group, start, state_of.keys[start:end])
            ]

    def left_over(self, pool: GPUBlockPool, room: int) -> list[Offer]:
        """Return blocks of finished requests to store now, at most ``room`` of them and no suspects."""
        if not self._left_over:
            return []
        cpu, blocks, suspects = self._cpu, pool.blocks, self._suspects
        # A GPU block keeps its name exactly as long as it keeps its content.
        alive = [
            offer
            for offer in self._left_over
            if blocks[offer[1]].block_hash == offer[0] and not blocks[offer[1]].is_null and offer[1] not in suspects
        ]
        self.dropped += len(self._left_over) - len(alive)
        waiting = list({offer[0]: offer for offer in alive if not cpu.knows(offer[0])}.values())
        chosen, self._left_over = waiting[:room], waiting[room:]
        return chosen

    def reset(self) -> None:
        """Drop the blocks of finished requests; none of them is stored any more."""
        self._left_over.clear()

    def _worth(
        self, state: SimpleRequestState, group: OffloadGroup, start: int, keys: Sequence[OffloadKey]
    ) -> Iterable[tuple[int, OffloadKey]]:
        """Return those of ``keys`` that are stored, with their indexes; ``start`` is the first one's place."""
        if not (group.selects and keys):
            return enumerate(keys)
        most, places = state.policy.max_store_tokens, range(start, start + len(keys))
        stored = self._ends.stored(group, places, state, NEVER if most is None else most)
        return enumerate(keys) if stored is None else compress(enumerate(keys), stored.tolist())

    @staticmethod
    def _end(state_of: SimpleGroupState, group: OffloadGroup, tokens: int) -> int:
        """Return the position behind the last whole block of ``tokens`` tokens."""
        return min(tokens // group.gpu_block_size, len(state_of.keys), len(state_of.block_ids))

    def _advance(self, group: SimpleGroupState, end: int) -> None:
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

    def _still_there(
        self,
        state: SimpleRequestState,
        group: OffloadGroup,
        start: int,
        keys: Sequence[OffloadKey],
        blocks: Sequence[int],
        pool: GPUBlockPool,
    ) -> list[int]:
        """Return ``blocks`` with the null block in place of each block that may have lost its content.

        The engine takes back blocks that a window or a state has passed, and overwrites a running state in place. A
        block whose name in the engine's prefix cache is its key still has its content. Another request may have filled
        and named it since, so a suspect counts as lost.

        Args:
            state: the request.
            group: the KV-cache group.
            start: index of the first block in the group.
            keys: names of the blocks.
            blocks: GPU blocks, co-indexed with ``keys``.
            pool: the engine's pool.
        """
        held_from = group.skipped_blocks(state.request.num_computed_tokens)
        null, all_blocks, suspects = pool.null_block.block_id, pool.blocks, self._suspects
        return [
            block
            if (not group.is_state and index >= held_from)
            or (all_blocks[block].block_hash == key and block not in suspects)
            else null
            for index, (key, block) in enumerate(zip(keys, blocks, strict=True), start)
        ]
