"""The choice between a load from one tier and computing, by what both have taken lately.

A load of n blocks pays if it is expected to end before the engine would have computed them. Either all blocks of a run
pay or none does, because both durations grow by a constant per block. Expected is the time of all blocks on their way
from the tier and of the n blocks, and that from the end of a load to its blocks in the engine's cache at least. While
no job of the tier ends, at least as long again as it has been silent. What computing costs other requests belongs to
its time (:mod:`tiering.manager.engine_queue`).

- Until the engine has computed a prompt, a speed is assumed (:data:`tiering.connector.prefill.ASSUMED_SPEED`). Before
  the first load has ended, loads pay, because nothing is known; by the silence, only as long as the first one takes
  less than computing. What an earlier engine has measured counts instead (:mod:`tiering.manager.kept_speeds`).
- A request waits for loads no longer than computing their blocks would have taken (:attr:`Request.load_by`). If the
  loads pay then, that is behind all that waited before (:attr:`Request.load_queue`).
- Of several prompts that come before anything is known, the shortest one waits for a short time
  (:data:`~tiering.manager.prefix_search.FIRST_PART`). It then shows the engine's speed, while the others' loads show
  the tier's. If only the tier is not known, one prompt shows its speed, and the others wait for a short time.
- While loads do not pay, a few blocks that requests compute are loaded all the same, for no request
  (:data:`PROBE_SECONDS`). These loads show that the tier has become faster. They are a long one and then a short one,
  so that latency and time per block can be told apart.
"""

from __future__ import annotations

import math

from tiering.runtime.linear_cost import LinearCost

HALF_LIFE = 2.0
"""Seconds after which a load has half of its weight in the estimate."""

KEPT_HALF_LIFE = 60.0
"""Seconds after which a load has half of its weight in what the next engine takes over.

A restart takes about as long, and one load of a tier says little of the next one.
"""

WINDOW = 0.5
"""Longest time over which the blocks of a busy tier are counted together, in seconds."""

SHORTEST = 1e-4
"""Shortest duration that is measured, in seconds: several jobs may be collected together."""

STAY = 1.05
"""Part of the time of computing that a load may take while loads pay; otherwise, it may take 1.

It may take 1, too, while only the speed is known that an earlier engine has measured.
"""

PROBE_SECONDS = 4.0
"""Shortest time between two pairs of loads that only measure, in seconds."""

CORRECTED_SECONDS = 600.0
"""Seconds after which half of a correction is left, as an exponent."""

PROBE_BLOCKS = 32
"""Largest number of blocks of a load that only measures."""

SHORTER = 4
"""Quotient of the blocks of the long and the short one of a pair."""


