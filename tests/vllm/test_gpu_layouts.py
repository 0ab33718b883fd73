"""KV caches in the layouts of vLLM's GPU backends, on the CPU: blocks survive a round trip.

No engine runs. Specs are those that the backends publish; places, shapes and strides come from vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVQuantMode,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
    group_kernel_blocks,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from tiering.api.engine import CanonicalKVCaches
from tiering.api.transfer import CPULoadStoreSpec, GPULoadStoreSpec
from tiering.copy.canonical import canonicalize
from tiering.copy.host import Direction, HostCopyHandler
from tiering.copy.layout import RowLayout
from tiering.engines.vllm.geometry import Geometry, read_geometry, simple_cache, zeroes_early
from tiering.engines.vllm.refusals import check_supported
from tiering.errors import ConfigError
from tiering.simple.worker import SimpleCPUOffloadWorker

try:
    from vllm.v1.core.kv_cache_planning import (
        create_kv_cache_group_specs,
        generate_scheduler_kv_cache_config,
        get_kv_cache_config_from_groups,
    )
except ImportError:  # vLLM before 0.33
    from vllm.v1.core.kv_cache_utils import (
        create_kv_cache_group_specs,
        generate_scheduler_kv_cache_config,
        get_kv_cache_config_from_groups,
    )

if "block_stride_alignment" not in {field.name for field in fields(FullAttentionSpec)}:
    pytest.skip("vLLM's specs say less before 0.31", allow_module_level=True)

BLOCKS = 11
ROW = 2
ALL = tuple(layout.name for layout in KVCacheLayout)
BLOCK_COMPACT = tuple(layout.name for layout in KVCacheLayout if layout.is_block_compact)
BLOCK_OUTER = tuple(layout.name for layout in KVCacheLayout if layout.is_block_outermost and layout.is_block_compact)


@dataclass
class Model:
    """vLLM's caches for ``groups`` (each one layer name → spec) in ``layout``."""

    groups: list[dict[str, Any]]
    layout: str
    kernel_block_sizes: list[int] | None = None
    canonical_rows: bool = False
    """True for rows that hold the heads of all ranks in order."""

    def __post_init__(self) -> None:
        layout = KVCacheLayout[self.layout]
        self.config: Any = SimpleNamespace(
            cache_config=SimpleNamespace(
                get_resolved_kv_cache_layout=lambda: layout,
                num_gpu_blocks_override=BLOCKS,
                prefix_cache_retention_interval=None,
                enable_prefix_caching=True,
                cache_dtype="auto",
            ),
            attention_config=SimpleNamespace(hisparse_config=None),
            parallel_config=SimpleNamespace(
                world_size=1,
                rank=0,
                data_parallel_rank=0,
                data_parallel_index=0,
                pipeline_parallel_size=1,
                tensor_parallel_size=1,
                distributed_executor_backend="mp",
            ),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
            kv_transfer_config=SimpleNamespace(engine_id="layouts", kv_role="kv_both", kv_connector_extra_config={}),
            model_config=SimpleNamespace(use_mla=self.latent, dtype=torch.bfloat16),
        )
        self.config.model_config.get_total_num_kv_heads = lambda: self.heads
        groups = [self._group(specs) for specs in self.groups]
        self.kv_cache_config = get_kv_cache_config_from_groups(self.config, groups, 1 << 30)
        self.kv_cache_config.kv_cache_layout = self.layout
        self.tensors = allocate_kv_cache(self.kv_cache_config, torch.device("cpu"), layout, self.kernel_block_sizes)
        buffer = torch.empty(0, dtype=torch.uint8).set_(next(iter(self.tensors.values())).untyped_storage())
        buffer.copy_(torch.randint(0, 256, buffer.shape, generator=torch.Generator().manual_seed(1), dtype=torch.uint8))

    @property
    def latent(self) -> bool:
        """True if the model's first layer has latent attention."""
        return isinstance(next(iter(self.groups[0].values())), MLAAttentionSpec)

    @property
    def heads(self) -> int:
        """Number of KV heads of the model's first layer."""
        return int(next(iter(self.groups[0].values())).num_kv_heads)

    @staticmethod
    def _group(specs: dict[str, Any]) -> Any:
        if len(set(specs.values())) == 1:
            return create_kv_cache_group_specs(specs, [list(specs)])[0]
        uniform = UniformTypeKVCacheSpecs.from_specs(specs)
        assert uniform is not None
        return KVCacheGroupSpec(list(specs), uniform)

    def geometry(self, *, of_scheduler: bool = False) -> Geometry:
        """Return the geometry that a worker reads, or the scheduler from its own configuration."""
        cache = generate_scheduler_kv_cache_config([self.kv_cache_config]) if of_scheduler else self.kv_cache_config
        kind_of = lambda spec: str(get_kv_cache_spec_kind(spec).value)  # noqa: E731
        return read_geometry(self.config, cache, kind_of, 16, self.canonical_rows)

    def canonical(self) -> CanonicalKVCaches:
        geometry = self.geometry()
        return canonicalize(self.tensors, geometry.engine.groups, BLOCKS, geometry.heads)

    def blocks(self, layer: str) -> torch.Tensor:
        """Return the bytes of (block, ...) that attention reads for ``layer``."""
        cache: torch.Tensor = group_kernel_blocks(self.tensors[layer], BLOCKS)
        return cache.clone(memory_format=torch.contiguous_format).view(torch.uint8).reshape(BLOCKS, -1)


