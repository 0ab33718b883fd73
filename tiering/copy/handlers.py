"""The choice of copy handlers: CUDA copies for a KV cache on a GPU, host copies otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tiering.api.engine import CanonicalKVCaches
from tiering.api.transfer import CPULoadStoreSpec, GPULoadStoreSpec, LoadStoreSpec
from tiering.copy.contract import OffloadingHandler
from tiering.copy.host import Direction, HostCopyHandler
from tiering.copy.layout import RowLayout
from tiering.errors import ConfigError
from tiering.primary.memory.preparation import Preparation

HandlerEntry = tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]

_WHY_NOT = {
    "xpu": "copies there need torch.xpu's streams and a registration of host memory that torch does not offer",
    "npu": "copies there need Ascend's own streams and host memory, which torch alone does not offer",
}
"""Device type → the reason why its KV caches are not offloaded."""


def make_handlers(
    kv_caches: CanonicalKVCaches,
    region_view: memoryview,
    layout: RowLayout,
    threads: int | None = None,
    pageable: NDArray[np.uint8] | None = None,
    preparation: Preparation | None = None,
) -> Iterator[HandlerEntry]:
    """Yield (source spec class, destination spec class, handler) for stores and for loads.

    Args:
        kv_caches: the engine's KV cache in canonical form.
        region_view: the primary rows, uint8 of shape (num_rows, row_stride).
        layout: the rows' layout.
        threads: threads of host copies per direction; default: two, or one on a machine with one core.
        pageable: one byte that all workers of the engine share, for their agreement on pinned rows; default: a byte of
            this worker.
        preparation: preparation of the rows beside the engine's start, which the copies to a GPU become part of;
            default: the rows are prepared.

    Raises:
        ConfigError: the rows are too small for ``layout``, there are no copies for the device of the KV cache, or a
            block comes back from the rows with other bytes.
    """
    rows = np.asarray(region_view)
    device = kv_caches.tensors[0].tensor.device.type
    if device == "cpu":
        store: OffloadingHandler = HostCopyHandler(kv_caches, rows, layout, Direction.STORE, threads)
        try:
            load: OffloadingHandler = HostCopyHandler(kv_caches, rows, layout, Direction.LOAD, threads)
        except BaseException:
            store.shutdown()
            raise
    elif device == "cuda":
        store, load = _cuda_handlers(kv_caches, rows, layout, pageable, preparation)
    else:
        reason = _WHY_NOT.get(device, "there are copies for cpu and cuda (NVIDIA, and ROCm untested) alone")
        raise ConfigError(f"the KV cache is on a {device!r} device and cannot be offloaded: {reason}")
    yield GPULoadStoreSpec, CPULoadStoreSpec, store
    yield CPULoadStoreSpec, GPULoadStoreSpec, load


def _cuda_handlers(
    kv_caches: CanonicalKVCaches,
    rows: NDArray[np.uint8],
    layout: RowLayout,
    pageable: NDArray[np.uint8] | None,
    preparation: Preparation | None,
) -> tuple[OffloadingHandler, OffloadingHandler]:
    from tiering.copy.batch import find_batch_copy
    from tiering.copy.cuda import CudaCopyHandler
    from tiering.copy.cudart import maps_registered_memory
    from tiering.copy.pinning import PinnedRows
    from tiering.copy.self_check import check_round_trip

    try:
        from tiering.copy.kernel import move_pages
    except ImportError as error:
        raise ConfigError(f"copies on a GPU need Triton ({error}): pip install triton") from error
    pinned = PinnedRows(rows, part=layout.part, rank=layout.rank, pageable=pageable, preparation=preparation)
    batch, maps_rows = find_batch_copy(), maps_registered_memory(kv_caches.tensors[0].tensor.device)
    store = CudaCopyHandler(kv_caches, pinned, layout, Direction.STORE, move_pages, batch=batch, maps_rows=maps_rows)
    try:
        load = CudaCopyHandler(kv_caches, pinned, layout, Direction.LOAD, move_pages, batch=batch, maps_rows=maps_rows)
    except BaseException:
        store.shutdown()
        raise
    try:
        check_round_trip(store, load, kv_caches, rows, layout)
    except BaseException:
        load.shutdown()
        store.shutdown()
        raise
    pinned.expect_agreement()
    return store, load
