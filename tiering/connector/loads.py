"""The loads of a step: from a hit and the GPU blocks allocated for the hit to a transfer order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from itertools import chain, repeat
from typing import NamedTuple

from tiering.api.engine import OffloadingSpec
from tiering.api.keys import OffloadKey
from tiering.api.manager import OffloadingManager
from tiering.api.transfer import GPULoadStoreSpec, LoadStoreSpec, as_rows
from tiering.api.units import parse_duration
from tiering.connector.groups import OffloadGroup
from tiering.connector.hits import HitSearch
from tiering.connector.jobs import BlockFences, Job, JobTable, LoadTarget
from tiering.connector.metadata import ReqId, TransferOrder
from tiering.connector.requests import RequestState
from tiering.connector.step_loads import StepLoads
from tiering.connector.tracked import Match
from tiering.errors import ConfigError, NotReadableError, TieringError
from tiering.runtime.ratelimit import LimitedWarning

logger = logging.getLogger("kv_tiering.connector")

DEFAULT_SHARER_WAIT = 1.0
"""Total time in seconds that a request waits for blocks that are being loaded for other requests."""


class _Part(NamedTuple):
    """The part of a load that belongs to one KV-cache group."""

    first: int
    """Position of the first loaded GPU block in the request's block table."""
    block_ids: list[int]
    """GPU blocks to fill, in logical order."""
    keys: Sequence[OffloadKey]
    """Keys of the offloaded blocks that contain these GPU blocks."""

    def is_whole(self, group: OffloadGroup) -> bool:
        """Return True if every GPU block is allocated and has a key; a state has one block."""
        factor = group.block_size_factor
        blocks = -(-(self.first + len(self.block_ids)) // factor) - self.first // factor
        if group.is_state and blocks != 1:
            return False
        return len(self.keys) == blocks and 0 not in self.block_ids


class LoadPlanner:
    """Planner that turns hits into load jobs, and records which keys are being loaded.

    Load orders and unfilled blocks collect until :meth:`take` hands them over with the step's metadata.

    Args:
        groups: the KV-cache groups.
        manager: pins the blocks in the primary tier.
        search: determines the blocks that a hit needs.
        jobs: the connector's jobs, shared with the store planner.
        fences: fences of the GPU blocks, shared with the store planner.
        spec: configuration of the engine; ``sharer_wait`` in its ``extra_config`` is the total time that a request
            may wait for loads of others.
        clock: returns monotonic seconds.

    Raises:
        ConfigError: ``sharer_wait`` is not a duration, or is negative.
    """

    def __init__(
        self,
        groups: Sequence[OffloadGroup],
        manager: OffloadingManager,
        search: HitSearch,
        jobs: JobTable,
        fences: BlockFences,
        spec: OffloadingSpec,
        clock: Callable[[], float],
    ) -> None:
        self._groups = groups
        self._manager = manager
        self._search = search
        self._jobs = jobs
        self._fences = fences
        self._longest_wait = sharer_wait(spec)
        self._clock = clock
        self._loading: dict[OffloadKey, int] = {}
        """Key of each block that is being loaded, and the id of the last job that loads the block."""
        self._warn_shrunk = LimitedWarning(logger, clock)
        self._queued: list[tuple[Job, list[int]]] = []
        self.has_orders = False
        """True if :meth:`take` returns more than nothing; an attribute, because every step asks."""
        self._failed: dict[ReqId, list[int]] = {}
        """GPU blocks that no load fills, by request, to be sent to the workers with the next step."""
        self._unfilled: set[int] = set()
        """GPU blocks that no load fills and that the workers have not reported yet."""
        self._orders: dict[ReqId, TransferOrder] = {}
        self._within_step: dict[ReqId, TransferOrder] = {}
        """Orders of the loads that the step needs."""
        self.step_loads = StepLoads(groups, manager, search, spec.engine)
        """The choice of the loads that run within the step."""
        self.shrunk_hits = 0
        """Number of hits that had lost blocks before they were loaded, since the start."""
        self.sharer_waits = 0
        """Number of requests that waited for a load of another request, since the start."""

    def holds_up(self, state: RequestState, computed: int, end: int) -> bool:
        """Return True if a request is to wait for another request's load of the same blocks.

        Without the wait, requests that share a prefix and arrive together each load its blocks into GPU blocks of their
        own. After it, the engine's own prefix cache holds them. The waiting time in the life of a request is bounded.

        Args:
            state: the request.
            computed: leading tokens that the engine's own prefix cache holds.
            end: end of the request's hit, in tokens.
        """
        if self._longest_wait <= 0 or not self._is_shared(self._search.needed(state.keys, computed, end)):
            return False
        now = self._clock()
        if state.sharer_deadline is None:
            state.sharer_deadline = now + self._longest_wait
            self.sharer_waits += 1
        return now < state.sharer_deadline

    def _is_shared(self, needed: Sequence[Sequence[OffloadKey]]) -> bool:
        """Return True if blocks of a hit are being loaded for another request.

        Requests that share blocks have a common prefix. The blocks that one of them lacks begin where the load of the
        other begins, or inside that load. Looking up both ends of each group's run is therefore enough, and the cost
        does not depend on the number of blocks.

        Args:
            needed: keys that the hit needs, by group.
        """
        loading = self._loading
        return bool(loading) and any(keys and (keys[0] in loading or keys[-1] in loading) for keys in needed)

    def plan(self, state: RequestState, external_tokens: int) -> Sequence[OffloadKey]:
        """Queue the load of the request's last hit.

        Blocks that have become unreadable since the match are queued as failed: the worker reports their GPU blocks,
        and the engine recomputes them.

        Args:
            state: the request.
            external_tokens: tokens to load, after those that were computed when the hit was matched.

        Returns:
            The keys of the hit's blocks in the group that measures it.

        Raises:
            TieringError: a load within the step has lost blocks since the match, which the step computes with. Nothing
                comes between the two calls that could take blocks away.
        """
        computed, _, is_within_step = state.match or Match(0, 0)
        end = computed + external_tokens
        tails = self._search.tails.keys(state, end) if self._search.tails is not None else []
        parts = [self._part(state, group, computed, end, tails) for group in self._groups]
        keys = list(chain.from_iterable(part.keys for part in parts))
        if not (keys or tails or any(self._search.needed(state.keys, computed, end))):  # at the border of a chunk
            self._failed[state.ctx.req_id] = []
            self.has_orders = True
            self._advance(state, end)
            return ()
        measured = parts[self._search.measure.group_idx].keys
        source, held = self._pin(state, keys, parts)
        if is_within_step and (source is None or held < len(keys)):
            raise TieringError(f"{held} of {len(keys)} blocks that a step needs could be pinned; the step must not run")
        if tails and source is not None:
            self._manager.touch(tails, state.ctx)
        invalid = list(chain.from_iterable(part.block_ids for part in parts))
        if source is not None:
            if held < len(keys):
                (group,), (part,) = self._groups, parts
                kept = (part.first // group.block_size_factor + held) * group.block_size_factor - part.first
                parts = [_Part(part.first, part.block_ids[:kept], part.keys[:held])]
                end = (part.first + kept) * group.gpu_block_size
                keys, invalid = keys[:held], part.block_ids[kept:]
            else:
                invalid = []
            self._queue(state, source, keys, parts, computed, is_within_step=is_within_step)
            self._advance(state, end)
        else:
            end = computed
        if invalid or source is None:
            self.shrunk_hits += 1
            self._failed[state.ctx.req_id] = invalid
            self.has_orders = True
            state.load_failed(end)
            self._warn_shrunk(
                "%d GPU blocks of a hit are not readable any more; the engine recomputes them", len(invalid)
            )
        return measured

    def take(self) -> tuple[dict[ReqId, TransferOrder], dict[ReqId, list[int]], dict[ReqId, TransferOrder]]:
        """Return the loads of this step, by request.

        These are the orders of loads that requests wait for, the blocks that no load fills, and the orders of loads
        that the step needs. The blocks of the orders are fenced from now on.
        """
        if not self.has_orders:
            return {}, {}, {}
        self.has_orders = False
        for job, block_ids in self._queued:
            self._fences.fence(job.job_id, as_rows(block_ids), writes=True)
        orders, failed, within_step = self._orders, self._failed, self._within_step
        self.step_loads.end_step()
        self._unfilled.update(chain.from_iterable(failed.values()))
        self._queued, self._orders, self._failed, self._within_step = [], {}, {}, {}
        return orders, failed, within_step

    def take_foreign(self, invalid: Collection[int]) -> set[int]:
        """Return the blocks of ``invalid`` that loads of other connectors did not fill.

        ``invalid`` are the blocks that the engine reports as not filled. Blocks that loads of this connector were to
        fill are left out.
        """
        foreign = set(invalid) - self._unfilled - self._fences.written(invalid)
        self._unfilled.difference_update(invalid)
        return foreign

    def ended(self, job: Job, seconds: float) -> None:
        """Forget the keys that ``job`` was loading.

        Args:
            job: the load.
            seconds: time that the copy took; 0: not known.
        """
        if seconds:
            self.step_loads.measure(len(job.keys), seconds)
        loading = self._loading
        for key in [
            key for key, job_id in zip(job.keys, map(loading.get, job.keys), strict=True) if job_id == job.job_id
        ]:
            del loading[key]

    def forget_keys(self) -> None:
        """Forget all keys that are being loaded, so that no request waits for them."""
        self._loading.clear()

    def _part(
        self, state: RequestState, group: OffloadGroup, computed: int, end: int, tails: Sequence[OffloadKey]
    ) -> _Part:
        """Return the part of ``group`` in a load of the tokens from ``computed`` to ``end``.

        ``tails`` are the keys of the blocks in which a hit ends, by group; empty if it ends where blocks do.
        """
        factor, group_state = group.block_size_factor, state.groups[group.group_idx]
        table = group_state.block_ids
        last = min(-(-end // group.gpu_block_size), len(table))
        first = max(computed // group.gpu_block_size, group.skipped_blocks(end))
        first = max(first, self._search.first_block(group, computed, end) * factor)
        while first < last and table[first] == 0:
            first += 1
        if first >= last:
            return _Part(0, [], ())
        if tails:  # the block in which the hit ends has a key of its own
            has_last = last * group.gpu_block_size >= end
            keys = [*group_state.keys[first : last - 1], tails[group.group_idx]] if has_last else []
            return _Part(first, table[first:last], keys)
        return _Part(first, table[first:last], group_state.keys[first // factor : -(-last // factor)])

    def _advance(self, state: RequestState, end: int) -> None:
        """Begin the stores of a request behind its hit of ``end`` tokens, whose blocks are held."""
        if not state.request_level:
            for group, group_state in zip(self._groups, state.groups, strict=True):
                group_state.cursor = max(group_state.cursor, end // group.offloaded_block_size)

    def _pin(
        self, state: RequestState, keys: list[OffloadKey], parts: Sequence[_Part]
    ) -> tuple[LoadStoreSpec | None, int]:
        """Pin the first blocks of a hit for a load; return their rows and the number of pinned blocks.

        The rows are None if nothing can be loaded. A part of a hit is loaded only without window groups: another end
        needs other window blocks, for which no GPU blocks were allocated.
        """
        if not keys or not all(map(_Part.is_whole, parts, self._groups)):
            return None, 0
        try:
            return self._manager.prepare_load(keys, state.ctx), len(keys)
        except NotReadableError as error:
            missing = set(error.keys)
        held = next((position for position, key in enumerate(keys) if key in missing), 0)
        if not held or len(parts) > 1 or not self._groups[0].is_full:
            return None, 0
        try:
            return self._manager.prepare_load(keys[:held], state.ctx), held
        except NotReadableError:
            return None, 0

    def _queue(
        self,
        state: RequestState,
        source: LoadStoreSpec,
        keys: list[OffloadKey],
        parts: Sequence[_Part],
        computed: int,
        *,
        is_within_step: bool,
    ) -> None:
        """Open the job of a load, and queue its transfer order."""
        block_ids = list(chain.from_iterable(part.block_ids for part in parts))
        single = len(parts) == 1
        target = LoadTarget(
            state=state,
            generation=state.generation,
            first_token=computed,
            first_gpu_block=parts[0].first if single else None,
            gpu_block_size=self._groups[0].gpu_block_size,
            block_ids=block_ids if single else [],
        )
        job = self._jobs.open(state.ctx, keys, target)
        if is_within_step:  # whoever shares these blocks finds them in the engine's cache from now on
            self.step_loads.add(len(keys))
        else:
            self._loading.update(zip(keys, repeat(job.job_id)))
        self._queued.append((job, block_ids))
        self.has_orders = True
        destination = GPULoadStoreSpec(
            block_ids, [len(part.block_ids) for part in parts], [part.first for part in parts]
        )
        orders = self._within_step if is_within_step else self._orders
        orders[state.ctx.req_id] = TransferOrder(job.job_id, (source, destination))


def sharer_wait(spec: OffloadingSpec) -> float:
    """Return the option ``sharer_wait`` in seconds.

    An engine without a prefix cache cannot share the loaded blocks, so its requests do not wait: the value is 0.

    Raises:
        ConfigError: the option is not a duration, or is negative.
    """
    value = spec.extra_config.get("sharer_wait", DEFAULT_SHARER_WAIT)
    try:
        seconds = parse_duration(value)
    except ValueError as error:
        raise ConfigError(f"sharer_wait: {error}") from error
    if seconds < 0:
        raise ConfigError(f"sharer_wait: {value!r} is negative; 0 means not to wait")
    return seconds if spec.engine.enable_prefix_caching else 0.0
