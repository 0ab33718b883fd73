"""The adapter for vLLM.

``TieringConnector`` is the class that vLLM's ``--kv-transfer-config`` names, together with this package.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["TieringConnector"]


def __getattr__(name: str) -> Any:
    """Return ``TieringConnector``.

    Only this function imports vLLM. The modules that it does not load work without vLLM.
    """
    if name == "TieringConnector":
        return getattr(importlib.import_module("tiering.engines.vllm.connector"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
