"""The refusal of configurations of vLLM that cannot work.

Nothing here imports vLLM; its objects are read by attribute.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import Any

from tiering.api.engine import EngineConfig
from tiering.connector.groups import KINDS, GroupKind, offload_groups, tail_unit
from tiering.engines.vllm.geometry import first_spec
from tiering.engines.vllm.identity import batch_invariant
from tiering.engines.vllm.kept_groups import is_skipped, layer_specs
from tiering.errors import ConfigError

_REFUSED_KINDS = {
    "cross_attention": "its KV belongs to the encoder's input instead of tokens",
    "unknown": "its kind is not known",
}
_NOT_INVARIANT = {"FLASHINFER", "TRITON_MLA"}
"""Attention backends of vLLM whose results depend on which part of a prompt was computed earlier."""


def check_supported(
    vllm_config: Any,
    kv_cache_config: Any,
    kind_of: Callable[[Any], str],
    reports_requests: bool,
    hands_over_states: bool = False,
) -> None:
    """Refuse configurations that cannot work, before anything is opened.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: vLLM's KV-cache configuration.
        kind_of: vLLM's function that returns the kind of a KV-cache spec.
        reports_requests: True if this vLLM accepts reports of requests with failed loads, which models with several
            KV-cache groups need.
        hands_over_states: True if this vLLM names the blocks with the states that its prefix cache keeps; default:
            False.

    Raises:
        ConfigError: the configuration is unsupported; the message says what to change.
    """
    check_role(vllm_config.kv_transfer_config)
    check_parallel(vllm_config.parallel_config)
    _check_kernels(vllm_config)
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        raise ConfigError("the model has no KV cache: there is nothing to offload; run it without this connector")
    if all(is_skipped(group, kind_of) for group in groups):
        raise ConfigError(
            f"the blocks of the model's KV cache ({kind_of(groups[0].kv_cache_spec)}) have no hashes, so none can be "
            "looked up; run the model without this connector"
        )
    _check_causal(vllm_config, groups)
    for index, group in enumerate(groups):
        kind = kind_of(group.kv_cache_spec)
        name = f"KV-cache group {index} ({', '.join([kind, *group.layer_names[:1]])}, ...)"
        if getattr(group, "host_resident", False):
            raise ConfigError(
                f"{name} lives in host memory, and a hit needs its blocks too; run the model without this connector"
            )
        if is_skipped(group, kind_of):
            continue
        if kind in _REFUSED_KINDS:
            raise ConfigError(f"{name}: {_REFUSED_KINDS[kind]}; run the model without this connector")
        if kind == "mamba":
            _check_states(vllm_config, group, name)
            if not hands_over_states:
                raise ConfigError(f"{name}: this vLLM does not hand states over to connectors; use vLLM 0.32 or newer")
        if getattr(first_spec(group.kv_cache_spec), "rswa_window", None) is not None:
            raise ConfigError(
                f"KV-cache group {index} (reference sliding window): a running request frees blocks in its middle, so "
                "generated tokens are computed from fewer tokens than the same text in a prompt; "
                "run the model without this connector"
            )
    if len(groups) > 1 and not reports_requests:
        raise ConfigError(
            f"the model has {len(groups)} KV-cache groups, and this vLLM cannot handle failed loads of such models; "
            "use vLLM 0.30 or newer"
        )


def _check_kernels(vllm_config: Any) -> None:
    """Check that vLLM's kernels compute the same from a prefix of earlier steps as without one.

    Where they do not, vLLM turns its own prefix cache off, and goes on asking connectors.

    Args:
        vllm_config: vLLM's configuration.

    Raises:
        ConfigError: they do not.
    """
    if getattr(getattr(vllm_config, "device_config", None), "device_type", None) == "cpu" and not (
        vllm_config.cache_config.enable_prefix_caching or vllm_config.scheduler_config.enable_chunked_prefill
    ):
        # vLLM has turned both off, or else the user. Chunks are as wrong as prefixes.
        if getattr(getattr(vllm_config, "model_config", None), "use_mla", False):
            raise ConfigError(
                "vLLM's CPU kernels for latent attention (MLA) compute wrong results from any KV of an earlier step, "
                "unless they use AMX (vLLM turns its own prefix caching off for them, and chunked prefill); run the "
                "model without this connector, or with AMX leave --no-enable-chunked-prefill out"
            )
        if platform.machine().startswith("riscv"):
            raise ConfigError(
                "vLLM's kernels for RISC-V start from no KV of an earlier step (vLLM turns its own prefix caching off "
                "for them); run the model without this connector"
            )
    if not batch_invariant():
        return
    layers = getattr(getattr(vllm_config, "compilation_config", None), "static_forward_context", {}).values()
    backends = {layer.attn_backend.get_name() for layer in layers if hasattr(layer, "attn_backend")}
    if chosen := getattr(getattr(vllm_config, "attention_config", None), "backend", None):
        backends.add(chosen.name)  # the scheduler's process may have no layers
    if found := backends & _NOT_INVARIANT:
        raise ConfigError(
            f"VLLM_BATCH_INVARIANT: with the attention backend {min(found)}, results depend on which part of a prompt "
            "was computed earlier (vLLM turns its own prefix caching off for it); choose another --attention-backend, "
            "or run the model without this connector"
        )


def _check_causal(vllm_config: Any, groups: Sequence[Any]) -> None:
    """Check that the rest of a prompt can be computed from the KV of its beginning.

    Where vLLM knows that it does not, vLLM turns its own prefix cache off, and goes on asking connectors.

    Args:
        vllm_config: vLLM's configuration.
        groups: vLLM's KV-cache groups.

    Raises:
        ConfigError: it gives another result.
    """
    if any(getattr(spec, "non_causal", False) for group in groups for spec in layer_specs(group.kv_cache_spec)):
        raise ConfigError(
            "the model's attention is not causal: the KV of a prompt's beginning depends on its end, so no other "
            "prompt can use it (vLLM turns its own prefix caching off); run the model without this connector"
        )
    model = getattr(vllm_config, "model_config", None)
    pools = getattr(model, "runner_type", None) == "pooling"
    if pools and not getattr(model, "is_prefix_caching_supported", True):
        raise ConfigError(
            "the model's pooling needs the result of every token of a prompt, and loaded KV gives none (vLLM turns its "
            "own prefix caching off for it, as for MEAN and CLS); run the model without this connector"
        )


def _check_states(vllm_config: Any, group: Any, name: str) -> None:
    """Check that vLLM keeps states at the borders of blocks, and keeps them whole.

    Raises:
        ConfigError: it does not.
    """
    mode = str(getattr(first_spec(group.kv_cache_spec), "mamba_cache_mode", "none"))
    if mode == "none":
        raise ConfigError(f"{name}: vLLM keeps no states without its own prefix cache; set --enable-prefix-caching")
    if mode != "align":
        raise ConfigError(f"{name}: --mamba-cache-mode {mode} is not supported; set --mamba-cache-mode align")
    if getattr(vllm_config, "speculative_config", None) is not None:
        raise ConfigError(
            f"{name}: with drafts, vLLM completes states after sampling, so models with states are not supported "
            "together with speculative decoding; turn one of the two off"
        )
    if getattr(vllm_config.cache_config, "use_replayssm", False):
        raise ConfigError(f"{name}: ReplaySSM does not keep whole states; turn use_replayssm off")


def lost_states(engine: EngineConfig, *, stores_tails: bool) -> str | None:
    """Return a warning if vLLM keeps states inside of blocks that are not stored; None otherwise.

    Args:
        engine: the engine's configuration.
        stores_tails: True if states inside of blocks are stored where the groups allow it.
    """
    if stores_tails and tail_unit(offload_groups(engine.groups, engine.hash_block_size), engine):
        return None
    for group, size in zip(engine.groups, engine.block_sizes, strict=True):
        if KINDS.get(group.kind) is GroupKind.STATE and engine.hash_block_size < size:
            return (
                f"vLLM keeps states at multiples of {engine.hash_block_size} tokens, and only those at the end of a "
                f"block of {size} tokens are stored: many prompts get a shorter hit from the tiers, or none; "
                "leave --prefix-match-unit out"
            )
    return None


def check_role(transfer: Any) -> None:
    """Check that the connector may both load and store.

    Raises:
        ConfigError: the role is not "kv_both".
    """
    if transfer.kv_role != "kv_both":
        raise ConfigError(
            f'kv_role: {transfer.kv_role!r} is not supported; a cache both loads and stores: set "kv_both"'
        )


def check_parallel(parallel: Any) -> None:
    """Check that the workers of an engine can share one CPU tier.

    Args:
        parallel: vLLM's configuration of parallelism.

    Raises:
        ConfigError: they cannot; the message says what to change.
    """
    if getattr(parallel, "nnodes", 1) > 1:
        raise ConfigError(
            f"the engine spans {parallel.nnodes} hosts, but the CPU tier is shared memory of one host: "
            "keep an engine's workers on one host"
        )
    if parallel.distributed_executor_backend == "external_launcher":
        raise ConfigError(
            "the external_launcher executor has a scheduler per rank, which cannot share one CPU tier; use mp"
        )
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise ConfigError("prefill context parallelism is not supported; set prefill_context_parallel_size to 1")


def check_one_stage(parallel: Any) -> None:
    """Check that there is one pipeline stage, as mode simple needs it.

    Args:
        parallel: vLLM's configuration of parallelism.

    Raises:
        ConfigError: there are several.
    """
    if parallel.pipeline_parallel_size > 1:
        raise ConfigError(
            "mode simple does not support pipeline parallelism: the memory of a worker is divided by its own layers, "
            "of which each stage has others; use the tiers (leave mode out), or tensor parallelism"
        )


def check_stages(vllm_config: Any) -> None:
    """Check that pipeline stages, if there are several, have KV that the scheduler can follow.

    Args:
        vllm_config: vLLM's configuration.

    Raises:
        ConfigError: they have not.
    """
    several = int(getattr(vllm_config.parallel_config, "pipeline_parallel_size", 1)) > 1
    if several and getattr(vllm_config, "speculative_config", None) is not None:
        raise ConfigError(
            "pipeline parallelism together with speculative decoding is not supported: vLLM's scheduler sees the KV of "
            "the first stage only, and the drafts are computed on the last one; turn one of the two off"
        )
