"""Functions that store and load the blocks of one prompt, for a program without an engine loop.

Each announces the request, and ends it. All of them run on the thread that drives the manager. The caller copies
between its KV tensors and the rows, e.g. with :func:`~tiering.pack_block` and :func:`~tiering.unpack_block`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from tiering.api.keys import OffloadKey
from tiering.api.manager import PrefixMatch
from tiering.api.request import ReqContext
from tiering.manager.manager import TieringOffloadingManager
from tiering.manager.waiting import wait_for_prefix, wait_for_prefix_async

Row = NDArray[np.uint8]
"""One row of the CPU tier, 1-D, ``row_stride_bytes`` long."""

CopyBlock = Callable[[int, Row], None]
"""Copies the block at a position of the prompt (0 is the first) to its row, or from it."""


def store_prefix(
    manager: TieringOffloadingManager, keys: Sequence[OffloadKey], req_context: ReqContext, write: CopyBlock
) -> int:
    """Store as many leading blocks of a prompt as there is room for, and end a step.

    Args:
        manager: the manager.
        keys: the blocks of a prompt, in their order.
        req_context: the request; its id must not be in use.
        write: copies one block to a row. Blocks that are held already are not written again. If it raises, none of the
            blocks of this call becomes readable.

    Returns:
        The number of leading ``keys`` that are held then, if the request may store at all.

    """
    rows = np.asarray(manager.primary_tier.get_kv_memoryview())
    with _request(manager, req_context):
        count = len(keys)
        while (out := manager.prepare_store(keys[:count], req_context, is_last=True)) is None:
            count //= 2  # There is no room for all blocks; a shorter prefix is of use, too.
        positions = {key: position for position, key in enumerate(keys)}
        written = False
        try:
            for row, key in zip(out.store_spec.block_ids, out.keys_to_store, strict=True):
                write(positions[key], rows[row])
            written = True
        finally:
            manager.complete_store(out.keys_to_store, req_context, written)
            manager.on_schedule_end()
    return count


def load_prefix(
    manager: TieringOffloadingManager,
    keys: Sequence[OffloadKey],
    req_context: ReqContext,
    read: CopyBlock,
    timeout: float | None = 30.0,
) -> int:
    """Load the leading blocks of a prompt that are held, in any tier.

    Args:
        manager: the manager; its steps are ended on the caller's behalf.
        keys: the blocks of a prompt, in their order. A model computes at least the last token of a prompt anew, so
            leave out the block that ends with it.
        req_context: the request; its id must not be in use.
        read: copies one block from its row, which no other block takes meanwhile.
        timeout: longest wait for slower tiers in seconds; default: 30; None: no limit.

    Returns:
        The number of blocks that were read; 0 if the timeout passed first.

    """
    with _request(manager, req_context):
        return _read(manager, keys, req_context, read, wait_for_prefix(manager, keys, req_context, timeout))


async def load_prefix_async(
    manager: TieringOffloadingManager,
    keys: Sequence[OffloadKey],
    req_context: ReqContext,
    read: CopyBlock,
    timeout: float | None = 30.0,
) -> int:
    """Return the result of :func:`load_prefix`, and let the event loop run while tiers deliver."""
    with _request(manager, req_context):
        match = await wait_for_prefix_async(manager, keys, req_context, timeout)
        return _read(manager, keys, req_context, read, match)


def _read(
    manager: TieringOffloadingManager,
    keys: Sequence[OffloadKey],
    req_context: ReqContext,
    read: CopyBlock,
    match: PrefixMatch,
) -> int:
    """Read the blocks of a final match."""
    if match.pending or not match.hits:
        return 0
    held = keys[: match.hits]
    rows = np.asarray(manager.primary_tier.get_kv_memoryview())
    spec = manager.prepare_load(held, req_context)
    try:
        for position, row in enumerate(spec.block_ids):
            read(position, rows[row])
    finally:
        manager.complete_load(held, req_context)
    return len(held)


@contextmanager
def _request(manager: TieringOffloadingManager, req_context: ReqContext) -> Iterator[None]:
    manager.on_new_request(req_context)
    try:
        yield
    finally:
        manager.on_request_finished(req_context)
