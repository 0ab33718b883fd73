"""KV events with tokens, hash and parent of their blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.connector.fakes import FakeManager, finished, ids, make_scheduler, make_spec, prompt, run_prompt, start_load
from tests.connector.test_described_runs import Documents
from tiering.api.keys import make_offload_key
from tiering.api.manager import OffloadingEvent
from tiering.connector.described_runs import DescribedRuns
from tiering.connector.event_types import BlockRemoved, BlockStored, EngineEvents, OffloadingKVEventsConfig
from tiering.connector.events import OffloadingEventsTracker
from tiering.connector.scheduler import OffloadingConnectorScheduler
from tiering.connector.snapshots import Run

ON = OffloadingKVEventsConfig(enable_kv_cache_events=True, self_describing_kv_events=True)


def group(index: int = 0, *, size: int = 8, factor: int = 2, window: int | None = None) -> Any:
    return SimpleNamespace(
        group_idx=index,
        engine_idx=index,
        offloaded_block_size=size,
        hash_block_size_factor=factor,
        is_full=window is None,
        is_state=False,
        needed_from=lambda end: max(0, end - (window or end)),
        kv_event_group_spec=("full_attention", None) if window is None else ("sliding_window", window),
    )


def event(keys: Iterable[bytes], tier: str, removed: bool) -> OffloadingEvent:
    medium, locality = {"cpu": ("CPU", "LOCAL"), "disk": ("STORAGE", "LOCAL"), "bucket": ("STORAGE", "REMOTE")}[tier]
    return OffloadingEvent(list(keys), medium, locality, tier, removed)


def stored(*keys: bytes, tier: str = "cpu") -> OffloadingEvent:
    return event(keys, tier, removed=False)


def removed(*keys: bytes, tier: str = "cpu") -> OffloadingEvent:
    return event(keys, tier, removed=True)


class TestStored:
    def test_says_what_the_block_holds(self) -> None:
        tracker, request = OffloadingEventsTracker(ON), prompt(24)
        key = request.key(3)
        tracker.record_stores(request, group(), (1,), (key,))
        assert tracker.take_events([stored(key)]) == [
            BlockStored(
                block_hashes=[*request.block_hashes[2:4]],
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
                locality="LOCAL",
                ownership=None,
            )
        ]

    def test_the_first_block_has_no_parent(self) -> None:
        tracker, request = OffloadingEventsTracker(ON), prompt(24)
        tracker.record_stores(request, group(), (0,), (request.key(1),))
        (event,) = tracker.take_events([stored(request.key(1))])
        assert isinstance(event, BlockStored)
        assert event.parent_block_hash is None

    def test_one_event_for_each_block(self) -> None:
        tracker, request = OffloadingEventsTracker(ON), prompt(24)
        for block in range(3):
            tracker.record_stores(request, group(), (block,), (request.key(2 * block + 1),))
        events = tracker.take_events([stored(*(request.key(2 * block + 1) for block in range(3)))])
        assert [event.block_hashes[-1] for event in events] == request.block_hashes[1::2]

    @pytest.mark.parametrize("positions", [range(150), (0, 2, 3, 70), range(60, 70)])
    def test_blocks_of_a_batch_are_described_one_by_one_wherever_they_are(self, positions: Sequence[int]) -> None:
        tracker, request = OffloadingEventsTracker(ON), prompt(8 * 150)
        keys = [request.key(2 * position + 1) for position in positions]
        tracker.record_stores(request, group(), (2,), (request.key(5),))
        tracker.record_stores(request, group(), positions, keys)
        for position, told in zip(positions, tracker.take_events([stored(*keys)]), strict=True):
            assert isinstance(told, BlockStored)
            assert told.block_hashes == request.block_hashes[2 * position : 2 * position + 2]
            assert told.parent_block_hash == (request.block_hashes[2 * position - 1] if position else None)
            assert told.token_ids == list(range(8 * position, 8 * position + 8))

    @pytest.mark.parametrize(
        "lora", [SimpleNamespace(adapter_id=7, name="poet"), SimpleNamespace(lora_int_id=7, lora_name="poet")]
    )
    def test_names_the_adapter(self, lora: object) -> None:
        tracker, request = OffloadingEventsTracker(ON), prompt(24, lora_request=lora)
        tracker.record_stores(request, group(), (0,), (request.key(1),))
        (event,) = tracker.take_events([stored(request.key(1))])
        assert isinstance(event, BlockStored)
        assert (event.lora_id, event.lora_name) == (7, "poet")

    def test_every_tier_that_gets_the_block_says_the_same_in_the_engines_words(self) -> None:
        tracker, request = OffloadingEventsTracker(ON), prompt(24)
        tracker.record_stores(request, group(), (0,), (request.key(1),))
        tiers = ("cpu", "disk", "bucket")
        events = tracker.take_events([stored(request.key(1), tier=tier) for tier in tiers])
        assert [(event.medium, event.locality, event.ownership) for event in events] == [
            ("CPU", "LOCAL", None),
            ("STORAGE", "LOCAL", "disk"),
            ("STORAGE", "REMOTE", "bucket"),
        ]
        assert all(event.block_hashes == request.block_hashes[:2] for event in events)

    def test_hashes_take_the_engines_external_form(self) -> None:
        tracker, request = (
            OffloadingEventsTracker(ON, EngineEvents(lambda name: int.from_bytes(name[:8], "big"))),
            prompt(24),
        )
        tracker.record_stores(request, group(), (1,), (request.key(3),))
        (event,) = tracker.take_events([stored(request.key(3))])
        assert isinstance(event, BlockStored)
        assert all(isinstance(name, int) for name in [*event.block_hashes, event.parent_block_hash])


class TestRemoved:
    def test_fans_out_to_the_hashes_that_were_announced(self) -> None:
        tracker, request = OffloadingEventsTracker(ON), prompt(24)
        tracker.record_stores(request, group(), (0,), (request.key(1),))
        assert tracker.take_events([stored(request.key(1)), removed(request.key(1))])[1] == BlockRemoved(
            [*request.block_hashes[:2]], "CPU", 0, "LOCAL"
        )

    def test_the_snapshot_stays_until_no_tier_holds_the_block(self) -> None:
        tracker, request = OffloadingEventsTracker(ON), prompt(24)
        key = request.key(1)
        tracker.record_stores(request, group(), (0,), (key,))
        tracker.take_events([stored(key), stored(key, tier="disk"), removed(key)])
        assert len(tracker) == 1
        assert tracker.take_events([removed(key, tier="disk")]) == [
            BlockRemoved([*request.block_hashes[:2]], "STORAGE", 0, "LOCAL", "disk")
        ]
        assert len(tracker) == 0

    def test_a_batch_that_spans_groups_is_split(self) -> None:
        tracker, request = OffloadingEventsTracker(ON), prompt(24)
        keys = [request.key(0, 1), request.key(1, 0), request.key(2, 1)]
        assert tracker.take_events([removed(*keys)]) == [
            BlockRemoved([request.block_hashes[1]], "CPU", 0, "LOCAL"),
            BlockRemoved([request.block_hashes[0], request.block_hashes[2]], "CPU", 1, "LOCAL"),
        ]

    def test_a_block_stored_again_before_its_removal_was_taken_keeps_its_snapshot(self) -> None:
        tracker, request = OffloadingEventsTracker(ON), prompt(24)
        key = request.key(1)
        tracker.record_stores(request, group(), (0,), (key,))
        tracker.record_stores(request, group(), (0,), (key,))
        tracker.take_events([stored(key), removed(key)])
        (event,) = tracker.take_events([stored(key)])
        assert event.block_hashes == request.block_hashes[:2]
        tracker.take_events([removed(key)])
        assert len(tracker) == 0

    def test_a_failed_store_takes_its_snapshot_along(self) -> None:
        tracker, request = OffloadingEventsTracker(ON), prompt(24)
        tracker.record_stores(request, group(), (0,), (request.key(1),))
        tracker.store_failed([request.key(1)])
        assert len(tracker) == 0


class TestExtraKeys:
    """The engine's own function returns the extra keys that the engine hashed."""

    @staticmethod
    def numbered(req: object, first: int, count: int, size: int) -> list[tuple[object, ...] | None]:
        return [(size, number) if number % 2 else None for number in range(first, first + count)]

    def test_are_told_for_each_hash_block(self) -> None:
        tracker, request = OffloadingEventsTracker(ON, EngineEvents(extra_keys=self.numbered)), prompt(24)
        tracker.record_stores(request, group(), (1, 2), (request.key(3), request.key(5)))
        events = tracker.take_events([stored(request.key(5), request.key(3))])
        assert [getattr(event, "extra_keys", None) for event in events] == [[None, (4, 5)], [None, (4, 3)]]

    def test_tokens_behind_a_block_that_its_hash_covers_are_told_with_it(self) -> None:
        tracker, request = OffloadingEventsTracker(ON, EngineEvents(lookahead_tokens=2)), prompt(24)
        tracker.record_stores(request, group(), (0, 1), (request.key(1), request.key(3)))
        first, second = tracker.take_events([stored(request.key(1), request.key(3))])
        assert isinstance(first, BlockStored)
        assert isinstance(second, BlockStored)
        assert (first.token_ids, first.lookahead_token_ids) == (list(range(8)), [[4, 5], [8, 9]])
        assert (second.token_ids, second.lookahead_token_ids) == (list(range(8, 16)), [[12, 13], [16, 17]])


