"""A process that stands for a machine: it opens a stack, stores or loads blocks, and waits.

Run as ``python -m tests.tiers.pool_machine STACK store|load COUNT``. One line goes to standard output when the work is
done: the number of blocks that were stored, or that were loaded and are right. The process ends at the end of its
standard input.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

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
from tiering.manager.prompts import Row
from tiering.testing.clock import until
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

    def write(position: int, row: Row) -> None:
        row[:BLOCK_BYTES] = content(position)

    stored = store_prefix(manager, keys_of(*range(count)), ReqContext("store"), write)
    wait_until_idle(manager, PATIENCE_SECONDS)
    return stored


def load(manager: TieringOffloadingManager, count: int) -> int:
    """Load the leading blocks of ``count`` that a tier holds, and count them; -1 if one is wrong."""
    right: list[bool] = []

    def read(position: int, row: Row) -> None:
        right.append(np.array_equal(row[:BLOCK_BYTES], content(position)))

    held = load_prefix(manager, keys_of(*range(count)), ReqContext("load"), read, PATIENCE_SECONDS)
    return held if all(right) else -1


def _stepped(manager: TieringOffloadingManager) -> Iterable[dict[str, int]]:
    """End a step, and return the statistics of the tiers."""
    manager.on_schedule_end()
    stats: dict[str, dict[str, int]] = manager.get_stats()["tiers"]
    return stats.values()


def main() -> None:
    path, work, count = sys.argv[1:]
    with open_manager(load_stack(path), BLOCK_BYTES, MODEL) as manager:
        if "coordination" in Path(path).read_text():
            until(lambda: any(tier["coordinated"] for tier in _stepped(manager)), PATIENCE_SECONDS)
        print({"store": store, "load": load}[work](manager, int(count)), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
