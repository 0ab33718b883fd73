"""The lazy mode: cached GPU blocks are stored when they come near to being reused."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Sequence
from itertools import repeat
from typing import Any

from tiering.api.keys import OffloadKey
from tiering.simple.block_pool import CPUBlockPool
from tiering.simple.hits import GroupNeeds
from tiering.simple.protocols import GPUBlockPool
from tiering.simple.request_state import BlockIds

Offer = tuple[OffloadKey, int]


def lazy_target(needs: Sequence[GroupNeeds], max_batch_tokens: int) -> int:
    """How many free blocks a step makes sure of: what two steps can use up at most.

    Per group 2 for a state, ceil(window / block) + 1 for a window, ceil(the step's token budget / block) otherwise; the
    sum doubled.
    """
    total = 0
    for need in needs:
        if need.is_state:
            total += 2
        elif need.is_full:
            total += -(-max_batch_tokens // need.block_size)
        else:
            total += -(-need.window // need.block_size) + 1
    return 2 * total


class LazyStores:
    """Walks the GPU's free queue from a cursor; everything before the cursor is free or offloaded.

    The cursor is a block of the queue.  When somebody has taken that block since, its place says nothing any more (it
    may even be back, at the other end): the walk starts over, which costs some look-ups.

    What a GPU block holds is offloaded once, until the engine uses the block again: a CPU pool that is smaller than the
    GPU's cache would otherwise take in turn what it has just forgotten, for ever.

    What may not be stored, the blocks of ``suspects``, is passed by.

    Blocks that a request has filled whose policy does not let them be stored are ``refused`` until a request that lets
    them gets them.
    """

    def __init__(self, cpu: CPUBlockPool, target: int, suspects: Container[int] = ()) -> None:
        self._cpu = cpu
        self._suspects = suspects
        self.target = target
        self._cursor: Any = None
        self._offloaded: dict[int, OffloadKey] = {}
        self._refused: set[int] = set()

    def handed_out(
        self, block_ids: BlockIds, allowed: Sequence[int] | None = None, new_from: Sequence[int] | None = None
    ) -> None:
        """The engine has given these GPU blocks, per group, to a request.

        Per group, ``allowed``: how many of them, from the first on, may be stored (None: all); ``new_from``: where
        those begin that the request is to fill itself, behind those that it found in the engine's prefix cache (None:
        all are new).
        """
        refused = self._refused
        for group, ids in enumerate(block_ids):
            deque(map(self._offloaded.pop, ids, repeat(None)), maxlen=0)
            may = len(ids) if allowed is None else allowed[group]
            if refused:
                refused.difference_update(ids[:may])
            if may < len(ids):
                refused.update(ids[max(may, 0 if new_from is None else new_from[group]) :])
        if self._cursor is not None and any(self._cursor.block_id in ids for ids in block_ids):
            self._cursor = None

    def failed(self, gpu_blocks: Iterable[int]) -> None:
        """A store of these GPU blocks has failed: they are to be offered again."""
        for block in gpu_blocks:
            self._offloaded.pop(block, None)

    def offers(self, pool: GPUBlockPool, room: int) -> list[Offer]:
        """What is to be stored now, at most ``room`` blocks; each is to get a reference at once, by which it leaves the queue."""
        queue = pool.free_block_queue
        cursor = self._cursor
        if cursor is not None and cursor.ref_cnt > 0:
            cursor = None
        node = queue.fake_free_list_head.next_free_block if cursor is None else cursor.next_free_block
        tail = queue.fake_free_list_tail
        cached, pending, offloaded, refused = self._cpu.cached, self._cpu.pending, self._offloaded, self._refused
        suspects = self._suspects or ()
        chosen: dict[OffloadKey, int] = {}
        for _ in range(self.target):
            if node is tail or node is None:
                break
            key, block = node.block_hash, node.block_id
            known = key is None or key in cached or key in pending or key in chosen
            if known or block in refused or block in suspects or offloaded.get(block) == key:
                cursor = node
            elif len(chosen) < room:
                chosen[key] = block
            else:
                break
            node = node.next_free_block
        self._cursor = cursor
        offloaded.update((block, key) for key, block in chosen.items())
        return list(chosen.items())

    def reset(self) -> None:
        """Start over at the head; nothing counts as offloaded.  What is refused stays so: its GPU blocks have the same content."""
        self._cursor = None
        self._offloaded.clear()
