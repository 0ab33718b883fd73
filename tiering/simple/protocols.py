"""The part of the engine's own block pool that the simple scheduler uses.

Names and meanings are those of vLLM's block pool. A block has these attributes:

- ``block_id``: its number.
- ``is_null``: True for the null block.
- ``ref_cnt``: number of requests and copies that use the block; 0: the block is in the free queue.
- ``block_hash``: its name in the prefix cache, as in :func:`tiering.api.keys.make_offload_key`; None if it has none.
- ``next_free_block``: the next block in the free queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol


class FreeBlockQueue(Protocol):
    """A linked list of the free blocks between two sentinels; the engine reuses the first block first."""

    @property
    def fake_free_list_head(self) -> Any: ...

    @property
    def fake_free_list_tail(self) -> Any: ...


class GPUBlockPool(Protocol):
    """The engine's block pool."""

    @property
    def blocks(self) -> Sequence[Any]:
        """All blocks, indexed by their ids."""

    @property
    def null_block(self) -> Any: ...

    @property
    def free_block_queue(self) -> FreeBlockQueue: ...

    def touch(self, blocks: Sequence[Any]) -> None:
        """Add a reference to each block; blocks that had none leave the free queue."""

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """Give back one reference to each block.

        Blocks that are left without references return to the free queue. Those with a name join its end, in this order.
        """
