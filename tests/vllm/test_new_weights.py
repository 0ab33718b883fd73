"""New weights in a running engine, without the connector's reset: no answer from KV of other weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.models import write_llama
from tests.vllm.rig import BLOCK_BYTES, Engine, answers_without_tiers, engine, prompt, whole_blocks, wrong
from tiering.engines.vllm.new_weights import WeightWatch

PROMPTS, LATER = [prompt(seed) for seed in range(3)], [prompt(seed) for seed in range(3, 6)]
ALL = whole_blocks(PROMPTS) * BLOCK_BYTES


def norms(model: Path) -> list[tuple[str, Any]]:
    """Return other weights of a model's norms, which vLLM's CPU build keeps as they are."""
    from safetensors.torch import load_file

    tensors = load_file(model / "model.safetensors")
    return [(name, tensor * 3 + 0.5) for name, tensor in tensors.items() if "layernorm" in name]


def write_other_norms(directory: Path, model: Path) -> Path:
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, directory)
    file = directory / "model.safetensors"
    save_file({**load_file(file), **dict(norms(model))}, file, metadata={"format": "pt"})
    return directory


def by_vllm(running: Engine, model: Path, other: Path) -> None:
    """Let vLLM read other weights from a directory."""
    running.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})


def by_function(running: Engine, model: Path, other: Path) -> None:
    """Let a function of one's own load weights in the workers, as trainers do."""
    weights = norms(model)
    running.llm.apply_model(lambda module: module.load_weights(weights) and None)


def in_place(running: Engine, model: Path, other: Path) -> None:
    """Let a function of one's own copy weights into the parameters."""
    weights = dict(norms(model))

    def write(worker: Any) -> None:
        for name, parameter in worker.model_runner.get_model().named_parameters():
            if name in weights:
                parameter.data.copy_(weights[name])

    running.llm.collective_rpc(write)


def directly(running: Engine, model: Path, other: Path) -> None:
    """Load weights into the model of this process, without a call of vLLM's."""
    core = running.llm.llm_engine.engine_core.engine_core
    core.model_executor.driver_worker.model_runner.get_model().load_weights(norms(model))


Way = Callable[[Engine, Path, Path], None]


@pytest.mark.parametrize(
    ("way", "watched"),
    [
        *((by_vllm, watched) for watched in (True, False)),
        *((way, True) for way in (by_function, in_place)),
        *((directly, watched) for watched in (True, False)),
    ],
)
def test_no_answer_comes_from_kv_of_other_weights(
    way: Way, watched: bool, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the watch, answers are wrong, later ones with the old weights too; the test sees both."""
    if not watched:
        monkeypatch.setattr(WeightWatch, "check", lambda self, **named: None)
    other = write_llama(tmp_path / "other", 1) if way is by_vllm else write_other_norms(tmp_path / "other", llama)
    old, new = (answers_without_tiers(model, [*PROMPTS, *LATER]) for model in (llama, other))
    assert wrong(old, new) == [*range(6)]
    disk = {"type": "local", "path": str(tmp_path / "disk"), "capacity": "64MiB"}
    stack = {"primary": {"capacity": "64MiB"}, "secondary": [disk]}
    with engine(llama, stack) as running:
        assert wrong(running.ask(PROMPTS), old[:3]) == []
        running.settle()
        way(running, llama, other)
        if way is not directly:  # where nothing is called, nothing is known before vLLM's reset
            assert wrong(running.ask(LATER), new[3:]) == []
            running.settle()
        assert running.llm.reset_prefix_cache()
        answers, loaded = running.loaded(lambda: running.ask(PROMPTS))
        assert (wrong(answers, new[:3]) == [], loaded == 0) == (watched, watched)
        running.evict()
        answers, loaded = running.loaded(lambda: running.ask(PROMPTS))
        assert (wrong(answers, new[:3]) == [], loaded) == (watched, ALL)
    with engine(llama, stack) as restarted:
        answers = restarted.ask([*PROMPTS, *LATER])
        assert (wrong(answers, old) == []) == (watched or way is directly)
