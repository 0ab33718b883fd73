"""Epochs in a shared bucket: a reset moves one machine, and unused epochs can be collected."""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import yaml

from tests.cli.runner import kv_tiering
from tests.fake_s3 import FakeS3, Trouble
from tests.patience import PATIENT
from tests.tiers.object.new_epoch import begin_epochs
from tests.tiers.object.rigs import look_for_epoch, namespace_of, tier_of
from tiering.admin.records import Collected, Limits
from tiering.epochs.documents import lease_document
from tiering.epochs.opener import Opener
from tiering.secondary.contract import TierContext
from tiering.testing.tier_rig import TierRig, make_namespace
from tiering.testing.tier_tests import K
from tiers.object import S3_TIER, S3Options
from tiers.object.command import ObjectAdmin
from tiers.object.store import ObjectStore

BLOCK_BYTES = 64 << 10
OBJECTS = K[:20]
LATER = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(seconds=Limits().grace + 60)
"""A time after the fake server's modification times, which all lie at the beginning of 2026."""

Make = Callable[..., TierRig]
Open = Callable[..., ObjectStore]


@pytest.fixture
def make(fake: FakeS3) -> Iterator[Make]:
    rigs: list[TierRig] = []

    def build(revision: str | None = None, **words: object) -> TierRig:
        place = {"bucket": fake.bucket, "endpoint_url": fake.endpoint, "prefix": "prod"}
        chosen = {**place, "max_inflight": 2, **PATIENT, **words}
        rig = TierRig(
            lambda context: S3_TIER.build(S3Options.model_validate(chosen), context),
            group_bytes=(BLOCK_BYTES,),
            revision=revision,
        )
        rigs.append(rig)
        return rig.open()

    yield build
    for rig in rigs:
        rig.close()


def reset(rig: TierRig, revision: str | None = None) -> None:
    assert rig.tier.reset(time.monotonic() + 5, revision)


def block_names(fake: FakeS3) -> set[str]:
    return set(fake.names("/blocks/"))


def leases(fake: FakeS3) -> list[str]:
    return fake.names("documents/lease-")


@pytest.mark.parametrize("machines", [2, 8])
def test_a_reset_of_one_machine_deletes_nothing_and_leaves_the_others_all_they_share(
    fake: FakeS3, make: Make, machines: int
) -> None:
    one, *others = [make() for _ in range(machines)]
    assert one.store(OBJECTS) == OBJECTS
    before = block_names(fake)
    assert len(before) == len(OBJECTS)
    reset(one)
    assert one.load(OBJECTS) == []
    assert one.store(K[20:24]) == K[20:24]
    assert before < block_names(fake)
    for other in [*others, make()]:
        assert other.load(OBJECTS) == OBJECTS
        assert other.load(K[20:24]) == []
    assert fake.asked("DELETE") + fake.asked("POST") == []


def test_the_same_revision_makes_machines_share_again_also_one_that_starts_with_it(make: Make) -> None:
    one, two = make(), make()
    for rig in (one, two):
        reset(rig)
        reset(rig, "step-17")
    assert one.store(OBJECTS) == OBJECTS
    for rig in (two, make("step-17")):
        assert rig.load(OBJECTS) == OBJECTS
    for rig in (make(), make("step-18")):
        assert rig.load(OBJECTS) == []


class _Meeting(ObjectStore):
    """A store whose second read of an epoch document waits until all machines have read theirs."""

    def __init__(self, options: S3Options, barrier: threading.Barrier) -> None:
        super().__init__(options)
        self._barrier = barrier
        self._asked = 0

    def read_document(self, name: str) -> bytes | None:
        found = super().read_document(name)
        if name.startswith("epoch-"):
            self._asked += 1
            if self._asked == 2:
                self._barrier.wait(30)
        return found


@pytest.mark.parametrize("machines", [2, 8])
def test_machines_that_start_together_agree_on_one_epoch(fake: FakeS3, machines: int) -> None:
    options = S3Options(bucket=fake.bucket, endpoint_url=fake.endpoint, prefix="prod/")
    barrier = threading.Barrier(machines)
    media = [
        Opener(
            TierContext(str(number), memoryview(b""), (BLOCK_BYTES,), make_namespace("m", (BLOCK_BYTES,))),
            _Meeting(options, barrier),
            shared=True,
        )
        for number in range(machines)
    ]
    with ThreadPoolExecutor(machines) as pool:
        epochs = {entered.namespace.epoch for entered in pool.map(lambda medium: medium.enter(None), media)}
    for medium in media:
        medium.close(5)
    assert len(epochs) == 1
    assert len(fake.asked("PUT", "documents/epoch-")) == machines, "each of them had found none"


