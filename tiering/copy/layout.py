"""The layout of a row, and the pairing of KV-cache pages with rows for one transfer.

A row holds one offloaded block of one KV-cache group. The ranks' segments lie side by side. A segment holds the GPU
blocks of the offloaded block in order. Each GPU block consists of its layers' pages without padding, in the order of
the group's refs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from tiering.api.engine import CanonicalKVCaches
from tiering.api.transfer import CPULoadStoreSpec, GPULoadStoreSpec, Rows
from tiering.errors import ConfigError, TieringError
from tiering.primary.memory.region import row_stride


class TransferError(TieringError):
    """A transfer that does not fit the KV cache or the rows; no byte of the transfer was moved."""


@dataclass(frozen=True)
class RowLayout:
    """The place of every byte of a block in its row. All sizes are bytes."""

    page_bytes: tuple[tuple[int, ...], ...]
    """Unpadded page sizes of one rank: one tuple per KV-cache group, one size per ref of the group."""
    block_size_factor: int = 1
    """GPU blocks in one offloaded block."""
    rank: int = 0
    """The rank whose segments this worker moves, from 0 to ``world_size`` - 1."""
    world_size: int = 1
    """Number of ranks that hold KV side by side."""
    replicated: bool = False
    """True if all ranks hold the same KV (MLA). A row then holds one segment, and rank 0 writes it."""

    def __post_init__(self) -> None:
        if not self.page_bytes or not all(pages and min(pages) > 0 for pages in self.page_bytes):
            raise ConfigError(
                f"page_bytes {self.page_bytes}: every KV-cache group must have layers with pages of at least one byte"
            )
        if self.block_size_factor < 1:
            raise ConfigError(f"block_size_factor {self.block_size_factor} is not a positive number")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank} is not one of {self.world_size} worker(s)")

    @classmethod
    def of(
        cls,
        kv_caches: CanonicalKVCaches,
        block_size_factor: int = 1,
        rank: int = 0,
        world_size: int = 1,
        replicated: bool = False,
    ) -> RowLayout:
        """Return the layout of the rows for ``kv_caches``."""
        pages = tuple(tuple(ref.page_size_bytes for ref in refs) for refs in kv_caches.group_data_refs)
        return cls(pages, block_size_factor, rank, world_size, replicated)

    @cached_property
    def gpu_block_bytes(self) -> tuple[int, ...]:
        """Bytes of one GPU block on one rank, per group."""
        return tuple(map(sum, self.page_bytes))

    @cached_property
    def rank_bytes(self) -> tuple[int, ...]:
        """Bytes of one rank's segment of a row, per group."""
        return tuple(size * self.block_size_factor for size in self.gpu_block_bytes)

    @cached_property
    def group_bytes(self) -> tuple[int, ...]:
        """Bytes of a block of all ranks, per group. Media hold exactly these bytes, never padding."""
        segments = 1 if self.replicated else self.world_size
        return tuple(size * segments for size in self.rank_bytes)

    @cached_property
    def page_offsets(self) -> tuple[tuple[int, ...], ...]:
        """Offset of each ref's page within a GPU block, per group."""
        return tuple(tuple(accumulate(pages[:-1], initial=0)) for pages in self.page_bytes)

    def segment_start(self, group: int) -> int:
        """Return the offset of this rank's segment in a row of ``group``."""
        return 0 if self.replicated else self.rank * self.rank_bytes[group]

    @property
    def part(self) -> tuple[int, int]:
        """The bytes of a row that this rank uses: the first one, and the one after the last."""
        starts = [self.segment_start(group) for group in range(len(self.page_bytes))]
        return min(starts), max(start + size for start, size in zip(starts, self.rank_bytes, strict=True))

    @property
    def row_bytes(self) -> int:
        """Bytes that a row needs: those of the largest group."""
        return max(self.group_bytes)

    @property
    def row_stride(self) -> int:
        """Distance between the starts of two rows: ``row_bytes`` rounded up to a page."""
        return row_stride(self.row_bytes)

    @property
    def writes(self) -> bool:
        """True if this rank writes rows. Of replicated KV, only rank 0 does."""
        return not self.replicated or self.rank == 0


