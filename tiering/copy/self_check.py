"""The check at registration that a block comes back from the rows as it was.

An incompatibility of device, driver or layout then shows at the start, and not as lost hits later.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from tiering.api.engine import CanonicalKVCaches
from tiering.api.transfer import CPULoadStoreSpec, GPULoadStoreSpec
from tiering.copy.contract import OffloadingHandler
from tiering.copy.host import blocks_per_group
from tiering.copy.layout import RowLayout
from tiering.errors import ConfigError

logger = logging.getLogger("kv_tiering.copy")

_JOB = -1
"""Job id of the check; the connector's ids begin at 0."""


def check_round_trip(
    store: OffloadingHandler,
    load: OffloadingHandler,
    kv_caches: CanonicalKVCaches,
    rows: NDArray[np.uint8],
    layout: RowLayout,
) -> None:
    """Store one offloaded block of each KV-cache group, load it back, and compare every byte.

    The check uses the last GPU blocks, and a row for each rank from the last one on. Both get their content back. It
    needs a row for each rank, and is left out in smaller tiers. The engine must not use the KV cache meanwhile.

    Args:
        store: handler of stores.
        load: handler of loads.
        kv_caches: the KV cache.
        rows: the primary rows.
        layout: the rows' layout.

    Raises:
        ConfigError: bytes differ, or a transfer failed.
    """
    row, factor = len(rows) - 1 - layout.rank, layout.block_size_factor
    for group, num_blocks in enumerate(blocks_per_group(kv_caches)):
        if not layout.page_bytes[group]:
            continue
        if row < 0 or num_blocks < factor:
            logger.debug("the copies of KV-cache group %d are not checked: it needs more blocks or rows", group)
            continue
        blocks = list(range(num_blocks - factor, num_blocks))
        sizes = [factor if index == group else 0 for index in range(len(layout.page_bytes))]
        gpu = GPULoadStoreSpec(blocks, sizes, [0] * len(sizes))
        cpu = CPULoadStoreSpec([row])
        places = np.concatenate([np.arange(start, start + size) for start, size in layout.places(group)])
        row_before = rows[row, places]
        pages = list(_pages(kv_caches, group, blocks))
        before = [page.clone() for page in pages]
        expected = np.random.default_rng(group).integers(0, 256, layout.rank_bytes[group], dtype=np.uint8)
        try:
            _fill(pages, expected)
            _run(store, (gpu, cpu), "store")
            if not layout.writes:
                rows[row, places] = expected
            for page in pages:
                page.zero_()
            _run(load, (cpu, gpu), "load")
            found = torch.cat([page.cpu() for page in pages]).numpy().view(np.uint8)
        finally:
            for page, content in zip(pages, before, strict=True):
                page.copy_(content)
            stored = rows[row, places]
            rows[row, places] = row_before
        if not (np.array_equal(stored, expected) and np.array_equal(found, expected)):
            way = "to" if not np.array_equal(stored, expected) else "from"
            raise ConfigError(
                f"rank {layout.rank}: a block of KV-cache group {group} was changed on its way {way} the primary tier; "
                "do not offload on this combination of device, driver and torch, and report their versions"
            )


def _pages(kv_caches: CanonicalKVCaches, group: int, blocks: list[int]) -> Iterator[torch.Tensor]:
    """Yield the pages of ``blocks`` as int8 tensors, in the order of a segment."""
    for block in blocks:
        for ref in kv_caches.group_data_refs[group]:
            yield kv_caches.tensors[ref.tensor_idx].tensor[block, : ref.page_size_bytes]


def _fill(pages: list[torch.Tensor], content: NDArray[np.uint8]) -> None:
    at = 0
    for page in pages:
        page.copy_(torch.from_numpy(content[at : at + len(page)].view(np.int8)))
        at += len(page)


def _run(
    handler: OffloadingHandler,
    spec: tuple[GPULoadStoreSpec | CPULoadStoreSpec, GPULoadStoreSpec | CPULoadStoreSpec],
    name: str,
) -> None:
    started = handler.transfer_async(_JOB, spec)
    handler.wait([_JOB])
    if not started or not all(result.success for result in handler.get_finished()):
        raise ConfigError(f"a {name} of one block failed when copies were tried; the lines before have the reason")