class TestLookups:
    """Blocks that a lookup found are announced with their tokens when a request first uses them."""

    def test_what_was_found_is_announced_again_with_tokens_and_parents(self) -> None:
        tracker, request = OffloadingEventsTracker(ON), prompt(24)
        keys = [request.key(1), request.key(3), request.key(5)]
        assert [event.block_size for event in tracker.take_events([stored(*keys, tier="disk")])] == [0, 0, 0]  # type: ignore[union-attr]
        tracker.record_lookup(request, group(), keys, 0, 2)
        tracker.record_lookup(request, group(), keys, 0, 2)
        events = tracker.take_events([])
        assert [type(event) for event in events] == [BlockRemoved, BlockStored, BlockStored]
        assert events[0].block_hashes == [request.block_hashes[1], request.block_hashes[3]]
        assert events[1].block_hashes == request.block_hashes[:2]
        told = events[2]
        assert isinstance(told, BlockStored)
        assert (told.parent_block_hash, told.token_ids) == (request.block_hashes[1], list(range(8, 16)))
        assert (told.medium, told.locality, told.ownership) == ("STORAGE", "LOCAL", "disk")
        (gone,) = tracker.take_events([removed(*keys, tier="disk")])
        assert gone.block_hashes == [*request.block_hashes[:4], request.block_hashes[5]]
        assert len(tracker) == 0

    def test_what_the_engine_has_already_is_told_too(self) -> None:
        tracker, request = OffloadingEventsTracker(ON), prompt(24)
        keys = [request.key(1), request.key(3), request.key(5)]
        tracker.take_events([stored(keys[0], tier="disk")])
        tracker.record_lookup(request, group(), keys, 2, 3)
        removal, told = tracker.take_events([])
        assert (removal.block_hashes, told.block_hashes) == ([request.block_hashes[1]], request.block_hashes[:2])

    def test_a_promotion_is_announced_with_tokens_at_once(self) -> None:
        tracker, request = OffloadingEventsTracker(ON), prompt(24)
        keys = [request.key(1)]
        tracker.record_lookup(request, group(), keys, 0, 1)
        events = tracker.take_events([stored(*keys, tier="bucket"), stored(*keys)])
        assert [event.token_ids for event in events if isinstance(event, BlockStored)] == [list(range(8))] * 2

    def test_a_lookup_that_came_to_nothing_leaves_nothing(self) -> None:
        tracker, request = OffloadingEventsTracker(ON), prompt(24)
        tracker.record_lookup(request, group(), [request.key(1)], 0, 1)
        assert len(tracker) == 1
        tracker.request_finished(request.request_id)
        tracker.take_events([])
        assert len(tracker) == 0


