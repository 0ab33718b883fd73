"""An engine on a machine of its own, whose blocks tell by their bytes which weights computed them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.engine_side import Bytes, EngineSide
from tests.fake_s3 import FakeS3
from tests.patience import PATIENT
from tiering import ModelIdentity, load_stack, open_manager
from tiering.manager.waiting import wait_for_prefix, wait_until_idle
from tiering.primary.memory.region import PAGE, SharedRegion
from tiering.testing.clock import until
from tiering.testing.frames import random_bytes

BLOCK_BYTES = 8192
MODEL = ModelIdentity(name="org/model", weights="0" * 40, dtype="bfloat16", layout="epochs")

QUICK: Mapping[str, Any] = {
    "breaker": {"failures": 2, "probe_after": "10ms", "probe_max": "50ms"},
    "retries": {"attempts": 1},
    "absent_ttl": "20ms",
    **PATIENT,
}
"""Words of a shared tier that soon notices an outage, its end, and new blocks."""


def disk_tier(path: Path) -> dict[str, Any]:
    """Return a local tier of a stack."""
    return {"type": "local", "path": str(path), "capacity": "4MiB"}


def bucket_tier(bucket: FakeS3, **words: object) -> dict[str, Any]:
    """Return a bucket's tier of a stack."""
    place = {"bucket": bucket.bucket, "endpoint_url": bucket.endpoint, "prefix": "prod"}
    return {"type": "s3", **place, **QUICK, **words}


class Machine(EngineSide):
    """An engine on a machine of its own.

    Args:
        secondary: the secondary tiers of its stack.
        weights: number of the weights that the engine computes with.
        words: further words of the stack.
        clock: function that returns monotonic seconds.
    """

    def __init__(
        self,
        secondary: Sequence[Mapping[str, Any]],
        weights: int = 0,
        words: Mapping[str, object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        stack = load_stack(
            {
                "primary": {"capacity": 16 * BLOCK_BYTES},
                "secondary": [dict(tier) for tier in secondary],
                **(words or {}),
            }
        )
        self.rows = SharedRegion.create(16, max(BLOCK_BYTES, PAGE))
        manager = open_manager(stack, BLOCK_BYTES, MODEL, region=self.rows, clock=clock)
        super().__init__(manager, self.rows.array, lambda key: content(key, self.weights))
        self.weights = weights

    def find(self, keys: Sequence[bytes], weights: int) -> int:
        """Load the leading blocks that are held, which must be those of ``weights``; return their number."""
        found = self.found(keys, [weights])
        assert None not in found, "WRONG KV"
        return len(found)

    def found(self, keys: Sequence[bytes], weights: Sequence[int]) -> list[int | None]:
        """Load the leading blocks that are held, and return which of ``weights`` computed each.

        None stands for a block that none of them computed.
        """
        ctx = self.request()
        hits = wait_for_prefix(self.manager, keys, ctx).hits
        rows = np.asarray(self.manager.prepare_load(keys[:hits], ctx).block_ids).tolist()
        found = [
            next((number for number in weights if np.array_equal(loaded, content(key, number))), None)
            for key, loaded in zip(keys, self.rows.array[rows, :BLOCK_BYTES], strict=False)
        ]
        self.manager.complete_load(keys[:hits], ctx)
        self.manager.on_request_finished(ctx)
        assert wait_until_idle(self.manager)
        return found

    def await_disk(self) -> None:
        """Step until the disk is in service and its blocks are known, whatever the bucket does."""

        def serves() -> bool:
            self.manager.on_schedule_end()
            return self._serves("local")

        assert until(serves)

    def await_bucket(self) -> None:
        """Step until the bucket is in service, and so is the disk, which may have begun an epoch for it."""

        def serves() -> bool:
            self.manager.on_schedule_end()
            self.manager.has_pending_work()
            return all(self._serves(tier.name) for tier in self.manager.secondary_tiers)

        assert until(serves)

    @property
    def epoch(self) -> bytes:
        """The epoch of the slowest tier."""
        namespace = self.manager.secondary_tiers[-1].namespace  # type: ignore[attr-defined]
        return bytes(namespace.epoch)

    def _serves(self, tier: str) -> bool:
        stats = self.manager.get_stats()["tiers"][tier]
        return bool(stats["available"]) and not stats["recovering"]

    def available(self, tier: str) -> int:
        return int(self.manager.get_stats()["tiers"][tier]["available"])

    @property
    def disk_blocks(self) -> int:
        return int(self.manager.get_stats()["tiers"]["local"]["blocks"])


def content(key: bytes, weights: int) -> Bytes:
    return random_bytes(BLOCK_BYTES, 1000 * weights + int.from_bytes(key[:7], "big"))
