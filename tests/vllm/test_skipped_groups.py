"""A KV-cache group whose blocks have no hashes is neither stored nor loaded, in the real engine.

Models with rings or scratch memory need an accelerator. vLLM is therefore told here that the sliding windows of Gemma 3
have no hashes. A window of one token needs nothing from before; from a wider one, blocks that matter are missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.handlers import CopyNothing
from tests.vllm.models import WINDOW, write_gemma
from tests.vllm.rig import answers_without_tiers, engine, prompt, wrong
from tests.vllm.test_windows import LAYERS, PAGE
from tiering.engines.vllm.worker_side import TransferResults

PROMPTS = [*(prompt(seed) for seed in range(3)), prompt(3, 192)]
"""Prompts; the last one consists of whole blocks."""
HELD = 3 * (200 // 32) + 192 // 32 - 1
"""Blocks of the hits; the last prompt's hit leaves a block to compute."""


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma(tmp_path_factory.mktemp("gemma"))


@pytest.fixture
def _windows_without_hashes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    if not hasattr(SlidingWindowSpec, "prefix_cacheable") or TransferResults is None:
        pytest.skip("in this vLLM, the blocks of all groups have hashes")
    with monkeypatch.context() as patch:
        patch.setattr(SlidingWindowSpec, "prefix_cacheable", False)
        yield


@pytest.mark.usefixtures("_windows_without_hashes")
@pytest.mark.parametrize("mode", ["tiering", "simple"])
@pytest.mark.parametrize(("window", "differ"), [(1, []), (WINDOW, [0, 1, 2, 3])], ids=["scratch", "negative control"])
def test_only_the_other_group_is_loaded(gemma: Path, tmp_path: Path, mode: str, window: int, differ: list[int]) -> None:
    options: dict[str, Any] = {"hf_overrides": {"sliding_window": window}, "num_gpu_blocks_override": 80}
    expected = answers_without_tiers(gemma, PROMPTS, **options)
    disk = {"type": "local", "path": str(tmp_path / "disk"), "capacity": "64MiB"}
    stack = {"primary": {"capacity": "64MiB"}, "mode": mode, **({"secondary": [disk]} if mode == "tiering" else {})}
    with engine(gemma, stack, **options) as first:
        groups = first.scheduler.kv_cache_config.kv_cache_groups
        (kept,) = first.connector.scheduler_half.groups
        assert len(groups) == 2
        assert groups[kept.engine_idx].layer_names == ["model.layers.1.self_attn.attn", "model.layers.3.self_attn.attn"]
        assert wrong(first.ask(PROMPTS), expected) == []
        first.evict()
        answers, loaded = first.loaded(lambda: first.ask(PROMPTS, params={"kv_tiering": {"store": False}}))
        assert wrong(answers, expected) == differ
        assert loaded == HELD * PAGE * LAYERS
        first.evict()
        with first.loads_through(CopyNothing):
            assert wrong(first.ask(PROMPTS, params={"kv_tiering": {"store": False}}), expected) == [0, 1, 2, 3]
        first.evict()
        assert first.free_blocks() == 79
    if mode == "simple" or differ:
        return
    with engine(gemma, stack, **options) as second:
        answers, from_disk = second.loaded(lambda: second.ask(PROMPTS))
        assert wrong(answers, expected) == []
        assert from_disk == loaded
        assert second.tier("local")["read_bytes"] > 0
