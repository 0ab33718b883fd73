"""KV caches of known content in the layouts that engines use, and rows for the copy tests."""

from __future__ import annotations

import numpy as np
import torch

from tiering.api.engine import CanonicalKVCaches, KVCacheGroup
from tiering.copy.canonical import canonicalize
from tiering.copy.layout import RowLayout

NUM_BLOCKS = 24
LAYERS = ("l0", "l1", "l2")


def fill(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Fill all memory of the tensor with random bytes, including memory outside of its shape."""
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    raw.copy_(torch.randint(0, 256, raw.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8))
    return tensor


def block_first(seed: int = 1) -> dict[str, torch.Tensor]:
    """Return layers of (num_blocks, heads, tokens, 2 * head size), bfloat16, each in its own memory."""
    return {
        name: fill(torch.empty(NUM_BLOCKS, 2, 4, 10, dtype=torch.bfloat16), seed + i) for i, name in enumerate(LAYERS)
    }


def split_kv(seed: int = 1) -> dict[str, torch.Tensor]:
    """Return layers of (2, num_blocks, tokens, heads, head size), float16, each in its own memory."""
    return {
        name: fill(torch.empty(2, NUM_BLOCKS, 4, 2, 5, dtype=torch.float16), seed + i) for i, name in enumerate(LAYERS)
    }


def split_kv_blocks_outside(seed: int = 1) -> dict[str, torch.Tensor]:
    """Return layers with the shape of :func:`split_kv` whose memory is ordered by blocks."""
    return {
        name: fill(torch.empty(NUM_BLOCKS, 2, 4, 2, 5, dtype=torch.float16), seed + i).transpose(0, 1)
        for i, name in enumerate(LAYERS)
    }


def one_storage(seed: int = 1) -> dict[str, torch.Tensor]:
    """Return layers that lie one behind the other in one storage."""
    pool = fill(torch.empty(len(LAYERS), NUM_BLOCKS, 3, 7, dtype=torch.float32), seed)
    return {name: pool[i] for i, name in enumerate(LAYERS)}


def padded(seed: int = 1) -> dict[str, torch.Tensor]:
    """Return layers whose pages are 24 bytes of 40; the others are padding."""
    return {
        name: fill(torch.empty(NUM_BLOCKS, 40, dtype=torch.uint8), seed + i)[:, :24] for i, name in enumerate(LAYERS)
    }


def interleaved(seed: int = 1) -> dict[str, torch.Tensor]:
    """Return layers that lie side by side in each block: (num_blocks, layers, page)."""
    pool = fill(torch.empty(NUM_BLOCKS, len(LAYERS), 36, dtype=torch.float8_e4m3fn), seed)
    return {name: pool[:, i] for i, name in enumerate(LAYERS)}


def interleaved_heads(seed: int = 1) -> dict[str, torch.Tensor]:
    """Return layers that lie side by side in each head: (num_blocks, heads, layers, tokens, head size)."""
    pool = fill(torch.empty(NUM_BLOCKS, 4, len(LAYERS), 8, 16, dtype=torch.bfloat16), seed)
    return {name: pool[:, :, i] for i, name in enumerate(LAYERS)}


def finer_kernel_blocks(seed: int = 1) -> dict[str, torch.Tensor]:
    """Return layers for attention kernels whose blocks have half the size: twice as many blocks."""
    return {name: fill(torch.empty(2 * NUM_BLOCKS, 2, 3, dtype=torch.int16), seed + i) for i, name in enumerate(LAYERS)}


LAYOUTS = {
    layout.__name__: layout
    for layout in (
        block_first,
        split_kv,
        split_kv_blocks_outside,
        one_storage,
        padded,
        interleaved,
        interleaved_heads,
        finer_kernel_blocks,
    )
}


def one_group() -> list[KVCacheGroup]:
    return [KVCacheGroup(LAYERS, 16)]


def canonical(layout: str = "block_first", seed: int = 1) -> CanonicalKVCaches:
    return canonicalize(LAYOUTS[layout](seed), one_group(), NUM_BLOCKS)


def two_groups(seed: int = 1) -> CanonicalKVCaches:
    """Return two groups of different page sizes with a common layer (l0 and w0 share memory)."""
    shared = fill(torch.empty(NUM_BLOCKS, 48, dtype=torch.uint8), seed)
    tensors = {
        "l0": shared,
        "l1": fill(torch.empty(NUM_BLOCKS, 32, dtype=torch.uint8), seed + 1),
        "w0": shared[:, :40],
    }
    groups = [KVCacheGroup(("l0", "l1"), 16), KVCacheGroup(("w0",), 16, sliding_window=32, kind="sliding_window")]
    return canonicalize(tensors, groups, NUM_BLOCKS)


def make_rows(layout: RowLayout, num_rows: int = 12, seed: int = 99) -> np.ndarray:
    """Return rows full of random bytes, so that bytes which no copy writes are recognised."""
    return np.random.default_rng(seed).integers(0, 256, (num_rows, layout.row_stride), dtype=np.uint8)


def page(kv: CanonicalKVCaches, group: int, ref: int, block: int) -> bytes:
    """Return one layer's page of one GPU block."""
    reference = kv.group_data_refs[group][ref]
    return bytes(kv.tensors[reference.tensor_idx].tensor[block, : reference.page_size_bytes].numpy().tobytes())


def gpu_block(kv: CanonicalKVCaches, group: int, block: int) -> bytes:
    """Return all bytes of a GPU block in the order of a row."""
    return b"".join(page(kv, group, ref, block) for ref in range(len(kv.group_data_refs[group])))
