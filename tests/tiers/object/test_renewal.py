"""Blocks in use are renewed before they expire, heads first, and never by the scheduler's thread."""

from __future__ import annotations

import datetime
import threading

import pytest
from pydantic import ValidationError

from tests.fake_s3 import FakeS3
from tests.tiers.object.rigs import Make, block_names, lines
from tiering.errors import PermanentStoreError, TemporaryStoreError
from tiering.testing.clock import until
from tiering.testing.tier_rig import REQUEST, TierRig
from tiering.testing.tier_tests import K
from tiers.object import S3Options
from tiers.object.renewal import FAILED_SECONDS, MOST_SETTLED, MOST_WAITING, Renewal

DAY = 86400.0


class Bucket:
    """Objects with their ages, and the copies that a renewal made."""

    def __init__(self, after: float = 100.0) -> None:
        self.now = 1000.0
        self.written: dict[str, float] = {}
        self.looked: list[str] = []
        self.copied: list[str] = []
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.renewal = Renewal(after, self._modified, self._copy, clock=lambda: self.now, pause=0.0)

    def _modified(self, name: str) -> float | None:
        self.gate.wait(10)
        self.looked.append(name)
        return self.written.get(name)

    def _copy(self, name: str) -> None:
        if self.error is not None:
            raise self.error
        self.copied.append(name)
        self.written[name] = self.now

    def settled(self) -> bool:
        return not self.renewal._works


@pytest.fixture
def bucket():  # type: ignore[no-untyped-def]
    made = Bucket()
    yield made
    made.gate.set()
    made.renewal.stop()


def test_old_objects_in_use_are_copied_in_order_and_young_ones_are_not(bucket: Bucket) -> None:
    bucket.written = {"head": 0.0, "middle": 899.0, "young": 950.0}
    bucket.renewal.use(["head", "middle", "young", "absent"])
    assert until(bucket.settled)
    assert bucket.looked == ["head", "middle", "young", "absent"]
    assert bucket.copied == ["head", "middle"]


def test_an_object_is_not_looked_at_again_before_it_can_be_old(bucket: Bucket) -> None:
    bucket.written = {"a": 950.0}
    for now, looks in ((1000.0, 1), (1049.0, 1), (1051.0, 2)):
        bucket.now = now
        bucket.renewal.use(["a"])
        assert until(bucket.settled)
        assert len(bucket.looked) == looks
    assert bucket.copied == ["a"]


def test_an_age_that_a_load_has_seen_needs_no_request_if_it_is_young(bucket: Bucket) -> None:
    bucket.written = {"young": 990.0, "old": 1.0}
    bucket.renewal.saw("young", 990.0)
    bucket.renewal.saw("old", 1.0)
    assert until(bucket.settled)
    assert bucket.looked == bucket.copied == ["old"]


def test_what_another_machine_renewed_meanwhile_is_not_copied_again(bucket: Bucket) -> None:
    bucket.written = {"a": 999.0}
    bucket.renewal.saw("a", 1.0)
    assert until(bucket.settled)
    assert bucket.copied == []


@pytest.mark.parametrize(("ahead", "copies"), [(3 * DAY, 3), (-3 * DAY, 0)], ids=["ahead", "behind"])
def test_a_clock_that_is_wrong_by_days_costs_at_most_one_copy_per_period(
    bucket: Bucket, ahead: float, copies: int
) -> None:
    service = 10 * DAY
    bucket.written = {"a": service}
    for _ in range(30):
        bucket.now = service + ahead
        bucket.renewal.saw("a", bucket.written["a"])
        assert until(bucket.settled)
        if bucket.copied and bucket.written["a"] > service:
            bucket.written["a"] = service  # the service writes its own time
        service += 10.0
    assert len(bucket.copied) == copies


def test_heads_have_precedence_and_memory_is_bounded(bucket: Bucket) -> None:
    bucket.gate.clear()
    names = [f"{number:06}" for number in range(2 * MOST_WAITING)]
    bucket.renewal.use(names[:1])
    bucket.renewal.use(names[1:])
    assert len(bucket.renewal._waiting) <= MOST_WAITING
    bucket.gate.set()
    assert until(bucket.settled)
    assert bucket.looked[: MOST_WAITING - 1] == names[: MOST_WAITING - 1]
    for number in range(MOST_SETTLED + 10):
        bucket.renewal._settle(str(number), 1.0)
    assert len(bucket.renewal._settled) == MOST_SETTLED


