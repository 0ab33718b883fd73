"""The choice of copy handlers: CUDA copies for a KV cache on a GPU, host copies otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tiering.api.engine import CanonicalKVCaches
from tiering.api.transfer import CPULoadStoreSpec, GPULoadStoreSpec, LoadStoreSpec
from tiering.copy.contract import OffloadingHandler
from tiering.copy.host import Direction, HostCopyHandler
from tiering.copy.layout import RowLayout
from tiering.errors import ConfigError

HandlerEntry = tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]


def make_handlers(
    kv_caches: CanonicalKVCaches, region_view: memoryview, layout: RowLayout, threads: int | None = None
) -> Iterator[HandlerEntry]:
    """Yield (source spec class, destination spec class, handler) for stores and for loads.

    Args:
        kv_caches: the engine's KV cache in canonical form.
        region_view: the primary rows, uint8 of shape (num_rows, row_stride).
        layout: the rows' layout.
        threads: threads of host copies per direction; default: two, or one on a machine with one core.

    Raises:
        ConfigError: the rows are too small for ``layout``, or the KV cache is on a device without copies.
    """
    rows = np.asarray(region_view)
    device = kv_caches.tensors[0].tensor.device.type
    if device == "cpu":
        yield GPULoadStoreSpec, CPULoadStoreSpec, HostCopyHandler(kv_caches, rows, layout, Direction.STORE, threads)
        yield CPULoadStoreSpec, GPULoadStoreSpec, HostCopyHandler(kv_caches, rows, layout, Direction.LOAD, threads)
    elif device == "cuda":
        from tiering.copy.cuda import CudaCopyHandler, PinnedRows

        pinned = PinnedRows(rows)
        store = CudaCopyHandler(kv_caches, pinned, layout, Direction.STORE)
        try:
            load = CudaCopyHandler(kv_caches, pinned, layout, Direction.LOAD)
        except ConfigError:
            store.shutdown()
            raise
        yield GPULoadStoreSpec, CPULoadStoreSpec, store
        yield CPULoadStoreSpec, GPULoadStoreSpec, load
    else:
        raise ConfigError(f"the KV cache is on a {device!r} device; copies exist for cpu and cuda")
