"""The tier for vLLM's own tiering (``OffloadingConnector`` with ``secondary_tiers``): a whole stack.

vLLM finds the class by ``{"type": "KVTieringTier", "module_path": "tiering.engines.vllm_tier"}``, or by
``{"type": "kv_tiering"}`` once its plugin, :func:`register`, was loaded. Only ``tier.py`` imports vLLM.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from typing import Any

from tiering.config.inline import TIER_CLASS, TIER_MODULE, TIER_TYPE
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
        factory.register_tier(TIER_TYPE, TIER_MODULE, TIER_CLASS)


def __getattr__(name: str) -> Any:
    """Return ``KVTieringTier``.

    Only this function imports vLLM. The modules that it does not load work without vLLM.
    """
    if name == TIER_CLASS:
        note_files(sys._getframe(1))
        return getattr(importlib.import_module("tiering.engines.vllm_tier.tier"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
