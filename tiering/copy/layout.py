"""The layout of a row, and the pairing of KV-cache pages with rows for one transfer.

A row holds one offloaded block of one KV-cache group. The ranks' segments lie side by side. A segment holds the GPU
blocks of the offloaded block in order. Each GPU block consists of its layers' pages without padding, in the order of
the group's refs. The ranks of a pipeline stage hold the same layers, and the segments of the stages follow each other.
A rank without layers of a group has no segment in the group's rows.

In a canonical row, the GPU blocks of all ranks together lie one behind the other, and a GPU block holds the heads of
all ranks, layer by layer over all stages. Between the pages of one rank then lie those of the others.
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
from tiering.copy.contract import TransferError
from tiering.errors import ConfigError
from tiering.primary.memory.region import row_stride


@dataclass(frozen=True)
class RowLayout:
    """The place of every byte of a block in its row. All sizes are bytes."""

    page_bytes: tuple[tuple[int, ...], ...]
    """Unpadded page sizes of one rank: one tuple per KV-cache group, one size per ref of the group.

    A group has no sizes if only other pipeline stages have layers of it.
    """
    block_size_factor: int = 1
    """GPU blocks in one offloaded block."""
    rank: int = 0
    """The rank whose segments this worker moves, from 0 to ``world_size`` - 1."""
    world_size: int = 1
    """Number of ranks that hold KV side by side."""
    copies: int = 1
    """Number of neighbouring ranks that hold the same KV; all of a stage with latent attention (MLA).

    The first of them writes what all of them read.
    """
    page_starts: tuple[tuple[int, ...], ...] | None = None
    """Offsets of the pages in a GPU block of this stage's layers in a canonical row, per group.

    None: ranks lie side by side.
    """
    stage_bytes: tuple[tuple[int, ...], ...] = ()
    """Bytes of a GPU block on one rank of each pipeline stage, per group; default: there is one stage."""

    def __post_init__(self) -> None:
        sizes = [size for pages in self.page_bytes for size in pages]
        if not sizes or min(sizes) < 1 or (len(self.stage_bytes) < 2 and not all(self.page_bytes)):
            raise ConfigError(
                f"page_bytes {self.page_bytes}: every KV-cache group must have layers with pages of at least one byte"
            )
        if self.world_size % self.stages or any(len(each) != len(self.page_bytes) for each in self.stage_bytes):
            raise ConfigError(
                f"stage_bytes {self.stage_bytes}: {self.world_size} worker(s) with {len(self.page_bytes)} KV-cache "
                "groups do not make up these pipeline stages"
            )
        if self.block_size_factor < 1:
            raise ConfigError(f"block_size_factor {self.block_size_factor} is not a positive number")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank} is not one of {self.world_size} worker(s)")
        if self.copies < 1 or self.stage_ranks % self.copies:
            raise ConfigError(f"{self.stage_ranks} worker(s) do not hold {self.copies} copies of each part of the KV")

    @classmethod
    def of(
        cls,
        kv_caches: CanonicalKVCaches,
        block_size_factor: int = 1,
        rank: int = 0,
        world_size: int = 1,
        copies: int = 1,
        stage_bytes: tuple[tuple[int, ...], ...] = (),
    ) -> RowLayout:
        """Return the layout of the rows for ``kv_caches``; canonical if its pages have places in a row."""
        refs = kv_caches.group_data_refs
        pages = tuple(tuple(ref.page_size_bytes for ref in group) for group in refs)
        starts = tuple(tuple(ref.row_offset for ref in group if ref.row_offset is not None) for group in refs)
        canonical = any(starts)
        return cls(pages, block_size_factor, rank, world_size, copies, starts if canonical else None, stage_bytes)

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return max(1, len(self.stage_bytes))

    @property
    def stage_ranks(self) -> int:
        """Number of ranks of one pipeline stage."""
        return self.world_size // self.stages

    @cached_property
    def gpu_block_bytes(self) -> tuple[int, ...]:
        """Bytes of one GPU block on one rank, per group."""
        return tuple(map(sum, self.page_bytes))

    @cached_property
    def rank_bytes(self) -> tuple[int, ...]:
        """Bytes of a row that one rank uses, per group."""
        return tuple(size * self.block_size_factor for size in self.gpu_block_bytes)

    @cached_property
    def group_bytes(self) -> tuple[int, ...]:
        """Bytes of a block of all ranks, per group. Media hold exactly these bytes, never padding."""
        return tuple(size * self.block_size_factor for size in self._whole_block_bytes)

    @cached_property
    def _whole_block_bytes(self) -> tuple[int, ...]:
        """Bytes of one GPU block of all ranks, per group."""
        stages = [*self.stage_bytes[: self._stage], self.gpu_block_bytes, *self.stage_bytes[self._stage + 1 :]]
        return tuple(sum(sizes) * self.shards for sizes in zip(*stages, strict=True))

    @cached_property
    def _earlier_block_bytes(self) -> tuple[int, ...]:
        """Bytes of one GPU block of all ranks of earlier stages, per group."""
        groups = range(len(self.page_bytes))
        return tuple(sum(each[group] for each in self.stage_bytes[: self._stage]) * self.shards for group in groups)

    @property
    def _stage(self) -> int:
        """The pipeline stage of this rank, from 0 on."""
        return self.rank // self.stage_ranks

    @property
    def shards(self) -> int:
        """Number of ranks of a stage that hold different KV."""
        return self.stage_ranks // self.copies

    @cached_property
    def segment_starts(self) -> tuple[int, ...]:
        """First byte of this rank's segment in a row, per group; 0 in canonical rows, which have no segments."""
        if self.page_starts is not None:
            return (0,) * len(self.page_bytes)
        factor, shard = self.block_size_factor, self.rank % self.stage_ranks // self.copies
        return tuple(
            earlier * factor + shard * size
            for earlier, size in zip(self._earlier_block_bytes, self.rank_bytes, strict=True)
        )

    @cached_property
    def page_offsets(self) -> tuple[tuple[int, ...], ...]:
        """Offset of each ref's page in a row's first GPU block, per group."""
        if self.page_starts is not None:
            found = zip(self._earlier_block_bytes, self.page_starts, strict=True)
            return tuple(tuple(earlier + start for start in starts) for earlier, starts in found)
        return tuple(
            tuple(accumulate(pages[:-1], initial=start)) if pages else ()
            for start, pages in zip(self.segment_starts, self.page_bytes, strict=True)
        )

    @cached_property
    def block_strides(self) -> tuple[int, ...]:
        """Distance between this rank's pages of two GPU blocks of a row, per group."""
        return self.gpu_block_bytes if self.page_starts is None else self._whole_block_bytes

    def places(self, group: int) -> list[tuple[int, int]]:
        """Return start and size of this rank's pages in a row of ``group``, GPU block by GPU block."""
        pages = list(zip(self.page_offsets[group], self.page_bytes[group], strict=True))
        ends = [sub * self.block_strides[group] for sub in range(self.block_size_factor)]
        return [(end + start, size) for end in ends for start, size in pages]

    @property
    def part(self) -> tuple[int, int]:
        """The bytes of a row that this rank uses: the first one, and the one after the last."""
        places = [place for group in range(len(self.page_bytes)) for place in self.places(group)]
        return min(start for start, _ in places), max(start + size for start, size in places)

    @property
    def turn(self) -> tuple[int, int]:
        """This rank's number among the ranks that use about the same bytes of a row, and the number of these."""
        same = self.copies if self.page_starts is None else self.stage_ranks
        return self.rank % same, same

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
        """True if this rank writes rows: it is the first of those that hold the same KV."""
        return self.rank % self.copies == 0


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
        if not size or not layout.page_bytes[group]:
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
