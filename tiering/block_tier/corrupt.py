"""Corrupt blocks on a shared medium: read again, and deleted only if the medium itself is at fault.

A machine with bad memory, or a proxy that changes what it passes on, refuses sound blocks. Such a machine must not
delete the blocks of all others. A refused block is therefore read again, twice, each time over a new connection and
into other memory. If both reads are corrupt and equal, the store settles the matter: it deletes the version that was
read if a digest of the medium proves the damage or another machine confirms it (:meth:`BlockStore.settle`). This
process leaves every refused block alone for a while, unless the block has gone or has a second name.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from functools import partial

from tiering.block_tier.parts import TierParts
from tiering.errors import ConfigError, CorruptBlockError, StoreError
from tiering.medium.block_store import Done, RawBlock, Settlement
from tiering.medium.codec import FrameVerifier
from tiering.medium.side import IoTask
from tiering.runtime.ratelimit import RateLimit
from tiering.secondary.contract import TransferJob

logger = logging.getLogger("kv_tiering.tier")

PERIOD = 60.0
"""Seconds to which the budget and the limit apply."""

BUDGET = 8
"""Maximum number of blocks that one process reads again in a period."""

LIMIT = 16
"""Number of corrupt blocks in a period that opens the breaker, if they are a tenth of all blocks read."""

_SHARE = 0.1
_LOG_PERIOD = 30.0


class CorruptBlocks:
    """Refused blocks of one tier on a shared medium; owned by the scheduler's thread."""

    def __init__(self, parts: TierParts) -> None:
        self._name, self._index, self._io, self._stats = parts.context.name, parts.index, parts.io, parts.stats
        self._header_bytes, self._clock = parts.store.traits.header_bytes, parts.context.clock
        self._spent: deque[float] = deque()
        self._since = self._clock()
        self._read = 0
        self._corrupt = 0
        self._lines = RateLimit(_LOG_PERIOD, self._clock)

    def ended(self, job: TransferJob) -> None:
        """Record a load that has ended."""
        now, outcomes = self._clock(), job.outcomes
        if now - self._since >= PERIOD:
            self._since, self._read, self._corrupt = now, 0, 0
        arrived = outcomes.count(Done.DONE)
        self._read += arrived
        if arrived == len(outcomes):
            return
        refused = [at for at, outcome in enumerate(outcomes) if isinstance(outcome, CorruptBlockError)]
        if refused:
            self._read += len(refused)
            self._refuse(job, refused, now)

    def _refuse(self, job: TransferJob, refused: Sequence[int], now: float) -> None:
        """Leave the blocks at the positions ``refused`` of a load alone, and read some of them again."""
        self._corrupt += len(refused)
        self._index.refuse([job.moved[at] for at in refused], now)
        if self._corrupt >= max(LIMIT, self._read * _SHARE):
            self._io.breakers.reads.trip(
                f"{self._corrupt} of the last {self._read} blocks read were corrupt; suspect a proxy between this "
                "machine and the medium, the memory of this machine, or another program that writes to the medium"
            )
            self._read = self._corrupt = 0
        for at in refused:
            if not self._take_read(now):
                break
            self._io.run(IoTask("verify", partial(self._read_again, job, at), partial(self._ended, job, at)))

    def _take_read(self, now: float) -> bool:
        spent = self._spent
        while spent and now - spent[0] >= PERIOD:
            spent.popleft()
        if len(spent) >= BUDGET:
            return False
        spent.append(now)
        return True

    def _ended(self, job: TransferJob, at: int, verdict: Settlement | None, error: BaseException | None) -> None:
        if verdict in {Settlement.GONE, Settlement.DELETED, Settlement.RENEWED}:
            self._index.pardon(job.moved[at])
        self._stats.blocks_deleted += verdict is Settlement.DELETED
        if count := self._lines.admit():
            logger.warning(
                "tier %s: %d corrupt block(s) were read again; the last, %s: %s",
                self._name,
                count,
                job.places[at],
                f"it could not be read again and is left there: {error}" if verdict is None else verdict.value,
            )

    # --------------------------------------------------------------------------------------------------- the I/O side

    def _read_again(self, job: TransferJob, at: int) -> Settlement:
        """Read a refused block twice more, and let the store settle it if both reads are corrupt and equal.

        Raises:
            StoreError: the block could not be read or settled.
        """
        store, place, limit = self._io.store, job.places[at], self._header_bytes + job.sizes[at]
        first = store.read_again(place, limit)
        if first is None:
            return Settlement.GONE
        if self._is_sound(first, job, at):
            return Settlement.SOUND
        if store.read_again(place, limit) != first:
            return Settlement.UNSTABLE
        return store.settle(place, first)

    def _is_sound(self, found: RawBlock, job: TransferJob, at: int) -> bool:
        """Return True if ``found`` is the block of the job, or if this process cannot decode it."""
        content = memoryview(found.content)
        try:
            header = FrameVerifier().verify(
                content, content[self._header_bytes :], fingerprint=job.fingerprint.hex(), key=job.moved[at]
            )
        except StoreError:
            return False
        except ConfigError:
            return True
        return header.raw_length == job.sizes[at] and self._header_bytes + header.stored_length == len(content)
