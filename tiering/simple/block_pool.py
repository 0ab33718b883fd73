"""The bookkeeping of the CPU pool: the names, references and eviction order of its blocks.

A block is *blank*, *held* or *evictable*. A blank block has no content. A held block has references, because a copy
reads or writes it. An evictable block has a name, can be found, and has no references. A block gets its name when it is
allocated for a store. The name can be found once :meth:`CPUBlockPool.publish` has marked the store as complete. Blocks
are numbers and names are bytes, so that the pool needs no object per block.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tiering.api.keys import PRIMARY_TIER, OffloadKey
from tiering.api.manager import LOCAL, MEDIUM_CPU, OffloadingEvent, PrefixMatch
from tiering.api.request import ReqContext
from tiering.errors import ConfigError, TieringError


class PoolFullError(TieringError):
    """A request for more blocks than are blank or evictable; no block was allocated."""

    temporary = True
    """True, because the same call can succeed once copies have ended."""


class CPUBlockPool:
    """A pool of CPU blocks, numbered from 0, with least-recently-used eviction.

    A call costs a few C calls per batch and a fraction of a microsecond per block.
    """

    def __init__(self, num_blocks: int, enable_events: bool = False, block_bytes: int = 0) -> None:
        """Create a pool of blank blocks.

        Args:
            num_blocks: number of blocks.
            enable_events: collect events for :meth:`take_events`; default: False.
            block_bytes: bytes of one block, on all workers together; default: 0.

        Raises:
            ConfigError: ``num_blocks`` is not positive.
        """
        if num_blocks < 1:
            raise ConfigError(f"a CPU pool of {num_blocks} blocks holds nothing; give it at least one block")
        self.num_blocks = num_blocks
        self.cached: dict[OffloadKey, int] = {}
        """Name → block of all blocks that can be found, over all KV-cache groups. Read only."""
        self.pending: dict[OffloadKey, int] = {}
        """Name → block of all blocks that are being stored. Read only."""
        self.evictions = 0
        """Blocks evicted since the start."""
        self._block_bytes = block_bytes
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, OffloadKey] = OrderedDict()
        self.refs: Counter[int] = Counter()
        """Number of references to each held block. Read only."""
        self._names: dict[int, OffloadKey] = {}
        """Names of held blocks."""
        self._evicted: list[OffloadKey] = []
        self._events_on = enable_events
        self._events: list[OffloadingEvent] = []

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that can be allocated now."""
        return len(self._blank) + len(self._evictable)

    @property
    def num_blank_blocks(self) -> int:
        """Number of blocks that can be allocated without an eviction."""
        return len(self._blank)

    def knows(self, key: OffloadKey) -> bool:
        """Return True if the block of that name can be found or is being stored."""
        return key in self.cached or key in self.pending

    def victims(self) -> Iterator[OffloadKey]:
        """Yield the names of the evictable blocks, in the order in which allocations evict them."""
        return iter(self._evictable.values())

    def get_new_blocks(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Allocate a block for each of ``keys``, with that name and one reference.

        The least recently used blocks are evicted if too few blocks are blank.

        Args:
            keys: names that are neither cached nor pending.

        Raises:
            PoolFullError: too few blocks are free; nothing was changed.
        """
        count = len(keys)
        if count > self.num_free_blocks:
            raise PoolFullError(
                f"{count} blocks were asked for, {self.num_free_blocks} of {self.num_blocks} are free; "
                "retry when copies have ended"
            )
        at = max(0, len(self._blank) - count)
        blocks = self._blank[at:]
        del self._blank[at:]
        if len(blocks) < count:
            blocks += self._evict(count - len(blocks))
        self.refs.update(blocks)
        self._names.update(zip(blocks, keys, strict=True))
        self.pending.update(zip(keys, blocks, strict=True))
        return blocks

    def publish(self, blocks: Sequence[int]) -> None:
        """Make ``blocks``, whose store is complete, findable by their names."""
        names = [(self._names[block], block) for block in blocks if block in self._names]
        for key, _ in names:
            self.pending.pop(key, None)
        self.cached.update(names)
        if self._events_on and names:
            self._events.append(_event([key for key, _ in names], removed=False))

    def discard(self, blocks: Sequence[int]) -> list[OffloadKey]:
        """Drop the names of ``blocks``, whose store has failed.

        Returns:
            The names that were pending; names that a reset has dropped before are left out.
        """
        discarded: list[OffloadKey] = []
        for block in blocks:
            key = self._names.pop(block, None)
            if key is not None and self.pending.get(key) == block:
                del self.pending[key]
                discarded.append(key)
        return discarded

    def hold(self, blocks: Sequence[int]) -> None:
        """Add a reference to each of ``blocks``, which protects them from eviction until it is given back."""
        evictable = self._evictable
        idle = [block for block in blocks if block in evictable]
        self._names.update(zip(idle, map(evictable.pop, idle), strict=True))
        self.refs.update(blocks)

    def free_blocks(self, ordered_blocks: Iterable[int]) -> None:
        """Give back one reference to each block.

        Args:
            ordered_blocks: blocks in eviction order: of those left without references, the first is evicted first.

        Raises:
            TieringError: a block has fewer references than are given back; nothing was changed.
        """
        blocks = list(ordered_blocks)
        refs = self.refs
        given = Counter(blocks)
        if not all(map(refs.__contains__, given)) or any(count > refs[block] for block, count in given.items()):
            raise TieringError("a CPU block was freed more often than it was taken")
        for block in blocks:
            left = refs[block] - 1
            if left:
                refs[block] = left
                continue
            del refs[block]
            key = self._names.pop(block, None)
            if key is None or self.cached.get(key) != block:  # The block was never published.
                self._blank.append(block)
            else:
                self._evictable[block] = key

    def match_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext, *, at_least: int = 1) -> PrefixMatch:
        """Return the number of leading ``keys`` that can be found."""
        missing = bytes(map(self.cached.__contains__, keys)).find(0)
        return PrefixMatch(len(keys) if missing < 0 else missing, False)

    def lookup_each(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Sequence[bool | None]:
        """Return for each of ``keys`` whether it can be found."""
        return list(map(self.cached.__contains__, keys))

    def held(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrefixMatch:
        """Return the number of leading ``keys`` that can be found."""
        return self.match_prefix(keys, req_context)

    def still_pending(self, req_context: ReqContext) -> bool:
        """Return False: every lookup is decided at once."""
        return False

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Mark evictable blocks of ``keys`` as recently used, the prefix's head more recently than its tail.

        Args:
            keys: names of a prefix's blocks, in their order; unknown names are ignored.
            req_context: the request that has these blocks.
        """
        evictable = self._evictable
        found = [block for block in map(self.cached.get, keys) if block is not None and block in evictable]
        deque(map(evictable.move_to_end, reversed(found)), maxlen=0)

    def take_evicted(self) -> list[OffloadKey]:
        """Return the names that were evicted since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def take_events(self) -> list[OffloadingEvent]:
        """Return the events since the last call, in an order that a consumer can apply."""
        events, self._events = self._events, []
        return events

    def get_stats(self) -> Mapping[str, Any]:
        """Return fields of :class:`tiering.secondary.tier_stats.TierStats`, under ``primary``."""
        blocks, size = len(self.cached), self._block_bytes
        return {
            "primary": {
                "evictions": self.evictions,
                "blocks": blocks,
                "occupancy_bytes": blocks * size,
                "capacity_bytes": self.num_blocks * size,
                "available": 1,
            }
        }

    def reset(self) -> None:
        """Drop every name. Blocks with references become blank when their last reference is given back."""
        if self._events_on and self.cached:
            self._events.append(_event(list(self.cached), removed=True))
        self.cached.clear()
        self.pending.clear()
        self._names.clear()
        self._evicted.clear()
        self._blank += self._evictable
        self._evictable.clear()

    def _evict(self, count: int) -> list[int]:
        pop = self._evictable.popitem
        victims = [pop(last=False) for _ in range(count)]
        keys = [key for _, key in victims]
        deque(map(self.cached.__delitem__, keys), maxlen=0)
        self._evicted += keys
        self.evictions += count
        if self._events_on:
            self._events.append(_event(keys, removed=True))
        return [block for block, _ in victims]


def _event(keys: list[OffloadKey], *, removed: bool) -> OffloadingEvent:
    return OffloadingEvent(keys, MEDIUM_CPU, LOCAL, PRIMARY_TIER, removed)
