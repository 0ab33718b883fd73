"""Admission policies, which decide if a tier stores a block that is offered to it.

``all`` admits every block, ``none`` no block (a tier that is only read). ``second_touch`` admits blocks that were seen
before, because a block that is used once is not worth a write. A fixed table of hashes remembers declined blocks, so it
never grows and never stalls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import compress
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tiering.api.keys import OffloadKey

GHOST_SLOTS = 1 << 20
"""Number of declined blocks that are remembered, 8 bytes each."""

MAX_WANTED = 1 << 14
"""Maximum number of blocks that wait to be taken as wanted; touches beyond it are ignored."""

MAX_OWN_REQUESTS = 1 << 12
"""Maximum number of requests whose own blocks are remembered.

The bound keeps requests whose end is never announced from being remembered for ever.
"""


class Admission(ABC):
    """Admission policy, which decides for whole batches from memory, on the scheduler's thread."""

    @abstractmethod
    def admit(self, keys: Sequence[OffloadKey], req_id: str) -> list[int]:
        """Return the positions of the keys to store, in order."""

    def touch(self, keys: Sequence[OffloadKey], req_id: str) -> None:
        """Record that request ``req_id`` used ``keys``."""

    def take_wanted(self) -> list[OffloadKey]:
        """Return keys that were declined before and would be admitted now, each once."""
        return []

    def may_be_offered(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Return those of ``keys`` that :meth:`admit` should decide about again.

        All ``keys`` are in use and not held.
        """
        return keys

    def on_request_finished(self, req_id: str) -> None:
        """Forget ``req_id``: no calls for it follow."""

    def clear(self) -> None:
        """Forget everything."""


class AdmitAll(Admission):
    """Policy that admits every block."""

    def admit(self, keys: Sequence[OffloadKey], req_id: str) -> list[int]:
        return list(range(len(keys)))


class AdmitNone(Admission):
    """Policy that admits no block: other processes fill the tier."""

    def admit(self, keys: Sequence[OffloadKey], req_id: str) -> list[int]:
        return []

    def may_be_offered(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        return ()


class GhostFilter:
    """Bounded memory of hashes: a table in which a new hash replaces the one in its slot.

    After n more insertions a hash is still remembered with probability exp(-n / slots). Two keys are confused with
    probability 2^-64.
    """

    def __init__(self, slots: int = GHOST_SLOTS) -> None:
        """Make an empty filter of ``slots`` slots, a power of two."""
        self._table: NDArray[np.int64] = np.zeros(slots, np.int64)
        self._mask = slots - 1

    @staticmethod
    def hashes(keys: Sequence[OffloadKey]) -> NDArray[np.int64]:
        """Return one int64 per key, never 0 (0 marks an empty slot)."""
        hashes = np.fromiter(map(hash, keys), np.int64, len(keys))
        hashes[hashes == 0] = 1
        return hashes

    def contains(self, hashes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the ``hashes`` that are remembered."""
        known: NDArray[np.bool_] = self._table[hashes & self._mask] == hashes
        return known

    def add(self, hashes: NDArray[np.int64]) -> None:
        """Remember ``hashes``."""
        self._table[hashes & self._mask] = hashes

    def discard(self, hashes: NDArray[np.int64]) -> None:
        """Forget those of ``hashes`` that are remembered."""
        slots = hashes & self._mask
        self._table[slots[self._table[slots] == hashes]] = 0

    def clear(self) -> None:
        """Forget everything."""
        self._table.fill(0)


class AdmitSecondTouch(Admission):
    """Policy that admits a block at its second touch.

    The first store of a block is its first touch and is declined. A later touch makes the block wanted while it is
    resident. A second store is admitted if the ghost filter still remembers the first.

    A request touches its own blocks at every step, so touches by the request that brought a block do not count. A
    request without a name owns no blocks.
    """

    def __init__(self, slots: int = GHOST_SLOTS, own_requests: int = MAX_OWN_REQUESTS) -> None:
        self._ghost = GhostFilter(slots)
        self._own_requests = own_requests
        self._own: dict[str, set[int]] = {}
        self._wanted: dict[OffloadKey, None] = {}

    def admit(self, keys: Sequence[OffloadKey], req_id: str) -> list[int]:
        hashes = self._ghost.hashes(keys)
        known = self._ghost.contains(hashes)
        self._ghost.discard(hashes[known])
        new = hashes[~known]
        if len(new):
            self._ghost.add(new)
            if req_id:
                self._own.setdefault(req_id, set()).update(new.tolist())
                if len(self._own) > self._own_requests:
                    del self._own[next(iter(self._own))]
        admitted: list[int] = np.flatnonzero(known).tolist()
        return admitted

    def touch(self, keys: Sequence[OffloadKey], req_id: str) -> None:
        hashes = self._ghost.hashes(keys)
        known = self._ghost.contains(hashes)
        if not known.any() or len(self._wanted) >= MAX_WANTED:
            return
        touched = list(compress(keys, known))
        own = self._own.get(req_id)
        if own is not None:
            touched = [key for key, value in zip(touched, hashes[known].tolist(), strict=True) if value not in own]
        self._wanted.update(dict.fromkeys(touched[: MAX_WANTED - len(self._wanted)]))

    def take_wanted(self) -> list[OffloadKey]:
        if not self._wanted:
            return []
        wanted = list(self._wanted)
        self._wanted.clear()
        return wanted

    def may_be_offered(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Return the keys that do not wait for their second touch: another offer would count as one."""
        return list(compress(keys, ~self._ghost.contains(self._ghost.hashes(keys))))

    def on_request_finished(self, req_id: str) -> None:
        self._own.pop(req_id, None)

    def clear(self) -> None:
        self._ghost.clear()
        self._own.clear()
        self._wanted.clear()


def make_admission(word: Literal["all", "second_touch", "none"]) -> Admission:
    """Return the admission policy that a stack file names."""
    if word == "second_touch":
        return AdmitSecondTouch()
    return AdmitAll() if word == "all" else AdmitNone()
