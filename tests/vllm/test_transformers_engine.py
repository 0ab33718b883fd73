"""The engine on transformers answers as one without tiers does, also after a restart."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import tiering
from examples.transformers_engine import Engine
from tests.vllm.models import write_llama

NEW_TOKENS = 8


def stack(directory: Path, *, disk: bool) -> Path:
    file = directory / f"stack-{disk}.yaml"
    tier = f"{{type: local, path: {directory}/kv, capacity: 64MiB, segment_size: 16MiB}}"
    file.write_text(f"primary: {{capacity: 4MiB}}\nsecondary: [{tier if disk else ''}]\n")
    return file


def prompts() -> list[list[int]]:
    """Prompts with the same beginning and different ends."""
    dice = random.Random(1)
    start = [dice.randrange(512) for _ in range(100)]
    return [start[:length] + [dice.randrange(512) for _ in range(20)] for length in (100, 90, 17, 0)]


def answers(model: Path, stack_file: Path) -> tuple[list[list[int]], list[int]]:
    """Return the answers of a new engine to all prompts, and the numbers of cached tokens."""
    engine, cached = Engine(model, stack_file), []
    with engine.manager:
        found = []
        for prompt in prompts():
            found.append(engine.generate(prompt, NEW_TOKENS))
            cached.append(engine.cached)
    return found, cached


def test_tokens_are_those_of_an_engine_without_tiers(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model")
    expected = []
    for prompt in prompts():
        engine = Engine(model, stack(tmp_path, disk=False))
        with engine.manager:
            expected.append(engine.generate(prompt, NEW_TOKENS))
            assert engine.cached == 0
    assert answers(model, stack(tmp_path, disk=True)) == (expected, [0, 80, 16, 0])
    assert answers(model, stack(tmp_path, disk=True)) == (expected, [112, 96, 32, 16])


def test_another_models_kv_is_not_found(tmp_path: Path) -> None:
    answers(write_llama(tmp_path / "model"), stack(tmp_path, disk=True))
    (tmp_path / "other").mkdir()
    other = write_llama(tmp_path / "other" / "model", seed=1)
    assert answers(other, stack(tmp_path, disk=True))[1] == [0, 80, 16, 0]


def test_another_prompts_kv_changes_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this the first test could not see wrong KV."""
    model = write_llama(tmp_path / "model")
    first, other = prompts()[0], [token ^ 1 for token in prompts()[0]]
    engine = Engine(model, stack(tmp_path, disk=False))
    with engine.manager:
        right = engine.generate(first, NEW_TOKENS)
        engine.generate(other, NEW_TOKENS)
        keys = tiering.prompt_keys
        monkeypatch.setattr(tiering, "prompt_keys", lambda tokens, size: keys([token ^ 1 for token in tokens], size))
        assert engine.generate(first, NEW_TOKENS) != right
        assert engine.cached == 112
