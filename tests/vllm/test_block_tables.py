"""Loads go to the blocks that vLLM's own cache manager allocates for hits, for groups of every shape.

vLLM would serve an allocated block that is not loaded from its prefix cache, with stale content.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
    get_kv_cache_spec_kind,
)
from vllm.v1.request import Request, StreamingUpdate

from tests.connector.fakes import FakeBlocks, FakeManager, FakeNewRequest, FakeSchedulerOutput, FakeSpec
from tiering.api.engine import EngineConfig
from tiering.api.keys import make_offload_key
from tiering.api.transfer import GPULoadStoreSpec
from tiering.connector.groups import build_groups
from tiering.connector.scheduler import OffloadingConnectorScheduler
from tiering.engines.vllm.geometry import read_geometry
from tiering.engines.vllm.kept_groups import KeptGroups, kept_groups
from tiering.simple.cache_config import KVCacheConfig as SimpleCache
from tiering.simple.cache_config import KVCacheTensor
from tiering.simple.metadata import NOT_HELD
from tiering.simple.scheduler import SimpleCPUOffloadScheduler

HASH = 16
TOKENS = 16 * 3 * 8 + 5


def full(size: int) -> Any:
    return FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=8, dtype=torch.float32)


def window(size: int, tokens: int, retained: int = 0) -> Any:
    return SlidingWindowSpec(
        block_size=size,
        num_kv_heads=1,
        head_size=8,
        dtype=torch.float32,
        sliding_window=tokens,
        extra_retained_tokens=retained,
    )


def chunks(size: int, tokens: int) -> Any:
    return ChunkedLocalAttentionSpec(
        block_size=size, num_kv_heads=1, head_size=8, dtype=torch.float32, attention_chunk_size=tokens
    )


def ring(size: int) -> Any:
    return kv_cache_interface.CircularBufferSpec(block_size=size, num_kv_heads=1, head_size=8, dtype=torch.float32)


SHAPES: dict[str, list[tuple[Any, bool]]] = {
    "full attention": [(full(16), False)],
    "a window": [(full(16), False), (window(16, 40), False)],
    "chunked local attention": [(full(16), False), (chunks(16, 64), False)],
    "larger blocks in the window": [(full(16), False), (window(48, 100), False)],
    "larger blocks outside the window": [(full(48), False), (window(16, 20), False)],
    "retained tokens": [(full(16), False), (window(16, 17, retained=20), False)],
    "a speculative head": [(full(16), False), (full(16), True)],
    "a speculative head in a window": [(full(32), False), (window(16, 40, retained=2), True)],
}
if hasattr(kv_cache_interface, "CircularBufferSpec"):  # from vLLM 0.32
    SHAPES |= {
        "a ring": [(ring(8), False), (full(16), False)],
        "a ring between groups with unequal blocks": [(full(48), False), (ring(8), False), (window(16, 20), False)],
    }


def configuration(shape: list[tuple[Any, bool]]) -> tuple[Any, KVCacheConfig]:
    groups = [
        KVCacheGroupSpec([f"layer{index}"], spec, is_eagle_group=eagle) for index, (spec, eagle) in enumerate(shape)
    ]
    cache = KVCacheConfig(num_blocks=200, kv_cache_tensors=[], kv_cache_groups=groups)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=1, rank=0, data_parallel_size=1, data_parallel_rank=0),
        cache_config=SimpleNamespace(enable_prefix_caching=True, cache_dtype="auto"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=256),
        kv_transfer_config=SimpleNamespace(engine_id="engine", kv_connector_extra_config={}),
        model_config=SimpleNamespace(use_mla=False, dtype="torch.float32"),
        speculative_config=SimpleNamespace(num_speculative_tokens=4),
        num_prefill_lookahead_tokens=3,
    )
    return config, cache


def kind_of(spec: Any) -> str:
    return str(get_kv_cache_spec_kind(spec).value)


def engine_of(shape: list[tuple[Any, bool]]) -> EngineConfig:
    return read_geometry(*configuration(shape), kind_of, HASH).engine


def kept_of(shape: list[tuple[Any, bool]]) -> KeptGroups:
    """Return the groups of ``shape`` that are offloaded."""
    _, cache = configuration(shape)
    every = KeptGroups(range(len(cache.kv_cache_groups)), ())
    return kept_groups(cache, kind_of) or every


def make_request(name: str, tokens: list[int] | None = None, size: int = HASH) -> Request:
    kv_cache_utils.init_none_hash(sha256)
    hasher = kv_cache_utils.get_request_block_hasher(size, sha256)
    return Request(name, tokens or list(range(TOKENS)), SamplingParams(max_tokens=4), None, block_hasher=hasher)


def test_what_vllm_says_of_speculative_heads_is_read() -> None:
    engine = engine_of(SHAPES["a speculative head in a window"])
    assert [(group.is_eagle, group.retained_tokens, group.volatile_tokens) for group in engine.groups] == [
        (False, 0, 2),
        (True, 2, 5),
    ]


def test_a_head_in_the_models_own_group_makes_no_group_of_drafts() -> None:
    """As in vLLM's own connector: else each hit would lose its last block, and short prompts all of it.

    What the head may then compute from are slots that were filled for other tokens: its drafts are worse, no answer is.
    """
    config, cache = configuration([])
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    config.speculative_config = SimpleNamespace(
        method="mtp", num_speculative_tokens=1, use_eagle=lambda: True, use_eagle_block_drop=lambda: True
    )
    config.num_prefill_lookahead_tokens = 1
    cache.kv_cache_groups = kv_cache_utils.get_kv_cache_groups(config, {"layer0": full(16), "mtp_layer": full(16)})
    (marked,) = cache.kv_cache_groups
    assert marked.layer_names == ["layer0", "mtp_layer"]
    assert not marked.is_eagle_group, "vLLM finds the group of a head by its last layer, where there are several groups"
    (group,) = read_geometry(config, cache, kind_of, HASH).engine.groups
    assert (group.is_eagle, group.volatile_tokens) == (False, 0)


@pytest.mark.parametrize("within_step", [False, True], ids=["waits", "within the step"])
@pytest.mark.parametrize("per_chunk", [1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_every_block_that_vllm_takes_for_filled_is_loaded(name: str, per_chunk: int, within_step: bool) -> None:
    shape = SHAPES[name]
    _, cache = configuration(shape)
    engine = engine_of(shape)
    sizes, extra = [group.gpu_block_size for group in engine.groups], {"blocks_per_chunk": per_chunk}
    kept = kept_of(shape)
    for limit in range(HASH, TOKENS, 28):
        own = KVCacheManager(cache, 4096, scheduler_block_size=max(sizes), hash_block_size=HASH)
        manager = FakeManager(256)
        scheduler = OffloadingConnectorScheduler(FakeSpec(engine, extra, manager))
        loads = scheduler.loads.step_loads
        loads.measure(1_000_000, 1.0)
        loads.is_possible = loads.is_possible and within_step
        request = make_request("r1")
        request.kv_transfer_params = {"max_load_tokens": limit}
        for group in build_groups(FakeSpec(engine, extra)):
            factor = group.hash_block_size_factor
            manager.hold(block_hash + group.key_suffix for block_hash in request.block_hashes[factor - 1 :: factor])
        tokens, waits = scheduler.get_num_new_matched_tokens(request, 0)
        if not tokens:
            continue
        assert tokens <= limit
        assert waits is not loads.is_possible
        blocks = own.allocate_slots(
            request,
            0 if waits else request.num_tokens - tokens,
            num_external_computed_tokens=tokens,
            delay_cache_blocks=waits,
        )
        assert blocks is not None
        blocks = kept.blocks(FakeBlocks(own.get_block_ids("r1")))
        tables = blocks.get_block_ids()
        scheduler.update_state_after_alloc(request, blocks, tokens)
        waiting, _, within = scheduler.loads.take()
        ((_, (_, destination)),) = (waiting if waits else within).values()
        assert isinstance(destination, GPULoadStoreSpec)
        filled = set(destination.block_ids.tolist())
        for table, size in zip(tables, sizes, strict=True):
            given = {block for block in table[: -(-tokens // size)] if block}
            assert given or (name == "chunked local attention" and tokens % 64 == 0), (name, limit)
            assert given <= filled, (name, limit, tokens)
            filled -= given
        assert not filled


@pytest.mark.parametrize(("name", "tokens"), [("full attention", 96), ("a ring", 80)])
def test_only_beside_a_ring_a_hit_leaves_a_block_to_compute(name: str, tokens: int) -> None:
    """The engine would compute the last token again, with a ring that lacks the tokens before it."""
    if name not in SHAPES:
        pytest.skip("this vLLM has no rings")
    engine, manager = engine_of(SHAPES[name]), FakeManager(256)
    scheduler = OffloadingConnectorScheduler(FakeSpec(engine, {}, manager))
    request = make_request("r1", list(range(96)))
    (group,) = build_groups(FakeSpec(engine, {}))
    manager.hold(block_hash + group.key_suffix for block_hash in request.block_hashes)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (tokens, True)


def test_a_streaming_session_is_stored_under_the_names_that_vllm_gives_it() -> None:
    """vLLM's own update of a streaming request: the prompt grows in place, without the last sampled token."""
    shape = SHAPES["full attention"]
    _, cache = configuration(shape)
    manager = FakeManager(256)
    scheduler = OffloadingConnectorScheduler(FakeSpec(engine_of(shape), {"offload_prompt_only": False}, manager))
    own = KVCacheManager(cache, 4096, scheduler_block_size=HASH, hash_block_size=HASH)
    request = make_request("r1", list(range(2 * HASH - 1)))
    request.resumable = True

    def run(tokens: int) -> None:
        own.allocate_slots(request, tokens)
        step = FakeSchedulerOutput()
        step.scheduled_new_reqs.append(FakeNewRequest("r1", own.get_block_ids("r1"), request.num_computed_tokens))
        step.num_scheduled_tokens["r1"] = tokens
        scheduler.build_connector_meta(step)
        request.num_computed_tokens += tokens

    scheduler.on_new_request(request)
    run(request.num_tokens)
    request.append_output_token_ids(7)
    scheduler.states["r1"].extend_keys(build_groups(FakeSpec(engine_of(shape))))
    chunk = make_request("r1", list(range(500, 500 + 2 * HASH + 1)))
    chunk.resumable = True
    update = StreamingUpdate.from_request(chunk)
    engine = SimpleNamespace(hash_block_size=HASH, num_waiting_for_streaming_input=1, log_stats=False)
    Scheduler._update_request_as_session(engine, request, update)
    assert request.num_tokens == request.num_prompt_tokens == 4 * HASH
    run(request.num_tokens - request.num_computed_tokens)
    scheduler.request_finished(request, [])
    assert [key for keys in manager.offered for key in keys] == [
        make_offload_key(name, 0) for name in request.block_hashes
    ]
    assert len(request.block_hashes) == 4


