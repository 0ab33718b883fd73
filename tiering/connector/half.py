"""The scheduler half of both modes: requests, matches, allocations, events and counters."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from tiering.api.keys import OffloadKey
from tiering.api.manager import OffloadingEvent
from tiering.api.masking import shown_name
from tiering.api.request import ReqContext
from tiering.api.request_policy import NEITHER, NEITHER_PARAMS, RequestPolicy
from tiering.connector.block_tables import BlockTables
from tiering.connector.counters import SchedulerCounters, counts_seconds, report
from tiering.connector.event_types import EngineEvents, KVCacheEvent, OffloadingKVEventsConfig
from tiering.connector.events import OffloadingEventsTracker
from tiering.connector.groups import OffloadGroup, interleave
from tiering.connector.hits import Hit, HitSearch, PrefixLookup
from tiering.connector.metadata import ReqId
from tiering.connector.protocols import AllocatedBlocks, EngineRequest
from tiering.connector.step_loads import StepLoads
from tiering.connector.tracked import Match, TrackedRequest, policy_of
from tiering.errors import ConfigError
from tiering.runtime.ratelimit import LimitedWarning

NO_TOKENS: tuple[int, bool] = (0, False)
"""Answer to a match: no tokens can be loaded."""
ASK_AGAIN: tuple[None, bool] = (None, False)
"""Answer to a match: not known yet, the engine asks again at a later step."""

State = TypeVar("State", bound=TrackedRequest[Any])


class HeldBlocks(PrefixLookup, Protocol):
    """The blocks that can be loaded: those of a manager of tiers, or of the simple scheduler's CPU pool."""

    def still_pending(self, req_context: ReqContext) -> bool:
        """Return True if the last lookup of a request was pending, and the same lookup would be pending now."""

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Mark the blocks of a request as recently used, the prefix's head more recently than its tail."""

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events since the last call."""

    def get_stats(self) -> Mapping[str, Any]:
        """Return statistics, with those of the primary tier under ``primary``."""


class SchedulerHalf(ABC, Generic[State]):
    """The scheduler half of one engine; all calls come from the scheduler's thread.

    Args:
        held: the blocks that can be loaded.
        tables: the block tables of the requests.
        search: the search for hits.
        events: the configuration of KV events.
        engine_events: form of the engine's own KV events; None: hashes are published unchanged.
        clock: returns monotonic seconds; default: :func:`time.monotonic`.
        logger: logger of the mode.
    """

    def __init__(
        self,
        held: HeldBlocks,
        tables: BlockTables[State],
        search: HitSearch,
        events: OffloadingKVEventsConfig,
        engine_events: EngineEvents | None,
        logger: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.groups: Sequence[OffloadGroup] = tables.groups
        """KV-cache groups as they are offloaded."""
        self.states: dict[ReqId, State] = tables.states
        """Requests that have not ended, by id."""
        self.measure = search.measure
        """The group whose blocks measure the length of a hit: the first full-attention group, if any."""
        self.events = OffloadingEventsTracker(events, engine_events)
        """Tracker of KV events."""
        self._held = held
        self._tables = tables
        self._search = search
        self._publishes_events = events.enable_kv_cache_events
        self._describes_events = events.enable_kv_cache_events and events.self_describing_kv_events
        self._untaken_events: list[KVCacheEvent] = []
        self._counters = SchedulerCounters()
        self._missed_blocks = 0
        """Blocks that the first match of a request probed and that the primary tier did not hold."""
        self._warn_policy = LimitedWarning(logger, clock)

    @counts_seconds
    def on_new_request(self, request: EngineRequest) -> None:
        """Register a request; later calls for the same request change nothing."""
        if request.request_id not in self.states:
            self._admit(request)

    @counts_seconds
    def get_num_new_matched_tokens(self, request: EngineRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded for a request, and True if the request waits for them.

        Repeated calls change no state, but the result may change as blocks come and go. The result may cover the full
        prompt: the engine then recomputes the last token by itself.

        Args:
            request: the waiting request.
            num_computed_tokens: leading tokens that the engine's own prefix cache holds.

        Returns:
            The number of tokens beyond ``num_computed_tokens``, and True if the load is asynchronous. With False, the
                step that schedules the request has the load in front of its model. (None, False) if the result is not
                known yet: call again at a later step.
        """
        state = self.states.get(request.request_id) or self._admit(request)
        if state.open_question is not None:
            question = (num_computed_tokens, request.num_tokens)
            if question == state.open_question and self._held.still_pending(state.ctx):
                return ASK_AGAIN
        state.open_question = state.match = None
        if state.has_blocks or state.scheduled:
            self._tables.start_over(state)
        state.found_tokens = state.filled_tokens = num_computed_tokens
        state.extend_keys(self.groups)
        if not state.touched:
            state.touched = True
            self._counters.queried_tokens += max(0, request.num_tokens - num_computed_tokens)
            if state.may_load:
                size = self.measure.offloaded_block_size
                loadable = (request.num_tokens - self._search.tokens_to_leave) // size
                known = min(len(state.keys[self.measure.group_idx]), loadable)
                state.asked_blocks = max(0, known - num_computed_tokens // size)
                self._counters.queried_blocks += state.asked_blocks
            if any(state.keys):
                keys = interleave(state.keys)
                self._held.touch(keys, state.ctx)
                self._used(keys, state)
        if not state.may_load or self._is_paused():
            return NO_TOKENS
        limit = request.num_tokens - self._search.tokens_to_leave
        if state.policy.max_load_tokens is not None:
            limit = min(limit, state.policy.max_load_tokens)
        hit = self._search.longest(state.keys, num_computed_tokens, limit, state.ctx)
        if self._search.tails is not None:
            hit = self._search.tails.extend(hit, state, num_computed_tokens, limit)
        state.parted_at = hit.parted_at
        return self._offer(state, num_computed_tokens, hit)

    @counts_seconds
    def update_state_after_alloc(
        self, request: EngineRequest, blocks: AllocatedBlocks, num_external_tokens: int
    ) -> int:
        """Record the blocks that were allocated to a request, and queue a load into them.

        Engines call this method twice for an asynchronous load: with the number of tokens, and with 0 when the request
        is scheduled.

        Args:
            request: the request.
            blocks: all GPU blocks of the request.
            num_external_tokens: tokens to load; 0: none.

        Returns:
            The number of tokens that the request waits for.
        """
        state = self.states.get(request.request_id) or self._admit(request)
        awaited = 0 if state.match is not None and state.match.is_within_step else num_external_tokens
        self._tables.allocated(state, blocks.get_block_ids())
        if num_external_tokens > 0:
            state.filled_tokens += num_external_tokens
            hits = min(state.asked_blocks, self._load(state, num_external_tokens))
            self._counters.loads += 1
            self._counters.loads_within_step += not awaited
            self._counters.hit_tokens += num_external_tokens
            self._counters.hit_blocks += hits
            state.asked_blocks -= hits
        state.match = None
        self._missed_blocks += state.asked_blocks
        state.asked_blocks = 0
        self._allocated(state, awaited)
        return awaited

    @counts_seconds
    def request_finished(
        self, request: EngineRequest, block_ids: Sequence[int] | Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Record that a request has ended, whose blocks can be freed at once.

        Freeing is never delayed, and no request is ever reported as sent: copies are fenced, or hold references on the
        blocks. A load in flight is still reported as received.

        Args:
            request: the request that has ended, for any reason.
            block_ids: GPU blocks of the request, with several KV-cache groups those of each; not used.

        Returns:
            False, and the parameters that the engine adds to the request's response; None: none.
        """
        state, parameters = self.states.pop(request.request_id, None), None
        if state is not None:
            self._tables.given_up(state)
            self._missed_blocks += state.asked_blocks
            self._ended(state)
            self.events.request_finished(request.request_id)
            parameters = self._parameters(state)
        return False, parameters

    request_finished_all_groups = request_finished

    def take_events(self) -> list[KVCacheEvent]:
        """Return the KV events since the last call, in an order that a consumer can apply."""
        return self._take_events() if self._publishes_events else []

    @counts_seconds
    def _take_events(self) -> list[KVCacheEvent]:
        untaken, self._untaken_events = self._untaken_events, []
        return untaken + self.events.take_events(self._held_events())

    def _held_events(self) -> Iterable[OffloadingEvent]:
        """Return the events of the blocks that can be loaded since the last call."""
        return self._held.take_events()

    def await_answer(self, request: EngineRequest, computed: int, seconds: float) -> tuple[int | None, bool]:
        """Return the answer to a match that was pending; the step sleeps for it if it has no other work.

        Args:
            request: the request.
            computed: leading tokens that the engine's own prefix cache holds.
            seconds: longest sleep of the step, together with :meth:`await_answers`.
        """
        return ASK_AGAIN

    def await_answers(self, seconds: float) -> None:
        """Sleep until the answers to all pending lookups are known, at most ``seconds``.

        Engines may call this method at the end of a step in which nothing could be scheduled. It does nothing while
        copies run, whose ends only steps report.
        """

    def copied_blocks(self) -> set[int]:
        """Return the GPU blocks that copies hold references on; none if copies are fenced."""
        return set()

    def give_up_blocks(self, req_ids: Iterable[ReqId]) -> None:
        """Let the engine take back all GPU blocks, also those that loads are filling.

        All copies of these blocks end before a step reuses them.

        Args:
            req_ids: requests that were being loaded; they load no more.
        """
        for req_id in req_ids:
            if (state := self.states.get(req_id)) is not None:
                state.may_load = False

    def get_stats(self) -> Mapping[str, Any]:
        """Return the counters of the tiers and of the connector.

        ``tiers`` includes the primary tier. ``connector`` contains the fields of
        :class:`tiering.connector.counters.SchedulerCounters`.
        """
        self._counters.snapshots_dropped = self.events.snapshots_dropped
        self._counters.snapshots_restored = self.events.restored
        self._counters.requests_active = len(self.states)
        return report(self._held.get_stats(), self._counters, self._missed_blocks)

    @abstractmethod
    def _new_state(self, request: EngineRequest, policy: RequestPolicy, ctx: ReqContext) -> State:
        """Return the state of a new request."""

    def _used(self, keys: Sequence[OffloadKey], state: State) -> None:
        """Note that a request uses the blocks of ``keys``, at its first match."""

    @abstractmethod
    def _is_paused(self) -> bool:
        """Return True if nothing can be loaded at present."""

    @abstractmethod
    def _offer(self, state: State, computed: int, hit: Hit) -> tuple[int | None, bool]:
        """Return the answer to a match."""

    def _answer(self, state: State, computed: int, hit: Hit, step_loads: StepLoads) -> tuple[int, bool]:
        """Return the answer to a match whose search has ended."""
        if hit.tokens <= computed:
            return NO_TOKENS
        is_within_step = step_loads.fits(state, computed, hit.tokens, is_alone=not self._tables.running)
        state.match = Match(computed, hit.tokens, is_within_step)
        return hit.tokens - computed, not is_within_step

    @abstractmethod
    def _load(self, state: State, external_tokens: int) -> int:
        """Queue the load of the request's last hit.

        Returns:
            The number of its blocks that the primary tier held before the match, in the group :attr:`measure`.
        """

    def _allocated(self, state: State, awaited: int) -> None:
        """Note that a request has got its blocks: what it does not load from now on, it computes.

        Args:
            state: the request.
            awaited: tokens that it waits for; 0 if the step that is being built computes the rest.
        """

    def _parameters(self, state: State) -> dict[str, Any] | None:
        """Return the parameters of the response of a request that has ended; None: none."""
        return None

    @abstractmethod
    def _ended(self, state: State) -> None:
        """Store what is left of a request that has ended."""

    def _admit(self, request: EngineRequest) -> State:
        """Register a request; one with invalid parameters neither loads nor stores."""
        params = getattr(request, "kv_transfer_params", None)
        try:
            policy = policy_of(request)
        except ConfigError as error:
            self._warn_policy("request %s neither loads nor stores KV: %s", shown_name(request.request_id), error)
            policy, params = NEITHER, NEITHER_PARAMS
        state = self._new_state(request, policy, ReqContext(request.request_id, params))
        self.states[request.request_id] = state
        return state
