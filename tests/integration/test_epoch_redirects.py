"""A bucket that begins to redirect: to an older copy of it, or to the bucket of another fleet.

The client follows redirects and cannot be told not to. Names of blocks contain the epoch, and frames a fingerprint, so
that an engine in an epoch finds no block of another one, whatever host answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fake_s3 import FakeS3, fake_s3
from tests.integration.epoch_machine import BLOCK_BYTES, MODEL, Machine, bucket_tier, disk_tier
from tiering.api.namespace import Namespace
from tiering.block_tier.epoch_chores import LOOK_SECONDS
from tiering.epochs.driver import SURE_SECONDS, begin_common
from tiering.testing.clock import SettableClock, until
from tiering.testing.keys import keys_of
from tiers.object.bucket_options import S3Options
from tiers.object.store import ObjectStore

K = keys_of(*range(4))
NAMESPACE = Namespace.build(MODEL, (BLOCK_BYTES,))


Start = Callable[..., Machine]


@pytest.fixture
def clock() -> SettableClock:
    return SettableClock()


@pytest.fixture
def other() -> Iterator[FakeS3]:
    """The host that requests are redirected to."""
    with fake_s3() as running:
        yield running


@pytest.fixture
def start(clock: SettableClock) -> Iterator[Start]:
    machines: list[Machine] = []

    def build(bucket: FakeS3, weights: int, tiers: Sequence[dict[str, Any]] = (), **words: object) -> Machine:
        machines.append(Machine(tiers or [bucket_tier(bucket)], weights, words, clock=clock))
        return machines[-1]

    yield build
    for machine in machines:
        machine.manager.shutdown()


def store_of(bucket: FakeS3) -> ObjectStore:
    options = {"bucket": bucket.bucket, "endpoint_url": bucket.endpoint, "prefix": "prod/"}
    store = ObjectStore(S3Options.model_validate(options))
    store.open()
    return store


def looks(machine: Machine, clock: SettableClock, host: FakeS3, seconds: float = LOOK_SECONDS) -> None:
    """Let the machine look for new epochs on ``host``, and enter what it finds."""
    clock.advance(seconds)
    asked = len(host.asked("GET", "documents/epoch-"))

    def looked() -> bool:
        machine.manager.on_schedule_end()
        machine.manager.has_pending_work()
        watch = machine.manager.secondary_tiers[0]._life._watch  # type: ignore[attr-defined]
        return len(host.asked("GET", "documents/epoch-")) > asked and not watch.running

    assert until(looked)
    machine.await_bucket()


def in_a_new_epoch(start: Start, bucket: FakeS3, other: FakeS3, clock: SettableClock) -> tuple[Machine, Machine]:
    """Return two engines in a new epoch, the second without rows; ``other`` has the bucket of before."""
    one, two = start(bucket, 0), start(bucket, 0)
    one.store(K)
    with bucket.lock:
        other.objects.update(bucket.objects)
    store = store_of(bucket)
    begin_common(store, NAMESPACE)
    store.close()
    for machine in (one, two):
        looks(machine, clock, bucket)
        machine.weights = 1
    one.store(K)
    return one, two


def test_an_older_copy_has_no_block_for_an_engine_that_runs(
    start: Start, bucket: FakeS3, other: FakeS3, clock: SettableClock
) -> None:
    _, two = in_a_new_epoch(start, bucket, other, clock)
    epoch = two.epoch
    bucket.redirect_to = other.endpoint
    assert two.find(K, 1) == 0
    for seconds in (LOOK_SECONDS, SURE_SECONDS + LOOK_SECONDS):
        looks(two, clock, other, seconds)
        assert (two.find(K, 1), two.epoch) == (0, epoch), "the older epoch of the copy is not entered"
    bucket.redirect_to = ""
    looks(two, clock, bucket)
    assert (two.find(K, 1), two.epoch) == (4, epoch)


def test_the_bucket_of_another_fleet_has_no_block_either(
    start: Start, bucket: FakeS3, other: FakeS3, clock: SettableClock
) -> None:
    start(other, 7).store(K)
    _, two = in_a_new_epoch(start, bucket, FakeS3(), clock)
    epoch = two.epoch
    bucket.redirect_to = other.endpoint
    assert two.find(K, 1) == 0
    looks(two, clock, other)
    assert (two.find(K, 1), two.epoch) == (0, epoch), "its epoch lacks the invalidation that the engine knows"


def test_an_engine_whose_disk_remembers_does_not_start_on_an_older_copy(
    start: Start, bucket: FakeS3, other: FakeS3, clock: SettableClock, tmp_path: Path
) -> None:
    in_a_new_epoch(start, bucket, other, clock)
    tiers = [disk_tier(tmp_path / "disk"), bucket_tier(bucket)]
    before = start(bucket, 1, tiers)
    before.await_disk()
    before.store(K)
    before.manager.shutdown()
    bucket.redirect_to = other.endpoint
    later = start(bucket, 1, tiers, open_deadline="2s")
    later.await_disk()
    assert later.available("s3") == 0, "it would have to begin the epoch there, and writes are not redirected"
    assert later.find(K, 1) == 4, "from its disk"