def test_a_document_that_is_read_damaged_once_is_read_again(fake: FakeS3, make: Make) -> None:
    make().store(OBJECTS[:2])
    fake.fail(Trouble.FLIP, method="GET", part="documents/epoch-")
    assert make().load(OBJECTS[:2]) == OBJECTS[:2]


def test_a_reset_does_not_wait_for_a_bucket_that_hangs(fake: FakeS3, make: Make) -> None:
    rig = make(deadline="20s", request_timeout="20s")
    rig.store(OBJECTS[:4])
    fake.fail(Trouble.HANG, times=1 << 30)
    job = rig.submit_load(OBJECTS[:4])
    assert fake.hanging.acquire(timeout=10)
    reset(rig)
    assert list(rig.tier.get_finished()) == [], "the bucket still hangs"
    fake.heal()
    fake.closing.set()
    rig.wait(lambda: rig.reports()[job])
    assert rig.load(OBJECTS[:4]) == []


# ----------------------------------------------------------------------------------------------------------- collecting


def collect(fake: FakeS3, now: datetime.datetime, *, dry_run: bool = False) -> Collected:
    options = S3Options(bucket=fake.bucket, endpoint_url=fake.endpoint, prefix="prod/")
    with ObjectAdmin(options) as admin:
        admin.clock = now.timestamp
        return asyncio.run(admin.collect(Limits(abandoned=True), dry_run=dry_run))


def test_what_no_document_and_no_fresh_lease_names_is_collected_after_the_grace_time(
    fake: FakeS3, make: Make, open_store: Open
) -> None:
    common, private, named = make(), make(), make("step-1")
    reset(private)
    for rig in (common, private, named):
        rig.store(OBJECTS[:4])
    named.wait(lambda: fake.names(lease_document(namespace_of(named))))
    private.wait(lambda: len(leases(fake)) == 2)
    assert collect(fake, LATER - datetime.timedelta(hours=2)).removed_blocks == 0, "nothing is old enough"
    assert collect(fake, LATER, dry_run=True).removed_blocks == 8
    assert len(block_names(fake)) == 12
    assert collect(fake, LATER).removed_blocks == 8
    assert common.load(OBJECTS[:4]) == OBJECTS[:4]
    assert private.load(OBJECTS[:4]) == []
    assert collect(fake, LATER).blocks == 4


def test_a_bucket_that_takes_no_more_bytes_can_still_be_collected(fake: FakeS3, make: Make) -> None:
    private = make()
    reset(private)
    private.store(OBJECTS[:4])
    private.wait(lambda: leases(fake))
    assert private.close()
    fake.fail(507, method="PUT", times=1 << 30)
    assert collect(fake, LATER).removed_blocks == 4
    assert not block_names(fake)


def test_an_epoch_with_a_fresh_lease_is_left_alone(fake: FakeS3, make: Make, open_store: Open) -> None:
    private = make()
    reset(private)
    private.store(OBJECTS[:4])
    private.wait(lambda: leases(fake))
    fake.modified = dict.fromkeys(leases(fake), LATER)
    assert collect(fake, LATER).removed_blocks == 0
    assert private.load(OBJECTS[:4]) == OBJECTS[:4]


def test_blocks_whose_epoch_document_is_damaged_are_collected(fake: FakeS3, make: Make, open_store: Open) -> None:
    make().store(OBJECTS[:4])
    (name,) = fake.names("documents/epoch-")
    fake.objects[name] = bytes(len(fake.objects[name]))
    assert make().load(OBJECTS[:4]) == []
    assert collect(fake, LATER).removed_blocks == 4


# ------------------------------------------------------------------------------------------------- a new common epoch


def follow(rig: TierRig) -> None:
    """Make the look for a common epoch due now, and let the tier follow once it notices a new one."""
    look_for_epoch(rig)
    rig.wait(lambda: rig.step().superseded)
    assert rig.tier.reset(time.monotonic(), follow=True)


def finds_six(rig: TierRig) -> bool:
    return rig.lookup(OBJECTS) == 6


