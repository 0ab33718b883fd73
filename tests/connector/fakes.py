"""Doubles for the scheduler half: requests, step outputs, a spec, a manager that checks its callers."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiering.api.engine import CanonicalKVCaches, EngineConfig, KVCacheGroup, OffloadingSpec
from tiering.api.hints import HintBounds, KeptBlocks
from tiering.api.keys import OffloadKey, make_offload_key
from tiering.api.manager import OffloadingEvent, OffloadingManager, PrefixMatch, PrepareStoreOutput
from tiering.api.request import LATE_STORE, OffloadPolicy, ReqContext, RequestOffloadingContext
from tiering.api.transfer import CPULoadStoreSpec, GPULoadStoreSpec, LoadStoreSpec
from tiering.connector.metadata import OffloadingConnectorMetadata, OffloadingWorkerMetadata
from tiering.connector.protocols import EngineRequest
from tiering.connector.scheduler import OffloadingConnectorScheduler
from tiering.errors import NotReadableError


def chain_hashes(tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Return one hash per full block; each hash covers all tokens up to the block's end."""
    digest, hashes = hashlib.sha256(), []
    for end in range(block_size, len(tokens) + 1, block_size):
        digest.update(repr(tokens[end - block_size : end]).encode())
        hashes.append(digest.digest())
    return hashes


@dataclass(eq=False)
class FakeRequest:
    request_id: str
    all_token_ids: list[int]
    hash_block_size: int = 4
    kv_transfer_params: Mapping[str, Any] | None = None
    lora_request: Any = None
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    num_prompt_tokens: int = -1
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.num_prompt_tokens < 0:
            self.num_prompt_tokens = len(self.all_token_ids)
        self.update_hashes()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def update_hashes(self) -> None:
        self.block_hashes = chain_hashes(self.all_token_ids, self.hash_block_size)

    def append(self, *tokens: int) -> None:
        self.all_token_ids += tokens
        self.update_hashes()

    def key(self, hash_index: int, group: int = 0) -> OffloadKey:
        return make_offload_key(self.block_hashes[hash_index], group)

    def keys(self, group: int = 0, factor: int = 1) -> list[OffloadKey]:
        return [make_offload_key(name, group) for name in self.block_hashes[factor - 1 :: factor]]


