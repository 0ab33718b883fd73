"""Pooling models: embeddings from the engine's tiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.handlers import CopyNothing
from tests.vllm.models import write_llama, write_tokenizer
from tests.vllm.rig import Engine, engine, prompt

PROMPTS = [prompt(seed) for seed in range(3)]


def embeddings(running: Engine) -> list[list[float]]:
    outputs = running.llm.embed([{"prompt_token_ids": tokens} for tokens in PROMPTS], use_tqdm=False)
    return [output.outputs.embedding for output in outputs]


@pytest.mark.parametrize("mode", ["tiering", "simple"])
def test_embeddings_are_the_same_from_a_tier_and_after_a_restart(tmp_path: Path, mode: str) -> None:
    llama = write_tokenizer(write_llama(tmp_path / "model"))
    local = {"type": "local", "path": str(tmp_path / "disk"), "capacity": "64MiB"}
    stack: dict[str, Any] = {"primary": {"capacity": "64MiB"}, "mode": mode}
    if mode == "tiering":
        stack["secondary"] = [local]
    options = {"runner": "pooling", "convert": "embed", "skip_tokenizer_init": False}
    with engine(llama, None, enable_prefix_caching=False, **options) as plain:
        expected = embeddings(plain)

    def right(found: list[list[float]]) -> bool:
        return all(one == pytest.approx(other, abs=1e-4) for one, other in zip(found, expected, strict=True))

    with engine(llama, stack, **options) as first:
        assert right(embeddings(first))
        first.settle()
        assert first.llm.reset_prefix_cache()
        found, loaded = first.loaded(lambda: embeddings(first))
        assert right(found)
        assert loaded > 0
        first.settle()
        assert first.llm.reset_prefix_cache()
        with first.loads_through(CopyNothing):
            assert not right(embeddings(first)), "negative control: what is not loaded shows"
        first.settle()
    if mode == "simple":
        return
    with engine(llama, stack, **options) as second:
        found, from_disk = second.loaded(lambda: embeddings(second))
        assert right(found)
        assert from_disk == loaded
