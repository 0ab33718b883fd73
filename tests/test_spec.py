"""The spec of a stack: refused configurations, and the way to shared rows for both sides."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tiering.api.engine import CanonicalKVCaches, EngineConfig, HeadShard, KVCacheGroup
from tiering.api.keys import make_offload_key
from tiering.api.namespace import KVLayout, ModelIdentity
from tiering.api.request import ReqContext
from tiering.api.transfer import GPULoadStoreSpec
from tiering.connector.scheduler import OffloadingConnectorScheduler
from tiering.copy.canonical import canonicalize
from tiering.copy.contract import OffloadingWorker
from tiering.errors import ConfigError, RegionError
from tiering.spec import TieringOffloadingSpec
from tiering.testing.clock import until

BLOCK_BYTES = 2 * 4 * 16 * 4
"""Bytes of a GPU block of two layers, with 4 tokens of 16 floats each."""
STACK = {"primary": {"capacity": "1MiB"}}
ENGINE = EngineConfig(block_sizes=(4,), hash_block_size=4, groups=(KVCacheGroup(("a", "b"), 4),))
MODEL = ModelIdentity(name="toy", weights="0123abcd", dtype="float32", layout="two layers of 16 floats")


def caches(fill: float = 0.0, blocks: int = 8) -> tuple[dict[str, torch.Tensor], CanonicalKVCaches]:
    tensors = {name: torch.full((blocks, 4, 16), fill) for name in ("a", "b")}
    return tensors, canonicalize(tensors, ENGINE.groups, blocks)


def copies(spec: TieringOffloadingSpec, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
    worker = OffloadingWorker()
    for source, destination, handler in spec.get_handlers(kv_caches):
        worker.register_handler(source, destination, handler)
    return worker


@pytest.fixture
def make_spec() -> Iterator[Callable[..., TieringOffloadingSpec]]:
    specs: list[TieringOffloadingSpec] = []

    def make(
        extra: dict[str, Any] | None = None, engine: EngineConfig = ENGINE, **options: Any
    ) -> TieringOffloadingSpec:
        options = {"model": MODEL, "group_bytes": (BLOCK_BYTES,), **options}
        specs.append(TieringOffloadingSpec(engine, {"config": STACK} if extra is None else extra, **options))
        return specs[-1]

    yield make
    for spec in specs:
        spec.close()


class TestRefused:
    @pytest.mark.parametrize(
        ("extra", "text"),
        [
            ({}, "config: missing"),
            ({"config": STACK, "primary": {"capacity": "1MiB"}}, "primary: is part of a stack"),
            (
                {"config": STACK, "lazy_ofload": True},
                "lazy_ofload: unknown word; did you mean lazy_offload.; allowed are advisor, block_size",
            ),
            ({"config": STACK, "offload_prompt_only": "false"}, "offload_prompt_only: 'false' is not true or false"),
            ({"config": STACK, "block_size": 6}, "block_size: 6 is not a multiple"),
            ({"config": {"primary": {"capacity": "1 parsec"}}}, "primary.capacity"),
        ],
    )
    def test_a_wrong_extra_configuration_with_the_word_that_is_wrong(
        self, make_spec: Callable[..., TieringOffloadingSpec], extra: dict[str, Any], text: str
    ) -> None:
        with pytest.raises(ConfigError, match=text):
            make_spec(extra)

    @pytest.mark.parametrize("sizes", [(), (512, 512), (0,)])
    def test_sizes_that_do_not_fit_the_groups(
        self, make_spec: Callable[..., TieringOffloadingSpec], sizes: tuple[int, ...]
    ) -> None:
        with pytest.raises(ConfigError, match="group_bytes"):
            make_spec(group_bytes=sizes)

    def test_a_layout_in_words_without_sizes(self, make_spec: Callable[..., TieringOffloadingSpec]) -> None:
        with pytest.raises(ConfigError, match="group_bytes: missing"):
            make_spec(group_bytes=None)

    def test_a_primary_tier_smaller_than_a_block(self, make_spec: Callable[..., TieringOffloadingSpec]) -> None:
        with pytest.raises(ConfigError, match=r"primary\.capacity"):
            make_spec({"config": {"primary": {"capacity": 1000}}}).get_manager()

    def test_kv_caches_that_are_not_what_the_configuration_says(
        self, make_spec: Callable[..., TieringOffloadingSpec]
    ) -> None:
        spec = make_spec(group_bytes=(2 * BLOCK_BYTES,))
        with pytest.raises(ConfigError, match="the KV caches have blocks"):
            copies(spec, caches()[1])

    @pytest.mark.parametrize(
        ("layout", "heads"), [("canonical", None), ("plain", HeadShard(1, outside=True))], ids=["no heads", "heads"]
    )
    def test_a_layout_that_the_engine_s_rows_do_not_have(
        self, make_spec: Callable[..., TieringOffloadingSpec], tmp_path: Path, layout: str, heads: HeadShard | None
    ) -> None:
        local = {"type": "local", "path": str(tmp_path), "capacity": "1MiB"}
        with pytest.raises(ConfigError, match=f"layout: {layout} is not the layout of this engine's rows"):
            make_spec({"config": {**STACK, "secondary": [local], "layout": layout}}, heads=heads)


class TestStack:
    def test_from_a_file(self, make_spec: Callable[..., TieringOffloadingSpec], tmp_path: Path) -> None:
        file = tmp_path / "stack.yaml"
        file.write_text("primary: {capacity: 64KiB}\n")
        with make_spec({"config": str(file)}).get_manager() as manager:
            assert manager.primary_tier.num_rows == 16

    def test_a_relative_file_is_named_in_full_at_the_start(
        self,
        make_spec: Callable[..., TieringOffloadingSpec],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        (tmp_path / "stack.yaml").write_text(
            "primary: {capacity: 64KiB}\nsecondary: [{type: local, path: kv, capacity: 1MiB}]\n"
        )
        monkeypatch.chdir(tmp_path)
        with caplog.at_level("INFO", "kv_tiering"), make_spec({"config": "stack.yaml"}).get_manager():
            pass
        assert f"the stack file stack.yaml is {tmp_path}/stack.yaml" in caplog.messages
        (line,) = (line for line in caplog.messages if " is relative" in line)
        assert line.startswith(f"tier local: path kv is relative, and means {tmp_path}/kv in this working directory: ")

    def test_beside_the_other_words(self, make_spec: Callable[..., TieringOffloadingSpec]) -> None:
        spec = make_spec({**STACK, "offload_prompt_only": False})
        assert not spec.offload_prompt_only
        assert spec.stack.primary.capacity == 1 << 20

    def test_block_sizes_from_the_models_layout(self, make_spec: Callable[..., TieringOffloadingSpec]) -> None:
        layout = KVLayout(
            kv_dtype="float32",
            layer_names=("a", "b"),
            groups=("full",),
            gpu_block_size=(4,),
            block_size_factor=1,
            group_bytes=(BLOCK_BYTES,),
            memory_order="NHD",
            parallel_sizes=(("tensor", 1),),
            hash_algorithm="sha256",
            hash_seed="0",
            hash_block_size=4,
        )
        assert make_spec(group_bytes=None, model=replace(MODEL, layout=layout)).group_bytes == (BLOCK_BYTES,)


class TestOneProcess:
    @pytest.mark.parametrize("worker_first", [True, False])
    def test_both_sides_see_the_same_rows(
        self, make_spec: Callable[..., TieringOffloadingSpec], worker_first: bool
    ) -> None:
        spec = make_spec()
        _, canonical = caches(fill=1.5)
        if worker_first:
            worker, manager = copies(spec, canonical), spec.get_manager()
        else:
            manager = spec.get_manager()
            worker = copies(spec, canonical)
        _store_one_block(manager, worker)
        worker.shutdown()
        manager.shutdown()

    def test_the_manager_is_one(self, make_spec: Callable[..., TieringOffloadingSpec]) -> None:
        spec = make_spec()
        with spec.get_manager() as manager:
            assert spec.get_manager() is manager

    def test_a_closed_spec_never_hands_out_other_rows(self, make_spec: Callable[..., TieringOffloadingSpec]) -> None:
        spec = make_spec()
        worker = copies(spec, caches()[1])
        spec.close()
        with pytest.raises(RegionError, match="closed"):
            spec.get_manager()
        worker.shutdown()

    def test_the_scheduler_half_drives_it(self, make_spec: Callable[..., TieringOffloadingSpec]) -> None:
        spec = make_spec({"config": {**STACK, "secondary": [{"type": "memory", "capacity": "1MiB"}]}})
        scheduler = OffloadingConnectorScheduler(spec)
        assert not scheduler.has_pending_work()
        assert "connector" in scheduler.get_stats()
        scheduler.shutdown()


class TestSeveralSides:
    def test_share_the_rows_by_the_engines_name(self, make_spec: Callable[..., TieringOffloadingSpec]) -> None:
        engine = replace(ENGINE, engine_id=f"test-{uuid.uuid4().hex}")
        on_worker, on_scheduler = make_spec(engine=engine), make_spec(engine=engine)
        worker, manager = copies(on_worker, caches(fill=1.5)[1]), on_scheduler.get_manager()
        _store_one_block(manager, worker)
        worker.shutdown()
        on_worker.close()
        manager.shutdown()

    def test_each_rank_writes_its_own_part(self, make_spec: Callable[..., TieringOffloadingSpec]) -> None:
        engine = replace(ENGINE, engine_id=f"test-{uuid.uuid4().hex}", world_size=2)
        sizes = (2 * BLOCK_BYTES,)
        sides = [make_spec(engine=engine, rank=rank, group_bytes=sizes) for rank in range(2)]
        workers = [copies(spec, caches(fill=rank + 1.0)[1]) for rank, spec in enumerate(sides)]
        manager = make_spec(engine=engine, group_bytes=sizes).get_manager()
        row = _store_one_block(manager, *workers)
        halves = row[: 2 * BLOCK_BYTES].view(np.float32).reshape(2, -1)
        assert [set(half.tolist()) for half in halves] == [{1.0}, {2.0}]
        for spec, worker in zip(sides, workers, strict=True):
            worker.shutdown()
            spec.close()
        manager.shutdown()


def _store_one_block(manager: Any, *workers: OffloadingWorker) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Store GPU block 3 through all workers and return its row, which must not be empty."""
    ctx = ReqContext("r1")
    manager.on_new_request(ctx)
    output = manager.prepare_store([make_offload_key(b"h" * 32, 0)], ctx)
    spec = (GPULoadStoreSpec([3], [1], [0]), output.store_spec)
    assert not any(worker.transfer_all_async([(0, spec)]) for worker in workers)
    assert all(
        until(lambda: [result.success for result in worker.get_finished()] == [True])  # noqa: B023
        for worker in workers
    )
    manager.complete_store(output.keys_to_store, ctx)
    manager.on_request_finished(ctx)
    row = np.array(np.asarray(manager.primary_tier.get_kv_memoryview())[int(output.store_spec.block_ids[0])])
    assert row.any()
    return row