def attention(**other: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**{"block_size": 16, "num_kv_heads": 4, "head_size": 64, "dtype": torch.bfloat16} | other)


def window(**other: Any) -> SlidingWindowSpec:
    basic = {"block_size": 16, "num_kv_heads": 4, "head_size": 64, "dtype": torch.bfloat16, "sliding_window": 32}
    return SlidingWindowSpec(**basic | other)


def latent(**other: Any) -> MLAAttentionSpec:
    return MLAAttentionSpec(**{"block_size": 64, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16} | other)


def indexer(**other: Any) -> MLAAttentionSpec:
    return latent(**{"head_size": 132, "dtype": torch.uint8} | other)


def layers(spec: Any, count: int = 3, name: str = "layer") -> dict[str, Any]:
    return {f"{name}.{index}": spec for index in range(count)}


UNIFORM = {
    "heads of K and V": attention(),
    "values of another size": attention(head_size_v=32),
    "fp8": attention(dtype=torch.uint8, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR),
    "scales beside each head": attention(
        dtype=torch.int8, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD, state_content_bytes=136
    ),
    "K and V as head slots": attention(num_head_slots=8, state_content_bytes=128),
    "one head": attention(num_kv_heads=1),
    "as many heads as blocks": attention(num_kv_heads=BLOCKS),
    "latent": latent(),
    "latent in 656 bytes": latent(dtype=torch.uint8, state_content_bytes=656, cache_dtype_str="fp8_ds_mla"),
    "latent of compressed tokens": latent(tokens_per_state=4),
}

