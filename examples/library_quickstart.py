"""The library without an engine: store blocks, evict them from CPU memory, load them back, verified.

    python -m examples.library_quickstart [stack.yaml] [number of blocks]

An engine does the same with real KV: it copies GPU blocks to the rows before ``complete_store`` and back after
``prepare_load``.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import tiering

BLOCK_BYTES = 64 * 1024
DEFAULT_STACK = Path(__file__).resolve().parent.parent / "configs" / "dev-memory.yaml"
MODEL = tiering.ModelIdentity(name="org/model", weights="0123abc", dtype="bfloat16", layout="quickstart")

Block = NDArray[np.uint8]
Rows = NDArray[np.uint8]


def store_prefix(
    manager: tiering.TieringOffloadingManager, keys: list[bytes], kv: dict[bytes, Block], rows: Rows
) -> int:
    """Store as many leading blocks as there is room for, and return how many of ``keys`` are held then."""
    ctx = tiering.ReqContext(req_id="first")
    manager.on_new_request(ctx)
    count = len(keys)
    # None means that there is no room for all blocks; a shorter prefix is useful, too.
    while (out := manager.prepare_store(keys[:count], ctx, is_last=True)) is None:
        count //= 2
    for row, key in zip(out.store_spec.block_ids, out.keys_to_store, strict=True):  # Blocks that are not held yet.
        rows[row, :BLOCK_BYTES] = kv[key]
    manager.complete_store(out.keys_to_store, ctx)
    manager.on_schedule_end()
    manager.on_request_finished(ctx)
    return count


def load_prefix(
    manager: tiering.TieringOffloadingManager, keys: list[bytes], kv: dict[bytes, Block], rows: Rows
) -> tuple[int, bool]:
    """Load the leading blocks of ``keys`` that are held, and compare them.

    Returns:
        The number of blocks that came back, and True if all of them are intact.
    """
    ctx = tiering.ReqContext(req_id="second")
    manager.on_new_request(ctx)
    match = tiering.wait_for_prefix(manager, keys, ctx)
    # A match is pending if the timeout passed first; blocks that are still under way are no hit.
    held = keys[: match.hits] if not match.pending else []
    spec = manager.prepare_load(held, ctx)
    intact = all(
        np.array_equal(rows[row, :BLOCK_BYTES], kv[key]) for row, key in zip(spec.block_ids, held, strict=True)
    )
    manager.complete_load(held, ctx)
    manager.on_request_finished(ctx)
    return len(held), intact


def main(stack_file: str | Path = DEFAULT_STACK, number_of_blocks: str = "32") -> int:
    """Run the example, and return 0 if every stored byte came back."""
    keys = [
        tiering.make_offload_key(hashlib.sha256(b"block %d" % number).digest(), 0)
        for number in range(int(number_of_blocks))
    ]
    random = np.random.default_rng(0)
    kv = {key: random.integers(0, 256, BLOCK_BYTES, np.uint8) for key in keys}

    with tiering.open_manager(tiering.load_stack(stack_file), BLOCK_BYTES, MODEL) as manager:
        rows = np.asarray(manager.primary_tier.get_kv_memoryview())
        print(
            f"CPU tier: {rows.shape[0]} rows of {rows.shape[1]} bytes; "
            f"then: {[tier.name for tier in manager.secondary_tiers]}"
        )
        stored = store_prefix(manager, keys, kv, rows)
        print(f"{stored} of {len(keys)} blocks are stored")
        tiering.wait_until_idle(manager)  # Afterwards the secondary tiers have stored the blocks too.
        manager.primary_tier.reset_cache()  # This has the effect of other blocks evicting these from CPU memory.
        found, intact = load_prefix(manager, keys, kv, rows)

    print(f"{found} of {len(keys)} blocks came back, {'identical' if intact else 'NOT identical'}")
    return 0 if intact and found == stored else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
