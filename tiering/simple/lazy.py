"""The lazy mode: cached GPU blocks are stored shortly before the engine reuses them."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Sequence
from itertools import repeat

from tiering.api.keys import OffloadKey
from tiering.connector.block_tables import BlockTables
from tiering.connector.free_queue import FreeQueueWalk
from tiering.connector.groups import OffloadGroup
from tiering.connector.tracked import BlockIds
from tiering.simple.block_pool import CPUBlockPool
from tiering.simple.protocols import GPUBlockPool
from tiering.simple.state import Offer, SimpleRequestState


class LazyStores(FreeQueueWalk):
    """A walk through the GPU's free queue; all blocks before its cursor are free or offloaded.

    The content of a GPU block is offloaded once, until the engine uses the block again. A CPU pool that is smaller than
    the GPU's cache would otherwise store the blocks that it has just evicted, in turn and for ever.

    A block is refused if a request filled it whose policy forbids the store. It stays refused
    until a request gets it whose policy allows the store.
    """

    def __init__(self, cpu: CPUBlockPool, target: int) -> None:
        """Start at the head of the queue.

        Args:
            cpu: the CPU pool.
            target: number of blocks of the queue that one step looks at.
        """
        super().__init__()
        self._cpu = cpu
        self.target = target
        self._offloaded: dict[int, OffloadKey] = {}
        self._refused: set[int] = set()

    def handed_out(
        self, block_ids: BlockIds, allowed: Sequence[int] | None = None, new_from: Sequence[int] | None = None
    ) -> None:
        """Note GPU blocks that the engine has given to a request.

        Args:
            block_ids: the GPU blocks, per group.
            allowed: per group, how many of them may be stored, from the first one on; default: all.
            new_from: per group, index of the first block that the request fills itself; the request found the earlier
                ones in the engine's prefix cache. Default: it fills all of them.
        """
        refused = self._refused
        for group, ids in enumerate(block_ids):
            deque(map(self._offloaded.pop, ids, repeat(None)), maxlen=0)
            may = len(ids) if allowed is None else allowed[group]
            if refused:
                refused.difference_update(ids[:may])
            if may < len(ids):
                refused.update(ids[max(may, 0 if new_from is None else new_from[group]) :])
        if self.cursor is not None and any(self.cursor.block_id in ids for ids in block_ids):
            self.cursor = None

    def failed(self, gpu_blocks: Iterable[int]) -> None:
        """Offer these GPU blocks again, because their store has failed."""
        for block in gpu_blocks:
            self._offloaded.pop(block, None)

    def offers(self, pool: GPUBlockPool, room: int, suspects: Container[int] = ()) -> list[Offer]:
        """Return the blocks to store now; the caller must reference each at once, to take it off the queue.

        Args:
            pool: the engine's pool.
            room: largest number of blocks.
            suspects: GPU blocks that may not be stored; default: none.
        """
        cached, pending, offloaded, refused = self._cpu.cached, self._cpu.pending, self._offloaded, self._refused
        chosen: dict[OffloadKey, int] = {}
        for node in self.blocks(pool.free_block_queue, self.target):
            key, block = node.block_hash, node.block_id
            known = key is None or key in cached or key in pending or key in chosen
            if known or block in refused or block in suspects or offloaded.get(block) == key:
                self.cursor = node
            elif len(chosen) < room:
                chosen[key] = block
            else:
                break
        offloaded.update((block, key) for key, block in chosen.items())
        return [(key, block, None, 0, 0) for key, block in chosen.items()]

    def reset(self) -> None:
        """Start over at the head of the queue, with no block offloaded.

        Refused blocks stay refused, because the GPU blocks keep their content.
        """
        self.cursor = None
        self._offloaded.clear()


class HandedOutTables(BlockTables[SimpleRequestState]):
    """Block tables that pass GPU blocks on to the lazy mode when requests get them.

    Args:
        groups: the KV-cache groups.
        states: the requests by id.
        lazy: the lazy mode.
    """

    def __init__(self, groups: Sequence[OffloadGroup], states: dict[str, SimpleRequestState], lazy: LazyStores) -> None:
        super().__init__(groups, states)
        self._lazy = lazy

    def _assign(self, state: SimpleRequestState, block_ids: BlockIds) -> None:
        # Known blocks were handed out before; another request may have got them as well since.
        starts = [len(old) if old == ids[: len(old)] else 0 for old, ids in zip(state.tables, block_ids, strict=True)]
        self._handed_out(state, [ids[start:] for ids, start in zip(block_ids, starts, strict=True)], starts)
        super()._assign(state, block_ids)

    def _grew(self, req_id: str, block_ids: BlockIds) -> None:
        state = self.states.get(req_id)
        if state is not None:
            self._handed_out(state, block_ids, [len(table) for table in state.tables])
        super()._grew(req_id, block_ids)

    def _handed_out(self, state: SimpleRequestState, block_ids: BlockIds, starts: Sequence[int]) -> None:
        """Pass new GPU blocks of a request on, with the part of them that may be stored.

        Args:
            state: the request.
            block_ids: the new blocks, per group.
            starts: index of the first new block in the request's block table, per group.
        """
        limit = state.policy.max_store_tokens if state.policy.store else 0
        if limit is None:
            self._lazy.handed_out(block_ids)
            return
        places = [(group.gpu_block_size, start) for group, start in zip(self.groups, starts, strict=True)]
        self._lazy.handed_out(
            block_ids,
            [max(0, limit // size - start) for size, start in places],
            [max(0, (state.found_tokens or 0) // size - start) for size, start in places],
        )
