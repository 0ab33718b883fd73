"""Configurations that the connector refuses at the start, and its messages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tiering.api.engine import EngineConfig, KVCacheGroup
from tiering.engines.vllm.identity import hash_seed
from tiering.engines.vllm.refusals import check_stages, check_supported, lost_states
from tiering.errors import ConfigError


def configuration(
    kind: str = "full_attention", groups: int = 1, role: str = "kv_both", **parallel: Any
) -> tuple[Any, Any]:
    settings = {"nnodes": 1, "distributed_executor_backend": "mp", "pipeline_parallel_size": 1, **parallel}
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(kind=kind), layer_names=["layer.0"])
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**settings), kv_transfer_config=SimpleNamespace(kv_role=role)
    )
    return config, SimpleNamespace(kv_cache_groups=[group] * groups)


def drafting(**parallel: Any) -> Any:
    config, _ = configuration(**parallel)
    config.speculative_config = SimpleNamespace()
    return config


def check(config: tuple[Any, Any], reports_requests: bool = True) -> None:
    check_supported(*config, lambda spec: spec.kind, reports_requests)


def test_what_is_supported_passes_and_drafts_beside_stages_do_not() -> None:
    check(configuration())
    check(configuration(groups=2))
    check(configuration("sliding_window"))
    check(configuration(pipeline_parallel_size=2))
    check_stages(drafting())
    check_stages(configuration(pipeline_parallel_size=2)[0])
    with pytest.raises(ConfigError, match="drafts are computed on the last one; turn one of the two off"):
        check_stages(drafting(pipeline_parallel_size=2))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (configuration(nnodes=2), "keep an engine's workers on one host"),
        (configuration(prefill_context_parallel_size=2), "prefill context parallelism"),
        (configuration(distributed_executor_backend="external_launcher"), "use mp"),
        (
            configuration("cross_attention"),
            r"\(cross_attention, layer\.0, \.\.\.\): its KV belongs to the encoder's input",
        ),
        (configuration("encoder_only_attention"), r"KV cache \(encoder_only_attention\) have no hashes"),
        (configuration("unknown"), "its kind is not known"),
        (configuration(role="kv_consumer"), "kv_both"),
        (configuration(groups=0), "no KV cache"),
    ],
)
def test_what_would_not_work_is_refused(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(config)


def states(mode: str = "align", **cache: Any) -> tuple[Any, Any]:
    config, found = configuration("mamba")
    found.kv_cache_groups[0].kv_cache_spec.mamba_cache_mode = mode
    config.cache_config = SimpleNamespace(**cache)
    return config, found


def test_states_are_refused_unless_vllm_keeps_them_at_the_borders_of_blocks() -> None:
    def check_states(config: tuple[Any, Any], hands_over: bool = True) -> None:
        check_supported(*config, lambda spec: spec.kind, True, hands_over)

    check_states(states())
    with pytest.raises(ConfigError, match=r"KV-cache group 0 \(mamba, layer.0, .*set --enable-prefix-caching"):
        check_states(states("none"))
    with pytest.raises(ConfigError, match="--mamba-cache-mode all is not supported; set --mamba-cache-mode align"):
        check_states(states("all"))
    with pytest.raises(ConfigError, match="ReplaySSM"):
        check_states(states(use_replayssm=True))
    with pytest.raises(ConfigError, match=r"use vLLM 0\.32 or newer"):
        check_states(states(), hands_over=False)
    drafting = states()
    drafting[0].speculative_config = SimpleNamespace()
    with pytest.raises(ConfigError, match="speculative decoding"):
        check_states(drafting)


def on_a_cpu(*, latent: bool = False, prefixes: bool = False, chunks: bool = False) -> tuple[Any, Any]:
    config, cache = configuration()
    config.device_config, config.model_config = SimpleNamespace(device_type="cpu"), SimpleNamespace(use_mla=latent)
    config.cache_config = SimpleNamespace(enable_prefix_caching=prefixes)
    config.scheduler_config = SimpleNamespace(enable_chunked_prefill=chunks)
    return config, cache


def test_kernels_of_a_cpu_that_cannot_start_from_a_prefix_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM turns both off for them; the user of other kernels, such as those with AMX, may turn one off."""
    with pytest.raises(ConfigError, match="latent attention"):
        check(on_a_cpu(latent=True))
    check(on_a_cpu(latent=True, prefixes=True))
    check(on_a_cpu(latent=True, chunks=True))
    check(on_a_cpu())
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(ConfigError, match="RISC-V"):
        check(on_a_cpu())
    config, cache = on_a_cpu(latent=True)
    config.device_config.device_type = "cuda"
    check((config, cache))


