"""The library without an engine: store blocks, evict them from CPU memory, load them back, verified.

    python -m examples.library_quickstart [stack.yaml] [number of blocks]

An engine does the same with real KV, from and to the tensors of its cache: see ``examples/transformers_engine.py``.
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


def main(stack_file: str | Path = DEFAULT_STACK, number_of_blocks: str = "32") -> int:
    """Run the example, and return 0 if every stored byte came back."""
    keys = [
        tiering.make_offload_key(hashlib.sha256(b"block %d" % number).digest(), 0)
        for number in range(int(number_of_blocks))
    ]
    random = np.random.default_rng(0)
    kv = [random.integers(0, 256, BLOCK_BYTES, np.uint8) for _ in keys]

    with tiering.open_manager(tiering.load_stack(stack_file), BLOCK_BYTES, MODEL) as manager:
        rows, row_bytes = np.asarray(manager.primary_tier.get_kv_memoryview()).shape
        print(f"CPU tier: {rows} rows of {row_bytes} bytes; then: {[tier.name for tier in manager.secondary_tiers]}")

        def write(position: int, row: Block) -> None:
            row[:BLOCK_BYTES] = kv[position]

        # As many leading blocks as there is room for.
        stored = tiering.store_prefix(manager, keys, tiering.ReqContext("first"), write)
        print(f"{stored} of {len(keys)} blocks are stored")
        tiering.wait_until_idle(manager)  # Afterwards the secondary tiers have stored the blocks too.
        manager.primary_tier.reset_cache()  # This has the effect of other blocks evicting these from CPU memory.
        intact = []

        def read(position: int, row: Block) -> None:
            intact.append(np.array_equal(row[:BLOCK_BYTES], kv[position]))

        found = tiering.load_prefix(manager, keys, tiering.ReqContext("second"), read)

    print(f"{found} of {len(keys)} blocks came back, {'identical' if all(intact) else 'NOT identical'}")
    return 0 if all(intact) and found == stored else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