CASES = [(what, [layers(spec)], layout) for what, spec in UNIFORM.items() for layout in ALL]
CASES += [
    (what, groups, layout)
    for layouts, models in (
        (
            ALL,
            {
                "full and windows, one pool": [layers(attention()), layers(window(), 3, "a"), layers(window(), 2, "b")],
                "a window of its own": [layers(window(), 2)],
            },
        ),
        (
            BLOCK_COMPACT,
            {
                "padded pages": [layers(latent(alignment=576, head_size=500))],
                "latent beside its indexer": [layers(latent()) | layers(indexer(), 3, "index")],
                "another number of heads in each layer": [
                    {f"layer.{heads}": attention(num_kv_heads=heads) for heads in (4, 2, 1)}
                ],
                "some layers of another data type": [
                    {
                        f"layer.{index}": attention(dtype=torch.float32 if index == 1 else torch.bfloat16)
                        for index in range(3)
                    }
                ],
                "latent and indexer in turn": [
                    {
                        f"{name}.{index}": spec
                        for index in range(3)
                        for name, spec in (("layer", latent()), ("index", indexer()))
                    }
                ],
                "groups with pages padded to one size": [
                    layers(attention()),
                    layers(window(head_size=48, page_size_padded=16384), 3, "a"),
                ],
                "other heads, one page size": [
                    layers(attention()),
                    layers(window(num_kv_heads=2, head_size=128), 3, "a"),
                ],
            },
        ),
        (
            BLOCK_OUTER,
            {
                "groups of several page sizes": [
                    layers(latent(tokens_per_state=4), 2, "c4") | layers(indexer(tokens_per_state=4), 2, "index"),
                    layers(
                        SlidingWindowMLASpec(
                            **vars(window()) | {"num_kv_heads": 1, "head_size": 512, "head_size_v": 0}
                        ),
                        3,
                        "w",
                    ),
                ],
                "blocks aligned beyond their pages": [layers(attention(block_stride_alignment=4096, head_size=40))],
            },
        ),
    )
    for what, groups in models.items()
    for layout in layouts
]


@pytest.mark.parametrize(("what", "groups", "layout"), CASES, ids=[f"{case[0]}, {case[2]}" for case in CASES])
def test_a_block_of_each_group_comes_back_in_another_block(what: str, groups: Any, layout: str) -> None:
    round_trip(Model(groups, layout))


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize(
    "spec", [attention(block_size=64), latent(), latent(tokens_per_state=4)], ids=["heads", "latent", "compressed"]
)
def test_blocks_that_kernels_have_in_parts_come_back_whole(spec: Any, layout: str) -> None:
    model = Model([layers(spec)], layout, [16])
    assert model.tensors["layer.0"].shape[0] == 4 * BLOCKS
    round_trip(model)


PACKED = {"scales beside each head", "K and V as head slots", "latent in 656 bytes", "latent of compressed tokens"}


@pytest.mark.parametrize("layout", ALL)
@pytest.mark.parametrize("what", UNIFORM)
def test_pages_of_heads_come_back_from_canonical_rows_too_and_others_are_refused(what: str, layout: str) -> None:
    model = Model([layers(UNIFORM[what])], layout, canonical_rows=True)
    if what in PACKED:
        with pytest.raises(ConfigError, match="has pages in a form of their own"):
            model.geometry()
    else:
        round_trip(model)


@pytest.mark.parametrize("layout", ALL)
def test_a_canonical_row_is_the_content_that_attention_reads(layout: str) -> None:
    """Layer by layer, and in each layer head by head or token by token, by vLLM's name for the order."""
    model = Model([layers(attention()), layers(window(), 2, "a")], layout, canonical_rows=True)
    canonical, by_heads = model.canonical(), layout.index("H") < layout.index("N")
    row_layout = RowLayout.of(canonical)
    rows = np.zeros((4, row_layout.row_stride), np.uint8)
    handler = HostCopyHandler(canonical, rows, row_layout, Direction.STORE, 1)
    assert handler.transfer_async(1, (GPULoadStoreSpec([7], [1, 0], [0, 0]), CPULoadStoreSpec([ROW])))
    handler.shutdown()
    pages = [model.tensors[f"layer.{index}"][7] for index in range(3)]
    ordered = [(page if by_heads else page.transpose(0, 1)).contiguous().view(torch.uint8) for page in pages]
    expected = torch.cat([page.reshape(-1) for page in ordered]).numpy().tobytes()
    assert rows[ROW, : row_layout.group_bytes[0]].tobytes() == expected


def test_a_layer_that_uses_another_s_kv_is_copied_once() -> None:
    model = Model([layers(attention())], "LBNHC")
    model.tensors["reader"] = model.tensors["layer.1"]
    model.kv_cache_config.kv_cache_groups[0].layer_names.append("reader")
    round_trip(model)