class TestBound:
    def test_of_the_oldest_blocks_only_their_own_hashes_stay_announced(self) -> None:
        tracker, request = OffloadingEventsTracker(ON, max_tokens=16), prompt(24)
        keys = [request.key(1), request.key(3), request.key(5)]
        for position, key in enumerate(keys):
            tracker.record_stores(request, group(), (position,), (key,))
            tracker.take_events([stored(key)])
        assert (len(tracker), tracker.snapshots_dropped) == (2, 1)
        (gone,) = tracker.take_events([removed(keys[0])])
        assert gone.block_hashes == [request.block_hashes[1]]

    def test_who_counts_references_is_told_that_the_others_are_gone(self) -> None:
        tracker, request = OffloadingEventsTracker(ON, max_tokens=8), prompt(24)
        tracker.record_stores(request, group(), (0,), (request.key(1),))
        tracker.take_events([stored(request.key(1), tier="disk")])
        tracker.record_stores(request, group(), (1,), (request.key(3),))
        removal, placeholder = tracker.take_events([])
        assert removal == BlockRemoved([*request.block_hashes[:2]], "STORAGE", 0, "LOCAL", "disk")
        assert (placeholder.block_hashes, getattr(placeholder, "block_size", None)) == ([request.block_hashes[1]], 0)


