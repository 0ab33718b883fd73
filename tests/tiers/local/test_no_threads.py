"""A local tier in a process that cannot start threads does its background work once threads can start."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.thread_limit import ThreadLimit
from tests.tiers.local.rig import LocalRig, opened, segment_files
from tiering.secondary.io.layers.breaker import BreakerState
from tiering.testing.clock import FakeClock
from tiering.testing.frames import key_of
from tiers.local import checkpoints, growth, inspections, new_segments
from tiers.local import tier as tier_module
from tiers.local.checkpoint import CHECKPOINT_NAME

K = [key_of(number) for number in range(40)]
FAST: dict[str, Any] = {"breaker": {"probe_after": "5ms", "probe_max": "10ms"}}


def steps(rig: LocalRig, count: int = 30) -> None:
    numbers = itertools.count(1)
    rig.wait(lambda: next(numbers) >= count)


def test_a_tier_that_could_not_be_opened_is_opened_later(tmp_path: Path, thread_limit: ThreadLimit) -> None:
    thread_limit.reach()
    rig = LocalRig(tmp_path, **FAST)
    assert not rig.tier.open(rig.context.clock() + 5)
    rig.wait(lambda: len(thread_limit.refused) > 1)
    assert rig.tier.get_stats().available == 0
    thread_limit.leave()
    rig.wait(lambda: rig.tier.get_stats().available)
    rig.wait(lambda: rig.store(K[:8]) == K[:8])
    assert rig.load(K[:8]) == K[:8]
    assert rig.close()


@pytest.mark.parametrize("part", ["recovery", "scan"])
def test_recovery_goes_on_when_threads_can_be_started(
    tmp_path: Path, thread_limit: ThreadLimit, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_module, "OPEN_WAIT_SECONDS", 0.0)
    with opened(tmp_path) as rig:
        rig.store(K)
    (tmp_path / CHECKPOINT_NAME).unlink()
    thread_limit.reach(part)
    rig = LocalRig(tmp_path, **FAST)
    assert rig.tier.open(rig.context.clock() + 20)
    steps(rig)
    if part == "recovery":
        assert rig.held(K) == []
        assert rig.tier.get_stats().recovering == 1
    thread_limit.leave()
    rig.wait(lambda: not rig.tier.recovering)
    assert rig.load(K) == K
    assert rig.close()


def test_segments_are_added_when_threads_can_be_started(
    tmp_path: Path, thread_limit: ThreadLimit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_segments, "FIRST_BYTES", 0)
    monkeypatch.setattr(growth, "RETRY_SPACE_SECONDS", 0.01)
    thread_limit.reach("segment")
    with opened(tmp_path) as rig:
        rig.store(K[:4])
        steps(rig)
        assert len(segment_files(tmp_path)) == 1
        thread_limit.leave()
        rig.wait(lambda: len(segment_files(tmp_path)) > 1)
        rig.wait(lambda: len(rig.store(K[:20])) == 20)


def test_a_checkpoint_is_written_when_threads_can_be_started(
    tmp_path: Path, thread_limit: ThreadLimit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "RETRY_CHECKPOINT_SECONDS", 0.01)
    with opened(tmp_path, checkpoint_interval="1h") as rig:
        rig.store(K)
        thread_limit.reach("checkpoint")
        rig.tier.request_checkpoint()
        steps(rig)
        assert not (tmp_path / CHECKPOINT_NAME).exists()
        thread_limit.leave()
        rig.wait((tmp_path / CHECKPOINT_NAME).exists)


def test_a_breaker_closes_when_its_probe_gets_a_thread(tmp_path: Path, thread_limit: ThreadLimit) -> None:
    clock = FakeClock()
    with opened(tmp_path, clock=clock, breaker={"probe_after": "1s", "probe_max": "1s"}) as rig:
        rig.store(K[:8])
        thread_limit.reach("health")
        breakers = rig.tier.io.breakers
        breakers.trip("test")
        for refused in (2, 4, 6):  # one probe of reads and one of writes each time
            clock.advance(1.0)
            rig.wait(lambda refused=refused: len(thread_limit.refused) == refused)  # type: ignore[misc]
            rig.wait(lambda: {breaker.state for breaker in (breakers.reads, breakers.writes)} == {BreakerState.OPEN})
            steps(rig)
            assert len(thread_limit.refused) == refused, "no other probe is due yet"
            assert rig.tier.get_stats().available == 0
        thread_limit.leave()
        clock.advance(1.0)
        rig.wait(lambda: rig.tier.get_stats().writable)
        assert rig.load(K[:8]) == K[:8]


@pytest.mark.parametrize("part", ["reopen", "inspect"])
def test_a_directory_that_went_away_is_opened_again_when_threads_can_be_started(
    tmp_path: Path,
    thread_limit: ThreadLimit,
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(inspections, "INSPECT_SECONDS", 0.0)
    monkeypatch.setattr(inspections, "INSPECT_AT_ONCE_SECONDS", 0.0)
    path = tmp_path / "kv"
    with opened(path, **FAST) as rig:
        rig.store(K[:8])
        rig.wait(lambda: not rig.tier.inspecting)
        thread_limit.reach(part)
        shutil.rmtree(path)
        rig.store(K[8:12])
        rig.wait(lambda: len(thread_limit.refused) > 3)
        thread_limit.leave()
        rig.wait(lambda: rig.store(K[16:20]) == K[16:20] and segment_files(path))
        assert rig.load(K[16:20]) == K[16:20]
    assert len([record for record in caplog.records if "cannot be started" in record.getMessage()]) <= 2


_CHILD = """
import os, resource, sys
from pathlib import Path
from tests.tiers.local.rig import LocalRig
from tiering.testing.frames import key_of
import logging, concurrent.futures, tiering.secondary.service.service
print("ready", flush=True)
hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
rig = LocalRig(Path(sys.argv[1]), breaker={"probe_after": "5ms", "probe_max": "10ms"})
resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))
assert not rig.tier.open(rig.context.clock() + 5)
assert rig.tier.get_stats().available == 0
resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
rig.wait(lambda: rig.tier.get_stats().available)
keys = [key_of(number) for number in range(8)]
rig.wait(lambda: rig.store(keys) == keys)
resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))
assert rig.load(keys) == keys
resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
assert rig.close()
print("done")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a user of its own, whose processes it can count")
def test_the_limit_of_the_kernel(tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    directory.mkdir()
    for path in (directory, *list(tmp_path.parents)[: len(tmp_path.parents) - 2], tmp_path):
        path.chmod(path.stat().st_mode | 0o011)
    os.chown(directory, 65534, 65534)
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(directory)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            # The imports take most of the child's time, without a bytecode cache on a busy machine even a minute.
            assert child.stdout.readline() == "ready\n"
            said, errors = child.communicate(timeout=60)
        finally:
            child.kill()
    assert said.strip() == "done", errors
    assert "ulimit -u" in errors
