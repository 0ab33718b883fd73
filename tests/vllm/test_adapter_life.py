"""A life of LoRA adapters at random, with tiers and without: which wrong answers are vLLM's own.

vLLM's prefix cache names blocks by an adapter's name, too, and keeps them when the worker reads other files.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.models import write_adapter
from tests.vllm.rig import Answer, Engine, engine, prompt

PROMPTS = [prompt(seed, 100) for seed in range(3)]
NAMES = ["red", "green", "blue"]
VERSIONS = 3
OPTIONS: dict[str, Any] = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": 8}
STEPS, SEEDS = 60, range(2)
Answers = list[list[Answer]]
"""Right answers by version and prompt."""


def by_copy(source: Path, target: Path) -> None:
    """Write an adapter's files over those of another one."""
    shutil.copyfile(source, target)


def by_rename(source: Path, target: Path) -> None:
    """Put a new file in the place of the old one."""
    shutil.copyfile(source, target.with_name("new"))
    target.with_name("new").rename(target)


def with_old_times(source: Path, target: Path) -> None:
    """Write an adapter's files over those of another one, and set their times back."""
    was = target.stat()
    shutil.copyfile(source, target)
    os.utime(target, ns=(was.st_atime_ns, was.st_mtime_ns))


WRITES: list[Callable[[Path, Path], None]] = [by_copy, by_rename, with_old_times]


class Life:
    """A sequence of events that depends on the seed alone, with the answers that are of no version.

    Args:
        running: the engine.
        versions: directories with the versions of the adapters.
        answers: right answers.
        directory: directory for the adapters' files.
        own_cache: False to empty vLLM's own cache before each question.
    """

    def __init__(
        self, running: Engine, versions: list[Path], answers: Answers, directory: Path, *, own_cache: bool
    ) -> None:
        from vllm.lora.request import LoRARequest

        self.running, self.versions, self.answers, self.own_cache = running, versions, answers, own_cache
        self.adapters = {}
        for number, name in enumerate(NAMES, 1):
            shutil.copytree(versions[0], directory / name)
            self.adapters[name] = LoRARequest(name, number, str(directory / name))
        self.wrong: list[str] = []
        self.right = self.loaded = 0

    def live(self, dice: random.Random) -> None:
        for step in range(STEPS):
            adapter, event = self.adapters[dice.choice(NAMES)], dice.random()
            if event < 0.2:
                source = self.versions[dice.randrange(VERSIONS)] / "adapter_model.safetensors"
                dice.choice(WRITES)(source, Path(adapter.lora_path) / source.name)
            elif event < 0.27:
                self.running.llm.llm_engine.remove_lora(adapter.lora_int_id)
            elif event < 0.32:
                self.reset(tiers=True)
            else:
                number = dice.randrange(len(PROMPTS))
                if not self.own_cache:
                    self.reset(tiers=False)
                [answer], loaded = self.running.loaded(partial(self.running.ask, [PROMPTS[number]], 2, lora=adapter))
                self.loaded += loaded
                if any(answer.matches(right[number]) for right in self.answers):
                    self.right += 1
                else:
                    self.wrong.append(f"step {step}: {adapter.lora_name}, prompt {number}")

    def reset(self, *, tiers: bool) -> None:
        """Empty vLLM's own cache, and the tiers too if ``tiers`` is True."""
        if self.running.connector is not None:
            self.running.settle()
        assert self.running.llm.reset_prefix_cache(reset_connector=tiers)


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("versions")
    return [write_adapter(directory / str(seed), seed) for seed in range(VERSIONS)]


@pytest.fixture(scope="module")
def answers(llama: Path, versions: list[Path]) -> Answers:
    from vllm.lora.request import LoRARequest

    with engine(llama, None, enable_prefix_caching=False, **OPTIONS) as plain:
        return [
            [plain.ask([tokens], 2, lora=LoRARequest(f"v{number}", number + 1, str(path)))[0] for tokens in PROMPTS]
            for number, path in enumerate(versions)
        ]


def lives(running: Engine, versions: list[Path], answers: Answers, directory: Path, *, own_cache: bool) -> list[Life]:
    """Return a life for each seed, each in an engine whose caches are empty."""
    lived = []
    for seed in SEEDS:
        (directory / str(seed)).mkdir(parents=True)
        life = Life(running, versions, answers, directory / str(seed), own_cache=own_cache)
        life.live(random.Random(seed))
        print(f"seed {seed}: {life.right} right, {life.loaded} bytes loaded, of no version: {life.wrong}")
        for adapter in life.adapters.values():
            running.llm.llm_engine.remove_lora(adapter.lora_int_id)
        life.reset(tiers=True)
        lived.append(life)
    return lived


@pytest.mark.slow
def test_tiers_add_no_answer_that_is_of_no_version_of_an_adapter(
    llama: Path, versions: list[Path], answers: Answers, tmp_path: Path
) -> None:
    with engine(llama, None, **OPTIONS) as plain:
        expected = lives(plain, versions, answers, tmp_path / "plain", own_cache=True)
    local = {"type": "local", "path": str(tmp_path / "disk"), "capacity": "64MiB"}
    with engine(llama, {"primary": {"capacity": "64MiB"}, "secondary": [local]}, **OPTIONS) as tiered:
        found = lives(tiered, versions, answers, tmp_path / "tiered", own_cache=True)
        from_tiers = lives(tiered, versions, answers, tmp_path / "from tiers", own_cache=False)
    assert [life.wrong for life in found] == [life.wrong for life in expected]
    assert any(life.wrong for life in expected), "no life shows what vLLM's own cache does"
    assert [life.wrong for life in from_tiers] == [[] for _ in SEEDS]
    assert sum(life.loaded for life in from_tiers) > 0
