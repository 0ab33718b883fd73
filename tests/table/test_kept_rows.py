"""Kept rows: others are evicted before them, for a time and within a share of the table."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.table.test_first_victims import KEYS, evicted, filled, mark, rows
from tiering.api.hints import EXPECT_FACTOR, KeptBlocks
from tiering.table import kept_rows
from tiering.table.block_table import BlockTable
from tiering.table.kept_rows import KeptRows
from tiering.table.policies.policy import Rows
from tiering.table.swept_heap import FEW, LOOKS, MOST_LISTED
from tiering.testing.clock import FakeClock
from tiering.testing.keys import keys_of


def keep(
    table: BlockTable,
    clock: FakeClock,
    *keys: bytes,
    pin: bool = False,
    share: float = 0.5,
    seconds: float = 10.0,
    tenant: bytes = b"",
) -> int:
    return table.keep(KeptBlocks(keys, seconds, share, pin, tenant), clock)


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("pin", [False, True])
def test_others_are_evicted_before_kept_blocks_until_their_time_is_over(policy: str, pin: bool) -> None:
    table, clock = filled(policy, 8), FakeClock()
    assert keep(table, clock, KEYS[0], KEYS[1], KEYS[30], pin=pin) == 2
    assert evicted(table, KEYS[10], KEYS[11]) == [KEYS[2], KEYS[3]]
    clock.advance(10.0)
    gone = [key for new in range(12, 18) for key in evicted(table, KEYS[new])]
    assert {KEYS[0], KEYS[1]} < set(gone)


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_kept_blocks_go_when_there_is_no_other_the_pinned_ones_last(policy: str) -> None:
    table, clock = filled(policy, 4), FakeClock()
    keep(table, clock, KEYS[0], KEYS[1], pin=True)
    keep(table, clock, KEYS[2], KEYS[3])
    assert set(evicted(table, KEYS[10], KEYS[11])) == {KEYS[2], KEYS[3]}
    table.pin(rows(*(row for row in table.rows_of(KEYS[2:4]) if row is not None)))
    assert set(evicted(table, KEYS[12])) <= {KEYS[0], KEYS[1]}


def test_a_share_bounds_the_kept_blocks_of_each_kind_and_the_head_comes_first() -> None:
    table, clock = filled("lru", 8), FakeClock()
    assert keep(table, clock, *KEYS[:4], share=0.25) == 2
    assert keep(table, clock, *KEYS[4:8], share=0.25) == 0
    assert keep(table, clock, *KEYS[4:8], share=0.25, pin=True) == 2
    assert evicted(table, KEYS[10]) == [KEYS[2]]
    clock.advance(10.0)
    assert keep(table, clock, *KEYS[6:8], share=0.25) == 2


@pytest.mark.parametrize("pin", [False, True])
def test_beyond_the_share_the_blocks_with_the_farthest_end_yield_tails_first(pin: bool) -> None:
    table, clock = filled("lru", 8), FakeClock()
    assert keep(table, clock, *KEYS[:4], seconds=100.0, pin=pin) == 4
    assert keep(table, clock, *KEYS[4:6], seconds=5.0, pin=pin) == 2
    assert keep(table, clock, *KEYS[6:8], seconds=200.0, pin=pin) == 0
    assert evicted(table, KEYS[10], KEYS[11]) == [KEYS[2], KEYS[3]]


def expect(table: BlockTable, clock: FakeClock, *keys: bytes, after: float, share: float = 0.5) -> int:
    """Keep own blocks of a session that returns after so many seconds."""
    return table.keep(KeptBlocks(keys, EXPECT_FACTOR * after, share, is_own=True), clock)


def busy(*, idle: bool = False) -> tuple[BlockTable, FakeClock]:
    """Return a table of KEYS[8:16]: all rows were evicted within 10 s, and used at once unless idle."""
    table, clock = filled("lru", 8), FakeClock()
    keep(table, clock, KEYS[0], seconds=1.0)
    clock.advance(10.0)
    for key in KEYS[8:16]:
        taken = table.allocate([key])
        assert taken is not None
        table.commit([key], taken[0])
    for key in () if idle else [*KEYS[8:16], *KEYS[8:16]]:
        table.touch([key])
    return table, clock


@pytest.mark.parametrize(("after", "gone"), [(9.0, KEYS[8]), (11.0, KEYS[10])])
def test_own_blocks_of_a_session_that_returns_late_go_first(after: float, gone: bytes) -> None:
    table, clock = busy()
    assert expect(table, clock, KEYS[9], KEYS[10], after=after) == 2
    assert evicted(table, KEYS[20]) == [gone]


def test_own_blocks_are_kept_for_long_if_the_rows_are_used_little() -> None:
    table, clock = busy(idle=True)
    assert expect(table, clock, KEYS[9], KEYS[10], after=1000.0) == 2
    assert evicted(table, KEYS[20]) == [KEYS[8]]


def test_a_session_that_is_late_takes_its_shared_its_pinned_and_its_retained_blocks_from_nobody() -> None:
    table, clock = busy()
    keep(table, clock, KEYS[10], pin=True)
    keep(table, clock, KEYS[11])
    assert keep(table, clock, KEYS[9], seconds=1000.0) == 1  # not its own
    assert expect(table, clock, KEYS[10], after=1000.0) == 1
    assert expect(table, clock, KEYS[11], after=5.0) == 0
    assert evicted(table, KEYS[20], KEYS[21]) == [KEYS[8], KEYS[12]]


def test_the_farthest_return_goes_first_and_time_brings_a_session_nearer() -> None:
    table, clock = busy()
    for key, after in ((KEYS[9], 12.0), (KEYS[10], 300.0), (KEYS[11], 40.0)):
        assert expect(table, clock, key, after=after) == 1
    assert evicted(table, KEYS[20]) == [KEYS[10]]
    clock.advance(4.0)
    assert evicted(table, KEYS[21], KEYS[22]) == [KEYS[11], KEYS[8]]


def test_a_new_expectation_replaces_the_one_that_a_request_has_met() -> None:
    table, clock = busy()
    assert expect(table, clock, KEYS[9], after=9.0) == 1
    table.touch([KEYS[9]])
    assert expect(table, clock, KEYS[9], after=2000.0) == 1
    assert evicted(table, KEYS[20]) == [KEYS[9]]


def test_own_blocks_that_a_request_uses_or_reads_are_no_late_ones() -> None:
    table, clock = busy()
    assert expect(table, clock, *KEYS[9:12], after=1000.0) == 3
    table.touch([KEYS[11]])
    table.pin(rows(*(row for row in table.rows_of(KEYS[10:11]) if row is not None)))
    assert evicted(table, KEYS[20], KEYS[21]) == [KEYS[9], KEYS[8]]


def test_own_blocks_that_yield_twice_at_once_are_evicted_once() -> None:
    table, clock = busy(idle=True)
    assert expect(table, clock, *KEYS[8:10], after=900.0, share=0.25) == 2
    assert expect(table, clock, *KEYS[10:12], *KEYS[8:10], after=90.0, share=0.25) == 2
    assert evicted(table, *KEYS[20:28]) == [KEYS[9], KEYS[8], *KEYS[12:16], *KEYS[10:12]]


def test_own_blocks_that_became_first_victims_are_evicted_once() -> None:
    table, clock = busy(idle=True)
    table.marks.begin_first_victims(lambda keys: [True] * len(keys))
    expect(table, clock, KEYS[9], after=100.0, share=0.125)
    expect(table, clock, KEYS[10], after=5.0, share=0.125)
    mark(table, KEYS[9])
    assert evicted(table, KEYS[20], KEYS[21]) == [KEYS[9], KEYS[8]]


def test_expectations_of_blocks_that_are_kept_for_longer_leave_nothing_behind() -> None:
    clock = FakeClock()
    kept = KeptRows(8, clock)
    kept.keep(rows(0), 1000.0, 4)
    for _ in range(100):
        assert kept.keep(rows(0), 10.0, 4, is_own=True) == 0
    assert not kept._own


def test_an_eviction_passes_over_few_expectations_that_were_met() -> None:
    clock = FakeClock()
    kept = KeptRows(2000, clock)
    for row in range(1000):
        kept.keep(rows(row), 3000.0 - row, 1000, is_own=True)
    kept.returns[1:990] *= -1.0
    assert kept.take_late(1.0, 2).tolist() == [0]
    assert 900 < len(kept._own) < 999
    looks = [kept.take_late(1.0, 2).tolist() for _ in range(20)]
    assert [row for found in looks for row in found] == [*range(990, 1000)]


def test_expectations_that_replace_each_other_leave_a_bounded_heap() -> None:
    clock = FakeClock()
    kept = KeptRows(8, clock)
    for number in range(1000):
        clock.advance(1.0)
        chosen = rows(number % 8, (number + 3) % 8)
        kept.keep(chosen, 100.0 + number % 50, 4, is_own=True)
        kept.evict_yielded_first(clock() + 60.0)
        assert kept._own.listed <= FEW + 3 * 8
    late = kept.take_late(0.0, 100)
    assert len(set(late.tolist())) == len(late) == 8
    assert not len(kept.take_late(0.0, 100))


@pytest.mark.parametrize(("pin", "used", "gone"), [(0, 0, KEYS[9]), (1, 0, KEYS[8]), (0, 1, KEYS[8])])
def test_own_blocks_that_yield_go_first_if_evictions_reach_them_before(pin: int, used: int, gone: bytes) -> None:
    table, clock = busy(idle=True)
    assert expect(table, clock, KEYS[9], after=100.0, share=0.125) == 1
    if pin:
        keep(table, clock, KEYS[9], pin=True)
    if used:
        table.touch([KEYS[9]])  # by another session: the block is shared now
    assert expect(table, clock, KEYS[10], after=5.0, share=0.125) == 1
    assert evicted(table, KEYS[20]) == [gone]


def test_own_blocks_that_yield_are_ordinary_ones_if_their_session_returns_before() -> None:
    table, clock = busy(idle=True)
    expect(table, clock, KEYS[9], after=9.0, share=0.125)
    expect(table, clock, KEYS[10], after=5.0, share=0.125)
    assert evicted(table, KEYS[20], KEYS[21]) == [KEYS[8], KEYS[9]]


def test_a_row_that_yields_twice_in_one_call_is_one_victim() -> None:
    table, clock = busy()
    assert expect(table, clock, KEYS[10], KEYS[11], after=1000.0, share=0.25) == 2
    assert expect(table, clock, *KEYS[8:12], after=500.0, share=0.25) == 2
    assert evicted(table, KEYS[20], KEYS[21], KEYS[22]) == [KEYS[11], KEYS[10], KEYS[9]]


def test_an_own_row_that_yields_and_becomes_a_first_victim_is_one_victim() -> None:
    table, clock = busy()
    table.marks.begin_first_victims(lambda keys: [True] * len(keys))
    expect(table, clock, KEYS[9], after=100.0, share=0.125)
    expect(table, clock, KEYS[10], after=5.0, share=0.125)
    mark(table, KEYS[9])
    assert evicted(table, KEYS[20], KEYS[21]) == [KEYS[9], KEYS[8]]


@pytest.mark.parametrize("pin", [False, True])
def test_a_tenant_that_keeps_much_yields_to_others_down_to_an_equal_share(pin: bool) -> None:
    table, clock = filled("lru", 16), FakeClock()
    assert keep(table, clock, *KEYS[:8], seconds=1.0, pin=pin, tenant=b"greedy") == 8
    assert keep(table, clock, *KEYS[8:10], seconds=500.0, pin=pin, tenant=b"late") == 2
    assert keep(table, clock, *KEYS[10:16], seconds=500.0, pin=pin, tenant=b"late") == 2
    assert keep(table, clock, *KEYS[12:16], seconds=1.0, pin=pin, tenant=b"late") == 4
    assert table.marks.keeping is not None
    kind = table.marks.keeping.pinned if pin else table.marks.keeping.retained
    assert {tenant.name: tenant.rows for tenant in kind._tenants.values()} == {b"greedy": 4, b"late": 4}


def test_many_tenants_share_fairly_and_leave_nothing_behind() -> None:
    rng, clock = random.Random(7), FakeClock()
    kept = KeptRows(256, clock)
    for number in range(4000):
        clock.advance(rng.random())
        tenant = b"greedy" if number % 2 else b"%d" % rng.randrange(20)
        chosen = np.array(rng.sample(range(256), rng.randrange(1, 12)))
        kept.keep(chosen, rng.choice([5.0, 50.0, 500.0]), 64, tenant)
        if number % 5 == 0:
            kept.discard(np.array(rng.sample(range(256), 8)))
        live = np.flatnonzero(kept._until)
        owners = np.unique(kept._owner[live], return_counts=True)
        counted = dict(zip(owners[0].tolist(), owners[1].tolist(), strict=True))
        assert counted == {number: one.rows for number, one in kept._tenants.items()}
        assert kept.rows == len(live) <= 64
        assert len(kept._sizes) <= FEW + 5 * 21
        assert kept._ends.listed <= FEW + (MOST_LISTED + 1) * 64
    clock.advance(500.0)
    kept.expire(clock())
    assert not kept.rows
    assert not kept._tenants
    assert not kept._ids


def test_rows_that_other_blocks_got_are_kept_no_longer() -> None:
    table, clock = filled("lru", 4), FakeClock()
    keep(table, clock, KEYS[0], KEYS[1])
    table.drop([KEYS[0]])
    evicted(table, KEYS[10])
    assert table.marks.keeping is not None
    assert table.marks.keeping.retained.rows == 1


def test_a_release_ends_a_retention_and_a_retention_a_release() -> None:
    table, clock = filled("lru", 4), FakeClock()
    keep(table, clock, KEYS[3])
    table.release([KEYS[3], KEYS[2]])
    keep(table, clock, KEYS[2])
    assert evicted(table, KEYS[10], KEYS[11]) == [KEYS[3], KEYS[0]]


def test_kept_blocks_are_no_first_victims() -> None:
    table, clock = filled("lru", 4, set(KEYS[:4])), FakeClock()
    mark(table, KEYS[2], KEYS[3])
    keep(table, clock, KEYS[3])
    assert evicted(table, KEYS[10]) == [KEYS[2]]


def test_kept_blocks_do_not_become_first_victims_before_their_time_is_over() -> None:
    table, clock = filled("lru", 4, set(KEYS[:4])), FakeClock()
    keep(table, clock, KEYS[3], pin=True)
    mark(table, KEYS[2], KEYS[3])
    assert evicted(table, KEYS[10]) == [KEYS[2]]
    clock.advance(10.0)
    mark(table, KEYS[3])
    assert evicted(table, KEYS[11]) == [KEYS[3]]


def test_a_block_that_is_being_written_is_kept_once_it_is_readable() -> None:
    table, clock = filled("lru", 4), FakeClock()
    taken = table.allocate([KEYS[10]])
    assert taken is not None
    assert keep(table, clock, KEYS[10]) == 1
    table.commit([KEYS[10]], taken[0])
    assert [key for new in (11, 12, 13) for key in evicted(table, KEYS[new])] == KEYS[1:4]


def test_a_table_that_is_cleared_keeps_nothing() -> None:
    table, clock = filled("lru", 4), FakeClock()
    keep(table, clock, *KEYS[:2])
    table.clear()
    assert table.marks.keeping is not None
    assert table.marks.keeping.retained.rows == 0


def test_a_retained_block_yields_after_a_short_search_and_a_pinned_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept_rows, "LONGEST_LOOK", 2)
    for pin in (False, True):
        table, clock = filled("lru", 12), FakeClock()
        keep(table, clock, *KEYS[:6], pin=pin)
        assert evicted(table, KEYS[20]) == ([KEYS[0]] if not pin else [KEYS[6]])


def test_a_search_in_a_large_table_evicts_a_few_blocks_ahead_of_need() -> None:
    keys = keys_of(*range(2048 + 8))
    table, clock = BlockTable(2048), FakeClock()
    for key in keys[:2048]:
        taken = table.allocate([key])
        assert taken is not None
        table.commit([key], taken[0])
    table.keep(KeptBlocks(keys[:20], 10.0, 0.5), clock)
    gone = evicted(table, keys[2048])
    assert 1 <= len(gone) <= 8
    assert gone == keys[20 : 20 + len(gone)]
    assert table.free == len(gone) - 1


def test_a_time_that_grows_by_little_is_left_alone() -> None:
    clock = FakeClock()
    kept = KeptRows(8, clock)
    assert kept.keep(rows(0, 1), 80.0, 8) == 2
    assert kept.keep(rows(0, 1), 85.0, 8) == 0
    clock.advance(20.0)
    assert kept.keep(rows(0, 1), 80.0, 8) == 2
    assert len(kept._ends) == 2
    clock.advance(60.0)
    kept.expire(clock())
    assert kept.rows == 2
    clock.advance(20.0)
    kept.expire(clock())
    assert kept.rows == 0


def test_the_end_of_many_sessions_at_once_is_divided_over_calls() -> None:
    clock = FakeClock()
    kept = KeptRows(4 * kept_rows.MOST_ENDED, clock)
    for row in range(2 * kept_rows.MOST_ENDED):
        kept.keep(np.array([row]), 10.0, 4 * kept_rows.MOST_ENDED)
    kept.keep(np.array([0]), 20.0, 4 * kept_rows.MOST_ENDED)  # row 0 is in two lists
    clock.advance(30.0)
    assert not kept.are_kept(np.arange(2 * kept_rows.MOST_ENDED)).any()
    kept.expire(clock())
    assert kept.rows == kept_rows.MOST_ENDED + 1
    kept.expire(clock())
    kept.expire(clock())
    assert kept.rows == 0


class Looks:
    """The numbers of entries and rows that heaps of kept rows look at.

    Args:
        monkeypatch: replaces the functions that look.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(kept_rows, "_have", self._counted)

    def _counted(self, times: NDArray[np.float64], sign: float) -> Callable[[float, Rows], NDArray[np.bool_]]:
        def have(number: float, rows: Rows) -> NDArray[np.bool_]:
            self.count += 1 + len(rows)
            mask: NDArray[np.bool_] = times[rows] == sign * number
            return mask

        return have

    def take(self) -> int:
        """Return the number since the last call."""
        count, self.count = self.count, 0
        return count


