"""A place for the first pipeline stage's result, which vLLM's CPU build lacks.

vLLM's runner for GPUs makes this place in a run with dummy tokens, which the CPU build leaves out: without it, the
second stage ends in an assertion at the first request, with or without a connector. Each worker imports this module.

While the file that ``KV_TEST_STAGE_FAULT`` names exists, its text disturbs loads: those of the worker with this rank
cannot be started, or (``swapped``) all take the pages of the other of two stages.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
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
_FAULT = os.environ.get("KV_TEST_STAGE_FAULT", "")


def _gathered(runner: Any, *args: Any, **kwargs: Any) -> Any:
    if runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )
    return _gather(runner, *args, **kwargs)


GPUModelRunner.sync_and_gather_intermediate_tensors = _gathered


class _Disturbed(HostCopyHandler):
    """A handler whose loads have the fault that the file names."""

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        rows: NDArray[np.uint8],
        layout: RowLayout,
        direction: Direction,
        threads: int | None = None,
    ) -> None:
        super().__init__(kv_caches, rows, layout, direction, threads)
        other = replace(layout, rank=(layout.rank + layout.stage_ranks) % layout.world_size)
        self._rank, self._loads = str(layout.rank), direction is Direction.LOAD
        self._swapped = partial(HostCopyHandler, kv_caches, rows, other, direction, threads)

    def transfer_all_async(self, jobs: Sequence[tuple[int, TransferSpec]]) -> list[int]:
        own = self._layers
        fault = Path(_FAULT).read_text() if self._loads and Path(_FAULT).exists() else ""
        if fault == self._rank:
            return [job_id for job_id, _ in jobs]
        if fault == "swapped":
            self._layers = self._swapped()._layers
        try:
            return super().transfer_all_async(jobs)
        finally:
            self._layers = own


if _FAULT:
    vars(handlers)["HostCopyHandler"] = _Disturbed


class SecondStage:
    """The class that ``--worker-extension-cls`` names; its module does the work."""
