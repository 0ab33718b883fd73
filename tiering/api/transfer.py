"""The load and store specs, the two sides of a copy; and places and outcomes of blocks on a medium."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tiering.errors import ConfigError, StoreError

Rows = NDArray[np.int64]
"""Row numbers or block ids: a one-dimensional int64 array."""

Place: TypeAlias = int | str
"""Place of a block: a slot number on a medium with slots, an object's name on a shared medium."""


class Done(enum.Enum):
    """Outcome of a block's I/O that did not fail."""

    DONE = "done"
    """The block was written or read."""
    ABSENT = "absent"
    """There is no block at the place."""


Outcome: TypeAlias = Done | StoreError
"""Outcome of one block: done, absent, or the error (returned instead of raised)."""


class LoadStoreSpec(ABC):
    """One side of a transfer: a set of blocks on one medium."""

    @staticmethod
    @abstractmethod
    def medium() -> str:
        """Return the name of the medium, e.g. ``"GPU"``."""


def as_rows(values: ArrayLike) -> Rows:
    """Return ``values`` as a one-dimensional int64 array, without a copy if it is one already."""
    rows = np.asarray(values, dtype=np.int64)
    return rows if rows.ndim == 1 else rows.reshape(-1)


class BlockIDsLoadStoreSpec(LoadStoreSpec):
    """One side of a transfer, given by block ids."""

    __slots__ = ("block_ids",)

    def __init__(self, block_ids: ArrayLike) -> None:
        self.block_ids: Rows = as_rows(block_ids)
        """Block ids, an int64 array."""

    def __len__(self) -> int:
        return len(self.block_ids)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.block_ids.tolist()})"


class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Blocks in the GPU's KV cache, ordered by KV-cache group.

    Within a group, the ids are logically consecutive blocks of one request. An offloaded block may span several GPU
    blocks and start before the first id; ``block_indices`` lets a worker skip that leading part. If only some blocks of
    a request are stored, the spec covers whole offloaded blocks in several runs. ``block_indices[i]`` is then the index
    of the first run and a multiple of the block size factor.

    Args:
        block_ids: ids of the GPU blocks.
        group_sizes: number of ids that belong to each KV-cache group.
        block_indices: logical index, within the request, of the first block of each group.

    Raises:
        ConfigError: the lengths disagree, or one is negative.
    """

    __slots__ = ("block_indices", "group_sizes")

    def __init__(self, block_ids: ArrayLike, group_sizes: Sequence[int], block_indices: Sequence[int]) -> None:
        self.block_ids = as_rows(block_ids)
        if sum(group_sizes) != len(self.block_ids):
            raise ConfigError(
                f"group_sizes {list(group_sizes)} add up to {sum(group_sizes)}, block_ids has {len(self.block_ids)}"
            )
        if min(group_sizes, default=0) < 0:
            raise ConfigError(f"group_sizes {list(group_sizes)} has a negative number")
        if len(group_sizes) != len(block_indices):
            raise ConfigError(f"group_sizes has {len(group_sizes)} groups, block_indices {len(block_indices)}")
        self.group_sizes: tuple[int, ...] = tuple(group_sizes)
        """Number of block ids per KV-cache group."""
        self.block_indices: tuple[int, ...] = tuple(block_indices)
        """Logical index of the first block per KV-cache group."""

    @staticmethod
    def medium() -> str:
        return "GPU"


class CPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Rows of the primary tier."""

    __slots__ = ()

    @staticmethod
    def medium() -> str:
        return "CPU"


TransferSpec = tuple[LoadStoreSpec, LoadStoreSpec]
"""Source and destination of a transfer."""
