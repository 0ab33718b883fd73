"""One process owns a directory; a second process gets a clear error."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.tiers.local.rig import LocalRig, make_options, opened
from tiering.errors import ConfigError, PermanentStoreError
from tiering.testing.keys import key_of
from tiers.local import LOCAL_TIER
from tiers.local.layout import tier_directory
from tiers.local.lock import LOCK_NAME, DirectoryLock

K = [key_of(number) for number in range(4)]


def test_a_second_owner_is_told_who_holds_the_directory_and_what_to_do(tmp_path: Path) -> None:
    first = DirectoryLock(tmp_path)
    first.acquire()
    with pytest.raises(PermanentStoreError) as refused:
        DirectoryLock(tmp_path).acquire()
    assert f"process {os.getpid()} on " in str(refused.value)
    assert "another tier of this process opened it" in str(refused.value)
    assert "path" in str(refused.value)
    first.release()
    second = DirectoryLock(tmp_path)
    second.acquire()
    second.release()


def test_the_lock_names_its_owner(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path)
    lock.acquire()
    owner = json.loads((tmp_path / LOCK_NAME).read_text())
    assert owner["pid"] == os.getpid()
    assert set(owner) == {"pid", "host", "started"}
    lock.release()


def test_a_second_tier_stays_out_of_service_until_the_first_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"breaker": {"probe_after": "10ms", "probe_max": "10ms"}}
    second = LocalRig(tmp_path, **options)
    with opened(tmp_path) as first:
        first.store(K)
        with caplog.at_level(logging.ERROR, "kv_tiering.tier"):
            assert not second.tier.open(second.context.clock() + 20)
            assert "is in use by process" in caplog.text
        assert second.lookup(K) == 0
        assert second.store(K) == []
        assert first.load(K) == K
    second.wait(lambda: second.lookup(K) == 4)
    assert second.load(K) == K
    second.close()


def _hold(path: str, connection: Connection) -> None:
    lock = DirectoryLock(Path(path))
    lock.acquire()
    connection.send("held")
    connection.recv()


def test_a_killed_owner_leaves_no_lock(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=_hold, args=(str(tmp_path), theirs))
    process.start()
    assert ours.recv() == "held"
    with pytest.raises(PermanentStoreError, match=f"process {process.pid} "):
        DirectoryLock(tmp_path).acquire()
    process.kill()
    process.join()
    ours.close()
    theirs.close()
    lock = DirectoryLock(tmp_path)
    lock.acquire()
    lock.release()


def test_a_forked_child_does_not_keep_its_parents_lock(tmp_path: Path) -> None:
    """Engines fork workers; a worker that lives on must not keep the directory of its dead engine."""
    lock = DirectoryLock(tmp_path)
    lock.acquire()
    ready, is_ready = os.pipe()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.write(is_ready, b"x")
        os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    try:
        assert os.read(ready, 1) == b"x"
        lock.release()
        other = DirectoryLock(tmp_path)
        other.acquire()
        other.release()
    finally:
        for fd in (ready, is_ready, writer):
            os.close(fd)
        os.waitpid(child, 0)


def test_replicas_have_directories_of_their_own(tmp_path: Path) -> None:
    assert tier_directory(str(tmp_path), None) == tmp_path
    assert tier_directory(str(tmp_path), "1") == tmp_path / "replica-1"


@pytest.mark.parametrize("replica", ["../x", "", "..", "a/b", "x" * 65])
def test_a_replica_that_is_no_part_of_a_path_is_refused(replica: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a subdirectory"):
        tier_directory("/tmp", replica)


def test_two_tiers_of_one_stack_cannot_share_a_directory(tmp_path: Path) -> None:
    one, other = make_options(tmp_path), make_options(tmp_path / "x" / "..")
    assert LOCAL_TIER.location(one) == LOCAL_TIER.location(other)
