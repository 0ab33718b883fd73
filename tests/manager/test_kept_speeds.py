"""The speeds that a manager publishes, and takes over from the engine before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tiering.api.keys import OffloadKey, make_offload_key
from tiering.api.request import ReqContext
from tiering.manager.kept_speeds import AGAIN_SECONDS, FIRST_SECONDS, TRUSTED
from tiering.manager.manager import TieringOffloadingManager
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.secondary.contract import JobResult
from tiering.secondary.speeds import Speeds, TierSpeeds
from tiering.testing.clock import FakeClock
from tiering.testing.fake_tier import FakeTier

ASSUMED = 0.1
"""Seconds of computing a block that a fresh engine assumes."""


class Kept(TierSpeeds):
    def __init__(self, found: Any = ()) -> None:
        self.found = found
        self.published: list[Speeds] = []

    def publish(self, speeds: Speeds) -> None:
        self.published.append(speeds)

    def gather(self) -> Sequence[Speeds] | None:
        return self.found  # type: ignore[no-any-return]


class Rig:
    def __init__(self, found: Any = ()) -> None:
        self.clock, self.kept = FakeClock(), Kept(found)
        self.tier = FakeTier(load_or_compute="auto", speeds=self.kept)
        primary = CPUPrimaryTierOffloadingManager(np.zeros((256, 1), np.uint8).data)
        self.manager = TieringOffloadingManager(primary, [self.tier], clock=self.clock)
        assert self.manager.open_tier(0, 0.0)
        self.manager.note_compute([ASSUMED], is_assumed=True)

    def keys(self, name: str, count: int = 10) -> list[OffloadKey]:
        keys = [make_offload_key(f"{name} {number}".encode().ljust(32), 0) for number in range(count)]
        self.tier.held.update(keys)
        return keys

    def begin(self, name: str) -> ReqContext:
        ctx = ReqContext(name)
        self.manager.on_new_request(ctx)
        return ctx

    def loads(self, name: str = "a", count: int = 10) -> bool:
        """Return True if a request loads ``count`` blocks, which the tier holds."""
        return self.manager.match_prefix(self.keys(name, count), self.begin(name)).pending

    def step(self) -> None:
        self.manager.on_schedule_end()

    def load(self, seconds: float, count: int = 10) -> None:
        """Let a request load blocks in ``seconds``."""
        assert self.loads(f"load {count}", count)
        self.step()
        self.clock.advance(seconds)
        for job in list(self.tier.loads):
            self.tier.loads.remove(job)
            self.tier.results.append(JobResult(job.job_id, True, transfer_time=seconds))
        self.step()


@pytest.mark.parametrize(("compute", "is_loaded"), [(0.2, True), (0.05, False)])
def test_the_first_request_chooses_by_what_the_engine_before_has_measured(compute: float, is_loaded: bool) -> None:
    """Ten blocks take 1.1 s to load. A fresh engine would assume that they take 1 s to compute."""
    rig = Rig([Speeds(compute, 0.1, 0.1)])
    assert rig.loads() is is_loaded


def test_the_first_request_waits_as_long_as_the_engine_before_would_have_computed() -> None:
    rig = Rig([Speeds(0.2, 0.0, 0.0)])
    ctx = rig.begin("a")
    assert rig.manager.match_prefix(rig.keys("a"), ctx).pending
    assert rig.manager.waits_until(ctx) == pytest.approx(rig.clock() + 2.0)


def test_what_comes_late_counts_for_requests_that_wait_already() -> None:
    rig = Rig(None)
    ctx = rig.begin("a")
    assert rig.manager.match_prefix(rig.keys("a"), ctx).pending
    assert rig.manager.waits_until(ctx) == pytest.approx(rig.clock() + 1.0)
    rig.kept.found = [Speeds(0.02, 0.0, 0.01)]
    rig.step()
    assert rig.manager.waits_until(ctx) == pytest.approx(rig.clock() + 0.2)


def test_what_was_measured_replaces_what_was_found() -> None:
    rig = Rig([Speeds(0.2, 0.1, 0.1)])
    rig.manager.note_compute([0.05])
    assert not rig.loads("computed faster")
    rig = Rig([Speeds(0.2, 0.0, 0.1)])
    rig.load(0.1)
    rig.manager.note_compute([0.05])
    assert rig.loads("loaded faster")
    found = Rig(None)
    found.manager.note_compute([0.05])
    found.load(0.1)
    found.kept.found = [Speeds(9.0, 9.0, 9.0)]
    found.step()
    assert found.loads("measured before")


@pytest.mark.parametrize(("compute", "bound"), [(1e-9, TRUSTED[0]), (3000.0, TRUSTED[1])])
def test_a_wrong_speed_of_the_engine_is_bounded(compute: float, bound: float) -> None:
    rig = Rig([Speeds(compute, 0.0, 0.0)])
    ctx = rig.begin("a")
    assert rig.manager.match_prefix(rig.keys("a"), ctx).pending
    assert rig.manager.waits_until(ctx) == pytest.approx(rig.clock() + bound)


@pytest.mark.parametrize("found", [[Speeds(math.nan, 0.0, 0.0)], [Speeds(-1.0, 0.0, 0.0)], [(0.1, 0.1, 0.1)], 7])
def test_a_tier_that_returns_something_else_goes_out_of_service(found: Any) -> None:
    rig = Rig(None)
    rig.kept.found = found
    rig.step()
    assert rig.manager.get_stats()["manager"]["tiers_out_of_service"] == 1
    assert not rig.loads()


def test_what_was_measured_is_published_soon_then_every_hour_and_at_the_shutdown() -> None:
    rig = Rig()
    rig.step()
    rig.load(0.4, 10)
    rig.load(0.7, 20)
    assert rig.kept.published == []
    rig.manager.note_compute([0.3], others=0.5)
    rig.step()
    assert rig.kept.published == []
    rig.clock.advance(FIRST_SECONDS)
    rig.step()
    (speeds,) = rig.kept.published
    assert speeds == pytest.approx((0.2, 0.1, 0.03))
    rig.step()
    rig.clock.advance(AGAIN_SECONDS - 1.0)
    rig.step()
    assert len(rig.kept.published) == 1
    rig.clock.advance(1.0)
    rig.step()
    assert len(rig.kept.published) == 2
    rig.manager.shutdown()
    assert len(rig.kept.published) == 3


def test_without_a_load_the_speed_of_the_tier_stays_that_of_the_engine_before() -> None:
    rig = Rig([Speeds(0.2, 0.1, 0.5)])
    rig.manager.note_compute([0.3])
    rig.manager.shutdown()
    assert rig.kept.published == [Speeds(0.3, 0.1, 0.5)]


def test_an_engine_that_has_measured_nothing_publishes_nothing() -> None:
    rig = Rig([Speeds(0.2, 0.1, 0.5)])
    rig.step()
    rig.clock.advance(FIRST_SECONDS)
    rig.step()
    rig.manager.shutdown()
    assert rig.kept.published == []


def test_a_measured_time_of_zero_publishes_nothing() -> None:
    rig = Rig()
    rig.load(0.4, 10)
    rig.manager.note_compute([0.0])
    rig.step()
    rig.clock.advance(FIRST_SECONDS)
    rig.step()
    rig.manager.shutdown()
    assert rig.kept.published == []
