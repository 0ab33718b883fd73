"""The pieces of a layer's KV cache, for rows that hold the heads of all ranks in order.

Such a row does not depend on the number of ranks. It holds, layer by layer, one page with all heads. If heads lie
outside of tokens in a page, the part of a rank is one piece of that page. If tokens lie outside, it has a piece for
each token.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tiering.api.engine import HeadShard
from tiering.errors import ConfigError


def head_pieces(
    layer: str, tensor: torch.Tensor, heads: HeadShard, num_blocks: int, tokens: int
) -> Iterator[tuple[int, int, int]]:
    """Yield the pieces of block 0 that are contiguous in memory and in a row, in the order of a row.

    Args:
        layer: name of the layer, for messages.
        tensor: its KV cache.
        heads: this rank's heads.
        num_blocks: number of GPU blocks.
        tokens: tokens in a block.

    Yields:
        Offset from the tensor's first element, size, and offset in the layer's page of all heads; all in elements.

    Raises:
        ConfigError: the cache has another form, so the places of its heads are not known.
    """
    shape, count = tuple(tensor.shape), heads.heads
    _, head_stride, token_stride, step = (*tensor.stride(), 0, 0, 0, 0)[:4]
    outer, inner = (count, tokens) if heads.outside else (tokens, count)
    outer_stride, inner_stride = (head_stride, token_stride) if heads.outside else (token_stride, head_stride)
    dense = inner == 1 or inner_stride == shape[-1]
    if len(shape) != 4 or shape[:3] != (num_blocks, count, tokens) or step != 1 or not dense:
        order = "heads, tokens" if heads.outside else "tokens, heads"
        raise ConfigError(
            f"layer {layer}: KV cache of shape {shape}, strides {tensor.stride()}: layout: canonical needs "
            f"({num_blocks} blocks, {count} heads, {tokens} tokens, content), in memory by {order}; set layout: plain"
        )
    size = inner * shape[3]
    for index in range(outer):
        place = heads.shard * outer + index if heads.outside else index * heads.shards + heads.shard
        yield index * outer_stride, size, place * size
