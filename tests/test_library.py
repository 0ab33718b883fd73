"""The library example of the specification, unchanged: its names are public, and it runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tiering

EXAMPLE = """
import numpy as np
import tiering

stack = tiering.load_stack("stack.yaml")                     # a StackConfig, or tiering.ConfigError
model = tiering.ModelIdentity(name="org/model", weights="<commit or digest>", dtype="bfloat16", layout="demo")   # and what else the namespace covers
with tiering.open_manager(stack, block_bytes=2 * 1024**2, model=model) as manager:
    rows = np.asarray(manager.primary_tier.get_kv_memoryview())      # uint8, (num_blocks, row_stride_bytes)
    ctx = tiering.ReqContext(req_id="r1")
    manager.on_new_request(ctx)
    out = manager.prepare_store(keys, ctx)                    # .keys_to_store, .store_spec.block_ids, .evicted_keys; or None
    rows[out.store_spec.block_ids, : 2 * 1024**2] = data
    manager.complete_store(out.keys_to_store, ctx)
    manager.on_schedule_end()                                 # end of a step
    while (hit := manager.lookup(key, ctx)) is None:          # being promoted
        manager.on_schedule_end()
    spec = manager.prepare_load([key], ctx); check(rows[spec.block_ids]); manager.complete_load([key], ctx)
    manager.on_request_finished(ctx)
"""

BLOCK = 2 * 1024**2
DATA = np.random.default_rng(0).integers(0, 256, (3, BLOCK), np.uint8)


def run(first: int, wanted: int) -> None:
    """Store blocks from ``first`` on and read block ``wanted``."""
    keys = [tiering.make_offload_key(number.to_bytes(32, "big"), 0) for number in range(first, first + 3)]
    key = tiering.make_offload_key(wanted.to_bytes(32, "big"), 0)
    loaded: list[np.ndarray[tuple[int, int], np.dtype[np.uint8]]] = []
    exec(EXAMPLE, {"keys": keys, "data": DATA, "key": key, "check": lambda rows: loaded.append(rows.copy())})
    assert np.array_equal(loaded[0][0, :BLOCK], DATA[wanted % 3])


@pytest.fixture(autouse=True)
def stack_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stack.yaml").write_text(
        "primary: {capacity: 32MiB}\nsecondary:\n  - {type: local, path: kv, capacity: 64MiB, segment_size: 16MiB}\n"
    )


def test_a_block_that_was_just_stored_is_there() -> None:
    run(first=0, wanted=1)


def test_a_block_of_an_earlier_life_is_promoted() -> None:
    run(first=0, wanted=1)
    run(first=3, wanted=2)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "StackConfig",
            "ReqContext",
            "OffloadKey",
            "make_offload_key",
            "get_offload_block_hash",
            "get_offload_group_idx",
        ),
        *("OffloadingManager", "OffloadingSpec", "SecondaryTierManager", "BlockStore", "TransferJob", "JobResult"),
        # What an OffloadingSpec of one's own is made from, and returns.
        *("EngineConfig", "KVCacheGroup", "CanonicalKVCaches", "OffloadingHandler", "TransferResult"),
        *(
            "TieringOffloadingManager",
            "ConfigError",
            "TieringError",
            "NotReadableError",
            "RegionError",
            "CorruptBlockError",
        ),
    ],
)
def test_what_the_specification_exports_is_exported(name: str) -> None:
    assert name in vars(tiering)["__all__"]
    assert hasattr(tiering, name)


def test_jobs_and_results_are_made_as_written() -> None:
    ctx = tiering.ReqContext("r1")
    job = tiering.TransferJob(job_id=1, keys=[], block_ids=np.arange(0), is_promotion=False, req_context=ctx)
    result = tiering.JobResult(job_id=1, success=True)
    assert (job.is_promotion, result.successful_keys, result.transfer_bytes, result.transfer_time) == (
        False,
        None,
        None,
        None,
    )
