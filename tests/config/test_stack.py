"""From a stack to a running manager: checks, the order of opening, cleanup after a failure."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import fake_tier
from tests.thread_limit import ThreadLimit
from tiering.api.keys import make_offload_key
from tiering.api.namespace import ModelIdentity, Namespace, fingerprint_of
from tiering.api.request import ReqContext
from tiering.block_tier.tier import BlockTier
from tiering.config.stack import open_manager
from tiering.config.stack_file import StackConfig, load_stack
from tiering.errors import (
    ConfigError,
    PermanentStoreError,
    RegionError,
    StoreError,
    TemporaryStoreError,
    TierUnavailableError,
)
from tiering.medium.files import Files
from tiering.primary.memory.region import PAGE, SharedRegion
from tiering.testing.clock import until

MODEL = ModelIdentity(name="org/model", weights="0" * 40, dtype="bfloat16", layout="test")
CTX = ReqContext("r1")


@pytest.fixture(autouse=True)
def built() -> Any:
    fake_tier.BUILT.clear()
    yield fake_tier.BUILT
    fake_tier.BUILT.clear()


@pytest.fixture
def no_region(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if memory is allocated."""

    def create(*args: object, **words: object) -> None:
        pytest.fail("a region was created before everything was checked")

    monkeypatch.setattr(SharedRegion, "create", create)


def stack(*tiers: Mapping[str, object], capacity: object = 16 * PAGE, **words: object) -> StackConfig:
    sections = [
        {"type": "tests.fake_tier:FAKE_TIER", "name": f"tier{index}", **tier} for index, tier in enumerate(tiers)
    ]
    return load_stack({"primary": {"capacity": capacity}, "secondary": sections, **words})


def test_the_capacity_is_divided_into_rows_of_whole_pages() -> None:
    with open_manager(stack(capacity=16 * PAGE), PAGE + 1, MODEL) as manager:
        assert manager.primary_tier.get_kv_memoryview().shape == (8, 2 * PAGE)


def test_events_say_where_a_block_is_and_in_which_tier() -> None:
    memory, own = {"type": "memory", "name": "second", "capacity": 4 * PAGE}, {"name": "third"}
    key = make_offload_key(b"h" * 32, 0)
    with open_manager(stack(memory, own), 1000, MODEL, enable_events=True) as manager:
        manager.on_new_request(CTX)
        output = manager.prepare_store([key], CTX)
        assert output is not None
        manager.complete_store([key], CTX)
        told = set()
        for _ in range(1000):
            manager.on_schedule_end()
            told |= {(event.medium, event.locality, event.tier) for event in manager.take_events()}
            if len(told) == 2:
                break
            manager.secondary_tiers[0].drain(time.monotonic() + 1)
        assert told == {("CPU", "LOCAL", "cpu"), ("CPU", "LOCAL", "second")}
    assert fake_tier.BUILT[-1].context.distance is None


def test_rows_are_as_large_as_the_largest_group() -> None:
    with open_manager(stack(), (100, 3 * PAGE), MODEL) as manager:
        assert np.asarray(manager.primary_tier.get_kv_memoryview()).shape[1] == 3 * PAGE


def test_a_block_that_was_stored_is_readable_and_intact() -> None:
    key = make_offload_key(b"h" * 32, 0)
    with open_manager(stack({}), 1000, MODEL) as manager:
        rows = np.asarray(manager.primary_tier.get_kv_memoryview())
        manager.on_new_request(CTX)
        out = manager.prepare_store([key], CTX)
        assert out is not None
        rows[out.store_spec.block_ids, :1000] = 7
        manager.complete_store(out.keys_to_store, CTX)
        manager.on_schedule_end()
        assert manager.lookup(key, CTX) is True
        spec = manager.prepare_load([key], CTX)
        assert (rows[spec.block_ids, :1000] == 7).all()
        manager.complete_load([key], CTX)
        manager.on_request_finished(CTX)


def test_tiers_are_built_in_order_with_what_they_need(built: Any) -> None:
    with open_manager(stack({}, {}), (100, 200), MODEL, replica="dp1", enable_events=True) as manager:
        assert [tier.name for tier in manager.secondary_tiers] == ["tier0", "tier1"]
        context = built[1].context
        assert (context.name, context.group_bytes, context.replica, context.enable_events) == (
            "tier1",
            (100, 200),
            "dp1",
            True,
        )
        assert context.primary_view.shape == manager.primary_tier.get_kv_memoryview().shape


@pytest.mark.parametrize("words", [{"namespace": "a"}, {"salt": "a"}])
def test_namespace_and_salt_of_the_stack_keep_blocks_apart(built: Any, words: Any) -> None:
    without: dict[str, Any] = {}
    for options in (without, words):
        open_manager(stack({}, **options), 100, MODEL).shutdown()
    assert built[0].context.namespace.fingerprint != built[1].context.namespace.fingerprint


