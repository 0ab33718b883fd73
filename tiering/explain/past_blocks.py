"""A bounded table of the blocks that were computed, stored or evicted lately, 16 bytes for each.

A block is known by an 8-byte hash of its key, which a secret of the process keys. The table is divided into sets of
eight records. A new block replaces the record of its set that was changed first, so the table drops about the oldest.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from tiering.api.keys import OffloadKey

MOST_TIERS = 6
"""Largest number of tiers that the records tell apart, the CPU tier included."""

TIME_UNIT = 8.0
"""Seconds of one unit of a record's time."""

MOST_SECONDS = TIME_UNIT * ((1 << 19) - 1)
"""Age of the table in seconds that the records' times reach; about 48 days."""

_WAYS = 8
_TIER_BITS = 3
_REMOVED_AT = MOST_TIERS
_UNSTORED_AT = _REMOVED_AT + _TIER_BITS
_LOST_AT = _UNSTORED_AT + _TIER_BITS
_TIME_AT = _LOST_AT + 1
_TIER = (1 << _TIER_BITS) - 1
_HELD = (1 << MOST_TIERS) - 1

Hashes = NDArray[np.uint64]
"""Keyed hashes of blocks."""
Numbers = NDArray[np.uint32]
"""Records, or parts of records."""


class Records:
    """Records of some blocks, as arrays with one entry per block.

    Args:
        known: True for each block that has a record.
        info: the packed records; 0 for a block without one.
        number: for each block, the number of evictions of its tier when it was evicted.
    """

    __slots__ = ("_info", "known", "number")

    def __init__(self, known: NDArray[np.bool_], info: Numbers, number: Numbers) -> None:
        self.known = known
        """True for each block that has a record."""
        self.number = number
        """Number of evictions of the tier when the block was evicted, modulo 2**32."""
        self._info = info

    @classmethod
    def joined(cls, parts: Sequence[Records]) -> Records:
        """Return the records of all ``parts``, one at least, in their order."""
        return cls(
            np.concatenate([part.known for part in parts]),
            np.concatenate([part._info for part in parts]),
            np.concatenate([part.number for part in parts]),
        )

    @property
    def held(self) -> Numbers:
        """Bit of each tier that has stored the block and has not removed it since."""
        return self._info & np.uint32(_HELD)

    @property
    def removed_from(self) -> Numbers:
        """Index of the tier that has removed the block last, plus 1; 0: none has."""
        return (self._info >> np.uint32(_REMOVED_AT)) & np.uint32(_TIER)

    @property
    def unstored_by(self) -> Numbers:
        """Index of the tier that did not take the block last, plus 1; 0: none."""
        return (self._info >> np.uint32(_UNSTORED_AT)) & np.uint32(_TIER)

    @property
    def lost(self) -> NDArray[np.bool_]:
        """True where the last removal was no eviction."""
        flags: NDArray[np.bool_] = self._info & np.uint32(1 << _LOST_AT) != 0
        return flags

    @property
    def time(self) -> Numbers:
        """Time of the last change, in :data:`TIME_UNIT` since the table was empty."""
        return self._info >> np.uint32(_TIME_AT)


