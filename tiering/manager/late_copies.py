"""The blocks that need no late store, because a tier behind an exclusive CPU tier has them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat

from tiering.api.keys import OffloadKey
from tiering.table.disposal import DISPOSAL


class FedBlocks:
    """The blocks that a tier has taken since they were computed, while the engine's cache held them.

    A block that was loaded since is none of them: it is used more than once. They are a hint, which may be forgotten at
    any time and then costs further copies.
    """

    def __init__(self) -> None:
        self.most = 0
        """Largest number of blocks; 0: none are noted."""
        self._keys: dict[OffloadKey, None] = {}

    def __bool__(self) -> bool:
        return bool(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: Iterable[OffloadKey]) -> None:
        """Note blocks that a tier has taken; forget all if the engine has dropped many without a word."""
        self._keys.update(dict.fromkeys(keys))
        if len(self._keys) > self.most:
            self.clear()

    def discard(self, keys: Iterable[OffloadKey]) -> None:
        """Forget blocks that the engine has loaded, or that have left its cache."""
        if self._keys:
            deque(map(self._keys.pop, keys, repeat(None)), maxlen=0)

    def others(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Return those of ``keys`` that are none of these blocks."""
        fed = self._keys
        return keys if fed.keys().isdisjoint(keys) else [key for key in keys if key not in fed]

    def clear(self) -> None:
        """Forget all blocks, because a tier may have them no more."""
        if self._keys:
            DISPOSAL.add((self._keys,))
            self._keys = {}
