"""The generic tier, driven step by step: its answers, its I/O orders, and the ends of jobs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.block_tier.fakes import BLOCK_BYTES, NUM_ROWS
from tests.block_tier.rig import CTX, K, Rig
from tiering.api.manager import OffloadingEvent
from tiering.api.namespace import Namespace
from tiering.api.request import ReqContext
from tiering.block_tier.pace import LoadPace
from tiering.block_tier.tier import BlockTier
from tiering.block_tier.transfers import STORE_SHARE
from tiering.errors import CorruptBlockError, DeviceError, OutOfSpaceError, OverdueError, TemporaryStoreError
from tiering.index.slots import SlotIndex
from tiering.medium.block_store import Done
from tiering.secondary.contract import JobResult, PrefixAnswer
from tiering.testing.keys import keys_of

# ----------------------------------------------------------------------------------------------------- stores and loads


def test_a_stored_block_is_held_only_when_its_write_has_ended() -> None:
    rig = Rig().opened()
    job_id = rig.submit_store(K[:3])
    assert rig.tier.lookup_prefix(K[:3], CTX) == PrefixAnswer(0, False)
    rig.io.finish(job_id)
    assert rig.finished() == [JobResult(job_id, True)]
    assert rig.tier.lookup_prefix(K[:4], CTX) == PrefixAnswer(3, False)
    assert rig.tier.lookup(K[2], CTX) is True
    assert rig.tier.lookup(K[3], CTX) is False


def test_blocks_whose_write_failed_are_not_held_and_the_others_are() -> None:
    rig = Rig().opened()
    job_id = rig.submit_store(K[:3])
    rig.io.finish(job_id, [Done.DONE, TemporaryStoreError("busy"), Done.DONE])
    (result,) = rig.finished()
    assert (result.success, result.successful_keys) == (False, [K[0], K[2]])
    assert [rig.tier.lookup(key, CTX) for key in K[:3]] == [True, False, True]
    stats = rig.tier.get_stats()
    assert (stats.cascades, stats.cascades_failed, stats.cascades_active) == (2, 1, 0)


def test_blocks_already_held_are_not_written_again_and_count_as_stored() -> None:
    rig = Rig().opened()
    rig.store_blocks(K[:2])
    job_id = rig.submit_store(K[:3])
    assert [list(job.moved) for job in rig.io.jobs] == [[K[2]]]
    assert list(rig.io.jobs[0].rows) == [2]
    rig.io.finish(job_id)
    assert rig.finished() == [JobResult(job_id, True)]


@pytest.mark.parametrize("shared", [False, True])
def test_a_block_whose_write_is_under_way_is_not_reported_stored_by_another_job(shared: bool) -> None:
    rig = Rig(shared=shared).opened()
    first = rig.submit_store(K[:1])
    second = rig.submit_store(K[:1])
    assert rig.finished() == [JobResult(second, False, [])]
    rig.io.finish(first, [TemporaryStoreError("no")])
    assert rig.finished()[0].success is False


def test_a_store_of_held_blocks_only_ends_without_io() -> None:
    rig = Rig().opened()
    rig.store_blocks(K[:2])
    job_id = rig.submit_store(K[:2])
    assert not rig.io.jobs
    assert rig.finished() == [JobResult(job_id, True)]
    assert rig.tier.idle


def test_a_load_fills_rows_from_where_the_blocks_were_stored() -> None:
    rig = Rig().opened()
    rig.io.finish(rig.submit_store(K[:2]))
    rig.finished()
    job_id = rig.submit_load(K[:2])
    job = rig.io.finish(job_id)
    assert (job.is_promotion, list(job.moved), list(job.rows)) == (True, K[:2], [0, 1])
    assert job.deadline == job.submitted_at + rig.options.deadline
    assert rig.finished() == [JobResult(job_id, True)]


def test_a_load_of_unknown_blocks_loads_the_known_ones() -> None:
    rig = Rig().opened()
    rig.store_blocks(K[:2])
    job_id = rig.submit_load([K[0], K[9], K[1]])
    assert list(rig.io.jobs[0].rows) == [0, 2]
    rig.io.finish(job_id)
    (result,) = rig.finished()
    assert (result.success, result.successful_keys) == (False, [K[0], K[1]])


def test_a_load_of_nothing_known_fails_without_io() -> None:
    rig = Rig().opened()
    job_id = rig.submit_load(K[:2])
    assert not rig.io.jobs
    assert rig.finished() == [JobResult(job_id, False, [])]


def test_lost_and_corrupt_blocks_are_misses_from_then_on_and_counted() -> None:
    rig = Rig().opened()
    rig.store_blocks(K[:4])
    job_id = rig.submit_load(K[:4])
    rig.io.finish(job_id, [Done.DONE, Done.ABSENT, CorruptBlockError("flipped"), TemporaryStoreError("busy")])
    (result,) = rig.finished()
    assert (result.success, result.successful_keys) == (False, [K[0]])
    assert [rig.tier.lookup(key, CTX) for key in K[:4]] == [True, False, False, True]
    stats = rig.tier.get_stats()
    assert (stats.corrupt_blocks, stats.promotions, stats.promotions_failed) == (1, 1, 3)


def test_blocks_that_would_arrive_too_late_count_as_too_long_and_not_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(shared=True).opened()
    rig.store_blocks(K[:4])
    monkeypatch.setattr(LoadPace, "fitting", lambda self, sizes: 1)
    job_id = rig.submit_load(K[:4])
    rig.io.finish(job_id)
    (result,) = rig.finished()
    assert result.successful_keys == K[:1]
    stats = rig.tier.get_stats()
    assert (stats.loads_too_long, stats.promotions, stats.promotions_failed) == (3, 1, 0)


def test_jobs_are_reported_exactly_once() -> None:
    rig = Rig().opened()
    ids = [rig.submit_store(K[i : i + 2]) for i in range(0, 10, 2)]
    for job_id in reversed(ids):
        rig.io.finish(job_id)
    assert sorted(result.job_id for result in rig.finished()) == ids
    assert rig.finished() == []


def test_sizes_are_those_of_the_blocks_groups() -> None:
    rig = Rig(group_bytes=(4096, 1024)).opened()
    keys = [*keys_of(1, 2), *keys_of(1, group=1)]
    rig.submit_store(keys)
    assert list(rig.io.jobs[0].sizes) == [4096, 4096, 1024]


def test_a_full_medium_evicts_what_was_used_least_recently() -> None:
    rig = Rig(slots=3).opened()
    rig.store_blocks([K[0]])
    rig.store_blocks([K[1]])
    rig.store_blocks([K[2]])
    rig.tier.touch([K[0]], CTX)
    rig.store_blocks([K[3]])
    assert [rig.tier.lookup(key, CTX) for key in K[:4]] == [True, False, True, True]
    assert rig.tier.get_stats().evictions == 1


def test_blocks_for_which_there_is_no_room_are_declined() -> None:
    rig = Rig(slots=2).opened()
    job_id = rig.submit_store(K[:4])
    assert list(rig.io.jobs[0].moved) == K[:2]
    rig.io.finish(job_id)
    assert rig.finished()[0].successful_keys == K[:2]
    assert rig.tier.get_stats().stores_declined == 2


# ---------------------------------------------------------------------------------------------------- bounds, deadlines


def test_rows_of_overdue_loads_open_the_breaker_when_they_have_spent_their_share() -> None:
    """A manager lets a tier load into this many rows at most, so the count cannot exceed them."""
    rig = Rig(slots=NUM_ROWS, primary_share=0.1, deadline=5).opened()
    rig.store_blocks(K[:10])
    large = rig.submit_load(K[:5])
    rig.clock.advance(5)
    rig.finished()
    assert rig.tier.get_stats().loads_overdue == 5
    assert rig.tier.lookup(K[0], CTX) is True
    small = rig.submit_load(K[5:6])
    rig.clock.advance(5)
    rig.finished()
    assert rig.tier.get_stats().loads_overdue == 6
    assert rig.tier.get_stats().breaker_state == 2
    assert rig.tier.lookup(K[0], CTX) is False
    rig.io.finish(large, [OverdueError("late")] * 5)
    rig.io.finish(small, [OverdueError("late")])
    assert [result.success for result in rig.finished()] == [False, False]


def test_blocks_whose_deadline_passed_while_they_waited_are_counted() -> None:
    rig = Rig().opened()
    rig.store_blocks(K[:3])
    job_id = rig.submit_load(K[:3])
    rig.io.finish(job_id, [Done.DONE, OverdueError("late"), OverdueError("late")])
    rig.finished()
    assert rig.tier.get_stats().loads_overdue == 2
    assert rig.tier.lookup_prefix(K[:3], CTX).held == 3


def test_loads_that_do_not_end_count_as_failures_of_the_medium() -> None:
    rig = Rig(slots=NUM_ROWS, deadline=5, breaker={"failures": 3}).opened()
    rig.store_blocks(K[:3])
    for key in K[:3]:
        assert rig.tier.get_stats().breaker_state == 0
        rig.submit_load([key], ReqContext(key.hex()))
    rig.clock.advance(5)
    rig.finished()
    assert rig.tier.get_stats().breaker_state == 2


def test_loads_that_nobody_takes_up_in_time_count_as_failures_of_the_medium() -> None:
    """All threads hang, so without the breaker each request in turn would wait for the whole deadline."""
    rig = Rig(slots=NUM_ROWS, deadline=5, breaker={"failures": 3}).opened()
    rig.store_blocks(K[:4])
    for number in range(3):
        assert rig.tier.get_stats().breaker_state == 0
        rig.io.finish(rig.submit_load(K[:2], ReqContext(f"r{number}")), [OverdueError("waited")] * 2)
        rig.io.finish(rig.submit_store(K[10:12]), [OverdueError("waited")] * 2)
        rig.finished()
    assert rig.tier.get_stats().breaker_state == 2
    assert rig.tier.get_stats().loads_overdue == 6


def test_the_parts_of_one_late_load_are_one_failure_of_the_medium() -> None:
    """A disk that is too slow for one long load serves the others."""
    rig = Rig(slots=NUM_ROWS, deadline=5, breaker={"failures": 3}).opened()
    rig.store_blocks(K[:9])
    parts = [rig.submit_load(K[start : start + 3]) for start in (0, 3, 6)]
    for job_id in parts[1:]:
        rig.io.finish(job_id, [OverdueError("waited")] * 3)
    rig.clock.advance(5)
    rig.finished()
    assert rig.tier.get_stats().loads_overdue == 9
    rig.io.finish(parts[0])
    rig.finished()
    for job_id in [rig.submit_load(K[start : start + 3]) for start in (0, 3, 6)]:
        rig.io.finish(job_id)
    rig.finished()
    assert rig.tier.get_stats().breaker_state == 0


def test_a_tier_whose_loads_hang_stays_out_of_service_also_when_its_medium_answers() -> None:
    rig = Rig(slots=NUM_ROWS, primary_share=0.1, deadline=5).opened()
    rig.store_blocks(K[:10])
    job_id = rig.submit_load(K[:8])
    rig.clock.advance(5)
    rig.tier.on_schedule_end()
    rig.clock.advance(100)
    rig.tier.on_schedule_end()
    rig.io.run_tasks("health")
    rig.finished()
    assert rig.tier.get_stats().breaker_state == 0
    assert rig.tier.lookup(K[0], CTX) is False
    rig.io.finish(job_id)
    rig.finished()
    assert rig.tier.lookup(K[0], CTX) is True


# -------------------------------------------------------------------------------------------------------------- breaker


def test_an_open_breaker_answers_no_drops_stores_and_fails_loads() -> None:
    rig = Rig().opened()
    rig.store_blocks(K[:2])
    rig.io.breakers.trip("test")
    rig.tier.on_schedule_end()
    assert rig.tier.lookup_prefix(K[:2], CTX) == PrefixAnswer(0, False)
    store, load = rig.submit_store(K[2:4]), rig.submit_load(K[:2])
    assert not rig.io.jobs
    assert rig.finished() == [JobResult(store, False, []), JobResult(load, False, [])]
    assert rig.tier.get_stats().stores_dropped == 2
    assert rig.tier.get_stats().available == 0


def test_a_tier_comes_back_when_a_probe_of_its_medium_succeeds() -> None:
    rig = Rig().opened()
    rig.store_blocks(K[:2])
    rig.io.breakers.reads.trip("test")
    rig.tier.on_schedule_end()
    assert not rig.io.tasks
    rig.clock.advance(rig.options.breaker.probe_after)
    rig.tier.on_schedule_end()
    rig.tier.on_schedule_end()
    assert [task.name for task in rig.io.tasks] == ["health"]
    rig.store.failure = TemporaryStoreError("still down")
    rig.io.run_tasks()
    rig.finished()
    assert rig.tier.lookup(K[0], CTX) is False
    rig.store.failure = None
    rig.clock.advance(2 * rig.options.breaker.probe_after)
    rig.tier.on_schedule_end()
    rig.io.run_tasks()
    rig.finished()
    assert rig.tier.lookup(K[0], CTX) is True


def test_a_probe_reads_when_reads_failed_and_writes_free_slots_when_writes_failed() -> None:
    rig = Rig(slots=8).opened()
    rig.store_blocks(K[:2])
    held = {rig.tier.index.begin_load([key])[0] for key in K[:2]}
    for breaker, operation in ((rig.io.breakers.reads, "get"), (rig.io.breakers.writes, "put")):
        breaker.trip("test")
        rig.clock.advance(rig.options.breaker.probe_after)
        rig.store.touched.clear()
        rig.tier.on_schedule_end()
        rig.io.run_tasks("health")
        rig.finished()
        assert rig.io.breakers.state == 0
        touched = dict.fromkeys(rig.store.touched)
        assert [what for what, _ in touched] == (["get"] if operation == "get" else ["put", "get"])
        places = {place for _, place in touched}
        assert places <= held if operation == "get" else places.isdisjoint(held)
    rig.store_blocks(K[2:8])


def test_a_medium_that_refuses_writes_serves_what_it_holds() -> None:
    rig = Rig().opened()
    rig.store_blocks(K[:2])
    rig.io.breakers.writes.trip("full")
    rig.tier.on_schedule_end()
    stats = rig.tier.get_stats()
    assert (stats.available, stats.writable, stats.breaker_state) == (1, 0, 2)
    assert rig.tier.lookup_prefix(K[:2], CTX).held == 2
    rig.submit_store(K[2:4])
    assert not rig.io.jobs
    assert rig.tier.get_stats().stores_dropped == 2
    rig.store.failure = OutOfSpaceError("no space left on device")
    for _ in range(3):
        rig.clock.advance(100)
        rig.tier.on_schedule_end()
        rig.io.run_tasks("health")
        rig.finished()
    assert rig.tier.get_stats().writable == 0
    assert rig.tier.lookup_prefix(K[:2], CTX).held == 2
    rig.store.failure = None
    rig.clock.advance(100)
    rig.tier.on_schedule_end()
    rig.io.run_tasks("health")
    rig.finished()
    assert rig.tier.get_stats().writable == 1
    rig.store_blocks(K[2:4])


def test_a_probe_without_a_thread_is_tried_again_with_growing_waits() -> None:
    rig = Rig(breaker={"probe_after": 1, "probe_max": 8}).opened()
    rig.store_blocks(K[:2])
    rig.io.breakers.reads.trip("test")
    refused = 0
    for _ in range(100):
        rig.clock.advance(1)
        rig.tier.on_schedule_end()
        for task in rig.io.tasks:
            refused += 1
            task.on_done(None, TemporaryStoreError("no thread"))
        rig.io.tasks.clear()
    assert 10 <= refused <= 16
    rig.clock.advance(8)
    rig.tier.on_schedule_end()
    rig.io.run_tasks()
    rig.finished()
    assert rig.tier.lookup(K[0], CTX) is True


def test_an_error_of_the_device_drops_the_block_and_retires_its_slot() -> None:
    rig = Rig(slots=4).opened()
    rig.store_blocks(K[:2])
    failed = rig.submit_store(K[2:3])
    bad_for_writes = rig.io.finish(failed, [DeviceError("bad sector")]).places[0]
    job_id = rig.submit_load(K[:1])
    bad_for_reads = rig.io.finish(job_id, [DeviceError("bad sector")]).places[0]
    rig.finished()
    stats = rig.tier.get_stats()
    assert (stats.device_errors, stats.slots_retired, stats.blocks) == (2, 2, 1)
    assert rig.tier.lookup(K[0], CTX) is False
    for key in K[3:9]:
        job = rig.io.finish(rig.submit_store([key]))
        assert set(job.places).isdisjoint({bad_for_writes, bad_for_reads})
        rig.finished()
    assert OffloadingEvent([K[0]], "STORAGE", "LOCAL", "t", removed=True) in rig.events()


# --------------------------------------------------------------------------------------------------- requests, policies


def test_admission_none_takes_no_block() -> None:
    rig = Rig(admission="none").opened()
    assert rig.tier.admit(K[:2], CTX, False) == []
    assert rig.tier.get_stats().stores_declined == 2


def test_a_tier_that_takes_no_stores_admits_no_block() -> None:
    rig = Rig().opened()
    assert rig.tier.admit(K[:2], CTX, False) is None
    rig.io.breakers.writes.trip("test")
    rig.finished()
    assert rig.tier.admit(K[:2], CTX, False) == ()
    assert rig.tier.get_stats().stores_dropped == 2
    assert rig.tier.credit(1000, 1.0) is None, "what is queued ends at once"


def test_the_credit_is_what_keeps_the_medium_busy_until_the_end_of_the_next_step() -> None:
    rig = Rig(slots=NUM_ROWS).opened()
    rig.io.busy_bytes = 4 * BLOCK_BYTES
    assert rig.tier.credit(1000, 0.0) == 4
    job_id = rig.submit_store(K[:3])
    assert rig.tier.credit(1000, 0.0) == 1
    rig.clock.advance(1.0)
    rig.io.finish(job_id)
    rig.finished()
    assert rig.tier.credit(1000, 2.0) == 6, "3 blocks a second"
    assert rig.tier.credit(1000, 1000.0) == int(STORE_SHARE * NUM_ROWS), "a share of the rows"


def test_the_credit_is_no_larger_than_the_places_that_are_ready() -> None:
    rig = Rig(slots=5).opened()
    assert isinstance(rig.tier.index, SlotIndex)
    rig.tier.index.growing = True
    assert rig.tier.credit(1000, 0.0) == 5
    rig.submit_store(K[:5])
    assert rig.tier.credit(1000, 0.0) == 0
    rig.tier.index.growing = False
    assert rig.tier.credit(1000, 0.0), "old blocks are evicted"


def test_second_touch_takes_a_block_that_is_stored_again() -> None:
    rig = Rig(admission="second_touch").opened()
    assert rig.tier.admit(K[:2], CTX, False) == []
    assert rig.tier.admit(K[1:3], CTX, False) == [0]


def test_second_touch_asks_for_a_declined_block_that_another_request_uses() -> None:
    rig = Rig(admission="second_touch").opened()
    assert rig.tier.admit(K[:3], CTX, False) == []
    rig.tier.touch(K[:3], CTX)
    assert list(rig.tier.on_schedule_end().wanted) == []
    rig.tier.touch(K[:2], ReqContext("r2"))
    wanted = list(rig.tier.on_schedule_end().wanted)
    assert wanted == K[:2]
    assert rig.tier.admit(wanted, CTX, False) is None


# -------------------------------------------------------------------------------------------------------------- opening


def test_a_tier_that_is_not_open_answers_no_and_fails_jobs() -> None:
    rig = Rig()
    assert rig.tier.lookup(K[0], CTX) is False
    store, load = rig.submit_store(K[:1]), rig.submit_load(K[:1])
    assert rig.finished() == [JobResult(store, False, []), JobResult(load, False, [])]


def test_a_medium_that_cannot_be_opened_is_taken_into_service_when_it_can(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.store.failure = TemporaryStoreError("no route to host")
    assert rig.tier.open(rig.clock() + 1) is False
    for _ in range(20):
        rig.clock.advance(100)
        rig.tier.on_schedule_end()
        rig.io.run_tasks()
        assert rig.finished() == []
    assert len([record for record in caplog.records if "no route to host" in record.getMessage()]) == 1
    rig.store.failure = None
    rig.clock.advance(100)
    rig.tier.on_schedule_end()
    rig.io.run_tasks()
    rig.finished()
    rig.store_blocks(K[:1])


def test_opening_is_not_tried_again_before_the_backoff_has_passed() -> None:
    rig = Rig(breaker={"probe_after": 10})
    rig.store.failure = TemporaryStoreError("down")
    rig.tier.open(rig.clock() + 1)
    rig.clock.advance(5)
    rig.tier.on_schedule_end()
    assert not rig.io.tasks


def test_an_opening_that_hangs_is_left_behind_at_the_deadline() -> None:
    rig = Rig()
    rig.io.hold = True
    begun = rig.clock()
    assert rig.tier.open(begun + 3) is False
    assert rig.clock() == pytest.approx(begun + 3)
    rig.io.run_tasks()
    rig.finished()
    rig.store_blocks(K[:1])


def test_other_parameters_under_the_same_fingerprint_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    document = f"namespace-{rig.context.namespace.directory}.json"
    rig.store.documents[document] = b'{"other": "model"}'
    assert rig.tier.open(rig.clock() + 1) is False
    assert document in caplog.text


@pytest.mark.parametrize("content", [b"", b"\0" * 300, b'{"model": {"na', b"[1]", b"\xff\xfe", None])
def test_damaged_or_missing_parameters_are_written_again_and_blocks_served(
    content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig().opened()
    rig.store_blocks(K[:2])
    document = f"namespace-{rig.context.namespace.directory}.json"
    whole = rig.store.documents.pop(document)
    if content is not None:
        rig.store.documents[document] = content
    again = Rig(store=rig.store).opened()
    assert rig.store.documents[document] == whole
    assert again.tier.namespace == rig.tier.namespace, "the epoch of the blocks goes on"
    assert caplog.text.count("is written again") == 1


def test_parameters_on_a_bad_sector_are_written_again_and_blocks_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig().opened()
    document = f"namespace-{rig.context.namespace.directory}.json"
    whole, read = rig.store.documents[document], rig.store.read_document

    def fail(name: str) -> object:
        if name == document and rig.store.documents.get(name) is whole:
            raise DeviceError("cannot be read")
        return read(name)

    monkeypatch.setattr(rig.store, "read_document", fail)
    again = Rig(store=rig.store).opened()
    assert again.tier.namespace == rig.tier.namespace
    assert rig.store.documents[document] == whole
    assert rig.store.documents[document] is not whole
    assert caplog.text.count("is damaged: it is written again") == 1


def test_parameters_are_written_beside_the_blocks() -> None:
    rig = Rig().opened()
    document = f"namespace-{rig.context.namespace.directory}.json"
    assert rig.store.documents[document].decode() == rig.context.namespace.parameters


class Hooked(BlockTier):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[str] = []

    def on_opened(self, namespace: Namespace) -> None:
        self.calls.append("opened")

    def on_epoch(self, namespace: Namespace) -> None:
        self.calls.append("epoch")

    def on_step(self) -> None:
        self.calls.append("step")

    def before_close(self, deadline: float) -> None:
        self.calls.append("before_close")


def test_hooks_are_called_in_the_order_of_a_tiers_life() -> None:
    rig = Rig()
    tier = Hooked(rig.context, rig.options, rig.store, SlotIndex(4), io=rig.io)
    tier.open(rig.clock() + 1)
    tier.on_schedule_end()
    tier.reset(rig.clock() + 1)
    tier.shutdown(rig.clock() + 1)
    tier.shutdown(rig.clock() + 1)
    assert tier.calls == ["opened", "step", "epoch", "before_close"]
    assert rig.store.closed == 1


def test_an_end_that_cannot_be_prepared_is_an_end_all_the_same() -> None:
    class Broken(BlockTier):
        def before_close(self, deadline: float) -> None:
            raise OSError("no")

    rig = Rig()
    tier = Broken(rig.context, rig.options, rig.store, SlotIndex(4), io=rig.io)
    tier.open(rig.clock() + 1)
    assert tier.shutdown(rig.clock() + 1) is True
    assert rig.store.closed == 1


def test_preparing_the_end_leaves_time_for_the_end() -> None:
    rig = Rig().opened()
    given: list[float] = []
    rig.tier.before_close = given.append  # type: ignore[method-assign,assignment]
    assert rig.tier.shutdown(rig.clock() + 100)
    assert given[0] < rig.clock() + 100


def test_a_tier_that_stores_nothing_writes_nothing_to_its_medium() -> None:
    rig = Rig(admission="none").opened()
    rig.io.breakers.trip("test")
    rig.clock.advance(100)
    rig.tier.on_schedule_end()
    rig.io.run_tasks("health")
    rig.finished()
    assert rig.tier.get_stats().available == 1
    assert rig.store.documents == {}


# --------------------------------------------------------------------------------------------------------------- events


def test_events_follow_what_happened_in_order() -> None:
    rig = Rig(slots=2).opened()
    failed = rig.submit_store([K[0]])
    rig.io.finish(failed, [TemporaryStoreError("busy")])
    rig.finished()
    rig.store_blocks(K[:2])
    rig.store_blocks(K[2:3])
    job_id = rig.submit_load(K[2:3])
    rig.io.finish(job_id, [CorruptBlockError("flipped")])
    rig.finished()
    held = [key for key in K[:2] if rig.tier.lookup(key, CTX)]
    rig.tier.reset(rig.clock() + 1)
    (evicted,) = set(K[:2]) - set(held)
    assert rig.events() == [
        OffloadingEvent(K[:2], "STORAGE", "LOCAL", "t", removed=False),
        OffloadingEvent([evicted], "STORAGE", "LOCAL", "t", removed=True),
        OffloadingEvent([K[2]], "STORAGE", "LOCAL", "t", removed=False),
        OffloadingEvent([K[2]], "STORAGE", "LOCAL", "t", removed=True),
        OffloadingEvent(held, "STORAGE", "LOCAL", "t", removed=True),
    ]
    assert rig.events() == []


def test_on_a_shared_medium_only_what_we_announced_is_announced_as_removed() -> None:
    rig = Rig(shared=True).opened()
    rig.store_blocks(K[:1])
    job_id = rig.submit_load(K[:2])
    rig.io.finish(job_id, [Done.ABSENT, Done.ABSENT])
    rig.finished()
    assert rig.events() == [
        OffloadingEvent(K[:1], "STORAGE", "LOCAL", "t", removed=False),
        OffloadingEvent(K[:1], "STORAGE", "LOCAL", "t", removed=True),
    ]


# ------------------------------------------------------------------------------------------------------- shared lookups


def test_an_unknown_prefix_is_asked_about_once_and_undecided_meanwhile() -> None:
    rig = Rig(shared=True).opened()
    epoch = rig.tier.namespace.epoch.hex()  # type: ignore[union-attr]
    rig.store.held = {f"{epoch}/{key.hex()[:2]}/{key.hex()}" for key in K[:5]}
    for _ in range(3):
        assert rig.tier.lookup_prefix(K[:8], CTX) == PrefixAnswer(0, True)
    assert [task.name for task in rig.io.tasks] == ["probe"]
    rig.io.run_tasks()
    rig.finished()
    assert rig.tier.lookup_prefix(K[:8], CTX) == PrefixAnswer(5, False)
    assert not rig.io.tasks


def test_single_blocks_are_asked_about_together_at_the_end_of_their_step() -> None:
    rig = Rig(shared=True).opened()
    epoch = rig.tier.namespace.epoch.hex()  # type: ignore[union-attr]
    rig.store.held = {f"{epoch}/{key.hex()[:2]}/{key.hex()}" for key in (K[1], K[3])}
    assert [rig.tier.lookup(key, CTX) for key in K[:4]] == [None] * 4
    assert not rig.io.tasks
    rig.tier.on_schedule_end()
    rig.store.rounds.clear()
    rig.io.run_tasks()
    assert [len(places) for places in rig.store.rounds] == [4]
    rig.finished()
    assert [rig.tier.lookup(key, CTX) for key in K[:4]] == [False, True, False, True]
    rig.tier.on_schedule_end()
    assert not rig.io.tasks


def test_single_blocks_whose_probe_fails_are_missed_for_a_moment() -> None:
    rig = Rig(shared=True).opened()
    assert [rig.tier.lookup(key, CTX) for key in K[:2]] == [None] * 2
    rig.tier.on_schedule_end()
    (task,) = rig.io.tasks
    task.on_done(None, TemporaryStoreError("no answer"))
    assert [rig.tier.lookup(key, CTX) for key in K[:2]] == [False] * 2
    rig.clock.advance(1.0)
    assert [rig.tier.lookup(key, CTX) for key in K[:2]] == [None] * 2


def test_a_probe_that_a_reset_overtakes_teaches_nothing() -> None:
    rig = Rig(shared=True).opened()
    epoch = rig.tier.namespace.epoch.hex()  # type: ignore[union-attr]
    rig.store.held = {f"{epoch}/{K[0].hex()[:2]}/{K[0].hex()}"}
    rig.tier.lookup_prefix(K[:1], CTX)
    (probe,) = rig.io.tasks
    rig.io.tasks = []
    rig.tier.reset(rig.clock() + 1)
    rig.io.tasks = [probe]
    rig.io.run_tasks()
    rig.finished()
    assert rig.tier.lookup(K[0], CTX) is None


# ------------------------------------------------------------------------------------------------------------- shutdown


def test_shutdown_reports_whether_rows_are_still_in_use() -> None:
    rig = Rig().opened()
    job_id = rig.submit_store(K[:2])
    assert rig.tier.shutdown(rig.clock() + 1) is False
    assert rig.store.closed == 0
    rig.io.finish(job_id)
    assert rig.tier.shutdown(rig.clock() + 1) is True
    assert [result.job_id for result in rig.finished()] == [job_id]
    assert rig.store.closed == 1


def test_after_shutdown_the_tier_answers_no() -> None:
    rig = Rig().opened()
    rig.store_blocks(K[:1])
    rig.tier.shutdown(rig.clock() + 1)
    assert rig.tier.lookup(K[0], CTX) is False
    job_id = rig.submit_store(K[:1])
    assert rig.finished() == [JobResult(job_id, False, [])]
