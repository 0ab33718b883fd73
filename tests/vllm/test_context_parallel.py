"""Decode context parallelism: each rank holds every n-th piece of a block's tokens, byte for byte.

No CPU kernel of vLLM computes with it. Blocks are therefore allocated by vLLM's cache manager, and filled and compared
token by token through the mapping of vLLM's own connector (``canonical_mapping``): it names the place of each token and
head in each rank's page.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    get_kv_cache_spec_kind,
)

from tests.connector.fakes import FakeBlocks, FakeConnectorOutput, FakeSchedulerOutput
from tests.vllm.test_block_tables import configuration, make_request
from tiering.api.namespace import ModelIdentity
from tiering.connector.metadata import OffloadingWorkerMetadata
from tiering.connector.scheduler import OffloadingConnectorScheduler
from tiering.connector.worker import OffloadingConnectorWorker
from tiering.engines.vllm.geometry import read_geometry
from tiering.spec import TieringOffloadingSpec
from tiering.testing.clock import until

mapping = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping")

BLOCK, BLOCKS, FULL = 16, 24, 3
"""Tokens of a rank in a block, GPU blocks, and full blocks of the prompt."""


@dataclass(frozen=True)
class Case:
    """One deployment: among its ``ranks`` workers, ``context`` neighbours share the tokens of a head."""

    ranks: int
    context: int
    interleave: int
    heads: int = 1
    """KV heads of the model; 0: latent attention."""
    by_tokens: bool = False
    """True if tokens lie outside of heads in a page."""
    factor: int = 1
    """GPU blocks in an offloaded block."""


CASES = [
    Case(2, 2, 1),
    Case(2, 2, 16, by_tokens=True),
    Case(4, 2, 4),
    Case(4, 2, 1, heads=2),
    Case(4, 2, 8, heads=2, by_tokens=True, factor=3),
    Case(4, 4, 1),
    Case(8, 2, 2, heads=2),
    Case(2, 2, 1, heads=0),
    Case(4, 2, 4, heads=0),
    Case(4, 4, 16, heads=0, factor=3),
]


class Machine:
    """vLLM's cache manager, both halves of the connector, and the memory of all workers."""

    def __init__(self, case: Case) -> None:
        self.case = case
        config, _ = configuration([])
        config.speculative_config, config.num_prefill_lookahead_tokens = None, 0
        config.model_config.use_mla = not case.heads
        config.cache_config.block_size, config.cache_config.prefix_match_unit = BLOCK, None
        config.kv_transfer_config.engine_id = f"context-{uuid.uuid4().hex}"
        config.kv_transfer_config.kv_connector_extra_config = {"blocks_per_chunk": case.factor}
        parallel: Any = SimpleNamespace(world_size=case.ranks, tensor_parallel_size=case.ranks, data_parallel_rank=0)
        parallel.decode_context_parallel_size, parallel.pipeline_parallel_size = case.context, 1
        config.parallel_config = parallel
        words: dict[str, Any] = {"block_size": BLOCK, "dtype": torch.int16}
        self.layer: Any = (
            FullAttentionSpec(num_kv_heads=max(1, case.heads // case.ranks), head_size=32, **words)
            if case.heads
            else MLAAttentionSpec(num_kv_heads=1, head_size=64, **words)
        )
        cache = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["a", "b"], self.layer)])
        _, self.tokens = resolve_kv_cache_block_sizes(cache, config)
        self.own = KVCacheManager(
            cache,
            4096,
            scheduler_block_size=self.tokens,
            hash_block_size=self.tokens,
            dcp_world_size=case.context,
        )
        self.specs = []
        for rank in range(case.ranks):
            config.parallel_config = SimpleNamespace(**{**vars(parallel), "rank": rank})
            kind_of = lambda spec: str(get_kv_cache_spec_kind(spec).value)  # noqa: E731
            geometry = read_geometry(config, cache, kind_of, self.tokens)
            self.specs.append(
                TieringOffloadingSpec(
                    geometry.engine,
                    {"primary": {"capacity": "8MiB"}, "blocks_per_chunk": case.factor},
                    model=ModelIdentity(name="model", weights="0", dtype="int16", layout="two layers"),
                    group_bytes=geometry.group_bytes,
                    rank=rank,
                    copies=geometry.copies,
                    stage_bytes=geometry.stage_bytes,
                )
            )
        self.workers = [OffloadingConnectorWorker(spec, BLOCKS) for spec in self.specs]
        self.caches = [{layer: self.memory() for layer in "ab"} for _ in self.workers]
        for worker, caches in zip(self.workers, self.caches, strict=True):
            worker.register_kv_caches(caches)
        first = self.specs[0]
        self.half_spec = TieringOffloadingSpec(
            first.engine, first.extra_config, model=first.model, group_bytes=first.group_bytes
        )
        self.scheduler = OffloadingConnectorScheduler(self.half_spec)
        self.runs = [self.mapping_of(rank) for rank in range(case.ranks)]
        self._waiting: dict[str, int] = {}

    def memory(self) -> torch.Tensor:
        """Return the KV cache of one layer on one rank."""
        heads, content = self.layer.num_kv_heads, 64
        if self.case.by_tokens:
            return torch.zeros(BLOCKS, BLOCK, heads, content, dtype=torch.int16).transpose(1, 2)
        return torch.zeros(BLOCKS, heads, BLOCK, content, dtype=torch.int16)

    def mapping_of(self, rank: int) -> Any:
        """Return vLLM's mapping between a rank's page and the tokens of all ranks."""
        case = self.case
        place = mapping._RankContext(case.ranks, case.context, 1, case.interleave, case.heads, rank)
        found = mapping._layer_mapping(self.layer, self.caches[rank]["a"], BLOCKS, place)
        assert found is not None
        return found

    def bytes_of(self, rank: int, layer: str) -> np.ndarray:
        """Return a layer's memory on a rank: (blocks, bytes)."""
        storage = self.caches[rank][layer].untyped_storage()
        found: np.ndarray = torch.empty(0, dtype=torch.uint8).set_(storage).view(BLOCKS, -1).numpy()
        return found

    def whole(self, layer: str, block: int) -> np.ndarray:
        """Return the random KV of all tokens and heads in a block of the prompt."""
        size = int(self.runs[0].canonical_page_size_bytes)
        return np.random.default_rng([ord(layer), block]).integers(1, 256, size, dtype=np.uint8)

    def page(self, rank: int, layer: str, block: int) -> np.ndarray:
        """Return what a rank holds of a block of the prompt, token by token."""
        whole, runs = self.whole(layer, block), self.runs[rank]
        page = np.zeros(int(runs.local_page_size_bytes), np.uint8)
        for run in runs.runs:
            for index in range(run.num_fragments):
                at, source = (
                    run.local_offset + index * run.local_stride,
                    run.canonical_offset + index * run.canonical_stride,
                )
                page[at : at + run.fragment_size] = whole[source : source + run.fragment_size]
        return page

    def compute(self, table: list[int]) -> None:
        """Fill the full blocks of the prompt on all ranks."""
        for rank in range(self.case.ranks):
            for layer in "ab":
                for block in range(FULL):
                    self.bytes_of(rank, layer)[table[block]] = self.page(rank, layer, block)

    def step(self, schedule: FakeSchedulerOutput) -> None:
        """Run one step of all halves; a request is received when all workers have reported it."""
        metadata = self.scheduler.build_connector_meta(schedule)
        report, received, invalid = OffloadingWorkerMetadata(), set[str](), set[int]()
        for worker in self.workers:
            worker.handle_preemptions(metadata)
            worker.start_kv_transfers(metadata)
            worker.prepare_store_kv(metadata)
            for name in worker.get_finished(set())[1]:
                self._waiting[name] = self._waiting.get(name, 0) + 1
                if self._waiting[name] == len(self.workers):
                    received.add(name)
            if (its_report := worker.build_connector_worker_meta()) is not None:
                report = report.aggregate(its_report)
            invalid |= worker.get_block_ids_with_load_errors()
        assert not invalid
        self.scheduler.update_connector_output(FakeConnectorOutput(None, received, invalid, report))

    def settle(self) -> None:
        """Step until no copy is in flight."""

        def settled() -> bool:
            self.step(FakeSchedulerOutput())
            return not self.scheduler.has_pending_work()

        until(settled)

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.shutdown()
        for spec in [*self.specs, self.half_spec]:
            spec.close()


