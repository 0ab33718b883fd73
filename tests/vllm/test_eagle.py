"""Speculative heads (EAGLE, MTP) whose layer is in the same KV-cache group as the model's layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.models import write_eagle, write_mimo
from tests.vllm.rig import BLOCK_BYTES, Answer, Engine, answers_without_tiers, engine, prompt, whole_blocks, wrong
from tests.wrapped_handler import Wrapped
from tiering.copy.contract import OffloadingHandler, TransferResult

PROMPTS = [prompt(seed) for seed in range(3)]
TOKENS = 12
LAYERS = 3
"""Layers of the model; the head has one more."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """A model with a speculative head."""

    model: Path
    words: dict[str, Any]
    """vLLM's configuration of the head."""


@pytest.fixture(scope="module", params=["eagle", "mtp"])
def head(llama: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Speculation:
    directory = tmp_path_factory.mktemp("head")
    if request.param == "mtp":
        return Speculation(write_mimo(directory), {"method": "mtp", "num_speculative_tokens": 1})
    write_eagle(directory, llama)
    return Speculation(llama, {"method": "eagle", "model": str(directory), "num_speculative_tokens": 3})


@pytest.fixture(scope="module")
def expected(head: Speculation) -> list[Answer]:
    return answers_without_tiers(head.model, PROMPTS, TOKENS)


@pytest.fixture(scope="module", params=["tiering", "simple"])
def speculating(head: Speculation, expected: list[Answer], request: pytest.FixtureRequest) -> Iterator[Engine]:
    options = {
        "speculative_config": head.words,
        "async_scheduling": False,  # else the scheduler does not know the drafts
    }
    with engine(head.model, {"primary": {"capacity": "64MiB"}, "mode": request.param}, **options) as running:
        yield running


def ask(running: Engine) -> tuple[list[Answer], list[list[int]]]:
    """Return the answers, and the drafts of each step of each request; one request runs at a time."""
    drafts: list[list[int]] = []
    scheduler = running.scheduler
    update = scheduler.update_draft_token_ids

    def updating(found: Any) -> None:
        drafts.extend(found.draft_token_ids)
        update(found)

    scheduler.update_draft_token_ids = updating
    try:
        return [running.ask([tokens], TOKENS)[0] for tokens in PROMPTS], drafts
    finally:
        scheduler.update_draft_token_ids = update


class HeadWithoutKV(Wrapped):
    """A handler that empties the head's KV after each load."""

    def __init__(self, inner: OffloadingHandler) -> None:
        super().__init__(inner)
        self.head: Any = None

    def get_finished(self) -> list[TransferResult]:
        found = self.inner.get_finished()
        if found:
            self.head.zero_()
        return found


def test_the_heads_kv_comes_back_with_the_models(speculating: Engine, expected: list[Answer]) -> None:
    (group,) = speculating.scheduler.kv_cache_config.kv_cache_groups
    assert len(group.layer_names) == LAYERS + 1
    assert not group.is_eagle_group, "the last block of a prompt is stored and loaded too"
    answers, computed = ask(speculating)
    assert wrong(answers, expected) == []
    assert len(computed) >= TOKENS
    speculating.evict()
    (answers, drafts), loaded = speculating.loaded(lambda: ask(speculating))
    assert loaded == whole_blocks(PROMPTS) * BLOCK_BYTES // LAYERS * (LAYERS + 1)
    assert wrong(answers, expected) == []
    assert drafts == computed


def test_negative_control_other_kv_of_the_head_shows_in_the_drafts_only(
    speculating: Engine, expected: list[Answer]
) -> None:
    speculating.evict()
    _, computed = ask(speculating)
    speculating.evict()
    runner = speculating.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    with speculating.loads_through(HeadWithoutKV) as handler:
        handler.head = runner.kv_caches[-1]
        answers, drafts = ask(speculating)
    assert wrong(answers, expected) == []
    assert drafts != computed