class PastBlocks:
    """The records of past blocks. One thread calls all methods.

    Args:
        blocks: largest number of records.
    """

    def __init__(self, blocks: int) -> None:
        sets = max(1, blocks // _WAYS)
        self._hashes: Hashes = np.zeros((sets, _WAYS), np.uint64)
        self._info: Numbers = np.zeros((sets, _WAYS), np.uint32)
        self._number: Numbers = np.zeros((sets, _WAYS), np.uint32)
        self._factors = np.frombuffer(secrets.token_bytes(8 * 64), np.uint64) | np.uint64(1)

    def clear(self) -> None:
        """Drop all records."""
        self._hashes.fill(0)
        self._info.fill(0)

    def hashes(self, keys: Sequence[OffloadKey]) -> Hashes:
        """Return the keyed hash of each key; never 0."""
        if not keys:
            return np.zeros(0, np.uint64)
        width = -(-max(map(len, keys)) // 4) * 4
        data = b"".join(keys)
        if len(data) != width * len(keys) or len(keys[0]) != width:
            data = b"".join([key.ljust(width, b"\0") for key in keys])
        words = np.frombuffer(data, np.uint32).reshape(len(keys), width // 4).astype(np.uint64)
        mixed = np.zeros(len(keys), np.uint64)
        for column in range(words.shape[1]):
            # The mix between the words makes the hash depend on the order of more words than there are factors.
            mixed ^= mixed >> np.uint64(29)
            mixed = (mixed ^ words[:, column]) * self._factors[column % len(self._factors)]
        mixed ^= mixed >> np.uint64(32)
        mixed *= self._factors[-1]
        mixed ^= mixed >> np.uint64(29)
        mixed[mixed == 0] = 1
        return mixed

    def find(self, hashes: Hashes) -> Records:
        """Return the records of blocks."""
        sets, ways, known = self._places(hashes)
        return Records(known, np.where(known, self._info[sets, ways], 0), np.where(known, self._number[sets, ways], 0))

    def seen(self, hashes: Hashes, time: int) -> None:
        """Record that blocks were computed, unless they have a record.

        Args:
            hashes: the blocks.
            time: present time in :data:`TIME_UNIT` since the table was empty.
        """
        self._update(hashes[~self.find(hashes).known], time, lambda info: info)

    def stored(self, hashes: Hashes, tier: int, time: int) -> None:
        """Record that the tier with an index has stored blocks."""
        keep = np.uint32(_TIER << _UNSTORED_AT)

        def change(info: Numbers) -> Numbers:
            declined = (info & keep) == np.uint32((tier + 1) << _UNSTORED_AT)
            return np.where(declined, info & ~keep, info) | np.uint32(1 << tier)

        self._update(hashes, time, change)

    def unstored(self, hashes: Hashes, tier: int, time: int) -> None:
        """Record that the tier with an index did not take blocks that it does not hold."""
        keep, mark = ~np.uint32(_TIER << _UNSTORED_AT), np.uint32((tier + 1) << _UNSTORED_AT)
        holds = np.uint32(1 << tier)
        self._update(hashes, time, lambda info: np.where(info & holds, info, (info & keep) | mark))

    def evicted(self, hashes: Hashes, tier: int, time: int, number: int) -> None:
        """Record that the tier with an index has evicted blocks.

        Args:
            hashes: the blocks, in the order of their eviction.
            tier: index of the tier.
            time: present time.
            number: number of evictions of the tier before these.
        """
        clear = ~np.uint32((1 << tier) | (_TIER << _REMOVED_AT) | (1 << _LOST_AT))
        mark = np.uint32((tier + 1) << _REMOVED_AT)
        declined = np.uint32(_TIER << _UNSTORED_AT)

        def change(info: Numbers) -> Numbers:
            own = (info & declined) == np.uint32((tier + 1) << _UNSTORED_AT)
            return np.where(own, info & ~declined, info) & clear | mark

        self._update(hashes, time, change, number)

    def lost(self, hashes: Hashes, tier: int, time: int) -> None:
        """Record that the tier with an index does not hold blocks any more that it has not evicted.

        Blocks that the tier did not hold are left alone: the removals of a reset end after new blocks were stored.
        """
        held = self.find(hashes).held & np.uint32(1 << tier) != 0
        clear = ~np.uint32((1 << tier) | (_TIER << _REMOVED_AT))
        mark = np.uint32(((tier + 1) << _REMOVED_AT) | (1 << _LOST_AT))
        self._update(hashes[held], time, lambda info: info & clear | mark)

    def _places(self, hashes: Hashes) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.bool_]]:
        """Return set and position of each block, and True for each block that is there."""
        sets = (hashes % np.uint64(len(self._hashes))).astype(np.intp)
        same = self._hashes[sets] == hashes[:, None]
        return sets, same.argmax(axis=1), same.any(axis=1)

    def _update(
        self, hashes: Hashes, time: int, change: Callable[[Numbers], Numbers], number: int | None = None
    ) -> None:
        """Change the records of blocks, and add those that are missing.

        Args:
            hashes: the blocks.
            time: present time.
            change: returns the new records without their time.
            number: number of evictions of the tier before these; None: no block was evicted.
        """
        if number is None:
            order = np.arange(len(hashes), dtype=np.uint32)
        else:
            order = (np.arange(number, number + len(hashes), dtype=np.int64) & 0xFFFFFFFF).astype(np.uint32)
        _, first = np.unique(hashes, return_index=True)
        hashes, order = hashes[first], order[first]
        below, stamp = np.uint32((1 << _TIME_AT) - 1), np.uint32(time << _TIME_AT)
        while len(hashes):
            sets, ways, known = self._places(hashes)
            # Of several blocks of one set, a round takes one, so that no two get the same place.
            _, chosen = np.unique(sets, return_index=True)
            sets, ways, new = sets[chosen], ways[chosen], ~known[chosen]
            if new.any():
                times = self._info[sets[new]] >> np.uint32(_TIME_AT)
                ways[new] = np.where(self._hashes[sets[new]] == 0, np.int64(-1), times).argmin(axis=1)
                self._hashes[sets[new], ways[new]] = hashes[chosen][new]
                self._info[sets[new], ways[new]] = 0
            self._info[sets, ways] = change(self._info[sets, ways]) & below | stamp
            if number is not None:
                self._number[sets, ways] = order[chosen]
            left = np.ones(len(hashes), np.bool_)
            left[chosen] = False
            hashes, order = hashes[left], order[left]