class LoadGate:
    """Expected durations of the loads from one tier, and its counters.

    Times are on the manager's clock, in seconds.
    """

    __slots__ = (
        "_begun",
        "_corrected",
        "_cost",
        "_ended",
        "_factor",
        "_fixed",
        "_got",
        "_is_measured",
        "_is_short",
        "_kept",
        "_next_probe",
        "_outstanding",
        "_progress",
        "awaited",
        "cut",
        "gated",
        "pays",
    )

    def __init__(self) -> None:
        self._cost = LinearCost(HALF_LIFE, keeps_quotient=True)
        self._kept = LinearCost(KEPT_HALF_LIFE, keeps_quotient=True)
        self._outstanding = self._got = self._ended = 0
        self._begun = self._progress = 0.0
        self._fixed = True
        self._is_measured = False
        self._next_probe = -math.inf
        self._factor, self._corrected = 1.0, 0.0
        self._is_short = True
        self.pays = True
        """True if the last load that was considered pays."""
        self.awaited = 0
        """Blocks on their way for which requests wait; without loads, the engine would have to compute them."""
        self.gated = 0
        """Blocks that the tier held and that requests computed because a load would have taken longer."""
        self.cut = 0
        """Blocks that requests waited for until computing would have taken as long."""

    @property
    def is_known(self) -> bool:
        """True if a load has ended, of this engine or of one before."""
        return self._cost.per_unit is not None

    @property
    def measured(self) -> tuple[float, float] | None:
        """Fixed seconds of a load and those of each block, for the next engine; None before the first load."""
        kept = self._kept
        return None if not self._is_measured or kept.per_unit is None else (kept.fixed, kept.per_unit)

    def assume(self, fixed: float, per_block: float, now: float) -> None:
        """Expect loads to take what an earlier engine has measured, until one has ended.

        Args:
            fixed: seconds of a load that do not depend on its blocks.
            per_block: seconds of each of its blocks.
            now: present time.
        """
        if not self._is_measured:
            self._cost = LinearCost(HALF_LIFE, keeps_quotient=True)
            self._kept = LinearCost(KEPT_HALF_LIFE, keeps_quotient=True)
            for blocks in (1, PROBE_BLOCKS):
                for cost in (self._cost, self._kept):
                    cost.observe(blocks, fixed + blocks * per_block, now)

    def begin(self, blocks: int, now: float) -> None:
        """Record that a load of ``blocks`` is wanted."""
        if not self._outstanding:
            self._begun = self._progress = now
            self._got, self._fixed = 0, True
        self._outstanding += blocks
        self.awaited += blocks

    def end(self, blocks: int, arrived: int, now: float) -> None:
        """Record that a load of ``blocks`` has ended, and that ``arrived`` of them are there."""
        self._outstanding -= blocks
        self._ended += blocks
        if not arrived:
            return
        self._got += arrived
        self._progress = now
        seconds = now - self._begun
        if seconds < SHORTEST:
            return
        if not self._is_measured:
            self._is_measured = True
            self._cost.restart()
            self._kept.restart()
        for cost in (self._cost, self._kept):
            cost.observe(self._got, seconds, now, fixed=self._fixed)
        if seconds > WINDOW:
            # The tier was busy all the time: what follows has no further latency.
            self._begun, self._got, self._fixed = now, 0, False

    def expected(self, blocks: int, now: float) -> float:
        """Return the seconds until a load of ``blocks`` that is submitted now will have ended."""
        cost = self._cost
        seconds = 0.0 if cost.per_unit is None else cost.fixed + cost.per_unit * (self._outstanding + blocks)
        return max(seconds, self.silence(now))

    def last(self, blocks: int) -> int:
        """Return the number of the last block of a load of ``blocks`` that is wanted now."""
        return self._ended + self._outstanding + blocks

    def left(self, last: int, blocks: int) -> float:
        """Return the expected seconds until a load will have ended that was wanted earlier.

        Args:
            last: number of its last block.
            blocks: number of blocks that are to come at least.
        """
        return (self._cost.per_unit or 0.0) * max(last - self._ended, blocks)

    def silence(self, now: float) -> float:
        """Return the seconds since a block has come from a tier that has loads to do; 0 if it has none."""
        return now - self._progress if self._outstanding else 0.0

    def correct(self, factor: float, now: float) -> None:
        """Correct the expected durations from now on, less and less.

        A correction may stop the loads by which a change would show, so it must not last.

        Args:
            factor: quotient of the measured time of loads and the expected one.
            now: present time.
        """
        self._factor, self._corrected = factor, now

    def decide(self, blocks: int, compute: float, others: float, handover: float, now: float) -> bool:
        """Return True if a load of ``blocks`` pays.

        Args:
            blocks: number of further blocks; 0 for those that are on their way already.
            compute: seconds of computing them.
            others: seconds that computing costs besides: for other requests before, and by which they are later.
            handover: seconds from the end of a load to the blocks in the engine's cache.
            now: present time.
        """
        factor = self._factor
        if factor != 1.0:
            factor = math.pow(factor, math.pow(0.5, (now - self._corrected) / CORRECTED_SECONDS))
        seconds = self.expected(blocks, now) + handover
        is_kept = self.is_known and not self._is_measured  # no load of this engine pays so far
        bound = STAY if self.pays and not is_kept else 1.0
        is_heard = factor * self.silence(now) <= bound * compute
        self.pays = is_heard and factor * seconds <= bound * (compute + others)
        return self.pays

    def take_probe(self, blocks: int, now: float) -> int:
        """Return the number of blocks of a load that only measures; 0 if none is due.

        Args:
            blocks: number of blocks that the tier holds of a prompt.
            now: present time.
        """
        if self._outstanding or now < self._next_probe:
            return 0
        self._is_short = not self._is_short
        most = min(blocks, PROBE_BLOCKS)
        if not self._is_short:
            return most  # the short one may follow at once
        self._next_probe = now + PROBE_SECONDS
        return max(1, most // SHORTER)
