"""Pipeline stages of vLLM's own KV-cache configurations: one worker per stage and rank, byte for byte.

The layouts of GPU kernels, and kinds of attention without a CPU kernel, are seen here with stages.
"""

from __future__ import annotations

import copy
import random
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.engines.vllm_tier.test_tier_identity import config
from tests.vllm.test_gpu_layouts import (
    BLOCKS,
    CASES,
    PACKED,
    Model,
    attention,
    latent,
    layers,
    window,
)
from tiering.api.namespace import ModelIdentity, Namespace
from tiering.api.transfer import CPULoadStoreSpec, GPULoadStoreSpec
from tiering.copy.canonical import canonicalize
from tiering.copy.host import Direction, HostCopyHandler
from tiering.copy.layout import RowLayout
from tiering.engines.vllm.geometry import Geometry, cache_bytes, layout_of, read_geometry
from tiering.errors import ConfigError

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:  # vLLM before 0.33
    from vllm.v1.core import kv_cache_utils as planning
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.kv_cache_interface import KVCacheLayout, get_kv_cache_spec_kind
from vllm.v1.worker.utils import allocate_kv_cache


class Engine:
    """The workers and the scheduler of a model of :mod:`tests.vllm.test_gpu_layouts` in several stages."""

    def __init__(
        self, groups: Any, layout: str, split: dict[str, int], ranks: int = 1, canonical: bool = False, factor: int = 1
    ) -> None:
        self.model, self.groups, self.split, self.ranks = Model(groups, layout), groups, split, ranks
        self.canonical, self.layout = canonical, layout
        self.stages = 1 + max(split.values())
        specs = {name: spec for group in groups for name, spec in group.items()}
        self.configs = [
            planning.get_kv_cache_config_from_groups(
                self.model.config,
                planning._project_kv_cache_groups_to_worker(
                    [Model._group(group) for group in groups],
                    {name: spec for name, spec in specs.items() if split[name] == stage},
                ),
                1 << 30,
            )
            for stage in range(self.stages)
        ]
        for each in self.configs:
            each.kv_cache_layout = layout
            each.kv_tp_replicas = ranks if self.model.latent else 1
        parallel = self.model.config.parallel_config
        parallel.world_size, parallel.tensor_parallel_size = self.stages * ranks, ranks
        parallel.pipeline_parallel_size = self.stages
        self.model.config.kv_transfer_config.kv_connector_extra_config = {"blocks_per_chunk": factor}
        self.model.config.model_config.get_total_num_kv_heads = lambda: self.model.heads * ranks
        self.model.config.cache_config.prefix_caching_hash_algo = "sha256"
        self.workers = [Worker(self, rank) for rank in range(self.stages * ranks)]

    def geometry(self, rank: int, *, of_scheduler: bool = False) -> Geometry:
        described = copy.copy(self.model.config)
        described.parallel_config = copy.copy(described.parallel_config)
        described.parallel_config.rank = rank
        own = generate_scheduler_kv_cache_config(self.configs) if of_scheduler else self.configs[rank // self.ranks]
        kind_of = lambda spec: str(get_kv_cache_spec_kind(spec).value)  # noqa: E731
        return read_geometry(described, own, kind_of, 16, self.canonical, self.configs)

    def namespace(self, geometry: Geometry) -> str:
        layout = layout_of(geometry, self.model.config, self.layout, "seed")
        model = ModelIdentity(name="org/model", weights="a" * 40, dtype="bfloat16", layout=layout)
        return Namespace.build(model, geometry.group_bytes).directory

    @property
    def name(self) -> str:
        """The namespace, which scheduler and workers must agree on."""
        sides = [self.geometry(0, of_scheduler=True), *(worker.geometry for worker in self.workers)]
        assert len({(side.group_bytes, side.stage_bytes, side.layer_names) for side in sides}) == 1
        (name,) = {self.namespace(side) for side in sides}
        return name

    def store(self, blocks: list[list[int]], numbers: list[int]) -> np.ndarray:
        """Return rows to which all workers have stored ``blocks`` of each group."""
        rows = np.zeros((6, self.workers[0].rows.row_stride), np.uint8)
        for worker in self.workers:
            worker.move(rows, Direction.STORE, blocks, numbers)
        return rows


class Worker:
    """A worker with random KV; ranks that hold the same KV have the same numbers."""

    def __init__(self, engine: Engine, rank: int) -> None:
        self.geometry = engine.geometry(rank)
        its_config = engine.configs[rank // engine.ranks]
        self.tensors = allocate_kv_cache(its_config, torch.device("cpu"), KVCacheLayout[engine.layout], None)
        seed = rank // engine.ranks * 100 + rank % engine.ranks // self.geometry.copies
        buffer = torch.empty(0, dtype=torch.uint8).set_(next(iter(self.tensors.values())).untyped_storage())
        dice = torch.Generator().manual_seed(seed)
        buffer.copy_(torch.randint(0, 256, buffer.shape, generator=dice, dtype=torch.uint8))
        self.cache = canonicalize(self.tensors, self.geometry.engine.groups, BLOCKS, self.geometry.heads)
        place = (rank, engine.stages * engine.ranks, self.geometry.copies, self.geometry.stage_bytes)
        self.rows = RowLayout.of(self.cache, self.geometry.block_size_factor, *place)
        assert self.rows.group_bytes == self.geometry.group_bytes, "the scheduler would have refused the worker"

    def move(self, rows: np.ndarray, direction: Direction, blocks: list[list[int]], numbers: list[int]) -> None:
        sizes = [len(each) for each in blocks]
        gpu = GPULoadStoreSpec([block for each in blocks for block in each], sizes, [0] * len(sizes))
        spec = (gpu, CPULoadStoreSpec(numbers))
        handler = HostCopyHandler(self.cache, rows, self.rows, direction, 1)
        assert handler.transfer_async(1, spec if direction is Direction.STORE else spec[::-1])
        handler.wait([1])
        assert [result.success for result in handler.get_finished()] == [True]
        handler.shutdown()

    def content(self, layer: str) -> torch.Tensor:
        kv: torch.Tensor = self.tensors[layer].clone(memory_format=torch.contiguous_format)
        return kv.view(torch.uint8).reshape(BLOCKS, -1)


def in_order(groups: Any) -> list[str]:
    """Return the layers in an order of the model: one of each group in turn."""
    return [name for names in zip_longest(*groups) for name in names if name is not None]


def random_split(groups: Any, dice: random.Random) -> dict[str, int]:
    """Return the stage of each layer: neighbours of the model's order, at least one for each stage."""
    names = in_order(groups)
    ends = sorted(dice.sample(range(1, len(names)), min(dice.choice([1, 1, 2]), len(names) - 1)))
    return {name: sum(end <= index for end in ends) for index, name in enumerate(names)}


def back_in_other_blocks(engine: Engine, factor: int) -> None:
    """Store blocks of each group by all workers, and load them into other blocks."""
    count = len(engine.groups)
    written = [list(range(1 + group * factor, 1 + (group + 1) * factor)) for group in range(count)]
    read = [[block + 5 for block in blocks] for blocks in written]
    rows = engine.store(written, list(range(count)))
    for worker in engine.workers:
        before = {layer: worker.content(layer) for layer in worker.tensors}
        worker.move(rows, Direction.LOAD, read, list(range(count)))
        for group, names in enumerate(engine.groups):
            for layer in set(names) & set(worker.tensors):
                now = worker.content(layer)
                assert torch.equal(now[read[group]], before[layer][written[group]]), layer
                touched = {block for blocks in read for block in blocks}  # groups share memory
                others = [block for block in range(BLOCKS) if block not in touched]
                assert torch.equal(now[others], before[layer][others]), layer


@pytest.mark.parametrize("seed", range(len(CASES)), ids=[f"{case[0]}, {case[2]}" for case in CASES])
def test_blocks_of_all_stages_come_back_in_other_blocks(seed: int) -> None:
    what, groups, layout = CASES[seed]
    dice = random.Random(seed)
    split, ranks, factor = random_split(groups, dice), dice.choice([1, 2]), dice.choice([1, 1, 2])
    factor = min(factor, 5 // len(groups))  # the caches have 11 blocks
    engine = Engine(groups, layout, split, ranks, canonical=False, factor=factor)
    assert engine.name
    back_in_other_blocks(engine, factor)
    if what not in PACKED and "another" not in what and len(groups) == 1 and "indexer" not in what:
        back_in_other_blocks(Engine(groups, layout, split, ranks, canonical=True, factor=factor), factor)


GROUPS = [layers(attention(), 4), layers(window(), 4, "a")]
SPLITS = [
    {name: sum(end <= index for end in ends) for index, name in enumerate(in_order(GROUPS))}
    for ends in ((), (4,), (2, 6), (2, 4), (1, 7), (3,), (1, 2, 3))
]


def test_each_split_has_a_plain_namespace_of_its_own() -> None:
    names = [Engine(GROUPS, "LBHNC", split).name for split in SPLITS]
    assert len(set(names)) == len(SPLITS)


@pytest.mark.parametrize("layout", ["LBHNC", "BLNHC"])
def test_all_splits_have_one_canonical_namespace_and_the_same_rows(layout: str) -> None:
    one = Engine(GROUPS, layout, SPLITS[0], canonical=True)
    (single,) = one.workers
    blocks, numbers = [[3], [7]], [1, 4]
    for split in SPLITS[1:]:
        several = Engine(GROUPS, layout, split, canonical=True)
        assert several.name == one.name
        for worker in several.workers:
            for layer, tensor in worker.tensors.items():
                block = 3 if layer in GROUPS[0] else 7  # groups share memory, others in each split
                tensor[block].copy_(single.tensors[layer][block])
        assert (several.store(blocks, numbers) == one.store(blocks, numbers)).all()


def test_latent_attention_is_whole_on_each_rank_of_a_stage_and_not_on_each_stage() -> None:
    groups = [layers(latent(), 4)]
    engine = Engine(groups, "LBHNC", {name: index // 2 for index, name in enumerate(groups[0])}, ranks=2)
    assert [(worker.rows.copies, worker.rows.writes) for worker in engine.workers] == [
        (2, True),
        (2, False),
        (2, True),
        (2, False),
    ]
    page = latent().page_size_bytes
    assert engine.workers[0].rows.group_bytes == (4 * page,)
    back_in_other_blocks(engine, 1)


def test_the_engines_own_cache_is_that_of_all_stages() -> None:
    groups = [layers(attention(), 4)]
    engine = Engine(groups, "LBHNC", {name: int(index > 0) for index, name in enumerate(groups[0])}, ranks=2)
    assert cache_bytes(engine.configs[0], engine.geometry(0)) == 2 * 4 * attention().page_size_bytes * BLOCKS


def test_stages_with_other_groups_are_refused() -> None:
    engine = Engine(GROUPS, "LBHNC", SPLITS[1])
    engine.configs[1].kv_cache_groups.pop()
    with pytest.raises(ConfigError, match="different KV-cache groups"):
        engine.geometry(0)


def test_rows_of_vllm_s_own_tiering_stay_in_their_engine_if_there_are_stages() -> None:
    """Its scheduler's configuration is that of the first stage, which splits of the others have in common."""
    from tiering.engines.vllm_tier.tier import _identified

    spec = SimpleNamespace(config=config(pp_size=2, engine_id="engine"), vllm_config=object(), kv_cache_config=object())
    found = _identified(spec, 4096, None)
    assert found.model.weights == "engine engine"
    assert "the first stage only" in found.reason