@pytest.mark.parametrize(("kind", "warned"), [(TemporaryStoreError, False), (PermanentStoreError, True)])
def test_a_failure_stops_renewal_for_a_while(
    bucket: Bucket, caplog: pytest.LogCaptureFixture, kind: type[Exception], warned: bool
) -> None:
    bucket.written = {"a": 0.0, "b": 0.0}
    bucket.error = kind("refused")
    bucket.renewal.use(["a", "b"])
    assert until(bucket.settled)
    assert bucket.looked == ["a"]
    assert bool(lines(caplog, "may expire: refused")) == warned
    bucket.error = None
    bucket.renewal.use(["a"])
    assert bucket.settled()
    bucket.now += FAILED_SECONDS + 1
    bucket.renewal.use(["a"])
    assert until(bucket.settled)
    assert bucket.copied == ["a"]


# -------------------------------------------------------------------------------------------------------------- a tier


def age(fake: FakeS3, days: float) -> None:
    """Make all blocks on the server this old."""
    written = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=days)
    with fake.lock:
        fake.modified.update({name: written for name in fake.objects if "/blocks/" in name})


def renewed(fake: FakeS3) -> int:
    """Return how many blocks were written within the last hour."""
    recent = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
    with fake.lock:
        return sum(written > recent for name, written in fake.modified.items() if "/blocks/" in name)


@pytest.fixture
def old(fake: FakeS3, make: Make) -> TierRig:
    """A tier with four blocks that are five days old and expire at the age of seven days."""
    rig = make(ttl="7d").open()
    rig.store(K[:4])
    age(fake, 5)
    return rig


def test_blocks_that_are_loaded_near_their_end_are_renewed(fake: FakeS3, old: TierRig) -> None:
    assert old.load(K[:4]) == K[:4]
    old.wait(lambda: renewed(fake) == 4)
    assert old.load(K[:4]) == K[:4]
    copies = [seen for seen in fake.asked("PUT") if "x-amz-copy-source" in seen.headers]
    assert len(copies) == 4


def test_blocks_that_the_cpu_tier_serves_are_renewed_too(fake: FakeS3, old: TierRig) -> None:
    asked = len(fake.asked("GET", "/blocks/"))
    old.intake.used(K[:4], REQUEST)
    old.wait(lambda: renewed(fake) == 4)
    assert len(fake.asked("GET", "/blocks/")) == asked


@pytest.mark.parametrize("words", [{"ttl": "30d"}, {}, {"ttl": "7d", "admission": "none"}])
def test_nothing_else_is_copied(fake: FakeS3, make: Make, words: dict[str, object]) -> None:
    make().open().store(K[:4])
    age(fake, 5)
    rig = make(**words).open()
    assert rig.load(K[:4]) == K[:4]
    rig.intake.used(K[:4], REQUEST)
    assert rig.close()
    assert not [seen for seen in fake.asked("PUT") if "x-amz-copy-source" in seen.headers]


def test_a_bucket_that_refuses_copies_still_serves(
    fake: FakeS3, old: TierRig, caplog: pytest.LogCaptureFixture
) -> None:
    fake.fail(403, method="PUT", times=1 << 30, code="AccessDenied")
    assert old.load(K[:4]) == K[:4]
    old.wait(lambda: lines(caplog, "blocks in use are not renewed"))
    assert old.load(K[:4]) == K[:4]
    assert len(block_names(fake)) == 4


def test_a_tier_with_much_to_renew_closes_at_once(fake: FakeS3, make: Make) -> None:
    rig = make(ttl="7d").open()
    rig.store(K[:40])
    age(fake, 5)
    assert rig.load(K[:40]) == K[:40]
    assert rig.close()
    assert renewed(fake) < 40


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({}, None),
        ({"ttl": "7d"}, 3.5 * DAY),
        ({"renew_after": "1d"}, DAY),
        ({"ttl": "7d", "renew_after": "2d"}, 2 * DAY),
        ({"ttl": "7d", "admission": "none"}, None),
    ],
)
def test_the_age_of_renewal_follows_the_ttl(words: dict[str, object], expected: float | None) -> None:
    assert S3Options.model_validate({"bucket": "kv-cache"} | words).renewal_age == expected


def test_a_renewal_after_the_end_is_refused() -> None:
    with pytest.raises(ValidationError, match="expire before they are renewed"):
        S3Options.model_validate({"bucket": "kv-cache", "ttl": "1d", "renew_after": "1d"})
