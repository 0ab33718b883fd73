"""Canonical rows: one format for all numbers of ranks, whatever the order of a cache's memory."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.copy.fake_cuda import FakeCuda
from tiering.api.engine import CanonicalKVCaches, HeadShard, KVCacheGroup
from tiering.api.transfer import CPULoadStoreSpec, GPULoadStoreSpec
from tiering.copy.canonical import canonicalize
from tiering.copy.contract import OffloadingHandler
from tiering.copy.cuda import CudaCopyHandler
from tiering.copy.host import Direction, HostCopyHandler
from tiering.copy.layout import RowLayout
from tiering.copy.pinning import PinnedRows
from tiering.copy.self_check import check_round_trip
from tiering.errors import ConfigError

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 2, 9, 4, 4, 64
ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""vLLM's orders of layers, blocks, heads, tokens and content in memory."""
NAMES = tuple(f"l{layer}" for layer in range(LAYERS))
WRITTEN, READ = (5, 2, 7, 3), (1, 8, 4, 6)
"""Blocks that are stored, and the blocks that they are loaded into."""


def whole(seed: int) -> torch.Tensor:
    """Return random KV of all heads: (layers, blocks, heads, tokens, content)."""
    shape = (LAYERS, BLOCKS, HEADS, TOKENS, CONTENT)
    return torch.randint(0, 1 << 15, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int16)