def test_each_call_looks_at_a_bounded_number_of_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A heap of 50,000 sessions that was made anew took 140 ms of the scheduler's thread."""
    looks, clock, sessions = Looks(monkeypatch), FakeClock(), 4000
    kept = KeptRows(2 * sessions, clock)
    rng, most = random.Random(3), [0, 0]
    for number in range(6 * sessions):
        clock.advance(0.001)
        kept.keep(rows(rng.randrange(sessions)), rng.choice([4000.0, 5000.0]), sessions, is_own=number % 2 == 0)
        kept.discard(rows(rng.randrange(sessions)))
        most = max(most, [looks.take(), number])
    assert 2 * LOOKS <= most[0] <= 3 * (LOOKS + 1) * 2


def test_a_search_for_rows_that_yield_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions with the farthest end have lost their rows, and others fill the bound."""
    looks, clock, sessions = Looks(monkeypatch), FakeClock(), 2000
    kept = KeptRows(3 * sessions, clock)
    for row in range(sessions):
        kept.keep(rows(row), 4000.0, sessions)
    kept.discard(np.arange(1, sessions))
    for row in range(sessions + 1, 2 * sessions):
        kept.keep(rows(row), 100.0, sessions)
    looks.take()
    latest, refused = rows(2 * sessions, 2 * sessions + 1), 0
    while not kept.keep(latest, 50.0, sessions, is_own=True):
        refused += 1
        assert looks.take() <= 2 * (kept_rows.MOST_ENDED + 8)
        assert kept.rows == sessions
        kept.evict_yielded_first(clock())
        assert kept.take_late(clock(), 2).tolist() == [*latest[::-1]]
    assert 1 <= refused <= sessions // kept_rows.MOST_ENDED


def test_the_end_of_sessions_of_many_rows_is_divided_over_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_rows, "MOST_ENDED_ROWS", 100)
    clock = FakeClock()
    kept = KeptRows(1000, clock)
    for first in range(0, 900, 30):
        kept.keep(np.arange(first, first + 30), 10.0, 1000)
    clock.advance(10.0)
    kept.expire(clock(), 100)
    assert kept.rows == 900 - 120
    kept.keep(np.arange(900, 1000), 10.0, 1000)
    assert kept.rows == 900 - 120 - 300 + 100


def test_rows_that_nothing_keeps_are_freed_at_once() -> None:
    """An array has an entry for each row of a table, and the collector of cycles runs at any time."""
    kept = KeptRows(8, FakeClock())
    kept.keep(rows(0, 1), 10.0, 4, is_own=True)
    until = weakref.ref(kept._until)
    del kept
    assert until() is None


def test_hints_that_undo_each_other_leave_a_bounded_heap() -> None:
    clock = FakeClock()
    kept = KeptRows(8, clock)
    for number in range(1000):
        kept.keep(rows(number % 4, 4 + number % 4), 3600.0 - number % 3, 4)
        kept.discard(rows(4 + number % 4))
        assert kept._ends.listed <= FEW + 2 * MOST_LISTED * 4
    clock.advance(3597.5)
    kept.expire(clock())
    assert kept.rows == np.count_nonzero(kept._until) == np.count_nonzero(kept._until > clock()) > 0
    clock.advance(2.5)
    kept.expire(clock())
    assert kept.rows == len(kept._ends) == np.count_nonzero(kept._until) == 0


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_random_lives_keep_what_is_pinned_as_long_as_other_rows_suffice(policy: str) -> None:
    for seed in range(40):
        rng, clock = random.Random(seed), FakeClock()
        table = filled(policy, 12)
        pinned: dict[bytes, float] = {}
        for _ in range(200):
            clock.advance(rng.random())
            action = rng.randrange(4)
            keys = rng.sample(KEYS, rng.randrange(1, 5))
            if action == 0:
                before = {key for key in keys if key in table.readable}
                seconds = rng.choice([1.0, 5.0, 20.0])
                table.keep(KeptBlocks(keys, seconds, 0.25, rng.random() < 0.5), clock)
                assert before <= set(table.readable)
            elif action == 1:
                table.touch(keys)
            else:
                new = table.unknown(keys)
                kinds = table.marks.keeping
                pinned = {}
                if kinds is not None:
                    held = [(key, table.readable[key]) for key in KEYS if key in table.readable]
                    pinned = {key: row for key, row in held if kinds.pinned.are_kept(np.array([row]))[0]}
                taken = table.allocate(new) if new else None
                if taken is not None:
                    assert not set(taken[1]) & set(pinned) or len(new) > 12 - len(pinned)
                    table.commit(new, taken[0])
            kinds = table.marks.keeping
            if kinds is not None:
                for kind in (kinds.retained, kinds.pinned):
                    assert kind.rows == np.count_nonzero(kind._until) <= 3
            assert table.free + len(table.readable) == 12
            assert table.evictable == len(table.readable)
