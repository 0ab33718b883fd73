"""Pipeline stages in the real server: hits, restarts, other splits, and swapped stages.

vLLM's CPU build answers requests with :mod:`tests.vllm.second_stage` only. Tokens and logprobs are those of an engine
with one stage and without cache.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.models import (
    STATE_BLOCK,
    write_adapter,
    write_falcon_h1,
    write_gemma,
    write_llama,
)
from tests.vllm.rig import BLOCK_BYTES, answers_without_tiers, engine, prompt, whole_blocks, wrong
from tests.vllm.server import Server, until
from tests.vllm.test_canonical_rows import FIRST, SECOND, step, stored, workers
from tests.vllm.test_lora import OPTIONS, Asked, ask
from tests.vllm.test_lora_server import LORA, hold
from tests.vllm.test_state_tails import PROMPTS as TAILED
from tests.vllm.test_state_tails import TAIL, UNIT
from tests.vllm.test_states import HELD, PROMPTS, plain_answers

pytestmark = pytest.mark.slow

STAGES = ("--pipeline-parallel-size", "2", "--worker-extension-cls", "tests.vllm.second_stage.SecondStage")
BLOCKS = whole_blocks(FIRST)


def stack(path: Path, layout: str = "plain") -> dict[str, Any]:
    local = {"type": "local", "path": str(path / "disk"), "capacity": "64MiB"}
    return {"primary": {"capacity": "64MiB"}, "secondary": [local], "layout": layout}


def loaded(server: Server) -> float:
    step(server)
    return server.loaded()


def test_stages_find_their_own_blocks_again_and_no_other_split_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_llama(tmp_path / "llama", layers=4)
    expected, all_bytes = answers_without_tiers(model, FIRST), BLOCKS * BLOCK_BYTES // 3 * 4
    with workers(model, tmp_path, 2, *STAGES, tensor=1, words=stack(tmp_path)) as two:
        assert wrong(two.ask(FIRST), expected) == []
        until(lambda: stored(two) >= BLOCKS, 60, "the stores of two stages")
        two.evict()
        assert wrong(two.ask(FIRST), expected) == []
        assert loaded(two) == all_bytes
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,3")
    with workers(model, tmp_path, 2, *STAGES, tensor=1, words=stack(tmp_path)) as uneven:
        assert wrong(uneven.ask(FIRST), expected) == []
        assert loaded(uneven) == 0
        until(lambda: stored(uneven) >= BLOCKS, 60, "the stores of uneven stages")
        uneven.evict()
        assert wrong(uneven.ask(FIRST), expected) == []
        assert loaded(uneven) == all_bytes
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "2,2")
    fault = tmp_path / "fault"
    monkeypatch.setenv("KV_TEST_STAGE_FAULT", str(fault))
    with workers(model, tmp_path, 2, *STAGES, tensor=1, words=stack(tmp_path)) as two:
        assert wrong(two.ask(FIRST), expected) == []
        assert loaded(two) == all_bytes, "the blocks of before the restart"
        two.evict()
        fault.write_text("swapped")
        answers = two.ask(FIRST, kv_transfer_params={"kv_tiering": {"store": False}})
        assert loaded(two) == 2 * all_bytes
        assert wrong(answers, expected) == [0, 1, 2], "negative control: the other stage's layers"


@pytest.mark.parametrize("tensor", [1, 2])
def test_canonical_blocks_are_shared_by_one_stage_and_by_two(llama: Path, tmp_path: Path, tensor: int) -> None:
    """The two stages have one or two workers each."""
    first, second = answers_without_tiers(llama, FIRST), answers_without_tiers(llama, SECOND)
    words = stack(tmp_path, "canonical")
    with engine(llama, words) as one:
        assert wrong(one.ask(FIRST), first) == []
        one.settle()
    with workers(llama, tmp_path, 2 * tensor, *STAGES, tensor=tensor, words=words) as two:
        assert wrong(two.ask(FIRST), first) == []
        assert loaded(two) == BLOCKS * BLOCK_BYTES
        before = stored(two)
        assert wrong(two.ask(SECOND), second) == []
        until(lambda: stored(two) >= before + BLOCKS, 60, "the stores of all workers")
    with engine(llama, words) as one:
        answers, found = one.loaded(lambda: one.ask(SECOND))
        assert wrong(answers, second) == []
        assert found == BLOCKS * BLOCK_BYTES


def test_windows_beside_full_attention_with_few_layers_of_each_on_the_first_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stage has one layer, with a window, and no layer of the group with full attention."""
    model, words = write_gemma(tmp_path / "model"), stack(tmp_path)
    expected = answers_without_tiers(model, FIRST, num_gpu_blocks_override=80)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,3")
    options = (*STAGES, "--num-gpu-blocks-override", "80")
    with workers(model, tmp_path, 2, *options, tensor=1, words=words) as two:
        assert wrong(two.ask(FIRST), expected) == []
        until(lambda: stored(two) > 0 and two.metric("kv_tiering_jobs_in_flight") == 0, 60, "the stores")
        two.evict()
        assert wrong(two.ask(FIRST), expected) == []
        from_cpu = loaded(two)
        assert from_cpu > 0
    with workers(model, tmp_path, 2, *options, tensor=1, words=words) as two:
        assert wrong(two.ask(FIRST), expected) == []
        assert loaded(two) == from_cpu


