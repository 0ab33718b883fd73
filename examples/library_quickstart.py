"""The library without an engine: store blocks, push them out of CPU memory, and get them back, verified.

    python -m examples.library_quickstart [stack.yaml]

An engine does the same with real KV: it copies GPU blocks to the rows before ``complete_store`` and back after ``prepare_load``.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np

import tiering

BLOCK_BYTES = 64 * 1024
DEFAULT_STACK = Path(__file__).resolve().parent.parent / "configs" / "dev-memory.yaml"
MODEL = tiering.ModelIdentity(name="org/model", weights="0123abc", dtype="bfloat16", layout="quickstart")


def main(stack_file: str | Path = DEFAULT_STACK) -> int:
    """Run it; 0 if every byte came back."""
    keys = [tiering.make_offload_key(hashlib.sha256(b"block %d" % number).digest(), 0) for number in range(32)]
    data = np.random.default_rng(0).integers(0, 256, (len(keys), BLOCK_BYTES), np.uint8)

    with tiering.open_manager(tiering.load_stack(stack_file), BLOCK_BYTES, MODEL) as manager:
        rows = np.asarray(manager.primary_tier.get_kv_memoryview())
        print(f"CPU tier: {rows.shape[0]} rows of {rows.shape[1]} bytes; then: {[tier.name for tier in manager.secondary_tiers]}")

        first = tiering.ReqContext(req_id="first")
        manager.on_new_request(first)
        out = manager.prepare_store(keys, first)
        if out is None:
            print("no room in the CPU tier")
            return 1
        rows[out.store_spec.block_ids, :BLOCK_BYTES] = data
        manager.complete_store(out.keys_to_store, first)
        manager.on_schedule_end()
        manager.on_request_finished(first)
        while manager.has_pending_work():  # the secondary tiers are storing
            manager.on_schedule_end()

        second = tiering.ReqContext(req_id="second")
        manager.on_new_request(second)
        manager.primary_tier.reset_cache()  # as if other blocks had pushed these out of CPU memory
        while (match := manager.match_prefix(keys, second)).pending:  # they are being promoted
            manager.on_schedule_end()
        held = keys[: match.hits]
        spec = manager.prepare_load(held, second)
        intact = np.array_equal(rows[spec.block_ids, :BLOCK_BYTES], data[: match.hits])
        manager.complete_load(held, second)
        manager.on_request_finished(second)

    print(f"{match.hits} of {len(keys)} blocks came back, {'identical' if intact else 'NOT identical'}")
    return 0 if intact and match.hits == len(keys) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
