"""The CPU pool's book-keeping: which block holds what, who uses it, and which goes next.

A block is *blank* (nothing of worth in it), *held* (a copy reads or writes it: it has references), or *evictable*
(named, found by its name, used by nobody).  A name is given when the block is allocated, for a store, and can be found
once :meth:`CPUBlockPool.publish` says that the store is complete.  Blocks are numbers and names are bytes: nothing here
is an object per block.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence

from tiering.api.keys import PRIMARY_TIER, OffloadKey
from tiering.api.manager import LOCAL, MEDIUM_CPU, OffloadingEvent
from tiering.errors import ConfigError, TieringError

NULL_BLOCK = -1
"""Stands where a window or a state has passed; has no memory and is never allocated, held or freed."""


class PoolFullError(TieringError):
    """More blocks were asked for than are blank or evictable.  Nothing was taken."""

    temporary = True


class CPUBlockPool:
    """``num_blocks`` blocks, from 0.  ``cached``: name → block of everything that can be found, whatever its KV-cache group.

    ``pending``: name → block of what is being stored.  Both are to be read only.  Costs are a few C calls per batch and
    a fraction of a microsecond per block.
    """

    __slots__ = (
        "_blank",
        "_events",
        "_events_on",
        "_evictable",
        "_evicted",
        "_names",
        "_refs",
        "cached",
        "evictions",
        "num_blocks",
        "pending",
    )

    def __init__(self, num_blocks: int, enable_events: bool = False) -> None:
        if num_blocks < 1:
            raise ConfigError(f"a CPU pool of {num_blocks} blocks holds nothing")
        self.num_blocks = num_blocks
        self.cached: dict[OffloadKey, int] = {}
        self.pending: dict[OffloadKey, int] = {}
        self.evictions = 0
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, OffloadKey] = OrderedDict()
        self._refs: Counter[int] = Counter()
        self._names: dict[int, OffloadKey] = {}
        """Names of held blocks."""
        self._evicted: list[OffloadKey] = []
        self._events_on = enable_events
        self._events: list[OffloadingEvent] = []

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._blank) + len(self._evictable)

    @property
    def num_blank_blocks(self) -> int:
        """Blocks that can be allocated without forgetting anything."""
        return len(self._blank)

    @property
    def num_held_blocks(self) -> int:
        """Blocks with references."""
        return len(self._refs)

    def ref_count(self, block: int) -> int:
        """References to ``block``."""
        return self._refs.get(block, 0)

    def victims(self) -> Iterator[OffloadKey]:
        """The names that further allocations would forget, the next one first, once no block is blank."""
        return iter(self._evictable.values())

    def get_new_blocks(self, keys: Sequence[OffloadKey]) -> list[int]:
        """One block for each of ``keys``, named so and with one reference; least recently used blocks are forgotten to make room.

        ``keys`` are neither cached nor pending.  Raises :class:`PoolFullError`, with nothing changed, if there is no
        room.
        """
        count = len(keys)
        if count > self.num_free_blocks:
            raise PoolFullError(f"{count} blocks were asked for, {self.num_free_blocks} of {self.num_blocks} are free")
        at = max(0, len(self._blank) - count)
        blocks = self._blank[at:]
        del self._blank[at:]
        if len(blocks) < count:
            blocks += self._evict(count - len(blocks))
        self._refs.update(blocks)
        self._names.update(zip(blocks, keys, strict=True))
        self.pending.update(zip(keys, blocks, strict=True))
        return blocks

    def publish(self, blocks: Sequence[int]) -> None:
        """What was stored into ``blocks`` is complete: it can be found."""
        names = [(self._names[block], block) for block in blocks if block in self._names]
        for key, _ in names:
            self.pending.pop(key, None)
        self.cached.update(names)
        if self._events_on and names:
            self._events.append(_event([key for key, _ in names], removed=False))

    def discard(self, blocks: Sequence[int]) -> list[OffloadKey]:
        """What was being stored into ``blocks`` is worth nothing: its names, but for those that a reset has forgotten before."""
        discarded: list[OffloadKey] = []
        for block in blocks:
            key = self._names.pop(block, None)
            if key is not None and self.pending.get(key) == block:
                del self.pending[key]
                discarded.append(key)
        return discarded

    def touch(self, blocks: Sequence[int]) -> None:
        """One more reference to each of ``blocks``: they are not forgotten before it is given back."""
        evictable = self._evictable
        idle = [block for block in blocks if block in evictable]
        self._names.update(zip(idle, map(evictable.pop, idle), strict=True))
        self._refs.update(blocks)

    def free_blocks(self, ordered_blocks: Iterable[int]) -> None:
        """One reference less to each; of those left without any the first is forgotten first.

        Raises :class:`TieringError`, with nothing changed, for a block that has no reference.
        """
        blocks = list(ordered_blocks)
        refs = self._refs
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
            if key is None or self.cached.get(key) != block:  # never published
                self._blank.append(block)
            else:
                self._evictable[block] = key

    def refresh(self, keys: Iterable[OffloadKey]) -> None:
        """Mark what is held of ``keys``, a prefix in its order, as recently used, the head more recently than the tail."""
        evictable = self._evictable
        found = [block for block in map(self.cached.get, keys) if block is not None and block in evictable]
        deque(map(evictable.move_to_end, reversed(found)), maxlen=0)

    def take_evicted(self) -> list[OffloadKey]:
        """What was forgotten to make room since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def take_events(self) -> list[OffloadingEvent]:
        """The events since the last call, in an order that a consumer can apply."""
        events, self._events = self._events, []
        return events

    def reset(self) -> None:
        """Forget every name.  Blocks that copies use become blank when they are given back."""
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
