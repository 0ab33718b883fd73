"""The identity of the model for blocks that come from rows of vLLM's own CPU tier.

The rows have another layout than those of this project, so their blocks have a namespace of their own. Nothing here
imports vLLM before a function is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tiering.api.namespace import KVLayout, ModelIdentity
from tiering.engines.vllm.built import settings_mark
from tiering.engines.vllm.geometry import Geometry
from tiering.engines.vllm.identification import Identification
from tiering.errors import ConfigError, PermanentStoreError


@dataclass(frozen=True, slots=True)
class Identified:
    """The identity of a model in vLLM's rows, and the identification of its weights."""

    model: ModelIdentity
    """Identity of the model without its weights."""
    identification: Identification | None
    """Identification of the weights, not begun; None: blocks must not outlive the process."""
    reason: str
    """The reason for None; empty otherwise."""
    prefix_groups: frozenset[int]
    """The KV-cache groups with full attention."""
    replica: str | None
    """The data-parallel rank; None without data parallelism."""

    def __call__(self) -> ModelIdentity:
        """Return the identity of the model, weights included, for tiers that outlive the process.

        Raises:
            StoreError: the weights are not identified yet, or cannot be.
        """
        if self.identification is None:
            raise PermanentStoreError(f"{self.reason}; no tier that outlives the process is used")
        return self.identification()


def unidentified(engine_id: str, facts: Sequence[str], reason: str) -> Identified:
    """Return the identity of an unknown model, which is unique to this engine.

    Args:
        engine_id: name of the engine.
        facts: what the content of a row depends on.
        reason: the reason why nothing is known.
    """
    model = ModelIdentity("unknown", f"engine {engine_id}", "unknown", "; ".join(facts))
    return Identified(model, None, reason, frozenset(), None)


def identify(vllm_config: Any, kv_cache_config: Any, geometry: Geometry, model: ModelIdentity, rows: str) -> Identified:
    """Return the identity of a model whose blocks lie in vLLM's rows.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: vLLM's KV-cache configuration.
        geometry: shape of the KV cache.
        model: identity of the model for this project's own rows.
        rows: description of vLLM's rows.

    Raises:
        ConfigError: the model's layout is no :class:`KVLayout`.
    """
    if not isinstance(model.layout, KVLayout):
        raise ConfigError("the layout of the KV cache is not known")
    model = replace(model, layout=replace(model.layout, memory_order=f"{model.layout.memory_order}; {rows}"))
    identification, reason = None, ""
    if getattr(vllm_config, "lora_config", None) is not None:
        reason = "LoRA adapters are on, and vLLM's keys name an adapter, but not its content"
    else:
        identification = Identification(model, vllm_config, [settings_mark(model)])
    full = [number for number, group in enumerate(geometry.engine.groups) if _is_full(group)]
    return Identified(model, identification, reason, frozenset(full), geometry.replica)


def _is_full(group: Any) -> bool:
    return group.sliding_window is None and group.kind != "mamba"