def test_every_tier_is_shut_down_with_the_manager(built: Any) -> None:
    with open_manager(stack({}, {}), 100, MODEL):
        pass
    assert [tier.log for tier in built] == [["built", "opened", "shut down"]] * 2


# ----------------------------------------------------------------------------------------------- checked before opening


def refusal(stack: StackConfig, block_bytes: object = 100, model: ModelIdentity = MODEL) -> str:
    with pytest.raises(ConfigError) as caught:
        open_manager(stack, block_bytes, model)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.usefixtures("no_region")
class TestNothingIsOpenedWhen:
    def test_the_primary_tier_does_not_hold_one_block(self, built: Any) -> None:
        assert "primary.capacity: 1024 bytes do not hold one block; a row takes 4096 bytes" in refusal(
            stack({}, capacity=1024)
        )
        assert built == []

    def test_a_secondary_tier_does_not_hold_one_block(self, built: Any) -> None:
        text = refusal(stack({}, {"capacity": 2000}), block_bytes=(100, 2001))
        assert "secondary[1].capacity: 2000 bytes do not hold one block of 2001 bytes" in text
        assert built == []

    def test_a_persistent_tier_cannot_vouch_for_the_models_blocks(self, built: Any) -> None:
        model = ModelIdentity(name="m", weights="w", dtype="fp8", layout="l", volatile_scales=True)
        text = refusal(stack({"type": "tests.fake_tier:PERSISTENT_FAKE"}), model=model)
        assert "secondary[0].type: tests.fake_tier:PERSISTENT_FAKE keeps blocks beyond the process" in text
        assert "KV scales change at run time" in text
        assert built == []

    @pytest.mark.parametrize("block_bytes", [0, -1, (), (100, 0), True, 1.5])
    def test_the_size_of_a_block_is_none(self, block_bytes: Any) -> None:
        assert "block_bytes" in refusal(stack(), block_bytes=block_bytes)

    def test_the_overrides_of_the_model_are_no_plain_data(self) -> None:
        model = ModelIdentity(name="m", weights="w", dtype="fp8", layout="l", overrides={"rope": object()})
        assert "ModelIdentity.overrides" in refusal(stack(), model=model)


def test_a_tier_that_is_not_persistent_serves_any_model(built: Any) -> None:
    model = ModelIdentity(name="m", weights="w", dtype="fp8", layout="l", volatile_scales=True)
    with open_manager(stack({}), 100, model):
        assert len(built) == 1


def test_a_region_of_the_callers_own_is_used_and_must_fit() -> None:
    region = SharedRegion.create(3, 2 * PAGE)
    with open_manager(stack(), 2 * PAGE, MODEL, region=region) as manager:
        assert manager.primary_tier.num_rows == 3
    region = SharedRegion.create(3, PAGE)
    with pytest.raises(ConfigError, match="its rows have 4096 bytes, a block has 4097"):
        open_manager(stack(), PAGE + 1, MODEL, region=region)
    region.close()


# ----------------------------------------------------------------------------------------------------- opening and undo


