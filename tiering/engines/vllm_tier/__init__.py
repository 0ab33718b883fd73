"""The tier for vLLM's own tiering (``OffloadingConnector`` with ``secondary_tiers``): a whole stack.

vLLM finds the class by ``{"type": "KVTieringTier", "module_path": "tiering.engines.vllm_tier"}``, or by
``{"type": "kv_tiering"}`` once its plugin, :func:`register`, was loaded. Only ``tier.py`` imports vLLM.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from typing import Any

from tiering.config.inline import TIER, TIER_TYPE
from tiering.engines import class_on_demand
from tiering.engines.vllm.identification import note_files

__all__ = ["KVTieringTier", "register"]


def register() -> None:
    """Enter the tier in vLLM's registry of tiers; vLLM calls this plugin in every process that it starts.

    A vLLM without tiers of its own is left as it is. The model's files are noted here, before vLLM reads them.
    """
    try:
        factory = importlib.import_module("vllm.v1.kv_offload.tiering.factory").SecondaryTierFactory
    except ImportError:
        return
    with suppress(Exception):  # vLLM has loaded the plugin for everybody, and must start
        note_files(sys._getframe(1))
    if TIER_TYPE not in factory._registry:
        factory.register_tier(TIER_TYPE, TIER.module, TIER.name)


def __getattr__(name: str) -> Any:
    """Return ``KVTieringTier``, and note the model's files, before vLLM reads them."""
    if name == TIER.name:
        note_files(sys._getframe(1))
    return class_on_demand(__name__, TIER.name, "tier")(name)
