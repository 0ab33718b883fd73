"""A forked child that writes, resets, shuts down or simply ends changes nothing of its parent's tiers."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.fake_s3 import FakeS3
from tests.integration import fork_child
from tests.integration.fork_child import AFTER, BEFORE, fork, keys
from tests.manager_rig import ManagerRig
from tests.patience import PATIENT
from tests.tiers.local.rig import LocalRig
from tiering.api.inert_manager import InertManager
from tiering.api.manager import OffloadingManager
from tiering.secondary.contract import SecondaryTierManager
from tiering.secondary.inert import InertTier
from tiering.secondary.tier_stats import TierStats
from tiering.testing.fake_tier import FakeTier
from tiering.testing.tier_rig import TierRig
from tiers.object import S3_TIER, S3Options

PATIENCE = 60


@contextmanager
def engine(target: object, *arguments: object) -> Iterator[tuple[multiprocessing.process.BaseProcess, Connection]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.integration.fork_child"])
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(*arguments, theirs))  # type: ignore[arg-type]
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()
        ours.close()


def receive(pipe: Connection) -> object:
    assert pipe.poll(PATIENCE), "the engine says nothing"
    return pipe.recv()


@pytest.mark.parametrize("how", ["exit", "shutdown", "checkpoint", "store", "reset"])
def test_what_a_parent_stored_outlives_its_child_and_itself(tmp_path: Path, how: str) -> None:
    with engine(fork_child.run, str(tmp_path), how) as (process, pipe):
        assert receive(pipe) == 0
        assert receive(pipe) == "stored"
        process.join(PATIENCE)
        assert process.exitcode == -signal.SIGKILL
    everything = keys(range(BEFORE.start, AFTER.stop))
    rig = LocalRig(tmp_path, capacity="8MiB").open()
    try:
        assert rig.held(everything) == everything
        for start in range(0, len(everything), 32):
            assert rig.load(everything[start : start + 32]) == everything[start : start + 32]
        assert rig.held(keys(range(1000, 1032))) == []
    finally:
        rig.close()


def test_every_method_of_a_manager_does_nothing_in_a_child_and_the_parents_rows_stay(tmp_path: Path) -> None:
    with engine(fork_child.run_manager, str(tmp_path), f"fork-{os.getpid()}") as (process, pipe):
        assert receive(pipe) == 0
        assert receive(pipe), "the child wrote into the parent's rows"
        assert receive(pipe) is True, "the child removed the parent's region"
        assert receive(pipe) == 8
        process.join(PATIENCE)
        assert process.exitcode == 0


def test_a_child_does_not_open_a_tier_of_ones_own() -> None:
    opened = []

    class Tier(FakeTier):
        def open(self, deadline: float) -> bool:
            opened.append(deadline)
            return True

    rig = ManagerRig(4, [Tier()])

    def misuse() -> None:
        assert rig.manager.open_tier(0, 0.0) is False
        assert not opened

    assert fork(misuse) == 0
    assert rig.manager.open_tier(0, 0.0) is True


def test_a_child_asks_a_bucket_nothing(fake: FakeS3) -> None:
    words = {"bucket": fake.bucket, "endpoint_url": fake.endpoint, "prefix": "prod", **PATIENT}
    rig = TierRig(lambda context: S3_TIER.build(S3Options.model_validate(words), context), group_bytes=(8192,)).open()
    stored = keys(range(8))
    rig.store(stored)
    asked = len(fake.seen)

    def misuse() -> None:
        rig.submit_store(keys(range(100, 104)))
        rig.submit_load(stored)
        assert rig.tier.lookup(stored[0], fork_child.CTX) is False
        assert rig.tier.drain(time.monotonic() + 1)
        assert not rig.tier.reset(time.monotonic() + 1)
        assert rig.tier.get_stats() == TierStats()
        assert rig.tier.shutdown(time.monotonic() + 1)

    assert fork(misuse) == 0
    assert len(fake.seen) == asked
    assert rig.load(stored) == stored
    assert rig.close()


def test_no_method_of_a_manager_or_a_tier_is_left_out() -> None:
    for contract, inert in ((OffloadingManager, InertManager), (SecondaryTierManager, InertTier)):
        methods = {name for name, member in vars(contract).items() if not name.startswith("_") and callable(member)}
        assert methods - set(dir(inert)) == set(), contract.__name__
