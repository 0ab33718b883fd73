"""The KV cache's book-keeping: a pool of blocks, the block tables of requests, and the prefix cache.

As in vLLM, blocks of all groups come from one pool. A block without users keeps its content and its name until it is
needed; the least recently used one is taken first. Block 0 is the *null block*, which stands for blocks that a window
has passed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from examples.mini_engine.request import Request

CacheKey = tuple[int, bytes]
"""KV-cache group and block hash."""


@dataclass(slots=True, eq=False)
class Block:
    """One block of the GPU's pool: how many requests use it, and the name under which it can be found."""

    block_id: int
    users: int = 0
    key: CacheKey | None = None


class BlockPool:
    """All blocks of the GPU's pool.

    ``free`` holds the blocks without users, the next to be reused first. Named blocks among them are the prefix cache.
    """

    def __init__(self, num_blocks: int) -> None:
        self.null = Block(0, users=1)
        self.free: OrderedDict[int, Block] = OrderedDict((number, Block(number)) for number in range(1, num_blocks))
        self.cached: dict[CacheKey, Block] = {}

    def take(self, count: int) -> list[Block]:
        """Take ``count`` free blocks, whose content is lost. There must be as many."""
        taken = [self.free.popitem(last=False)[1] for _ in range(count)]
        for block in taken:
            self._forget(block)
            block.users = 1
        return taken

    def share(self, blocks: Sequence[Block]) -> None:
        """Use blocks that were found in the cache."""
        for block in blocks:
            if block.users == 0:
                del self.free[block.block_id]
            block.users += 1

    def release(self, blocks: Sequence[Block]) -> None:
        """Stop using blocks; the first of them will be reused first."""
        for block in blocks:
            if block is self.null:
                continue
            block.users -= 1
            if block.users == 0:
                self.free[block.block_id] = block

    def name(self, block: Block, key: CacheKey) -> None:
        """Let a full block be found under ``key``, unless another one has that name already."""
        if block.key is None and key not in self.cached:
            block.key = key
            self.cached[key] = block

    def reset(self) -> None:
        """Forget all names."""
        for block in list(self.cached.values()):
            self._forget(block)

    def _forget(self, block: Block) -> None:
        if block.key is not None:
            del self.cached[block.key]
            block.key = None


@dataclass(frozen=True, slots=True)
class Prefix:
    """The prefix of a request that the GPU's cache holds.

    It has ``tokens``, and for each group the blocks (null where a window has passed).
    """

    tokens: int
    blocks: tuple[list[Block], ...]


