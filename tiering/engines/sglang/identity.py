"""The identity of SGLang's model, and of the rank whose pages are stored.

SGLang's page hashes cover tokens, cache salts and multimodal content, and nothing else. It gives a storage backend the
model's name, which weights change under. The stack's ``revision`` names the weights therefore. Nothing here imports
SGLang; its objects are read by attribute.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tiering.api.namespace import ModelIdentity
from tiering.engines.vllm.weights import plain
from tiering.errors import ConfigError

SETTINGS = (
    *("dtype", "quantization", "kv_cache_dtype", "json_model_override_args", "model_impl", "context_length"),
    *("load_format", "custom_weight_loader", "rl_quant_profile", "modelopt_quant", "mamba_ssm_dtype"),
    *("attention_backend", "prefill_attention_backend", "decode_attention_backend", "mm_process_config"),
    *("enable_dsa_cache_layer_split", "qsa_indexer_dtype", "enable_deepseek_v4_fp4_indexer"),
    *("model_loader_extra_config", "decrypted_config_file", "decrypted_draft_config_file", "uno_lora_path"),
    *("kt_method", "kt_weight_path", "dllm_algorithm", "dllm_algorithm_config", "speculative_draft_load_format"),
    *("speculative_algorithm", "speculative_draft_model_path", "speculative_draft_model_revision"),
    *("speculative_draft_model_quantization", "speculative_draft_kv_cache_dtype"),
)
"""SGLang's settings that change KV or its bytes; engines share pages if all of them are equal."""

WEIGHTS = frozenset({"model_path", "load_format", "weight_version"})
"""Settings that SGLang overrides when weights are replaced while it runs."""

_COMMIT = re.compile(r"[0-9a-f]{40}")


def weights_of(revision: str | None, leaf: Callable[[str], Any]) -> str:
    """Return what names the weights: the stack's revision, or the commit that SGLang loads.

    Args:
        revision: the stack's ``revision``.
        leaf: returns one of SGLang's settings.

    Raises:
        ConfigError: neither is given.
    """
    if revision is not None:
        return revision
    commit = leaf("revision")
    if isinstance(commit, str) and _COMMIT.fullmatch(commit):
        return commit
    raise ConfigError(
        "revision: missing; SGLang gives a storage backend only the model's name, and weights change under a name: "
        "write a text into the stack that you change with the weights, or start SGLang with --revision and a commit"
    )


def model_identity(
    name: str | None, weights: str, layout: Mapping[str, Any], version: str, leaf: Callable[[str], Any]
) -> ModelIdentity:
    """Return the identity of the model whose pages lie in SGLang's host pools.

    Args:
        name: SGLang's name of the model.
        weights: what names the weights.
        layout: description of the pools and of the parallelism.
        version: SGLang's version.
        leaf: returns one of SGLang's settings.

    Raises:
        ConfigError: the identity is not known.
    """
    if leaf("enable_lora") or leaf("lora_paths"):
        raise ConfigError(
            "enable_lora: SGLang's page hashes name an adapter by name and path, not by its content; "
            "serve adapters without this storage backend"
        )
    settings = {word: plain(leaf(word)) for word in SETTINGS}
    settings["engine"] = f"sglang {version}"
    if scales := leaf("quantization_param_path"):
        try:
            settings["kv_scales"] = hashlib.sha256(Path(str(scales)).read_bytes()).hexdigest()
        except OSError as error:
            raise ConfigError(f"quantization_param_path cannot be read: {error}") from error
    if settings["load_format"] == "dummy":
        settings["seed"] = plain(leaf("random_seed"))
    return ModelIdentity(
        name=name or "unnamed",
        weights=weights,
        dtype=f"{settings['dtype']}, cache {settings['kv_cache_dtype']}",
        layout=json.dumps(layout, sort_keys=True),
        overrides=settings,
    )


def parallelism(config: Any) -> Mapping[str, int]:
    """Return the sizes that change what one rank's page holds, and the rank's stage.

    Args:
        config: SGLang's configuration of a storage backend.

    Raises:
        ConfigError: a kind of parallelism is on that this backend does not know.
    """
    if getattr(config, "dcp_size", 1) > 1:
        raise ConfigError("dcp_size: decode context parallelism splits pages; SGLang allows file and Mooncake only")
    words = ("tp_size", "pp_size", "pp_rank", "attn_cp_size")
    return {word: int(getattr(config, word)) for word in words}


def rank_of(config: Any) -> str:
    """Return the rank that holds its own part of every page, as part of keys."""
    return f"tp {config.tp_rank} cp {config.attn_cp_rank}"


def replica_of(config: Any) -> str | None:
    """Return the name of this process among those of one engine; None if there is only one.

    Each process has a place of its own on media that one process owns.
    """
    ranks = (getattr(config, "dp_rank", 0), config.pp_rank, config.attn_cp_rank, config.tp_rank)
    if config.tp_size * config.pp_size * config.attn_cp_size == 1 and not ranks[0]:
        return None
    return "dp{}-pp{}-cp{}-tp{}".format(*ranks)