class TestPlaceholders:
    def test_an_unknown_block_has_its_own_hash_and_no_tokens(self) -> None:
        tracker = OffloadingEventsTracker(ON)
        key = make_offload_key(b"h" * 32, 3)
        assert tracker.take_events([stored(key, tier="disk"), removed(key, tier="disk")]) == [
            BlockStored(
                [b"h" * 32], None, [], 0, None, "STORAGE", None, group_idx=3, locality="LOCAL", ownership="disk"
            ),
            BlockRemoved([b"h" * 32], "STORAGE", 3, "LOCAL", "disk"),
        ]

    def test_states_are_not_captured(self) -> None:
        tracker, request, states = OffloadingEventsTracker(ON), prompt(24), group()
        states.is_state, states.is_full = True, False
        tracker.record_stores(request, states, (0,), (request.key(1),))
        assert len(tracker) == 0

    def test_of_a_found_window_only_what_the_hit_needs_is_captured(self) -> None:
        tracker, request = OffloadingEventsTracker(ON), prompt(24)
        keys = [request.key(index, 1) for index in (1, 3, 5)]
        tracker.record_lookup(request, group(1, window=8), keys, 0, 3)
        assert list(tracker.snapshots) == keys[2:]

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
        tracker.record_stores(request, group(), (0,), (request.key(1),))
        (event,) = tracker.take_events([stored(request.key(1))])
        assert isinstance(event, BlockStored)
        assert (len(tracker), event.token_ids, event.block_size) == (0, [], 0)
        assert not caplog.records

    def test_a_reset_forgets_all(self) -> None:
        tracker, request = OffloadingEventsTracker(ON), prompt(24)
        tracker.record_stores(request, group(), (0,), (request.key(1),))
        tracker.reset()
        assert len(tracker) == 0


class TestSessions:
    def test_a_block_has_the_session_of_the_request_that_stored_it(self) -> None:
        tracker, request = OffloadingEventsTracker(ON), prompt(24)
        request.session_id = "chat 7"  # type: ignore[attr-defined]
        tracker.record_stores(request, group(), (0,), (request.key(1),))
        (event,) = tracker.take_events([stored(request.key(1))])
        assert isinstance(event, BlockStored)
        assert event.session_id == "chat 7"

    def test_a_block_without_a_session_or_known_by_its_hash_only_has_none(self) -> None:
        tracker, request = OffloadingEventsTracker(ON), prompt(24)
        tracker.record_stores(request, group(), (0,), (request.key(1),))
        told = tracker.take_events([stored(request.key(1), request.key(3))])
        assert [event.session_id for event in told if isinstance(event, BlockStored)] == [None, None]