@pytest.fixture(params=CASES, ids=str)
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    machine = Machine(request.param)
    yield machine
    machine.close()


def test_each_rank_gets_its_tokens_back_in_other_blocks(machine: Machine) -> None:
    case, tokens = machine.case, machine.tokens
    assert tokens == BLOCK * case.context
    prompt = list(range(FULL * tokens + 5))
    request = make_request("first", prompt, tokens)
    machine.scheduler.on_new_request(request)
    assert machine.own.allocate_slots(request, len(prompt)) is not None
    (table,) = machine.own.get_block_ids("first")
    assert len(table) == FULL + 1
    machine.compute(table)
    schedule = FakeSchedulerOutput()
    schedule.new(request, len(prompt), table)
    machine.step(schedule)
    request.num_computed_tokens = len(prompt)
    machine.scheduler.request_finished_all_groups(request, [])
    machine.settle()
    machine.own.free(request)
    assert machine.own.reset_prefix_cache()
    for rank in range(case.ranks):
        for layer in "ab":
            machine.bytes_of(rank, layer)[:] = 0
    again = make_request("again", prompt, tokens)
    held = FULL // case.factor * case.factor * tokens
    assert machine.scheduler.get_num_new_matched_tokens(again, 0) == (held, False)
    assert machine.own.allocate_slots(again, len(prompt) - held, num_external_computed_tokens=held) is not None
    (table,) = machine.own.get_block_ids("again")
    machine.scheduler.update_state_after_alloc(again, FakeBlocks((table,)), held)
    machine.settle()
    for rank in range(case.ranks):
        for layer in "ab":
            memory = machine.bytes_of(rank, layer)
            for block in range(FULL):
                assert (memory[table[block]] == machine.page(rank, layer, block)).all(), (rank, layer, block)
                other = (rank + 1) % case.context + rank // case.context * case.context
                assert (memory[table[block]] != machine.page(other, layer, block)).any(), "it has other tokens"
            others = [block for block in range(BLOCKS) if block not in table[:FULL]]
            assert not memory[others].any()


@pytest.mark.parametrize("interleave", [1, 4, 16])
def test_tokens_of_a_block_are_in_the_same_block_on_all_ranks(interleave: int) -> None:
    """The formula of vLLM's kernels for a token's slot agrees with the mapping of its connector."""
    case = Case(4, 2, interleave, heads=2)
    machine = Machine(case)
    try:
        for rank in range(case.ranks):
            context = mapping._RankContext(4, 2, 1, interleave, 2, rank)
            places = [mapping._local_to_canonical_token(index, context) for index in range(BLOCK)]
            mine = [at for at in range(machine.tokens) if at // interleave % 2 == rank % 2]
            assert places == mine
            assert [at // (2 * interleave) * interleave + at % interleave for at in mine] == list(range(BLOCK))
    finally:
        machine.close()
