"""Blocks that a tier missed are offered on their next use, for example after an outage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.block_tier.fakes import BLOCK_BYTES, NUM_ROWS
from tests.block_tier.rig import Rig
from tests.manager_rig import ManagerRig
from tiering.api.keys import OffloadKey
from tiering.api.request import ReqContext
from tiering.block_tier.intake import OFFER_AGAIN_AFTER, OFFERS_AT_ONCE, OFFERS_PER_SECOND, Intake
from tiering.errors import TemporaryStoreError
from tiering.index.shared import SharedIndex, object_name
from tiering.index.slots import SlotIndex
from tiering.manager.manager import TieringOffloadingManager
from tiering.medium.block_store import Done
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import keys_of

K = keys_of(*range(60))
CTX = ReqContext("owner")


class Stack:
    """A manager with one tier, whose jobs and tasks end when a test says so."""

    def __init__(self, *, opened: bool = True, **options: Any) -> None:
        self.rig = Rig(**options)
        self.primary = CPUPrimaryTierOffloadingManager(self.rig.context.primary_view)
        self.manager = TieringOffloadingManager(self.primary, [self.rig.tier], clock=self.rig.clock)
        if opened:
            self.rig.opened()
        self.manager.on_new_request(CTX)

    def store(self, keys: Sequence[OffloadKey]) -> None:
        """Store ``keys`` in the primary tier; the tier decides about the cascade."""
        output = self.manager.prepare_store(keys, CTX)
        assert output is not None
        self.manager.complete_store(output.keys_to_store, CTX)
        self.step()

    def use(self, keys: Sequence[OffloadKey], name: str = "user", *, load: bool = False, **params: Any) -> None:
        """Use the blocks in a request of its own, for one step."""
        ctx = ReqContext(name, {"kv_tiering": params} if params else None)
        self.manager.on_new_request(ctx)
        if load:
            self.manager.prepare_load(keys, ctx)
            self.manager.complete_load(keys, ctx)
        else:
            self.manager.touch(keys, ctx)
        self.manager.on_request_finished(ctx)
        self.step()

    def step(self) -> None:
        self.rig.io.run_tasks("probe")
        self.manager.on_schedule_end()
        self.manager.on_schedule_end()

    def written(self) -> list[OffloadKey]:
        """Let the tier's stores succeed and return their keys."""
        keys = [key for job in self.rig.io.jobs for key in job.moved]
        self.rig.io.finish_all()
        self.step()
        return keys

    def held(self) -> int:
        return self.rig.tier.index.blocks

    def go_out(self) -> None:
        self.rig.io.breakers.trip("test")
        self.step()

    def come_back(self) -> None:
        self.rig.clock.advance(self.rig.options.breaker.probe_after)
        self.step()
        self.rig.io.run_tasks()
        self.step()
        assert self.rig.tier.get_stats().available


SHARED = pytest.mark.parametrize("shared", [False, True], ids=["own medium", "shared medium"])


@SHARED
@pytest.mark.parametrize("load", [False, True], ids=["touched", "loaded"])
def test_what_was_stored_during_an_outage_is_offered_when_it_is_used_after_it(shared: bool, load: bool) -> None:
    stack = Stack(shared=shared)
    stack.go_out()
    stack.store(K[:4])
    stack.use(K[:4], load=load)
    stack.come_back()
    assert stack.held() == 0
    stack.use(K[:4], load=load)
    assert stack.written() == K[:4]
    assert stack.held() == 4
    stack.use(K[:4], load=load)
    assert stack.written() == []


@SHARED
def test_what_the_primary_tier_holds_reaches_a_tier_that_came_later(shared: bool) -> None:
    stack = Stack(opened=False, shared=shared)
    stack.store(K[:6])
    stack.rig.opened()
    stack.use(K[2:5])
    assert stack.written() == K[2:5]
    stack.use(K[:6])
    assert stack.written() == [K[0], K[1], K[5]]
    assert stack.held() == 6


def test_only_what_is_readable_in_the_primary_tier_is_offered() -> None:
    stack = Stack(opened=False)
    stack.store(K[:2])
    stack.rig.opened()
    stack.use(K[:5])
    assert stack.written() == K[:2]


@SHARED
def test_a_store_that_failed_is_offered_again_but_not_at_once(shared: bool) -> None:
    stack = Stack(shared=shared)
    stack.store(K[:3])
    (job,) = stack.rig.io.jobs
    stack.rig.io.finish(job.job_id, [Done.DONE, TemporaryStoreError("busy"), Done.DONE])
    stack.step()
    for expected in ([K[1]], [], [K[1]]):
        stack.use(K[:3])
        jobs = list(stack.rig.io.jobs)
        assert [key for job in jobs for key in job.moved] == expected
        for job in jobs:
            stack.rig.io.finish(job.job_id, [TemporaryStoreError("busy")])
        stack.step()
        if not expected:
            stack.rig.clock.advance(OFFER_AGAIN_AFTER)


