"""KV events that describe themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.connector.fakes import FakeManager, finished, ids, make_scheduler, make_spec, prompt, run_prompt
from tiering.base import OffloadingEvent, make_offload_key
from tiering.connector.events import BlockRemoved, BlockStored, OffloadingEventsTracker, OffloadingKVEventsConfig
from tiering.connector.scheduler import OffloadingConnectorScheduler

ON = OffloadingKVEventsConfig(enable_kv_cache_events=True, self_describing_kv_events=True)


def group(index: int = 0, *, size: int = 8, factor: int = 2, window: int | None = None) -> Any:
    return SimpleNamespace(
        group_idx=index,
        offloaded_block_size=size,
        hash_block_size_factor=factor,
        sliding_window_size_in_blocks=window,
        kv_event_group_spec=("full_attention", None),
    )


def stored(*keys: bytes, medium: str = "CPU") -> OffloadingEvent:
    return OffloadingEvent(list(keys), medium, False)


def removed(*keys: bytes, medium: str = "CPU") -> OffloadingEvent:
    return OffloadingEvent(list(keys), medium, True)


class TestStored:
    def test_says_what_the_block_holds(self) -> None:
        tracker, request = OffloadingEventsTracker(ON), prompt(24)
        key = request.key(3)
        tracker.record_store(request, group(), 1, key)
        assert tracker.take_events([stored(key)]) == [
            BlockStored(
                block_hashes=request.block_hashes[2:4],
                parent_block_hash=request.block_hashes[1],
                token_ids=list(range(8, 16)),
                block_size=4,
                lora_id=None,
                medium="CPU",
                lora_name=None,
                extra_keys=None,
                group_idx=0,
                kv_cache_spec_kind="full_attention",
                kv_cache_spec_sliding_window=None,
            )
        ]

    def test_the_first_block_has_no_parent(self) -> None:
        tracker, request = OffloadingEventsTracker(ON), prompt(24)
        tracker.record_store(request, group(), 0, request.key(1))
        (event,) = tracker.take_events([stored(request.key(1))])
        assert isinstance(event, BlockStored)
        assert event.parent_block_hash is None

    def test_one_event_for_each_block(self) -> None:
        tracker, request = OffloadingEventsTracker(ON), prompt(24)
        for block in range(3):
            tracker.record_store(request, group(), block, request.key(2 * block + 1))
        events = tracker.take_events([stored(*(request.key(2 * block + 1) for block in range(3)))])
        assert [event.block_hashes[-1] for event in events] == request.block_hashes[1::2]

    @pytest.mark.parametrize("lora", [SimpleNamespace(adapter_id=7, name="poet"), SimpleNamespace(lora_int_id=7, lora_name="poet")])
    def test_names_the_adapter(self, lora: object) -> None:
        tracker, request = OffloadingEventsTracker(ON), prompt(24, lora_request=lora)
        tracker.record_store(request, group(), 0, request.key(1))
        (event,) = tracker.take_events([stored(request.key(1))])
        assert isinstance(event, BlockStored)
        assert (event.lora_id, event.lora_name) == (7, "poet")

    def test_every_medium_that_gets_the_block_says_the_same(self) -> None:
        tracker, request = OffloadingEventsTracker(ON), prompt(24)
        tracker.record_store(request, group(), 0, request.key(1))
        first, second = tracker.take_events([stored(request.key(1)), stored(request.key(1), medium="DISK")])
        assert (first.medium, second.medium) == ("CPU", "DISK")
        assert first.block_hashes == second.block_hashes == request.block_hashes[:2]

    def test_hashes_take_the_engines_external_form(self) -> None:
        tracker, request = OffloadingEventsTracker(ON, lambda name: int.from_bytes(name[:8], "big")), prompt(24)
        tracker.record_store(request, group(), 1, request.key(3))
        (event,) = tracker.take_events([stored(request.key(3))])
        assert isinstance(event, BlockStored)
        assert all(isinstance(name, int) for name in [*event.block_hashes, event.parent_block_hash])


class TestRemoved:
    def test_fans_out_to_the_hashes_that_were_announced(self) -> None:
        tracker, request = OffloadingEventsTracker(ON), prompt(24)
        tracker.record_store(request, group(), 0, request.key(1))
        assert tracker.take_events([stored(request.key(1)), removed(request.key(1))])[1] == BlockRemoved(
            request.block_hashes[:2], "CPU", 0
        )

    def test_the_snapshot_goes_with_the_primary_tiers_block(self) -> None:
        tracker, request = OffloadingEventsTracker(ON), prompt(24)
        tracker.record_store(request, group(), 0, request.key(1))
        tracker.take_events([removed(request.key(1), medium="DISK")])
        assert len(tracker) == 1
        tracker.take_events([removed(request.key(1))])
        assert len(tracker) == 0

    def test_a_batch_that_spans_groups_is_split(self) -> None:
        tracker, request = OffloadingEventsTracker(ON), prompt(24)
        keys = [request.key(0, 1), request.key(1, 0), request.key(2, 1)]
        assert tracker.take_events([removed(*keys)]) == [
            BlockRemoved([request.block_hashes[1]], "CPU", 0),
            BlockRemoved([request.block_hashes[0], request.block_hashes[2]], "CPU", 1),
        ]

    def test_a_block_stored_again_before_its_removal_was_taken_keeps_its_snapshot(self) -> None:
        tracker, request = OffloadingEventsTracker(ON), prompt(24)
        tracker.record_store(request, group(), 0, request.key(1))
        tracker.record_store(request, group(), 0, request.key(1))
        tracker.take_events([removed(request.key(1))])
        (event,) = tracker.take_events([stored(request.key(1))])
        assert event.block_hashes == request.block_hashes[:2]
        tracker.take_events([removed(request.key(1))])
        assert len(tracker) == 0

    def test_a_failed_store_takes_its_snapshot_along(self) -> None:
        tracker, request = OffloadingEventsTracker(ON), prompt(24)
        tracker.record_store(request, group(), 0, request.key(1))
        tracker.store_failed([request.key(1)])
        assert len(tracker) == 0


class TestPlaceholders:
    def test_an_unknown_block_has_its_own_hash_and_no_tokens(self) -> None:
        tracker = OffloadingEventsTracker(ON)
        key = make_offload_key(b"h" * 32, 3)
        assert tracker.take_events([stored(key, medium="DISK"), removed(key, medium="DISK")]) == [
            BlockStored([b"h" * 32], None, [], 0, None, "DISK", None, group_idx=3),
            BlockRemoved([b"h" * 32], "DISK", 3),
        ]

    def test_windows_are_not_captured(self) -> None:
        tracker, request = OffloadingEventsTracker(ON), prompt(24)
        tracker.record_store(request, group(window=2), 0, request.key(1))
        assert len(tracker) == 0

    def test_are_warned_about_once(self, caplog: pytest.LogCaptureFixture) -> None:
        tracker = OffloadingEventsTracker(ON)
        for index in range(5):
            tracker.take_events([stored(make_offload_key(bytes([index]) * 32, 0))])
        assert len(caplog.records) == 1

    @pytest.mark.parametrize("config", [OffloadingKVEventsConfig(True, False), OffloadingKVEventsConfig(False, True)])
    def test_without_both_switches_nothing_is_captured_or_warned_about(
        self, config: OffloadingKVEventsConfig, caplog: pytest.LogCaptureFixture
    ) -> None:
        tracker, request = OffloadingEventsTracker(config), prompt(24)
        tracker.record_store(request, group(), 0, request.key(1))
        (event,) = tracker.take_events([stored(request.key(1))])
        assert isinstance(event, BlockStored)
        assert (len(tracker), event.token_ids, event.block_size) == (0, [], 0)
        assert not caplog.records

    def test_a_reset_forgets_all(self) -> None:
        tracker, request = OffloadingEventsTracker(ON), prompt(24)
        tracker.record_store(request, group(), 0, request.key(1))
        tracker.reset()
        assert len(tracker) == 0


class TestInTheScheduler:
    def make(self, *windows: int | None, **extra: Any) -> tuple[OffloadingConnectorScheduler, FakeManager]:
        spec = make_spec(*windows, self_describing_kv_events=True, **extra)
        return OffloadingConnectorScheduler(spec, enable_kv_cache_events=True), spec.manager

    def test_stored_blocks_are_described(self) -> None:
        scheduler, manager = self.make(block_size=8)
        request = prompt(24)
        run_prompt(scheduler, request, ids(6))
        manager.events = [stored(request.key(3))]
        (event,) = scheduler.take_events()
        assert isinstance(event, BlockStored)
        assert event.token_ids == list(range(8, 16))
        assert event.block_hashes == request.block_hashes[2:4]
        assert scheduler.take_events() == []

    def test_only_what_is_really_stored_is_captured(self) -> None:
        scheduler, manager = self.make(None, 64)
        request = prompt(24)
        manager.hold([request.key(1, 0)])
        run_prompt(scheduler, request, ids(6), ids(6, 11))
        assert len(scheduler._events) == 5

    def test_a_failed_store_is_forgotten(self) -> None:
        scheduler, _ = self.make()
        job = run_prompt(scheduler, prompt(24), ids(6)).reqs_to_store["r1"].job_id
        scheduler.update_connector_output(finished(job, failed=[job]))
        assert len(scheduler._events) == 0

    def test_a_reset_forgets_all(self) -> None:
        scheduler, _ = self.make()
        run_prompt(scheduler, prompt(24), ids(6))
        scheduler.reset_cache()
        assert len(scheduler._events) == 0

    def test_what_a_reset_removes_is_described_to_the_end(self) -> None:
        scheduler, manager = self.make(block_size=8)
        request = prompt(24)
        job = run_prompt(scheduler, request, ids(6)).reqs_to_store["r1"].job_id
        scheduler.update_connector_output(finished(job))
        manager.events = [stored(request.key(1)), removed(request.key(1))]
        scheduler.reset_cache()
        taken = scheduler.take_events()
        assert [event.block_hashes for event in taken] == [request.block_hashes[:2]] * 2
        assert [type(event) for event in taken] == [BlockStored, BlockRemoved]
        assert scheduler.take_events() == []

    def test_snapshots_need_both_switches(self) -> None:
        scheduler, _ = make_scheduler(self_describing_kv_events=True)
        run_prompt(scheduler, prompt(24), ids(6))
        assert len(scheduler._events) == 0