@dataclass(frozen=True)
class FakeBlocks:
    ids: tuple[list[int], ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self.ids


@dataclass
class FakeNewRequest:
    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int = 0


@dataclass
class FakeCachedRequests:
    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass
class FakeSchedulerOutput:
    scheduled_new_reqs: list[FakeNewRequest] = field(default_factory=list)
    scheduled_cached_reqs: FakeCachedRequests = field(default_factory=FakeCachedRequests)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    preempted_req_ids: set[str] | None = None
    finished_req_ids: set[str] = field(default_factory=set)

    def new(self, request: EngineRequest, tokens: int, *block_ids: list[int]) -> FakeSchedulerOutput:
        self.scheduled_new_reqs.append(FakeNewRequest(request.request_id, block_ids, request.num_computed_tokens))
        self.num_scheduled_tokens[request.request_id] = tokens
        return self

    def cached(
        self, request: EngineRequest, tokens: int, *block_ids: list[int], resumed: bool = False
    ) -> FakeSchedulerOutput:
        cached = self.scheduled_cached_reqs
        cached.req_ids.append(request.request_id)
        cached.new_block_ids.append(block_ids or None)
        cached.num_computed_tokens.append(request.num_computed_tokens)
        if resumed:
            cached.resumed_req_ids.add(request.request_id)
        self.num_scheduled_tokens[request.request_id] = tokens
        return self


@dataclass
class FakeConnectorOutput:
    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    invalid_block_ids: set[int] = field(default_factory=set)
    kv_connector_worker_meta: OffloadingWorkerMetadata | None = field(default_factory=OffloadingWorkerMetadata)


def finished(*job_ids: int, workers: int = 1, failed: Iterable[int] = (), **fields: Any) -> FakeConnectorOutput:
    meta = OffloadingWorkerMetadata(dict.fromkeys(job_ids, workers), set(failed))
    return FakeConnectorOutput(kv_connector_worker_meta=meta, **fields)


class ContractViolationError(AssertionError):
    """The connector called the manager in a way that its contract forbids."""


class FakeManager(OffloadingManager):
    """An exact little CPU cache.

    Attributes:
        refs: reference count by key: -1 while the block is written, otherwise the number of readers.
        rows: row by key, the least recently used key first.
    """

    def __init__(self, capacity: int = 1 << 16) -> None:
        self.free = list(range(capacity - 1, -1, -1))
        self.rows: OrderedDict[OffloadKey, int] = OrderedDict()
        self.refs: dict[OffloadKey, int] = {}
        self.undecided: set[OffloadKey] = set()
        self.unchanged = False
        self.policy = OffloadPolicy.BLOCK_LEVEL
        self.refuse_stores = False
        self.reverse_stores = False
        self.offered: list[list[OffloadKey]] = []
        self.offered_last: list[list[OffloadKey]] = []
        self.touched: list[list[OffloadKey]] = []
        self.asked: list[list[OffloadKey]] = []
        self.looked_at: list[list[OffloadKey]] = []
        self.completed_stores: list[tuple[list[OffloadKey], bool]] = []
        self.completed_loads: list[list[OffloadKey]] = []
        self.live: set[str] = set()
        self.ended: list[str] = []
        self.released: list[OffloadKey] = []
        self.kept: list[KeptBlocks] = []
        self.early: list[tuple[list[OffloadKey], str]] = []
        self.prefetched: list[tuple[list[OffloadKey], float, float]] = []
        self.steps = 0
        self.epoch_begins = False
        """True if the manager empties itself for a new common epoch at the end of this step."""
        self.epochs_begun = 0
        self.shutdowns = 0
        self.events: list[OffloadingEvent] = []
        self.writing: set[tuple[str, OffloadKey]] = set()
        self.lost: dict[OffloadKey, list[int]] = {}
        self.sources: dict[OffloadKey, str] = {}
        self.exclusive = False
        """True if the stack wants the CPU tier to hold what the engine's cache does not."""
        self.feeds_tiers = False
        """True if blocks are stored as they are computed although the CPU tier is exclusive."""
        self.shown: list[Callable[[Sequence[OffloadKey]], Sequence[bool]] | None] = []
        self.engine_held: list[list[OffloadKey]] = []
        self.dropped: list[list[OffloadKey]] = []
        self.leaving: list[list[OffloadKey]] = []
        self.wanted: list[OffloadKey] = []

    def hold(self, keys: Iterable[OffloadKey]) -> None:
        """Make keys readable."""
        for key in keys:
            if key not in self.rows:
                self.rows[key] = self.free.pop()
                self.refs[key] = 0

    def drop(self, *keys: OffloadKey) -> None:
        for key in keys:
            self.free.append(self.rows.pop(key))
            del self.refs[key]

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        if key in self.undecided:
            return None
        return None if self.refs.get(key) == -1 else key in self.rows

    def match_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext, *, at_least: int = 1) -> PrefixMatch:
        self.asked.append(list(keys))
        pending = False
        for hits, key in enumerate(keys):
            if key in self.undecided:
                return PrefixMatch(hits, True)
            if key not in self.rows:
                return PrefixMatch(hits, pending and hits >= at_least)
            pending = pending or self.refs[key] == -1
        return PrefixMatch(len(keys), pending)

    def lookup_each(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Sequence[bool | None]:
        self.looked_at.append(list(keys))
        return [self.lookup(key, req_context) for key in keys]

    def held(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrefixMatch:
        self.looked_at.append(list(keys))
        for hits, key in enumerate(keys):
            if key in self.undecided or key not in self.rows:
                return PrefixMatch(hits, key in self.undecided)
        return PrefixMatch(len(keys), False)

    def still_pending(self, req_context: ReqContext) -> bool:
        return self.unchanged

    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        self._check_unique(keys)
        missing = [key for key in keys if self.lookup(key, req_context) is not True]
        if missing:
            raise NotReadableError(missing)
        for key in keys:
            self.refs[key] += 1
        return CPULoadStoreSpec([self.rows[key] for key in keys])

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext, used: bool = True) -> None:
        self.touched.append(list(keys))
        for key in reversed(keys):
            if key in self.rows:
                self.rows.move_to_end(key)

    def complete_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self.completed_loads.append(list(keys))
        for key in keys:
            if key in self.refs and key not in self.lost:
                if self.refs[key] <= 0:
                    raise ContractViolationError(f"{key.hex()} is not being loaded")
                self.refs[key] -= 1
            elif key in self.lost:
                self._recover(key)

    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, is_last: bool = False
    ) -> PrepareStoreOutput | None:
        self._check_unique(keys)
        self.offered.append(list(keys))
        if is_last:
            self.offered_last.append(list(keys))
        wanted = [key for key in keys if key not in self.rows]
        idle = [key for key in self.rows if self.refs[key] == 0 and key not in keys]
        if self.refuse_stores or len(wanted) > len(self.free) + len(idle):
            return None
        evicted = idle[: max(0, len(wanted) - len(self.free))]
        self.drop(*evicted)
        if self.reverse_stores:
            wanted.reverse()
        for key in wanted:
            self.rows[key] = self.free.pop()
            self.refs[key] = -1
        return PrepareStoreOutput(wanted, CPULoadStoreSpec([self.rows[key] for key in wanted]), evicted)

    def complete_store(self, keys: Sequence[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        self.completed_stores.append((list(keys), success))
        for key in keys:
            if key in self.lost:
                self._recover(key)
            elif self.refs.get(key) == -1:
                self.refs[key] = 0
                if not success:
                    self.drop(key)
            else:
                raise ContractViolationError(f"{key.hex()} is not being stored")

    def hold_exclusively(self, holds: Callable[[Sequence[OffloadKey]], Sequence[bool]] | None, blocks: int = 0) -> bool:
        self.shown.append(holds)
        return self.exclusive and holds is not None

    @property
    def stores_computed(self) -> bool:
        return self.feeds_tiers or not self.exclusive

    def engine_holds(self, keys: Sequence[OffloadKey]) -> None:
        self.engine_held.append(list(keys))

    def engine_dropped(self, keys: Sequence[OffloadKey]) -> int:
        self.dropped.append(list(keys))
        return sum(key not in self.rows for key in keys)

    def lacked(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        return [key for key in keys if key not in self.rows]

    def take_wanted(self) -> Sequence[OffloadKey]:
        wanted, self.wanted = self.wanted, []
        return wanted

    def prepare_late_store(self, keys: Sequence[OffloadKey]) -> PrepareStoreOutput | None:
        self.leaving.append(list(keys))
        self.reverse_stores = False  # the contract of late stores: the order of the call
        output = FakeManager.prepare_store(self, keys, LATE_STORE)
        self.offered.pop()
        return output

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if req_context.req_id in self.live:
            raise ContractViolationError(f"{req_context.req_id} is not new")
        self.live.add(req_context.req_id)
        return RequestOffloadingContext(self.policy)

    def on_request_finished(
        self, req_context: ReqContext, released: Sequence[OffloadKey] = (), kept: Sequence[KeptBlocks] = ()
    ) -> None:
        self.live.remove(req_context.req_id)
        self.ended.append(req_context.req_id)
        self.released += released
        self.kept += kept

    def promote_early(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self.early.append((list(keys), req_context.req_id))

    def prefetch(
        self,
        keys: Sequence[OffloadKey],
        tenant: bytes,
        bytes_per_second: float,
        after: float = 0.0,
        *,
        has_holes: bool = False,
    ) -> None:
        self.prefetched.append((list(keys), bytes_per_second, after))

    def count_sources(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Mapping[str, int]:
        return Counter(self.sources[key] for key in keys if key in self.sources)

    def take_events(self) -> Iterable[OffloadingEvent]:
        taken, self.events = self.events, []
        return taken

    def on_schedule_end(self) -> None:
        self.steps += 1
        if self.epoch_begins:
            self.epoch_begins = False
            self.epochs_begun += 1
            self.reset_cache()

    @property
    def new_epochs(self) -> int:
        return self.epochs_begun

    def reset_cache(self, revision: str | None = None) -> bool:
        for key in list(self.rows):
            if self.refs[key] == 0:
                self.drop(key)
            else:  # a copy still uses the row: the row stays set aside until the copy ends
                uses = 1 if self.refs[key] == -1 else self.refs[key]
                self.lost[key] = [self.rows.pop(key), uses]
                del self.refs[key]
        return True

    def get_stats(self) -> Mapping[str, Any]:
        return {"primary": {"blocks": len(self.rows)}}

    def shutdown(self) -> None:
        self.shutdowns += 1

    def _recover(self, key: OffloadKey) -> None:
        self.lost[key][1] -= 1
        if not self.lost[key][1]:
            self.free.append(self.lost.pop(key)[0])

    def _check_unique(self, keys: Sequence[OffloadKey]) -> None:
        if len(set(keys)) != len(keys):
            raise ContractViolationError("a key twice in one call")


class FakeSpec(OffloadingSpec):
    """A spec around a given manager."""

    def __init__(
        self, engine: EngineConfig, extra_config: Mapping[str, Any] | None = None, manager: FakeManager | None = None
    ) -> None:
        super().__init__(engine, extra_config)
        self.manager = FakeManager() if manager is None else manager

    def get_manager(self) -> OffloadingManager:
        return self.manager

    def get_handlers(
        self, kv_caches: CanonicalKVCaches
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], Any]]:
        return iter(())


def make_spec(
    *windows: int | None, gpu_block_size: int = 4, manager: FakeManager | None = None, world_size: int = 1, **extra: Any
) -> FakeSpec:
    """Return a spec with one KV-cache group per window.

    Args:
        windows: sliding window of each group in tokens, None for full attention; default: one full-attention group.
        extra: connector options as users write them.
    """
    windows = windows or (None,)
    groups = tuple(
        KVCacheGroup(
            (f"layer{index}",), gpu_block_size, window, "full_attention" if window is None else "sliding_window"
        )
        for index, window in enumerate(windows)
    )
    prefix_caching = bool(extra.pop("prefix_caching", True))
    promotes_waiting = bool(extra.pop("promotes_waiting", False))
    hints = HintBounds(blocks=extra.pop("session_blocks", 1 << 10), **extra.pop("hints", {"retain": 0.25}))
    engine = EngineConfig(
        block_sizes=(gpu_block_size,) * len(windows),
        hash_block_size=extra.pop("hash_block_size", gpu_block_size),
        groups=groups,
        world_size=world_size,
        enable_prefix_caching=prefix_caching,
        loads_within_step=bool(extra.pop("loads_within_step", False)),
        max_batch_tokens=extra.pop("max_batch_tokens", 8192),
        retention_interval=extra.pop("retention_interval", None),
    )
    spec = FakeSpec(engine, extra, manager)
    spec.hints, spec.promotes_waiting = hints, promotes_waiting
    return spec


def make_scheduler(
    *windows: int | None, clock: Any = lambda: 0.0, **options: Any
) -> tuple[OffloadingConnectorScheduler, FakeManager]:
    spec = make_spec(*windows, **options)
    return OffloadingConnectorScheduler(spec, clock=clock), spec.manager


def prompt(tokens: int, name: str = "r1", **fields: Any) -> FakeRequest:
    """Return a request whose tokens count up from 0, in blocks of 4: two such prompts share their prefix."""
    return FakeRequest(name, list(range(tokens)), **fields)


def ids(count: int, start: int = 1) -> list[int]:
    """Return ``count`` consecutive GPU block ids."""
    return list(range(start, start + count))


def start_load(
    scheduler: OffloadingConnectorScheduler, request: FakeRequest, *block_ids: list[int], computed: int = 0
) -> OffloadingConnectorMetadata:
    """Match, allocate ``block_ids`` and build the step that orders the load."""
    tokens, asynchronous = scheduler.get_num_new_matched_tokens(request, computed)
    assert tokens
    assert asynchronous
    scheduler.update_state_after_alloc(request, FakeBlocks(block_ids), tokens)
    request.num_computed_tokens = computed + tokens
    return scheduler.build_connector_meta(FakeSchedulerOutput())


def run_prompt(
    scheduler: OffloadingConnectorScheduler,
    request: FakeRequest,
    *block_ids: list[int],
    tokens: int | None = None,
    computed: int = 0,
) -> OffloadingConnectorMetadata:
    """Schedule a request for the first time.

    Args:
        block_ids: the request's GPU blocks, one list per group.
        tokens: number of tokens to compute; default: all that are left.
        computed: number of tokens that are computed already.
    """
    scheduler.get_num_new_matched_tokens(request, computed)
    scheduler.update_state_after_alloc(request, FakeBlocks(block_ids), 0)
    request.num_computed_tokens = computed
    count = request.num_tokens - computed if tokens is None else tokens
    meta = scheduler.build_connector_meta(FakeSchedulerOutput().new(request, count, *block_ids))
    request.num_computed_tokens += count
    return meta


def go_on(
    scheduler: OffloadingConnectorScheduler, request: FakeRequest, tokens: int, *block_ids: list[int]
) -> OffloadingConnectorMetadata:
    """Schedule ``tokens`` more tokens of a running request, which gets ``block_ids`` as new blocks."""
    meta = scheduler.build_connector_meta(FakeSchedulerOutput().cached(request, tokens, *block_ids))
    request.num_computed_tokens += tokens
    return meta


def idle_step(scheduler: OffloadingConnectorScheduler) -> OffloadingConnectorMetadata:
    """Build a step without tokens."""
    return scheduler.build_connector_meta(FakeSchedulerOutput())


def loaded(meta: OffloadingConnectorMetadata, name: str = "r1") -> tuple[CPULoadStoreSpec, GPULoadStoreSpec]:
    """Return source and destination of the load that the step orders for request ``name``."""
    source, destination = meta.reqs_to_load[name].spec
    assert isinstance(source, CPULoadStoreSpec)
    assert isinstance(destination, GPULoadStoreSpec)
    return source, destination


def stored(meta: OffloadingConnectorMetadata, name: str = "r1") -> tuple[GPULoadStoreSpec, CPULoadStoreSpec]:
    """Return source and destination of the store that the step orders for request ``name``."""
    source, destination = meta.reqs_to_store[name].spec
    assert isinstance(source, GPULoadStoreSpec)
    assert isinstance(destination, CPULoadStoreSpec)
    return source, destination
