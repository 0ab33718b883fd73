"""A process that stands for a machine: it opens a stack, stores or loads blocks, and waits.

Run as ``python -m tests.tiers.pool_machine STACK store|load COUNT``. One line goes to standard output when the work is
done: the number of blocks that were stored, or that were loaded and are right. The process ends at the end of its
standard input.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tiering import ModelIdentity, ReqContext, TieringOffloadingManager, load_stack, open_manager
from tiering.testing.frames import random_bytes
from tiering.testing.keys import keys_of

BLOCK_BYTES = 64 << 10
MODEL = ModelIdentity(name="org/model", weights="0" * 40, dtype="bfloat16", layout="pool machine")
PATIENCE_SECONDS = 60.0


def content(number: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return the bytes of block ``number``."""
    return random_bytes(BLOCK_BYTES, number)


def store(manager: TieringOffloadingManager, count: int) -> int:
    """Store ``count`` blocks in all tiers, and return how many the CPU tier took."""
    context = ReqContext("store")
    manager.on_new_request(context)
    keys = keys_of(*range(count))
    rows = np.asarray(manager.primary_tier.get_kv_memoryview())
    out = manager.prepare_store(keys, context)
    if out is None:
        return 0
    for number, row in enumerate(out.store_spec.block_ids.tolist()):
        rows[row, :BLOCK_BYTES] = content(number)
    manager.complete_store(out.keys_to_store, context)
    manager.on_schedule_end()
    _step(manager, manager.has_pending_work)
    manager.on_request_finished(context)
    return len(out.keys_to_store)


def load(manager: TieringOffloadingManager, count: int) -> int:
    """Load the leading blocks of ``count`` that a tier holds, and return how many arrived and are right."""
    context = ReqContext("load")
    manager.on_new_request(context)
    keys = keys_of(*range(count))
    _step(manager, lambda: manager.match_prefix(keys, context).pending)
    held = keys[: manager.match_prefix(keys, context).hits]
    if not held:
        return 0
    rows = np.asarray(manager.primary_tier.get_kv_memoryview())
    spec = manager.prepare_load(held, context)
    right = [
        np.array_equal(rows[row, :BLOCK_BYTES], content(number)) for number, row in enumerate(spec.block_ids.tolist())
    ]
    manager.complete_load(held, context)
    manager.on_request_finished(context)
    return sum(right) if all(right) else -1


def _step(manager: TieringOffloadingManager, busy: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    pause = threading.Event()
    while busy() and time.monotonic() < end:
        manager.on_schedule_end()
        pause.wait(0.002)


def main() -> None:
    path, work, count = sys.argv[1:]
    with open_manager(load_stack(path), BLOCK_BYTES, MODEL) as manager:
        if "coordination" in Path(path).read_text():
            _step(manager, lambda: not any(tier["coordinated"] for tier in manager.get_stats()["tiers"].values()))
        print({"store": store, "load": load}[work](manager, int(count)), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
