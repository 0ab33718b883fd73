"""Measurements of one tier by size of blocks, queue depth and direction."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from tiering.admin.tier_admin import TierAdmin
from tiering.api.keys import OffloadKey
from tiering.cli.driver import TierDriver, eager, scratch_key
from tiering.errors import TemporaryStoreError

FILL_SECONDS = 120.0
"""Seconds that filling a tier before its measurements may take."""
MOST_RUNS = 3
_STALL_SECONDS = 60.0
_LEAST_BLOCKS = 16
_SLOT_OVERHEAD = 16384
_LEAST_SCRATCH = 64 << 20
_BACKOFF = 0.01


@dataclass(frozen=True, slots=True)
class Measured:
    """Speed of one tier in one direction, for blocks of one size at one depth."""

    tier: str
    direction: str
    """ "store" or "load"."""
    block_bytes: int
    depth: int
    """Blocks in flight at the same time."""
    blocks: int
    failed: int
    """Blocks that were not moved: dropped, declined or missed."""
    bytes_per_second: float
    """Bytes of the moved blocks per second, in the fastest run."""
    p50: float
    """Median time from the submission of a block to its end, in seconds."""
    p90: float
    """90th percentile of the same."""
    p99: float
    """99th percentile of the same."""
    cpu_seconds_per_gb: float
    """CPU time of this process for 10⁹ bytes."""
    limit: float | None = None
    """Bandwidth of the bare device with the same access; None if it was not measured."""
    runs: int = 1
    """Number of runs; the fastest one counts."""

    def to_json(self) -> dict[str, object]:
        """Return plain data; numbers without a block are None."""
        words = dataclasses.asdict(self)
        return {
            word: None if isinstance(value, float) and math.isnan(value) else value for word, value in words.items()
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes, depths and amounts of the measurements."""

    block_bytes: Sequence[int]
    depths: Sequence[int]
    """Numbers of blocks in flight."""
    nbytes: int
    """Bytes to move in one measurement."""
    seconds: float
    """Time after which a measurement ends early."""

    def blocks(self, block_bytes: int) -> int:
        """Return the number of blocks of one measurement."""
        return max(_LEAST_BLOCKS, self.nbytes // block_bytes, 2 * max(self.depths))


Limit = Callable[[int, int, bool], float | None]
"""Function that measures the bare device: bytes of a block, depth, True for loads → bytes per second."""


def measure_tier(admin: TierAdmin, plan: Plan, limit: Limit | None = None) -> Iterator[Measured]:
    """Yield the measurements of one tier, which is used at a scratch place of its medium.

    A measurement below half of the bare device's bandwidth may have been disturbed. It is repeated, up to
    :data:`MOST_RUNS` runs in all, and the fastest run counts.

    A tier with places of its own is filled first, so that stores replace older blocks as they do in a tier in use.

    Args:
        admin: administration of the tier.
        plan: sizes, depths and amounts.
        limit: measures the bare device; default None: nothing is compared, and each measurement is one run.

    Raises:
        StoreError: the tier cannot be used, or has no scratch place.
        RegionError: there is not enough memory for the blocks.
    """
    for block_bytes in plan.block_bytes:
        blocks = plan.blocks(block_bytes)
        capacity = max(_LEAST_SCRATCH, blocks * (block_bytes + _SLOT_OVERHEAD))
        with admin.scratch(capacity) as options:
            if options is None:
                raise TemporaryStoreError(f"the tier {admin.name} has no scratch place to measure")
            with TierDriver(eager(options), block_bytes, 2 * max(plan.depths)) as driver:
                yield from _Bench(admin.name, driver, plan, blocks, limit).run(
                    fill="capacity" in type(options).model_fields
                )


class _Bench:
    """The measurements with one size of blocks."""

    def __init__(self, tier: str, driver: TierDriver, plan: Plan, blocks: int, limit: Limit | None) -> None:
        self._tier = tier
        self._driver = driver
        self._plan = plan
        self._blocks = blocks
        self._limit = limit
        self._numbers = count()
        self._stored: deque[OffloadKey] = deque(maxlen=blocks // 2)
        """The keys stored last; the tier is large enough to still hold them."""
        random = np.random.default_rng(3)
        for row in driver.rows:
            row[:] = _content(random, len(row))

    def run(self, *, fill: bool) -> Iterator[Measured]:
        if fill:
            self._fill()
        order = np.random.default_rng(7)

        def fresh() -> Iterator[OffloadKey]:
            return (scratch_key(next(self._numbers)) for _ in range(self._blocks))

        def known() -> Iterator[OffloadKey]:
            stored = list(self._stored)
            return (stored[position] for position in order.permutation(len(stored)))

        for load, keys in ((False, fresh), (True, known)):
            for depth in self._plan.depths:
                yield self._fastest(keys, depth, load=load)

    def _fastest(self, keys: Callable[[], Iterator[OffloadKey]], depth: int, *, load: bool) -> Measured:
        """Return a measurement, repeated while it is below half of the bare device's bandwidth."""
        fastest = self._move(keys(), depth, load=load)
        limit = None if self._limit is None else self._limit(self._driver.block_bytes, depth, load)
        runs = 1
        while limit is not None and runs < MOST_RUNS and fastest.bytes_per_second < limit / 2:
            runs += 1
            again = self._move(keys(), depth, load=load)
            fastest = max(fastest, again, key=lambda found: found.bytes_per_second)
        return dataclasses.replace(fastest, limit=limit, runs=runs)

    def _fill(self) -> None:
        """Store blocks until the tier has been full once; stores that find no room yet are tried again."""
        end = time.monotonic() + FILL_SECONDS
        left = self._blocks
        while left and time.monotonic() < end:
            some = min(left, len(self._driver.rows))
            keys = [scratch_key(next(self._numbers)) for _ in range(some)]
            done = len(self._driver.move(keys, range(some), load=False, timeout=_STALL_SECONDS))
            left -= done
            if not done:
                time.sleep(_BACKOFF)
                list(self._driver.finished())

    def _move(self, keys: Iterator[OffloadKey], depth: int, *, load: bool) -> Measured:
        """Keep ``depth`` jobs of one block each in flight, until the keys or the time are used up."""
        driver, latencies = self._driver, list[float]()
        flying: dict[int, tuple[OffloadKey, int, float]] = {}
        rows = deque(range(depth))
        failed = 0
        cpu, began = time.process_time(), time.monotonic()
        last = began
        more = True
        while True:
            while more and rows:
                now = time.monotonic()
                key = next(keys, None) if now - began < self._plan.seconds else None
                if key is None:
                    more = False
                    break
                row = rows.popleft()
                flying[driver.submit([key], [row], load=load)] = (key, row, now)
            if not flying:
                break
            for result in driver.finished():
                key, row, submitted = flying.pop(result.job_id)
                rows.append(row)
                last = time.monotonic()
                if result.success and (result.successful_keys is None or list(result.successful_keys)):
                    latencies.append(last - submitted)
                    if not load:
                        self._stored.append(key)
                else:
                    failed += 1
            if time.monotonic() - last > _STALL_SECONDS:
                raise TemporaryStoreError(f"the tier {self._tier} did not move a block for {_STALL_SECONDS:g} s")
        elapsed, spent = max(last - began, 1e-9), time.process_time() - cpu
        nbytes = len(latencies) * driver.block_bytes
        half, most, nearly_all = np.percentile(latencies, [50, 90, 99]) if latencies else (np.nan,) * 3
        return Measured(
            self._tier,
            "load" if load else "store",
            driver.block_bytes,
            depth,
            len(latencies),
            failed,
            nbytes / elapsed,
            float(half),
            float(most),
            float(nearly_all),
            spent / (nbytes / 1e9) if nbytes else float("nan"),
        )


def _content(random: np.random.Generator, row_bytes: int) -> NDArray[np.uint8]:
    """Return a row of bf16 numbers, which compress as KV does."""
    numbers = random.standard_normal(row_bytes // 2, np.float32)
    return np.ascontiguousarray(numbers.view(np.uint16)[1::2]).view(np.uint8)
