"""The geometry read from vLLM's parallelism: replica number, and blocks under context parallelism."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tiering.engines.vllm.geometry import Geometry, cache_bytes, read_geometry, simple_cache, zeroes_early
from tiering.errors import ConfigError
from tiering.simple.scheduler import SimpleCPUOffloadScheduler

PAGE = 8192


def configuration(engine_id: str = "engine", sharded: bool = True, **parallel: Any) -> tuple[Any, Any]:
    """Return a configuration of two workers, with one group of two layers in blocks of 32 tokens."""
    settings = {"world_size": 2, "rank": 0, "data_parallel_size": 1, "data_parallel_index": 0, "data_parallel_rank": 0}
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**{**settings, **parallel}),
        cache_config=SimpleNamespace(enable_prefix_caching=True, cache_dtype="auto"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=256),
        kv_transfer_config=SimpleNamespace(engine_id=engine_id, kv_connector_extra_config={}),
        model_config=SimpleNamespace(use_mla=False, dtype="torch.float32"),
    )
    spec = SimpleNamespace(block_size=32, sliding_window=None, page_size_bytes=PAGE, dcp_sharded=sharded)
    tensors = [SimpleNamespace(size=PAGE * 10, shared_by=[name]) for name in ("a", "b")]
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=["a", "b"])
    return config, SimpleNamespace(kv_cache_groups=[group], kv_cache_tensors=tensors, num_blocks=10)


def read(config: tuple[Any, Any], hash_block_size: int = 32) -> Geometry:
    return read_geometry(*config, lambda spec: "full_attention", hash_block_size)


@pytest.mark.parametrize(
    ("config", "replica"),
    [
        (configuration(), None),
        (configuration(data_parallel_size=2, data_parallel_index=1, data_parallel_rank=1), "1"),
        # vLLM configures the replicas of a dense model as separate engines, and keeps the index and the suffix of the
        # engine id
        # id's end
        (configuration("engine_dp0"), "0"),
        (configuration("engine_dp1", data_parallel_index=1), "1"),
    ],
)
def test_data_parallel_engines_are_told_apart(config: Any, replica: Any) -> None:
    assert read(config).replica == replica


def test_a_block_has_the_tokens_of_all_ranks_that_share_a_context() -> None:
    geometry = read(configuration(decode_context_parallel_size=2), 64)
    assert geometry.engine.block_sizes == (64,)
    assert geometry.engine.groups[0].gpu_block_size == 64
    assert geometry.group_bytes == (2 * 2 * PAGE,)  # both layers on both ranks, which hold different tokens
    assert not geometry.replicated


def test_a_group_that_is_whole_on_every_rank_keeps_its_block_size_under_context_parallelism() -> None:
    assert read(configuration(sharded=False, decode_context_parallel_size=2)).engine.block_sizes == (32,)


@pytest.mark.parametrize(("latent", "copies"), [(False, 2), (True, 1)])
def test_the_engines_own_cache_is_that_of_all_workers_and_equal_copies_count_once(latent: bool, copies: int) -> None:
    _, cache = config = configuration()
    geometry = replace(read(config), replicated=latent)
    assert cache_bytes(cache, geometry) == copies * 2 * PAGE * 10


def test_the_simple_mode_refuses_context_parallelism() -> None:
    config, cache = configuration(decode_context_parallel_size=2)
    engine, simple = simple_cache(config, cache, read((config, cache), 64))
    with pytest.raises(ConfigError, match="context-parallel sizes of 2"):
        SimpleCPUOffloadScheduler(engine, simple, 1 << 20)


def states(**words: Any) -> tuple[Any, Any]:
    """Return a configuration with latent attention and one more group, which keeps states with padding."""
    config, cache = configuration()
    config.model_config.use_mla = True
    config.cache_config.mamba_ssm_cache_dtype = words.pop("ssm", "float32")
    spec = {"block_size": 32, "shapes": ((3, 4), (2, 8)), "dtypes": ("float32", "float32"), "mamba_type": "MAMBA2"}
    spec |= {"mamba_cache_mode": "align", "page_size_bytes": PAGE, "real_page_size_bytes": 112, "tp_replicated": False}
    cache.kv_cache_groups.append(SimpleNamespace(kv_cache_spec=SimpleNamespace(**spec | words), layer_names=["c"]))
    cache.kv_cache_tensors.append(SimpleNamespace(size=PAGE * 10, shared_by=["c"]))
    return config, cache


def read_states(config: tuple[Any, Any]) -> Geometry:
    return read_geometry(*config, lambda spec: "mamba" if hasattr(spec, "shapes") else "full_attention", 32)


def test_a_state_is_stored_without_its_padding_and_by_every_rank_unless_all_hold_the_same() -> None:
    geometry = read_states(states())
    assert (geometry.replicated, geometry.group_bytes) == (False, (2 * 2 * PAGE, 2 * 112))
    whole = read_states(states(tp_replicated=True))
    assert (whole.replicated, whole.group_bytes) == (True, (2 * PAGE, 112))


@pytest.mark.parametrize(
    "change",
    [
        {"shapes": ((4, 3), (2, 8))},
        {"dtypes": ("float32", "bfloat16")},
        {"mamba_type": "GDN_ATTN"},
        {"mamba_cache_mode": "all"},
        {"ssm": "float16"},
    ],
)
def test_states_of_another_form_are_in_another_namespace(change: dict[str, Any]) -> None:
    plain, other = read_states(states()).group_texts, read_states(states(**change)).group_texts
    assert plain[0] == other[0] == read(configuration()).group_texts[0]
    assert plain[1] != other[1]


def test_the_second_runner_writes_early_where_it_copies_states() -> None:
    runner = SimpleNamespace(use_v2_model_runner=True)
    assert zeroes_early(runner, states()[1])
    assert not zeroes_early(runner, configuration()[1])
    assert not zeroes_early(SimpleNamespace(use_v2_model_runner=False), states()[1])