def test_blocks_that_lost_their_rows_in_the_queue_are_offered_again() -> None:
    stack = Stack(slots=2 * NUM_ROWS)
    stack.rig.io.busy_bytes = BLOCK_BYTES
    keys = keys_of(*range(2 * NUM_ROWS))
    stack.store(keys[:NUM_ROWS])
    stack.rig.clock.advance(1.0)
    stack.store(keys[NUM_ROWS : NUM_ROWS + 8])
    assert stack.rig.tier.get_stats().stores_evicted == 8
    while stack.written():
        stack.rig.clock.advance(1.0)
    assert stack.held() == NUM_ROWS
    lost = [key for key in keys[:NUM_ROWS] if key not in stack.primary.readable]
    assert len(lost) == 8
    stack.store(lost)
    while stack.written():
        stack.rig.clock.advance(1.0)
    assert stack.held() == NUM_ROWS + 8


def test_an_admitted_block_that_lost_its_row_is_admitted_at_its_next_store() -> None:
    stack = Stack(admission="second_touch")
    stack.rig.tier.admit(K[:2], CTX, False)
    assert stack.rig.tier.admit(K[:2], CTX, False) is None, "the second touch"
    stack.rig.tier.not_stored(K[:1])
    assert stack.rig.tier.admit(K[:2], CTX, False) == [0]


@pytest.mark.parametrize("words", [{"store": False}, {"tiers": []}, {"lod": 1}])
def test_a_request_that_may_not_store_there_causes_no_offer(words: dict[str, Any]) -> None:
    stack = Stack(opened=False)
    stack.store(K[:3])
    stack.rig.opened()
    stack.use(K[:3], **words)
    stack.use(K[:3], load=True, **words)
    assert stack.written() == []


def test_a_tier_that_is_only_read_need_never_be_told_and_asks_nothing() -> None:
    stack = Stack(opened=False, shared=True, admission="none")
    assert stack.rig.tier.used(K[:3], CTX) == math.inf
    assert stack.rig.io.tasks == []
    assert not stack.rig.tier.on_schedule_end().wanted


def test_a_block_that_waits_for_its_second_touch_is_not_offered_to_its_own_request() -> None:
    stack = Stack(admission="second_touch")
    stack.store(K[:3])
    stack.manager.touch(K[:3], CTX)
    stack.step()
    assert stack.written() == []
    stack.use(K[:3])
    assert stack.written() == K[:3]


def test_second_touch_gets_what_it_missed_in_an_outage_at_the_second_use() -> None:
    stack = Stack(admission="second_touch")
    stack.go_out()
    stack.store(K[:3])
    stack.come_back()
    stack.use(K[:3], "first")
    assert stack.written() == []
    stack.use(K[:3], "second")
    assert stack.written() == K[:3]


def test_a_reset_forgets_what_was_to_be_offered() -> None:
    stack = Stack(opened=False)
    stack.store(K[:8])
    stack.rig.opened()
    stack.use(K[:8])
    stack.rig.io.finish_all()
    stack.manager.reset_cache()
    stack.step()
    assert stack.written() == []


