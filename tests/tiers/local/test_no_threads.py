"""A local tier in a process that cannot start threads does its background work once threads can start."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.thread_limit import ThreadLimit
from tests.tiers.local.rig import LocalRig, opened
from tiering.testing.keys import key_of
from tiers.local import tier as tier_module
from tiers.local.checkpoint import CHECKPOINT_NAME

K = [key_of(number) for number in range(40)]
FAST: dict[str, Any] = {"breaker": {"probe_after": "5ms", "probe_max": "10ms"}}


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


def test_at_a_limit_all_tiers_are_open_with_the_threads_that_there_are(
    tmp_path: Path, thread_limit: ThreadLimit, caplog: pytest.LogCaptureFixture
) -> None:
    def running() -> int:
        return sum("-io-" in thread.name for thread in threading.enumerate())

    thread_limit.refuse = lambda name: "-io-" in name and running() >= 46  # the first tier wants 44
    rigs = [LocalRig(tmp_path / name, **FAST) for name in ("first", "second", "third")]
    for rig in rigs:
        assert rig.tier.open(rig.context.clock() + 20)
    for _ in range(2):
        for rig in rigs:
            assert rig.store(K[:8]) == K[:8]
            assert rig.load(K[:8]) == K[:8]
    told = [record.getMessage() for record in caplog.records if "I/O threads run" in record.getMessage()]
    assert len(told) == 3, "once for each tier"
    assert all(rig.close() for rig in rigs)


def test_recovery_reads_all_headers_without_threads_of_its_own(
    tmp_path: Path, thread_limit: ThreadLimit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_module, "OPEN_WAIT_SECONDS", 0.0)
    with opened(tmp_path) as rig:
        rig.store(K)
    (tmp_path / CHECKPOINT_NAME).unlink()
    thread_limit.reach("scan")
    rig = LocalRig(tmp_path, **FAST)
    assert rig.tier.open(rig.context.clock() + 20)
    rig.wait(lambda: not rig.tier.recovering)
    assert rig.load(K) == K
    assert thread_limit.refused
    assert rig.close()


_CHILD = """
import os, resource, sys
from pathlib import Path
from tests.tiers.local.rig import LocalRig
from tiering.testing.keys import key_of
import logging, concurrent.futures, tiering.block_tier.service
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
