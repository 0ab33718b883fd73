"""Configurations that the connector refuses at the start, and its messages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tiering.engines.vllm.geometry import check_supported
from tiering.engines.vllm.identity import hash_seed
from tiering.engines.vllm.lora import without_persistent
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


def check(config: tuple[Any, Any], reports_requests: bool = True) -> None:
    check_supported(*config, lambda spec: spec.kind, reports_requests)


def test_what_is_supported_passes() -> None:
    check(configuration())
    check(configuration(groups=2))
    check(configuration("sliding_window"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (configuration(nnodes=2), "keep an engine's workers on one host"),
        (configuration(pipeline_parallel_size=2), "pipeline parallelism is not supported"),
        (configuration(prefill_context_parallel_size=2), "prefill context parallelism"),
        (configuration(distributed_executor_backend="external_launcher"), "use mp"),
        (configuration("mamba"), "state-space group keeps one state"),
        (configuration("cross_attention"), "only full-attention and sliding-window"),
        (configuration(role="kv_consumer"), "kv_both"),
        (configuration(groups=0), "no KV cache"),
    ],
)
def test_what_would_not_work_is_refused(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(config)


def test_latent_attention_is_refused_where_vllms_kernels_cannot_start_from_a_prefix() -> None:
    config, cache = configuration()
    config.device_config, config.model_config = SimpleNamespace(device_type="cpu"), SimpleNamespace(use_mla=True)
    config.cache_config = SimpleNamespace(enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="latent attention"):
        check((config, cache))
    config.device_config.device_type = "cuda"
    check((config, cache))


def test_several_groups_need_a_vllm_that_can_be_told_of_failed_requests() -> None:
    with pytest.raises(ConfigError, match=r"0\.30 or newer"):
        check(configuration(groups=2), reports_requests=False)


def test_hash_seeds_that_change_with_the_process_are_known_as_random() -> None:
    assert hash_seed("sha256", None, "fixed") == "fixed"
    assert hash_seed("xxhash", None, "fixed") == "random"
    assert hash_seed("xxhash", "7", "fixed") == hash_seed("sha256", "7", "fixed") == "PYTHONHASHSEED=7"


def test_lora_requests_use_no_tier_that_outlives_the_process() -> None:
    def tiers(params: Any) -> Any:
        without = without_persistent(params, ["memory"])
        assert without is not None
        return without["kv_tiering"]["tiers"]

    assert tiers(None) == ["memory"]
    assert tiers({"kv_tiering": {"tiers": ["s3"]}}) == []
    assert tiers({"kv_tiering": {"tiers": ["s3", "memory"]}}) == ["memory"]