class TestWindows:
    def test_say_what_the_block_holds_and_how_far_its_group_reaches(self) -> None:
        tracker, request = OffloadingEventsTracker(ON), prompt(24)
        key = request.key(3, 1)
        tracker.record_stores(request, group(1, window=8), (1,), (key,))
        (event,) = tracker.take_events([stored(key)])
        assert isinstance(event, BlockStored)
        assert (event.block_hashes, event.parent_block_hash) == (request.block_hashes[2:4], request.block_hashes[1])
        assert (event.token_ids, event.group_idx) == (list(range(8, 16)), 1)
        assert (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) == ("sliding_window", 8)


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
        assert len(scheduler.events) == 5 + 6

    def test_a_failed_store_is_forgotten(self) -> None:
        scheduler, _ = self.make()
        job = run_prompt(scheduler, prompt(24), ids(6)).reqs_to_store["r1"].job_id
        scheduler.update_connector_output(finished(job, failed=[job]))
        assert len(scheduler.events) == 0

    def test_a_reset_forgets_all(self) -> None:
        scheduler, _ = self.make()
        run_prompt(scheduler, prompt(24), ids(6))
        scheduler.reset_cache()
        assert len(scheduler.events) == 0

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

    def test_what_is_loaded_for_a_request_is_described(self) -> None:
        scheduler, manager = self.make(block_size=8)
        request = prompt(24)
        keys = [request.key(1), request.key(3), request.key(5)]
        manager.hold(keys)
        manager.events = [stored(*keys)]
        scheduler.take_events()
        start_load(scheduler, request, ids(6))
        events = [event for event in scheduler.take_events() if isinstance(event, BlockStored)]
        assert [event.token_ids for event in events] == [list(range(start, start + 8)) for start in (0, 8, 16)]

    def test_snapshots_need_both_switches(self) -> None:
        scheduler, _ = make_scheduler(self_describing_kv_events=True)
        run_prompt(scheduler, prompt(24), ids(6))
        assert len(scheduler.events) == 0


