"""A bucket that hangs delays one request by the load deadline, and later requests not at all."""

from __future__ import annotations

import logging
from functools import partial

import pytest

from tests.fake_s3 import FakeS3, Trouble
from tests.tiers.object.rigs import Make, lines
from tiering.testing.clock import SettableClock
from tiering.testing.tier_rig import PATIENCE_SECONDS, TierRig
from tiering.testing.tier_tests import K
from tiers.object import S3Options


def test_a_request_waits_two_seconds_for_a_load_and_a_store_may_take_longer() -> None:
    options = S3Options(bucket="kv-cache")
    assert (options.longest_load, options.deadline) == (2.0, 30.0)
    assert S3Options(bucket="kv-cache", deadline=1.0).longest_load == 1.0


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock()


@pytest.fixture
def timed(make: Make, clock: SettableClock) -> Make:
    """Function that returns an unopened tier on the test's clock."""
    return lambda **words: make(partial(TierRig, clock=clock), request_timeout="10s", **words)


def test_after_the_first_load_that_hangs_lookups_say_no_until_the_bucket_answers(
    fake: FakeS3, timed: Make, clock: SettableClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    rig = timed(breaker={"probe_after": "10ms", "probe_max": "50ms"})
    rig.open()
    rig.store(K[:8])
    fake.fail(Trouble.HANG, method="GET", part="/blocks/", times=9)
    rig.submit_load(K[:8])
    for _ in range(8):
        assert fake.hanging.acquire(timeout=PATIENCE_SECONDS)
    clock.advance(PATIENCE_SECONDS)
    rig.wait(lambda: rig.tier.get_stats().breaker_opened)
    assert rig.lookup(K[:8]) == 0
    (line,) = lines(caplog, "out of service")
    assert "and no block arrived meanwhile" in line
    assert rig.tier.get_stats().loads_overdue == 8
    fake.closing.set()
    rig.wait(lambda: rig.tier.get_stats().available)
    assert rig.load(K[:8]) == K[:8]


def test_one_block_that_hangs_while_others_arrive_does_not_open_the_breaker(
    fake: FakeS3, timed: Make, clock: SettableClock
) -> None:
    rig = timed(breaker={"failures": 8})
    rig.open()
    rig.store(K[:8])
    fake.fail(Trouble.HANG, method="GET", part="/blocks/")
    job = rig.submit_load(K[:1], first_row=60)
    assert fake.hanging.acquire(timeout=PATIENCE_SECONDS)
    for _ in range(2):  # the load is overdue after 30 seconds, the shorter one of its two deadlines
        clock.advance(20.0)
        assert rig.load(K[1:8]) == K[1:8]
    rig.wait(lambda: rig.tier.get_stats().loads_overdue)
    assert rig.tier.get_stats().breaker_opened == 0
    fake.closing.set()
    rig.result(job)
