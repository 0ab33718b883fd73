"""The scheduler: the requests of each step and their tokens, and the scheduler half of the connector.

Continuous batching with chunked prefill. When blocks run out, the youngest running request is preempted: it gives all
its blocks back and starts again later. The connector is called in vLLM's order: for each waiting request
``get_num_new_matched_tokens`` → allocation → ``update_state_after_alloc``; once per step ``build_connector_meta``;
after the step ``update_connector_output``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from examples.mini_engine.kv_cache import KVCacheManager, RequestBlocks
from examples.mini_engine.request import Request, Status


class SchedulerConnector(Protocol):
    """The scheduler half of a connector, as this engine drives it."""

    def on_new_request(self, request: Any) -> None: ...
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]: ...
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> Any: ...
    def build_connector_meta(self, scheduler_output: Any) -> Any: ...
    def update_connector_output(self, connector_output: Any) -> None: ...
    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, Any]: ...
    def has_pending_work(self) -> bool: ...
    def reset_cache(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that runs for the first time."""

    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@dataclass(slots=True)
class CachedRequests:
    """Requests that ran before, as parallel lists.

    ``new_block_ids`` replace all blocks of those in ``resumed_req_ids``.
    """

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class SchedulerOutput:
    """One step's schedule, for the worker and the connector."""

    scheduled_new_reqs: list[NewRequest] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequests = field(default_factory=CachedRequests)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    preempted_req_ids: set[str] = field(default_factory=set)
    finished_req_ids: set[str] = field(default_factory=set)
    connector_metadata: Any = None


@dataclass(frozen=True, slots=True)
class ConnectorOutput:
    """The reports of the connector's worker half in a step."""

    finished_sending: Collection[str] | None = None
    finished_recving: Collection[str] | None = None
    invalid_block_ids: Collection[int] = ()
    kv_connector_stats: Any = None
    kv_connector_worker_meta: Any = None


