"""What the simple scheduler needs of the engine's own block pool.  Names and meanings are those of vLLM's block pool.

Its blocks have ``block_id``, ``is_null``, ``ref_cnt`` (how many requests and copies use it; 0: it is in the free
queue), ``block_hash`` (its name in the prefix cache, as in :func:`tiering.api.keys.make_offload_key`, None if it cannot
be found) and ``next_free_block``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol


class FreeBlockQueue(Protocol):
    """The free blocks as a linked list between two blocks that are none, the next to be reused first."""

    @property
    def fake_free_list_head(self) -> Any: ...

    @property
    def fake_free_list_tail(self) -> Any: ...


class GPUBlockPool(Protocol):
    """The pool.  ``blocks`` has every block by its id."""

    @property
    def blocks(self) -> Sequence[Any]: ...

    @property
    def null_block(self) -> Any: ...

    @property
    def free_block_queue(self) -> FreeBlockQueue: ...

    def touch(self, blocks: Sequence[Any]) -> None:
        """One more reference to each; those without any leave the free queue."""

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        """One reference less to each; of those left without any, the ones with a name join the end of the free queue, in this order."""
