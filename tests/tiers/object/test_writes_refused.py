"""A bucket that refuses writes still serves the blocks that it holds."""

from __future__ import annotations

import logging

import pytest

from tests.fake_s3 import FakeS3
from tests.tiers.object.rigs import Make, lines
from tiering.block_tier.health import HEALTH_DOCUMENT
from tiering.testing.tier_tests import K


@pytest.mark.parametrize(("status", "code"), [(403, "QuotaExceeded"), (507, "InsufficientStorage"), (413, "Injected")])
def test_a_full_bucket_delivers_everything_it_holds_and_takes_stores_again_when_it_can(
    fake: FakeS3, make: Make, caplog: pytest.LogCaptureFixture, status: int, code: str
) -> None:
    caplog.set_level(logging.WARNING)
    rig = make().open()
    rig.store(K[:8])
    fake.fail(status, method="PUT", code=code, times=1 << 30)
    for key in K[8:14]:
        assert rig.store([key]) == []
        assert rig.lookup(K[:8]) == 8
        assert rig.load(K[:8]) == K[:8]
    stats = rig.tier.get_stats()
    assert (stats.available, stats.writable) == (1, 0)
    (line,) = lines(caplog, "taking no stores")
    assert str(status) in line
    assert not lines(caplog, "out of service")
    fake.heal()
    rig.wait(lambda: rig.tier.get_stats().writable)
    assert rig.store(K[8:14]) == K[8:14]


def test_an_engine_that_starts_on_a_full_bucket_reads_from_it(fake: FakeS3, make: Make) -> None:
    make().open().store(K[:4])
    fake.fail(403, method="PUT", code="QuotaExceeded", times=1 << 30)
    rig = make().open()
    assert rig.lookup(K[:4]) == 4
    assert rig.load(K[:4]) == K[:4]


def test_probes_of_writes_have_a_name_of_their_own_and_leave_nothing(fake: FakeS3, make: Make) -> None:
    rig = make().open()
    fake.fail(507, method="PUT", part="/blocks/", times=2)
    rig.store(K[:1])
    rig.store(K[1:2])
    rig.wait(lambda: rig.tier.get_stats().writable)
    (name,) = {seen.name.rpartition("/")[2] for seen in fake.asked("PUT", f"documents/{HEALTH_DOCUMENT}")}
    assert len(name) > len(HEALTH_DOCUMENT)
    assert not [name for name in fake.objects if f"documents/{HEALTH_DOCUMENT}" in name]


def test_a_bucket_that_takes_documents_and_refuses_blocks_fills_no_log(
    fake: FakeS3, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rig = make(breaker={"failures": 2, "probe_after": "1ms", "probe_max": "20ms"}).open()
    fake.fail(413, method="PUT", part="/blocks/", times=1 << 30)
    caplog.clear()
    for _ in range(10):
        rig.store(K[:1])
        rig.store(K[1:2])
        rig.wait(lambda: rig.tier.get_stats().writable)
    assert rig.tier.get_stats().breaker_opened >= 5
    assert len(caplog.records) <= 4
