"""The warm start of one manager: the blocks that engines use most are promoted at its start.

Engines publish which prefixes their requests used, in the tiers that outlive them
(:class:`~tiering.secondary.contract.TierHotKeys`). A manager that starts gathers what they published, and promotes it
into free rows, hottest first::

    gathering -- a tier answers --> promoting -- nothing or no free row is left, or time is over --> order --> over
        ^                               |
        '----------- a reset -----------'

Nothing waits for it. One batch is in flight at a time, at most a tenth of a second of the bandwidth, and none begins
while a request waits for a promotion. No block is evicted for it. Engines take turns by the blocks that were begun for
them, so that what one of them published wrongly delays the others by its own share at most.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from tiering.api.keys import OffloadKey
from tiering.api.request_policy import DEFAULT_REQUEST_POLICY
from tiering.api.units import format_bytes
from tiering.manager.answers import HOT_KEYS, PREFIX, PROCESS_ENDS, BreachError, checked_run, text_of
from tiering.manager.cascade_queue import NOBODY
from tiering.manager.manager_stats import ManagerStats
from tiering.manager.promotions import Promotions
from tiering.manager.requests import Request
from tiering.manager.tier_state import TierState
from tiering.manager.tiers import SecondaryTiers
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.secondary.hot_prefixes import HotPrefixes

_log = logging.getLogger("kv_tiering.manager")

BATCH_SECONDS = 0.1
"""Time that a batch may take at the bandwidth."""

LONGEST_BATCH = 64
"""Largest number of blocks of one batch, and of those whose recency one step changes."""

GATHER_SECONDS = 10.0
"""Time for which an engine without requests steps until the tiers return what engines published."""

VAIN_RUNS = 16
"""Runs in a row that brought nothing, after which the rest of an engine's keys is left out."""

_RUNS_PER_STEP = 8
_PATIENCE = 10.0


class WarmStartLimits(NamedTuple):
    """Bounds of one warm start."""

    nbytes: int
    """Bytes that are loaded at most."""
    seconds: float
    """Time after which nothing begins any more, from the first step with prepared rows on."""
    bandwidth: float
    """Bytes per second."""


@dataclass(slots=True, eq=False)
class _Source:
    """The runs that one engine has published, and the position in them."""

    state: TierState
    """The tier that returned it."""
    runs: Sequence[Sequence[OffloadKey]]
    run: int = 0
    """Position of the present run."""
    key: int = 0
    """Position of the next key in that run."""
    begun: int = 0
    """Blocks and runs that were begun for the engine."""
    vain: int = 0
    """Runs in a row that brought nothing."""

    def next_run(self) -> None:
        """Go on with the next run."""
        self.run, self.key = self.run + 1, 0

    def failed(self) -> None:
        """Count a run that brought nothing; after too many in a row, no run is left."""
        self.vain += 1
        self.begun += 1
        if self.vain >= VAIN_RUNS:
            self.run = len(self.runs)


