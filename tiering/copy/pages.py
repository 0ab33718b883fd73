"""The pages of a KV-cache group on a device, and the pieces of rows that copies move at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tiering.api.engine import CanonicalKVCaches
from tiering.copy.batch import Addresses
from tiering.copy.layout import GroupPages, RowLayout

SMALLEST_DIRECT_PAGE = 28 << 10
"""Smallest page in bytes that is copied by itself: smaller pages are gathered by a kernel first."""


@dataclass(frozen=True, slots=True)
class PageRun:
    """Pages of layers that one kernel gathers or scatters."""

    cache: torch.Tensor
    """Pages on the device, shape (num_blocks, layers, words of a page)."""
    start: int
    """First word of the pages within a GPU block's part of a segment."""

    @property
    def stop(self) -> int:
        """Word after the last one of the pages."""
        return self.start + self.cache.shape[1] * self.cache.shape[2]

    def within(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the place of these pages in ``blocks``, as (number of blocks, layers, words of a page).

        Args:
            blocks: staged GPU blocks, shape (number of blocks, words of a block).
        """
        return blocks[:, self.start : self.stop].view(len(blocks), *self.cache.shape[1:])


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """The pages of one KV-cache group on a device."""

    word: torch.dtype
    """The widest integer type that all pages consist of: kernels move words, not bytes."""
    runs: tuple[PageRun, ...]
    """All pages of the group, in the order of a segment."""
    block_bytes: int
    """Size of a GPU block in bytes."""
    segment_start: int
    """Offset of this rank's segment in a row in bytes."""
    addresses: Addresses
    """Address of each page of block 0."""
    strides: Addresses
    """Distance from a page in one block to the page in the next block, in bytes."""
    offsets: Addresses
    """Offset of each page within a GPU block of a segment, in bytes."""
    sizes: Addresses
    """Size of each page in bytes."""

    @classmethod
    def of(cls, kv_caches: CanonicalKVCaches, layout: RowLayout, group: int) -> DeviceGroup:
        """Return the pages of one group of ``kv_caches``."""
        refs, offsets = kv_caches.group_data_refs[group], layout.page_offsets[group]
        tensors = [kv_caches.tensors[ref.tensor_idx].tensor for ref in refs]
        sizes = [ref.page_size_bytes for ref in refs]
        strides = [int(tensor.stride(0)) for tensor in tensors]
        word = _word([*sizes, *strides, *(int(tensor.storage_offset()) for tensor in tensors)])
        numbers = ([tensor.data_ptr() for tensor in tensors], strides, offsets, sizes)
        return cls(
            word,
            tuple(_runs(tensors, sizes, offsets, word)),
            layout.gpu_block_bytes[group],
            layout.segment_start(group),
            *(np.array(values, dtype=np.uint64) for values in numbers),
        )

    @property
    def has_large_pages(self) -> bool:
        """True if copying page by page is faster than gathering."""
        return int(self.sizes.min()) >= SMALLEST_DIRECT_PAGE


def _word(sizes: list[int]) -> torch.dtype:
    return next(
        dtype
        for dtype in (torch.int64, torch.int32, torch.int16, torch.int8)
        if not any(size % dtype.itemsize for size in sizes)
    )


def _runs(tensors: list[torch.Tensor], sizes: list[int], offsets: tuple[int, ...], word: torch.dtype) -> list[PageRun]:
    """Join the pages whose distance in the engine's memory is the same from layer to layer."""
    runs = []
    first = 0
    while first < len(tensors):
        base, last, step = tensors[first], first, 0
        while last + 1 < len(tensors) and _is_next(tensors, sizes, last, step, word):
            step = tensors[last + 1].data_ptr() - tensors[last].data_ptr()
            last += 1
        words = sizes[first] // word.itemsize
        raw = torch.empty(0, dtype=word, device=base.device).set_(
            base.untyped_storage(),
            int(base.storage_offset()) // word.itemsize,
            (base.shape[0], last - first + 1, words),
            (int(base.stride(0)) // word.itemsize, max(step, sizes[first]) // word.itemsize, 1),
        )
        runs.append(PageRun(raw, offsets[first] // word.itemsize))
        first = last + 1
    return runs


def _is_next(tensors: list[torch.Tensor], sizes: list[int], last: int, step: int, word: torch.dtype) -> bool:
    """Return True if the page after ``last`` continues a run.

    Pages of a run are ``step`` bytes apart, or any distance if ``step`` is 0.
    """
    a, b = tensors[last], tensors[last + 1]
    distance = b.data_ptr() - a.data_ptr()
    return (
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.stride(0) == b.stride(0)
        and a.shape[0] == b.shape[0]
        and sizes[last] == sizes[last + 1]
        and distance >= sizes[last]
        and distance % word.itemsize == 0
        and step in (0, distance)
    )


class Pieces(NamedTuple):
    """Contiguous pieces; one copy moves one piece. The three arrays are co-indexed."""

    device: Addresses
    """Addresses or offsets on the device's side."""
    host: Addresses
    """Offsets in the rows."""
    sizes: Addresses
    """Bytes of each piece."""


def staged_pieces(pages: GroupPages, group: DeviceGroup, stride: int, chunk_rows: int) -> Pieces:
    """Return the pieces between a staging buffer and the rows.

    The staging buffer holds the GPU blocks of ``pages`` one behind the other; offsets count from its start.

    Args:
        pages: the GPU blocks and their rows.
        group: the pages' KV-cache group.
        stride: distance between rows in bytes.
        chunk_rows: number of rows in one registration; no piece crosses the border of two registrations.
    """
    size = np.uint64(group.block_bytes)
    device = np.arange(len(pages.gpu), dtype=np.uint64) * size
    return _merged(device, _in_rows(pages, group, stride), np.full(len(device), size), pages.rows // chunk_rows)


def direct_pieces(pages: GroupPages, group: DeviceGroup, stride: int, chunk_rows: int) -> Pieces:
    """Return the pieces between the engine's pages and the rows; device addresses are absolute.

    The arguments are those of :func:`staged_pieces`.
    """
    device = group.addresses + pages.gpu.astype(np.uint64)[:, None] * group.strides
    host = _in_rows(pages, group, stride)[:, None] + group.offsets
    sizes = np.broadcast_to(group.sizes, device.shape)
    chunks = np.repeat(pages.rows // chunk_rows, len(group.sizes))
    return _merged(device.reshape(-1), host.reshape(-1), sizes.reshape(-1), chunks)


def _in_rows(pages: GroupPages, group: DeviceGroup, stride: int) -> Addresses:
    """Return the offset of each GPU block in the rows."""
    host = pages.rows * stride + pages.subs * group.block_bytes + group.segment_start
    return host.astype(np.uint64)


def _merged(device: Addresses, host: Addresses, sizes: Addresses, chunks: NDArray[np.int64]) -> Pieces:
    """Join neighbours that touch on both sides and lie in one registration."""
    touches = (
        (device[:-1] + sizes[:-1] == device[1:]) & (host[:-1] + sizes[:-1] == host[1:]) & (chunks[:-1] == chunks[1:])
    )
    first = np.flatnonzero(np.concatenate(([True], ~touches))) if len(device) else np.zeros(0, np.int64)
    return Pieces(device[first], host[first], np.add.reduceat(sizes, first) if len(first) else sizes[:0])