class ToldTier(FakeTier):
    """A tier that records its notices of use, and says for how long it needs no further notice."""

    told: list[list[OffloadKey]]
    silence = 30.0

    def used(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> float:
        self.told.append(list(keys))
        return self.silence


def test_a_tier_is_told_of_a_block_as_rarely_as_it_asks_to_be() -> None:
    tier = ToldTier()
    tier.told = []
    rig = ManagerRig(8, [tier])
    output = rig.manager.prepare_store(K[:4], rig.ctx)
    assert output is not None
    rig.manager.complete_store(K[:4], rig.ctx)
    (job,) = tier.stores
    tier.finish(job, success=False, keys=K[:2])
    for keys in (K[:2], K[:4], K[:4]):
        rig.manager.touch(keys, rig.ctx)
    assert tier.told == [K[:2], K[2:4]]
    rig.clock.advance(31.0)
    tier.silence = 0.0
    rig.manager.prepare_load(K[:4], rig.ctx)
    rig.manager.touch(K[:4], rig.ctx)
    assert tier.told[2:] == [K[:4], K[:4]]


def test_a_tier_is_told_of_another_block_in_the_same_row_and_not_of_one_that_it_has_taken() -> None:
    tier = ToldTier()
    tier.told = []
    rig = ManagerRig(2, [tier])
    rig.store(K[:2])
    rig.manager.touch(K[:2], rig.ctx)
    assert tier.told == []
    output = rig.manager.prepare_store(K[2:4], rig.ctx)
    assert output is not None
    rig.manager.complete_store(K[2:4], rig.ctx)
    rig.manager.touch(K[2:4], rig.ctx)
    assert tier.told == [K[2:4]]


def test_a_tier_is_told_of_what_a_slower_one_brought_in() -> None:
    fast, slow = ToldTier("fast"), ToldTier("slow", held=set(K[:2]))
    fast.told, slow.told = [], []
    rig = ManagerRig(4, [fast, slow])
    rig.manager.match_prefix(K[:2], rig.ctx)
    rig.step()
    slow.finish_all()
    rig.step()
    rig.manager.prepare_load(K[:2], rig.ctx)
    assert (fast.told, slow.told) == ([K[:2]], [])


class TestSharedMedium:
    def test_what_others_have_stored_there_is_asked_for_once_and_not_written(self) -> None:
        stack = Stack(opened=False, shared=True)
        stack.store(K[:20])
        stack.rig.opened()
        prefix = f"{stack.rig.tier.namespace.epoch.hex()}/"  # type: ignore[union-attr]
        stack.rig.store.held.update(object_name(prefix, key) for key in K[:20])
        stack.use(K[:20])
        assert stack.written() == []
        asked = sum(map(len, stack.rig.store.rounds))
        assert 0 < asked < 10
        stack.use(K[:20])
        stack.rig.clock.advance(3600.0)
        stack.use(K[:20])
        assert stack.written() == []
        assert sum(map(len, stack.rig.store.rounds)) == asked

    def test_of_what_others_have_stored_in_part_the_rest_is_written(self) -> None:
        stack = Stack(opened=False, shared=True)
        stack.store(K[:20])
        stack.rig.opened()
        prefix = f"{stack.rig.tier.namespace.epoch.hex()}/"  # type: ignore[union-attr]
        stack.rig.store.held.update(object_name(prefix, key) for key in K[:12])
        stack.use(K[:20])
        assert stack.written() == K[12:20]
        assert stack.held() == 20

    def test_a_block_that_was_lost_there_is_written_again(self) -> None:
        index = SharedIndex()
        index.enter("p/")
        plan = index.plan_store(K[:3], 0.0)
        index.end_store(K[:3], plan.places, [True] * 3, 0.0)
        assert index.lacking(K[:3], 1.0) == ()
        index.end_load(K[1:2], index.begin_load(K[1:2]), [True], 1.0)  # type: ignore[arg-type]
        assert index.lacking(K[:3], 2.0) == K[1:3], "the block behind it may have been lost as well"

    def test_what_is_being_written_is_not_lacking(self) -> None:
        index = SharedIndex()
        index.enter("p/")
        index.plan_store(K[:3], 0.0)
        assert index.lacking(K[:3], 0.0) is None
        assert not index.take_probes(0.0)

    def test_an_answer_from_before_a_reset_offers_nothing(self) -> None:
        index = SharedIndex()
        index.enter("p/")
        index.lacking(K[:3], 0.0)
        (probe,) = index.take_probes(0.0)
        index.clear()
        assert index.end_probe(probe, 0, 0.0) == ()


class TestOwnMedium:
    def test_nothing_is_lacking_while_blocks_are_being_found(self) -> None:
        index = SlotIndex(8)
        index.add_free(np.arange(8))
        index.begin_recovery()
        assert index.lacking(K[:3], 0.0) is None
        index.end_recovery()
        assert index.lacking(K[:3], 0.0) == K[:3]

    def test_what_is_being_written_is_not_lacking(self) -> None:
        index = SlotIndex(8)
        index.add_free(np.arange(8))
        index.plan_store(K[:2], 0.0)
        assert index.lacking(K[:3], 0.0) == K[2:3]


class TestRate:
    def test_is_bounded_for_many_blocks(self) -> None:
        intake, keys = Intake("all"), keys_of(*range(3 * OFFERS_AT_ONCE))
        intake.offer(keys, 1000.0)
        assert intake.take() == keys[:OFFERS_AT_ONCE]
        intake.offer(keys, 1000.0)
        assert intake.take() == []
        intake.offer(keys, 1001.0)
        second = OFFERS_AT_ONCE + int(OFFERS_PER_SECOND)
        assert intake.take() == keys[OFFERS_AT_ONCE:second]

    def test_is_bounded_for_each_block(self) -> None:
        intake = Intake("all")
        taken = 0
        for second in range(int(10 * OFFER_AGAIN_AFTER)):
            intake.offer(K[:1], 1000.0 + second)
            taken += len(intake.take())
        assert taken == 10
