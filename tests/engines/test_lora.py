"""Requests with LoRA adapters: the engine's hashes cover the adapter's name, not its content."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.connector.fakes import make_scheduler
from tiering.api.request_policy import NEITHER
from tiering.api.transfer import CPULoadStoreSpec, GPULoadStoreSpec
from tiering.connector.metadata import (
    NOTHING_TO_DO,
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    TransferOrder,
)
from tiering.connector.scheduler import OffloadingConnectorScheduler
from tiering.connector.variants import Variant
from tiering.engines.vllm import adapter_loads
from tiering.engines.vllm import lora as lora_module
from tiering.engines.vllm.adapter_loads import UNREAD
from tiering.engines.vllm.lora import READ_PATIENCE, AdapterGuard, AdapterNames, AdapterVariants
from tiering.simple.metadata import SimpleCPUOffloadMetadata, SimpleCPUOffloadWorkerMetadata

NOTHING = {"load": False, "store": False}
NUMBERS = {"adapter": 1, "another": 3}
"""Names of adapters, with their numbers."""


def request(lora_id: int | None, path: str = "/a", name: str = "adapter", params: Any = None, **more: Any) -> Any:
    lora = None if lora_id is None else SimpleNamespace(lora_name=name, lora_int_id=lora_id, lora_path=path, **more)
    return SimpleNamespace(request_id="r", lora_request=lora, kv_transfer_params=params, num_tokens=3)


def names_of(**held: str) -> AdapterNames:
    """Return a guard of the simple mode to which the workers have reported ``held``; default: one adapter."""
    guard = AdapterNames()
    guard.report({f"{NUMBERS[name]} {name}": identity for name, identity in (held or {"adapter": "A"}).items()})
    return guard


def policy(guard: AdapterGuard, asked: Any) -> Any:
    return (guard.admit(asked).kv_transfer_params or {}).get("kv_tiering")


@pytest.mark.parametrize("kind", [AdapterGuard, AdapterNames])
def test_a_request_without_adapter_is_left_alone(kind: type[AdapterGuard]) -> None:
    plain, guard = request(None), kind()
    assert guard.admit(plain) is plain
    assert guard.may_load(plain.request_id)
    assert guard.with_checks(NOTHING_TO_DO, {"r"}) is NOTHING_TO_DO


def test_without_reports_of_the_workers_adapters_use_no_tier() -> None:
    guard = AdapterGuard()
    guard.report({"1 adapter": "A"})
    assert policy(guard, request(1)) == NOTHING
    assert checks(guard, "r") == []


def test_all_else_of_the_request_is_the_engines_own() -> None:
    asked = request(1, params={"other": 1, "kv_tiering": {"tiers": ["s3"]}})
    admitted = names_of().admit(asked)
    asked.num_tokens = 4
    assert (admitted.num_tokens, admitted.kv_transfer_params) == (4, asked.kv_transfer_params)


@pytest.mark.parametrize("other", [request(2), request(1, "/b"), request(1, load_inplace=True)])
def test_a_name_that_has_stood_for_two_adapters_neither_loads_nor_stores(
    other: Any, caplog: pytest.LogCaptureFixture
) -> None:
    guard = names_of(adapter="A", another="B")
    assert policy(guard, request(1)) is None
    assert policy(guard, other) == NOTHING
    assert policy(guard, request(1)) == NOTHING
    assert policy(guard, request(3, name="another")) is None
    assert len(caplog.records) == 1


# ----------------------------------------------------------------------------------------------- reports of the workers


def checks(guard: AdapterGuard, *scheduled: str, metadata: Any = NOTHING_TO_DO) -> list[Any]:
    return guard.with_checks(metadata, scheduled).adapter_checks


def test_a_name_uses_no_tier_before_the_workers_have_reported_it() -> None:
    guard = AdapterNames()
    assert policy(guard, request(1)) == NOTHING
    assert checks(guard) == []  # the request is not computed in this step
    assert checks(guard, "r") == [("1 adapter", "", set())]
    assert checks(guard, "r") == []
    guard.report({"1 adapter": "A"})
    assert policy(guard, request(1)) is None


def test_an_adapter_whose_files_are_not_known_uses_no_tier() -> None:
    guard = names_of(adapter="")
    assert policy(guard, request(1)) == NOTHING
    assert checks(guard, "r") == []


def test_a_name_that_was_reported_with_other_files_uses_no_tier_until_a_reset(
    caplog: pytest.LogCaptureFixture,
) -> None:
    guard = names_of()
    assert policy(guard, request(1)) is None
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
    assert policy(guard, request(1)) is None


def test_an_adapter_is_not_taken_for_another_one_of_its_name_that_the_workers_hold() -> None:
    guard = AdapterNames()
    guard.report({"2 adapter": "B"})
    assert policy(guard, request(1)) == NOTHING
    assert checks(guard, "r") == [("1 adapter", "", set())]


def test_a_request_that_goes_on_after_a_reset_loads_nothing_and_asks_what_it_stores() -> None:
    guard = names_of()
    guard.admit(request(1))
    guard.reset()
    assert not guard.may_load("r")
    assert checks(guard, "r") == [("1 adapter", "", set())]
    guard.report({"1 adapter": "B"})
    guard.report({"1 adapter": "C"})  # its blocks may belong to the adapter before
    assert policy(guard, request(1)) == NOTHING


def test_a_request_that_goes_on_after_a_reset_keeps_its_name_from_another_adapter() -> None:
    guard = names_of()
    guard.admit(request(1))
    guard.reset()
    guard.report({"1 adapter": "A", "2 adapter": "B"})
    assert policy(guard, request(2)) == NOTHING, "the request stores blocks of the first adapter"
    guard.drop("r")
    guard.reset()
    guard.report({"2 adapter": "B"})
    assert policy(guard, request(2)) is None


def test_names_beyond_the_bound_use_no_tier_until_a_reset_because_no_name_may_be_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (adapter_loads, lora_module):
        monkeypatch.setattr(module, "MAX_ADAPTERS", 3)
    guard = AdapterNames()
    for number in range(1, 9):
        guard.report({f"{number} {number}": "A"})
        seen = policy(guard, request(number, name=str(number)))
        assert seen == (None if number <= 3 else NOTHING)
        guard.drop("r")
    assert list(guard._named) == ["1", "2", "3"]
    assert list(guard._held) == ["6 6", "7 7", "8 8"]
    assert len(caplog.records) == 1
    guard.report({"1 1": "B"})
    assert policy(guard, request(1, name="1")) == NOTHING, "a name is not dropped with the report about it"
    guard.reset()
    guard.report({"8 8": "A"})
    assert policy(guard, request(8, name="8")) is None


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
    guard = names_of()
    guard.admit(request(1))
    order = LOADS[mode]
    assert checks(guard, metadata=order) == []  # the request waits for its load
    assert checks(guard, "r") == [("1 adapter", "A", {4, 5})]
    assert checks(guard, "r") == []
    assert order.adapter_checks == []


def test_requests_that_ended_leave_nothing() -> None:
    guard = names_of()
    guard.admit(request(1))
    checks(guard, metadata=LOADS["tiering"])
    guard.drop("r")
    assert checks(guard, "r") == []
    other = AdapterNames()
    other.admit(request(1))
    other.drop("r")
    assert checks(other, "r") == []


# ---------------------------------------------------------------------------------------------- names with the content


@pytest.fixture
def half() -> OffloadingConnectorScheduler:
    return make_scheduler()[0]


def admitted(guard: AdapterVariants, half: OffloadingConnectorScheduler, asked: Any) -> tuple[Any, Variant]:
    seen = guard.admit(asked)
    half.on_new_request(seen)
    return seen, seen.variant


def test_an_adapter_that_the_workers_have_reported_may_use_all_tiers(half: OffloadingConnectorScheduler) -> None:
    guard = AdapterVariants(half)
    guard.report({"1 adapter": "A"})
    asked = request(1, params={"kv_tiering": {"tiers": ["s3"]}})
    seen, variant = admitted(guard, half, asked)
    assert (seen.kv_transfer_params, variant.identity) == (asked.kv_transfer_params, "A")
    assert checks(guard, metadata=LOADS["tiering"]) == []
    assert checks(guard, "r") == [("1 adapter", "A", {4, 5})]


def test_a_request_that_came_before_the_report_may_use_tiers_after_it(half: OffloadingConnectorScheduler) -> None:
    guard = AdapterVariants(half)
    _, variant = admitted(guard, half, request(1))
    assert variant.identity == ""
    assert checks(guard, "r") == [("1 adapter", "", set())]
    guard.report({"1 adapter": "A"})
    assert variant.identity == "A"
    assert half.states["r"].policy.load
    assert checks(guard, "r", metadata=LOADS["tiering"]) == [("1 adapter", "A", {4, 5})]
    guard.drop("r")
    guard.report({"1 adapter": "B"})
    assert variant.is_void


@pytest.mark.parametrize("known", [False, True])
def test_a_request_that_waits_while_its_adapter_is_replaced_uses_no_tier(
    half: OffloadingConnectorScheduler, known: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kv_tiering.vllm")
    guard = AdapterVariants(half)
    if known:
        guard.report({"1 adapter": "A"})
    _, old = admitted(guard, half, request(1))
    guard.report({"1 adapter": "A"})
    assert not old.is_void
    guard.report({"1 adapter": "B"})
    assert old.is_void
    assert half.states["r"].policy == NEITHER
    assert checks(guard, "r", metadata=LOADS["tiering"])[0] == ("1 adapter", "A", {4, 5})  # the worker finds them stale
    assert len(caplog.records) == 1
    guard.drop("r")
    new = guard.admit(request(1)).variant
    assert (new.identity, new.is_void) == ("B", False)


@pytest.mark.parametrize("before", ["", "A"])
def test_an_adapter_whose_files_are_not_known_uses_no_tier_until_it_is_loaded_again(
    half: OffloadingConnectorScheduler, before: str
) -> None:
    guard = AdapterVariants(half)
    if before:
        guard.report({"1 adapter": before})
    guard.report({"1 adapter": ""})
    seen = guard.admit(request(1))
    assert (seen.kv_transfer_params, seen.variant.is_void) == ({"kv_tiering": NOTHING}, True)
    guard.report({"1 adapter": ""})
    guard.report({"1 adapter": "A"})
    assert guard.admit(request(1)).variant.identity == "A"


def test_adapters_of_one_name_have_variants_of_their_own(half: OffloadingConnectorScheduler) -> None:
    guard = AdapterVariants(half)
    guard.report({"1 adapter": "A", "2 adapter": "B"})
    one, other = (guard.admit(request(number)).variant for number in (1, 2))
    assert (one.identity, other.identity) == ("A", "B")
    assert not one.equals(other)


@pytest.mark.parametrize("kind", [OffloadingWorkerMetadata, SimpleCPUOffloadWorkerMetadata])
def test_workers_that_hold_different_adapters_report_none(kind: Any) -> None:
    one, other = kind(adapters={"a": "A", "b": "B"}), kind(adapters={"a": "A", "b": "C", "d": "D"})
    assert one.aggregate(other).adapters == {"a": "A", "b": "", "d": "D"}


def test_adapters_that_were_not_used_for_long_are_dropped_unless_a_request_is_open(
    half: OffloadingConnectorScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_loads, "MAX_ADAPTERS", 3)
    guard = AdapterVariants(half)
    first = guard.admit(request(1)).variant
    guard.report({"1 adapter": "A"})
    for number in range(2, 9):
        asked = request(number)
        asked.request_id = f"r{number}"
        guard.admit(asked)
        guard.report({f"{number} adapter": "A"})
        guard.drop(asked.request_id)
    assert list(guard._variants) == ["1 adapter", "6 adapter", "7 adapter", "8 adapter"]
    guard.report({"1 adapter": "B"})
    assert first.is_void, "an open request is not left with a variant that nothing changes"
    guard.drop("r")
    guard.admit(request(9))
    assert list(guard._variants) == ["8 adapter", "1 adapter", "9 adapter"]
    guard._to_read.clear()
    guard.report({"6 adapter": UNREAD})
    again = guard.admit(request(6))
    assert not again.variant.identity
    assert list(guard._to_read) == ["6 adapter"], "its files are read again"
    assert checks(guard, "r") == [("6 adapter", "", set())], "the workers are asked again"
    for number in range(20, 30):
        guard.report({f"{number} loaded by hand": "A"})
    assert list(guard._variants) == ["6 adapter", *(f"{number} loaded by hand" for number in (27, 28, 29))]
    assert list(guard._read_by) == list(guard._variants)


# ----------------------------------------------------------------------------------- adapters that no worker has loaded


def waiting(half: OffloadingConnectorScheduler, name: str = "r", **more: Any) -> tuple[AdapterVariants, list[float]]:
    """Return a guard with an admitted request whose adapter no worker has loaded, and its clock."""
    now = [0.0]
    guard = AdapterVariants(half, lambda: now[0])
    asked = request(1, **more)
    asked.block_hashes = [bytes(32)]
    admitted(guard, half, asked)
    return guard, now


def test_first_requests_of_an_adapter_wait_for_a_worker_to_read_its_files(half: OffloadingConnectorScheduler) -> None:
    guard, _ = waiting(half)
    assert guard.may_load("r") is None
    asked = guard.with_checks(NOTHING_TO_DO, set())  # also in a step that computes nothing
    assert isinstance(asked, OffloadingConnectorMetadata)
    assert asked.adapters_to_read == {"1 adapter": ("/a", False)}
    assert guard.with_checks(NOTHING_TO_DO, set()) is NOTHING_TO_DO
    assert NOTHING_TO_DO.adapters_to_read == {}
    guard.report({"1 adapter": "A"})
    assert guard.may_load("r")
    assert checks(guard, "r", metadata=LOADS["tiering"]) == [("1 adapter", "A", {4, 5})]


@pytest.mark.parametrize("report", [{}, {"1 adapter": "unread"}, {"2 another": "A"}])
def test_the_wait_ends_when_nothing_can_be_read_or_with_its_time(
    half: OffloadingConnectorScheduler, report: dict[str, str]
) -> None:
    guard, now = waiting(half)
    guard.report(report)
    if "1 adapter" not in report:
        assert guard.may_load("r") is None
        now[0] = READ_PATIENCE
    assert guard.may_load("r")
    assert half.states["r"].variant is not None
    assert half.states["r"].variant.identity == ""
    assert checks(guard, "r") == [("1 adapter", "", set())]  # what is loaded by then is asked for
    guard.drop("r")
    guard.admit(request(1))
    assert guard.may_load("r"), "the next requests do not wait again"


def test_a_request_that_may_load_nothing_does_not_wait(half: OffloadingConnectorScheduler) -> None:
    guard, _ = waiting(half, params={"kv_tiering": {"load": False}})
    assert guard.may_load("r")


def test_a_load_of_other_files_than_were_read_is_another_adapter(half: OffloadingConnectorScheduler) -> None:
    guard, _ = waiting(half)
    guard.report({"1 adapter": "A"})
    guard.report({"1 adapter": "B"})
    assert half.states["r"].policy == NEITHER


PRIVATE = "load 1 of engine"


@pytest.mark.parametrize(
    "params", [None, {"other": 1}, {"kv_tiering": None}, {"kv_tiering": {"tiers": ["s3"], "store": False}}]
)
def test_an_adapter_whose_files_are_not_known_uses_the_cpu_tier_only(
    half: OffloadingConnectorScheduler, params: Any
) -> None:
    guard, _ = waiting(half)
    guard.report({"1 adapter": PRIVATE})
    assert half.states["r"].policy == NEITHER, "the first request might use all tiers"
    seen = guard.admit(request(1, params=params))
    mine = (params or {}).get("kv_tiering") or {}
    assert seen.kv_transfer_params == {**(params or {}), "kv_tiering": {**mine, "tiers": []}}
    assert seen.variant.identity == PRIVATE
    guard.report({"1 adapter": PRIVATE.replace("1", "2")})
    assert seen.variant.is_void, "each load has its own blocks"
    guard.report({"1 adapter": "A"})
    assert guard.admit(request(1)).kv_transfer_params is None


def test_wrong_parameters_stay_wrong_for_an_adapter_whose_files_are_not_known(
    half: OffloadingConnectorScheduler,
) -> None:
    guard = AdapterVariants(half)
    guard.report({"1 adapter": PRIVATE})
    wrong: tuple[Any, ...] = (3, [])
    for word in wrong:
        assert guard.admit(request(1, params={"kv_tiering": word})).kv_transfer_params == {"kv_tiering": word}
