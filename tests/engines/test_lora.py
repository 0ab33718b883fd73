"""Requests with LoRA adapters: their blocks are named by the adapter's name, not by its content."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tiering.engines.vllm.lora import AdapterGuard

NOTHING = {"load": False, "store": False}


def request(lora_id: int | None, path: str = "/a", name: str = "adapter", params: Any = None, **more: Any) -> Any:
    lora = None if lora_id is None else SimpleNamespace(lora_name=name, lora_int_id=lora_id, lora_path=path, **more)
    return SimpleNamespace(request_id="r", lora_request=lora, kv_transfer_params=params, num_tokens=3)


def policy(guard: AdapterGuard, asked: Any) -> Any:
    return guard.admit(asked).kv_transfer_params["kv_tiering"]


def test_a_request_without_adapter_is_left_alone() -> None:
    plain = request(None)
    assert AdapterGuard(["memory"]).admit(plain) is plain


def test_an_adapters_requests_use_no_tier_that_outlives_the_process() -> None:
    guard = AdapterGuard(["memory"])
    assert policy(guard, request(1)) == {"tiers": ["memory"]}
    assert policy(guard, request(1, params={"kv_tiering": {"tiers": ["s3"]}})) == {"tiers": []}


def test_all_else_of_the_request_is_the_engines_own() -> None:
    asked = request(1, params={"other": 1})
    admitted = AdapterGuard().admit(asked)
    asked.num_tokens = 4
    assert (admitted.num_tokens, admitted.kv_transfer_params["other"]) == (4, 1)


@pytest.mark.parametrize("other", [request(2), request(1, "/b"), request(1, load_inplace=True)])
def test_a_name_that_has_stood_for_two_adapters_neither_loads_nor_stores(
    other: Any, caplog: pytest.LogCaptureFixture
) -> None:
    guard = AdapterGuard()
    assert policy(guard, request(1)) == {"tiers": []}
    assert policy(guard, other) == NOTHING
    assert policy(guard, request(1)) == NOTHING
    assert policy(guard, request(3, name="another")) == {"tiers": []}
    assert len(caplog.records) == 1


def test_after_a_reset_a_name_may_be_used_again() -> None:
    guard = AdapterGuard()
    policy(guard, request(1))
    policy(guard, request(2))
    guard.reset()
    assert policy(guard, request(2)) == {"tiers": []}
