"""Copies between tensors of any layout and a row, for programs without an engine's KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Row = NDArray[np.uint8]
"""One row of the CPU tier, 1-D, or the start of one."""


def pack_block(row: Row, tensors: Sequence[torch.Tensor]) -> None:
    """Copy tensors to a row, one behind the other.

    Args:
        row: the row of a block.
        tensors: the block's KV, layer by layer, on any device, contiguous or not.

    Raises:
        ValueError: the tensors are larger than the row.

    """
    for part, tensor in _parts(row, tensors):
        part.copy_(tensor.contiguous().view(-1).view(part.dtype))


def unpack_block(row: Row, tensors: Sequence[torch.Tensor]) -> None:
    """Copy a row to tensors with the shapes and dtypes that :func:`pack_block` had.

    Raises:
        ValueError: the tensors are larger than the row.

    """
    for part, tensor in _parts(row, tensors):
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))  # A clone is aligned for every dtype.


def _parts(row: Row, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the bytes of the row for each tensor, and the tensor."""
    import torch

    total = sum(tensor.nbytes for tensor in tensors)
    if total > row.nbytes:
        raise ValueError(f"a block of {total} bytes does not fit a row of {row.nbytes} bytes")
    start = 0
    for tensor in tensors:
        yield torch.from_numpy(row[start : start + tensor.nbytes]), tensor
        start += tensor.nbytes
