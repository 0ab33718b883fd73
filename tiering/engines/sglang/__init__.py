"""The storage backend for SGLang's HiCache (``--hicache-storage-backend dynamic``): a whole stack.

SGLang finds the class by ``module_path`` and ``class_name`` in its dictionary. Only ``backend.py`` imports SGLang.
"""

from __future__ import annotations

import importlib
from typing import Any

from tiering.config.inline import SGLANG_CLASS

__all__ = ["KVTieringStorage"]


def __getattr__(name: str) -> Any:
    """Return ``KVTieringStorage``.

    Only this function imports SGLang. The modules that it does not load work without SGLang.
    """
    if name == SGLANG_CLASS:
        return getattr(importlib.import_module("tiering.engines.sglang.backend"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