def test_loads_that_fail_on_one_stage_preemptions_and_adapters(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both stages compute what one of them could not load, and both workers must have read an adapter."""
    many = [prompt(seed) for seed in range(20, 26)]
    adapter = write_adapter(tmp_path / "adapter", 1)
    expected, long = answers_without_tiers(llama, FIRST), answers_without_tiers(llama, many, 150)
    with engine(llama, None, enable_prefix_caching=False, **OPTIONS) as plain:
        adapted = ask(plain, Asked("parrot", 1, adapter))
    fault = tmp_path / "fault"
    monkeypatch.setenv("KV_TEST_STAGE_FAULT", str(fault))
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True")
    all_bytes = BLOCKS * BLOCK_BYTES
    with workers(llama, tmp_path, 2, *STAGES, *LORA, tensor=1, words=stack(tmp_path)) as two:
        assert wrong(two.ask(FIRST), expected) == []
        until(lambda: stored(two) >= BLOCKS, 60, "the stores")
        for failed, rank in enumerate("01", 1):
            two.evict()
            before = loaded(two)
            fault.write_text(rank)
            assert wrong(two.ask(FIRST), expected) == []
            fault.unlink()
            assert loaded(two) - before < all_bytes, "the other stage has loaded its layers"
            assert two.metric("kv_tiering_loads_failed_total") == failed * len(FIRST)
        two.evict()
        before = loaded(two)
        assert wrong(two.ask(FIRST), expected) == []
        assert loaded(two) - before == all_bytes
        for _ in range(2):
            assert wrong(two.ask(many, 150), long) == []
            two.evict()
        assert two.metric("vllm:num_preemptions_total") > 0
        assert wrong(two.ask(many, 150), long) == []
        hold(two, adapter)
        before = stored(two)
        assert wrong(two.ask(FIRST, model="parrot"), adapted) == []
        until(lambda: stored(two) >= before + BLOCKS, 60, "the stores with an adapter")
    with workers(llama, tmp_path, 2, *STAGES, *LORA, tensor=1, words=stack(tmp_path)) as two:
        hold(two, adapter)
        assert wrong(two.ask(FIRST, model="parrot"), adapted) == []
        assert loaded(two) == all_bytes


@pytest.mark.parametrize(
    ("prompts", "hit", "more"),
    [(PROMPTS, HELD, ()), (TAILED, TAIL, ("--prefix-match-unit", str(UNIT)))],
    ids=["whole blocks", "tails"],
)
def test_states_beside_attention_also_after_a_kill(
    tmp_path: Path, prompts: list[list[int]], hit: int, more: tuple[str, ...]
) -> None:
    model, words = write_falcon_h1(tmp_path / "model"), stack(tmp_path)
    expected = plain_answers(model, prompts)
    options = (
        *(*STAGES, "--num-gpu-blocks-override", "60", "--enable-prefix-caching", *more),
        *("--block-size", str(STATE_BLOCK), "--max-num-batched-tokens", str(STATE_BLOCK)),
    )
    with workers(model, tmp_path, 2, *options, tensor=1, words=words) as two:
        assert wrong(two.ask(prompts), expected) == []
        until(lambda: stored(two) > 0 and two.metric("kv_tiering_jobs_in_flight") == 0, 60, "the stores")
        two.evict()
        assert wrong(two.ask(prompts), expected) == []
        assert two.metric("vllm:external_prefix_cache_hits_total") == hit * len(prompts)
        from_cpu = loaded(two)
        assert from_cpu > 0
        two.end(signal.SIGKILL)
    with workers(model, tmp_path, 2, *options, tensor=1, words=words) as two:
        assert wrong(two.ask(prompts), expected) == []
        assert loaded(two) == from_cpu
