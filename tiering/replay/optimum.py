"""The optimum: a cache that evicts the block whose next use is farthest away (Belady, 1966).

Requests hit with their leading blocks only, and all blocks of a prompt enter the cache, as in an engine. Of the blocks
that one request uses next, the tail leaves first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from tiering.replay.trace import Hashes

_NEVER = 1 << 62


class Optimum:
    """The optimum of one trace, for caches of any capacity.

    It keeps the hashes of all blocks, 8 bytes each.
    """

    def __init__(self) -> None:
        self._prompts: list[Hashes] = []
        self._rates: dict[int, float] = {}

    def add(self, hashes: Hashes) -> None:
        """Read the next request of the trace."""
        self._prompts.append(hashes)

    def hit_rate(self, capacity: int) -> float:
        """Return the share of all blocks that hit in a cache of ``capacity`` blocks."""
        if capacity not in self._rates:
            self._rates[capacity] = self._replay(capacity)
        return self._rates[capacity]

    def _replay(self, capacity: int) -> float:
        uses = self._next_uses()
        held: dict[int, int] = {}
        leaving: list[tuple[int, int, int]] = []
        hits = accesses = 0
        for prompt, nexts in zip(self._prompts, uses, strict=True):
            keys = prompt.tolist()
            accesses += len(keys)
            hits += next((number for number, key in enumerate(keys) if key not in held), len(keys))
            for position, (key, use) in enumerate(zip(keys, nexts, strict=True)):
                held[key] = use
                heapq.heappush(leaving, (-use, -position, key))
            while len(held) > capacity:
                use, _, key = heapq.heappop(leaving)
                if held.get(key) == -use:
                    del held[key]
        return hits / accesses if accesses else 0.0

    def _next_uses(self) -> list[Sequence[int]]:
        """Return for each block of each request the number of the next request that uses the block."""
        following: dict[int, int] = {}
        uses: list[Sequence[int]] = []
        for number in range(len(self._prompts) - 1, -1, -1):
            keys = self._prompts[number].tolist()
            uses.append([following.get(key, _NEVER) for key in keys])
            following.update(dict.fromkeys(keys, number))
        uses.reverse()
        return uses