class Scheduler:
    """Owns all requests and block tables."""

    def __init__(
        self,
        kv: KVCacheManager,
        connector: SchedulerConnector | None = None,
        *,
        max_batch_tokens: int = 256,
        max_running: int = 8,
    ) -> None:
        self.kv = kv
        self.connector = connector
        self.max_batch_tokens = max_batch_tokens
        self.max_running = max_running
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._arrived: set[str] = set()
        self._started: set[str] = set()
        self._preempted: set[str] = set()
        self._finished_ids: set[str] = set()
        self._delayed: dict[str, tuple[Request, set[str]]] = {}

    # --------------------------------------------------------------------------------------------------------- requests

    def add(self, request: Request) -> None:
        """Queue a request. ValueError if it can never fit into the GPU's blocks."""
        if not request.prompt or not self.kv.can_ever_hold(request.num_tokens + request.max_tokens):
            message = f"request {request.request_id}: the prompt is empty, or larger than the KV cache; use more blocks"
            raise ValueError(message)
        request.update_hashes(self.kv.block_size)
        self.requests[request.request_id] = request
        self.waiting.append(request)
        if self.connector is not None:
            self.connector.on_new_request(request)

    def abort(self, request_id: str) -> None:
        """End a request now, whatever it is doing."""
        request = self.requests.get(request_id)
        if request is not None:
            self._finish(request, Status.ABORTED)

    def has_work(self) -> bool:
        """Return True if another step has work, also while the connector's jobs are in flight."""
        busy = bool(self.requests or self._delayed or self._finished_ids)
        return busy or (self.connector is not None and self.connector.has_pending_work())

    def reset(self) -> bool:
        """Drop all KV: running requests start over, and tiers are reset.

        Returns:
            True if every tier has confirmed the reset.
        """
        for request in reversed(self.running):
            self._preempt(request)
        self.running.clear()
        for request in self.waiting:
            if request.status is Status.LOADING:
                request.discard_load = True
            else:
                self._start_over(request)
        self.kv.pool.reset()
        return self.connector.reset_cache() if self.connector is not None else True

    # --------------------------------------------------------------------------------------------------------- the step

    def schedule(self) -> SchedulerOutput:
        """Decide what the next step computes."""
        output = SchedulerOutput()
        budget = self._schedule_running(output, self.max_batch_tokens)
        if not self._preempted:
            self._schedule_waiting(output, budget)
        output.preempted_req_ids, self._preempted = self._preempted, set()
        output.finished_req_ids, self._finished_ids = self._finished_ids, set()
        if self.connector is not None:
            output.connector_metadata = self.connector.build_connector_meta(output)
        for request_id, count in output.num_scheduled_tokens.items():
            self.requests[request_id].num_computed_tokens += count
        return output

    def _schedule_running(self, output: SchedulerOutput, budget: int) -> int:
        index = 0
        while index < len(self.running) and budget:
            request = self.running[index]
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            while (new := self.kv.allocate(request, request.num_computed_tokens, count)) is None:
                if self.running[-1] is request and self._take_back_loaded():
                    continue
                victim = self.running.pop()
                self._preempt(victim)
                if victim is request:
                    return budget
            self._note_cached(output, request, new, count, resumed=False)
            budget -= count
            index += 1
        return budget

    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        skipped: list[Request] = []
        full = False
        while self.waiting and budget and len(self.running) < self.max_running:
            request = self.waiting[0]
            loading = request.status is Status.LOADING and not self._load_ended(request)
            if loading or (full and not request.num_computed_tokens):
                skipped.append(self.waiting.popleft())
                continue
            tokens, external, prefix, waits = request.num_computed_tokens, 0, None, False
            if tokens == 0:
                prefix = self.kv.find_prefix(request)
                tokens = prefix.tokens
                if self.connector is not None and request.may_load:
                    answer, waits = self.connector.get_num_new_matched_tokens(request, tokens)
                    if answer is None:
                        skipped.append(self.waiting.popleft())
                        continue
                    external = answer
            count = 0 if waits else min(request.num_tokens - tokens - external, budget)
            self.waiting.popleft()
            present = min(tokens + external, request.num_tokens - 1)
            if self.kv.allocate(request, present, count or tokens + external - present, prefix) is None:
                full = True
                skipped.append(request)
                continue
            blocks = self.kv.blocks_of(request)
            if self.connector is not None:
                self.connector.update_state_after_alloc(request, blocks, external)
            if prefix is not None:
                request.gpu_hit_tokens += tokens
            request.num_computed_tokens = tokens + external
            if waits:
                request.status, request.load_start = Status.LOADING, tokens
                skipped.append(request)
                continue
            request.loaded_tokens += external
            request.status = Status.RUNNING
            self.running.append(request)
            self._note_started(output, request, blocks, count)
            budget -= count
        self.waiting.extendleft(reversed(skipped))
        if full and not self.running and not any(request.status is Status.LOADING for request in self.waiting):
            self._take_back_loaded()

    def _take_back_loaded(self) -> bool:
        """Make room: the youngest waiting request that holds loaded blocks starts over.

        Returns:
            False if there is no such request.
        """
        for request in reversed(self.waiting):
            if request.status is Status.WAITING and request.num_computed_tokens:
                self._start_over(request)
                return True
        return False

    def _note_started(self, output: SchedulerOutput, request: Request, blocks: RequestBlocks, count: int) -> None:
        request_id, ids = request.request_id, blocks.get_block_ids()
        if request_id in self._started:
            self._note_cached(output, request, ids, count, resumed=True)
            return
        self._started.add(request_id)
        output.scheduled_new_reqs.append(NewRequest(request_id, ids, request.num_computed_tokens))
        output.num_scheduled_tokens[request_id] = count

    def _note_cached(
        self, output: SchedulerOutput, request: Request, blocks: tuple[list[int], ...], count: int, *, resumed: bool
    ) -> None:
        cached = output.scheduled_cached_reqs
        cached.req_ids.append(request.request_id)
        cached.new_block_ids.append(blocks if any(blocks) else None)
        cached.num_computed_tokens.append(request.num_computed_tokens)
        if resumed:
            cached.resumed_req_ids.add(request.request_id)
        output.num_scheduled_tokens[request.request_id] = count

    # --------------------------------------------------------------------------------------------------- after the step

    def update(
        self, output: SchedulerOutput, sampled: Mapping[str, tuple[int, int, float]], connector_output: ConnectorOutput
    ) -> list[Request]:
        """Process the results of a step, and return the requests that ended.

        ``sampled`` has the token, the digest of its logits and the time, by request id.
        """
        self._handle_failed_loads(frozenset(connector_output.invalid_block_ids))
        ended: list[Request] = []
        for request_id in output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None or request.status is not Status.RUNNING:
                continue
            self.kv.name_full_blocks(request)
            if request_id in sampled:
                token, digest, moment = sampled[request_id]
                request.all_token_ids.append(token)
                request.logit_digests.append(digest)
                request.update_hashes(self.kv.block_size)
                if request.first_token_at is None:
                    request.first_token_at = moment
                if len(request.output) >= request.max_tokens:
                    self._finish(request, Status.FINISHED)
                    ended.append(request)
        if self.connector is not None:
            self.connector.update_connector_output(connector_output)
        received = set(connector_output.finished_recving or ())
        self._arrived |= received & self.requests.keys()
        for report, request_ids in (("received", received), ("sent", connector_output.finished_sending or ())):
            for request_id in request_ids:
                if request_id in self._delayed:
                    self._release_delayed(request_id, report)
        return ended

    def _release_delayed(self, request_id: str, report: str) -> None:
        request, awaited = self._delayed[request_id]
        awaited.discard(report)
        if not awaited:
            del self._delayed[request_id]
            self.kv.free(request)

    def _load_ended(self, request: Request) -> bool:
        """Return True if the load of ``request`` has ended, so that the request can be scheduled."""
        if request.request_id not in self._arrived:
            return False
        self._arrived.discard(request.request_id)
        request.status = Status.WAITING
        if request.discard_load:
            request.discard_load = False
            self._start_over(request)
            return True
        request.loaded_tokens += max(0, request.num_computed_tokens - request.load_start)
        if request.num_computed_tokens:
            self.kv.name_full_blocks(request)
            request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        else:
            self._start_over(request)
        return True

    def _handle_failed_loads(self, invalid: frozenset[int]) -> None:
        """Go back to before the first block that a load did not fill; what comes after is computed."""
        if not invalid:
            return
        for request in self.waiting:
            if request.status is not Status.LOADING:
                continue
            tables = self.kv.blocks_of(request).get_block_ids()
            wrong = [index for table in tables for index, block in enumerate(table) if block in invalid]
            if wrong:
                request.may_load = False
                good = min(wrong) * self.kv.block_size if self.kv.windows == (None,) else 0
                request.num_computed_tokens = min(request.num_computed_tokens, good)

    def _preempt(self, request: Request) -> None:
        request.preemptions += 1
        request.status = Status.WAITING
        self._start_over(request)
        self._preempted.add(request.request_id)
        self.waiting.appendleft(request)

    def _start_over(self, request: Request) -> None:
        self.kv.free(request)
        request.num_computed_tokens = 0

    def _finish(self, request: Request, status: Status) -> None:
        loading = request.status is Status.LOADING and request.request_id not in self._arrived
        self._arrived.discard(request.request_id)
        request.status = status
        del self.requests[request.request_id]
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._started.discard(request.request_id)
        self._preempted.discard(request.request_id)
        self._finished_ids.add(request.request_id)
        awaited = {"received"} if loading else set()
        if self.connector is not None:
            delay, _ = self.connector.request_finished_all_groups(request, self.kv.blocks_of(request).get_block_ids())
            awaited |= {"sent"} if delay else set()
        if awaited:
            self._delayed[request.request_id] = (request, awaited)
        else:
            self.kv.free(request)
