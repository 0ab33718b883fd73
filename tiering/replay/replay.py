"""The replay of a trace through the manager of a stack, in simulated time.

A request is looked up when it arrives. While blocks are promoted, it waits and asks again. Its hits are loaded, the
rest of its prompt is computed, and its new blocks are stored. :mod:`tiering.replay.model` describes the durations.
"""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tiering.api.engine import watched_blocks
from tiering.api.hints import NO_HINTS, RequestHints
from tiering.api.keys import PRIMARY_TIER, OffloadKey
from tiering.api.request import LATE_STORE, WANTED_STORE, ReqContext
from tiering.config.stack_file import StackConfig
from tiering.manager.open_lookups import LOOK_AGAIN
from tiering.manager.row_broker import TAKE_AFTER
from tiering.manager.sessions import Sessions
from tiering.replay.device import DeviceCache
from tiering.replay.hints import TraceHints
from tiering.replay.misses import ReplayMisses
from tiering.replay.model import HOURS_PER_MONTH, ReplayModel
from tiering.replay.result import ReplayResult, TierResult, Times
from tiering.replay.stack import SimulatedFleet, SimulatedStack, SimulatedTier, open_simulated
from tiering.replay.trace import TraceRequest, keys_of
from tiering.secondary.options import TtlOptions

DEVICE = "device"
"""Name of the engine's own cache in results."""

GIB = 1 << 30
PROGRESS_BLOCKS = 1 << 15
"""Number of blocks between two reports of progress."""

SHORTEST_WAIT = 1e-6
"""Shortest time after which a request that waits asks again, in seconds."""

STEP_TOKENS = 8192
"""Tokens of one step of the engine.

An exclusive CPU tier stores the free blocks that the engine's next two to four steps may use, as the connector's walk
does.
"""

IDLE_STEP = 0.01
"""Seconds between two steps of an engine without requests."""

OFFER_AGAIN_AFTER = 1.01 * TAKE_AFTER
"""Seconds after which a store that found no room is offered again.

It may take rows of queued blocks then.
"""


@dataclass(slots=True, eq=False)
class _Running:
    """A request between its arrival and its end."""

    ctx: ReqContext
    request: TraceRequest
    keys: list[OffloadKey]
    hints: RequestHints = NO_HINTS
    computed: int = 0
    """Leading blocks that the engine's own cache had."""
    begun: bool = False
    """True once the manager knows the request."""
    stored: bool = False
    """True once the prompt is being computed: the next event is its end."""
    held: int = 0
    """Leading blocks that the engine's own cache had or that were loaded."""
    refused: bool = False
    """True once the store of the whole prompt has found no room."""


@contextmanager
def quiet_log() -> Iterator[None]:
    """Let the package log errors only: the result of a replay has what happens to simulated media."""
    log = logging.getLogger("kv_tiering")
    level = log.level
    log.setLevel(max(log.getEffectiveLevel(), logging.ERROR))
    try:
        yield
    finally:
        log.setLevel(level)