class TestRestored:
    """Blocks that are found on the disk are described by the announcements of the last engine."""

    def written(self, blocks: int = 3, **words: Any) -> Run:
        request = prompt(8 * blocks)
        tracker = OffloadingEventsTracker(ON)
        keys = [request.key(2 * index + 1) for index in range(blocks)]
        tracker.record_stores(request, group(), range(blocks), keys)
        place = tracker.snapshots.find(keys[0])
        assert place is not None
        return replace(place[0], **words)

    def test_blocks_that_are_announced_by_their_hash_are_announced_again_with_their_tokens(self) -> None:
        tracker, run = OffloadingEventsTracker(ON), self.written()
        tracker.take_events([stored(*run.keys[:2], tier="disk")])
        (used,) = tracker.restore(run)
        assert used.keys == run.keys[:2]
        taken = tracker.take_events([])
        assert taken[0].block_hashes == [run.hashes[1], run.hashes[3]]
        assert [type(event) for event in taken] == [BlockRemoved, BlockStored, BlockStored]
        told = [event for event in taken if isinstance(event, BlockStored)]
        assert [event.token_ids for event in told] == [list(range(8)), list(range(8, 16))]
        assert [event.block_hashes for event in told] == [run.hashes[:2], run.hashes[2:4]]
        assert [event.parent_block_hash for event in told] == [None, run.hashes[1]]
        assert tracker.restored == 2

    def test_of_a_run_whose_middle_is_gone_the_rest_is_described(self) -> None:
        tracker, run = OffloadingEventsTracker(ON), self.written()
        tracker.take_events([stored(run.keys[0], run.keys[2], tier="disk")])
        parts = tracker.restore(run)
        assert [part.keys for part in parts] == [run.keys[:1], run.keys[2:]]
        told = [event for event in tracker.take_events([]) if isinstance(event, BlockStored)]
        assert [event.parent_block_hash for event in told] == [None, run.hashes[3]]
        assert [event.token_ids for event in told] == [list(range(8)), list(range(16, 24))]
        tracker.take_events([removed(run.keys[0], run.keys[2], tier="disk")])
        assert len(tracker) == 0

    def test_blocks_that_no_tier_holds_or_that_are_described_are_left_out(self) -> None:
        tracker, run = OffloadingEventsTracker(ON), self.written()
        request = prompt(24)
        tracker.record_stores(request, group(), (0,), (run.keys[0],))
        tracker.take_events([stored(run.keys[0], tier="disk")])
        assert tracker.restore(run) == []
        assert tracker.take_events([]) == []

    @pytest.mark.parametrize("words", [{"hashes": [b"x" * 32] * 6}, {"hashes": [1, 2, 3, 4, 5, 6]}])
    def test_hashes_that_are_not_those_of_the_blocks_are_left_out(self, words: dict[str, Any]) -> None:
        tracker, run = OffloadingEventsTracker(ON), self.written(**words)
        tracker.take_events([stored(*run.keys, tier="disk")])
        assert tracker.restore(run) == []

    def test_blocks_of_an_adapter_are_removed_by_the_name_that_was_announced(self) -> None:
        tracker, run = OffloadingEventsTracker(ON), self.written(1)
        name = make_offload_key(b"n" * 32, 0)
        run = replace(run, keys=[name], lora_name="parrot")
        (bare,) = tracker.take_events([stored(name, tier="disk")])
        assert isinstance(bare, BlockStored)
        assert tracker.own_hashes is not None
        own = run.hashes[1]
        assert isinstance(own, bytes)
        tracker.own_hashes.add([b"n" * 32], [own])  # a request of the adapter comes before
        tracker.restore(run)
        gone, told = tracker.take_events([])
        assert gone.block_hashes == bare.block_hashes == [b"n" * 32]
        assert isinstance(told, BlockStored)
        assert (told.block_hashes, told.lora_name) == (run.hashes, "parrot")
        (last,) = tracker.take_events([removed(name, tier="disk")])
        assert last.block_hashes == run.hashes

    @pytest.mark.parametrize("first", ["stored", "found"])
    def test_only_blocks_that_the_keeping_tier_has_announced_are_kept_for_the_next_engine(self, first: str) -> None:
        """A request may have kept the others from the tier, and its tokens with them."""
        tracker, request = OffloadingEventsTracker(ON), prompt(48)
        tracker.described_runs = DescribedRuns(Documents(), tracker.restore)
        keys = [request.key(2 * block + 1) for block in range(4)]
        events = [stored(*keys), stored(keys[1], tier="disk"), stored(keys[2], tier="bucket")]
        if first == "found":
            tracker.take_events(events)
        tracker.record_stores(request, group(), range(4), keys)
        if first == "stored":
            tracker.take_events(events)
        (run,) = {tracker.snapshots.find(key)[0] for key in keys}  # type: ignore[index]
        (part,) = run.lasting_parts()
        assert (list(part.keys), list(part.token_ids)) == ([keys[1]], list(range(8, 16)))

    def test_a_run_of_another_lookahead_is_left_out(self) -> None:
        tracker, run = OffloadingEventsTracker(ON), self.written(lookahead=2)
        tracker.take_events([stored(*run.keys, tier="disk")])
        assert tracker.restore(run) == []

    def test_the_bound_on_snapshots_leaves_room_for_new_blocks(self) -> None:
        tracker, run = OffloadingEventsTracker(ON, max_tokens=100), self.written(2)
        tracker.record_stores(prompt(80), group(), range(8), [bytes([index]) * 34 for index in range(8)])
        tracker.take_events([stored(*run.keys, tier="disk")])
        assert tracker.restore(run) == []
