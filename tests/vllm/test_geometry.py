"""The geometry read from vLLM's parallelism: replica number, and blocks under context parallelism."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tiering.api.engine import HeadShard
from tiering.api.namespace import ModelIdentity, Namespace
from tiering.engines.vllm.geometry import (
    Geometry,
    cache_bytes,
    layout_of,
    loads_may_come_first,
    read_geometry,
    simple_cache,
    zeroes_early,
)
from tiering.engines.vllm.heads import check_copies
from tiering.engines.vllm.model import _cpu
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
    assert geometry.copies == 1


def test_a_group_that_is_whole_on_every_rank_keeps_its_block_size_under_context_parallelism() -> None:
    assert read(configuration(sharded=False, decode_context_parallel_size=2)).engine.block_sizes == (32,)


@pytest.mark.parametrize(("latent", "copies"), [(False, 2), (True, 1)])
def test_the_engines_own_cache_is_that_of_all_workers_and_equal_copies_count_once(latent: bool, copies: int) -> None:
    _, cache = config = configuration()
    geometry = replace(read(config), copies=2 if latent else 1)
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
    assert (geometry.copies, geometry.group_bytes) == (1, (2 * 2 * PAGE, 2 * 112))
    whole = read_states(states(tp_replicated=True))
    assert (whole.copies, whole.group_bytes) == (2, (2 * PAGE, 112))


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


def test_loads_come_before_the_model_unless_blocks_are_zeroed_in_between() -> None:
    first, second = SimpleNamespace(use_v2_model_runner=False), SimpleNamespace(use_v2_model_runner=True)
    zeroed, left = SimpleNamespace(needs_kv_cache_zeroing=True), SimpleNamespace(needs_kv_cache_zeroing=False)
    answers = [loads_may_come_first(runner, cache) for runner in (first, second) for cache in (zeroed, left)]
    assert answers == [False, True, True, True]


# -------------------------------------------------------------------------------------- heads of all ranks in order


def namespace(ranks: int, *, canonical: bool = False, heads: int = 4, rank: int = 0, **changes: Any) -> Namespace:
    """Return the namespace of an engine with ``ranks`` workers and a model with ``heads`` KV heads."""
    config = heads_config(ranks, heads=heads, rank=rank, **changes)
    geometry = read_geometry(*config, kind_of, 32, canonical)
    layout = layout_of(geometry, config[0], "LBHNC, cpu", "seed")
    model = ModelIdentity(name="org/model", weights="a" * 40, dtype="float32", layout=layout)
    return Namespace.build(model, geometry.group_bytes)


def kind_of(spec: Any) -> str:
    return str(getattr(spec, "kind", "full_attention"))


def heads_config(ranks: int, *, heads: int = 4, rank: int = 0, **changes: Any) -> tuple[Any, Any]:
    """Return the configuration of ``ranks`` workers.

    Args:
        heads: number of the model's KV heads.
        rank: rank of this worker.
        changes: attributes of the configuration's parts, or of the spec.
    """
    parallel: dict[str, Any] = {"tensor_parallel_size": ranks, "pipeline_parallel_size": 1}
    parallel["decode_context_parallel_size"] = 1
    config, cache = configuration(world_size=ranks, rank=rank, **parallel)
    config.model_config.get_total_num_kv_heads = lambda: heads
    config.cache_config.prefix_caching_hash_algo = "sha256"
    config.speculative_config = None
    cache.kv_cache_layout = "LBHNC"
    spec = cache.kv_cache_groups[0].kv_cache_spec
    spec.num_kv_heads = max(1, heads // ranks)
    spec.page_size_bytes = PAGE * 4 // max(1, min(ranks, heads))
    for word, value in changes.items():
        for part in (config, config.parallel_config, config.model_config, cache, spec):
            if hasattr(part, word) or part is spec:
                setattr(part, word, value)
                break
    return config, cache


@pytest.mark.parametrize(
    ("ranks", "name"),
    [(1, "dede69fda601e5e03fe615d9009ab254"), (2, "9963af88f1d59f3b567cb1586732611f")],
)
def test_plain_blocks_stay_in_their_namespace_from_version_to_version(ranks: int, name: str) -> None:
    assert namespace(ranks).directory == name


def test_canonical_blocks_have_one_namespace_for_all_numbers_of_workers() -> None:
    names = {namespace(ranks, canonical=True).directory for ranks in (1, 2, 4, 8)}
    assert names == {"b9dfc1134dd09351ed4447afaa4568da"}
    assert names.isdisjoint(namespace(ranks).directory for ranks in (1, 2, 4, 8))
    assert len({namespace(ranks).directory for ranks in (1, 2, 4, 8)}) == 4


@pytest.mark.parametrize("change", [{"heads": 2}, {"kv_cache_layout": "LBNHC"}, {"dtype": "torch.float16"}])
def test_other_heads_orders_and_types_have_other_canonical_namespaces(change: dict[str, Any]) -> None:
    config = heads_config(2, **change)
    geometry, first = read_geometry(*config, kind_of, 32, True), read_geometry(*heads_config(2), kind_of, 32, True)
    assert (geometry.group_texts, geometry.heads, geometry.kv_dtype) != (first.group_texts, first.heads, first.kv_dtype)


@pytest.mark.parametrize(
    ("ranks", "rank", "shard", "copies"),
    [
        (1, 0, HeadShard(4, True, 0, 1), 1),
        (2, 1, HeadShard(2, True, 1, 2), 1),
        (4, 3, HeadShard(1, True, 3, 4), 1),
        (8, 5, HeadShard(1, True, 2, 4), 2),
    ],
)
def test_a_rank_holds_its_heads_or_shares_one_with_its_neighbours(
    ranks: int, rank: int, shard: HeadShard, copies: int
) -> None:
    geometry = read_geometry(*heads_config(ranks, rank=rank), kind_of, 32, True)
    assert (geometry.heads, geometry.copies) == (shard, copies)
    assert geometry.group_bytes == (2 * 4 * PAGE,)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"decode_context_parallel_size": 2}, "context parallelism"),
        ({"world_size": 4}, "the 4 workers are not those of tensor and pipeline parallelism alone"),
        ({"heads": 0}, "0 KV heads cannot be divided among 2 workers"),
        ({"use_mla": True}, "of the kind full_attention, which has no KV heads"),
        ({"heads": 3}, "3 KV heads cannot be divided among 2 workers"),
        ({"kv_cache_layout": "None"}, "does not name the order of heads and tokens"),
        ({"kind": "mamba"}, "of the kind mamba, which has no KV heads"),
        ({"num_kv_heads": 1}, "has 1 KV heads on a worker, the model's 4 heads give 2"),
        ({"num_head_slots": 8}, "pages in a form of their own"),
        ({"state_content_bytes": 136}, "pages in a form of their own"),
        ({"tokens_per_state": 4}, "pages in a form of their own"),
        ({"kv_quant_mode": SimpleNamespace(is_per_token_head=True)}, "pages in a form of their own"),
        ({"heads": 1, "speculative_config": object()}, "the drafts' heads may be others"),
    ],
)
def test_what_has_no_canonical_rows_is_refused_with_the_reason(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"^layout: canonical cannot be used: .*{reason}.*; set layout: plain$"):
        read_geometry(*heads_config(2, **change), kind_of, 32, True)


@pytest.mark.parametrize(("found", "refused"), [([1, 1], False), ([1, 2], True), ([], True), (None, True)])
def test_workers_with_the_same_heads_have_them_in_all_layers(found: list[int] | None, refused: bool) -> None:
    modules = [object(), *(SimpleNamespace(total_num_kv_heads=number) for number in found or [])]
    model = None if found is None else SimpleNamespace(modules=lambda: modules)
    with pytest.raises(ConfigError, match="hold copies of 1 KV head") if refused else nullcontext():
        check_copies(model, 1)


def test_a_cpu_that_packs_k_and_v_otherwise_has_another_order_and_others_keep_theirs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    builds = tmp_path / "one.so", tmp_path / "other.so"
    for build in builds:
        build.write_text(build.name)

    def order(dtype: Any, tiles: bool, machine: str = "x86_64", build: Path = builds[0], quantised: str = "") -> str:
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
        monkeypatch.setattr("platform.machine", lambda: machine)
        monkeypatch.setattr("tiering.engines.vllm.model.find_spec", lambda _: SimpleNamespace(origin=str(build)))
        return _cpu(SimpleNamespace(model_config=SimpleNamespace(dtype=dtype, quantization=quantised or None)))

    plain = torch.backends.cpu.get_cpu_capability()
    assert order(torch.bfloat16, tiles=False) == order(torch.float32, tiles=True, build=builds[1]) == plain
    assert order(torch.float32, False, quantised="fp8") == plain != order(torch.float32, True, quantised="fp8")
    arm = [order(torch.bfloat16, False, "aarch64", build) for build in builds]
    assert len({order(torch.bfloat16, True), *arm, plain}) == 4
    assert order(torch.bfloat16, False, "aarch64") == arm[0]
    with pytest.raises(ConfigError, match="library of kernels cannot be read"):
        order(torch.bfloat16, False, "aarch64", tmp_path / "none.so")
