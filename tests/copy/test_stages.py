"""Rows of pipeline stages, whose ranks hold different layers, against an oracle for every byte."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.copy.fake_cuda import FakeCuda
from tiering.api.engine import HeadShard, KVCacheGroup
from tiering.api.transfer import CPULoadStoreSpec, GPULoadStoreSpec
from tiering.copy.canonical import LayerCache, canonicalize
from tiering.copy.contract import OffloadingHandler
from tiering.copy.cuda import CudaCopyHandler
from tiering.copy.host import Direction, HostCopyHandler
from tiering.copy.layout import RowLayout
from tiering.copy.near import share_of
from tiering.copy.pinning import PinnedRows
from tiering.copy.self_check import check_round_trip
from tiering.errors import ConfigError

BLOCKS, HEADS, TOKENS = 13, 4, 4


@dataclass
class Model:
    """Layers in groups, divided into pipeline stages of some ranks each.

    Attributes:
        groups: content sizes of the layers of each group, in the order of the model; 0: the layer has a state.
        split: stage of each layer, by group.
        ranks: ranks of a stage.
        factor: GPU blocks in an offloaded block.
        canonical: True if rows hold the heads of all ranks in order.
        alike: True if all ranks of a stage hold the same KV.
    """

    groups: list[list[int]]
    split: list[list[int]]
    ranks: int = 1
    factor: int = 1
    canonical: bool = False
    alike: bool = False
    seed: int = 0
    whole: list[list[torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        dice = torch.Generator().manual_seed(self.seed)
        for group in self.groups:
            pages = [(HEADS, TOKENS, size) if size else (self.ranks, 96) for size in group]
            new = [torch.randint(0, 1 << 15, (BLOCKS, *page), generator=dice, dtype=torch.int16) for page in pages]
            self.whole.append(new)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return 1 + max(stage for stages in self.split for stage in stages)

    @property
    def copies(self) -> int:
        """Number of ranks that hold the same KV."""
        return self.ranks if self.alike else max(1, self.ranks // HEADS) if self.canonical else 1

    def part(self, group: int, layer: int, rank: int) -> torch.Tensor:
        """Return what a rank of a stage holds of a layer: (blocks, heads, tokens, content), or its state."""
        kv, shard, shards = self.whole[group][layer], rank // self.copies, self.ranks // self.copies
        if not self.groups[group][layer]:
            return kv[:, :1] if self.alike else kv[:, rank : rank + 1]
        count = max(1, HEADS // shards)
        return kv if self.alike else kv[:, shard * count % HEADS :][:, :count]

    def own(self, group: int, stage: int) -> list[int]:
        """Return the layers of a group that a stage holds."""
        return [layer for layer, its_stage in enumerate(self.split[group]) if its_stage == stage]

    def row(self, group: int, blocks: Sequence[int]) -> bytes:
        """Return the bytes of the row that holds ``blocks`` of a group: the oracle."""
        stages, shards = range(self.stages), range(0, self.ranks, self.copies)
        if self.canonical:
            order = [layer for stage in stages for layer in self.own(group, stage)]
            whole = [self.whole[group][layer][block] for block in blocks for layer in order]
        else:
            whole = [
                self.part(group, layer, rank)[block]
                for stage in stages
                for rank in shards
                for block in blocks
                for layer in self.own(group, stage)
            ]
        return b"".join(page.contiguous().numpy().tobytes() for page in whole)

    def workers(self) -> list[Worker]:
        """Return the workers of all stages."""
        return [Worker(self, rank) for rank in range(self.stages * self.ranks)]


class Worker:
    """A worker of one stage, with its parts of the layers in memory of its own."""

    def __init__(self, model: Model, rank: int) -> None:
        self.model, self.stage, self.rank = model, rank // model.ranks, rank % model.ranks
        self.kv = {
            (group, layer): model.part(group, layer, self.rank).clone()
            for group in range(len(model.groups))
            for layer in model.own(group, self.stage)
        }
        shards = model.ranks // model.copies
        self.heads = HeadShard(max(1, HEADS // shards), True, self.rank // model.copies, shards)
        caches: dict[str, LayerCache] = {}
        for (group, layer), kv in self.kv.items():
            caches[f"{group}.{layer}"] = kv if model.groups[group][layer] else [kv[:, 0, :32], kv[:, 0, 32:]]
        groups = [
            KVCacheGroup(tuple(f"{group}.{layer}" for layer in model.own(group, self.stage)), TOKENS)
            for group in range(len(model.groups))
        ]
        self.cache = canonicalize(caches, groups, BLOCKS, self.heads if model.canonical else None)
        sizes = [
            tuple(
                sum(model.part(group, layer, 0)[0].numel() * 2 for layer in model.own(group, stage))
                for group in range(len(groups))
            )
            for stage in range(model.stages)
        ]
        ranks = model.stages * model.ranks
        self.layout = RowLayout.of(self.cache, model.factor, rank, ranks, model.copies, tuple(sizes))

    def handler(self, rows: NDArray[np.uint8], direction: Direction, api: FakeCuda | None) -> OffloadingHandler:
        if api is None:
            return HostCopyHandler(self.cache, rows, self.layout, direction, 1)
        return CudaCopyHandler(self.cache, PinnedRows(rows, api), self.layout, direction, api.kernel, 5000, api.batch())

    def move(
        self,
        rows: NDArray[np.uint8],
        direction: Direction,
        blocks: Sequence[Sequence[int]],
        numbers: list[int],
        device: bool,
    ) -> None:
        """Copy ``blocks`` of each group to or from the rows ``numbers``."""
        api = FakeCuda() if device else None
        handler = self.handler(rows, direction, api)
        sizes = [len(each) for each in blocks]
        gpu = GPULoadStoreSpec([block for each in blocks for block in each], sizes, [0] * len(sizes))
        spec = (gpu, CPULoadStoreSpec(numbers))
        with api.watched() if api else nullcontext():
            assert handler.transfer_async(1, spec if direction is Direction.STORE else spec[::-1])
            handler.wait([1])
            (result,) = handler.get_finished()
        handler.shutdown()
        assert result.success


def random_model(seed: int) -> Model:
    dice = random.Random(seed)
    canonical, alike = dice.random() < 0.4, dice.random() < 0.2
    ranks, stages = dice.choice([1, 1, 2, 4, 8] if canonical or alike else [1, 1, 2, 4]), dice.choice([1, 2, 2, 3, 4])
    canonical = canonical and not alike
    groups = [
        [0 if not canonical and dice.random() < 0.2 else dice.choice([128, 256]) for _ in range(dice.randint(1, 6))]
        for _ in range(dice.randint(1, 3))
    ]
    split = [sorted(dice.randrange(stages) for _ in group) for group in groups]
    used = sorted({stage for stages in split for stage in stages})  # each stage has a layer
    split = [[used.index(stage) for stage in stages] for stages in split]
    return Model(groups, split, ranks, dice.choice([1, 1, 2, 3]), canonical, alike, seed)


def exchanged(model: Model, device: bool = False) -> None:
    """Store blocks of each group by all workers, look at the rows, and load them into other blocks."""
    workers, dice, factor = model.workers(), random.Random(model.seed), model.factor
    assert len({worker.layout.group_bytes for worker in workers}) == 1
    layout, count = workers[0].layout, len(model.groups)
    written = [dice.sample(range(1, 7), factor) for _ in range(count)]
    read = [dice.sample(range(7, BLOCKS), factor) for _ in range(count)]
    rows = np.random.default_rng(model.seed).integers(0, 256, (count + 3, layout.row_stride), dtype=np.uint8)
    before, numbers = rows.copy(), dice.sample(range(count + 3), count)
    for worker in dice.sample(workers, len(workers)):
        worker.move(rows, Direction.STORE, written, numbers, device)
    for group, number in enumerate(numbers):
        expected = model.row(group, written[group])
        assert len(expected) == layout.group_bytes[group]
        assert rows[number, : len(expected)].tobytes() == expected
        assert (rows[number, len(expected) :] == before[number, len(expected) :]).all()
    for worker in workers:
        worker.move(rows, Direction.LOAD, read, numbers, device)
        for (group, layer), kv in worker.kv.items():
            whole = model.part(group, layer, worker.rank)
            assert torch.equal(kv[read[group]], whole[written[group]])
            others = [block for block in range(BLOCKS) if block not in read[group]]
            assert torch.equal(kv[others], whole[others])


@pytest.mark.parametrize("seed", range(60))
def test_random_splits_groups_states_and_ranks_match_the_oracle(seed: int) -> None:
    exchanged(random_model(seed))


@pytest.mark.parametrize("seed", range(100, 112))
def test_random_splits_on_a_device(seed: int) -> None:
    exchanged(random_model(seed), device=True)


SPLITS = [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 1, 2], [0, 1, 2, 3]]


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_canonical_rows_do_not_depend_on_the_split(ranks: int, factor: int) -> None:
    """Each split loads what any other one has stored."""
    sizes, written, read = [[128, 256, 128, 128]], [[5, 2][:factor]], [[7, 9][:factor]]
    writers = [Model(sizes, [split], ranks, factor, canonical=True, seed=1) for split in SPLITS]
    found = set()
    for writer in writers:
        workers = writer.workers()
        rows = np.zeros((2, workers[0].layout.row_stride), np.uint8)
        for worker in workers:
            worker.move(rows, Direction.STORE, written, [1], device=False)
        found.add(rows.tobytes())
    assert len(found) == 1
    for other in (1, 2, 4):
        for split in SPLITS[1:3]:
            expected = Model(sizes, [split], other, factor, canonical=True, seed=1)
            for worker in Model(sizes, [split], other, factor, canonical=True, seed=2).workers():
                worker.move(rows, Direction.LOAD, read, [1], device=False)
                for (group, layer), kv in worker.kv.items():
                    assert torch.equal(kv[read[0]], expected.part(group, layer, worker.rank)[written[0]])


@pytest.mark.parametrize("canonical", [False, True])
def test_negative_control_stages_that_are_swapped_show(canonical: bool) -> None:
    model = Model([[128, 128]], [[0, 1]], 2, canonical=canonical, seed=1)
    workers = model.workers()
    rows = np.zeros((1, workers[0].layout.row_stride), np.uint8)
    for worker in workers:
        worker.move(rows, Direction.STORE, [[3]], [0], device=False)
    for number, reader in enumerate(workers):
        place = (reader.layout.world_size, reader.layout.copies, reader.layout.stage_bytes)
        other = workers[(number + 2) % 4]
        reader.layout = RowLayout.of(reader.cache, 1, (number + 2) % 4, *place)
        reader.move(rows, Direction.LOAD, [[8]], [0], device=False)
        (kv,), (theirs,) = reader.kv.values(), other.kv.values()
        assert not torch.equal(kv[8], kv[3])
        assert torch.equal(kv[8], theirs[3])


def test_a_rank_without_layers_of_a_group_takes_part_in_its_transfers_and_moves_nothing() -> None:
    model = Model([[128], [0, 0]], [[0], [0, 1]], seed=1)
    first, last = model.workers()
    rows = np.zeros((2, last.layout.row_stride), np.uint8)
    for device in (False, True):
        last.move(rows, Direction.STORE, [[3], []], [0], device)
        assert not rows.any()
    assert (first.layout.rank_bytes, last.layout.rank_bytes) == ((HEADS * TOKENS * 256, 192), (0, 192))
    assert (first.layout.part, last.layout.part) == ((0, HEADS * TOKENS * 256), (192, 384))


@pytest.mark.parametrize("seed", range(20))
def test_ranks_prepare_and_check_all_bytes_together(seed: int) -> None:
    workers = random_model(seed).workers()
    used = np.zeros(workers[0].layout.row_bytes, bool)
    rows = np.random.default_rng(3).integers(0, 256, (len(workers) + 2, workers[0].layout.row_stride), dtype=np.uint8)
    before = rows.copy()
    for worker in workers:
        start, end = worker.layout.part
        used[start:end] = True
        share = share_of(worker.cache, worker.layout)
        assert (share.start, share.stop) == (start, end)
        store, load = (worker.handler(rows, direction, None) for direction in Direction)
        check_round_trip(store, load, worker.cache, rows, worker.layout)
        store.shutdown()
        load.shutdown()
        assert (rows == before).all()
    assert used.all()


@pytest.mark.parametrize(
    ("pages", "ranks", "stages", "message"),
    [
        (((8,), ()), 1, ((8, 0),), "must have layers with pages"),
        (((), ()), 2, ((0, 0), (8, 8)), "must have layers with pages"),
        (((8,),), 3, ((8,), (8,)), "do not make up these pipeline stages"),
        (((8,),), 2, ((8, 8), (8, 8)), "do not make up these pipeline stages"),
    ],
)
def test_stages_that_do_not_fit_are_refused(
    pages: tuple[tuple[int, ...], ...], ranks: int, stages: tuple[tuple[int, ...], ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        RowLayout(pages, world_size=ranks, stage_bytes=stages)


def test_a_stage_with_other_pages_than_the_engine_expects_shows_in_the_size_of_a_block() -> None:
    assert RowLayout(((8,),), rank=1, world_size=2, stage_bytes=((16,), (8,))).group_bytes == (24,)
    assert RowLayout(((9,),), rank=1, world_size=2, stage_bytes=((16,), (8,))).group_bytes == (25,)
