"""The storage backend for SGLang's HiCache (``--hicache-storage-backend dynamic``): a whole stack.

SGLang finds the class by ``module_path`` and ``class_name`` in its dictionary. Only ``backend.py`` imports SGLang.
"""

from __future__ import annotations

from tiering.config.inline import STORAGE
from tiering.engines import class_on_demand

__all__ = ["KVTieringStorage"]

__getattr__ = class_on_demand(__name__, STORAGE.name, "backend")