class WarmStart:
    """Publishes what the requests of one manager use, and promotes what engines published before.

    Args:
        limits: bounds of the promotions.
        primary: the primary tier.
        promotions: the promotions of the manager.
        tiers: the secondary tiers.
        stats: the manager's counters.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self,
        limits: WarmStartLimits,
        primary: CPUPrimaryTierOffloadingManager,
        promotions: Promotions,
        tiers: SecondaryTiers,
        stats: ManagerStats,
        clock: Callable[[], float],
    ) -> None:
        self._limits = limits
        self._primary = primary
        self._promotions = promotions
        self._tiers = tiers
        self._stats = stats
        self._clock = clock
        self._states = [state for state in tiers.states if state.traits.hot_keys is not None]
        self._prefixes = HotPrefixes()
        self._row_bytes = (primary.get_kv_memoryview().shape or (0, 1))[1]
        self._left = limits.nbytes // self._row_bytes
        """Blocks that may still be begun."""
        self._owner = Request(NOBODY, DEFAULT_REQUEST_POLICY, list(tiers.states), [], finished=True)
        """Stands for a request in the promotions, which therefore reserve nothing for it."""
        self._began: float | None = None
        self._next_at = -math.inf
        self._gathering = list(self._states)
        self._sources: list[_Source] = []
        self._batch: tuple[_Source, Sequence[OffloadKey]] | None = None
        self._loaded: list[OffloadKey] = []
        """Keys that arrived, hottest first."""
        self._is_over = False

    def used(self, keys: tuple[OffloadKey, ...], request: Request | None) -> None:
        """Record that a request used a prefix; left out if the request may not store it in all tiers."""
        if not keys or request is None or not request.policy.store or request.policy.tiers is not None:
            return
        self._prefixes.used(keys)
        for state in self._states:
            if state.in_service and state.traits.hot_keys is not None:
                self._tiers.call(state, state.traits.hot_keys.used, keys)

    def publish(self) -> None:
        """Let the tiers begin to write what the requests used."""
        chains = self._prefixes.take(self._clock())
        for state in self._states:
            if chains and state.in_service and state.traits.hot_keys is not None:
                self._tiers.call(state, state.traits.hot_keys.publish, chains)

    @property
    def steps_idle(self) -> bool:
        """True if an engine without requests should step, because the next step promotes or gathers."""
        if self._is_over:
            return False
        began = self._began
        return bool(self._sources) or began is None or self._clock() < began + min(GATHER_SECONDS, self._limits.seconds)

    def step(self) -> bool:
        """Do what is due at the end of a step, and return False if nothing is due in the next ones."""
        now = self._clock()
        if self._prefixes.is_due(now):
            self.publish()
        if self._is_over:
            self._order()
            return bool(self._loaded)
        if self._began is None:
            if not self._primary.is_prepared:  # a large CPU tier takes minutes, which are not those of the warm start
                if self._primary.is_unusable:
                    self._end(0.0)
                return True
            self._began = now
        if self._batch is not None:
            if self._owner.asked:
                return True
            self._end_batch(*self._batch)
        self._gather()
        in_time = now < self._began + self._limits.seconds and self._left > 0
        if not in_time or not (self._sources or self._gathering) or not self._primary.free:
            self._end(now - self._began)
        elif self._sources and now >= self._next_at:
            self._promote(now)
        return True

    def reset(self) -> None:
        """Drop what was used, gathered and loaded, because a reset empties all tiers; then gather anew."""
        self._prefixes.clear()
        self._clear_owner()
        self._sources, self._loaded = [], []
        self._gathering = list(self._states)

    def _gather(self) -> None:
        for state in list(self._gathering):
            if state.in_service and state.traits.hot_keys is not None:
                engines = self._tiers.ask(state, HOT_KEYS, state.traits.hot_keys.gather)
                if engines is None:
                    continue
                self._stats.warm_start_engines += len(engines)
                self._sources += [_Source(state, runs) for runs in engines if runs]
            if not state.resetting:
                self._gathering.remove(state)

    def _promote(self, now: float) -> None:
        """Begin the next batch, unless a request waits for a promotion."""
        if self._promotions.rows_promoting or self._promotions.waiters.waits:
            return
        seconds_per_block = self._row_bytes / self._limits.bandwidth
        most = max(1, min(LONGEST_BATCH, self._left, int(BATCH_SECONDS / seconds_per_block)))
        for _ in range(_RUNS_PER_STEP):
            if not self._sources:
                return
            source = min(self._sources, key=attrgetter("begun"))
            if source.run >= len(source.runs):
                self._sources.remove(source)
            elif (begun := self._promote_from(source, most)) is not None:
                self._next_at = max(self._next_at, now) + begun * seconds_per_block
                return

    def _promote_from(self, source: _Source, most: int) -> int | None:
        """Promote the next blocks of an engine.

        Returns:
            The number of blocks that were begun, 0 if a later step must go on; None if there was nothing to begin.
        """
        try:
            keys: Sequence[OffloadKey] = checked_run(source.runs[source.run], source.key, most)
        except PROCESS_ENDS:
            raise
        except BaseException as error:
            found = (
                "something else than keys" if isinstance(error, BreachError) else f"runs that raise {text_of(error)}"
            )
            self._tiers.fail(source.state, f"its gather returned {found}")
            self._sources.remove(source)
            return None
        readable, pending = self._primary.readable, self._primary.pending
        known = next((at for at, key in enumerate(keys) if key not in readable and key not in pending), len(keys))
        source.key += known
        keys = keys[known:]
        if not keys:
            if not known:
                source.next_run()
            return None
        unknown = next((at for at, key in enumerate(keys) if key in readable or key in pending), len(keys))
        undecided = False
        for state in self._tiers.states:
            if not state.in_service:
                continue
            answer = self._tiers.ask(state, PREFIX, state.tier.lookup_prefix, keys[:unknown], NOBODY)
            if answer is None:
                continue
            if answer[0]:
                begun = self._promotions.start_unasked(state, self._owner, keys[: answer[0]])
                if begun:
                    self._batch = source, keys[:begun]
                    source.key += begun
                    source.begun += begun
                    self._left -= begun
                    self._owner.undecided_since = None
                return begun
            undecided = undecided or answer[1]
        if undecided and self._owner.wait_undecided(self._clock(), _PATIENCE):
            return 0
        self._owner.undecided_since = None
        self._stats.warm_start_missing += len(keys)
        source.failed()
        if source.run < len(source.runs):
            source.next_run()
        return None

    def _end_batch(self, source: _Source, keys: Sequence[OffloadKey]) -> None:
        arrived = [key for key in keys if key in self._owner.brought]
        self._clear_owner()
        self._loaded += arrived
        self._stats.warm_start_blocks += len(arrived)
        self._stats.warm_start_missing += len(keys) - len(arrived)
        if arrived:
            source.vain = 0
        else:
            source.failed()

    def _clear_owner(self) -> None:
        self._batch = None
        for kept in (self._owner.brought, self._owner.failed, self._owner.refused):
            kept.clear()

    def _end(self, seconds: float) -> None:
        self._is_over, self._sources, self._gathering = True, [], []
        _log.info(
            "warm start: %d blocks (%s) of %d engines in %.1f s",
            self._stats.warm_start_blocks,
            format_bytes(self._stats.warm_start_blocks * self._row_bytes),
            self._stats.warm_start_engines,
            seconds,
        )

    def _order(self) -> None:
        """Make some of the loaded blocks recent, coldest first: the hottest ones were loaded first."""
        if self._loaded:
            self._primary.refresh_readable(self._loaded[-LONGEST_BATCH:])
            del self._loaded[-LONGEST_BATCH:]