@pytest.mark.parametrize("name", [name for name in SHAPES if "ring" not in name])
def test_mode_simple_has_all_blocks_that_vllm_takes_for_filled(name: str) -> None:
    """A step is ended by a block of its loads that the CPU pool lacks."""
    shape = SHAPES[name]
    _, cache = configuration(shape)
    engine = engine_of(shape)
    tensors = tuple(KVCacheTensor(200 * HASH, group.layer_names) for group in engine.groups)
    for limit in range(HASH, TOKENS, 28):
        own = KVCacheManager(
            cache,
            4096,
            scheduler_block_size=max(group.gpu_block_size for group in engine.groups),
            hash_block_size=HASH,
        )
        half = SimpleCPUOffloadScheduler(engine, SimpleCache(200, tensors, engine.groups), 1 << 20)
        half.bind_gpu_block_pool(own.block_pool)
        half.step_loads.measure(1_000_000, 1.0)
        request = make_request("r1")
        request.kv_transfer_params = {"max_load_tokens": limit}
        half.on_new_request(request)
        state = half.states["r1"]
        state.extend_keys(half.groups)
        names = {key for keys in state.keys for key in keys}
        half.cpu_block_pool.publish(blocks := half.cpu_block_pool.get_new_blocks(list(names)))
        half.cpu_block_pool.free_blocks(blocks)
        tokens, waits = half.get_num_new_matched_tokens(request, 0)
        if not tokens:
            continue
        assert waits is not half.step_loads.is_possible
        left = 0 if waits else request.num_tokens - tokens
        assert own.allocate_slots(request, left, num_external_computed_tokens=tokens, delay_cache_blocks=waits)
        tables = own.get_block_ids("r1")
        half.update_state_after_alloc(request, FakeBlocks(tables), tokens)
        meta = half.build_connector_meta(FakeSchedulerOutput())
        filled = meta.load_gpu_blocks if meta.within_step is None else meta.within_step[1]
        given = [
            block
            for table, group in zip(tables, engine.groups, strict=True)
            for block in table[: -(-tokens // group.gpu_block_size)]
            if block
        ]
        assert sorted(filled) == sorted(given), (limit, tokens)
        assert NOT_HELD not in meta.load_cpu_blocks
