"""Intake of a tier: which blocks it stores, and which it takes again.

- Admission policies decide if a tier stores a block that is offered to it. ``all`` admits every block, and ``none`` no
  block (a tier that is only read). ``second_touch`` admits blocks that were seen before, because a block that is used
  once is not worth a write. A fixed table of hashes remembers declined blocks, so it never grows and never stalls.
  Blocks that come from a slower tier (*fills*) may have a stricter policy than other stores.
- Offers bring back blocks that are in use in the primary tier and that the tier lacks. A tier misses blocks that were
  stored while it was out of service, before it existed, or that lost their rows in its queue. The blocks among these
  that matter are used again, and then the tier asks for them. The tier asks at a bounded rate, and rarely for the same
  block. A block that was declined, or failed to be stored, would most likely be declined again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, islice
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from tiering.api.keys import OffloadKey
from tiering.secondary.contract import HELD_FOR
from tiering.table.row_array import row_array

Word = Literal["all", "second_touch", "none"]
"""Name of an admission policy in a stack file."""

GHOST_SLOTS = 1 << 20
"""Number of declined blocks that are remembered, 8 bytes each."""

MAX_WANTED = 1 << 14
"""Maximum number of blocks that wait to be offered; touches beyond it are ignored."""

MAX_OWN_REQUESTS = 1 << 12
"""Maximum number of requests whose own blocks are remembered.

The bound keeps requests whose end is never announced from being remembered for ever.
"""

OFFERS_PER_SECOND = 256.0
"""Number of blocks that one tier is offered again per second, in the long run."""

OFFERS_AT_ONCE = 1024
"""Maximum number of blocks that one tier is offered again at once, after a quiet time."""

OFFER_AGAIN_AFTER = 60.0
"""Seconds until a block that was offered again may be offered once more."""

MAX_REMEMBERED = 1 << 16
"""Maximum number of offered blocks that are remembered; the oldest is dropped."""


class GhostFilter:
    """Bounded memory of hashes: a table in which a new hash replaces the one in its slot.

    After n more insertions a hash is still remembered with probability exp(-n / slots). Two keys are confused with
    probability 2^-64.
    """

    def __init__(self, slots: int = GHOST_SLOTS) -> None:
        """Make an empty filter of ``slots`` slots, a power of two."""
        self._table: NDArray[np.int64] = row_array(slots, np.int64)
        self._mask = slots - 1

    @staticmethod
    def hashes(keys: Sequence[OffloadKey]) -> NDArray[np.int64]:
        """Return one int64 per key, equal in every process, and never 0, which marks an empty slot."""
        hashes = np.fromiter(map(xxh3_64_intdigest, keys), np.uint64, len(keys)).view(np.int64)
        hashes[hashes == 0] = 1
        return hashes

    def contains(self, hashes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return a mask of the ``hashes`` that are remembered."""
        known: NDArray[np.bool_] = self._table[hashes & self._mask] == hashes
        return known

    def add(self, hashes: NDArray[np.int64]) -> None:
        """Add ``hashes``; each replaces the one in its slot."""
        self._table[hashes & self._mask] = hashes

    def drop(self, hashes: NDArray[np.int64]) -> None:
        """Remove ``hashes`` from the set; unknown ones are ignored."""
        slots = hashes & self._mask
        self._table[slots[self._table[slots] == hashes]] = 0

    def clear(self) -> None:
        """Drop all hashes, without a write to each slot: a new table is zero until it is used."""
        self._table = row_array(len(self._table), np.int64)


