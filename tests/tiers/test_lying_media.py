"""Probes compare what they read: a medium that answers with other bytes stays out of service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from examples.valkey_server import serving
from tests.fake_s3 import FakeS3, Trouble
from tests.patience import PATIENT
from tests.tiers.liar import WrongWrites, lies_after_an_outage
from tests.tiers.local.rig import LocalRig
from tiering.testing.tier_rig import TierRig
from tiering.testing.tier_tests import K
from tiers.object import S3_TIER, S3Options
from tiers.valkey import VALKEY_TIER, ValkeyOptions

BLOCK = 64 << 10
QUICK = {"breaker": {"failures": 2, "probe_after": "10ms", "probe_max": "20ms"}, "retries": {"attempts": 1}}

Make = Callable[..., TierRig]


@pytest.fixture
def make(tmp_path: Path, bucket: FakeS3) -> Iterator[Make]:
    """Function that opens a tier of a kind."""
    with ExitStack() as stack:

        def build(kind: str, **words: object) -> TierRig:
            rig: TierRig
            if kind == "local":
                rig = LocalRig(tmp_path, **QUICK)  # type: ignore[arg-type]
            elif kind == "s3":
                place = {"bucket": bucket.bucket, "endpoint_url": bucket.endpoint, "prefix": "prod"}
                s3 = S3Options.model_validate({**place, **PATIENT, **QUICK, **words})
                rig = TierRig(lambda context: S3_TIER.build(s3, context), group_bytes=(BLOCK,))
            else:
                server = stack.enter_context(serving())
                pool = ValkeyOptions.model_validate({"url": server.url, **PATIENT, **QUICK, **words})
                rig = TierRig(lambda context: VALKEY_TIER.build(pool, context), group_bytes=(BLOCK,))
            rig.open()
            stack.callback(rig.close)
            return rig

        yield build


@pytest.mark.parametrize("kind", ["local", "s3", "valkey"])
def test_reads_of_other_bytes_do_not_end_an_outage(make: Make, kind: str) -> None:
    lies_after_an_outage(make(kind))


@pytest.mark.parametrize("trouble", [Trouble.FLIP, Trouble.LOGIN_PAGE])
def test_a_proxy_that_answers_with_other_bytes_does_not_end_an_outage(
    make: Make, bucket: FakeS3, trouble: Trouble
) -> None:
    rig = make("s3")
    rig.store(K[:4])
    bucket.fail(503, times=10**9)

    def fails() -> bool:
        rig.load(K[:4])
        return bool(rig.tier.get_stats().breaker_state)

    rig.wait(fails)
    bucket.fail(trouble, method="GET", times=10**9)
    with bucket.lock:
        bucket._faults.popleft()
    asked = len(bucket.asked("GET"))
    rig.wait(lambda: len(bucket.asked("GET")) > asked + 20)
    assert rig.tier.get_stats().available == 0
    bucket.heal()
    rig.wait(lambda: rig.tier.get_stats().available)
    assert rig.load(K[:4]) == K[:4]


@pytest.mark.parametrize("kind", ["local", "s3", "valkey"])
def test_damaged_blocks_alone_do_not_keep_a_tier_out_of_service(make: Make, bucket: FakeS3, kind: str) -> None:
    rig = make(kind)
    rig.store(K[:4])
    assert rig.load(K[:4]) == K[:4]
    lie = WrongWrites(rig.tier._life._health._store)  # type: ignore[attr-defined]
    rig.tier._life._io.breakers.reads.trip("test")  # type: ignore[attr-defined]
    rig.wait(lambda: not rig.tier._life._io.breakers.reads.state)  # type: ignore[attr-defined]
    assert lie.told >= 1, "the document was right"


def test_slots_that_read_back_other_bytes_take_no_stores(make: Make) -> None:
    rig = make("local")
    rig.store(K[:4])
    lie = WrongWrites(rig.tier._life._health._store)  # type: ignore[attr-defined]
    rig.tier._life._io.breakers.writes.trip("test")  # type: ignore[attr-defined]
    rig.wait(lambda: lie.told >= 12)
    assert (rig.tier.get_stats().writable, rig.store(K[4:6])) == (0, [])
    lie.lies = False
    rig.wait(lambda: rig.tier.get_stats().writable)
    assert rig.store(K[4:6]) == K[4:6]


def test_a_tier_that_stores_nothing_is_kept_out_of_service_by_lies_too(make: Make, bucket: FakeS3) -> None:
    make("s3").store(K[:4])
    rig = make("s3", admission="none")
    assert rig.lookup(K[:4]) == 4
    breaker = rig.tier._life._io.breakers.reads  # type: ignore[attr-defined]
    bucket.fail(Trouble.FLIP, method="GET", times=10**9)
    breaker.trip("test")
    asked = len(bucket.asked("GET"))
    rig.wait(lambda: len(bucket.asked("GET")) > asked + 20)
    assert breaker.state
    bucket.heal()
    rig.wait(lambda: not breaker.state)
    assert not [seen for seen in bucket.asked("PUT") if "health" in seen.name]