def test_allocations_that_end_in_padding_are_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm rounds the one allocation up to whole pages."""
    real = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda size, **kwargs: real(-(-size // 4096) * 4096, **kwargs))
    round_trip(Model([layers(attention(num_kv_heads=1, head_size=40))], "LBNHC"))


def round_trip(model: Model) -> None:
    canonical = model.canonical()
    layout = RowLayout.of(canonical)
    assert layout.group_bytes == model.geometry().group_bytes, "the scheduler would have refused the worker"
    assert model.geometry(of_scheduler=True) == model.geometry()
    rows = np.zeros((4, layout.row_stride), np.uint8)
    handlers = {direction: HostCopyHandler(canonical, rows, layout, direction, 1) for direction in Direction}
    try:
        for group, names in enumerate(model.groups):
            source, target = 1 + group, 6 + group  # groups share memory, but no block belongs to two groups
            before = {layer: model.blocks(layer) for layer in names}
            sizes = [int(index == group) for index in range(len(model.groups))]
            for job_id, (direction, block) in enumerate(((Direction.STORE, source), (Direction.LOAD, target))):
                gpu, cpu = GPULoadStoreSpec([block], sizes, [0] * len(sizes)), CPULoadStoreSpec([ROW])
                assert handlers[direction].transfer_async(
                    job_id, (gpu, cpu) if direction is Direction.STORE else (cpu, gpu)
                )
                handlers[direction].wait([job_id])
                assert [result.success for result in handlers[direction].get_finished()] == [True]
            for layer, was in before.items():
                now = model.blocks(layer)
                assert not torch.equal(was[source], was[target])
                assert torch.equal(now[target], was[source]), layer
                others = [block for block in range(BLOCKS) if block != target]
                assert torch.equal(now[others], was[others]), layer
    finally:
        for handler in handlers.values():
            handler.shutdown()


@pytest.mark.parametrize("layout", BLOCK_OUTER)
def test_a_block_that_is_kept_together_is_one_page(layout: str) -> None:
    """All layers need one gather and one copy."""
    canonical = Model([layers(latent()) | layers(indexer(), 3, "index")], layout).canonical()
    assert [len(refs) for refs in canonical.group_data_refs] == [1]


WITH_FULL_ATTENTION = [
    (what, groups, layout) for what, groups, layout in CASES[len(UNIFORM) * len(ALL) :] if "of its own" not in what
]


@pytest.mark.parametrize(
    ("what", "groups", "layout"), WITH_FULL_ATTENTION, ids=[f"{case[0]}, {case[2]}" for case in WITH_FULL_ATTENTION]
)
def test_the_simple_scheduler_s_worker_takes_the_same_caches(what: str, groups: Any, layout: str) -> None:
    served = Model(groups, layout)
    engine, cache = simple_cache(served.config, served.kv_cache_config, served.geometry())
    worker = SimpleCPUOffloadWorker(engine, cache, 4 * cache.block_bytes)
    try:
        worker.register_kv_caches(served.tensors)
    finally:
        worker.shutdown()


def test_windows_that_refer_to_a_prompt_are_refused() -> None:
    """vLLM classifies them as full attention, but frees blocks in the middle of a running request."""
    model = Model([layers(RSWASpec(**vars(attention()) | {"rswa_window": 32}))], "LBNHC")
    with pytest.raises(ConfigError, match="reference sliding window"):
        check_supported(model.config, model.kv_cache_config, lambda spec: str(get_kv_cache_spec_kind(spec).value), True)


@pytest.mark.parametrize(
    ("second_runner", "mixed", "early"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_whether_new_blocks_are_zeroed_before_the_connector_hears_of_them(
    second_runner: bool, mixed: bool, early: bool
) -> None:
    specs = layers(latent()) | (layers(indexer(), 3, "index") if mixed else {})
    model = Model([specs], "LBNHC")
    model.config.use_v2_model_runner = second_runner
    assert zeroes_early(model.config, model.kv_cache_config) is early