def test_a_new_common_epoch_is_noticed_by_running_machines_and_by_those_that_start(
    fake: FakeS3, make: Make, open_store: Open
) -> None:
    one, two = make(), make(absent_ttl="20ms")
    assert one.store(OBJECTS[:4]) == OBJECTS[:4]
    (begun,) = begin_epochs(open_store())
    for rig in (one, two):
        follow(rig)
        assert rig.load(OBJECTS[:4]) == []
    assert namespace_of(one).epoch == begun
    assert one.store(OBJECTS[:6]) == OBJECTS[:6]
    for rig in (two, make()):
        # The machine may believe for a moment that blocks are absent.
        rig.wait(partial(finds_six, rig))
        assert rig.load(OBJECTS[:6]) == OBJECTS[:6]
    assert not leases(fake)
    assert fake.asked("DELETE") + fake.asked("POST") == []


def test_a_running_machine_looks_for_a_new_common_epoch_within_a_minute(
    fake: FakeS3, make: Make, open_store: Open
) -> None:
    rig = make()
    begin_epochs(open_store())
    assert 0 < tier_of(rig)._life._watch.due - time.monotonic() <= 60
    looked = len(fake.asked("GET", "documents/epoch-"))
    rig.wait(lambda: rig.tier.get_stats().available)
    assert len(fake.asked("GET", "documents/epoch-")) == looked


def test_machines_in_an_epoch_of_their_own_stay_there(make: Make, open_store: Open) -> None:
    private, named = make(), make("step-1")
    reset(private)
    for rig in (private, named):
        rig.store(OBJECTS[:2])
        before = namespace_of(rig)
        begin_epochs(open_store())
        look_for_epoch(rig)
        assert rig.load(OBJECTS[:2]) == OBJECTS[:2]
        assert namespace_of(rig) == before


def test_commands_that_begin_an_epoch_at_once_each_begin_one(make: Make, fake: FakeS3) -> None:
    make()
    barrier = threading.Barrier(4)

    def begin(number: int) -> bytes:
        store = _Meeting(S3Options(bucket=fake.bucket, endpoint_url=fake.endpoint, prefix="prod/"), barrier)
        store.open()
        (begun,) = begin_epochs(store)
        store.close()
        return begun

    with ThreadPoolExecutor(4) as pool:
        begun = set(pool.map(begin, range(4)))
    assert len(begun) == 4
    assert namespace_of(make()).epoch in begun


def test_blocks_of_the_older_common_epoch_are_collected_after_the_grace_time(
    fake: FakeS3, make: Make, open_store: Open
) -> None:
    one = make()
    one.store(OBJECTS[:4])
    begin_epochs(open_store())
    follow(one)
    one.store(OBJECTS[4:6])
    assert collect(fake, LATER - datetime.timedelta(hours=2)).removed_blocks == 0
    assert collect(fake, LATER).removed_blocks == 4
    assert one.load(OBJECTS[4:6]) == OBJECTS[4:6]


def test_a_damaged_newest_document_does_not_bring_an_older_epoch_back(
    fake: FakeS3, make: Make, open_store: Open
) -> None:
    make().store(OBJECTS[:4])
    begin_epochs(open_store())
    name = max(fake.names("documents/epoch-"))
    fake.objects[name] = bytes(len(fake.objects[name]))
    assert make().load(OBJECTS[:4]) == []


def test_inspect_names_the_process_of_each_epoch_that_is_not_the_common_one(
    fake: FakeS3, make: Make, tmp_path: Path
) -> None:
    fake.now = datetime.datetime.now(datetime.UTC)
    one, two = make(), make()
    one.store(K[:2])
    reset(two)
    two.store(K[:2])
    two.wait(lambda: bool(leases(fake)))
    path = tmp_path / "stack.yaml"
    tier = {"type": "s3", "bucket": fake.bucket, "endpoint_url": fake.endpoint, "prefix": "prod"}
    path.write_text(yaml.safe_dump({"primary": {"capacity": "8MiB"}, "secondary": [tier]}))
    mine = namespace_of(two).fingerprint.hex()
    holder = f"process {os.getpid()} on {socket.gethostname()}"
    (found,) = json.loads(kv_tiering("inspect", path, "--json").out).values()
    assert {epoch["fingerprint"]: epoch["holder"] for epoch in found["epochs"]} == {
        mine: holder,
        namespace_of(one).fingerprint.hex(): "",
    }
    assert f"lease\t{mine[:8]} is the epoch of {holder}" in kv_tiering("inspect", path).out
    (name,) = leases(fake)
    fake.objects[name] = b"\x1b[31mprocess 1 on evil\n"
    (found,) = json.loads(kv_tiering("inspect", path, "--json").out).values()
    assert {epoch["holder"] for epoch in found["epochs"]} == {""}
