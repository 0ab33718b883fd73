"""New weights in a running engine with vLLM's own offloading, without a reset of its connector."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.vllm_own import compile_copy, compiler, install
from tests.vllm.models import write_llama
from tests.vllm.rig import (
    BLOCK,
    MAX_LEN,
    NUM_BLOCKS,
    Answer,
    Engine,
    answers_without_tiers,
    prepare_environment,
    prompt,
    wrong,
)
from tiering.engines.vllm.new_weights import WeightWatch

PROMPTS = [prompt(seed) for seed in range(3)]
LONGER = [[*tokens[: 4 * BLOCK], *prompt(seed, 100)] for seed, tokens in enumerate(PROMPTS, 100)]
"""Prompts that find the first blocks of the others in vLLM's own cache."""
PATIENCE = 600.0


def _settle(running: Engine) -> None:
    while running.scheduler.has_requests():
        running.llm.llm_engine.step()


def _answers(copies: Path, model: Path, other: Path, disk: Path, *, watched: bool) -> list[list[Answer]]:
    """Return the answers after new weights: at once, and after the engine's cache was emptied twice."""
    from vllm import LLM

    install(copies)
    if not watched:
        WeightWatch.check = lambda self, **named: None  # type: ignore[method-assign]
    local = {"type": "local", "path": str(disk), "capacity": "64MiB", "segment_size": "4MiB"}
    module = {"type": "KVTieringTier", "module_path": "tiering.engines.vllm_tier"}
    tier = {**module, "primary": {"capacity": "64MiB"}, "secondary": [local]}
    words = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 64 << 20, "secondary_tiers": [tier]}
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": words}
    settings: dict[str, Any] = {"dtype": "float32", "block_size": BLOCK, "max_model_len": MAX_LEN}
    settings |= {"num_gpu_blocks_override": NUM_BLOCKS, "skip_tokenizer_init": True, "enforce_eager": True}
    running = Engine(LLM(str(model), **settings, kv_transfer_config=transfer))

    def evict() -> None:
        _settle(running)
        running.ask([prompt(10_000 + number, 500) for number in range(4)], max_tokens=1)
        _settle(running)
        assert running.llm.reset_prefix_cache()

    running.ask(PROMPTS)
    evict()
    found = [running.ask(PROMPTS)]
    running.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
    running.ask(LONGER)
    _settle(running)
    assert running.llm.reset_prefix_cache()
    found.append(running.ask(PROMPTS))
    for prompts in (LONGER, PROMPTS):
        evict()
        found.append(running.ask(prompts))
    _settle(running)
    running.llm.llm_engine.engine_core.shutdown()
    return found


@pytest.mark.skipif(compiler() is None, reason="no C compiler for the copies in place of a GPU's")
@pytest.mark.parametrize("watched", [True, False])
def test_no_answer_comes_from_kv_of_other_weights(watched: bool, llama: Path, tmp_path: Path) -> None:
    """Neither vLLM's CPU tier nor the stack behind it has any; without the watch, all answers are wrong."""
    other = write_llama(tmp_path / "other", 1)
    old, new = (answers_without_tiers(model, [*PROMPTS, *LONGER]) for model in (llama, other))
    copies = compile_copy(tmp_path)
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawning, initializer=prepare_environment) as pool:
        before, *after = pool.submit(_answers, copies, llama, other, tmp_path / "disk", watched=watched).result(
            PATIENCE
        )
    assert wrong(before, old[:3]) == []
    for found, right in zip(after, (new[:3], new[3:], new[:3]), strict=True):
        assert wrong(found, right) == ([] if watched else [0, 1, 2])
