"""Both scheduler halves name their parameters alike, so that engines may pass them by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from tiering.connector.scheduler import OffloadingConnectorScheduler
from tiering.simple.scheduler import SimpleCPUOffloadScheduler


def methods(cls: type) -> dict[str, Callable[..., Any]]:
    return {name: value for name, value in inspect.getmembers(cls, inspect.isfunction) if name[0] != "_"}


SHARED = sorted(methods(OffloadingConnectorScheduler).keys() & methods(SimpleCPUOffloadScheduler).keys())


@pytest.mark.parametrize("name", SHARED)
def test_the_halves_name_their_parameters_alike(name: str) -> None:
    tiering, simple = (
        list(inspect.signature(methods(half)[name]).parameters)
        for half in (OffloadingConnectorScheduler, SimpleCPUOffloadScheduler)
    )
    assert tiering == simple


def test_the_methods_of_an_engine_are_compared() -> None:
    assert {"bind_gpu_block_pool", "get_num_new_matched_tokens", "build_connector_meta"} <= set(SHARED)
