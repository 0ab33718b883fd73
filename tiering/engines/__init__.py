"""The adapters that connect the connector's two halves to real engines.

No other package imports them: an engine does.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def class_on_demand(package: str, name: str, module: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package whose class alone imports an engine.

    Args:
        package: name of the package.
        name: name of the class.
        module: name of the class's module in the package.
    """

    def load(wanted: str) -> Any:
        if wanted == name:
            return getattr(importlib.import_module(f"{package}.{module}"), name)
        raise AttributeError(f"module {package!r} has no attribute {wanted!r}")

    return load
