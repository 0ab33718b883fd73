"""The tiering manager: one CPU primary tier in front of any number of secondary tiers.

Every stored block is offered to all secondary tiers (a cascade). A lookup that misses the primary tier probes the
secondary tiers in order, fastest first. The blocks that they hold are loaded back into primary rows (a promotion).
The manager runs on the scheduler's thread and does no I/O.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from operator import attrgetter
from threading import get_ident
from typing import Any

from tiering.api.descriptions import TierDescriptions
from tiering.api.hints import KeptBlocks
from tiering.api.keys import PRIMARY_TIER, OffloadKey
from tiering.api.manager import OffloadingEvent
from tiering.api.namespace import revision_digest
from tiering.api.request import OffloadPolicy, ReqContext, RequestOffloadingContext
from tiering.manager.answers import TRUTH
from tiering.manager.cascade_queue import NOBODY
from tiering.manager.lookups import ManagerLookups
from tiering.manager.rest import LONGEST_REST
from tiering.manager.stores import ManagerStores

_log = logging.getLogger("kv_tiering.manager")

MOST_MISSING = 4096
"""Number of blocks beyond which no more are looked for in the engine's cache."""


class TieringOffloadingManager(ManagerLookups, ManagerStores):
    """A manager of a primary and secondary tiers that cascades stored blocks and promotes missing ones.

    Without secondary tiers, the manager is a CPU cache. A tier breaks its contract if it raises, returns what its
    contract does not allow, or reports a job that is not its own. Such a tier is logged, counted and taken out of
    service; the engine goes on.

    A call for a request before :meth:`on_new_request` or after :meth:`on_request_finished` leaves no state behind. Its
    lookup finds only what the primary tier holds, and its store has no blocks to store.
    """

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._enter()
        known = self._known.get(req_context.req_id)
        if known is not None:
            self._open_lookups.drop(req_context.req_id)
            self._close(known)
        request = self._requests.begin(req_context)
        policy = OffloadPolicy.REQUEST_LEVEL if request.wants_all else OffloadPolicy.BLOCK_LEVEL
        return RequestOffloadingContext(policy)

    def on_request_finished(
        self, req_context: ReqContext, released: Sequence[OffloadKey] = (), kept: Sequence[KeptBlocks] = ()
    ) -> None:
        self._enter()
        request = self._known.get(req_context.req_id)
        if request is None or request.finished:
            return
        request.finished, request.released, request.kept = True, released, kept
        self._open_lookups.drop(req_context.req_id)
        if not self._close_if_done(request):
            self._promotions.release(request)

    def promote_early(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self._owner.claim()
        request = self._known.get(req_context.req_id)
        if request is not None and request.policy.load and self._states:
            self._rest.until = None
            self._early.add(request, keys)

    def prefetch(
        self,
        keys: Sequence[OffloadKey],
        tenant: bytes,
        bytes_per_second: float,
        after: float = 0.0,
        *,
        has_holes: bool = False,
    ) -> None:
        self._owner.claim()
        if self._states:
            self._rest.until = None
            row_bytes = (self.primary_tier.get_kv_memoryview().shape or (0, 1))[1]
            self._early.prefetch(keys, tenant, bytes_per_second / row_bytes, after, has_holes=has_holes)

    def on_schedule_end(self) -> None:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        rest = self._rest
        # Most steps of an engine with many small requests end here.
        if rest.until is not None and rest.heard == self.news.count and self._clock() < rest.until:
            return
        rest.listen()
        self._jobs.collect()
        if self._jobs.awaited:
            self._cascade_awaited()
        warms = self._warm is not None and self._warm.step()
        if self._kept_speeds is not None:
            self._kept_speeds.step()
        if self._early.waiting or self._early.later:
            self._early.step()
        if self._promotions.queued:
            self._jobs.submit_promotions()
        self._jobs.pull()
        if self.primary_tier.keeper is not None:
            self.primary_tier.keeper.step()
        superseded, seconds = self._end_tiers()
        if superseded:
            self._follow(self._clock())
        self._jobs.collected = False
        if self._gates:
            self._search.queue.end_step()
        if seconds > 0.0 and not (warms or self._jobs.awaited or self._promotions.queued or self._early.waiting):
            next_due = min(self._promotions.next_deadline, self._reservations.next_expiry, self._waiters.first_end)
            rest.until = min(self._clock() + seconds, next_due, self._early.next_due)

    def _end_tiers(self) -> tuple[bool, float]:
        """End the step of all tiers, and cascade the blocks that they want.

        Returns:
            True if the common epoch of a tier has a successor, and the seconds for which all tiers rest.
        """
        any_superseded, longest = False, LONGEST_REST
        for state in self._states:
            if state.resetting:
                self._tiers.end_reset(state)
            elif state.in_service:
                wanted, rest, superseded, _ = self._tiers.end_step(state)
                longest = min(longest, rest)
                if superseded:
                    any_superseded, longest = True, 0.0
                if wanted:
                    self._jobs.cascade_held((state,), wanted, NOBODY)
                    if self._missing is not None and len(self._missing) < MOST_MISSING:
                        self._missing.update((key, state) for key in wanted if key not in self._readable)
                    longest = 0.0
                continue
            longest = 0.0
        return any_superseded, longest

    def _follow(self, deadline: float) -> None:
        """Drop all blocks stored before, because a new common epoch has begun; then let the tiers enter it.

        Args:
            deadline: time until which tiers may confirm; a step of the engine gives them none.
        """
        self._stats.new_epochs += 1
        self._empty_primary()
        self._tiers.follow(deadline)

    @property
    def new_epochs(self) -> int:
        return self._stats.new_epochs

    def has_pending_work(self) -> bool:
        """Return True while jobs are in flight or queued.

        An overdue job counts for :data:`~tiering.manager.jobs.COUNTS_OVERDUE` seconds beyond its deadline, so that the
        steps of an idle engine collect its end and release its rows. A tier that hangs for longer lets the engine
        sleep; the steps of the next request then collect.
        """
        if get_ident() != self._owner.ident:
            self._owner.claim()
        if self._early.steps_idle or (self._warm is not None and self._warm.steps_idle):
            return True
        return self._promotions.queued or self._jobs.expected() or self._jobs.queued_in_time

    @property
    def blocks_queued(self) -> int:
        """Number of readable blocks that wait for the credit of a tier, per tier."""
        return sum([len(state.queue) for state in self._states])

    @property
    def descriptions(self) -> TierDescriptions | None:
        return self._descriptions

    def take_events(self) -> list[OffloadingEvent]:
        if get_ident() != self._owner.ident:
            self._owner.claim()
        if not self._enable_events:
            return []
        events = self.primary_tier.take_events()
        events += self._tiers.take_events()
        events.sort(key=attrgetter("order"))
        return events

    def get_stats(self) -> dict[str, Any]:
        self._owner.check()
        stats, primary = self._stats, self.primary_tier
        rows, buffer, blocks = primary.count_rows(), primary.get_kv_memoryview(), len(primary.readable)
        stats.ignored_completions = primary.ignored_completions
        stats.jobs_in_flight, stats.blocks_queued = len(self._jobs), self.blocks_queued
        stats.rows, stats.rows_free, stats.rows_evictable = rows.rows, rows.free, rows.evictable
        stats.rows_unprepared = 0 if primary.is_prepared else rows.rows
        stats.rows_reserved, stats.rows_quarantined = self._reservations.rows, rows.quarantined
        of_primary: dict[str, int | float] = {
            "blocks": blocks,
            "occupancy_bytes": blocks * (buffer.nbytes // primary.num_rows),
            "capacity_bytes": buffer.nbytes,
            "evictions": stats.evicted_blocks,
            "available": 1,
        }
        of_tiers = self._tiers.stats()
        if self._advisor is not None:
            of_primary |= self._advisor.estimates(PRIMARY_TIER)
            for name, fields in of_tiers.items():
                fields |= self._advisor.estimates(name)
        return {"manager": stats.as_dict(), "primary": of_primary, "tiers": of_tiers}

    def count_inherited(self, blocks: int) -> None:
        """Count blocks that an earlier engine has left in the rows."""
        self._owner.claim()
        self._stats.inherited_blocks += blocks
        self.news.announce()

    def open_tier(self, rank: int, deadline: float) -> bool:
        """Open a secondary tier, and return True if the tier is in service.

        A tier that raises is taken out of service, as in any other call.

        Args:
            rank: position of the tier; 0 is the fastest.
            deadline: time until which the call may wait.
        """
        self._owner.check()
        self._rest.until = None
        state = self._states[rank]
        opened = bool(self._tiers.ask(state, TRUTH, state.tier.open, deadline))
        if self._tiers.end_step(state).superseded:
            self._follow(deadline)
            opened = bool(self._tiers.ask(state, TRUTH, state.tier.open, deadline))
        if self._kept_speeds is not None:
            self._kept_speeds.gather()
        return opened

    def hand_over(self) -> None:
        """Let another thread drive the manager: the next thread that uses the manager owns it.

        Call this method on the thread that has used the manager so far. The call is not needed if that thread has
        ended.

        Raises:
            WrongThreadError: the calling thread does not own the manager.
        """
        self._owner.hand_over()

    def reset_cache(self, revision: str | None = None) -> bool:
        """Drop all blocks; see the base class.

        Raises:
            ConfigError: ``revision`` is not a text; nothing was reset.
        """
        self._enter()
        if revision is not None:
            revision_digest(revision)
        self._stats.resets += 1
        self._empty_primary()
        if self._keep_secondary and revision is None:
            return True
        return self._tiers.reset(self._reset_deadline, revision)

    def _empty_primary(self) -> None:
        if self._advisor is not None:
            self._advisor.forget()
        self.primary_tier.reset_cache()
        if self._warm is not None:
            self._warm.reset()

    def shutdown(self) -> None:
        self._enter()
        if self._shut_down:
            return
        self._shut_down = True
        self._promotions.drop_queued()
        if self._warm is not None:
            self._warm.publish()
        if self._kept_speeds is not None:
            self._kept_speeds.publish()
        stopped = self._tiers.shut_down(self._shutdown_deadline, self._jobs.drain)
        self._jobs.collect()
        if len(self._jobs):
            _log.warning("%d jobs of secondary tiers were not finished at shutdown", len(self._jobs))
        if dropped := self._jobs.drop_all():
            self._stats.queued_retired += dropped
            _log.warning("%d blocks waited for secondary tiers at shutdown and were not stored", dropped)
        self._tiers.end_service()
        if stopped:
            self.primary_tier.shutdown()
        else:
            _log.error("a tier did not stop: the primary buffer stays mapped until the process ends")
