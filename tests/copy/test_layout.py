"""The layout of a block's bytes in its row, and the pairing of a transfer's GPU blocks with rows."""

from __future__ import annotations

import pytest

from tests.copy import kv
from tiering.api.transfer import CPULoadStoreSpec, GPULoadStoreSpec
from tiering.copy.contract import TransferError
from tiering.copy.layout import GroupPages, RowLayout, plan_pages
from tiering.errors import ConfigError


def plan(
    layout: RowLayout, blocks: list[int], sizes: list[int], indices: list[int], rows: list[int], *, store: bool = False
) -> list[GroupPages]:
    gpu, cpu = GPULoadStoreSpec(blocks, sizes, indices), CPULoadStoreSpec(rows)
    return plan_pages(layout, gpu, cpu, num_blocks=[100] * len(sizes), num_rows=50, store=store)


def as_tuples(pages: list[GroupPages]) -> list[tuple[int, list[int], list[int], list[int]]]:
    return [(part.group, part.gpu.tolist(), part.rows.tolist(), part.subs.tolist()) for part in pages]


def test_sizes_are_those_of_all_layers_blocks_and_ranks() -> None:
    layout = RowLayout(((10, 20), (7,)), block_size_factor=4, rank=1, world_size=3)
    assert layout.gpu_block_bytes == (30, 7)
    assert layout.rank_bytes == (120, 28)
    assert layout.group_bytes == (360, 84)
    assert layout.page_offsets == ((120, 130), (28,))
    assert layout.block_strides == (30, 7)
    assert layout.places(1) == [(28, 7), (35, 7), (42, 7), (49, 7)]
    assert layout.part == (28, 240)
    assert layout.row_bytes == 360
    assert layout.row_stride == 4096
    assert layout.writes


def test_replicated_kv_is_held_once_and_written_by_rank_0() -> None:
    ranks = [RowLayout(((10,),), rank=rank, world_size=4, copies=4) for rank in range(4)]
    assert {layout.group_bytes for layout in ranks} == {(10,)}
    assert {layout.page_offsets for layout in ranks} == {((0,),)}
    assert [layout.writes for layout in ranks] == [True, False, False, False]


def test_a_layout_is_made_of_the_unpadded_pages() -> None:
    assert RowLayout.of(kv.canonical("padded"), 2).group_bytes == (2 * 3 * 24,)
    assert RowLayout.of(kv.two_groups()).page_bytes == ((48, 32), (40,))


@pytest.mark.parametrize(
    "arguments",
    [
        {"page_bytes": ()},
        {"page_bytes": ((),)},
        {"page_bytes": ((0,),)},
        {"page_bytes": ((1,),), "block_size_factor": 0},
        {"page_bytes": ((1,),), "rank": 2, "world_size": 2},
        {"page_bytes": ((1,),), "world_size": 4, "copies": 3},
        {"page_bytes": ((1,),), "copies": 0},
    ],
)
def test_layouts_that_make_no_sense_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        RowLayout(**arguments)  # type: ignore[arg-type]


def test_blocks_and_rows_pair_up_group_by_group() -> None:
    layout = RowLayout(((8,), (8,)))
    assert as_tuples(plan(layout, [5, 6, 9], [2, 1], [3, 7], [11, 12, 13])) == [
        (0, [5, 6], [11, 12], [0, 0]),
        (1, [9], [13], [0]),
    ]


def test_a_load_skips_the_leading_part_of_an_unaligned_offloaded_block() -> None:
    layout = RowLayout(((8,),), block_size_factor=4)
    assert as_tuples(plan(layout, [1, 2, 3, 4, 5, 6], [6], [7], [20, 21, 22])) == [
        (0, [1, 2, 3, 4, 5, 6], [20, 21, 21, 21, 21, 22], [3, 0, 1, 2, 3, 0])
    ]


def test_an_empty_group_needs_no_row_wherever_it_starts() -> None:
    layout = RowLayout(((8,), (8,)), block_size_factor=2)
    assert as_tuples(plan(layout, [4, 5], [0, 2], [3, 0], [9])) == [(1, [4, 5], [9, 9], [0, 1])]


@pytest.mark.parametrize(
    ("blocks", "sizes", "indices", "rows", "store", "message"),
    [
        ([1, 2], [2, 0], [0, 0], [3], False, "1 rows, its GPU blocks need 2"),
        ([1, 2], [2, 0], [0, 0], [3, 4, 5], False, "3 rows"),
        ([1, 2], [2], [0], [3, 4], False, "1 KV-cache groups, the KV cache 2"),
        ([1, 100], [2, 0], [0, 0], [3, 4], False, "GPU block"),
        ([-1, 1], [2, 0], [0, 0], [3, 4], False, "GPU block"),
        ([1, 2], [2, 0], [0, 0], [3, 50], False, "row"),
        ([1, 2], [2, 0], [0, 0], [-1, 3], True, "row"),
        ([1, 2], [2, 0], [0, 0], [3, 3], True, "row is named twice"),
        ([1, 1], [2, 0], [0, 0], [3, 4], False, "GPU block is named twice"),
    ],
)
def test_transfers_that_do_not_fit_are_refused(
    blocks: list[int], sizes: list[int], indices: list[int], rows: list[int], store: bool, message: str
) -> None:
    with pytest.raises(TransferError, match=message):
        plan(RowLayout(((8,), (8,))), blocks, sizes, indices, rows, store=store)


@pytest.mark.parametrize(("blocks", "index"), [([1], 0), ([1], 1), ([1, 2], 1), ([1, 2, 3], 0)])
def test_a_store_must_cover_whole_rows(blocks: list[int], index: int) -> None:
    layout = RowLayout(((8,),), block_size_factor=2)
    rows = list(range(-(-(index % 2 + len(blocks)) // 2)))
    with pytest.raises(TransferError, match="whole offloaded blocks"):
        plan(layout, blocks, [len(blocks)], [index], rows, store=True)
    assert plan(layout, blocks, [len(blocks)], [index], rows)


def test_several_null_blocks_may_be_loaded() -> None:
    assert plan(RowLayout(((8,),)), [0, 0, 3], [3], [0], [1, 2, 3])
