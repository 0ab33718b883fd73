"""The real SGLang on a CPU: its modules of HiCache, its host pools, its factory of storage backends.

Needs SGLang, which ``make test-sglang`` installs without its dependencies; without SGLang no test here is collected.
What it imports and this environment lacks is not used on the way, and is a stand-in.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

collect_ignore_glob = [] if importlib.util.find_spec("sglang") else ["test_*.py"]

UNUSED = (
    *("orjson", "IPython", "IPython.display", "gguf"),
    *("torchvision", "torchvision.transforms", "torchvision.transforms.functional"),
)
"""Modules that SGLang imports for other purposes."""


class _StandIn(ModuleType):
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


if not collect_ignore_glob:
    importlib.import_module("transformers.image_utils")  # before it could find the stand-in for torchvision
    _lacking = {name for name in UNUSED if "." not in name and importlib.util.find_spec(name) is None}
    for _name in UNUSED:
        if _name.partition(".")[0] in _lacking:
            sys.modules[_name] = _StandIn(_name)
            sys.modules[_name].__spec__ = SimpleNamespace(name=_name)  # type: ignore[assignment]
