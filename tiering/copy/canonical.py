"""From an engine's KV-cache tensors, whatever their layout, to unique int8 tensors that begin with the block dimension.

Decided by shapes and strides alone.  The dimensions that lie outside the block dimension in memory, such as the 2 of
(2, num_blocks, ...), are split into tensors of their own; those inside must be dense and make up a page, in any order.  Bytes are
never moved: every canonical tensor is a view of the engine's memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import torch

from tiering.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, KVCacheGroup
from tiering.errors import ConfigError

ALL_LAYERS = "ALL_LAYERS"
"""The pseudo-layer of an engine that keeps the KV of all layers in one tensor."""


def infer_num_blocks(kv_caches: Mapping[str, torch.Tensor]) -> int:
    """The number of GPU blocks, if the tensors agree about it: their first dimension, or the second where the first is 2.

    Raises :class:`ConfigError` if they do not; the engine must then say it.
    """
    found = {tensor.shape[1] if tensor.shape[0] == 2 and tensor.dim() > 1 else tensor.shape[0] for tensor in kv_caches.values()}
    if len(found) != 1:
        raise ConfigError(f"the KV-cache tensors do not agree on the number of blocks ({sorted(found)}); pass num_blocks")
    return int(found.pop())


def canonicalize(
    kv_caches: Mapping[str, torch.Tensor], groups: Sequence[KVCacheGroup], num_blocks: int | None = None
) -> CanonicalKVCaches:
    """The canonical form of ``kv_caches`` (layer name → tensor) of an engine with ``num_blocks`` GPU blocks.

    Layers that share memory (one group's layers reusing another layer's KV, or groups that share a pool of tensors) share a
    canonical tensor, and a group refers to it once.  A tensor with a whole multiple of ``num_blocks`` blocks (attention kernels with
    smaller blocks than the scheduler's) is taken to hold each block in neighbouring parts.

    Raises :class:`ConfigError` naming the layer for what cannot be brought into this form.
    """
    if not kv_caches:
        raise ConfigError("the engine registered no KV-cache tensors")
    for name, tensor in kv_caches.items():
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(
                f"layer {name}: its KV cache is a {type(tensor).__name__}, not a tensor; state-space layers cannot be offloaded"
            )
        if tensor.dim() == 0 or tensor.numel() == 0:
            raise ConfigError(f"layer {name}: its KV cache of shape {tuple(tensor.shape)} is empty")
    blocks = infer_num_blocks(kv_caches) if num_blocks is None else num_blocks
    builder = _Builder(blocks)
    refs = []
    for index, group in enumerate(groups):
        pages: dict[int, int] = {}
        for layer in group.layer_names:
            if layer not in kv_caches:
                raise ConfigError(
                    f"layer {layer} of KV-cache group {index} has no KV-cache tensor; registered are {', '.join(kv_caches)}"
                )
            for tensor_idx, page in builder.add(layer, kv_caches[layer]):
                pages[tensor_idx] = max(page, pages.get(tensor_idx, 0))
        if not pages:
            raise ConfigError(f"KV-cache group {index} has no layers")
        refs.append(tuple(CanonicalKVCacheRef(tensor_idx, page) for tensor_idx, page in pages.items()))
    known = len(builder.tensors)
    for layer, tensor in kv_caches.items():
        builder.add(layer, tensor)
        if len(builder.tensors) != known:
            raise ConfigError(f"layer {layer} has KV of its own but is in no KV-cache group: what it holds would be lost")
    return CanonicalKVCaches(tuple(builder.tensors), tuple(refs))


def canonicalize_cross_layers(
    kv_cache: torch.Tensor, groups: Sequence[KVCacheGroup], num_blocks: int | None = None
) -> CanonicalKVCaches:
    """The canonical form of one tensor that holds all layers, of an engine with one KV-cache group.

    Raises :class:`ConfigError` like :func:`canonicalize`, and for more than one group.
    """
    if len(groups) != 1:
        raise ConfigError(f"a KV cache over all layers needs exactly one KV-cache group, the engine has {len(groups)}")
    (group,) = groups
    return canonicalize(
        {ALL_LAYERS: kv_cache}, [KVCacheGroup((ALL_LAYERS,), group.gpu_block_size, group.sliding_window, group.kind)], num_blocks
    )


class _Builder:
    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ConfigError(f"num_blocks {num_blocks} is not a positive number")
        self.num_blocks = num_blocks
        self.tensors: list[CanonicalKVCacheTensor] = []
        self._known: dict[tuple[int, int], int] = {}
        """(address of block 0, distance of two blocks in bytes) → index in ``tensors``."""

    def add(self, layer: str, tensor: torch.Tensor) -> list[tuple[int, int]]:
        """(index of the canonical tensor, unpadded page bytes) of each part of ``layer``."""
        found = []
        for offset, stride, page in self._parts(layer, tensor):
            key = (tensor.untyped_storage().data_ptr() + offset, stride)
            if key not in self._known:
                self._known[key] = len(self.tensors)
                self.tensors.append(self._view(tensor, offset, stride, page))
            tensor_idx = self._known[key]
            if self.tensors[tensor_idx].page_size_bytes < page:
                self.tensors[tensor_idx] = self._view(tensor, offset, stride, page)
            found.append((tensor_idx, page))
        return found

    def _view(self, tensor: torch.Tensor, offset: int, stride: int, page: int) -> CanonicalKVCacheTensor:
        storage = tensor.untyped_storage()
        # Padding is part of the page where the storage has it behind every block; the last one's may be missing.
        width = stride if offset + self.num_blocks * stride <= storage.nbytes() else page
        raw = torch.empty(0, dtype=torch.int8, device=tensor.device)
        raw.set_(storage, offset, (self.num_blocks, width), (stride, 1))
        return CanonicalKVCacheTensor(raw, width)

    def _parts(self, layer: str, tensor: torch.Tensor) -> Iterator[tuple[int, int, int]]:
        """(byte offset of block 0 in the storage, bytes from one block to the next, unpadded page bytes), in logical order."""
        dim, ratio = self._block_dim(layer, tensor)
        item = tensor.element_size()
        step = tensor.stride(dim)
        others = [(tensor.shape[d], tensor.stride(d), d) for d in range(tensor.dim()) if d != dim and tensor.shape[d] > 1]
        inner = sorted((stride, size) for size, stride, _ in others if stride < step)
        dense = 1
        for stride, size in inner:
            if stride != dense:
                raise ConfigError(f"layer {layer}: {self._describe(tensor)}: a block's page is not contiguous in memory")
            dense *= size
        if dense > step:
            raise ConfigError(f"layer {layer}: {self._describe(tensor)}: blocks overlap in memory")
        if ratio > 1 and dense != step:
            raise ConfigError(f"layer {layer}: {self._describe(tensor)}: the {ratio} parts of a block are not contiguous in memory")
        outer = [(size, stride) for size, stride, _ in others if stride >= step]
        span = tensor.shape[dim] * step
        if any(stride < span for _, stride in outer):
            raise ConfigError(f"layer {layer}: {self._describe(tensor)}: blocks are interleaved with another dimension")
        for index in product(*(range(size) for size, _ in outer)):
            start = tensor.storage_offset() + sum(i * stride for i, (_, stride) in zip(index, outer, strict=True))
            yield int(start) * item, step * ratio * item, dense * ratio * item

    def _block_dim(self, layer: str, tensor: torch.Tensor) -> tuple[int, int]:
        """Which dimension the blocks are, and how many of its entries one block has."""
        n = self.num_blocks
        first, second = [*tensor.shape, 0][:2]
        if second == n and first % n == 0 and (first > n or n == 2):
            raise ConfigError(f"layer {layer}: {self._describe(tensor)}: either of the first two dimensions may be the blocks")
        for dim in (0, 1):
            if tensor.dim() > dim and tensor.shape[dim] == n:
                return dim, 1
        for dim in (0, 1):
            if tensor.dim() > dim and tensor.shape[dim] > n and tensor.shape[dim] % n == 0:
                return dim, tensor.shape[dim] // n
        raise ConfigError(
            f"layer {layer}: {self._describe(tensor)}: neither of the first two dimensions is the {n} blocks of the engine"
        )

    def _describe(self, tensor: torch.Tensor) -> str:
        return f"KV cache of shape {tuple(tensor.shape)}, strides {tensor.stride()}, {self.num_blocks} blocks"