@dataclass(frozen=True, slots=True)
class RequestBlocks:
    """A request's block tables, one per group, as a connector wants to see them."""

    tables: tuple[list[Block], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Block ids in logical order, per group."""
        return tuple([block.block_id for block in table] for table in self.tables)


@dataclass(slots=True)
class _Tables:
    blocks: tuple[list[Block], ...]
    named: list[int] = field(default_factory=list)


class KVCacheManager:
    """The block tables of all requests, with prefix caching and windows.

    ``windows`` has one entry per group; None means full attention.
    """

    def __init__(
        self, num_blocks: int, block_size: int, windows: Sequence[int | None], prefix_caching: bool = True
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.windows = tuple(windows)
        self.prefix_caching = prefix_caching
        self._tables: dict[str, _Tables] = {}

    def blocks_of(self, request: Request) -> RequestBlocks:
        """The block tables of ``request``."""
        tables = self._tables.get(request.request_id)
        return RequestBlocks(tables.blocks if tables else tuple([] for _ in self.windows))

    def can_ever_hold(self, tokens: int) -> bool:
        """Return True if a request of ``tokens`` tokens fits into an otherwise empty pool."""
        return -(-tokens // self.block_size) * len(self.windows) < self.num_blocks

    def find_prefix(self, request: Request) -> Prefix:
        """The longest cached prefix, which leaves at least one token to compute. Takes nothing yet."""
        limit = (
            min(len(request.block_hashes), (request.num_tokens - 1) // self.block_size) if self.prefix_caching else 0
        )
        for length in range(self._full_hit(request, limit), 0, -1):
            blocks = tuple(self._group_hit(request, group, length) for group in range(len(self.windows)))
            if all(blocks):
                return Prefix(length * self.block_size, blocks)
        return Prefix(0, tuple([] for _ in self.windows))

    def allocate(
        self, request: Request, tokens: int, new_tokens: int, prefix: Prefix | None = None
    ) -> tuple[list[int], ...] | None:
        """Give ``request`` room for ``new_tokens`` more; ``tokens`` are cached or will be loaded.

        Returns:
            The ids of the new blocks per group. None if there is no room; then only windows have slid on.
        """
        held = self._tables.get(request.request_id)
        if held is not None:
            self._slide(held, tokens)
        before = (
            held.blocks
            if held is not None
            else (prefix.blocks if prefix is not None else tuple([] for _ in self.windows))
        )
        start = [self._first_needed(window, tokens) for window in self.windows]
        kept = [
            [block if index >= first else self.pool.null for index, block in enumerate(table)]
            for table, first in zip(before, start, strict=True)
        ]
        passed = [max(0, first - len(table)) for first, table in zip(start, kept, strict=True)]
        total = -(-(tokens + new_tokens) // self.block_size)
        fresh = [max(0, total - len(table) - nulls) for table, nulls in zip(kept, passed, strict=True)]
        idle = sum(block.users == 0 for table in kept for block in table)
        if sum(fresh) + idle > len(self.pool.free):
            return None
        if held is None:
            for table in kept:
                self.pool.share([block for block in table if block is not self.pool.null])
            held = self._tables[request.request_id] = _Tables(tuple(kept), [len(table) for table in kept])
        new = [self.pool.take(count) for count in fresh]
        for table, nulls, blocks in zip(held.blocks, passed, new, strict=True):
            table.extend([self.pool.null] * nulls)
            table.extend(blocks)
        return tuple(
            [0] * nulls + [block.block_id for block in blocks] for nulls, blocks in zip(passed, new, strict=True)
        )

    def name_full_blocks(self, request: Request) -> None:
        """Let others find the blocks of ``request`` whose tokens all have their KV."""
        if not self.prefix_caching:
            return
        held = self._tables[request.request_id]
        full = min(request.num_computed_tokens // self.block_size, len(request.block_hashes))
        for group, table in enumerate(held.blocks):
            for index in range(held.named[group], full):
                if table[index] is not self.pool.null:
                    self.pool.name(table[index], (group, request.block_hashes[index]))
            held.named[group] = max(held.named[group], full)

    def free(self, request: Request) -> None:
        """Release all blocks of ``request``; the tail of its prefix will be reused first."""
        held = self._tables.pop(request.request_id, None)
        if held is not None:
            self.pool.release([block for table in held.blocks for block in reversed(table)])

    def _full_hit(self, request: Request, limit: int) -> int:
        """Return the number of leading blocks that every full-attention group has."""
        groups = [group for group, window in enumerate(self.windows) if window is None]
        for length in range(limit):
            if any((group, request.block_hashes[length]) not in self.pool.cached for group in groups):
                return length
        return limit

    def _group_hit(self, request: Request, group: int, length: int) -> list[Block]:
        """The blocks that ``group`` needs to go on after ``length`` blocks; empty if one of them is missing."""
        first = self._first_needed(self.windows[group], length * self.block_size)
        found = [self.pool.cached.get((group, name)) for name in request.block_hashes[first:length]]
        present = [block for block in found if block is not None]
        return [self.pool.null] * first + present if len(present) == len(found) else []

    def _first_needed(self, window: int | None, tokens: int) -> int:
        """Index of the first block that the token after ``tokens`` can see."""
        return 0 if window is None else max(0, tokens - window + 1) // self.block_size

    def _slide(self, held: _Tables, tokens: int) -> None:
        for window, table in zip(self.windows, held.blocks, strict=True):
            passed = range(min(self._first_needed(window, tokens), len(table)))
            gone = [table[index] for index in passed if table[index] is not self.pool.null]
            for index in passed:
                table[index] = self.pool.null
            self.pool.release(gone[::-1])
