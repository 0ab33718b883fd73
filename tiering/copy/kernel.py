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
_BUS_WORDS = 32 << 10
"""Words that cross the bus at once: they fill it, and leave most processors to the engine."""


def move_pages(
    group: DeviceGroup, blocks: torch.Tensor, target: torch.Tensor, *, store: bool, direct: bool = False
) -> None:
    """Queue the kernel on the current stream; the function is a :class:`~tiering.copy.pages.PageKernel`."""
    count = int(group.pages.shape[1])
    parts = -(-group.longest // (_TILE.value * _TILES.value))
    total = len(blocks) * count * parts
    programs = min(total, _BUS_WORDS // min(group.longest, _TILE.value)) if direct else total
    _move[(programs,)](
        group.pages,
        blocks,
        target if direct else target.view(group.word),
        total,
        count,
        parts,
        group.block_bytes,
        WORD=_WORDS[group.word],
        STORE=store,
        DIRECT=direct,
    )


_WORDS = {torch.int64: tl.int64, torch.int32: tl.int32, torch.int16: tl.int16, torch.int8: tl.int8}


# What changes from launch to launch is not specialized: a new variant would be compiled in the middle of a step.
@triton.jit(do_not_specialize=["blocks", "target", "total"])  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]
    pages,
    blocks,
    target,
    total,
    count,
    parts,
    block_bytes,
    WORD: tl.constexpr,  # noqa: N803
    STORE: tl.constexpr,  # noqa: N803
    DIRECT: tl.constexpr,  # noqa: N803
):
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        block = item // (count * parts)
        page = item // parts % count
        address = tl.load(pages + page) + tl.load(blocks + block) * tl.load(pages + count + page)
        size = tl.load(pages + 4 * count + page)
        if DIRECT:
            in_target = (tl.load(target + block) + tl.load(pages + 3 * count + page)).to(tl.pointer_type(WORD))
        else:
            offset = block.to(tl.int64) * block_bytes + tl.load(pages + 2 * count + page)
            in_target = (target.to(tl.pointer_type(tl.int8)) + offset).to(tl.pointer_type(WORD))
        in_cache = address.to(tl.pointer_type(WORD))
        first = (item % parts).to(tl.int64) * (_TILE * _TILES)
        for tile in tl.static_range(_TILES):
            at = first + tile * _TILE + tl.arange(0, _TILE)
            inside = at < size
            if STORE:
                tl.store(in_target + at, tl.load(in_cache + at, mask=inside), mask=inside)
            else:
                tl.store(in_cache + at, tl.load(in_target + at, mask=inside), mask=inside)