def test_a_tier_that_cannot_be_opened_does_not_stop_the_start(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kv_tiering"), open_manager(stack({"opens": False}, {}), 100, MODEL) as manager:
        assert len(manager.secondary_tiers) == 2
    assert [record.message for record in caplog.records if "tier0" in record.message] == [
        "starting without the tier tier0; it joins when it can be opened"
    ]


def test_the_start_says_once_what_was_opened(caplog: pytest.LogCaptureFixture) -> None:
    tiers: list[dict[str, object]] = [{"capacity": "2MiB"}, {"opens": False}, {"name": "far"}]
    with caplog.at_level(logging.INFO, "kv_tiering"), open_manager(stack(*tiers, capacity=16 * PAGE), PAGE + 1, MODEL):
        pass
    (line,) = [record.message for record in caplog.records if record.message.startswith("tiers:")]
    size = PAGE // 1024
    rows = f"primary {16 * size} KiB (8 rows of {2 * PAGE} bytes, lru)"
    fingerprint = Namespace.build(MODEL, (PAGE + 1,)).directory[:8]
    assert line == f"tiers: {rows}, tier0 2 MiB, far without limit; namespace {fingerprint}"


def test_a_required_tier_that_cannot_be_opened_stops_the_start_and_closes_everything(built: Any) -> None:
    with pytest.raises(TierUnavailableError, match=r"secondary\[1\] \(tier1\) is marked required"):
        open_manager(stack({}, {"opens": False, "required": True}, {}), 100, MODEL)
    assert [tier.log for tier in built] == [
        ["built", "opened", "shut down"],
        ["built", "not opened", "shut down"],
        ["built", "shut down"],
    ]


def test_a_tier_that_cannot_be_built_closes_what_was_there(built: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[SharedRegion] = []
    close = SharedRegion.close

    def counted(region: SharedRegion) -> None:
        closed.append(region)
        close(region)

    monkeypatch.setattr(SharedRegion, "close", counted)
    with pytest.raises(
        ConfigError, match=r"secondary\[1\] \(tier1\): the tier cannot be built: OSError: this tier cannot be built"
    ):
        open_manager(stack({}, {"builds": False}), 100, MODEL)
    assert len(closed) == 1
    assert [tier.log for tier in built] == [["built", "shut down"]]


def test_opening_is_bounded_by_one_deadline_and_no_tier_can_take_it_all(built: Any) -> None:
    with open_manager(stack({}, {}, open_deadline="8s"), 100, MODEL, clock=lambda: 100.0):
        assert [tier.open_deadlines for tier in built] == [[104.0], [108.0]]


# ---------------------------------------------------------------------------------------------------- told at the start


@pytest.mark.parametrize("kind", ["memory", "local"])
@pytest.mark.parametrize("capacity", ["1PiB", "1EiB"])
def test_a_capacity_of_too_many_blocks_is_refused(tmp_path: Path, kind: Any, capacity: Any) -> None:
    section = {
        "type": kind,
        "name": "huge",
        "capacity": capacity,
        **({"path": str(tmp_path / "kv")} if kind == "local" else {}),
    }
    text = refusal(load_stack({"primary": {"capacity": 16 * PAGE}, "secondary": [section]}))
    assert "secondary[0] (huge): room for " in text
    assert "blocks is more than a tier can keep track of (536870912): lower its capacity, or make blocks larger" in text
    assert not (tmp_path / "kv").exists()


def test_tables_that_do_not_fit_into_memory_are_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*shape: object, **words: object) -> None:
        raise MemoryError("Unable to allocate 993. GiB")

    section = load_stack({"primary": {"capacity": 16 * PAGE}, "secondary": [{"type": "memory", "capacity": "1MiB"}]})
    monkeypatch.setattr("tiers.memory.SlotIndex", no_memory)
    assert (
        "secondary[0] (memory): its tables do not fit into memory: Unable to allocate 993. GiB; lower its capacity"
        in refusal(section)
    )


def test_a_primary_capacity_beyond_the_machine_is_a_region_error() -> None:
    with pytest.raises(RegionError, match=r"lower primary\.capacity"):
        open_manager(stack(capacity="1EiB"), PAGE, MODEL)


def warnings_of(caplog: pytest.LogCaptureFixture, stack: StackConfig) -> list[str]:
    with caplog.at_level(logging.WARNING, "kv_tiering"), open_manager(stack, PAGE, MODEL):
        pass
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def sections(tmp_path: object, *kinds: str) -> StackConfig:
    words = {"memory": {"capacity": "1MiB"}, "local": {"path": f"{tmp_path}/kv", "capacity": "8MiB"}}
    tiers = [{"type": kind, **words.get(kind, {})} for kind in kinds]
    return load_stack({"primary": {"capacity": 16 * PAGE}, "secondary": tiers})


def test_a_slower_tier_before_a_faster_one_is_a_warning(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    (text,) = [text for text in warnings_of(caplog, sections(tmp_path, "local", "memory")) if "fastest first" in text]
    assert (
        "secondary[0] (local) is on this machine and stands before secondary[1] (memory), "
        "which is in this process's memory" in text
    )


def test_tiers_in_their_order_are_no_warning(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    fake = "tests.fake_tier:FAKE_TIER"
    for kinds in (("memory", "local", fake), (fake, "memory"), ("local", fake, "memory")):
        assert [text for text in warnings_of(caplog, sections(tmp_path, *kinds)) if "fastest" in text] == []


def test_a_capacity_above_the_disks_size_is_a_warning_of_the_io_side(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def size_of_disk(files: Files, path: object) -> int:
        assert threading.current_thread() is not threading.main_thread()
        return 4 << 20

    monkeypatch.setattr(Files, "size_of_disk", size_of_disk)
    (text,) = [text for text in warnings_of(caplog, sections(tmp_path, "local")) if "file system" in text]
    assert "the capacity of 8388608 bytes is above the 4194304 bytes of its file system" in text
    monkeypatch.setattr(Files, "size_of_disk", lambda files, path: 8 << 20)
    caplog.clear()
    assert [text for text in warnings_of(caplog, sections(tmp_path, "local")) if "file system" in text] == []


def test_a_tier_that_a_request_names_and_a_stack_does_not_have_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kv_tiering"), open_manager(stack({}, {}), PAGE, MODEL) as manager:
        for number, names in enumerate([["tier0"], ["tire0", "tier1", "cpu"], ["tire0"], ["tier2"]]):
            ctx = ReqContext(f"r{number}", {"kv_tiering": {"tiers": names}})
            manager.on_new_request(ctx)
            manager.on_request_finished(ctx)
    told = [record.message for record in caplog.records]
    assert [text.partition(" is not a tier")[0] for text in told] == [
        "request r1: kv_tiering.tiers: 'tire0'",
        "request r3: kv_tiering.tiers: 'tier2'",
    ]
    assert all("the tiers are cpu, tier0, tier1" in text for text in told)


def test_names_from_outside_do_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kv_tiering"), open_manager(stack({}), PAGE, MODEL) as manager:
        for number in range(1000):
            ctx = ReqContext(f"r{number}", {"kv_tiering": {"tiers": [f"guess{number}", "x" * 10_000]}})
            manager.on_new_request(ctx)
            manager.on_request_finished(ctx)
    assert 0 < len(caplog.records) <= 32
    assert all(len(record.message) < 300 for record in caplog.records)


def test_a_process_that_may_have_no_more_threads_gets_a_region_error_and_no_bare_one(thread_limit: ThreadLimit) -> None:
    thread_limit.reach()
    with pytest.raises(RegionError, match="ulimit -u"):
        open_manager(stack({}), PAGE, MODEL)


def test_tiers_that_get_no_thread_at_the_start_join_when_they_do(thread_limit: ThreadLimit, tmp_path: Path) -> None:
    local = {
        "type": "local",
        "path": str(tmp_path),
        "capacity": "1MiB",
        "breaker": {"probe_after": "1ms", "probe_max": "1ms"},
    }
    thread_limit.refuse = lambda name: "prefault" not in name
    with open_manager(stack(local), PAGE, MODEL) as manager:
        assert manager.get_stats()["tiers"]["tier0"]["available"] == 0
        thread_limit.leave()

        def joined() -> bool:
            manager.on_schedule_end()
            return bool(manager.get_stats()["tiers"]["tier0"]["available"])

        assert until(joined)


# --------------------------------------------------------------------------------------------- models identified later


class Later:
    """The identification of a model, which ends on command."""

    def __init__(self) -> None:
        self.known: ModelIdentity | StoreError = TemporaryStoreError("not yet")

    def __call__(self) -> ModelIdentity:
        if isinstance(self.known, StoreError):
            raise self.known
        return self.known


def later_stack(tmp_path: Path) -> StackConfig:
    return load_stack(
        {
            "primary": {"capacity": "1MiB"},
            "open_deadline": "10ms",
            "secondary": [
                {"type": "local", "path": str(tmp_path / "kv"), "capacity": "8MiB", "breaker": {"probe_after": "10ms"}},
                {"type": "s3", "bucket": "no-such-bucket", "endpoint_url": "http://127.0.0.1:9"},
            ],
        }
    )


def test_tiers_that_outlive_the_process_join_when_the_model_is_identified(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    caplog.set_level(logging.INFO, "kv_tiering")
    identify = Later()
    known = dataclasses.replace(MODEL, weights="f" * 32)
    with open_manager(later_stack(tmp_path), 4096, MODEL, identify=identify) as manager:
        local, _ = manager.secondary_tiers
        assert isinstance(local, BlockTier)
        assert local.namespace is None
        manager.reset_cache()  # before the model is known
        identify.known = known

        def joined() -> bool:
            manager.on_schedule_end()
            return local.namespace is not None

        assert until(joined)
        expected = Namespace.build(known, (4096,))
        assert local.namespace is not None
        assert local.namespace.base == expected.base
        assert local.namespace.fingerprint == fingerprint_of(expected.base, local.namespace.epoch)
    assert (tmp_path / "kv" / "documents" / f"namespace-{expected.directory}.json").exists()
    assert f"tiers that outlive the process: namespace {expected.directory[:8]}" in caplog.messages


def test_a_model_that_must_not_outlive_the_process_leaves_its_tiers_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    identify = Later()
    identify.known = PermanentStoreError("files changed")
    with open_manager(later_stack(tmp_path), 4096, MODEL, identify=identify) as manager:
        local = manager.secondary_tiers[0]
        assert isinstance(local, BlockTier)

        def refused() -> bool:
            manager.on_schedule_end()
            return "tier local: not in service: files changed" in caplog.text

        assert until(refused)
        assert local.namespace is None
