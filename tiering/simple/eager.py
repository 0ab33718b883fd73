"""The eager mode: every confirmed block is stored soon after it was computed, once, for as long as its request runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, takewhile

from tiering.base import OffloadKey
from tiering.simple.block_pool import CPUBlockPool
from tiering.simple.hits import GroupNeeds
from tiering.simple.protocols import GPUBlockPool
from tiering.simple.request_state import RequestState

Offer = tuple[OffloadKey, int]
"""A block's name, and the GPU block that has it."""


class EagerStores:
    """Chooses what is stored.  ``running`` counts, by name, the blocks of running requests that were offered.

    A block that the CPU pool forgets while a request that has it runs is offered again, once there is room that no other running
    request's block has to leave for: a pool smaller than what runs would otherwise do nothing but copy.
    """

    def __init__(self, cpu: CPUBlockPool, needs: Sequence[GroupNeeds]) -> None:
        self._cpu = cpu
        self._needs = needs
        self._running: Counter[OffloadKey] = Counter()
        self._left_over: list[Offer] = []
        self.restored = 0
        self.dropped = 0

    def offers(self, state: RequestState, pool: GPUBlockPool, room: int) -> list[Offer]:
        """What of ``state`` is to be stored now, at most ``room`` blocks; what does not fit is offered again next time."""
        chosen: list[Offer] = []
        if not state.policy.store or state.stale:
            return chosen
        confirmed = state.confirmed_tokens()
        limit = confirmed if state.policy.max_store_tokens is None else min(confirmed, state.policy.max_store_tokens)
        next_at = 1 << 62
        for group, need in zip(state.groups, self._needs, strict=True):
            start, end = group.cursor, min(limit // need.block_size, len(group.keys), len(group.blocks))
            if start < end:
                keys, blocks = group.keys[start:end], group.blocks[start:end]
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
                room -= len(missing)
                self._running.update(group.keys[start:end])
                group.cursor = end
            next_at = min(next_at, (group.cursor + 1) * need.block_size)
        state.next_store_at = next_at
        return chosen

    def lost(self, state: RequestState, pool: GPUBlockPool) -> list[Offer]:
        """What the CPU pool has forgotten of ``state`` and has room for again."""
        chosen: list[Offer] = []
        cpu, running = self._cpu, self._running
        wanted = sum(len(group.lost) for group in state.groups)
        idle = takewhile(lambda key: key not in running, islice(cpu.victims(), wanted))
        room = cpu.num_blank_blocks + sum(1 for _ in idle)
        if not room:
            return chosen
        for group, need in zip(state.groups, self._needs, strict=True):
            for index in sorted(group.lost):
                key = group.keys[index]
                if key in cpu.cached or key in cpu.pending:
                    group.lost.discard(index)
                elif len(chosen) < room:
                    group.lost.discard(index)
                    (block,) = self._still_there(state, need, index, [key], [group.blocks[index]], pool)
                    if block != pool.null_block.block_id:
                        chosen.append((key, block))
        self.restored += len(chosen)
        return chosen

    def evicted(self, keys: Iterable[OffloadKey], states: Mapping[str, RequestState]) -> None:
        """The CPU pool has forgotten ``keys``; note whose they are.  Costs nothing much unless a running request has one."""
        missing = set(filter(self._running.__contains__, keys))
        if not missing:
            return
        for state in states.values():
            for group in state.groups:
                for key in missing.intersection(group.keys[: group.cursor]):
                    group.lost.add(group.keys.index(key))

    def forget(self, state: RequestState) -> None:
        """``state`` gives its blocks back, or runs no more."""
        running = self._running
        for group in state.groups:
            for key in group.keys[: group.cursor]:
                left = running[key] - 1
                if left > 0:
                    running[key] = left
                else:
                    running.pop(key, None)
            group.cursor = 0
            group.lost.clear()
        state.next_store_at = 0

    def leave_over(self, state: RequestState) -> None:
        """``state`` has ended and not all of it could be stored: the rest is tried again while its GPU blocks keep their content."""
        if not state.policy.store or state.stale:
            return
        confirmed = state.confirmed_tokens()
        if state.policy.max_store_tokens is not None:
            confirmed = min(confirmed, state.policy.max_store_tokens)
        for group, need in zip(state.groups, self._needs, strict=True):
            end = min(confirmed // need.block_size, len(group.keys), len(group.blocks))
            self._left_over += zip(group.keys[group.cursor : end], group.blocks[group.cursor : end], strict=True)

    def left_over(self, pool: GPUBlockPool, room: int) -> list[Offer]:
        """What is left of requests that have ended, as far as there is room."""
        if not self._left_over:
            return []
        cpu, blocks = self._cpu, pool.blocks
        # A GPU block keeps its name exactly as long as it keeps its content.
        alive = [(key, block) for key, block in self._left_over if blocks[block].block_hash == key and not blocks[block].is_null]
        self.dropped += len(self._left_over) - len(alive)
        waiting = {key: block for key, block in alive if key not in cpu.cached and key not in cpu.pending}
        chosen = list(waiting.items())[:room]
        self._left_over = list(waiting.items())[room:]
        return chosen

    def reset(self, states: Iterable[RequestState]) -> None:
        """Nothing computed so far is stored any more."""
        self._left_over.clear()
        for state in states:
            self.forget(state)

    @staticmethod
    def _still_there(
        state: RequestState, need: GroupNeeds, start: int, keys: Sequence[OffloadKey], blocks: Sequence[int], pool: GPUBlockPool
    ) -> list[int]:
        """``blocks``, with the null block in the place of those whose content is not, or not surely, what ``keys`` say.

        The engine takes back what a window or a state has passed, and overwrites a running state in place; the name that it gives a block
        is right for as long as the block has it.
        """
        held_from = need.first_needed(state.request.num_computed_tokens)
        null, all_blocks = pool.null_block.block_id, pool.blocks
        return [
            block if (not need.is_state and start + index >= held_from) or all_blocks[block].block_hash == key else null
            for index, (key, block) in enumerate(zip(keys, blocks, strict=True))
        ]