@pytest.mark.parametrize("layers_are_here", [True, False])
def test_kernels_that_depend_on_a_prefix_are_refused_where_results_must_not(
    layers_are_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, cache = configuration()
    layers = {"layer.0": SimpleNamespace(attn_backend=SimpleNamespace(get_name=lambda: "TRITON_MLA")), "moe": object()}
    if layers_are_here:
        config.compilation_config = SimpleNamespace(static_forward_context=layers)
    else:
        config.attention_config = SimpleNamespace(backend=SimpleNamespace(name="TRITON_MLA"))
    check((config, cache))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    check((config, cache))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    check(configuration())
    with pytest.raises(ConfigError, match=r"attention backend TRITON_MLA.* choose another --attention-backend"):
        check((config, cache))


def test_models_whose_prompts_beginning_depends_on_its_end_are_refused() -> None:
    """In a group whose layers differ, one layer without causality suffices."""
    config, cache = configuration()
    layers = {"layer.0": SimpleNamespace(non_causal=False), "layer.1": SimpleNamespace(non_causal=True)}
    cache.kv_cache_groups[0].kv_cache_spec.kv_cache_specs = layers
    with pytest.raises(ConfigError, match="attention is not causal"):
        check((config, cache))
    layers["layer.1"].non_causal = False
    check((config, cache))


@pytest.mark.parametrize(
    ("runner", "is_supported", "is_refused"),
    [("pooling", False, True), ("pooling", True, False), ("generate", False, False)],
)
def test_pooling_over_all_tokens_is_refused(runner: str, is_supported: bool, is_refused: bool) -> None:
    config, cache = configuration()
    config.model_config = SimpleNamespace(runner_type=runner, is_prefix_caching_supported=is_supported)
    if is_refused:
        with pytest.raises(ConfigError, match="needs the result of every token"):
            check((config, cache))
    else:
        check((config, cache))


def test_several_groups_need_a_vllm_that_can_be_told_of_failed_requests() -> None:
    with pytest.raises(ConfigError, match=r"0\.30 or newer"):
        check(configuration(groups=2), reports_requests=False)


@pytest.mark.parametrize(
    ("kind", "hash_block_size", "is_warned_of"),
    [("mamba", 16, True), ("mamba", 64, False), ("full_attention", 16, False)],
)
@pytest.mark.parametrize(("size", "stores_tails"), [(64, False), (128, True), (64, True)])
def test_states_inside_of_blocks_are_warned_of_where_they_are_lost(
    kind: str, hash_block_size: int, is_warned_of: bool, size: int, stores_tails: bool
) -> None:
    groups = (KVCacheGroup(("layer.0",), size), KVCacheGroup(("layer.1",), 64, None, kind))
    warning = lost_states(EngineConfig((size, 64), hash_block_size, groups), stores_tails=stores_tails)
    is_warned_of = is_warned_of and not (stores_tails and size == 64)
    assert (warning is not None and "leave --prefix-match-unit out" in warning) is is_warned_of


def test_hash_seeds_that_change_with_the_process_are_known_as_random() -> None:
    assert hash_seed("sha256", None, "fixed") == "fixed"
    assert hash_seed("xxhash", None, "fixed") == "random"
    assert hash_seed("xxhash", "7", "fixed") == hash_seed("sha256", "7", "fixed") == "PYTHONHASHSEED=7"
