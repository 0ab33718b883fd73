"""The part of the engine's own block pool that the simple scheduler uses.

Names and meanings are those of vLLM's block pool. A block has the attributes that
:class:`tiering.connector.suspects.EngineBlockPool` names, and ``next_free_block``, the next block in the free queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from tiering.connector.free_queue import FreeBlockQueue
from tiering.connector.suspects import EngineBlockPool


class GPUBlockPool(EngineBlockPool, Protocol):
    """The engine's block pool."""

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
