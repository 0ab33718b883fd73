"""LoRA adapters behind the tiers: KV of an adapter is its own, stays in this process, and never outlives the adapter's path."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.rig import BLOCK_BYTES, Answer, Engine, engine, prompt, whole_blocks, wrong

PROMPTS = [prompt(seed) for seed in range(3)]
ALL = whole_blocks(PROMPTS) * BLOCK_BYTES
RANK = 4
OPTIONS: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 4, "max_lora_rank": 8}


def write_adapter(directory: Path, seed: int) -> Path:
    """An adapter of :func:`tests.vllm.models.write_llama` that changes K and V in all layers; returns ``directory``."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir()
    dice = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(3):
        for name, width in [("q_proj", 128), ("k_proj", 64), ("v_proj", 64)]:
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(RANK, 128, generator=dice) * 0.1
            tensors[f"{at}.lora_B.weight"] = torch.randn(width, RANK, generator=dice) * 0.5
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "v_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


@dataclass(frozen=True, slots=True)
class Asked:
    """How to ask with an adapter, as vLLM's server would name it."""

    name: str
    number: int
    path: Path

    def request(self) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(self.name, self.number, str(self.path))


def ask(running: Engine, adapter: Asked | None, params: dict[str, Any] | None = None) -> list[Answer]:
    return running.ask(PROMPTS, params=params, lora=None if adapter is None else adapter.request())


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Asked]:
    directory = tmp_path_factory.mktemp("adapters")
    first, second = write_adapter(directory / "one", 1), write_adapter(directory / "two", 2)
    return {"one": Asked("one", 1, first), "two": Asked("two", 2, second), "new one": Asked("one", 3, second)}


@pytest.fixture(scope="module")
def expected(llama: Path, adapters: dict[str, Asked]) -> dict[str, list[Answer]]:
    with engine(llama, None, enable_prefix_caching=False, **OPTIONS) as plain:
        return {"base": ask(plain, None), "one": ask(plain, adapters["one"]), "two": ask(plain, adapters["two"])}


@pytest.fixture(scope="module")
def tiered(llama: Path, expected: dict[str, list[Answer]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    disk = {"type": "local", "path": str(tmp_path_factory.mktemp("lora")), "capacity": "64MiB"}
    with engine(llama, {"primary": {"capacity": "64MiB"}, "secondary": [disk]}, **OPTIONS) as running:
        yield running


def test_adapters_change_the_answers(expected):
    for first, second in [("base", "one"), ("base", "two"), ("one", "two")]:
        assert wrong(expected[first], expected[second]) == [0, 1, 2]


def test_kv_of_the_base_model_and_of_adapters_is_never_mixed_and_adapters_leave_none_on_disk(tiered, adapters, expected):
    for name, adapter in [("base", None), ("one", adapters["one"]), ("two", adapters["two"])]:
        answers, loaded = tiered.loaded(lambda adapter=adapter: ask(tiered, adapter))
        assert wrong(answers, expected[name]) == []
        assert loaded == 0
        tiered.settle()
        assert tiered.tier("local")["blocks"] == whole_blocks(PROMPTS)
        tiered.evict()


@pytest.mark.parametrize("name", ["one", "two"])
def test_kv_of_an_adapter_comes_back_from_the_cpu_tier(tiered, adapters, expected, name):
    ask(tiered, adapters[name])
    tiered.evict()
    answers, loaded = tiered.loaded(lambda: ask(tiered, adapters[name]))
    assert wrong(answers, expected[name]) == []
    assert loaded == ALL


def test_another_adapter_under_a_name_that_was_used_gets_nothing_of_the_first_ones_kv(tiered, adapters, expected):
    ask(tiered, adapters["one"])
    tiered.evict()
    assert tiered.llm.llm_engine.remove_lora(adapters["one"].number)
    answers, loaded = tiered.loaded(lambda: ask(tiered, adapters["new one"]))
    assert wrong(answers, expected["two"]) == []
    assert loaded == 0
