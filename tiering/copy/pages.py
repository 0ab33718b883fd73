"""The pages of a KV-cache group on a device, and the pieces of rows that copies move at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tiering.api.engine import CanonicalKVCaches
from tiering.copy.batch import Addresses
from tiering.copy.layout import GroupPages, RowLayout


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """The pages of one KV-cache group on a device."""

    word: torch.dtype
    """The widest integer type that all pages consist of: the kernel moves words, not bytes."""
    block_bytes: int
    """Size of a GPU block in bytes."""
    row_stride: int
    """Distance between this rank's bytes of two GPU blocks of a row in bytes."""
    row_start: int
    """Offset of this rank's first byte in a row in bytes."""
    runs: Pieces | None
    """Pieces of a staged GPU block that are contiguous in a row too; None: the whole block is one."""
    pages: torch.Tensor
    """The pages in the order of a segment, int64 on the device, shape (5, number of pages).

    The five numbers of a page are its address in block 0, its distance to the same page of the next block, its offset
    within a staged GPU block, its offset in a row from this rank's first byte of the GPU block on, all in bytes, and
    its size in words.
    """
    longest: int
    """Size of the largest page in words."""
    caches: tuple[torch.Tensor, ...]
    """The engine's tensors that the addresses lie in, so that they live as long as copies may run."""

    @classmethod
    def of(cls, kv_caches: CanonicalKVCaches, layout: RowLayout, group: int) -> DeviceGroup:
        """Return the pages of one group of ``kv_caches``."""
        refs = kv_caches.group_data_refs[group]
        tensors = [kv_caches.tensors[ref.tensor_idx].tensor for ref in refs]
        addresses = [tensor.data_ptr() for tensor in tensors]
        strides = [int(tensor.stride(0)) for tensor in tensors]
        sizes = [ref.page_size_bytes for ref in refs]
        block_bytes, stride = layout.gpu_block_bytes[group], layout.block_strides[group]
        start, *_ = offsets = layout.page_offsets[group]
        word = _word([*addresses, *strides, *sizes, *offsets, stride])
        staged = list(accumulate(sizes[:-1], initial=0))
        in_row = [offset - start for offset in offsets]
        words = [size // word.itemsize for size in sizes]
        pages = torch.tensor([addresses, strides, staged, in_row, words], dtype=torch.int64, device=tensors[0].device)
        return cls(word, block_bytes, stride, start, _runs(staged, in_row, sizes), pages, max(words), tuple(tensors))

    @property
    def piece_bytes(self) -> float:
        """Mean size of the pieces of a GPU block that are contiguous in a row."""
        return self.block_bytes / (1 if self.runs is None else len(self.runs.sizes))


class PageKernel(Protocol):
    """A kernel that moves the pages of GPU blocks to a staging buffer or straight to their rows, or back."""

    def __call__(
        self, group: DeviceGroup, blocks: torch.Tensor, target: torch.Tensor, *, store: bool, direct: bool = False
    ) -> None:
        """Queue the kernel on the current stream.

        Args:
            group: the pages.
            blocks: ids of the GPU blocks, int64 on the device.
            target: the staging buffer, uint8, in which the GPU blocks lie one behind the other. If ``direct``: the
                address of this rank's first byte of each GPU block in its row, int64 on the device.
            store: True: from the pages to the target. False: the other way. A GPU block that is named several times,
                which only the null block may be, then holds words of each of its copies.
            direct: True: the pages cross the bus one by one, in registered rows that the device may use by their
                addresses on the host; default: False.
        """


class Pieces(NamedTuple):
    """Contiguous pieces of GPU blocks; one copy moves one piece. The three arrays are co-indexed."""

    device: Addresses
    """Offsets in the staging buffer."""
    host: Addresses
    """Offsets in the rows; those of one GPU block count from this rank's first byte of the block on."""
    sizes: Addresses
    """Bytes of each piece."""


def _runs(staged: Sequence[int], row: Sequence[int], sizes: Sequence[int]) -> Pieces | None:
    """Join the pages that touch in a row, as all do in the staging buffer; return None for a single run."""
    first = [0, *(i for i in range(1, len(sizes)) if row[i - 1] + sizes[i - 1] != row[i])]
    if len(first) == 1:
        return None
    numbers = np.array([staged, row, sizes], np.uint64)
    return Pieces(numbers[0, first], numbers[1, first], np.add.reduceat(numbers[2], first))


def _word(sizes: list[int]) -> torch.dtype:
    return next(
        dtype
        for dtype in (torch.int64, torch.int32, torch.int16, torch.int8)
        if not any(size % dtype.itemsize for size in sizes)
    )


def pieces_of(pages: GroupPages, group: DeviceGroup, stride: int, chunk_rows: int) -> Pieces:
    """Return the pieces between a staging buffer and the rows.

    The staging buffer holds the GPU blocks of ``pages`` one behind the other; offsets count from its start.

    Args:
        pages: the GPU blocks and their rows.
        group: the pages' KV-cache group.
        stride: distance between rows in bytes.
        chunk_rows: number of rows in one registration; no piece crosses the border of two registrations.
    """
    size, runs, blocks = np.uint64(group.block_bytes), group.runs, len(pages.gpu)
    device = np.arange(blocks, dtype=np.uint64) * size
    host = starts_of(pages, group, stride).astype(np.uint64)
    chunks = pages.rows // chunk_rows
    if runs is None:
        return _merged(device, host, np.full(blocks, size), chunks)
    device, host = (device[:, None] + runs.device).ravel(), (host[:, None] + runs.host).ravel()
    return _merged(device, host, np.tile(runs.sizes, blocks), np.repeat(chunks, len(runs.sizes)))


def starts_of(pages: GroupPages, group: DeviceGroup, stride: int) -> NDArray[np.int64]:
    """Return the offset in the rows of this rank's first byte of each GPU block."""
    return pages.rows * stride + pages.subs * group.row_stride + group.row_start


def _merged(device: Addresses, host: Addresses, sizes: Addresses, chunks: NDArray[np.int64]) -> Pieces:
    """Join neighbours that touch on both sides and lie in one registration."""
    touches = (
        (device[:-1] + sizes[:-1] == device[1:]) & (host[:-1] + sizes[:-1] == host[1:]) & (chunks[:-1] == chunks[1:])
    )
    if not touches.any():
        return Pieces(device, host, sizes)
    first = np.flatnonzero(np.concatenate(([True], ~touches)))
    return Pieces(device[first], host[first], np.add.reduceat(sizes, first))
