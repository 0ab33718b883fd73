"""A place for the first pipeline stage's result, which vLLM's CPU build lacks.

vLLM's runner for GPUs makes this place in a run with dummy tokens, which the CPU build leaves out: without it, the
second stage ends in an assertion at the first request, with or without a connector. Each worker imports this module.

While the file that ``KV_TEST_SWAPPED_STAGES`` names exists, loads take the pages of the other of two stages.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tiering.api.engine import CanonicalKVCaches
from tiering.api.transfer import TransferSpec
from tiering.copy import handlers
from tiering.copy.host import Direction, HostCopyHandler
from tiering.copy.layout import RowLayout

_gather = GPUModelRunner.sync_and_gather_intermediate_tensors
_SWAPPED = os.environ.get("KV_TEST_SWAPPED_STAGES", "")


def _gathered(runner: Any, *args: Any, **kwargs: Any) -> Any:
    if runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )
    return _gather(runner, *args, **kwargs)


GPUModelRunner.sync_and_gather_intermediate_tensors = _gathered


class _OtherStage(HostCopyHandler):
    """A handler that loads the other stage's part of a row, while the file exists."""

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        rows: NDArray[np.uint8],
        layout: RowLayout,
        direction: Direction,
        threads: int | None = None,
    ) -> None:
        super().__init__(kv_caches, rows, layout, direction, threads)
        self._other = None
        if direction is Direction.LOAD:
            other = replace(layout, rank=(layout.rank + layout.stage_ranks) % layout.world_size)
            self._other = HostCopyHandler(kv_caches, rows, other, direction, threads)._layers

    def transfer_all_async(self, jobs: Sequence[tuple[int, TransferSpec]]) -> list[int]:
        own = self._layers
        if self._other is not None and Path(_SWAPPED).exists():
            self._layers = self._other
        try:
            return super().transfer_all_async(jobs)
        finally:
            self._layers = own


if _SWAPPED:
    vars(handlers)["HostCopyHandler"] = _OtherStage


class SecondStage:
    """The class that ``--worker-extension-cls`` names; its module does the work."""
