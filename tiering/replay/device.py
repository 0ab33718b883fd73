"""The engine's own prefix cache in a replay."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import repeat

from tiering.api.keys import OffloadKey


class DeviceCache:
    """The blocks that the engine holds for later requests, in the order in which they leave.

    The least recently used block leaves first, and the tail of a prompt before its head, as from vLLM's queue of free
    blocks. Blocks of requests that are being computed take no room before the end of their prefill.

    Args:
        blocks: number of blocks that it has room for.
        near: number of blocks that count as about to leave; default none.
    """

    def __init__(self, blocks: int, near: int = 0) -> None:
        self._near = min(near, blocks)
        self._room = blocks - self._near
        self._held: OrderedDict[OffloadKey, None] = OrderedDict()
        self._leaving: OrderedDict[OffloadKey, None] = OrderedDict()

    def holds(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Return for each key whether the cache holds the block."""
        return [key in self._held or key in self._leaving for key in keys]

    def hits(self, keys: list[OffloadKey]) -> int:
        """Return the number of leading ``keys`` that the cache holds, and mark them as used."""
        held, leaving = self._held, self._leaving
        hits = next((number for number, key in enumerate(keys) if key not in held and key not in leaving), len(keys))
        self._put(keys[:hits])
        return hits

    def fill(self, keys: list[OffloadKey]) -> list[OffloadKey]:
        """Hold the blocks of a prompt, its head longest.

        The tail of a prompt that is larger than the cache leaves at once.

        Returns:
            The blocks that are about to leave or have left by this call, the one used last in front.
        """
        self._put(keys)
        leaving = [self._held.popitem(last=False)[0] for _ in range(len(self._held) - self._room)]
        self._leaving.update(dict.fromkeys(leaving))
        for _ in range(len(self._leaving) - self._near):
            self._leaving.popitem(last=False)
        leaving.reverse()
        return leaving

    def _put(self, keys: list[OffloadKey]) -> None:
        """Make ``keys`` the blocks that were used last."""
        deque(map(self._held.pop, keys, repeat(None)), maxlen=0)
        if self._leaving:
            deque(map(self._leaving.pop, keys, repeat(None)), maxlen=0)
        self._held.update(dict.fromkeys(reversed(keys)))
