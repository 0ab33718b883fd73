"""The choice between loading and computing: decisions, bounded waits, cuts and probes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tiering.api.keys import OffloadKey, make_offload_key
from tiering.api.manager import PrefixMatch
from tiering.api.request import ReqContext
from tiering.manager.load_gate import PROBE_BLOCKS, PROBE_SECONDS, SHORTER, LoadGate
from tiering.manager.manager import TieringOffloadingManager
from tiering.manager.prefix_search import HANDOVER_HALF_LIFE, HANDOVER_SECONDS
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.secondary.contract import JobResult, TransferJob
from tiering.secondary.speeds import LoadOrCompute
from tiering.testing.clock import FakeClock
from tiering.testing.fake_tier import FakeTier

BLOCK_SECONDS = 0.1


class Rig:
    """A manager with one or more fake tiers that hold all keys, and a clock."""

    def __init__(self, rule: LoadOrCompute = "auto", rows: int = 256, **fields: object) -> None:
        self.clock = FakeClock()
        self.tier = FakeTier(load_or_compute=rule, **fields)  # type: ignore[arg-type]
        primary = CPUPrimaryTierOffloadingManager(np.zeros((rows, 1), np.uint8).data)
        self.manager = TieringOffloadingManager(primary, [self.tier], clock=self.clock)
        self.manager.note_compute([BLOCK_SECONDS])

    def keys(self, name: str, count: int = 10) -> list[OffloadKey]:
        keys = [make_offload_key(f"{name} {number}".encode().ljust(32), 0) for number in range(count)]
        self.tier.held.update(keys)
        return keys

    def begin(self, name: str) -> ReqContext:
        ctx = ReqContext(name)
        self.manager.on_new_request(ctx)
        return ctx

    def ask(self, ctx: ReqContext, keys: Sequence[OffloadKey]) -> PrefixMatch:
        match = self.manager.match_prefix(keys, ctx)
        self.manager.on_schedule_end()
        return match

    def finish(self, job: TransferJob, seconds: float | None = None) -> None:
        self.tier.loads.remove(job)
        self.tier.results.append(JobResult(job.job_id, True, transfer_time=seconds))

    def measure(self, seconds: float, count: int = 10, name: str = "measured") -> PrefixMatch:
        """Let a request load ``count`` blocks in ``seconds``, and return its match."""
        keys, ctx = self.keys(name, count), self.begin(name)
        if not self.ask(ctx, keys).pending:
            return self.ask(ctx, keys)
        self.clock.advance(seconds)
        for job in list(self.tier.loads):
            self.finish(job)
        match = self.ask(ctx, keys)
        self.manager.on_request_finished(ctx)
        return match

    @property
    def stats(self) -> dict[str, int]:
        return {name: self.manager.get_stats()["tiers"]["fake"][name] for name in ("loads_gated", "loads_cut")}


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_load_pays_while_nothing_is_known_and_while_it_is_faster(rig: Rig) -> None:
    assert rig.measure(0.5) == PrefixMatch(10, False)
    assert rig.measure(0.5, name="again") == PrefixMatch(10, False)
    assert rig.stats == {"loads_gated": 0, "loads_cut": 0}


def test_a_load_that_takes_longer_than_computing_is_not_begun(rig: Rig) -> None:
    rig.measure(0.9)
    rig.manager.note_compute([0.01])
    assert rig.ask(rig.begin("b"), rig.keys("b")) == PrefixMatch(0, False)
    assert rig.stats == {"loads_gated": 10, "loads_cut": 0}
    assert rig.manager.get_stats()["tiers"]["fake"]["gate_closed"] == 1


def test_always_loads_and_never_does_not_whatever_is_known() -> None:
    always, never = Rig("always"), Rig("never")
    for one in (always, never):
        one.manager.note_compute([1e-9])
    assert not always.manager.gates_loads
    assert always.measure(50.0) == PrefixMatch(10, False)
    assert always.ask(always.begin("b"), always.keys("b")).pending
    assert never.measure(0.0) == PrefixMatch(0, False)
    assert never.tier.asked == []


def test_an_engine_that_takes_no_time_to_compute_computes_and_the_tier_is_measured() -> None:
    rig = Rig()
    rig.manager.note_compute([0.0])
    assert rig.ask(rig.begin("a"), rig.keys("a")) == PrefixMatch(0, False)
    (job,) = rig.tier.loads
    assert list(job.keys) == rig.keys("a")
    rig.clock.advance(0.2)
    rig.finish(job)
    rig.manager.on_schedule_end()
    rig.manager.note_compute([0.1])
    assert rig.ask(rig.begin("b"), rig.keys("b")).pending


def test_a_fresh_engine_loads_for_as_long_as_computing_is_assumed_to_take(rig: Rig) -> None:
    rig.manager.note_compute([0.2], is_assumed=True)
    keys, ctx = rig.keys("a"), rig.begin("a")
    assert rig.ask(ctx, keys).pending
    rig.clock.advance(1.99)
    assert rig.ask(ctx, keys).pending
    rig.clock.advance(0.02)
    assert rig.ask(ctx, keys) == PrefixMatch(0, False)
    assert rig.stats == {"loads_gated": 0, "loads_cut": 10}


@pytest.mark.parametrize("measured", [0.05, 0.4])
def test_waits_of_a_fresh_engine_follow_its_first_measured_speed(rig: Rig, measured: float) -> None:
    rig.manager.note_compute([0.1], is_assumed=True)
    keys, ctx = rig.keys("a"), rig.begin("a")
    rig.clock.advance(1.0)
    begun = rig.clock()
    assert rig.ask(ctx, keys).pending
    rig.clock.advance(0.3)
    for seconds in (measured, 2.0 * measured):  # only the first measurement replaces the assumption
        rig.manager.note_compute([seconds])
        assert rig.manager.waits_until(ctx) == pytest.approx(begun + 10 * measured)
    rig.clock.advance(10 * measured - 0.31)
    assert rig.ask(ctx, keys).pending
    rig.clock.advance(0.02)
    assert rig.ask(ctx, keys) == PrefixMatch(0, False)


def test_a_fresh_engine_that_turns_out_faster_awaits_slow_answers_for_less(rig: Rig) -> None:
    rig.manager.note_compute([0.2], is_assumed=True)
    keys, ctx = rig.keys("a"), rig.begin("a")
    rig.tier.unknown.update(keys)
    assert rig.ask(ctx, keys).pending
    rig.clock.advance(0.5)
    assert rig.ask(ctx, keys).pending
    rig.manager.note_compute([0.02])
    assert rig.ask(ctx, keys) == PrefixMatch(0, False)


def test_an_engine_that_measures_nothing_loads() -> None:
    rig = Rig()
    rig.manager.note_compute([])
    rig.measure(50.0)
    assert rig.ask(rig.begin("b"), rig.keys("b")).pending


def test_a_request_waits_as_long_as_computing_takes_and_keeps_what_has_arrived() -> None:
    rig = Rig(max_load_blocks=4)
    keys, ctx = rig.keys("a"), rig.begin("a")
    assert rig.ask(ctx, keys).pending
    first, second, third = rig.tier.loads
    rig.finish(first)
    rig.clock.advance(0.99)
    assert rig.ask(ctx, keys).pending
    rig.clock.advance(0.02)
    assert rig.ask(ctx, keys) == PrefixMatch(4, False)
    assert rig.stats["loads_cut"] == 6
    stats = rig.manager.get_stats()["manager"]
    assert (stats["rows_quarantined"], stats["promotions_overdue"]) == (6, 0)
    for job in (second, third):
        rig.finish(job)
    rig.manager.on_schedule_end()
    stats = rig.manager.get_stats()["manager"]
    assert (stats["rows_quarantined"], stats["promotions_adopted"]) == (0, 6)


def test_a_wait_for_rows_is_no_longer_than_computing_takes_however_often_it_is_asked_for() -> None:
    rig = Rig(rows=16)
    assert rig.measure(0.01, 8).hits == 8  # as many as promotions may hold
    owner, first = rig.begin("owner"), rig.keys("owner", 8)
    rig.ask(owner, first)
    rig.clock.advance(0.01)
    rig.finish(rig.tier.loads[0])
    assert rig.ask(owner, first) == PrefixMatch(8, False)
    ctx, keys = rig.begin("waits"), rig.keys("waits", 8)
    for _ in keys:
        assert rig.ask(ctx, keys).pending
        rig.clock.advance(1.01 * BLOCK_SECONDS)
    assert rig.ask(ctx, keys) == PrefixMatch(0, False)


def test_a_pending_lookup_is_repeated_when_the_wait_is_over(rig: Rig) -> None:
    keys, ctx = rig.keys("a"), rig.begin("a")
    rig.ask(ctx, keys)
    assert rig.manager.waits_until(ctx) == pytest.approx(rig.clock() + 1.0)
    rig.ask(ctx, keys)
    assert rig.manager.waits_until(ctx) == pytest.approx(rig.clock() + 1.0)


def test_a_request_joins_a_load_for_no_longer_than_its_own_blocks_take(rig: Rig) -> None:
    keys, owner, other = rig.keys("a"), rig.begin("owner"), rig.begin("other")
    assert rig.ask(owner, keys).pending
    assert rig.ask(other, keys[:2]).pending
    rig.clock.advance(0.3)
    assert rig.ask(other, keys[:2]) == PrefixMatch(0, False)
    assert rig.ask(owner, keys).pending
    (job,) = rig.tier.loads
    rig.finish(job)
    assert rig.ask(owner, keys) == PrefixMatch(10, False)
    assert rig.manager.get_stats()["manager"]["rows_reserved"] == 10
    rig.manager.on_request_finished(owner)
    assert rig.manager.get_stats()["manager"]["rows_reserved"] == 0


def test_the_end_of_the_owners_wait_ends_the_wait_of_no_other_request(rig: Rig) -> None:
    rig.measure(0.1)
    keys, owner, other = rig.keys("a"), rig.begin("owner"), rig.begin("other")
    assert rig.ask(owner, keys[:2]).pending
    assert rig.ask(other, keys) == PrefixMatch(10, True)
    rig.clock.advance(0.3)
    assert rig.ask(owner, keys[:2]) == PrefixMatch(0, False)
    assert rig.ask(other, keys) == PrefixMatch(10, True)
    for job in list(rig.tier.loads):
        rig.finish(job)
    assert rig.ask(other, keys) == PrefixMatch(10, False)
    for ctx in (owner, other):
        rig.manager.on_request_finished(ctx)
    assert rig.manager.get_stats()["manager"]["rows_reserved"] == 0


def test_a_request_does_not_join_a_load_that_is_late(rig: Rig) -> None:
    keys = rig.keys("a")
    rig.ask(rig.begin("owner"), keys)
    rig.clock.advance(0.5)
    assert rig.ask(rig.begin("other"), keys[:2]) == PrefixMatch(0, False)
    assert rig.stats["loads_gated"] == 2


def test_a_tier_that_is_silent_is_left_before_any_load_ends(rig: Rig) -> None:
    rig.measure(0.1)
    rig.ask(rig.begin("a"), rig.keys("a"))
    rig.clock.advance(1.1)
    assert rig.ask(rig.begin("b"), rig.keys("b")) == PrefixMatch(0, False)


def test_loads_that_no_request_awaits_any_more_count_at_the_tier_only(rig: Rig) -> None:
    rig.measure(0.6)
    ctx, keys = rig.begin("a"), rig.keys("a")
    assert rig.ask(ctx, keys).pending
    rig.clock.advance(1.01)
    assert rig.ask(ctx, keys) == PrefixMatch(0, False)
    rig.tier.held.clear()
    assert rig.ask(rig.begin("b"), rig.keys("b")) == PrefixMatch(0, False)


def leave(rig: Rig) -> None:
    rig.measure(0.9)
    rig.manager.note_compute([0.02])


def test_few_blocks_are_loaded_from_time_to_time_to_measure_a_slow_tier(rig: Rig) -> None:
    leave(rig)
    keys = rig.keys("a", 100)
    assert rig.ask(rig.begin("a"), keys) == PrefixMatch(0, False)
    (probe,) = rig.tier.loads
    assert list(probe.keys) == keys[-PROBE_BLOCKS:]
    rig.ask(rig.begin("b"), rig.keys("b"))
    rig.clock.advance(0.5 * PROBE_SECONDS)
    rig.finish(probe)
    keys = rig.keys("c", 100)
    rig.ask(rig.begin("c"), keys)
    (short,) = rig.tier.loads
    assert list(short.keys) == keys[-PROBE_BLOCKS // SHORTER :]
    rig.clock.advance(0.9 * PROBE_SECONDS)
    rig.finish(short)
    rig.ask(rig.begin("d"), rig.keys("d"))
    assert rig.tier.loads == []
    rig.clock.advance(0.2 * PROBE_SECONDS)
    rig.ask(rig.begin("e"), rig.keys("e"))
    assert len(rig.tier.loads) == 1
    assert rig.manager.get_stats()["manager"]["rows_reserved"] == 0


def test_long_loads_are_judged_by_latency_and_time_per_block_though_all_prompts_were_short(rig: Rig) -> None:
    """A load takes 0.5 seconds and 0.01 for each block; a block is computed in 0.05 seconds."""
    rig.manager.note_compute([0.05])
    for number in range(4):
        ctx = rig.begin(f"short {number}")
        rig.ask(ctx, rig.keys(f"short {number}", 8))
        for job in list(rig.tier.loads):
            rig.finish(job, seconds=0.5 + 0.01 * len(job.keys))
        rig.clock.advance(1.0)
        rig.manager.on_schedule_end()
        rig.manager.on_request_finished(ctx)
    assert rig.ask(rig.begin("long"), rig.keys("long", 100)).pending
    for job in list(rig.tier.loads):
        rig.finish(job, seconds=1.5)
    rig.manager.on_schedule_end()
    assert not rig.ask(rig.begin("short"), rig.keys("short", 8)).pending


def test_a_tier_that_has_recovered_is_used_within_a_minute(rig: Rig) -> None:
    leave(rig)
    began, number = rig.clock(), 0
    while not (match := rig.ask(rig.begin(f"r{number}"), rig.keys(f"r{number}"))).pending:
        assert match == PrefixMatch(0, False)
        for job in list(rig.tier.loads):
            rig.finish(job, seconds=0.001 * len(job.keys))
        rig.clock.advance(1.0)
        number += 1
        assert rig.clock() - began < 60.0
    assert number > 1


def test_the_duration_that_the_tier_reports_counts_not_the_time_of_the_report(rig: Rig) -> None:
    keys, ctx = rig.keys("a"), rig.begin("a")
    rig.ask(ctx, keys)
    rig.finish(rig.tier.loads[0], seconds=0.05)
    rig.clock.advance(0.9)
    rig.ask(ctx, keys)
    rig.manager.note_compute([0.01])
    assert rig.ask(rig.begin("b"), rig.keys("b")).pending


def test_slow_answers_are_not_awaited_for_longer_than_computing_takes(rig: Rig) -> None:
    keys = rig.keys("a", 2)
    rig.tier.unknown.update(keys)
    ctx = rig.begin("a")
    assert rig.ask(ctx, keys).pending
    rig.clock.advance(0.25)
    assert rig.ask(ctx, keys) == PrefixMatch(0, False)


def test_answers_of_a_tier_that_is_too_slow_are_not_awaited(rig: Rig) -> None:
    leave(rig)
    keys = rig.keys("a")
    rig.tier.unknown.update(keys)
    assert rig.ask(rig.begin("a"), keys) == PrefixMatch(0, False)


def test_groups_without_a_duration_follow_the_others(rig: Rig) -> None:
    leave(rig)
    window = [make_offload_key(b"window".ljust(32), 1)]
    rig.tier.held.update(window)
    assert rig.ask(rig.begin("a"), window).pending


def test_a_request_with_blocks_of_a_group_without_a_duration_waits_on(rig: Rig) -> None:
    rig.measure(0.5)
    assert rig.ask(rig.begin("owner"), rig.keys("owner")).pending
    window = [make_offload_key(b"window".ljust(32), 1)]
    rig.tier.held.update(window)
    keys, ctx = rig.keys("a"), rig.begin("a")
    assert rig.manager.match_prefix(window, ctx).pending
    rig.manager.on_schedule_end()
    job = rig.tier.loads[-1]
    assert rig.ask(ctx, keys).pending
    for other in [one for one in rig.tier.loads if one is not job]:
        rig.finish(other)
    rig.clock.advance(1.01)
    assert rig.ask(ctx, window).pending
    rig.clock.advance(1.2)
    assert not rig.ask(ctx, window).pending


def test_the_outcome_names_the_tier_that_was_too_slow(rig: Rig) -> None:
    leave(rig)
    ctx = rig.begin("a")
    rig.ask(ctx, rig.keys("a"))
    outcome = rig.manager.lookup_outcome(rig.keys("a")[0], ctx)
    assert outcome is not None
    assert outcome.gated == ("fake",)


def test_loads_that_brought_nothing_do_not_count() -> None:
    gate = LoadGate()
    gate.begin(10, 0.0)
    gate.end(10, 0, 30.0)
    assert gate.expected(1000, 30.0) == 0.0


def test_one_fast_load_says_little_of_the_loads_of_the_next_engine() -> None:
    gate = LoadGate()
    for number in range(20):
        gate.begin(10, 5.0 * number)
        gate.end(10, 10, 5.0 * number + 1.0)
    gate.begin(10, 100.0)
    gate.end(10, 10, 100.5)
    assert gate.expected(10, 100.5) < 0.7
    assert gate.measured == pytest.approx((0.0, 0.1), rel=0.1)


def test_the_latency_is_known_though_the_first_load_of_this_engine_is_the_only_one() -> None:
    gate = LoadGate()
    gate.assume(0.4, 0.01, 0.0)
    gate.begin(10, 50.0)
    gate.end(10, 10, 51.0)  # twice as slow as expected
    assert gate.expected(100, 51.0) == pytest.approx(2 * (0.4 + 100 * 0.01))


def test_loads_go_on_for_a_little_longer_only_after_one_of_this_engine() -> None:
    gate = LoadGate()
    gate.assume(0.0, 0.01, 0.0)
    assert gate.decide(10, 0.101, 0.0, 0.0, 0.0)
    assert not gate.decide(10, 0.098, 0.0, 0.0, 0.0)
    gate.begin(10, 0.0)
    gate.end(10, 10, 0.1)
    assert gate.decide(10, 0.101, 0.0, 0.0, 0.1)
    assert gate.decide(10, 0.098, 0.0, 0.0, 0.1)
    assert not gate.decide(10, 0.094, 0.0, 0.0, 0.1)


def test_a_busy_tier_has_its_latency_once() -> None:
    gate, now = LoadGate(), 0.0
    for _ in range(40):
        gate.begin(8, 0.0)
    for number in range(40):
        now = 0.1 + 0.02 * (number + 1)
        gate.end(8, 8, now)
    assert gate.expected(8, now) == pytest.approx(0.12, rel=0.2)
    assert gate.expected(800, now) == pytest.approx(2.1, rel=0.1)


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_wait_that_has_ended_is_not_added_to_the_next_one(rig: Rig, is_reset: bool) -> None:
    keys, ctx = rig.keys("a", 20), rig.begin("a")
    assert rig.ask(ctx, keys[:10]).pending
    for job in list(rig.tier.loads):
        rig.finish(job)
    if is_reset:
        rig.manager.reset_cache()
        rig.tier.held.update(keys)
    else:
        assert rig.ask(ctx, keys[:10]) == PrefixMatch(10, False)
    assert rig.ask(ctx, keys[10:]).pending
    assert rig.manager.waits_until(ctx) == pytest.approx(rig.clock() + 1.0)


class Handover(Rig):
    """A rig whose tier takes 0.5 s for ten blocks, which take 1 s to compute."""

    pause = 60.0

    def load(self, name: str, handover: float, head: int = 0) -> int:
        """Let a request load ten blocks, and return how many it loads.

        Args:
            name: name of the request.
            handover: seconds from the end of the load to the blocks in the engine's cache.
            head: number of leading blocks that are in the CPU tier already.
        """
        keys, ctx = self.keys(name, head + 10), self.begin(name)
        if head:
            ready = self.begin(f"{name} head")
            stored = self.manager.prepare_store(keys[:head], ready)
            assert stored is not None
            self.manager.complete_store(keys[:head], ready)
        is_loaded = self.ask(ctx, keys).pending
        self.clock.advance(0.5)
        for job in list(self.tier.loads):  # one that measures otherwise
            self.finish(job, 0.5 * len(job.keys) / 10)
        match = self.manager.match_prefix(keys, ctx) if is_loaded else PrefixMatch(head, False)
        self.manager.prepare_load(keys[: match.hits], ctx)
        self.clock.advance(handover)
        self.manager.complete_load(keys[: match.hits], ctx)
        self.manager.note_scheduled(ctx)
        self.manager.on_request_finished(ctx)
        self.manager.on_schedule_end()
        self.clock.advance(self.pause)  # a busy tier is used less
        return match.hits - head


def test_the_time_from_the_load_to_the_engine_counts() -> None:
    """A load of 0.5 s pays beside 1 s of computing, but not if its blocks come 0.6 s later."""
    rig = Handover()
    assert [rig.load(str(number), 0.6) for number in range(3)] == [10, 0, 0]
    rig = Handover()
    assert [rig.load(str(number), seconds) for number, seconds in enumerate((0.1, 0.6, 0.6))] == [10, 10, 10]


def test_the_typical_time_to_the_engine_counts_until_it_has_faded() -> None:
    rig = Handover()
    rig.pause = 0.0
    assert [rig.load(str(number), seconds) for number, seconds in enumerate((0.3, 0.6, 0.6, 0.6))] == [10, 10, 10, 0]
    rig.clock.advance(6.0 * HANDOVER_HALF_LIFE)
    assert rig.load("later", 0.6) == 10


def test_the_time_to_the_engine_is_measured_again() -> None:
    rig = Handover()
    assert [rig.load("slow", 0.6), rig.load("gated", 0.0)] == [10, 0]
    rig.clock.advance(2.0 * HANDOVER_SECONDS)
    assert [rig.load("again", 0.1), rig.load("fast", 0.1)] == [10, 10]


def test_blocks_behind_a_head_that_is_loaded_anyway_take_no_longer_to_the_engine() -> None:
    rig = Handover()
    assert [rig.load("slow", 0.6), rig.load("gated", 0.0), rig.load("behind", 0.6, head=3)] == [10, 0, 10]