class Rank:
    """One of ``ranks`` workers, with its heads of ``kv`` in memory of a given order."""

    def __init__(self, kv: torch.Tensor, order: str, rank: int, ranks: int, factor: int = 1) -> None:
        copies = max(1, ranks // HEADS)
        shard, shards = rank // copies, ranks // copies
        count = HEADS // shards
        self.heads = slice(shard * count, (shard + 1) * count)
        dims = ["LBHNC".index(letter) for letter in order]
        mine = kv[:, :, self.heads].permute(dims).contiguous()
        self.kv = mine.permute([order.index(letter) for letter in "LBHNC"])
        self.shard = HeadShard(count, order.index("H") < order.index("N"), shard, shards)
        self.cache = self.canonical(self.shard)
        self.layout = RowLayout.of(self.cache, factor, rank, ranks, copies)

    def canonical(self, shard: HeadShard) -> CanonicalKVCaches:
        layers = dict(zip(NAMES, self.kv, strict=True))
        return canonicalize(layers, [KVCacheGroup(NAMES, TOKENS)], BLOCKS, shard)

    def move(
        self, rows: NDArray[np.uint8], direction: Direction, blocks: tuple[int, ...], numbers: list[int], kind: str
    ) -> None:
        """Copy ``blocks`` to or from the rows ``numbers``."""
        api = FakeCuda()
        handler = self.handler(rows, direction, kind, api)
        gpu, cpu = GPULoadStoreSpec(list(blocks), [len(blocks)], [0]), CPULoadStoreSpec(numbers)
        with nullcontext() if kind == "host" else api.watched():
            assert handler.transfer_async(1, (gpu, cpu) if direction is Direction.STORE else (cpu, gpu))
            handler.wait([1])
            (result,) = handler.get_finished()
        handler.shutdown()
        assert result.success
        assert api.races == []

    def handler(self, rows: NDArray[np.uint8], direction: Direction, kind: str, api: FakeCuda) -> OffloadingHandler:
        if kind == "host":
            return HostCopyHandler(self.cache, rows, self.layout, direction, 1)
        batch = api.batch() if kind == "cuda, batched copies" else None
        pinned, by_kernel = PinnedRows(rows, api), kind == "cuda, by kernel"
        return CudaCopyHandler(self.cache, pinned, self.layout, direction, api.kernel, 5000, batch, maps_rows=by_kernel)


def stored(kv: torch.Tensor, order: str, ranks: int, factor: int = 1, kind: str = "host") -> NDArray[np.uint8]:
    """Return the rows that all of ``ranks`` workers have stored :data:`WRITTEN` to."""
    workers = [Rank(kv, order, rank, ranks, factor) for rank in range(ranks)]
    rows = np.random.default_rng(9).integers(0, 256, (5, workers[0].layout.row_stride), dtype=np.uint8)
    for worker in workers:
        assert worker.layout.row_bytes == factor * LAYERS * HEADS * TOKENS * CONTENT * 2
        worker.move(rows, Direction.STORE, WRITTEN, list(range(len(WRITTEN) // factor)), kind)
    return rows


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_what_any_number_of_ranks_wrote_any_other_number_reads(order: str, factor: int) -> None:
    for writers, readers in product((1, 2, 4, 8), repeat=2):
        exchange(order, factor, "host", writers, readers)


@pytest.mark.parametrize("kind", ["cuda", "cuda, batched copies", "cuda, by kernel"])
@pytest.mark.parametrize("order", ["LBHNC", "BLNHC"])
def test_the_same_on_a_device(order: str, kind: str) -> None:
    for writers, readers in ((4, 1), (1, 8)):
        exchange(order, 2, kind, writers, readers)


def exchange(order: str, factor: int, kind: str, writers: int, readers: int) -> None:
    """Let ``readers`` workers load what ``writers`` workers have stored, and compare every byte."""
    kv = whole(1)
    rows = stored(kv, order, writers, factor, kind)
    for rank in range(readers):
        reader = Rank(whole(2), order, rank, readers, factor)
        before = reader.kv.clone()
        reader.move(rows, Direction.LOAD, READ, list(range(len(READ) // factor)), kind)
        assert torch.equal(reader.kv[:, READ], kv[:, WRITTEN, reader.heads])
        others = [block for block in range(BLOCKS) if block not in READ]
        assert torch.equal(reader.kv[:, others], before[:, others])


@pytest.mark.parametrize("order", ORDERS)
def test_a_row_holds_the_heads_of_all_ranks_layer_by_layer(order: str) -> None:
    kv = whole(1)
    page = kv if order.index("H") < order.index("N") else kv.transpose(2, 3)
    expected = [page[:, block].contiguous().numpy().tobytes() for block in WRITTEN]
    for ranks in (1, 2, 4, 8):
        rows = stored(kv, order, ranks)
        assert [row[: len(expected[0])].tobytes() for row in rows[: len(WRITTEN)]] == expected


def test_negative_control_heads_of_two_ranks_that_are_swapped_show() -> None:
    kv = whole(1)
    rows = stored(kv, "LBHNC", 2)
    readers = [Rank(whole(2), "LBHNC", rank, 2) for rank in range(2)]
    for reader, other in zip(readers, readers[::-1], strict=True):
        wrong = RowLayout.of(other.cache, 1, reader.layout.rank, 2)
        reader.layout = wrong
        reader.move(rows, Direction.LOAD, READ, [0, 1, 2, 3], "host")
        assert not torch.equal(reader.kv[:, READ], kv[:, WRITTEN, reader.heads])
        assert torch.equal(reader.kv[:, READ], kv[:, WRITTEN, other.heads])


def test_one_rank_s_rows_are_those_of_the_plain_layout_where_layers_lie_behind_each_other() -> None:
    worker = Rank(whole(1), "BLHNC", 0, 1)
    layers = dict(zip(NAMES, worker.kv, strict=True))
    plain = RowLayout.of(canonicalize(layers, [KVCacheGroup(NAMES, TOKENS)], BLOCKS))
    assert worker.layout.page_bytes == plain.page_bytes
    assert worker.layout.page_offsets == plain.page_offsets


def test_a_layer_that_reads_another_s_kv_takes_no_place_in_a_row() -> None:
    worker = Rank(whole(1), "LBHNC", 1, 2)
    layers = {name: worker.kv[layer] for name, layer in (("l0", 0), ("reader", 0), ("l1", 1))}
    cache = canonicalize(layers, [KVCacheGroup(tuple(layers), TOKENS)], BLOCKS, worker.shard)
    assert [ref.row_offset for ref in cache.group_data_refs[0]] == list(worker.layout.page_offsets[0])


@pytest.mark.parametrize("kind", ["host", "cuda"])
@pytest.mark.parametrize("rank", range(8))
def test_the_check_at_the_start_leaves_rows_and_blocks_as_they_were(rank: int, kind: str) -> None:
    worker = Rank(whole(1), "LBNHC", rank, 8, 2)
    rows = np.random.default_rng(3).integers(0, 256, (12, worker.layout.row_stride), dtype=np.uint8)
    before = rows.copy(), worker.kv.clone()
    store, load = (worker.handler(rows, direction, kind, FakeCuda()) for direction in Direction)
    check_round_trip(store, load, worker.cache, rows, worker.layout)
    assert (rows == before[0]).all()
    assert torch.equal(worker.kv, before[1])
    store.shutdown()
    load.shutdown()


def test_ranks_prepare_all_bytes_together_and_begin_at_different_places() -> None:
    layouts = [Rank(whole(1), "LBHNC", rank, 4).layout for rank in range(4)]
    assert [layout.turn for layout in layouts] == [(rank, 4) for rank in range(4)]
    assert (min(layout.part[0] for layout in layouts), max(layout.part[1] for layout in layouts)) == (
        0,
        layouts[0].row_bytes,
    )


@pytest.mark.parametrize(
    "cache",
    [
        torch.zeros(2, BLOCKS, TOKENS, HEADS, 512),  # keys and values apart
        torch.zeros(BLOCKS, HEADS + 1, TOKENS, 512),
        torch.zeros(BLOCKS, HEADS, 2 * TOKENS, 512),
        torch.zeros(2 * BLOCKS, HEADS, TOKENS // 2, 512),  # a kernel's smaller blocks
        torch.zeros(BLOCKS, TOKENS, HEADS, 512).transpose(1, 2),  # tokens outside of heads
        torch.zeros(BLOCKS, 512),
    ],
    ids=lambda cache: str(tuple(cache.shape)),
)
def test_a_cache_whose_heads_cannot_be_found_is_refused(cache: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match=r"layer l0: .*set layout: plain"):
        canonicalize({"l0": cache}, [KVCacheGroup(("l0",), TOKENS)], BLOCKS, HeadShard(HEADS, outside=True))


def test_a_state_is_refused() -> None:
    state = [torch.zeros(BLOCKS, 512), torch.zeros(BLOCKS, 64)]
    with pytest.raises(ConfigError, match="layer l0: a state has no KV heads"):
        canonicalize({"l0": state}, [KVCacheGroup(("l0",), TOKENS)], BLOCKS, HeadShard(HEADS, outside=True))
