"""State of a request in the connector's scheduler half, and the block tables of all requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from tiering.api.hints import NO_HINTS, RequestHints
from tiering.connector.block_tables import BlockTables
from tiering.connector.cached_tokens import Cached
from tiering.connector.engine_cache import EngineCache
from tiering.connector.groups import OffloadGroup
from tiering.connector.metadata import ReqId
from tiering.connector.protocols import SchedulerOutput
from tiering.connector.tracked import NEVER, BlockIds, GroupState, TrackedRequest

MAX_BACKOFF_STEPS = 16
"""Longest pause, in steps, before blocks that found no room are offered again."""


@dataclass(slots=True)
class StorePace:
    """Size and time of the next offer of a request, after offers that were not taken."""

    batch_tokens: int = NEVER
    """Largest number of tokens in one offer."""
    retry_at_step: int = 0
    """First step at which blocks are offered again."""
    backoff_steps: int = 1
    """Pause in steps after the next offer that finds no room; 1 unless the last offer found no room."""
    waiting: bool = False
    """True if blocks wait that were offered, or could have been in a larger offer."""

    def refused(self, tokens: int, step: int, smallest: int) -> None:
        """Record that an offer of ``tokens`` found no room at ``step``: a smaller part is offered later.

        Args:
            tokens: tokens of the offer.
            step: the present step.
            smallest: tokens of the smallest useful offer.
        """
        self.waiting = True
        self.batch_tokens = max(smallest, tokens // 2)
        self.retry_at_step = step + self.backoff_steps
        self.backoff_steps = min(2 * self.backoff_steps, MAX_BACKOFF_STEPS)

    def accepted(self, *, all_blocks: bool) -> None:
        """Record that an offer found room: the next one may be larger.

        Args:
            all_blocks: True if the offer had all blocks that could be offered.
        """
        self.waiting = not all_blocks
        self.backoff_steps = 1
        self.batch_tokens = min(self.batch_tokens * 2, NEVER)


@dataclass(slots=True, eq=False, kw_only=True)
class RequestState(TrackedRequest[GroupState]):
    """One request, from the first call that names the request until the request ends."""

    request_level: bool
    """True if the manager handles the request with the policy ``REQUEST_LEVEL``."""
    storing: set[ReqId]
    """Ids of the requests that the next steps look at for blocks to store; shared by all requests."""
    prompt_only: bool
    """True if only blocks that lie entirely in the prompt are stored.

    The prompt grows in a streaming session.
    """
    hints: RequestHints = NO_HINTS
    """Hints of the request; the default: none."""
    arrived: float = 0.0
    """Time at which the request was first named, in seconds since the epoch; 0 if no trace is recorded."""
    sources: Mapping[str, int] = field(default_factory=dict)
    """Blocks of the last load that were promoted for the request, by medium.

    The blocks are counted in the group that measures the length of a hit.
    """
    cached: Cached | None = None
    """Cached tokens of the request, once it has got GPU blocks; None if they are not reported."""
    sharer_deadline: float | None = None
    """Monotonic time in seconds until which the request waits for loads of other requests.

    None before the first wait.
    """
    is_explained: bool = False
    """True once the misses of the request were noted for their explanation."""
    generation: int = 0
    """Number of times that the request has started; events about blocks of an earlier generation are void."""
    pace: StorePace = field(default_factory=StorePace)
    """Size and time of the next offer."""
    stale_blocks: int = 0
    """Blocks that were stored since the stored blocks of the request were last made recent in their order."""

    @property
    def store_limit(self) -> int:
        """Leading tokens of the request that may be stored, for the prompt as it is now."""
        if self.variant is not None and not self.variant.identity:
            return 0
        limit = self.request.num_prompt_tokens if self.prompt_only else NEVER
        most = self.policy.max_store_tokens
        return limit if most is None else min(limit, most)

    def restart(self) -> None:
        super(RequestState, self).restart()
        self.generation += 1

    def look_again(self) -> None:
        super(RequestState, self).look_again()
        self.storing.add(self.ctx.req_id)

    def load_failed(self, invalid_from: int) -> None:
        """Record that a load did not fill the tokens from ``invalid_from`` on.

        The request loads no more unless it is preempted, so that a request cannot fail to load for ever.
        """
        self.distrust(invalid_from)
        self.may_load = False
        if self.cached is not None:
            self.cached.load_failed(invalid_from, self.generation)

    def note_stored(self, blocks: int) -> bool:
        """Record that blocks have become readable; return True if all stored blocks are to be refreshed now.

        Stored blocks are refreshed at the end of the prompt, and earlier when a quarter of them is new. Each block is
        therefore refreshed a few times at most.

        Args:
            blocks: number of blocks that one store has made readable.
        """
        stored = 0
        for group in self.groups:
            stored += group.cursor
        if blocks >= stored:
            return False  # one job has stored all blocks, already in the right order
        self.stale_blocks += blocks
        return self.next_store_at == NEVER or 4 * self.stale_blocks >= stored


class FencedTables(BlockTables[RequestState]):
    """Block tables that also list the GPU blocks which each step newly allocates, for the fences."""

    def __init__(self, groups: Sequence[OffloadGroup], states: dict[ReqId, RequestState]) -> None:
        super().__init__(groups, states)
        self._taken: list[int] = []
        """GPU blocks that the present step newly allocates."""
        self._allocated: list[RequestState] = []
        """Requests that got blocks since the last step was built."""
        self.engine_cache: EngineCache | None = None
        """The blocks that the engine's own cache holds; None if the CPU tier is inclusive."""

    def allocated(self, state: RequestState, block_ids: BlockIds) -> None:
        super().allocated(state, block_ids)
        if state.match is not None and state.match.is_within_step:
            self._take_unfilled(block_ids, state.match.computed)
        else:
            self._allocated.append(state)

    def take(self, output: SchedulerOutput) -> list[int]:
        """Process the schedule of the next step; return all GPU blocks that the step newly allocates.

        Blocks of a request's computed prefix are only read, unless a load fills them; then they were newly allocated
        for the load.
        """
        if self._allocated:
            for state in self._allocated:
                if state.ctx.req_id not in output.num_scheduled_tokens:  # a load of any connector comes first
                    self._take_unfilled(state.tables, state.found_tokens or 0)
            self._allocated.clear()
        # In most steps, no request gets blocks or loses them.
        if output.scheduled_new_reqs or output.preempted_req_ids or any(output.scheduled_cached_reqs.new_block_ids):
            self.follow(output)
        else:
            self._step += 1
        if self._states:
            self._copied(getattr(output, "kv_cache_block_copies", None) or ())
        if not self._taken:
            return []
        taken, self._taken = self._taken, []
        return taken

    def _assign(self, state: RequestState, block_ids: BlockIds) -> None:
        super()._assign(state, block_ids)
        if self.engine_cache is not None and state.found_tokens != 0:  # all others are newly allocated
            self.engine_cache.left_queue(block_ids)

    def _distrusted(self, state: RequestState, invalid_from: int) -> None:
        super()._distrusted(state, invalid_from)
        if self.engine_cache is not None:
            for group, table in zip(self.groups, state.tables, strict=True):
                self.engine_cache.drop(table[invalid_from // group.gpu_block_size :])

    def _started(self, req_id: ReqId, block_ids: BlockIds, computed: int) -> None:
        super()._started(req_id, block_ids, computed)
        state = self.states.get(req_id)
        self._take_unfilled(block_ids, computed if state is None else min(computed, state.filled_tokens))

    def _grew(self, req_id: ReqId, block_ids: BlockIds) -> None:
        super()._grew(req_id, block_ids)
        self._taken.extend(chain.from_iterable(block_ids))

    def _preempted(self, state: RequestState) -> None:
        super()._preempted(state)
        state.may_load = state.policy.load

    def _copied(self, copies: Sequence[tuple[int, int]]) -> None:
        """Take the blocks that the engine copies other blocks to; their tables may not name them.

        Args:
            copies: source and destination of each copy.
        """
        for source, target in copies:
            self._taken.append(target)
            self.suspects.filled([[target]], 0 if source in self.suspects else None)

    def _take_unfilled(self, block_ids: BlockIds, filled: int) -> None:
        """Add the blocks of a request that hold no computed tokens yet, from token ``filled`` on."""
        for group, ids in zip(self.groups, block_ids, strict=True):
            self._taken += ids[filled // group.gpu_block_size :]
