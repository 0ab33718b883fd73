"""A new common epoch that an engine did not notice: its older blocks are not served or stored again.

The content of a block names the weights that computed it, so an old block in a new epoch is seen by its bytes.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_s3 import FakeS3
from tests.integration.epoch_machine import Machine, bucket_tier, disk_tier
from tests.tiers.object.new_epoch import begin_epochs
from tiering.testing.clock import until
from tiering.testing.keys import keys_of
from tiers.local.store import LocalStore
from tiers.object.bucket_options import S3Options
from tiers.object.store import ObjectStore

K = keys_of(*range(6))


Start = Callable[..., Machine]


@pytest.fixture
def start() -> Iterator[Start]:
    """Function that starts an engine."""
    machines: list[Machine] = []

    def build(
        path: Path | None,
        bucket: FakeS3 | None,
        *,
        weights: int = 0,
        clock: Callable[[], float] = time.monotonic,
        **words: object,
    ) -> Machine:
        tiers = [] if path is None else [disk_tier(path)]
        tiers += [] if bucket is None else [bucket_tier(bucket)]
        machines.append(Machine(tiers, weights, words, clock))
        return machines[-1]

    yield build
    for machine in machines:
        machine.manager.shutdown()


def begin_epoch(bucket: FakeS3) -> None:
    """Begin a new common epoch, as ``kv-tiering epoch new`` does."""
    options = {"bucket": bucket.bucket, "endpoint_url": bucket.endpoint, "prefix": "prod/"}
    store = ObjectStore(S3Options.model_validate(options))
    store.open()
    try:
        assert begin_epochs(store)
    finally:
        store.close()


def blocks_of(bucket: FakeS3) -> int:
    return len(bucket.names("/blocks/"))


def ran_before(start: Start, path: Path, bucket: FakeS3 | None) -> None:
    """Run an engine that stores blocks, and end it."""
    machine = start(path, bucket)
    machine.store(K[:4])
    machine.manager.shutdown()


@pytest.mark.parametrize("keep", [False, True], ids=["", "keep_secondary"])
def test_an_engine_that_was_off_brings_no_older_block_into_the_new_epoch(
    tmp_path: Path, bucket: FakeS3, start: Start, keep: bool
) -> None:
    ran_before(start, tmp_path, bucket)
    begin_epoch(bucket)
    stored = blocks_of(bucket)
    machine = start(tmp_path, bucket, weights=1, keep_secondary=keep)
    assert machine.available("s3") == machine.available("local") == 1, "opening has dropped the blocks already"
    assert machine.find(K[:4], 1) == 0
    assert blocks_of(bucket) == stored, "the disk's blocks were offered to the new epoch"
    assert start(None, bucket, weights=1).find(K[:4], 1) == 0
    machine.store(K[:4])
    assert start(None, bucket, weights=1).find(K[:4], 1) == 4


def test_an_engine_that_was_off_keeps_its_disk_if_no_epoch_has_begun(
    tmp_path: Path, bucket: FakeS3, start: Start
) -> None:
    for _ in range(3):
        ran_before(start, tmp_path, bucket)
    machine = start(tmp_path, bucket)
    assert (machine.disk_blocks, machine.find(K[:4], 0), machine.manager.new_epochs) == (4, 4, 0)


def test_a_bucket_that_comes_back_with_a_new_epoch_gets_no_block_served_meanwhile(
    tmp_path: Path, bucket: FakeS3, start: Start
) -> None:
    ran_before(start, tmp_path, bucket)
    begin_epoch(bucket)
    stored = blocks_of(bucket)
    bucket.fail(503, times=10**9)
    machine = start(tmp_path, bucket, open_deadline="500ms")
    machine.await_disk()
    assert machine.find(K[:4], 0) == 4, "while the bucket is down, the disk serves"
    machine.store(K[4:6])
    machine.weights = 1
    bucket.heal()
    machine.await_bucket()
    assert machine.manager.new_epochs == 1
    assert machine.find(K[:4], 1) == machine.find(K[4:6], 1) == 0
    assert blocks_of(bucket) == stored
    machine.store(K[:4])
    machine.manager.shutdown()
    again = start(tmp_path, bucket, weights=1)
    assert (again.disk_blocks, again.find(K[:4], 1)) == (4, 4), "the new epoch's blocks outlive the engine"


def test_a_bucket_that_comes_back_with_its_epoch_costs_nothing(tmp_path: Path, bucket: FakeS3, start: Start) -> None:
    begin_later = start(None, bucket)
    begin_epoch(bucket)
    begin_later.manager.shutdown()
    ran_before(start, tmp_path, bucket)
    bucket.fail(503, times=10**9)
    machine = start(tmp_path, bucket, open_deadline="500ms")
    machine.await_disk()
    assert machine.find(K[:4], 0) == 4
    bucket.heal()
    machine.await_bucket()
    assert (machine.manager.new_epochs, machine.find(K[:4], 0), machine.disk_blocks) == (0, 4, 4)


@pytest.mark.parametrize("moved", [False, True], ids=["never moved", "moved"])
def test_without_a_disk_the_rows_are_emptied_unless_the_epoch_has_never_moved(
    bucket: FakeS3, start: Start, moved: bool
) -> None:
    start(None, bucket).manager.shutdown()
    if moved:
        begin_epoch(bucket)
    bucket.fail(503, times=10**9)
    machine = start(None, bucket, open_deadline="200ms")
    machine.store(K[:4])
    bucket.heal()
    machine.await_bucket()
    assert (machine.find(K[:4], 0), machine.manager.new_epochs) == ((0, 1) if moved else (4, 0))


@pytest.mark.parametrize("moved", [False, True], ids=["never moved", "moved"])
def test_a_disk_that_was_used_without_the_bucket_is_kept_only_if_the_epoch_has_never_moved(
    tmp_path: Path, bucket: FakeS3, start: Start, moved: bool
) -> None:
    start(None, bucket).manager.shutdown()
    ran_before(start, tmp_path, None)
    if moved:
        begin_epoch(bucket)
    machine = start(tmp_path, bucket)
    assert machine.disk_blocks == (0 if moved else 4)
    machine.manager.shutdown()
    begin_epoch(bucket)
    assert start(tmp_path, bucket, weights=1).find(K[:4], 1) == 0


@pytest.mark.parametrize("epochs", [1, 2])
def test_an_image_of_the_disk_from_before_the_epoch_serves_nothing(
    tmp_path: Path, bucket: FakeS3, start: Start, epochs: int
) -> None:
    disk, image = tmp_path / "disk", tmp_path / "image"
    ran_before(start, disk, bucket)
    shutil.copytree(disk, image)
    for weights in range(1, epochs + 1):
        begin_epoch(bucket)
        machine = start(disk, bucket, weights=weights)
        machine.await_bucket()
        machine.store(K[:2])
        machine.manager.shutdown()
    shutil.rmtree(disk)
    shutil.copytree(image, disk)
    machine = start(disk, bucket, weights=epochs)
    machine.await_bucket()
    assert machine.disk_blocks == 0
    assert machine.find(K[:4], epochs) == 2, "the bucket has these"
    machine.store(K[2:4])
    machine.manager.shutdown()
    later = start(disk, bucket, weights=epochs)
    assert later.disk_blocks == 2, "what was stored since"
    assert later.find(K[:4], epochs) == 4


def test_an_image_of_before_that_takes_the_place_of_the_disk_in_use_serves_nothing(
    tmp_path: Path, bucket: FakeS3, start: Start
) -> None:
    disk, image = tmp_path / "disk", tmp_path / "image"
    skipped = 0.0
    ran_before(start, disk, bucket)
    shutil.copytree(disk, image)
    begin_epoch(bucket)
    machine = start(disk, bucket, weights=1, clock=lambda: time.monotonic() + skipped)
    machine.await_bucket()
    machine.store(K[:2])
    disk.rename(tmp_path / "replaced")
    image.rename(disk)

    def opened_again() -> bool:
        nonlocal skipped
        skipped += 0.1
        machine.manager.on_schedule_end()
        machine.manager.has_pending_work()
        return bool(machine.manager.get_stats()["tiers"]["local"]["reopened"]) and machine.available("local") == 1

    assert until(opened_again)
    machine.await_bucket()
    assert machine.disk_blocks == 0
    machine.store(K[2:4])
    machine.manager.shutdown()
    later = start(disk, bucket, weights=1)
    assert later.disk_blocks == 2, "what was stored since"
    assert later.find(K[:4], 1) == 4


def test_a_bucket_that_was_taken_out_of_the_stack_is_recognised(tmp_path: Path, bucket: FakeS3, start: Start) -> None:
    ran_before(start, tmp_path, bucket)
    ran_before(start, tmp_path, None)
    machine = start(tmp_path, bucket)
    assert machine.disk_blocks == 4
    machine.manager.shutdown()
    ran_before(start, tmp_path, None)
    begin_epoch(bucket)
    assert start(tmp_path, bucket, weights=1).find(K[:4], 1) == 0


def test_a_new_machine_joins_a_moved_epoch_without_dropping_anything(
    tmp_path: Path, bucket: FakeS3, start: Start
) -> None:
    first = start(None, bucket)
    begin_epoch(bucket)
    first.manager.shutdown()
    machine = start(tmp_path, bucket)
    machine.store(K[:4])
    assert (machine.manager.new_epochs, machine.disk_blocks) == (0, 4)


def test_a_crash_at_any_change_of_a_document_brings_nothing_back(
    tmp_path: Path, bucket: FakeS3, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, crashes = tmp_path / "disk", tmp_path / "crashes"
    ran_before(start, disk, bucket)
    begin_epoch(bucket)
    stored = blocks_of(bucket)

    def crash() -> None:
        shutil.copytree(disk, crashes / str(len(list(crashes.glob("*")))))

    crashes.mkdir()
    for name in ("write_document", "remove_document"):
        plain = getattr(LocalStore, name)

        def watched(self: LocalStore, *arguments: Any, plain: Callable[..., None] = plain) -> None:
            crash()
            plain(self, *arguments)
            crash()

        monkeypatch.setattr(LocalStore, name, watched)
    machine = start(disk, bucket, weights=1)
    machine.find(K[:4], 1)
    machine.manager.shutdown()
    monkeypatch.undo()
    for name, value in bucket.environment().items():
        monkeypatch.setenv(name, value)
    copies = sorted(crashes.iterdir())
    assert len(copies) >= 4, "the old document is removed, and a new one written"
    for copy in copies:
        machine = start(copy, bucket, weights=1)
        assert machine.find(K[:4], 1) == 0
        machine.manager.shutdown()
    assert blocks_of(bucket) == stored