class DeclinedBlocks:
    """Memory of the blocks that were declined, each until it is admitted at its second touch.

    The first store of a block is its first touch. A later touch makes the block wanted while it is resident. A second
    store is admitted if the ghost filter still remembers the first.

    A request touches its own blocks at every step, so touches by the request that brought a block do not count. A
    request without a name owns no blocks.
    """

    def __init__(self) -> None:
        self._ghost = GhostFilter()
        self._any = False
        """True if a block was declined since the memory was empty; without any, no key is hashed."""
        self._own: dict[str, set[int]] = {}

    def admit(self, keys: Sequence[OffloadKey], req_id: str) -> list[int]:
        """Return the positions of the keys that were declined before; the others are declined now."""
        hashes = self._ghost.hashes(keys)
        known = self._ghost.contains(hashes)
        self._ghost.drop(hashes[known])
        new = hashes[~known]
        if len(new):
            self._any = True
            self._ghost.add(new)
            if req_id:
                self._own.setdefault(req_id, set()).update(new.tolist())
                if len(self._own) > MAX_OWN_REQUESTS:
                    del self._own[next(iter(self._own))]
        admitted: list[int] = np.flatnonzero(known).tolist()
        return admitted

    def add(self, keys: Sequence[OffloadKey]) -> None:
        """Add ``keys``, which no request owns."""
        if keys:
            self._any = True
            self._ghost.add(self._ghost.hashes(keys))

    def drop(self, keys: Sequence[OffloadKey]) -> None:
        """Drop ``keys``, because they are stored for another reason."""
        if self._any:
            self._ghost.drop(self._ghost.hashes(keys))

    def touched(self, keys: Sequence[OffloadKey], req_id: str) -> Sequence[OffloadKey]:
        """Return those of ``keys`` that were declined, unless the request ``req_id`` has brought them."""
        if not self._any:
            return ()
        hashes = self._ghost.hashes(keys)
        known = self._ghost.contains(hashes)
        if not np.count_nonzero(known):
            return ()
        touched = list(compress(keys, known))
        own = self._own.get(req_id)
        if own is not None:
            touched = [key for key, value in zip(touched, hashes[known].tolist(), strict=True) if value not in own]
        return touched

    def others(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Return those of ``keys`` that were not declined."""
        return list(compress(keys, ~self._ghost.contains(self._ghost.hashes(keys)))) if self._any else keys

    def on_request_finished(self, req_id: str) -> None:
        """Drop what is remembered of ``req_id``: no calls for the request follow."""
        self._own.pop(req_id, None)

    def clear(self) -> None:
        """Drop all blocks."""
        if self._any:
            self._ghost.clear()
        self._any = False
        self._own.clear()


class Admission:
    """Admission policy of a tier, which decides for whole batches from memory, on the scheduler's thread.

    Blocks from slower tiers (fills) have a rule of their own: a block that a slower tier holds is not lost if this tier
    declines it, and a write pays only if the block is used again.

    Args:
        word: policy for stores.
        fill: policy for fills, which is never more generous than ``word``; default "all".
    """

    def __init__(self, word: Word, fill: Word = "all") -> None:
        self._none = word == "none"
        self._no_fills = fill == "none"
        self._stores = DeclinedBlocks() if word == "second_touch" else None
        apart = not self._none and (self._no_fills or (word, fill) == ("all", "second_touch"))
        self._fills = DeclinedBlocks() if apart else None
        self._declined = [blocks for blocks in (self._stores, self._fills) if blocks is not None]

    def admit(self, keys: Sequence[OffloadKey], req_id: str, *, fill: bool = False) -> list[int]:
        """Return the positions of the keys to store, in order.

        Args:
            keys: keys that are offered.
            req_id: request that the blocks are stored for; empty: no request.
            fill: True if the blocks come from a slower tier; default False.
        """
        if self._none:
            return []
        if self._fills is not None and (not fill or self._no_fills):
            self._fills.drop(keys)
        if self._fills is not None and fill:
            admitted = self._fills.admit(keys, req_id)
            return [] if self._no_fills else admitted
        return list(range(len(keys))) if self._stores is None else self._stores.admit(keys, req_id)

    def remember(self, keys: Sequence[OffloadKey]) -> None:
        """Record that ``keys`` were admitted and not stored, so that their next use offers them again."""
        if self._stores is not None:
            self._stores.add(keys)

    def touch(self, keys: Sequence[OffloadKey], req_id: str) -> Sequence[OffloadKey]:
        """Return the keys that were declined before and are admitted now, because ``req_id`` uses them."""
        if self._fills is None or self._no_fills:
            return () if self._stores is None else self._stores.touched(self._but_fills(keys), req_id)
        return self._fills.touched(keys, req_id)

    def touch_again(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Return the keys that are admitted now: they were touched twice, counting all machines of a fleet."""
        return () if self._stores is None else self._but_fills(keys)

    def _but_fills(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Return ``keys`` without declined fills, which no touch makes wanted."""
        return keys if self._fills is None else self._fills.others(keys)

    def may_be_offered(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Return those of ``keys`` that :meth:`admit` should decide about again.

        All ``keys`` are in use and not held. Those that wait for their second touch are left out, because another offer
        would count as one.
        """
        if self._none:
            return ()
        for declined in self._declined:
            keys = declined.others(keys)
        return keys

    def on_request_finished(self, req_id: str) -> None:
        """Drop what is remembered of ``req_id``: no calls for the request follow."""
        for declined in self._declined:
            declined.on_request_finished(req_id)

    def clear(self) -> None:
        """Drop all that is remembered, for a reset; later decisions are those of a new policy."""
        for declined in self._declined:
            declined.clear()


class Intake:
    """Admission policy of one tier, and the blocks that it wants to be offered. Times are in seconds.

    Args:
        admission: name of the admission policy.
        fill: name of the admission policy for blocks from slower tiers; default "all".
    """

    def __init__(self, admission: Word, fill: Word = "all") -> None:
        self.admission = Admission(admission, fill)
        """Admission policy."""
        self._allowance = float(OFFERS_AT_ONCE)
        self._allowance_at = 0.0
        self._offered: dict[OffloadKey, float] = {}
        self.wanted: dict[OffloadKey, None] = {}
        """Blocks to be offered, the oldest first; only the methods of this class change the dictionary."""

    def want(self, keys: Sequence[OffloadKey]) -> None:
        """Let ``keys``, which the policy admits now, be offered."""
        if keys:
            self.wanted.update(dict.fromkeys(keys[: max(0, MAX_WANTED - len(self.wanted))]))

    def offer(self, lacking: Sequence[OffloadKey], now: float) -> float:
        """Choose blocks to offer again, and return the seconds until another look at them is worthwhile.

        Args:
            lacking: keys in use that the tier lacks, a prefix in its order; the head is worth the most.
            now: monotonic seconds.
        """
        if not lacking:
            return HELD_FOR
        earned = (now - self._allowance_at) * OFFERS_PER_SECOND
        self._allowance = min(OFFERS_AT_ONCE, self._allowance + earned)
        self._allowance_at = now
        offered = self._offered
        fresh = [key for key in self.admission.may_be_offered(lacking) if offered.get(key, 0.0) <= now]
        chosen = fresh[: int(self._allowance)]
        self._allowance -= len(chosen)
        for key in chosen:
            offered.pop(key, None)
            offered[key] = now + OFFER_AGAIN_AFTER
        for key in list(islice(offered, max(0, len(offered) - MAX_REMEMBERED))):
            del offered[key]
        self.wanted.update(dict.fromkeys(chosen))
        return OFFER_AGAIN_AFTER if len(chosen) == len(fresh) else 0.0

    def take(self) -> list[OffloadKey]:
        """Return the blocks to offer now, the oldest first."""
        if not self.wanted:
            return []
        taken = list(self.wanted)
        self.wanted.clear()
        return taken

    def drop_wanted(self) -> None:
        """Drop the blocks to be offered, but keep the rate and the policy's memory."""
        self._offered.clear()
        self.wanted.clear()

    def clear(self) -> None:
        """Drop all blocks, for a reset."""
        self.admission.clear()
        self.drop_wanted()
