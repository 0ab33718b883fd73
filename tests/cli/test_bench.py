"""``bench`` measures every tier through its layers at a scratch place, and computes the break-even."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import WriteStack
from tests.cli.runner import kv_tiering, process
from tests.servers import RawBucket, S3Endpoint
from tests.tiers.local.rig import LocalRig
from tiering.cli import bench, driver, measure
from tiering.cli.bench import break_evens
from tiering.cli.measure import Measured, Plan, measure_tier
from tiers.local.admin import LocalAdmin
from tiers.local.device import device_speed
from tiers.local.local_options import LocalOptions

SHORT = ("--block-bytes", "64KiB", "--depth", "1", "--depth", "4", "--bytes", "2MiB", "--seconds", "500ms")


def measured(
    direction: str = "load", *, tier: str = "local", depth: int = 1, speed: float = 1e9, p50: float = 0.002
) -> Measured:
    return Measured(tier, direction, 2_000_000, depth, 10, 0, speed, p50, p50, p50, 0.5)


def local(path: Path) -> dict[str, object]:
    return {
        "type": "local",
        "path": str(path),
        "capacity": "64MiB",
        "min_prefix_blocks": 8,
        "admission": "second_touch",
    }


def test_all_tiers_are_measured_both_ways_and_nothing_is_left(
    write_stack: WriteStack, tmp_path: Path, bucket: RawBucket, moto: S3Endpoint
) -> None:
    stack = write_stack(
        {"type": "memory"},
        local(tmp_path / "kv"),
        {"type": "s3", "bucket": bucket.name, "endpoint_url": moto.endpoint, "compression": "zstd"},
    )
    done = kv_tiering("bench", stack, *SHORT, "--json")
    assert (done.code, done.err) == (0, "")
    found: list[dict[str, Any]] = json.loads(done.out)["measured"]
    assert {(one["tier"], one["direction"], one["depth"]) for one in found} == {
        (tier, direction, depth)
        for tier in ("memory", "local", "s3")
        for direction in ("store", "load")
        for depth in (1, 4)
    }
    for one in found:
        assert (one["failed"], one["blocks"] > 0, one["bytes_per_second"] > 0) == (0, True, True), one
        assert 0 < one["p50"] <= one["p90"] <= one["p99"]
        assert one["cpu_seconds_per_gb"] > 0
        assert (one["limit"] is not None) == (one["tier"] == "local")
    assert [path.name for path in tmp_path.iterdir()] == ["stack.yaml"]
    assert bucket.names() == []


def test_a_process_of_its_own_prints_a_table_of_words_between_tabs(write_stack: WriteStack) -> None:
    done = process("bench", write_stack({"type": "memory"}), *SHORT)
    assert (done.code, done.err) == (0, "")
    head, *rows = [line.split("\t") for line in done.out.splitlines()]
    assert head[:5] == ["tier", "direction", "block", "depth", "GB/s"]
    assert [row[:4] for row in rows] == [
        ["memory", direction, "64 KiB", depth] for direction in ("store", "load") for depth in ("1", "4")
    ]


def test_a_directory_in_use_is_not_measured(write_stack: WriteStack, tmp_path: Path) -> None:
    rig = LocalRig(tmp_path / "kv").open()
    try:
        done = kv_tiering("bench", write_stack(local(tmp_path / "kv")), *SHORT)
    finally:
        rig.close()
    assert done.code == 1
    assert f"in use by process {os.getpid()}" in done.err


def test_a_tier_that_cannot_be_used_is_one_line(write_stack: WriteStack, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = kv_tiering("bench", write_stack(local(tmp_path / "file" / "kv")), *SHORT)
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1)


@pytest.mark.parametrize(("tier", "size"), [("memory", "1TiB"), ("local", "1TiB"), ("memory", "1GiB")])
def test_blocks_that_memory_has_no_room_for_are_one_line_with_the_words_to_change(
    tier: str, size: str, write_stack: WriteStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "available_bytes", lambda: 20 << 30)
    monkeypatch.setattr(LocalAdmin, "_check_space", lambda *_: None)
    stack = write_stack({"type": "memory"} if tier == "memory" else local(tmp_path / "kv"))
    done = kv_tiering("bench", stack, "--block-bytes", size)
    assert (done.code, done.err.count("\n")) == (1, 1)
    shown = size.replace("iB", "").replace("1", "1 ") + "iB"
    assert done.err.startswith(f"kv-tiering: {tier}: 32 rows for blocks of {shown} need ")
    assert done.err.endswith(" of memory, and 20 GiB are available; give a smaller --block-bytes or --depth\n")


def test_the_memory_limit_of_a_container_counts(monkeypatch: pytest.MonkeyPatch, write_stack: WriteStack) -> None:
    monkeypatch.setattr(driver, "cgroup_free_bytes", lambda: 1 << 20)
    done = kv_tiering("bench", write_stack({"type": "memory"}), *SHORT)
    assert (done.code, "and 1 MiB are available" in done.err) == (1, True)


def test_a_disk_without_room_for_the_measurement_is_one_line(write_stack: WriteStack, tmp_path: Path) -> None:
    done = kv_tiering("bench", write_stack(local(tmp_path / "kv")), "--block-bytes", "1MiB", "--bytes", "1PiB")
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert f"of disk, and {tmp_path} has " in done.err
    assert done.err.endswith("free some space, or give a smaller --block-bytes, --depth or --bytes\n")
    assert [path.name for path in tmp_path.iterdir()] == ["stack.yaml"]


def test_words_about_tokens_need_each_other(write_stack: WriteStack) -> None:
    done = kv_tiering("bench", write_stack({"type": "memory"}), *SHORT, "--bytes-per-token", "128KiB")
    assert (done.code, "give both or neither" in done.err) == (2, True)


def test_the_break_even_is_told_with_the_word_of_the_stack(write_stack: WriteStack) -> None:
    tokens = ("--bytes-per-token", "4KiB", "--prefill-tokens-per-second")
    stack = write_stack({"type": "memory"})
    assert "set min_prefix_blocks: 1" in kv_tiering("bench", stack, *SHORT, *tokens, "10").out
    assert "no load beat the prefill in 1 run (" in kv_tiering("bench", stack, *SHORT, *tokens, "1e12").out


def test_a_measurement_far_below_the_device_is_repeated(
    write_stack: WriteStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = iter([0.029e9, 0.9e9, 0.03e9, 0.028e9, 0.027e9])

    def move(_: object, keys: Iterator[bytes], depth: int, *, load: bool) -> Measured:
        return measured("load" if load else "store", depth=depth, speed=next(moved))

    monkeypatch.setattr(measure._Bench, "_move", move)
    monkeypatch.setattr(measure._Bench, "_fill", lambda _: None)
    admin = LocalAdmin(LocalOptions(type="local", path=str(tmp_path / "kv"), capacity=64 << 20), None)
    store, load = measure_tier(admin, Plan([65536], [1], 1 << 20, 0.1), lambda *_: 0.92e9)
    assert (store.runs, store.bytes_per_second, load.runs, load.bytes_per_second) == (2, 0.9e9, 3, 0.03e9)
    assert load.limit == 0.92e9
    (pay,) = break_evens([load], tokens_per_second=1e6, bytes_per_token=100_000)
    told = bench._sentence(pay)
    assert "no load beat the prefill in the best of 3 runs" in told
    assert "the bare device does 0.92 GB/s" in told
    assert told.endswith("measure again before you leave the tier out")


def test_the_break_even_is_the_first_prefix_whose_load_is_faster() -> None:
    # A block is 20 tokens, computed in 4 ms. One load takes 30 ms alone, and 2 ms more per block at the best bandwidth.
    found = [measured(p50=0.030, speed=0.1e9), measured(depth=16, speed=1e9), measured("store", speed=9e9)]
    (pay,) = break_evens(found, tokens_per_second=5000, bytes_per_token=100_000)
    assert (pay.blocks, pay.tokens) == (14, 280)
    load = [pay.first_block + (blocks - 1) * pay.block_bytes / pay.bytes_per_second for blocks in (13, 14)]
    assert load[0] > 13 * 0.004
    assert load[1] <= 14 * 0.004


def test_a_load_that_is_slower_by_the_byte_never_pays() -> None:
    (pay,) = break_evens([measured(speed=0.1e9)], tokens_per_second=5000, bytes_per_token=100_000)
    assert (pay.blocks, pay.tokens) == (None, None)


def test_the_bare_device_is_measured_and_its_file_removed(tmp_path: Path) -> None:
    for load in (True, False):
        speed = device_speed(tmp_path, 65536, 4, load=load, nbytes=1 << 20, seconds=0.05, direct=False)
        assert speed is not None
        assert speed > 0
    assert [*tmp_path.iterdir()] == []


def test_measurements_without_a_block_have_no_latency() -> None:
    nothing = Measured("local", "load", 1, 1, 0, 3, 0.0, math.nan, math.nan, math.nan, math.nan)
    assert break_evens([nothing], 1, 1) == []
    assert "NaN" not in json.dumps(nothing.to_json())
