"""Requests with LoRA adapters: their blocks are named by the adapter's name, not by its content."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tiering.api.transfer import CPULoadStoreSpec, GPULoadStoreSpec
from tiering.connector.metadata import (
    NOTHING_TO_DO,
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    TransferOrder,
)
from tiering.engines.vllm.lora import AdapterGuard
from tiering.simple.metadata import SimpleCPUOffloadMetadata, SimpleCPUOffloadWorkerMetadata

NOTHING = {"load": False, "store": False}
NUMBERS = {"adapter": 1, "another": 3}
"""Names of adapters, with their numbers."""


def request(lora_id: int | None, path: str = "/a", name: str = "adapter", params: Any = None, **more: Any) -> Any:
    lora = None if lora_id is None else SimpleNamespace(lora_name=name, lora_int_id=lora_id, lora_path=path, **more)
    return SimpleNamespace(request_id="r", lora_request=lora, kv_transfer_params=params, num_tokens=3)


def guard_of(*local_tiers: str, **held: str) -> AdapterGuard:
    """Return a guard to which the workers have reported ``held``; default: the one name "adapter"."""
    guard = AdapterGuard(local_tiers)
    guard.report({f"{NUMBERS[name]} {name}": identity for name, identity in (held or {"adapter": "A"}).items()})
    return guard


def policy(guard: AdapterGuard, asked: Any) -> Any:
    return guard.admit(asked).kv_transfer_params["kv_tiering"]


def test_a_request_without_adapter_is_left_alone() -> None:
    plain = request(None)
    guard = guard_of("memory")
    assert guard.admit(plain) is plain
    assert guard.may_load(plain.request_id)
    assert guard.with_checks(NOTHING_TO_DO, {"r"}) is NOTHING_TO_DO


def test_an_adapters_requests_use_no_tier_that_outlives_the_process() -> None:
    guard = guard_of("memory")
    assert policy(guard, request(1)) == {"tiers": ["memory"]}
    assert policy(guard, request(1, params={"kv_tiering": {"tiers": ["s3"]}})) == {"tiers": []}


def test_all_else_of_the_request_is_the_engines_own() -> None:
    asked = request(1, params={"other": 1})
    admitted = guard_of().admit(asked)
    asked.num_tokens = 4
    assert (admitted.num_tokens, admitted.kv_transfer_params["other"]) == (4, 1)


@pytest.mark.parametrize("other", [request(2), request(1, "/b"), request(1, load_inplace=True)])
def test_a_name_that_has_stood_for_two_adapters_neither_loads_nor_stores(
    other: Any, caplog: pytest.LogCaptureFixture
) -> None:
    guard = guard_of(adapter="A", another="B")
    assert policy(guard, request(1)) == {"tiers": []}
    assert policy(guard, other) == NOTHING
    assert policy(guard, request(1)) == NOTHING
    assert policy(guard, request(3, name="another")) == {"tiers": []}
    assert len(caplog.records) == 1


# ----------------------------------------------------------------------------------------------- reports of the workers


def checks(guard: AdapterGuard, *scheduled: str, metadata: Any = NOTHING_TO_DO) -> list[Any]:
    return guard.with_checks(metadata, scheduled).adapter_checks


def test_a_name_uses_no_tier_before_the_workers_have_reported_it() -> None:
    guard = AdapterGuard(["memory"])
    assert policy(guard, request(1)) == NOTHING
    assert checks(guard) == []  # the request is not computed in this step
    assert checks(guard, "r") == [("1 adapter", "", set())]
    assert checks(guard, "r") == []
    guard.report({"1 adapter": "A"})
    assert policy(guard, request(1)) == {"tiers": ["memory"]}


def test_an_adapter_whose_files_are_not_known_uses_no_tier() -> None:
    guard = guard_of(adapter="")
    assert policy(guard, request(1)) == NOTHING
    assert checks(guard, "r") == []


def test_a_name_that_was_reported_with_other_files_uses_no_tier_until_a_reset(
    caplog: pytest.LogCaptureFixture,
) -> None:
    guard = guard_of("memory")
    assert policy(guard, request(1)) == {"tiers": ["memory"]}
    assert guard.may_load("r")
    for identity in ("B", "A"):
        guard.report({"1 adapter": identity})
        assert not guard.may_load("r")
        assert policy(guard, request(1)) == NOTHING
    assert len(caplog.records) == 1
    guard.reset()
    assert policy(guard, request(1)) == NOTHING
    assert checks(guard, "r") == [("1 adapter", "", set())]
    guard.report({"1 adapter": "B"})
    assert policy(guard, request(1)) == {"tiers": ["memory"]}


def test_an_adapter_is_not_taken_for_another_one_of_its_name_that_the_workers_hold() -> None:
    guard = AdapterGuard(["memory"])
    guard.report({"2 adapter": "B"})
    assert policy(guard, request(1)) == NOTHING
    assert checks(guard, "r") == [("1 adapter", "", set())]


def test_a_request_that_goes_on_after_a_reset_loads_nothing_and_asks_what_it_stores() -> None:
    guard = guard_of("memory")
    guard.admit(request(1))
    guard.reset()
    assert not guard.may_load("r")
    assert checks(guard, "r") == [("1 adapter", "", set())]
    guard.report({"1 adapter": "B"})
    guard.report({"1 adapter": "C"})  # its blocks may belong to the adapter before
    assert policy(guard, request(1)) == NOTHING


LOADS: dict[str, Any] = {
    "tiering": OffloadingConnectorMetadata(
        reqs_to_load={"r": TransferOrder(0, (CPULoadStoreSpec([7, 8]), GPULoadStoreSpec([4, 5], [2], [0])))}
    ),
    "simple": SimpleCPUOffloadMetadata(
        load_event=0, load_gpu_blocks=[4, 5], load_cpu_blocks=[7, 8], load_event_to_reqs={0: ["r"]}, load_ends=[2]
    ),
}
"""Steps that load two GPU blocks for the request, by mode."""


@pytest.mark.parametrize("mode", LOADS)
def test_blocks_that_were_loaded_are_checked_in_the_first_step_that_computes_with_them(mode: str) -> None:
    guard = guard_of("memory")
    guard.admit(request(1))
    order = LOADS[mode]
    assert checks(guard, metadata=order) == []  # the request waits for its load
    assert checks(guard, "r") == [("1 adapter", "A", {4, 5})]
    assert checks(guard, "r") == []
    assert order.adapter_checks == []


def test_requests_that_ended_leave_nothing() -> None:
    guard = guard_of("memory")
    guard.admit(request(1))
    checks(guard, metadata=LOADS["tiering"])
    guard.drop("r")
    assert checks(guard, "r") == []
    other = AdapterGuard()
    other.admit(request(1))
    other.drop("r")
    assert checks(other, "r") == []


@pytest.mark.parametrize("kind", [OffloadingWorkerMetadata, SimpleCPUOffloadWorkerMetadata])
def test_workers_that_hold_different_adapters_report_none(kind: Any) -> None:
    one, other = kind(adapters={"a": "A", "b": "B"}), kind(adapters={"a": "A", "b": "C", "d": "D"})
    assert one.aggregate(other).adapters == {"a": "A", "b": "", "d": "D"}
