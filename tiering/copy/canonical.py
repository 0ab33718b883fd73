"""The canonical form of an engine's KV-cache tensors: int8 tensors with the block as first dimension.

Only shapes and strides determine this form. Dimensions outside the block dimension in memory, such as the 2 of (2,
num_blocks, ...), are split into tensors of their own. Dimensions inside the block dimension make up a page. A page is
dense bytes in any order, or a few long pieces with pieces of other layers between them. Pieces of a group that are
neighbours in every block are joined to one page. For an engine that keeps all layers of a block together, that page is
the whole block. Bytes are never moved: every canonical tensor is a view of the engine's memory.

In rows with the heads of all ranks in order, each page also has its place between those of the other ranks
(:mod:`tiering.copy.heads`). Only pieces that are neighbours there too are joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeAlias

import torch

from tiering.api.engine import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    HeadShard,
    KVCacheGroup,
)
from tiering.copy.heads import head_pieces
from tiering.errors import ConfigError

ALL_LAYERS = "ALL_LAYERS"
"""Name of the pseudo-layer of an engine that keeps the KV of all layers in one tensor."""

_SMALLEST_PIECE = 256
"""Smallest piece of a page in bytes. Copies of smaller pieces would cost more than they save."""


LayerCache: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
"""The KV-cache tensor of a layer; or the tensors of its state, each with the block as first dimension."""


def infer_num_blocks(kv_caches: Mapping[str, LayerCache]) -> int:
    """Return the number of GPU blocks: each tensor's first dimension, or its second where the first is 2.

    Raises:
        ConfigError: the tensors do not agree; the engine must then pass the number.
    """
    found = {
        tensor.shape[1] if tensor.shape[0] == 2 and tensor.dim() > 1 else tensor.shape[0]
        for cache in kv_caches.values()
        for tensor in _tensors(cache)
    }
    if len(found) != 1:
        raise ConfigError(
            f"the KV-cache tensors do not agree on the number of blocks ({sorted(found)}); pass num_blocks"
        )
    return int(found.pop())


def canonicalize(
    kv_caches: Mapping[str, LayerCache],
    groups: Sequence[KVCacheGroup],
    num_blocks: int | None = None,
    heads: HeadShard | None = None,
) -> CanonicalKVCaches:
    """Return the canonical form of an engine's KV cache.

    Layers that share memory share a canonical tensor, and a group refers to that tensor once. Layers share memory when
    one reuses another's KV, or when groups share a pool of tensors. A tensor with a whole multiple of ``num_blocks``
    blocks (attention kernels with smaller blocks than the scheduler's) holds each block in neighbouring parts.

    Args:
        kv_caches: KV-cache tensor of each layer, or the tensors of its state, by layer name.
        groups: the engine's KV-cache groups.
        num_blocks: number of GPU blocks; default: inferred from the tensors.
        heads: this rank's heads, if rows hold the heads of all ranks in order; default: rows hold the ranks' pages side
            by side.

    Raises:
        ConfigError: a layer cannot be brought into this form; the message names the layer and the reason.
    """
    if not kv_caches:
        raise ConfigError("the engine registered no KV-cache tensors")
    for name, cache in kv_caches.items():
        tensors = _tensors(cache)
        if not tensors or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            raise ConfigError(
                f"layer {name}: its KV cache is a {type(cache).__name__}, neither a tensor nor the tensors of a state"
            )
        for tensor in tensors:
            if tensor.dim() == 0 or tensor.numel() == 0:
                raise ConfigError(f"layer {name}: its KV cache of shape {tuple(tensor.shape)} is empty")
    blocks = infer_num_blocks(kv_caches) if num_blocks is None else num_blocks
    builder = _Builder(blocks, heads)
    refs = []
    own: set[tuple[int, int]] = set()
    for index, group in enumerate(groups):
        pieces: dict[tuple[int, int], _Piece] = {}
        end = 0
        for layer in group.layer_names:
            if layer not in kv_caches:
                raise ConfigError(
                    f"layer {layer} of KV-cache group {index} has no KV-cache tensor; "
                    f"registered are {', '.join(kv_caches)}"
                )
            found = list(builder.pieces(layer, kv_caches[layer], group.gpu_block_size))
            if heads is not None:
                if pieces.keys() >= {piece.place for piece in found}:
                    continue  # the layer reads another layer's KV
                found = [piece.moved(end) for piece in found]
                end += heads.shards * sum(piece.nbytes for piece in found)
            for piece in found:
                known = pieces.get(piece.place)
                if known is None or known.nbytes < piece.nbytes:
                    pieces[piece.place] = piece
        own.update(pieces)
        refs.append(tuple(map(builder.add, _joined(pieces.values()))))
    grouped = {layer for group in groups for layer in group.layer_names}
    for layer, cache in kv_caches.items():
        if layer not in grouped and any(piece.place not in own for piece in builder.pieces(layer, cache, None)):
            raise ConfigError(f"layer {layer} has KV of its own but is in no KV-cache group: its blocks would be lost")
    return CanonicalKVCaches(tuple(builder.tensors), tuple(refs))


def canonicalize_cross_layers(
    kv_cache: torch.Tensor, groups: Sequence[KVCacheGroup], num_blocks: int | None = None
) -> CanonicalKVCaches:
    """Return the canonical form of one tensor that holds all layers of the only KV-cache group.

    Raises:
        ConfigError: as :func:`canonicalize` does, and for more than one group.
    """
    if len(groups) != 1:
        raise ConfigError(f"a KV cache over all layers needs exactly one KV-cache group, the engine has {len(groups)}")
    (group,) = groups
    return canonicalize(
        {ALL_LAYERS: kv_cache},
        [KVCacheGroup((ALL_LAYERS,), group.gpu_block_size, group.sliding_window, group.kind)],
        num_blocks,
    )


def _tensors(cache: LayerCache) -> Sequence[torch.Tensor]:
    return (cache,) if isinstance(cache, torch.Tensor) else cache if isinstance(cache, Sequence) else ()


@dataclass(frozen=True, slots=True)
class _Piece:
    """Contiguous bytes of every block."""

    address: int
    """Address of the piece in block 0."""
    stride: int
    """Bytes from the piece in one block to the piece in the next."""
    nbytes: int
    tensor: torch.Tensor
    """Tensor whose storage holds the piece."""
    row_offset: int | None = None
    """Offset in a GPU block with the heads of all ranks; None if the ranks' pages lie side by side."""

    def moved(self, start: int) -> _Piece:
        """Return the piece with a place in the row that is ``start`` bytes further."""
        return replace(self, row_offset=start + (self.row_offset or 0))

    def is_followed_by(self, other: _Piece) -> bool:
        """Return True if ``other`` is as far away in a canonical row as it is in memory."""
        if self.row_offset is None or other.row_offset is None:
            return True
        return other.row_offset - self.row_offset == other.address - self.address

    @property
    def place(self) -> tuple[int, int]:
        return self.address, self.stride


def _joined(pieces: Iterable[_Piece]) -> list[_Piece]:
    """Join the pieces that touch or overlap in every block; the order of first appearance is kept."""
    order = {piece.place: index for index, piece in enumerate(pieces)}
    found: list[tuple[int, _Piece]] = []
    for piece in sorted(pieces, key=lambda piece: piece.address):
        if found:
            first, last = found[-1]
            nbytes = max(last.nbytes, piece.address - last.address + piece.nbytes)
            same_memory = last.tensor.untyped_storage().data_ptr() == piece.tensor.untyped_storage().data_ptr()
            touch = last.stride == piece.stride >= nbytes and last.address + last.nbytes >= piece.address
            if same_memory and touch and last.is_followed_by(piece):
                found[-1] = min(first, order[piece.place]), replace(last, nbytes=nbytes)
                continue
        found.append((order[piece.place], piece))
    return [piece for _, piece in sorted(found, key=lambda entry: entry[0])]


class _Builder:
    def __init__(self, num_blocks: int, heads: HeadShard | None) -> None:
        if num_blocks < 1:
            raise ConfigError(f"num_blocks {num_blocks} is not a positive number")
        self.num_blocks = num_blocks
        self.heads = heads
        self.tensors: list[CanonicalKVCacheTensor] = []
        self._known: dict[tuple[int, int], int] = {}
        """Place → index in ``tensors``."""

    def add(self, piece: _Piece) -> CanonicalKVCacheRef:
        """Return a reference to ``piece``, whose tensor may exist already for another group or size."""
        index = self._known.setdefault(piece.place, len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(self._view(piece))
        elif self.tensors[index].page_size_bytes < piece.nbytes:
            self.tensors[index] = self._view(piece)
        return CanonicalKVCacheRef(index, piece.nbytes, piece.row_offset)

    def _view(self, piece: _Piece) -> CanonicalKVCacheTensor:
        storage, stride = piece.tensor.untyped_storage(), piece.stride
        offset = piece.address - storage.data_ptr()
        # Padding is part of the page where the storage has it behind every block; that of the last block may be
        # missing.
        width = stride if offset + self.num_blocks * stride <= storage.nbytes() else piece.nbytes
        raw = torch.empty(0, dtype=torch.int8, device=piece.tensor.device)
        raw.set_(storage, offset, (self.num_blocks, width), (stride, 1))
        return CanonicalKVCacheTensor(raw, width)

    def pieces(self, layer: str, cache: LayerCache, tokens: int | None) -> Iterator[_Piece]:
        """Yield the pieces that ``layer`` has of each block, in logical order.

        Args:
            layer: name of the layer.
            cache: its KV cache.
            tokens: tokens in a block; None: the layer is in no group.
        """
        if self.heads is not None and tokens is not None:
            yield from self._head_pieces(layer, cache, self.heads, tokens)
            return
        if isinstance(cache, torch.Tensor):
            yield from self._pieces(layer, cache, *self._block_dim(layer, cache))
            return
        for tensor in cache:
            if tensor.shape[0] != self.num_blocks:
                raise ConfigError(
                    f"layer {layer}: {self._describe(tensor)}: the first dimension of a state is not the blocks"
                )
            yield from self._pieces(layer, tensor, 0, 1)

    def _head_pieces(self, layer: str, cache: LayerCache, heads: HeadShard, tokens: int) -> Iterator[_Piece]:
        """Yield the pieces of a layer that lie together in rows with the heads of all ranks."""
        if not isinstance(cache, torch.Tensor):
            raise ConfigError(f"layer {layer}: a state has no KV heads; set layout: plain")
        base, item = cache.untyped_storage().data_ptr(), cache.element_size()
        found = list(head_pieces(layer, cache, heads, self.num_blocks, tokens))
        stride = int(cache.stride(0)) * item
        next(self._pieces(layer, cache, 0, 1))  # it refuses blocks that overlap in memory before its first piece
        for start, size, row_offset in found:
            address = base + (int(cache.storage_offset()) + start) * item
            yield _Piece(address, stride, size * item, cache, row_offset * item)

    def _pieces(self, layer: str, tensor: torch.Tensor, dim: int, ratio: int) -> Iterator[_Piece]:
        """Yield the pieces of one tensor, whose block dimension has ``ratio`` entries for each block."""
        item = tensor.element_size()
        step = tensor.stride(dim)
        others = [(tensor.shape[d], tensor.stride(d)) for d in range(tensor.dim()) if d != dim and tensor.shape[d] > 1]
        dense = extent = 1
        apart = set()
        for stride, size in sorted((stride, size) for size, stride in others if stride < step):
            if stride == dense == extent:
                dense = extent = dense * size
            elif stride < extent:
                raise ConfigError(f"layer {layer}: {self._describe(tensor)}: a block overlaps with itself in memory")
            else:
                extent += stride * (size - 1)
                apart.add(stride)
        if apart and dense * item < _SMALLEST_PIECE:
            raise ConfigError(f"layer {layer}: {self._describe(tensor)}: a block's page is not contiguous in memory")
        if extent > step:
            raise ConfigError(f"layer {layer}: {self._describe(tensor)}: blocks overlap in memory")
        if ratio > 1 and dense != step:
            raise ConfigError(
                f"layer {layer}: {self._describe(tensor)}: the {ratio} parts of a block are not contiguous in memory"
            )
        span = tensor.shape[dim] * step
        if any(step <= stride < span for _, stride in others):
            raise ConfigError(f"layer {layer}: {self._describe(tensor)}: blocks are interleaved with another dimension")
        split = [(size, stride) for size, stride in others if stride >= step or stride in apart]
        base = tensor.untyped_storage().data_ptr()
        for index in product(*(range(size) for size, _ in split)):
            start = tensor.storage_offset() + sum(i * stride for i, (_, stride) in zip(index, split, strict=True))
            yield _Piece(base + int(start) * item, step * ratio * item, dense * ratio * item, tensor)

    def _block_dim(self, layer: str, tensor: torch.Tensor) -> tuple[int, int]:
        """Return the block dimension, and the number of its entries that make up one block."""
        n = self.num_blocks
        first, second = [*tensor.shape, 0][:2]
        if second == n and first % n == 0 and (first > n or n == 2):
            raise ConfigError(
                f"layer {layer}: {self._describe(tensor)}: either of the first two dimensions may be the blocks"
            )
        for dim in (0, 1):
            if tensor.dim() > dim and tensor.shape[dim] == n:
                return dim, 1
        for dim in (0, 1):
            if tensor.dim() > dim and tensor.shape[dim] > n and tensor.shape[dim] % n == 0:
                return dim, tensor.shape[dim] // n
        raise ConfigError(
            f"layer {layer}: {self._describe(tensor)}: "
            f"neither of the first two dimensions is the {n} blocks of the engine"
        )

    def _describe(self, tensor: torch.Tensor) -> str:
        return f"KV cache of shape {tuple(tensor.shape)}, strides {tensor.stride()}, {self.num_blocks} blocks"