class GroupPages(NamedTuple):
    """The part of a transfer that belongs to one KV-cache group. The three arrays are co-indexed."""

    group: int
    """Index of the KV-cache group."""
    gpu: Rows
    """Ids of the GPU blocks."""
    rows: Rows
    """Row of the offloaded block that each GPU block is part of."""
    subs: Rows
    """Position of each GPU block within its offloaded block, from 0 to the block size factor - 1."""


def plan_pages(
    layout: RowLayout,
    gpu: GPULoadStoreSpec,
    cpu: CPULoadStoreSpec,
    *,
    num_blocks: Sequence[int],
    num_rows: int,
    store: bool,
) -> list[GroupPages]:
    """Pair the GPU blocks of a transfer with rows, group by group.

    A group of n GPU blocks that starts s = ``block_indices % factor`` blocks into an offloaded block takes
    ceil((s + n) / factor) rows. The rows are ordered like the groups. A store must cover its rows completely, because
    the uncovered part of a row would keep the bytes of another block.

    Args:
        layout: the rows' layout.
        gpu: the accelerator's side of the transfer.
        cpu: the rows' side of the transfer.
        num_blocks: number of GPU blocks of each group; ids must be below it.
        num_rows: number of rows; row numbers must be below it.
        store: True for a store, False for a load.

    Raises:
        TransferError: lengths disagree, a number is out of range, or a destination is named twice.
    """
    factor = layout.block_size_factor
    if len(gpu.group_sizes) != len(layout.page_bytes):
        raise TransferError(
            f"the transfer has {len(gpu.group_sizes)} KV-cache groups, the KV cache {len(layout.page_bytes)}"
        )
    starts = [index % factor for index in gpu.block_indices]
    needed = [-(-(start + size) // factor) if size else 0 for start, size in zip(starts, gpu.group_sizes, strict=True)]
    if sum(needed) != len(cpu.block_ids):
        raise TransferError(f"the transfer has {len(cpu.block_ids)} rows, its GPU blocks need {sum(needed)}")
    _check_range("row", cpu.block_ids, num_rows)
    if store:
        _check_unique("row", cpu.block_ids)
    plan = []
    gpu_at = row_at = 0
    for group, (start, size, count) in enumerate(zip(starts, gpu.group_sizes, needed, strict=True)):
        ids = gpu.block_ids[gpu_at : gpu_at + size]
        rows = cpu.block_ids[row_at : row_at + count]
        gpu_at, row_at = gpu_at + size, row_at + count
        if not size:
            continue
        if store and (start or size % factor):
            raise TransferError(
                f"a store of {size} GPU blocks from index {start} does not cover whole offloaded blocks of {factor}"
            )
        _check_range("GPU block", ids, num_blocks[group])
        if not store:
            _check_unique("GPU block", ids[ids != 0])  # 0 is the engines' null block, which nobody reads
        if factor == 1:
            plan.append(GroupPages(group, ids, rows, np.zeros(size, np.int64)))
            continue
        at = np.arange(start, start + size, dtype=np.int64)
        plan.append(GroupPages(group, ids, rows[at // factor], at % factor))
    return plan


def _check_range(what: str, ids: Rows, limit: int) -> None:
    # A negative number is a large one without its sign, so that one reduction finds both faults.
    if len(ids) and ids.view(np.uint64).max() >= limit:
        raise TransferError(f"{what} {ids.min()} or {ids.max()} is not one of {limit}")


def _check_unique(what: str, ids: Rows) -> None:
    # A set is cheaper than np.unique for the few blocks of most transfers, and no dearer for many.
    if len(set(ids.tolist())) != len(ids):
        raise TransferError(f"a {what} is named twice as a destination")
