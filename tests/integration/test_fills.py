"""A disk before a slower tier stores what comes from there when it is used again, not before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tiering
from tiering.testing.keys import keys_of

BLOCK_BYTES = 64 << 10
K = keys_of(*range(8))
MODEL = tiering.ModelIdentity(name="demo", weights="w1", dtype="bfloat16", layout="test")


def stack_of(tmp_path: Path, fill: str, admission: str = "all") -> tiering.StackConfig:
    fast = {"type": "local", "name": "fast", "path": str(tmp_path / "fast"), "capacity": "8MiB"}
    disks = [
        {**fast, "fill": fill, "admission": admission},
        {"type": "local", "name": "slow", "path": str(tmp_path / "slow"), "capacity": "8MiB"},
    ]
    return tiering.load_stack({"primary": {"capacity": "4MiB"}, "secondary": disks})


def use(manager: tiering.TieringOffloadingManager, name: str) -> None:
    """Load all blocks for a request, which uses them."""
    ctx = tiering.ReqContext(req_id=name)
    manager.on_new_request(ctx)
    assert tiering.wait_for_prefix(manager, K, ctx).hits == len(K)
    manager.touch(K, ctx)
    manager.prepare_load(K, ctx)
    manager.complete_load(K, ctx)
    manager.on_schedule_end()
    manager.on_request_finished(ctx)
    tiering.wait_until_idle(manager)


def written(manager: tiering.TieringOffloadingManager) -> int:
    return manager.secondary_tiers[0].get_stats().cascades


@pytest.mark.parametrize(("fill", "counts"), [("second_touch", [0, 8, 8]), ("all", [8, 8, 8]), ("none", [0, 0, 0])])
@pytest.mark.parametrize("evicted_between", [False, True])
def test_blocks_from_a_slower_tier(tmp_path: Path, fill: str, counts: list[int], evicted_between: bool) -> None:
    with tiering.open_manager(stack_of(tmp_path, fill), BLOCK_BYTES, MODEL) as manager:
        rows = np.asarray(manager.primary_tier.get_kv_memoryview())
        ctx = tiering.ReqContext(req_id="writer", kv_transfer_params={"kv_tiering": {"tiers": ["slow"]}})
        manager.on_new_request(ctx)
        out = manager.prepare_store(K, ctx)
        assert out is not None
        rows[out.store_spec.block_ids] = 7
        manager.complete_store(out.keys_to_store, ctx)
        manager.on_request_finished(ctx)
        tiering.wait_until_idle(manager)
        assert [tier.get_stats().cascades for tier in manager.secondary_tiers] == [0, len(K)]
        manager.primary_tier.reset_cache()
        found: list[int] = []
        for name in ("first", "second", "third"):
            use(manager, name)
            found.append(written(manager))
            if evicted_between:
                manager.primary_tier.reset_cache()
        assert found == counts


def test_no_block_from_a_slower_tier_although_its_own_store_was_declined(tmp_path: Path) -> None:
    with tiering.open_manager(stack_of(tmp_path, "none", "second_touch"), BLOCK_BYTES, MODEL) as manager:
        ctx = tiering.ReqContext(req_id="writer")
        manager.on_new_request(ctx)
        out = manager.prepare_store(K, ctx)
        assert out is not None
        manager.complete_store(out.keys_to_store, ctx)
        manager.on_request_finished(ctx)
        tiering.wait_until_idle(manager)
        assert [tier.get_stats().cascades for tier in manager.secondary_tiers] == [0, len(K)]
        manager.primary_tier.reset_cache()
        for name in ("first", "second", "third"):
            use(manager, name)
        assert written(manager) == 0
