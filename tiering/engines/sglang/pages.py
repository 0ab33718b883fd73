"""Pages of SGLang's host pools as the bytes of a row, and back.

A pool shows where the parts of a page lie (``get_page_buffer_meta``), so that the bytes are copied once. A pool that
does not, for its layout or its kind, gives and takes whole pages, which costs a second copy.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiering.errors import ConfigError
from tiering.manager.prompts import CopyBlock

logger = logging.getLogger("kv_tiering.sglang")

_REPLICATED = frozenset({"MLATokenToKVPoolHost", "DSAIndexerPoolHost", "DeepSeekV4PagedHostPool"})
"""Classes of pools that hold the same bytes on all ranks, if the model's KV is replicated."""

_UNKNOWN_OWNERS = frozenset({"PageInterleaveHostPool", "UnifiedPageEnvelopeHostPool"})
"""Classes of pools whose pages belong to several ranks or several pools."""

_FACTS = (
    *("layout", "layer_num", "target_layer_num", "start_layer", "end_layer", "head_num", "head_dim", "v_head_dim"),
    *("head_group_num", "kv_cache_dim", "storage_format_tag", "item_bytes", "num_mamba_layers", "conv_state_shapes"),
    *("temporal_state_elem_size", "conv_state_elem_sizes", "indexer_page_stride_size", "slot_page_size"),
)
"""Attributes of pools on which the bytes of a page depend."""


@dataclass(frozen=True, slots=True)
class PageMemory:
    """The pages of one host pool."""

    pool: Any
    name: str
    page_size: int
    """Number of indices of a page."""
    nbytes: int
    """Bytes of a page."""
    sizes: tuple[int, ...]
    """Bytes of the parts of a page; empty if the pool gives and takes whole pages."""
    dtype: Any
    """Type of the elements of a whole page; None if pages have parts."""
    is_replicated: bool
    """True if all tensor-parallel ranks hold the same bytes."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """The facts that the bytes of a page depend on, as plain data."""
        known = {word: str(value) for word in _FACTS if (value := getattr(self.pool, word, None)) is not None}
        dtypes = {word: str(getattr(self.pool, word)) for word in dir(self.pool) if word.endswith("dtype")}
        kind = type(self.pool).__name__
        return {"class": kind, "page": self.page_size, "parts": self.sizes, "bytes": self.nbytes, **known, **dtypes}

    def copies(self, indices: Any, count: int) -> tuple[CopyBlock, CopyBlock] | None:
        """Return the functions that copy pages from, and to, rows; None if the indices do not fit.

        Args:
            indices: SGLang's host indices, :attr:`page_size` for each page.
            count: number of pages.
        """
        if indices is None or len(indices) != count * self.page_size:
            return None
        indices = indices.cpu()
        if not self.sizes:
            firsts = indices[:: self.page_size].tolist()
            return (
                lambda n, row: self.pool.set_from_flat_data_page(firsts[n], self._page(row)),
                lambda n, row: _fill(row, self.pool.get_data_page(firsts[n], flat=True), self.nbytes),
            )
        places, sizes = self.pool.get_page_buffer_meta(indices)
        if list(sizes) != list(self.sizes) * count:
            return None
        width = len(self.sizes)
        parts = [places[n * width : (n + 1) * width] for n in range(count)]

        def copy(to_row: bool, n: int, row: NDArray[np.uint8]) -> None:
            address = row.ctypes.data
            for place, size in zip(parts[n], self.sizes, strict=True):
                target, source = (address, place) if to_row else (place, address)
                ctypes.memmove(target, source, size)
                address += size

        return partial(copy, False), partial(copy, True)

    def _page(self, row: NDArray[np.uint8]) -> Any:
        """Return a row as a whole page, without a copy."""
        import torch

        return torch.from_numpy(row[: self.nbytes]).view(self.dtype)


def page_memory(name: str, pool: Any, *, by_parts: bool, replicated: bool) -> PageMemory | None:
    """Return the pages of a host pool; None if it has no memory of its own.

    Args:
        name: SGLang's name of the pool.
        pool: the host pool.
        by_parts: False if SGLang gives and takes this pool's pages whole.
        replicated: True if the model's KV is the same on all tensor-parallel ranks.

    Raises:
        ConfigError: pages of this kind of pool are not known.
    """
    import torch

    kind = type(pool).__name__
    if kind in _UNKNOWN_OWNERS:
        raise ConfigError(f"host pool {name}: a {kind} shares pages between ranks or pools; SGLang can store it itself")
    if kind == "LogicalHostPool" or getattr(pool, "_is_dummy", False):
        return None
    page_size = int(getattr(pool, "page_size", 1) or 1)
    sizes: tuple[int, ...] = ()  # a layout without parts has whole pages only
    if by_parts:
        try:
            _, found = pool.get_page_buffer_meta(torch.arange(page_size, dtype=torch.int64))
            sizes = tuple(int(size) for size in found)
        except (ValueError, NotImplementedError, AttributeError) as error:
            logger.info("host pool %s: pages are copied twice: %s", name, error)
    replicated = replicated and kind in _REPLICATED
    if sizes:
        return PageMemory(pool, name, page_size, sum(sizes), sizes, None, replicated)
    try:
        page = pool.get_dummy_flat_data_page()
    except (ValueError, NotImplementedError, AttributeError) as error:
        raise ConfigError(f"host pool {name}: it has no whole pages ({error}); set interface_v1 to 1") from error
    return PageMemory(pool, name, page_size, int(page.nbytes), (), page.dtype, replicated)


def bytes_of(tensor: Any) -> NDArray[np.uint8]:
    """Return the bytes of a contiguous tensor in CPU memory, without a copy."""
    import torch

    return np.asarray(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())


def fill_tensor(tensor: Any, row: NDArray[np.uint8]) -> None:
    """Copy a row's first bytes into a contiguous tensor.

    Raises:
        ValueError: the tensor is not contiguous.
    """
    if not tensor.is_contiguous():
        raise ValueError("the target of a page is not contiguous")
    target = bytes_of(tensor)
    np.copyto(target, row[: len(target)])


def tensor_copies(tensors: Sequence[Any], nbytes: int) -> tuple[CopyBlock, CopyBlock] | None:
    """Return the functions that copy to, and from, whole pages in tensors; None if one has another size."""
    if any(tensor is None or int(tensor.nbytes) != nbytes for tensor in tensors):
        return None
    read: Callable[[int, NDArray[np.uint8]], None] = lambda n, row: fill_tensor(tensors[n], row)  # noqa: E731
    return read, lambda n, row: _fill(row, tensors[n], nbytes)


def _fill(row: NDArray[np.uint8], tensor: Any, nbytes: int) -> None:
    """Copy a whole page into a row.

    Raises:
        ValueError: the page has another size than all others of its pool.
    """
    source = bytes_of(tensor)
    if len(source) != nbytes:
        raise ValueError(f"a page has {len(source)} bytes instead of {nbytes}")
    np.copyto(row[:nbytes], source)
