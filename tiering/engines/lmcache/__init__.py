"""The L2 adapter for LMCache's multiprocess server (``--l2-adapter``, type ``plugin``): a whole stack.

LMCache finds the class by ``module_path`` and ``class_name`` in its dictionary. Only ``adapter.py`` imports LMCache.
"""

from __future__ import annotations

import importlib
from typing import Any

from tiering.config.inline import LMCACHE_CLASS

__all__ = ["KVTieringAdapter"]


def __getattr__(name: str) -> Any:
    """Return ``KVTieringAdapter``.

    Only this function imports LMCache. The modules that it does not load work without LMCache.
    """
    if name == LMCACHE_CLASS:
        return getattr(importlib.import_module("tiering.engines.lmcache.adapter"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
