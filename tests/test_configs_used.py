"""The example stacks are loaded unchanged and used; their variables set sizes and places."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from examples import s3_server, valkey_server
from examples.mini_engine.simple import SimpleEngine
from tests.fake_gcs import fake_gcs
from tests.mini_engine.helpers import ask_all, options, prompt, wrong_answers
from tests.servers import Endpoint, azurite, moto_server
from tiering import (
    ModelIdentity,
    ReqContext,
    TieringOffloadingManager,
    load_prefix,
    load_stack,
    open_manager,
    store_prefix,
    wait_until_idle,
)
from tiering.testing.clock import until
from tiering.testing.keys import keys_of

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
BUCKET = "kv-blocks"
MODEL = ModelIdentity(name="org/model", weights="0" * 40, dtype="bfloat16", layout="example stacks")
BLOCK_BYTES = 32 << 10
PROMPT = 24
"""Number of blocks of one prompt, more than any example's min_prefix_blocks."""
ROWS, TRIES = 64, 5
KEYS = keys_of(*range(PROMPT))

Blocks = NDArray[np.uint8]


@pytest.fixture
def blocks() -> Blocks:
    return np.random.default_rng(7).integers(0, 256, (PROMPT, BLOCK_BYTES), np.uint8)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set the sizes and places of a test through the variables that a deployment sets."""
    monkeypatch.setenv("KV_CPU_CAPACITY", str(ROWS * BLOCK_BYTES))
    monkeypatch.setenv("KV_DISK_CAPACITY", "64MiB")
    monkeypatch.setenv("KV_DISK_PATH", str(tmp_path / "machine-1"))
    monkeypatch.setenv("KV_BUCKET", BUCKET)


@pytest.fixture
def object_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    with s3_server.serving(tmp_path / "objects", BUCKET) as server:
        for name, value in (server.environment() | {"AWS_ENDPOINT_URL_S3": server.endpoint}).items():
            monkeypatch.setenv(name, value)
        yield


@pytest.fixture
def memory_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with valkey_server.serving() as server:
        monkeypatch.setenv("KV_POOL", server.url)
        yield


def step_until(manager: TieringOffloadingManager, done: Callable[[], bool]) -> None:
    def stepped() -> bool:
        manager.on_schedule_end()
        return done()

    assert until(stepped), "the tiers did not get there in time"


def store(manager: TieringOffloadingManager, keys: list[bytes], data: Blocks) -> None:
    def write(position: int, row: NDArray[np.uint8]) -> None:
        row[:BLOCK_BYTES] = data[position]

    assert store_prefix(manager, keys, ReqContext("first use"), write) == len(keys)
    again = ReqContext("second use")  # for which admission may wait
    manager.on_new_request(again)
    manager.touch(keys, again)
    manager.on_schedule_end()
    manager.on_request_finished(again)
    assert wait_until_idle(manager)


def load(manager: TieringOffloadingManager, keys: list[bytes]) -> Blocks:
    """Return the leading blocks of ``keys`` that are held."""
    found = np.zeros((len(keys), BLOCK_BYTES), np.uint8)

    def read(position: int, row: NDArray[np.uint8]) -> None:
        found[position] = row[:BLOCK_BYTES]

    return found[: load_prefix(manager, keys, ReqContext("load"), read)]


def fill_with_others(manager: TieringOffloadingManager) -> None:
    """Evict all other blocks from the primary tier."""
    rows = manager.primary_tier.num_rows
    for start in range(0, rows, ROWS):
        keys = keys_of(*range(1000 + start, 1000 + min(start + ROWS, rows)))
        store(manager, keys, np.zeros((len(keys), BLOCK_BYTES), np.uint8))


def test_every_example_is_used_here() -> None:
    used = {"cpu", "cpu-nvme", "cpu-nvme-object", "cpu-nvme-pool", "cpu-nvme-s3", "dev-memory", "fleet", "simple"}
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == used


@pytest.mark.usefixtures("object_store", "memory_pool")
@pytest.mark.parametrize("name", ["cpu", "cpu-nvme", "cpu-nvme-pool", "cpu-nvme-s3", "dev-memory"])
def test_a_block_stored_in_the_cpu_tier_is_loaded_again(name: str, blocks: Blocks) -> None:
    with open_manager(load_stack(CONFIGS / f"{name}.yaml"), BLOCK_BYTES, MODEL) as manager:
        store(manager, KEYS, blocks)
        assert np.array_equal(load(manager, KEYS), blocks)


@pytest.mark.parametrize("name", ["cpu-nvme", "dev-memory"])
def test_a_block_that_left_the_cpu_tier_is_promoted_again(name: str, blocks: Blocks) -> None:
    with open_manager(load_stack(CONFIGS / f"{name}.yaml"), BLOCK_BYTES, MODEL) as manager:
        store(manager, KEYS, blocks)
        fill_with_others(manager)
        assert manager.primary_tier.match_prefix(KEYS, ReqContext("a")).hits == 0
        assert np.array_equal(load(manager, KEYS), blocks)


def run_once(name: str, blocks: Blocks | None) -> Blocks:
    """Return the blocks that the stack holds, after ``blocks`` were stored.

    A lookup that takes a bucket longer than its deadline is a miss, as the first ones on a busy machine; the request is
    made again then.
    """
    with open_manager(load_stack(CONFIGS / f"{name}.yaml"), BLOCK_BYTES, MODEL) as manager:
        if blocks is not None:
            store(manager, KEYS, blocks)
        for _ in range(TRIES):
            if len(found := load(manager, KEYS)) == len(KEYS):
                break
        return found


def test_a_restart_finds_the_blocks_on_its_disk(blocks: Blocks) -> None:
    run_once("cpu-nvme", blocks)
    assert np.array_equal(run_once("cpu-nvme", None), blocks)


@pytest.mark.usefixtures("object_store")
def test_a_new_machine_finds_the_blocks_in_the_bucket(
    blocks: Blocks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_once("cpu-nvme-s3", blocks)
    monkeypatch.setenv("KV_DISK_PATH", str(tmp_path / "machine-2"))
    assert np.array_equal(run_once("cpu-nvme-s3", None), blocks)


@pytest.mark.parametrize(
    ("serve", "scheme", "variable"),
    [
        pytest.param(moto_server, "s3", "AWS_ENDPOINT_URL_S3", id="s3"),
        pytest.param(fake_gcs, "gs", "GOOGLE_BASE_URL", id="gs"),
        pytest.param(azurite, "az", "AZURE_STORAGE_ENDPOINT", id="az", marks=pytest.mark.azurite),
    ],
)
def test_one_stack_serves_every_cloud(
    serve: Callable[[], AbstractContextManager[Endpoint]],
    scheme: str,
    variable: str,
    blocks: Blocks,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    with serve() as server:
        for name, value in (server.environment() | {variable: server.words(BUCKET)["endpoint_url"]}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("KV_BUCKET_URL", f"{scheme}://{BUCKET}/kv")
        bucket = server.make_bucket(BUCKET)
        run_once("cpu-nvme-object", blocks)
        assert bucket.names("kv/blocks/")
        bucket.close()
        monkeypatch.setenv("KV_DISK_PATH", str(tmp_path / "machine-2"))
        assert np.array_equal(run_once("cpu-nvme-object", None), blocks)


@pytest.mark.usefixtures("memory_pool")
def test_another_machine_finds_the_blocks_in_the_pool(
    blocks: Blocks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_once("cpu-nvme-pool", blocks)
    monkeypatch.setenv("KV_DISK_PATH", str(tmp_path / "machine-2"))
    assert np.array_equal(run_once("cpu-nvme-pool", None), blocks)


def compute_in_a_fleet(blocks: Blocks, uploads: int) -> None:
    """Compute and store the prompt on a machine of a fleet, and wait for this number of uploads."""
    ctx = ReqContext("a")
    with open_manager(load_stack(CONFIGS / "fleet.yaml"), BLOCK_BYTES, MODEL) as manager:

        def bucket(name: str) -> int:
            return int(manager.get_stats()["tiers"]["s3"][name])

        step_until(manager, lambda: bucket("coordinated") == 1)
        manager.on_new_request(ctx)
        out = manager.prepare_store(KEYS, ctx)
        assert out is not None
        np.asarray(manager.primary_tier.get_kv_memoryview())[out.store_spec.block_ids, :BLOCK_BYTES] = blocks
        manager.complete_store(KEYS, ctx)
        step_until(manager, lambda: bucket("stores_declined") == PROMPT and bucket("cascades") == uploads)
        manager.on_request_finished(ctx)


@pytest.mark.usefixtures("object_store")
def test_a_fleet_uploads_a_prompt_at_its_second_use_on_any_machine(
    blocks: Blocks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each machine computes the prompt once; no machine alone would have uploaded it."""
    monkeypatch.setenv("KV_BUCKET_URL", f"s3://{BUCKET}/kv")
    with valkey_server.serving() as coordinator:
        monkeypatch.setenv("KV_COORDINATION", coordinator.url)
        for machine, uploads in (("one", 0), ("two", PROMPT)):
            monkeypatch.setenv("KV_DISK_PATH", str(tmp_path / machine))
            compute_in_a_fleet(blocks, uploads)
        monkeypatch.setenv("KV_DISK_PATH", str(tmp_path / "three"))
        assert np.array_equal(run_once("fleet", None), blocks)


@pytest.mark.usefixtures("object_store")
def test_a_tenant_with_another_salt_finds_nothing(
    blocks: Blocks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_once("cpu-nvme-s3", blocks)
    monkeypatch.setenv("KV_SALT", "another tenant")
    assert len(run_once("cpu-nvme-s3", None)) == 0


def test_the_simple_scheduler_loads_what_has_left_the_gpu() -> None:
    prompts = [prompt(seed, 70) for seed in range(8)]
    with SimpleEngine(options(num_blocks=44, stack=str(CONFIGS / "simple.yaml"))) as engine:
        pool = engine.tiers.scheduler_half.cpu_config  # type: ignore[union-attr]
        assert 0 <= ROWS * BLOCK_BYTES - pool.total_bytes < pool.block_bytes
        ask_all(engine, prompts, "first")
        before = engine.loaded_bytes
        assert wrong_answers(ask_all(engine, prompts, "again"), prompts) == []
        assert engine.loaded_bytes > before
