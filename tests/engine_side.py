"""The engine's side of a manager in tests: requests, and blocks in the rows of the primary tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiering.api.keys import OffloadKey
from tiering.api.request import ReqContext
from tiering.manager.manager import TieringOffloadingManager
from tiering.manager.waiting import wait_until_idle

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class EngineSide:
    """An engine that drives a manager.

    Args:
        manager: the manager.
        rows: rows of the primary tier.
        compute: function that returns the content of a block.
    """

    def __init__(
        self, manager: TieringOffloadingManager, rows: NDArray[np.uint8], compute: Callable[[OffloadKey], Bytes]
    ) -> None:
        self.manager = manager
        self._rows = rows
        self._compute = compute
        self._requests = 0

    def request(self) -> ReqContext:
        self._requests += 1
        ctx = ReqContext(f"r{self._requests}")
        self.manager.on_new_request(ctx)
        return ctx

    def store(self, keys: Sequence[OffloadKey]) -> None:
        """Compute and store blocks, and wait until the tiers have them or have dropped them."""
        ctx = self.request()
        output = self.manager.prepare_store(keys, ctx)
        assert output is not None
        for key, row in zip(output.keys_to_store, np.asarray(output.store_spec.block_ids).tolist(), strict=True):
            content = self._compute(key)
            self._rows[row, : len(content)] = content
        self.manager.complete_store(output.keys_to_store, ctx)
        self.manager.on_request_finished(ctx)
        assert wait_until_idle(self.manager)
