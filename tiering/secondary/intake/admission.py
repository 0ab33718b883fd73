"""Admission: which of the blocks that are offered to a tier it takes.

``all`` takes everything, ``none`` nothing (a tier that is only read), ``second_touch`` what was seen before: a block
that is used once is not worth a write.  The memory of what was declined is a fixed table of hashes, so it never grows
and never stalls.
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
"""Declined blocks that are remembered (8 bytes each)."""

MAX_WANTED = 1 << 14
"""Blocks that may wait to be asked for again; what is touched beyond that in one step is not."""

MAX_OWN_REQUESTS = 1 << 12
"""Requests of which is remembered which blocks they brought; those whose end is not announced must not stay for ever."""


class Admission(ABC):
    """Decides on the scheduler's thread, for whole batches, from memory."""

    @abstractmethod
    def admit(self, keys: Sequence[OffloadKey], req_id: str) -> list[int]:
        """Positions of the keys to take, in order."""

    def touch(self, keys: Sequence[OffloadKey], req_id: str) -> None:
        """``keys`` were used by ``req_id``."""

    def take_wanted(self) -> list[OffloadKey]:
        """Keys declined before that would be taken now, since the last call."""
        return []

    def may_be_offered(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Those of ``keys``, which are in use and not held, that :meth:`admit` should decide about (again)."""
        return keys

    def on_request_finished(self, req_id: str) -> None:
        """No more calls for ``req_id``."""

    def clear(self) -> None:
        """Forget everything."""


class AdmitAll(Admission):
    """Takes every block."""

    def admit(self, keys: Sequence[OffloadKey], req_id: str) -> list[int]:
        return list(range(len(keys)))


class AdmitNone(Admission):
    """Takes no block: the tier is filled by others."""

    def admit(self, keys: Sequence[OffloadKey], req_id: str) -> list[int]:
        return []

    def may_be_offered(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        return ()


class GhostFilter:
    """A bounded memory of hashes: one table, where a new hash replaces whichever shared its slot.

    After n more insertions a hash is still remembered with probability exp(-n / slots).  Two keys are confused with
    probability 2^-64.
    """

    def __init__(self, slots: int = GHOST_SLOTS) -> None:
        """``slots`` is a power of two."""
        self._table: NDArray[np.int64] = np.zeros(slots, np.int64)
        self._mask = slots - 1

    @staticmethod
    def hashes(keys: Sequence[OffloadKey]) -> NDArray[np.int64]:
        """One int64 per key, never 0 (0 marks an empty slot)."""
        hashes = np.fromiter(map(hash, keys), np.int64, len(keys))
        hashes[hashes == 0] = 1
        return hashes

    def contains(self, hashes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of ``hashes`` are remembered."""
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
    """Takes a block at its second touch while resident, or when it is stored again within the ghost filter's memory.

    The first store of a block is its first touch and is declined.  Touches by the request that brought the block do not
    count: a request touches its own blocks at every step.  (A request without a name is nobody's.)
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
        """Not what was declined and waits for its second touch: another offer would count as one."""
        return list(compress(keys, ~self._ghost.contains(self._ghost.hashes(keys))))

    def on_request_finished(self, req_id: str) -> None:
        self._own.pop(req_id, None)

    def clear(self) -> None:
        self._ghost.clear()
        self._own.clear()
        self._wanted.clear()


def make_admission(word: Literal["all", "second_touch", "none"]) -> Admission:
    """The admission that a stack file names."""
    if word == "second_touch":
        return AdmitSecondTouch()
    return AdmitAll() if word == "all" else AdmitNone()
