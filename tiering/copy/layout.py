"""How a row holds a block, and which pages of the KV cache a transfer moves where.

A row holds one offloaded block of one KV-cache group: the segments of all ranks side by side, and in each segment, for each GPU
block of the offloaded block in order, the layers' pages without their padding, in the order of the group's refs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from tiering.base import CanonicalKVCaches, CPULoadStoreSpec, GPULoadStoreSpec, Rows
from tiering.errors import ConfigError, TieringError
from tiering.primary.region import row_stride


class TransferError(TieringError):
    """A transfer does not fit the KV cache or the rows.  It was not started; nothing was moved."""


@dataclass(frozen=True)
class RowLayout:
    """Where the bytes of a block lie in its row.  All sizes in bytes.

    ``page_bytes``: per KV-cache group, the unpadded page sizes of its refs on one rank.  ``rank`` of ``world_size``: whose part this
    worker moves.  ``replicated``: all ranks hold the same KV (MLA); it is held once and written by rank 0.
    """

    page_bytes: tuple[tuple[int, ...], ...]
    block_size_factor: int = 1
    rank: int = 0
    world_size: int = 1
    replicated: bool = False

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
        cls, kv_caches: CanonicalKVCaches, block_size_factor: int = 1, rank: int = 0, world_size: int = 1, replicated: bool = False
    ) -> RowLayout:
        """The layout for ``kv_caches``."""
        pages = tuple(tuple(ref.page_size_bytes for ref in refs) for refs in kv_caches.group_data_refs)
        return cls(pages, block_size_factor, rank, world_size, replicated)

    @cached_property
    def gpu_block_bytes(self) -> tuple[int, ...]:
        """Per group: one GPU block of one rank."""
        return tuple(map(sum, self.page_bytes))

    @cached_property
    def rank_bytes(self) -> tuple[int, ...]:
        """Per group: one rank's segment of a row."""
        return tuple(size * self.block_size_factor for size in self.gpu_block_bytes)

    @cached_property
    def group_bytes(self) -> tuple[int, ...]:
        """Per group: its own bytes in a row, all ranks; what media hold."""
        segments = 1 if self.replicated else self.world_size
        return tuple(size * segments for size in self.rank_bytes)

    @cached_property
    def page_offsets(self) -> tuple[tuple[int, ...], ...]:
        """Per group: where each ref's page begins within a GPU block."""
        return tuple(tuple(accumulate(pages[:-1], initial=0)) for pages in self.page_bytes)

    def segment_start(self, group: int) -> int:
        """Where this rank's segment begins in a row of ``group``."""
        return 0 if self.replicated else self.rank * self.rank_bytes[group]

    @property
    def row_bytes(self) -> int:
        """Bytes that a row needs: the largest group's."""
        return max(self.group_bytes)

    @property
    def row_stride(self) -> int:
        """``row_bytes`` rounded up to a page: the distance between two rows."""
        return row_stride(self.row_bytes)

    @property
    def writes(self) -> bool:
        """Whether this rank writes rows (of replicated KV only rank 0 does)."""
        return not self.replicated or self.rank == 0


@dataclass(frozen=True, slots=True)
class GroupPages:
    """One group's part of a transfer, co-indexed: GPU block ``gpu[i]`` is GPU block ``subs[i]`` of the offloaded block in ``rows[i]``."""

    group: int
    gpu: Rows
    rows: Rows
    subs: Rows


def plan_pages(
    layout: RowLayout, gpu: GPULoadStoreSpec, cpu: CPULoadStoreSpec, *, num_blocks: Sequence[int], num_rows: int, store: bool
) -> list[GroupPages]:
    """Pair the GPU blocks of a transfer with rows, group by group.

    A group of n GPU blocks that starts ``block_indices % factor`` blocks into an offloaded block takes
    ceil((that + n) / factor) of the rows, which are ordered like the groups.  A store must cover its rows wholly: what it left
    out would be somebody else's old bytes.  Raises :class:`TransferError` if lengths disagree or a number is out of range
    (``num_blocks`` per group, ``num_rows``), or if two parts would go to one place.
    """
    factor = layout.block_size_factor
    if len(gpu.group_sizes) != len(layout.page_bytes):
        raise TransferError(f"the transfer has {len(gpu.group_sizes)} KV-cache groups, the KV cache {len(layout.page_bytes)}")
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
        at = np.arange(start, start + size, dtype=np.int64)
        plan.append(GroupPages(group, ids, rows[at // factor], at % factor))
    return plan


def _check_range(what: str, ids: Rows, limit: int) -> None:
    if len(ids) and not (ids.min() >= 0 and ids.max() < limit):
        raise TransferError(f"{what} {ids.min()} or {ids.max()} is not one of {limit}")


def _check_unique(what: str, ids: Rows) -> None:
    if len(np.unique(ids)) != len(ids):
        raise TransferError(f"a {what} is named twice as a destination")
