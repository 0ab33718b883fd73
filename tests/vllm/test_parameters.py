"""The connector and its scheduler halves name their parameters as vLLM's base class does."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from tiering.connector.scheduler import OffloadingConnectorScheduler
from tiering.engines.vllm import TieringConnector
from tiering.simple.scheduler import SimpleCPUOffloadScheduler


def parameters(method: Any) -> list[str]:
    """Return the names of a method's parameters, without collectors such as ``**kwargs``."""
    collectors = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, found in inspect.signature(method).parameters.items() if found.kind not in collectors]


@pytest.mark.parametrize("cls", [TieringConnector, OffloadingConnectorScheduler, SimpleCPUOffloadScheduler])
def test_parameters_have_the_names_of_vllm(cls: type) -> None:
    names = [name for name, value in inspect.getmembers(KVConnectorBase_V1, inspect.isfunction) if name[0] != "_"]
    shared = [name for name in names if inspect.isfunction(getattr(cls, name, None))]
    assert "bind_gpu_block_pool" in shared
    ours = {name: parameters(getattr(cls, name)) for name in shared}
    assert ours == {name: parameters(getattr(KVConnectorBase_V1, name)) for name in shared}
