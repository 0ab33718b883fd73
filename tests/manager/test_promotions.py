"""Promotions, tested on the class: rows, shares, heirs, reservations, deadlines, failures and resets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tiering.api.keys import OffloadKey
from tiering.api.misses import Refusal
from tiering.api.request import ReqContext
from tiering.api.request_policy import DEFAULT_REQUEST_POLICY
from tiering.manager.manager_stats import ManagerStats
from tiering.manager.promotions import Promotion, Promotions, Started
from tiering.manager.requests import Request
from tiering.manager.reservations import Reservations
from tiering.manager.row_broker import RowBroker
from tiering.manager.tier_state import TierState
from tiering.manager.tiers import SecondaryTiers
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.testing.clock import FakeClock
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import keys_of

A, B, C, D = K = keys_of(*range(4))
STORER = ReqContext("storer")
DEADLINE = 5.0
RESERVED = 30.0


class World:
    """Promotions into a small primary tier, from a fast and a slow tier, for requests "r1" and "r2"."""

    def __init__(self, rows: int = 8, share: int = 8, tier_rows: int = 8) -> None:
        self.clock = FakeClock()
        self.stats = ManagerStats()
        self.primary = CPUPrimaryTierOffloadingManager(np.zeros((rows, 16), np.uint8).data, enable_events=True)
        self.reservations = Reservations(self.primary, self.stats, self.clock, RESERVED)
        share_of_tier = min(1.0, tier_rows / rows)
        fakes = [FakeTier(name, load_deadline=DEADLINE, primary_share=share_of_tier) for name in ("fast", "slow")]
        tiers = SecondaryTiers(fakes, rows, self.stats, self.clock, lambda state: None)
        broker = RowBroker(self.primary, tiers, self.stats, self.clock)
        self.promotions = Promotions(self.primary, self.reservations, broker, self.stats, self.clock, share)
        self.fast, self.slow = tiers.states
        self.r1, self.r2 = self.request("r1"), self.request("r2")

    def request(self, req_id: str) -> Request:
        return Request(ReqContext(req_id), DEFAULT_REQUEST_POLICY, [self.fast, self.slow], [])

    def run(self, keys: Sequence[OffloadKey], *others: Request, state: TierState | None = None) -> Promotion:
        """Return a running promotion of ``keys`` that "r1" owns and ``others`` wait for."""
        assert self.promotions.start(state or self.fast, self.r1, keys).blocks == len(keys)
        for other in others:
            self.promotions.join(other, keys)
        (promotion,) = self.promotions.take_queued()
        return promotion

    def store(self, keys: Sequence[OffloadKey]) -> None:
        output = self.primary.prepare_store(keys, STORER)
        assert output is not None
        self.primary.complete_store(output.keys_to_store, STORER)

    def load(self, request: Request, keys: Sequence[OffloadKey]) -> None:
        """Run a load of ``keys`` from its beginning to its end."""
        self.reservations.claim(request, keys, self.primary.claim_load(keys, request.ctx.req_id)[0])
        self.primary.complete_load(keys, request.ctx)

    def finish(self, request: Request) -> None:
        request.finished = True
        self.promotions.release(request)

    def expire(self, now: float) -> None:
        """Let overdue promotions and reservations end, as the collection of finished jobs does."""
        self.promotions.expire(now)
        if now >= self.reservations.next_expiry:
            self.reservations.expire(now)

    def rows(self) -> tuple[int, int, int]:
        """Numbers of free, evictable and quarantined rows."""
        return self.primary.count_rows()[1:]

    def counts(self) -> tuple[int, int, int]:
        """Numbers of rows that are promoting, that are reserved, and into which the fast tier is loading."""
        return self.promotions.rows_promoting, self.reservations.rows, self.fast.loading_rows


# ---------------------------------------------------------------------------------------------------------------- start


def test_a_promotion_takes_its_rows_at_once() -> None:
    world = World()
    assert not world.promotions.queued
    assert world.promotions.start(world.fast, world.r1, [A, B]).blocks == 2
    assert world.promotions.queued
    assert set(world.primary.pending) == {A, B}
    assert world.counts() == (2, 0, 2)
    (promotion,) = world.promotions.take_queued()
    assert not world.promotions.queued
    assert (promotion.state, promotion.owner, promotion.keys) == (world.fast, world.r1, [A, B])
    assert promotion.rows == [world.primary.pending[A], world.primary.pending[B]]
    assert promotion.deadline == world.clock() + DEADLINE


@pytest.mark.parametrize(("rows", "share", "tier_rows"), [(8, 2, 8), (2, 8, 8)], ids=["share", "rows"])
def test_the_first_key_without_room_stays_a_miss_if_the_request_itself_takes_all_rows(
    rows: int, share: int, tier_rows: int
) -> None:
    world = World(rows, share, tier_rows)
    assert world.promotions.start(world.fast, world.r1, K) == Started(2, waits=False)
    assert set(world.primary.pending) == {A, B}
    assert world.r1.refused == {C: Refusal.ROOM}
    assert world.stats.promotions_without_room == 1
    assert world.promotions.start(world.fast, world.r2, [C, D]) == Started(0, waits=True)
    assert not world.r2.refused
    assert (world.stats.promotions_without_room, world.stats.promotions_waited) == (1, 1)
    assert world.counts() == (2, 0, 2)


def test_what_exceeds_the_tiers_share_waits_for_the_loads_of_the_tier() -> None:
    world = World(tier_rows=2)
    assert world.promotions.start(world.fast, world.r1, K) == Started(2, waits=True)
    assert not world.r1.refused
    assert world.counts() == (2, 0, 2)
    (promotion,) = world.promotions.take_queued()
    world.promotions.end(promotion, None)
    assert world.promotions.start(world.fast, world.r1, [C, D], 2) == Started(2, waits=False)


def test_all_that_fits_is_no_lack_of_room() -> None:
    world = World(4, 4, 4)
    assert world.promotions.start(world.fast, world.r1, K).blocks == 4
    assert not world.r1.refused
    assert world.stats.promotions_without_room == 0


def test_reserved_rows_count_in_the_share_of_promotions() -> None:
    world = World(share=3)
    world.promotions.end(world.run([A, B]), None)
    assert world.counts() == (0, 2, 0)
    assert world.promotions.start(world.fast, world.r1, [C, D]).blocks == 1
    assert world.r1.refused == {D: Refusal.ROOM}


def test_promotions_evict_and_count_it() -> None:
    world = World(rows=4)
    world.store(K)
    assert world.promotions.start(world.fast, world.r1, keys_of(10, 11)).blocks == 2
    assert world.stats.evicted_blocks == 2
    assert set(world.primary.readable) == {A, B}


def test_a_key_that_is_named_twice_takes_one_row() -> None:
    world = World()
    assert world.promotions.start(world.fast, world.r1, [A, B, A]).blocks == 3
    assert world.counts() == (2, 0, 2)
    (promotion,) = world.promotions.take_queued()
    assert promotion.keys == [A, B]
    assert len(promotion.rows) == 2


def test_the_promotions_of_a_step_are_one_per_tier_and_request() -> None:
    world = World()
    world.promotions.start(world.fast, world.r1, [A])
    begun = world.clock()
    world.clock.advance(1.0)
    world.promotions.start(world.fast, world.r1, [B])
    world.promotions.start(world.slow, world.r1, [C])
    world.promotions.start(world.fast, world.r2, [D])
    queued = list(world.promotions.take_queued())
    assert [(promotion.state, promotion.owner, promotion.keys) for promotion in queued] == [
        (world.fast, world.r1, [A, B]),
        (world.slow, world.r1, [C]),
        (world.fast, world.r2, [D]),
    ]
    assert queued[0].deadline == begun + DEADLINE
    assert list(world.promotions.take_queued()) == []


# ------------------------------------------------------------------------------------------------------------ join, end


def test_blocks_that_arrive_are_readable_and_reserved_for_all_that_asked() -> None:
    world = World()
    promotion = world.run([A, B], world.r2)
    keys, rows = world.promotions.end(promotion, None)
    assert keys == [A, B]
    assert rows.tolist() == promotion.rows == [world.primary.readable[A], world.primary.readable[B]]
    assert world.counts() == (0, 2, 0)
    assert world.r1.brought == world.r2.brought == dict.fromkeys([A, B], world.fast.rank)
    assert world.r1.asked == world.r2.asked == set()
    assert world.rows() == (6, 0, 0)
    world.load(world.r1, [A, B])
    assert world.rows() == (6, 0, 0)
    world.load(world.r2, [A, B])
    assert world.rows() == (6, 2, 0)
    assert world.counts() == (0, 0, 0)


def test_a_request_joins_a_promotion_once_and_only_for_the_keys_that_it_needs() -> None:
    world = World()
    world.promotions.start(world.fast, world.r1, [A, B])
    for _ in range(2):
        world.promotions.join(world.r2, [B])
        world.promotions.join(world.r1, [A, B])
    (promotion,) = world.promotions.take_queued()
    assert promotion.others == {B: [world.r2]}
    assert (world.r1.asked, world.r2.asked) == ({A, B}, {B})
    world.promotions.end(promotion, None)
    assert (set(world.r1.reserved), set(world.r2.reserved)) == ({A, B}, {B})


def test_blocks_that_are_being_stored_belong_to_no_promotion() -> None:
    world = World()
    assert world.primary.prepare_store([A], STORER) is not None
    world.promotions.join(world.r1, [A])
    assert world.r1.asked == set()
    world.promotions.start(world.fast, world.r2, [B])
    world.promotions.join(world.r1, [A, B])
    assert world.r1.asked == {B}


def test_a_block_that_is_stored_after_its_promotion_failed_belongs_to_no_promotion() -> None:
    world = World()
    world.promotions.end(world.run([A]), ())
    assert world.primary.prepare_store([A], STORER) is not None
    world.promotions.join(world.r2, [A])
    assert world.r2.asked == set()


def test_blocks_that_failed_are_a_miss_and_the_tier_is_not_asked_for_them_again() -> None:
    world = World()
    promotion = world.run([A, B, C], world.r2)
    keys, rows = world.promotions.end(promotion, [B])
    assert keys == [B]
    assert rows.tolist() == [promotion.rows[1]]
    assert set(world.primary.readable) == {B}
    assert not world.primary.pending
    assert world.rows() == (7, 0, 0)
    assert world.r1.failed == world.r2.failed == {world.fast.rank: {A, C}}
    assert (set(world.r1.reserved), set(world.r2.reserved)) == ({B}, {B})
    assert world.r1.asked == world.r2.asked == set()
    assert world.counts() == (0, 1, 0)


def test_a_failure_is_noted_for_the_askers_of_the_block_only() -> None:
    world = World()
    world.promotions.start(world.slow, world.r1, [A, B])
    world.promotions.join(world.r2, [B])
    (promotion,) = world.promotions.take_queued()
    assert world.promotions.end(promotion, ())[0] == []
    assert world.r1.failed == {world.slow.rank: {A, B}}
    assert world.r2.failed == {world.slow.rank: {B}}
    assert world.rows() == (8, 0, 0)


def test_a_block_for_a_finished_request_is_readable_and_not_reserved() -> None:
    world = World()
    promotion = world.run([A])
    world.finish(world.r1)
    assert world.promotions.end(promotion, None)[0] == [A]
    assert world.counts() == (0, 0, 0)
    assert world.rows() == (7, 1, 0)


# ---------------------------------------------------------------------------------------------------------------- heirs


def test_queued_blocks_pass_to_the_first_unfinished_request_that_asked_for_them() -> None:
    world = World()
    r3 = world.request("r3")
    world.promotions.start(world.fast, world.r1, K)
    world.promotions.join(world.r2, [A, B])
    world.promotions.join(r3, [B, C])
    world.finish(world.r1)
    queued = {promotion.owner.ctx.req_id: promotion for promotion in world.promotions.take_queued()}
    assert {req_id: promotion.keys for req_id, promotion in queued.items()} == {"r2": [A, B], "r3": [C]}
    assert D not in world.primary.pending
    assert world.stats.promotions_dropped == 1
    assert world.counts() == (3, 0, 3)
    assert world.rows() == (5, 0, 0)
    for promotion in queued.values():
        assert promotion.rows == [world.primary.pending[key] for key in promotion.keys]
        world.promotions.end(promotion, None)
    assert (set(world.r2.reserved), set(r3.reserved)) == ({A, B}, {B, C})
    world.finish(world.r2)
    world.finish(r3)
    assert world.rows() == (5, 3, 0)


def test_a_finished_request_waits_for_no_block() -> None:
    world = World()
    world.promotions.start(world.fast, world.r1, [A])
    assert len(list(world.promotions.take_queued())) == 1
    world.promotions.start(world.fast, world.r1, [B])
    world.promotions.join(world.r2, [A, B])
    world.finish(world.r2)
    world.finish(world.r1)
    assert world.r1.asked == world.r2.asked == set()


def test_a_finished_request_inherits_nothing() -> None:
    world = World()
    r3 = world.request("r3")
    world.promotions.start(world.fast, world.r1, [A])
    world.promotions.join(world.r2, [A])
    world.promotions.join(r3, [A])
    world.finish(world.r2)
    world.finish(world.r1)
    (promotion,) = world.promotions.take_queued()
    assert promotion.owner is r3


def test_an_inherited_promotion_joins_the_heirs_own_and_keeps_its_askers() -> None:
    world = World()
    r3 = world.request("r3")
    world.promotions.start(world.fast, world.r2, [B])
    world.promotions.start(world.fast, world.r1, [A])
    world.promotions.join(world.r2, [A])
    world.promotions.join(r3, [A])
    world.finish(world.r1)
    (promotion,) = world.promotions.take_queued()
    assert (promotion.owner, promotion.keys) == (world.r2, [B, A])
    world.promotions.end(promotion, None)
    assert (set(world.r2.reserved), set(r3.reserved)) == ({A, B}, {A})


def test_an_inherited_promotion_keeps_its_deadline_and_takes_new_askers() -> None:
    world = World()
    world.promotions.start(world.fast, world.r1, [A])
    begun = world.clock()
    world.promotions.join(world.r2, [A])
    world.clock.advance(1.0)
    world.finish(world.r1)
    r3 = world.request("r3")
    world.promotions.join(r3, [A])
    (promotion,) = world.promotions.take_queued()
    assert promotion.deadline == begun + DEADLINE
    world.promotions.end(promotion, None)
    assert set(r3.reserved) == {A}


def test_a_running_promotion_outlives_its_owner() -> None:
    world = World()
    promotion = world.run([A], world.r2)
    world.finish(world.r1)
    assert A in world.primary.pending
    world.promotions.end(promotion, None)
    assert set(world.r2.reserved) == {A}
    assert world.stats.promotions_dropped == 0


# --------------------------------------------------------------------------------------------------------- reservations


def test_a_load_takes_over_the_pins_of_reserved_blocks_and_pins_the_others() -> None:
    world = World()
    world.store([C])
    world.promotions.end(world.run([A, B]), None)
    world.reservations.claim(world.r1, [A, C], world.primary.claim_load([A, C], "r1")[0])
    assert world.counts() == (0, 1, 0)
    assert world.rows() == (5, 0, 0)
    world.primary.complete_load([A, C], world.r1.ctx)
    assert world.rows() == (5, 2, 0)
    world.finish(world.r1)
    assert world.rows() == (5, 3, 0)


def test_a_finished_request_gives_its_reservations_back() -> None:
    world = World()
    world.promotions.end(world.run([A, B], world.r2), None)
    world.finish(world.r1)
    assert world.counts() == (0, 2, 0)
    assert world.rows() == (6, 0, 0)
    world.finish(world.r2)
    assert world.counts() == (0, 0, 0)
    assert world.rows() == (6, 2, 0)


def test_a_reservation_expires_at_its_deadline_for_each_request() -> None:
    world = World()
    promotion = world.run([A, B], world.r2)
    world.promotions.end(promotion, None)
    world.load(world.r1, [A])
    world.expire(world.clock() + RESERVED - 1)
    assert world.counts() == (0, 2, 0)
    world.expire(world.clock() + RESERVED)
    assert world.counts() == (0, 0, 0)
    assert world.rows() == (6, 2, 0)
    assert world.stats.reservations_expired == 3
    world.expire(world.clock() + 2 * RESERVED)
    assert world.stats.reservations_expired == 3
    assert world.r1.reserved == world.r2.reserved == {}


def test_reservations_expire_one_after_another() -> None:
    world = World()
    world.promotions.end(world.run([A]), None)
    world.clock.advance(1.0)
    world.promotions.end(world.run([B]), None)
    world.expire(world.clock() + RESERVED - 1)
    assert set(world.r1.reserved) == {B}


# ------------------------------------------------------------------------------------------------------------- deadline


def test_an_overdue_promotion_is_a_miss_at_once_and_keeps_its_rows_until_the_job_ends() -> None:
    world = World()
    promotion = world.run([A, B], world.r2)
    world.expire(promotion.deadline - 0.1)
    assert world.counts() == (2, 0, 2)
    world.expire(promotion.deadline)
    assert world.stats.promotions_overdue == 2
    assert world.r1.refused == world.r2.refused == {A: Refusal.HUNG, B: Refusal.HUNG}
    assert world.r1.asked == world.r2.asked == set()
    assert not world.primary.pending
    assert world.counts() == (0, 0, 2)
    assert world.rows() == (6, 0, 2)
    world.expire(promotion.deadline + 1)
    assert world.stats.promotions_overdue == 2
    assert world.promotions.end(promotion, ())[0] == []
    assert world.counts() == (0, 0, 0)
    assert world.rows() == (8, 0, 0)
    assert world.r1.failed == {}


def test_blocks_that_arrive_late_are_kept_if_nobody_has_stored_them_meanwhile() -> None:
    world = World()
    promotion = world.run([A, B, C, D])
    world.expire(promotion.deadline)
    world.store([A])
    assert world.primary.prepare_store([B], STORER) is not None
    keys, rows = world.promotions.end(promotion, [A, B, C])
    assert keys == [C]
    assert rows.tolist() == [promotion.rows[2]]
    assert world.stats.promotions_adopted == 1
    assert set(world.primary.readable) == {A, C}
    assert set(world.primary.pending) == {B}
    assert world.counts() == (0, 0, 0)
    assert world.rows() == (5, 2, 0)
    events = [(event.keys, event.removed) for event in world.primary.take_events()]
    assert events == [([A], False), ([C], False)]


def test_a_promotion_that_ended_in_time_is_never_overdue_and_does_not_hide_the_next_one() -> None:
    world = World()
    first = world.run([A])
    world.clock.advance(1.0)
    second = world.run([B])
    world.promotions.end(first, None)
    world.expire(second.deadline)
    assert world.stats.promotions_overdue == 1
    assert (set(world.r1.refused), set(world.primary.readable)) == ({B}, {A})


def test_a_tier_without_a_deadline_is_waited_for() -> None:
    world = World()
    assert isinstance(world.fast.tier, FakeTier)
    world.fast.traits = replace(world.fast.traits, load_deadline=None)
    world.run([A])
    world.expire(1e12)
    assert world.stats.promotions_overdue == 0


def test_all_promotions_of_a_failed_tier_fail_and_no_others() -> None:
    world = World()
    ended, running, other = world.run([A]), world.run([B]), world.run([C], state=world.slow)
    world.promotions.end(ended, None)
    world.promotions.start(world.fast, world.r1, [D])
    for _ in range(2):
        world.promotions.fail_all(world.fast)
    assert (ended.awaited, running.awaited, other.awaited) == (True, False, True)
    assert world.r1.refused == {B: Refusal.FAILED}
    assert set(world.primary.pending) == {C, D}
    assert world.promotions.rows_promoting == 2
    assert world.stats.promotions_overdue == 0


# ---------------------------------------------------------------------------------------------------------------- reset


def test_queued_promotions_can_be_dropped() -> None:
    world = World()
    world.promotions.start(world.fast, world.r1, [A, B])
    world.promotions.join(world.r2, [B])
    world.promotions.drop_queued()
    assert not world.promotions.queued
    assert world.r1.asked == world.r2.asked == set()
    assert world.stats.promotions_dropped == 2
    assert world.counts() == (0, 0, 0)
    assert world.rows() == (8, 0, 0)
    world.promotions.join(world.r2, [A])
    assert world.r2.asked == set()


def test_a_reset_drops_what_is_queued_and_what_still_arrives_and_ends_reservations() -> None:
    world = World()
    world.promotions.end(world.run([A]), None)
    running = world.run([B], world.r2)
    overdue = world.run([C])
    world.promotions.fail(overdue)
    world.promotions.start(world.fast, world.r1, [D])
    world.promotions.reset([running, overdue])
    world.primary.reset_cache()
    assert world.r1.reserved == {}
    assert world.counts() == (0, 0, 2)
    assert world.rows() == (6, 0, 2)
    world.expire(1e12)
    assert (world.stats.promotions_overdue, world.stats.reservations_expired) == (0, 0)
    for promotion in (running, overdue):
        assert world.promotions.end(promotion, None)[0] == []
    assert not world.primary.readable
    assert world.counts() == (0, 0, 0)
    assert world.rows() == (8, 0, 0)
    assert world.stats.promotions_adopted == 0


def test_after_a_reset_a_block_can_be_promoted_while_its_old_load_still_runs() -> None:
    world = World()
    old = world.run([A])
    world.promotions.reset([old])
    world.primary.reset_cache()
    world.r1.refused.clear()
    new = world.run([A])
    assert set(old.rows).isdisjoint(new.rows)
    world.promotions.end(old, None)
    assert A in world.primary.pending
    assert world.promotions.end(new, None)[0] == [A]
    assert world.rows() == (7, 0, 0)


def test_a_reservation_after_a_reset_does_not_expire_with_one_before() -> None:
    world = World()
    world.promotions.end(world.run([A]), None)
    world.promotions.reset([])
    world.primary.reset_cache()
    world.clock.advance(10.0)
    world.promotions.end(world.run([A]), None)
    world.expire(world.clock() + RESERVED - 10)
    assert set(world.r1.reserved) == {A}