class Replay:
    """One replay: requests go in, and a result comes out.

    Args:
        stack: the stack.
        block_tokens: tokens of one block.
        block_bytes: bytes of one block.
        model: speeds and prices.
        hints: hints of the requests, which have read the same trace; default: none.
        fleet: engines whose shared media the stack uses; default: none.

    Raises:
        ConfigError: the stack has no room for one block.
    """

    def __init__(
        self,
        stack: StackConfig,
        block_tokens: int,
        block_bytes: int,
        model: ReplayModel,
        hints: TraceHints | None = None,
        fleet: SimulatedFleet | None = None,
    ) -> None:
        self.stack: SimulatedStack = open_simulated(stack, block_bytes, model, fleet)
        """The manager, its tiers and their clock."""
        self._config = stack
        self._model = model
        self._block_tokens = block_tokens
        self._manager = self.stack.manager
        self._clock = self.stack.clock
        self._device: DeviceCache | None = None
        self._exclusive = False
        self._copied = self._lost = 0
        if blocks := (model.device_cache or 0) // block_bytes:
            step = -(-STEP_TOKENS // block_tokens)
            exclusive = stack.primary.inclusion == "exclusive"
            self._device = DeviceCache(blocks, watched_blocks(2 * step, blocks) if exclusive else 0)
            self._exclusive = self._manager.hold_exclusively(self._device.holds, blocks)
        if self._manager.gates_loads:
            self._manager.note_compute([block_tokens / model.prefill_tokens_per_second])
        self._events: list[tuple[float, int, _Running]] = []
        self._number = 0
        self._hints = hints
        self._sessions = Sessions(stack.hints.blocks)
        self._waiting: list[_Running] = []
        self._look_at = math.inf
        self._hits: dict[str, int] = dict.fromkeys([DEVICE, PRIMARY_TIER, *(tier.name for tier in self.stack.tiers)], 0)
        self._requests = self._blocks = self._tokens = self._computed = 0
        self._times, self._times_without = Times(), Times()
        self._saved = 0.0
        self._misses = (
            None if stack.explain is None else ReplayMisses(stack, stack.explain.blocks, self.stack, block_tokens)
        )
        self._first: float | None = None
        self._last = 0.0

    def run(self, requests: Iterable[TraceRequest], progress: Callable[[int], None] | None = None) -> ReplayResult:
        """Replay all ``requests``, in the order of their times.

        Args:
            requests: the trace.
            progress: function that is called with the number of blocks so far; default none.
        """
        start = time.perf_counter()
        with quiet_log():
            self._replay(requests, progress)
            result = self._result(time.perf_counter() - start)
            self._manager.shutdown()
        return result

    def _replay(self, requests: Iterable[TraceRequest], progress: Callable[[int], None] | None) -> None:
        reported = 0
        for request in requests:
            if self._first is None:
                self._first = request.time - self._clock.now  # a warm start ends before the first request
            now = request.time - self._first
            self._run_until(now)
            self._arrive(request, max(now, self._clock.now))
            if progress is not None and self._blocks - reported >= PROGRESS_BLOCKS:
                reported = self._blocks
                progress(self._blocks)
        self._run_until(math.inf)
        while True:
            for tier in self.stack.tiers:
                tier.drain(math.inf)
            self._manager.on_schedule_end()
            if not self._manager.blocks_queued:
                break
        for tier in self.stack.tiers:
            tier.drain(math.inf)
        self._manager.on_schedule_end()

    def start_warm(self) -> float:
        """Let time pass until the warm start is over, and return the seconds that it took.

        The first request arrives then, and the others as long after the first one as in the trace.
        """
        manager, clock, begun = self._manager, self._clock, self._clock.now
        manager.on_schedule_end()
        while manager.has_pending_work():
            clock.now = min(max(self.stack.next_end(), clock.now + SHORTEST_WAIT), clock.now + IDLE_STEP)
            manager.on_schedule_end()
        return clock.now - begun

    def _run_until(self, end: float) -> None:
        """Process the events before ``end``; those of one moment are one step of the engine."""
        events, clock = self._events, self._clock
        while True:
            now = events[0][0] if events and events[0][0] < self._look_at else self._look_at
            if now >= end:
                return
            clock.now = max(clock.now, now)
            self._step(clock.now)

    def _step(self, now: float) -> None:
        events = self._events
        due: list[_Running] = []
        if self._look_at <= now:
            due, self._waiting = self._waiting, []
        while events and events[0][0] <= now:
            due.append(heapq.heappop(events)[2])
        asking = self._waiting
        for running in due:
            if running.stored:
                self._end(running)
            elif not self._ask(running):
                asking.append(running)
        self._manager.on_schedule_end()
        if self._misses is not None:
            self._misses.follow()
        if self._device is not None and (wanted := self._manager.take_wanted()):
            held = self._device.holds(wanted)
            self._store_late([key for key, there in zip(wanted, held, strict=True) if there], WANTED_STORE)
        if asking:
            self._wait(asking, now)
        else:
            self._look_at = math.inf
        if self._manager.blocks_queued:
            # The engine takes further steps for them.
            self._look_at = min(self._look_at, max(self.stack.next_end(), now + SHORTEST_WAIT))

    def _wait(self, asking: list[_Running], now: float) -> None:
        """Choose the time at which each of the requests that wait asks again.

        A request whose loads have just begun asks when they end, all others when the next load or probe ends.
        """
        ends = self._clock.load_ends
        self._waiting = asking
        if ends:
            self._waiting = []
            for running in asking:
                end = ends.get(running.ctx.req_id)
                if end is None:
                    self._waiting.append(running)
                else:
                    self._at(max(min(end, self._manager.waits_until(running.ctx)), now + SHORTEST_WAIT), running)
            ends.clear()
        self._look_at = math.inf
        if self._waiting:
            wake = self.stack.next_answer()
            if math.isinf(wake):
                # The requests wait for rows, or for a block that another request stores now.
                stores = (when for when, _, other in self._events if other.stored)
                wake = min([self.stack.next_end(), *stores])
            if math.isinf(wake):
                wake = now + LOOK_AGAIN
            wake = min([wake, *(self._manager.waits_until(running.ctx) for running in self._waiting)])
            self._look_at = max(wake, now + SHORTEST_WAIT)

    def _at(self, when: float, running: _Running) -> None:
        self._number += 1
        heapq.heappush(self._events, (when, self._number, running))

    def _arrive(self, request: TraceRequest, now: float) -> None:
        self._last = now
        hints = NO_HINTS if self._hints is None else self._hints.of(self._requests)
        self._requests += 1
        keys = keys_of(request.hashes)
        self._blocks += len(keys)
        self._tokens += request.input_tokens
        self._at(now, _Running(ReqContext(f"r{self._requests}"), request, keys, hints))

    def _begin(self, running: _Running) -> None:
        """Announce a request to the manager."""
        keys, ctx = running.keys, running.ctx
        self._manager.on_new_request(ctx)
        running.computed = self._device.hits(keys) if self._device is not None else 0
        running.begun = True
        self._manager.touch(keys, ctx)
        if self._hints is not None:
            self._sessions.used(keys, running.hints.session)

    def _ask(self, running: _Running) -> bool:
        """Look up a request's blocks and load them, and return False if some are still being promoted."""
        if not running.begun:
            self._begin(running)
        wanted = running.keys[running.computed :] if running.computed else running.keys
        answer = self._manager.match_prefix(wanted, running.ctx)
        if answer.pending:
            return False
        self._load(running, wanted if answer.hits == len(wanted) else wanted[: answer.hits])
        return True

    def _load(self, running: _Running, hits: list[OffloadKey]) -> None:
        manager, model, request = self._manager, self._model, running.request
        seconds = 0.0
        if hits:
            manager.prepare_load(hits, running.ctx)
            sources = manager.count_sources(hits, running.ctx)
            manager.complete_load(hits, running.ctx)
            manager.note_scheduled(running.ctx)
            seconds = len(hits) * self.stack.block_bytes / model.device_bytes_per_second
            for name, blocks in sources.items():
                self._hits[name] += blocks
            self._hits[PRIMARY_TIER] += len(hits) - sum(sources.values())
        self._hits[DEVICE] += running.computed
        running.held = held = running.computed + len(hits)
        # The engine always computes the last token, also of a prompt that is held entirely.
        computed = max(min(1, request.input_tokens), request.input_tokens - held * self._block_tokens)
        without = max(min(1, request.input_tokens), request.input_tokens - running.computed * self._block_tokens)
        self._computed += computed
        if self._misses is not None:
            self._misses.missed(running.ctx, running.keys, held, request.input_tokens, computed)
        waited = self._clock.now - (request.time - (self._first or 0.0))
        prefill = computed / model.prefill_tokens_per_second
        self._times.add(waited + seconds + prefill)
        self._times_without.add(without / model.prefill_tokens_per_second)
        self._saved += (without - computed) / model.prefill_tokens_per_second
        running.stored = True
        self._at(self._clock.now + seconds + prefill, running)

    def _end(self, running: _Running) -> None:
        """Store the blocks of a prompt that has been computed, and end its request."""
        keys, manager = running.keys, self._manager
        if manager.stores_computed and not self._store(running):
            return
        if self._device is not None:
            if self._hints is not None and self._exclusive:
                self._note_users(
                    running, [key for key, held in zip(keys, self._device.holds(keys), strict=True) if not held]
                )
            leaving = self._device.fill(keys)
            if self._exclusive:
                manager.engine_holds(keys[: running.held])
                self._lost += self._store_late(leaving, LATE_STORE)
        released, hints, bounds = self._released(running), running.hints, self._config.hints.bounds
        own = () if hints.session is None else self._sessions.own_of(hints.session, keys)
        kept = [blocks for action in hints.kept for blocks in bounds.kept(action, keys, hints.tenant, own)]
        manager.on_request_finished(running.ctx, released, kept)
        if self._misses is not None:
            self._misses.ended(running.ctx, keys)

    def _store(self, running: _Running) -> bool:
        """Store the computed blocks of a prompt, and return False if the store is to be offered again.

        A store without room is offered once more, as an engine does, and then the longest half of it that has room.
        """
        manager, ctx = self._manager, running.ctx
        keys = running.keys[running.computed :] if self._exclusive else running.keys
        while keys:
            output = manager.prepare_store(keys, ctx, is_last=running.refused)
            if output is not None:
                if self._hints is not None and not self._exclusive:
                    self._note_users(running, output.keys_to_store)
                if output.keys_to_store:
                    self._copied += len(output.keys_to_store)
                    manager.complete_store(output.keys_to_store, ctx)
                    if len(output.keys_to_store) < len(keys):
                        # The head of the prompt must stay more recent than its new blocks, which count as used once.
                        new = frozenset(output.keys_to_store)
                        manager.touch([key for key in keys if key not in new], ctx)
                break
            if not running.refused:
                running.refused = True
                self._at(self._clock.now + OFFER_AGAIN_AFTER, running)
                return False
            keys = keys[: len(keys) // 2]
        return True

    def _store_late(self, keys: list[OffloadKey], ctx: ReqContext) -> int:
        """Store blocks that the engine's cache holds, and return the number of those that had no room."""
        output, kept = None, len(keys)
        while kept and (output := self._manager.prepare_late_store(keys[:kept])) is None:
            kept //= 2
        if output is not None and output.keys_to_store:
            self._copied += len(output.keys_to_store)
            self._manager.complete_store(output.keys_to_store, ctx)
        return len(keys) - kept

    def _note_users(self, running: _Running, new: Iterable[OffloadKey]) -> None:
        """Note for sessions the blocks that a request has computed, as the connector does."""
        self._sessions.computed(running.keys[running.held :], running.hints.session, frozenset(new))

    def _released(self, running: _Running) -> list[OffloadKey]:
        """Return the blocks of the sessions that a request ends."""
        return [key for session in running.hints.released for key in self._sessions.release(session)]

    def _result(self, seconds: float) -> ReplayResult:
        trace_seconds = self._last
        months = trace_seconds / 3600 / HOURS_PER_MONTH
        stats = self._manager.get_stats()
        tiers = [self._primary(stats["primary"]["blocks"], months)] + [
            self._tier(tier, stats["tiers"][tier.name], months) for tier in self.stack.tiers
        ]
        if self._device is not None:
            tiers.insert(0, self._plain(DEVICE, self._model.device_cache or 0, 0, 0.0, 0.0))
        hits = sum(tier.hit_blocks for tier in tiers)
        saved = self._saved / 3600 * self._model.device_dollars_per_hour
        return ReplayResult(
            settings={},
            requests=self._requests,
            blocks=self._blocks,
            prompt_tokens=self._tokens,
            trace_seconds=trace_seconds,
            hit_rate=hits / self._blocks if self._blocks else 0.0,
            tiers=tiers,
            computed_tokens=self._computed,
            ttft_mean=self._times.mean,
            ttft_p50=self._times.quantile(0.5),
            ttft_p99=self._times.quantile(0.99),
            ttft_mean_without=self._times_without.mean,
            ttft_p50_without=self._times_without.quantile(0.5),
            ttft_p99_without=self._times_without.quantile(0.99),
            device_seconds_saved=self._saved,
            dollars_saved_per_month=saved / months if months else 0.0,
            dollars_per_month=sum(tier.dollars_per_month for tier in tiers),
            stores_without_room=stats["manager"]["stores_without_room"],
            evicted_blocks=stats["manager"]["evicted_blocks"],
            is_exclusive=self._exclusive,
            copied_blocks=self._copied,
            lost_blocks=self._lost,
            causes=None if self._misses is None else self._misses.totals,
            seconds=seconds,
        )

    def _primary(self, blocks: int, months: float) -> TierResult:
        capacity = self._config.primary.capacity
        price = capacity / GIB * self._model.primary_dollars_per_gib_month
        return self._plain(PRIMARY_TIER, capacity, blocks, price, self._worth(self._hits[PRIMARY_TIER], months))

    def _plain(self, name: str, capacity: int, blocks: int, price: float, saved: float) -> TierResult:
        hits = self._hits[name]
        return TierResult(
            name=name,
            capacity_bytes=capacity,
            hit_blocks=hits,
            hit_rate=hits / self._blocks if self._blocks else 0.0,
            bytes_read=hits * self.stack.block_bytes,
            blocks_at_end=blocks,
            bytes_paid=capacity,
            dollars_per_month=price,
            dollars_saved_per_month=saved,
        )

    def _worth(self, hits: int, months: float) -> float:
        """Return the dollars a month that the prefill of ``hits`` blocks would have cost."""
        seconds = hits * self._block_tokens / self._model.prefill_tokens_per_second
        return seconds / 3600 * self._model.device_dollars_per_hour / months if months else 0.0

    def _steady_bytes(self, tier: SimulatedTier) -> int:
        """Return the bytes that are paid for: the capacity, or those written in one ttl (else in a month)."""
        if tier.options.capacity_bytes is not None:
            return tier.options.capacity_bytes
        if not self._last:
            return int(tier.store.blocks * self.stack.block_bytes * tier.io.bytes_ratio)
        ttl = tier.options.ttl if isinstance(tier.options, TtlOptions) else None
        kept = HOURS_PER_MONTH * 3600 if ttl is None else ttl
        return int(tier.io.stats.written_bytes / self._last * kept)

    def _tier(self, tier: SimulatedTier, stats: dict[str, int], months: float) -> TierResult:
        io, prices, name = tier.io, tier.io.model, tier.name
        hits = self._hits[name]
        blocks = tier.store.blocks if tier.index.shared else tier.index.blocks
        paid = self._steady_bytes(tier)
        dollars = paid / GIB * prices.dollars_per_gib_month
        if months:
            traffic = (
                io.stored_blocks / 1e6 * prices.dollars_per_million_writes
                + (io.stats.requests - io.stored_blocks) / 1e6 * prices.dollars_per_million_reads
                + io.stats.read_bytes / GIB * prices.dollars_per_gib_read
            )
            dollars += traffic / months
        return TierResult(
            name=name,
            capacity_bytes=tier.options.capacity_bytes,
            hit_blocks=hits,
            hit_rate=hits / self._blocks if self._blocks else 0.0,
            bytes_read=io.stats.read_bytes,
            bytes_written=io.stats.written_bytes,
            requests=io.stats.requests,
            blocks_declined=stats["stores_declined"],
            blocks_dropped=stats["stores_dropped"] + stats["stores_evicted"] + stats["cascades_failed"],
            loads_overdue=stats["loads_overdue"],
            seconds_out_of_service=tier.out_of_service,
            blocks_at_end=blocks,
            bytes_paid=paid,
            dollars_per_month=dollars,
            dollars_saved_per_month=self._worth(hits, months),
        )
