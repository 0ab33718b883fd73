"""Models of further kinds, from the CPU tier and, in an engine started anew, from a disk."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.handlers import CopyNothing, OneWrongBlock
from tests.vllm.models import (
    IMAGE,
    write_draft,
    write_eagle,
    write_idefics,
    write_llama,
    write_llama4,
    write_mimo,
    write_mistral,
    write_quantised,
)
from tests.vllm.rig import Answer, Engine, answers_without_tiers, engine, prompt, wrong

PROMPTS = [prompt(seed) for seed in range(3)]
CHUNK = 128
"""Tokens of a chunk of local attention; hits of 192 tokens end in the middle of one."""


def picture(seed: int) -> Any:
    """Return an image of random points."""
    from PIL import Image

    return Image.frombytes("RGB", (56, 56), random.Random(seed).randbytes(56 * 56 * 3))


def write_chunked(directory: Path) -> Path:
    return write_llama4(directory, chunk=CHUNK)


def eagle(model: Path) -> dict[str, Any]:
    head = write_eagle(model.with_suffix(".head"), model)
    return {"method": "eagle", "model": str(head), "num_speculative_tokens": 3}


def draft(model: Path) -> dict[str, Any]:
    other = write_draft(model.with_suffix(".draft"), model, noise=0.005)
    return {"method": "draft_model", "model": str(other), "num_speculative_tokens": 3}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of model, with the engine's options for it."""

    write: Callable[[Path], Path]
    options: dict[str, Any] = field(default_factory=dict)
    modes: tuple[str, ...] = ("tiering", "simple")
    groups: int = 1
    """Number of KV-cache groups."""
    sees: Callable[[int], Any] | None = None
    """Function that returns an image; None: prompts have none."""
    drafts: Callable[[Path], dict[str, Any]] | None = None
    """Function that returns the configuration of speculative decoding for a model; None: none."""


KINDS = {
    "chunked local attention": Kind(write_chunked, {"num_gpu_blocks_override": 120}, groups=3),
    "a window in all layers": Kind(write_mistral, modes=("tiering",)),
    "quantised weights": Kind(write_quantised),
    "images": Kind(write_idefics, {"skip_tokenizer_init": False}, sees=picture),
    "EAGLE": Kind(write_llama, drafts=eagle),
    "draft model": Kind(write_llama, drafts=draft),
    "MTP": Kind(write_mimo, drafts=lambda model: {"method": "mtp", "num_speculative_tokens": 1}),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A model that was written, with the answers of an engine without cache."""

    kind: Kind
    model: Path
    prompts: list[list[int]]
    expected: list[Answer]
    image: Any
    options: dict[str, Any]

    def ask(self, running: Engine, store: bool = True) -> list[Answer]:
        """Return the answers to the prompts."""
        return running.ask(self.prompts, params={"kv_tiering": {"store": store}}, image=self.image)


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    kind = KINDS[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE", "1")
        model = kind.write(tmp_path_factory.mktemp("model"))
        image = kind.sees and kind.sees(1)
        prompts = PROMPTS if image is None else [[*tokens[:100], IMAGE, *tokens[100:]] for tokens in PROMPTS]
        expected = answers_without_tiers(model, prompts, image=image, **kind.options)
        drafts = {} if kind.drafts is None else {"speculative_config": kind.drafts(model)}
        yield Case(kind, model, prompts, expected, image, {**kind.options, **drafts})


@pytest.mark.parametrize(
    ("case", "mode"), [(name, mode) for name, kind in KINDS.items() for mode in kind.modes], indirect=["case"]
)
def test_from_the_cpu_and_from_a_disk_after_a_restart(case: Case, mode: str, tmp_path: Path) -> None:
    disk = {"type": "local", "path": str(tmp_path / "disk"), "capacity": "64MiB"}
    stack = {"primary": {"capacity": "64MiB"}, "mode": mode, **({"secondary": [disk]} if mode == "tiering" else {})}
    with engine(case.model, stack, **case.options) as first:
        assert len(first.scheduler.kv_cache_config.kv_cache_groups) == case.kind.groups
        assert wrong(case.ask(first), case.expected) == []
        first.evict()
        answers, from_cpu = first.loaded(lambda: case.ask(first))
        assert wrong(answers, case.expected) == []
        assert from_cpu > 0
        for lie in (CopyNothing, OneWrongBlock):
            first.evict()
            with first.loads_through(lie):
                assert wrong(case.ask(first, store=False), case.expected) == [0, 1, 2], "negative control"
        first.settle()
    if mode == "simple":
        return
    with engine(case.model, stack, **case.options) as second:
        answers, from_disk = second.loaded(lambda: case.ask(second))
        assert wrong(answers, case.expected) == []
        assert from_disk == from_cpu
        assert second.tier("local")["read_bytes"] > 0
        if case.kind.sees is not None:
            second.evict()
            _, of_same = second.loaded(lambda: case.ask(second, store=False))
            second.evict()
            other = case.kind.sees(2)
            _, of_other = second.loaded(lambda: second.ask(case.prompts, image=other))
            assert 0 < of_other < of_same, "of another image, only the blocks before it are loaded"
