"""The adapter for vLLM.

``TieringConnector`` is the class that vLLM's ``--kv-transfer-config`` names, together with this package. Modules that
this class does not load work without vLLM.
"""

from __future__ import annotations

from tiering.engines import class_on_demand

__all__ = ["TieringConnector"]

__getattr__ = class_on_demand(__name__, "TieringConnector", "connector")
