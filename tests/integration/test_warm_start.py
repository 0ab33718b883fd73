"""A second manager starts warm: from its own directory, or from a bucket that others use."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiering
from tests.fake_s3 import FakeS3
from tests.patience import PATIENT
from tests.servers import RawBucket, S3Endpoint, moto_server
from tiering.block_tier.tier import BlockTier
from tiering.epochs.hot_keys import HOT, hot_document, pack
from tiering.testing.keys import keys_of

BLOCK_BYTES = 64 << 10
K = keys_of(*range(24))
MODEL = tiering.ModelIdentity(name="demo", weights="w1", dtype="bfloat16", layout="test")
WARM: dict[str, Any] = {"warm_start": {"seconds": 30}}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[S3Endpoint]:
    with moto_server() as server:
        yield server


@pytest.fixture
def bucket(endpoint: S3Endpoint, monkeypatch: pytest.MonkeyPatch) -> Iterator[RawBucket]:
    for name, value in endpoint.environment().items():
        monkeypatch.setenv(name, value)
    made = endpoint.make_bucket(f"kv-{os.urandom(4).hex()}")
    yield made
    made.close()


def local(path: Path) -> dict[str, Any]:
    return {"type": "local", "path": str(path), "capacity": "16MiB"}


def in_bucket(endpoint: S3Endpoint, bucket: RawBucket) -> dict[str, Any]:
    return {"type": "s3", "bucket": bucket.name, "endpoint_url": endpoint.endpoint, "prefix": "kv/", **PATIENT}


def opened(tier: dict[str, Any], capacity: str = "4MiB", **words: Any) -> tiering.TieringOffloadingManager:
    stack = {"primary": {"capacity": capacity}, "secondary": [tier], **words}
    return tiering.open_manager(tiering.load_stack(stack), BLOCK_BYTES, MODEL)


def serve(manager: tiering.TieringOffloadingManager, keys: list[bytes], name: str = "r") -> None:
    """Store the blocks of a prompt, whose bytes follow from the key, and let the tiers end."""
    ctx = tiering.ReqContext(req_id=name)
    manager.on_new_request(ctx)
    manager.touch(keys, ctx)
    out = manager.prepare_store(keys, ctx)
    assert out is not None
    rows = np.asarray(manager.primary_tier.get_kv_memoryview())
    for key, row in zip(out.keys_to_store, out.store_spec.block_ids, strict=True):
        rows[row] = key[3] + 1
    manager.complete_store(out.keys_to_store, ctx)
    manager.on_request_finished(ctx)
    assert tiering.wait_until_idle(manager)


def warmed(manager: tiering.TieringOffloadingManager) -> list[bytes]:
    """Return the blocks that are in the CPU tier after the warm start, with the bytes that were stored."""
    assert tiering.wait_until_idle(manager)
    found = [key for key in K if key in manager.primary_tier.readable]
    rows = np.asarray(manager.primary_tier.get_kv_memoryview())
    for key, row in zip(found, manager.primary_tier.readable.rows(found), strict=True):
        assert (rows[row] == key[3] + 1).all()
    return found


def stat(manager: tiering.TieringOffloadingManager, name: str) -> int:
    return int(manager.get_stats()["manager"][name])


def test_a_restart_is_warm_from_its_own_directory_before_any_request(tmp_path: Path) -> None:
    with opened(local(tmp_path), **WARM) as first:
        serve(first, K[:8])
        serve(first, K[8:12], "r2")
    with opened(local(tmp_path), **WARM) as second:
        assert warmed(second) == K[:12]
        ctx = tiering.ReqContext(req_id="first request")
        second.on_new_request(ctx)
        assert second.match_prefix(K[:8], ctx) == (8, False)
        assert (stat(second, "warm_start_blocks"), stat(second, "warm_start_engines")) == (12, 1)


def test_the_first_request_after_a_restart_does_not_replace_what_was_published_before(tmp_path: Path) -> None:
    """An engine that is killed soon after its start leaves the document of its earlier life."""
    with opened(local(tmp_path), **WARM) as first:
        serve(first, K[:8])
    (document,) = (tmp_path / "documents").glob(f"{HOT}*")
    content = document.read_bytes()
    with opened(local(tmp_path), **WARM) as second:
        assert warmed(second) == K[:8]
        serve(second, K[8:9])
        assert document.read_bytes() == content
    assert document.read_bytes() != content


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_document_that_was_being_written_when_the_engine_was_killed_is_none(tmp_path: Path, is_whole: bool) -> None:
    with opened(local(tmp_path), **WARM) as first:
        serve(first, K[:8])
    (document,) = (tmp_path / "documents").glob(f"{HOT}*")
    content = document.read_bytes()
    document.with_name(f"{document.name}.new").write_bytes(content if is_whole else content[:100])
    with opened(local(tmp_path), **WARM) as second:
        assert warmed(second) == K[:8]
        assert stat(second, "warm_start_engines") == 1
        (tier,) = second.get_stats()["tiers"].values()
        assert tier["hot_keys_refused"] == 0


def test_without_a_document_a_restart_is_cold_and_the_blocks_are_still_on_the_disk(tmp_path: Path) -> None:
    with opened(local(tmp_path)) as first:
        serve(first, K[:8])
    with opened(local(tmp_path), **WARM) as second:
        assert warmed(second) == []
        ctx = tiering.ReqContext(req_id="first request")
        second.on_new_request(ctx)
        assert tiering.wait_for_prefix(second, K[:8], ctx).hits == 8


def test_an_engine_without_the_word_reads_and_writes_no_document(tmp_path: Path) -> None:
    with opened(local(tmp_path), **WARM) as first:
        serve(first, K[:8])
    (document,) = (tmp_path / "documents").glob(f"{HOT}*")
    content = document.read_bytes()
    with opened(local(tmp_path)) as second:
        serve(second, K[8:12])
        assert stat(second, "warm_start_engines") == 0
    assert document.read_bytes() == content


def test_a_new_engine_is_warm_from_what_two_engines_of_the_bucket_use(
    endpoint: S3Endpoint, bucket: RawBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(2):
        monkeypatch.setattr("socket.gethostname", lambda number=number: f"host-{number}")
        with opened(in_bucket(endpoint, bucket), **WARM) as engine:
            serve(engine, K[8 * number : 8 * number + 8])
    monkeypatch.setattr("socket.gethostname", lambda: "a new host")
    assert len([name for name in bucket.names("kv/documents/") if HOT in name]) == 2
    with opened(in_bucket(endpoint, bucket), **WARM) as new:
        assert warmed(new) == K[:16]
        assert stat(new, "warm_start_engines") == 2


def test_a_bucket_that_only_stale_damaged_and_lying_engines_know_costs_a_bounded_number_of_requests(
    endpoint: S3Endpoint, bucket: RawBucket
) -> None:
    with opened(in_bucket(endpoint, bucket)) as first:
        serve(first, K[:8])
        (tier,) = first.secondary_tiers
        assert isinstance(tier, BlockTier)
        assert tier.namespace is not None
        namespace = tier.namespace
    now = time.time()
    lies = [[key] for key in keys_of(*range(10_000, 20_000))]
    documents = {
        "lie": pack(namespace, now, lies),
        "stale": pack(namespace, now - 3600, [K[:8]]),
        "foreign": pack(namespace.next_epoch(), now, [K[:8]]),
        "damaged": pack(namespace, now, [K[:8]])[:-1] + b"x",
    }
    for name, data in documents.items():
        bucket.write(f"kv/documents/{hot_document(namespace, name)}", data)
    with opened(in_bucket(endpoint, bucket), **WARM) as second:
        assert warmed(second) == []
        stats = second.secondary_tiers[0].get_stats()
        assert (stats.hot_keys_refused, stat(second, "warm_start_engines")) == (3, 1)
        assert stat(second, "warm_start_missing") == 16
        assert stats.requests_get + stats.requests_head < 64
        ctx = tiering.ReqContext(req_id="first request")
        second.on_new_request(ctx)
        assert tiering.wait_for_prefix(second, K[:8], ctx).hits == 8


def test_a_damaged_block_is_a_miss_of_the_warm_start(endpoint: S3Endpoint, bucket: RawBucket) -> None:
    with opened(in_bucket(endpoint, bucket), **WARM) as first:
        serve(first, K[:8])
    name = next(name for name in bucket.names("kv/blocks/") if name.endswith(K[7].hex()))
    data = bucket.read(name)
    assert data is not None
    bucket.write(name, data[:-1] + bytes([data[-1] ^ 1]))
    with opened(in_bucket(endpoint, bucket), **WARM) as second:
        assert warmed(second) == K[:7]
        assert stat(second, "warm_start_missing") == 1


@pytest.mark.parametrize(("words", "each"), [({"bytes": 6 * BLOCK_BYTES}, 6), ({}, len(K))])
def test_eight_engines_that_start_at_once_download_no_more_than_each_ones_bound(
    fake: FakeS3, words: dict[str, Any], each: int
) -> None:
    """The bucket counts; without ``bytes``, each engine downloads all blocks."""
    tier = {"type": "s3", "bucket": fake.bucket, "endpoint_url": fake.endpoint, "prefix": "kv/", **PATIENT}
    with opened(tier, **WARM) as first:
        serve(first, K)
    fake.seen.clear()
    with ExitStack() as undo:
        engines = [opened(tier, warm_start={"seconds": 30, **words}) for _ in range(8)]
        for engine in engines:
            undo.callback(engine.shutdown)
        while not all(tiering.wait_until_idle(engine, 0.0) for engine in engines):
            for engine in engines:
                engine.on_schedule_end()
        assert [len(warmed(engine)) for engine in engines] == [each] * 8
    blocks = [seen.name for seen in fake.asked("GET") if seen.name.startswith("kv/blocks/")]
    assert len(blocks) == 8 * each
    documents = [seen.name for seen in fake.asked("GET") if "/documents/hot-" in seen.name]
    assert len(documents) == 8


def test_a_reset_of_the_weights_leaves_nothing_to_start_from(tmp_path: Path) -> None:
    with opened(local(tmp_path), **WARM) as first:
        serve(first, K[:8])
        first.reset_cache()
    with opened(local(tmp_path), **WARM) as second:
        assert warmed(second) == []


_KILLED = """
import sys
from pathlib import Path
from tests.integration.test_warm_start import local, opened, stat
with opened(local(Path(sys.argv[1])), warm_start={"bandwidth": 1 << 18}) as manager:
    while not stat(manager, "warm_start_blocks"):
        manager.on_schedule_end()
    print(stat(manager, "warm_start_blocks"), flush=True)
    while True:
        manager.on_schedule_end()
"""


def test_after_a_kill_in_the_middle_of_a_warm_start_the_next_one_is_complete(tmp_path: Path) -> None:
    with opened(local(tmp_path), **WARM) as first:
        serve(first, K[:12])
    with subprocess.Popen([sys.executable, "-c", _KILLED, str(tmp_path)], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            assert 0 < int(child.stdout.readline()) < 12
        finally:
            child.kill()
    with opened(local(tmp_path), **WARM) as second:
        assert warmed(second) == K[:12]
