"""The L2 adapter for LMCache's multiprocess server (``--l2-adapter``, type ``plugin``): a whole stack.

LMCache finds the class by ``module_path`` and ``class_name`` in its dictionary. Only ``adapter.py`` imports LMCache.
"""

from __future__ import annotations

from tiering.config.inline import ADAPTER
from tiering.engines import class_on_demand

__all__ = ["KVTieringAdapter"]

__getattr__ = class_on_demand(__name__, ADAPTER.name, "adapter")
