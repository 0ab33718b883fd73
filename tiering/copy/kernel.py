"""The Triton kernel that gathers and scatters the pages of GPU blocks.

Triton comes with torch for CUDA. One launch moves all layers of all blocks. Launches per layer cost the engine's thread
about 30 µs each, which is longer than small pages need to cross the bus.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tiering.copy.pages import DeviceGroup

_TILE = tl.constexpr(1024)
"""Words that a program moves at once."""
_TILES = tl.constexpr(4)
"""Tiles of a page that one program moves, one after the other."""


def move_pages(group: DeviceGroup, blocks: torch.Tensor, staging: torch.Tensor, *, store: bool) -> None:
    """Queue the kernel on the current stream; the function is a :class:`~tiering.copy.pages.PageKernel`."""
    count = int(group.pages.shape[1])
    programs_per_page = -(-group.longest // (_TILE.value * _TILES.value))
    words = group.block_bytes // group.word.itemsize
    _move[(len(blocks), count, programs_per_page)](
        group.pages, blocks, staging.view(group.word), words, count, STORE=store
    )


@triton.jit  # type: ignore[untyped-decorator]
def _move(pages, blocks, staging, words, count, STORE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    block = tl.program_id(0)
    page = tl.program_id(1)
    in_block_0 = tl.load(pages + page)
    stride = tl.load(pages + count + page)
    offset = tl.load(pages + 2 * count + page)
    size = tl.load(pages + 3 * count + page)
    in_cache = (in_block_0 + tl.load(blocks + block) * stride).to(tl.pointer_type(staging.dtype.element_ty))
    in_staging = staging + block.to(tl.int64) * words + offset
    first = tl.program_id(2).to(tl.int64) * (_TILE * _TILES)
    for tile in tl.static_range(_TILES):
        at = first + tile * _TILE + tl.arange(0, _TILE)
        inside = at < size
        if STORE:
            tl.store(in_staging + at, tl.load(in_cache + at, mask=inside), mask=inside)
        else:
            tl.store(in_cache + at, tl.load(in_staging + at, mask=inside), mask=inside)
