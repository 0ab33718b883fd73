"""Load/store specs: the two sides of a transfer, as block ids of one medium."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tiering.errors import ConfigError

Rows = NDArray[np.int64]
"""Row numbers (or block ids): a one-dimensional int64 array."""


class LoadStoreSpec(ABC):
    """One side of a transfer: which blocks, on which medium."""

    @staticmethod
    @abstractmethod
    def medium() -> str:
        """The name of the medium, e.g. ``"GPU"``."""


def as_rows(values: ArrayLike) -> Rows:
    """``values`` as a one-dimensional int64 array (not copied if it is one already)."""
    rows = np.asarray(values, dtype=np.int64)
    return rows if rows.ndim == 1 else rows.reshape(-1)


class BlockIDsLoadStoreSpec(LoadStoreSpec):
    """A side of a transfer that is described by block ids, held as an int64 array in ``block_ids``."""

    __slots__ = ("block_ids",)

    def __init__(self, block_ids: ArrayLike) -> None:
        self.block_ids: Rows = as_rows(block_ids)

    def __len__(self) -> int:
        return len(self.block_ids)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.block_ids.tolist()})"


class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Blocks in the accelerator's KV cache, ordered by KV-cache group.

    ``group_sizes[i]`` of the ids belong to group i.  Within a group they are logically consecutive blocks of one
    request, and ``block_indices[i]`` is the logical index of the first, so that a worker can skip the leading part of
    an offloaded block that is larger than a GPU block and not aligned with it.  Where only some blocks of a request are
    stored, the spec covers whole offloaded blocks, in runs (``block_indices[i]`` is then that of the first run, and a
    multiple of the block size factor).

    Raises :class:`ConfigError` if the lengths disagree.
    """

    __slots__ = ("block_indices", "group_sizes")

    def __init__(self, block_ids: ArrayLike, group_sizes: Sequence[int], block_indices: Sequence[int]) -> None:
        super().__init__(block_ids)
        if sum(group_sizes) != len(self.block_ids):
            raise ConfigError(
                f"group_sizes {list(group_sizes)} add up to {sum(group_sizes)}, block_ids has {len(self.block_ids)}"
            )
        if len(group_sizes) != len(block_indices):
            raise ConfigError(f"group_sizes has {len(group_sizes)} groups, block_indices {len(block_indices)}")
        self.group_sizes: tuple[int, ...] = tuple(group_sizes)
        self.block_indices: tuple[int, ...] = tuple(block_indices)

    @staticmethod
    def medium() -> str:
        return "GPU"


class CPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Rows of the primary tier's buffer."""

    __slots__ = ()

    @staticmethod
    def medium() -> str:
        return "CPU"


TransferSpec = tuple[LoadStoreSpec, LoadStoreSpec]
"""(source, destination) of a transfer."""
