"""When a block tier offers to rest, so that steps in which nothing happens leave it out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from tests.block_tier.rig import Rig
from tiering.block_tier.tier import REST_WITH_JOBS, BlockTier
from tiering.index.slots import SlotIndex
from tiering.manager.rest import LONGEST_REST
from tiering.secondary.contract import TierContext
from tiering.secondary.options import BlockTierOptions
from tiering.testing.keys import key_of
from tiering.testing.tier_rig import REQUEST, TierRig
from tiers.memory import MemoryStore

K = [key_of(number) for number in range(16)]
GROUP_BYTES = (4096,)


def make_tier(context: TierContext, kind: type[BlockTier] = BlockTier, **options: object) -> BlockTier:
    """Return a tier over memory with an I/O side of its own."""
    index = SlotIndex(64)
    index.add_free(np.arange(64))
    return kind(context, BlockTierOptions.model_validate({"type": "memory", **options}), MemoryStore(), index)


@pytest.fixture
def rig() -> Iterator[TierRig]:
    rig = TierRig(make_tier, group_bytes=GROUP_BYTES).open()
    settle(rig)
    yield rig
    rig.close()


def settle(rig: TierRig) -> None:
    """Run steps until the tier rests."""
    rig.wait(lambda: rig.step().rest > 0)


def test_a_tier_without_work_rests(rig: TierRig) -> None:
    assert rig.step().rest > 0


def test_a_tier_rests_for_a_short_time_while_its_stores_run(rig: TierRig) -> None:
    assert rig.step().rest > LONGEST_REST
    rig.submit_store(K[:4])
    assert rig.step().rest == REST_WITH_JOBS < LONGEST_REST


def test_a_tier_does_not_rest_while_a_load_may_become_overdue(rig: TierRig) -> None:
    rig.store(K[:4])
    load = rig.submit_load(K[:4])
    assert rig.step().rest == 0
    rig.result(load)
    settle(rig)


def test_a_tier_does_not_rest_with_a_result_that_it_has_not_announced(rig: TierRig) -> None:
    rig.store(K[:4])
    rig.submit_store(K[:4])  # the tier has these blocks, so that the job ends at once
    assert rig.step().rest == 0
    assert list(rig.tier.get_finished())
    assert rig.step().rest > 0


def test_a_tier_does_not_rest_with_blocks_that_it_wants_to_store(rig: TierRig) -> None:
    rig.intake.used(K[:4], REQUEST)
    assert rig.step().wanted == K[:4]
    assert rig.step().rest > 0


def test_a_tier_out_of_service_does_not_rest(rig: TierRig) -> None:
    assert isinstance(rig.tier, BlockTier)
    rig.tier.leave_medium()
    assert rig.step().rest == 0
    rig.tier.enter_medium()
    settle(rig)


def test_a_tier_whose_breaker_is_open_does_not_rest(rig: TierRig) -> None:
    assert isinstance(rig.tier, BlockTier)
    rig.tier.io.breakers.trip("a test")
    assert rig.step().rest == 0


def test_a_tier_that_is_closed_does_not_rest(rig: TierRig) -> None:
    rig.close()
    assert rig.step().rest == 0


def test_a_tier_with_a_step_of_its_own_does_not_rest_unless_it_says_so() -> None:
    class Stepping(BlockTier):
        def on_step(self) -> None:
            """Do periodic work."""

    class Resting(BlockTier):
        def on_step(self) -> float:
            return math.inf

    for kind, rests in ((Stepping, False), (Resting, True)):
        rig = TierRig(partial(make_tier, kind=kind), group_bytes=GROUP_BYTES).open()
        assert (rig.step().rest > 0) is rests
        rig.close()


def test_a_tier_with_an_io_side_from_elsewhere_does_not_rest() -> None:
    assert Rig().opened().tier.on_schedule_end().rest == 0
