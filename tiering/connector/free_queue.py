"""The walk along the engine's free queue, in the order in which the engine uses up its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tiering.connector.groups import OffloadGroup


class FreeBlockQueue(Protocol):
    """The free blocks, linked by ``next_free_block``, between two blocks that are none."""

    @property
    def fake_free_list_head(self) -> Any: ...

    @property
    def fake_free_list_tail(self) -> Any: ...


def blocks_of_two_steps(groups: Sequence[OffloadGroup], max_batch_tokens: int) -> int:
    """Return the largest number of free blocks that two steps can use up.

    The result is twice the sum over the groups. A group counts 2 for a state, ceil(window / block) + 1 for a window,
    and ceil(tokens of a step / block) otherwise.

    Args:
        groups: the KV-cache groups.
        max_batch_tokens: largest number of tokens of a step.
    """
    total = 0
    for group in groups:
        size = group.gpu_block_size
        if group.is_state:
            total += 2
        else:
            total += -(-max_batch_tokens // size) if group.is_full else -(-(group.reach + 1) // size) + 1
    return 2 * total


class FreeQueueWalk:
    """A walk that goes on, step by step, where it stopped; its cursor is a block of the queue.

    If the engine has used the cursor's block since, its place means nothing any more: it may be at the other end of the
    queue. The walk then starts over, which costs some lookups.
    """

    def __init__(self) -> None:
        self.cursor: Any = None
        """Last block that the walk has passed; None: the walk begins at the head."""

    def blocks(self, queue: FreeBlockQueue, count: int) -> list[Any]:
        """Return up to ``count`` free blocks behind the cursor, which the caller moves.

        Args:
            queue: the engine's free queue.
            count: largest number of blocks.
        """
        if self.cursor is not None and self.cursor.ref_cnt > 0:
            self.cursor = None
        tail, found = queue.fake_free_list_tail, list[Any]()
        node = (queue.fake_free_list_head if self.cursor is None else self.cursor).next_free_block
        for _ in range(count if node is not None else 0):
            if node is tail:
                break
            found.append(node)
            node = node.next_free_block
        return found
