"""What we load is what vLLM has allocated: its own cache manager gives out the blocks of hits, for groups of every shape.

A block that it takes for filled and that is not loaded would be found in its prefix cache, with whatever was there before.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request

from tests.connector.fakes import FakeBlocks, FakeManager, FakeSpec
from tiering.base import EngineConfig, GPULoadStoreSpec
from tiering.connector.groups import build_groups
from tiering.connector.scheduler import OffloadingConnectorScheduler
from tiering.engines.vllm_geometry import read_geometry

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


SHAPES: dict[str, list[tuple[Any, bool]]] = {
    "full attention": [(full(16), False)],
    "a window": [(full(16), False), (window(16, 40), False)],
    "larger blocks in the window": [(full(16), False), (window(48, 100), False)],
    "larger blocks outside the window": [(full(48), False), (window(16, 20), False)],
    "retained tokens": [(full(16), False), (window(16, 17, retained=20), False)],
    "a speculative head": [(full(16), False), (full(16), True)],
    "a speculative head in a window": [(full(32), False), (window(16, 40, retained=2), True)],
}


def configuration(shape: list[tuple[Any, bool]]) -> tuple[Any, KVCacheConfig]:
    groups = [KVCacheGroupSpec([f"layer{index}"], spec, is_eagle_group=eagle) for index, (spec, eagle) in enumerate(shape)]
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


def engine_of(shape: list[tuple[Any, bool]]) -> EngineConfig:
    config, cache = configuration(shape)
    kinds = {FullAttentionSpec: "full_attention", SlidingWindowSpec: "sliding_window"}
    return read_geometry(config, cache, lambda spec: kinds[type(spec)], HASH).engine


def make_request(name: str) -> Request:
    kv_cache_utils.init_none_hash(sha256)
    hasher = kv_cache_utils.get_request_block_hasher(HASH, sha256)
    return Request(name, list(range(TOKENS)), SamplingParams(max_tokens=4), None, block_hasher=hasher)


def test_what_vllm_says_of_speculative_heads_is_read() -> None:
    engine = engine_of(SHAPES["a speculative head in a window"])
    assert [(group.is_eagle, group.retained_tokens, group.volatile_tokens) for group in engine.groups] == [
        (False, 0, 2),
        (True, 2, 5),
    ]


@pytest.mark.parametrize("name", SHAPES)
def test_every_block_that_vllm_takes_for_filled_is_loaded(name: str) -> None:
    shape = SHAPES[name]
    _, cache = configuration(shape)
    engine = engine_of(shape)
    sizes = [group.gpu_block_size for group in engine.groups]
    for limit in range(HASH, TOKENS, 8):
        own = KVCacheManager(cache, 4096, scheduler_block_size=max(sizes), hash_block_size=HASH)
        manager = FakeManager(256)
        scheduler = OffloadingConnectorScheduler(FakeSpec(engine, manager=manager))
        request = make_request("r1")
        request.kv_transfer_params = {"max_load_tokens": limit}
        for group in build_groups(FakeSpec(engine)):
            factor = group.hash_block_size_factor
            manager.hold(block_hash + group.key_suffix for block_hash in request.block_hashes[factor - 1 :: factor])
        tokens, _ = scheduler.get_num_new_matched_tokens(request, 0)
        if not tokens:
            continue
        assert tokens <= limit
        blocks = own.allocate_slots(request, 0, num_external_computed_tokens=tokens, delay_cache_blocks=True)
        assert blocks is not None
        tables = own.get_block_ids("r1")
        scheduler.update_state_after_alloc(request, FakeBlocks(tables), tokens)
        ((_, (_, destination)),) = scheduler._loads.take()[0].values()
        assert isinstance(destination, GPULoadStoreSpec)
        filled = set(destination.block_ids.tolist())
        for table, size in zip(tables, sizes, strict=True):
            given = {block for block in table[: -(-tokens // size)] if block}
            assert given, (name, limit)
            assert given <= filled, (name, limit, tokens)
            filled -= given
        assert not filled
