"""Models with states: from the CPU tier, from a disk after a restart, and with preemptions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm.models import STATE_BLOCK, write_falcon_h1, write_granite, write_nemotron_h, write_qwen3_next
from tests.vllm.rig import answers_without_tiers, engine, prompt, wrong
from tests.vllm.test_state_tails import LONGER, TAIL, UNIT
from tests.vllm.test_state_tails import PROMPTS as TAILED
from tests.vllm.test_states import CPU, HELD, OPTIONS, PROMPTS, cached_tokens, plain_answers


@pytest.mark.parametrize(("length", "unit"), [(200, None), (216, UNIT)])
def test_preempted_requests_go_on_rightly(tmp_path: Path, length: int, unit: int | None) -> None:
    granite = write_granite(tmp_path)
    prompts = [prompt(seed, length) for seed in range(6)]
    plain = answers_without_tiers(
        granite, prompts, 60, block_size=STATE_BLOCK, max_num_batched_tokens=640, num_gpu_blocks_override=120
    )
    with engine(granite, CPU, **{**OPTIONS, "num_gpu_blocks_override": 30}, prefix_match_unit=unit) as running:
        for _ in range(2):
            assert wrong(running.ask(prompts, 60), plain) == []
            running.evict()
        assert sum(running.scheduled) > 2 * 6 * 260, "tokens were computed again"
        assert wrong(running.ask(prompts, 60), plain) == []
        assert running.moved["cpu_to_gpu"] > 0


@pytest.mark.parametrize("write", [write_granite, write_falcon_h1, write_nemotron_h])
@pytest.mark.parametrize("mode", ["tiering", "simple"])
def test_from_the_cpu_and_from_a_disk_after_a_restart(tmp_path: Path, write: Callable[[Path], Path], mode: str) -> None:
    model = write(tmp_path / "model")
    plain = plain_answers(model)
    disk = {"type": "local", "path": str(tmp_path / "disk"), "capacity": "64MiB"}
    stack = {**CPU, "mode": mode, **({"secondary": [disk]} if mode == "tiering" else {})}
    with engine(model, stack, **OPTIONS) as first:
        assert wrong(first.ask(PROMPTS), plain) == []
        first.evict()
        (answers, cached), loaded = first.loaded(lambda: cached_tokens(first, PROMPTS))
        assert wrong(answers, plain) == []
        assert cached == [HELD] * 3
        assert loaded > 0
    if mode == "simple":
        return
    with engine(model, stack, **OPTIONS) as second:
        (answers, cached), loaded = second.loaded(lambda: cached_tokens(second, PROMPTS))
        assert wrong(answers, plain) == []
        assert cached == [HELD] * 3
        assert loaded > 0
        assert second.tier("local")["read_bytes"] > 0


def test_simple_stores_no_states_inside_of_blocks_and_the_start_names_the_option(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts of 216 tokens have a state at 208 tokens, and one at 192 because their chunks end at blocks."""
    model, prompts = write_granite(tmp_path), [prompt(seed, 216) for seed in range(3, 6)]
    plain = plain_answers(model, prompts)
    with engine(model, {**CPU, "mode": "simple"}, **OPTIONS, prefix_match_unit=16) as running:
        assert "multiples of 16 tokens, and only those at the end of a block of 64 tokens are stored" in caplog.text
        assert wrong(running.ask(prompts), plain) == []
        running.evict()
        answers, cached = cached_tokens(running, prompts)
        assert wrong(answers, plain) == []
        assert cached == [HELD] * 3


def test_tails_from_a_disk_after_a_restart(tmp_path: Path) -> None:
    granite = write_granite(tmp_path / "model")
    plain = plain_answers(granite, [*TAILED, *LONGER])
    stack = {**CPU, "secondary": [{"type": "local", "path": str(tmp_path / "disk"), "capacity": "64MiB"}]}
    with engine(granite, stack, **OPTIONS, prefix_match_unit=UNIT) as first:
        assert wrong(first.ask(TAILED), plain[:3]) == []
        first.settle()
    with engine(granite, stack, **OPTIONS, prefix_match_unit=UNIT) as second:
        answers, cached = cached_tokens(second, TAILED[:2])
        assert wrong(answers, plain[:2]) == []
        assert cached == [TAIL] * 2
        assert second.tier("local")["read_bytes"] > 0
        answers, cached = cached_tokens(second, LONGER[2:])
        assert wrong(answers, plain[5:]) == []
        assert cached == [TAIL]


@pytest.mark.parametrize("mode", ["tiering", "simple"])
def test_gated_delta_nets_one_prompt_at_a_time(tmp_path: Path, mode: str) -> None:
    """In bfloat16, vLLM's answers depend on the prompts that are computed in the same step."""
    model, held = write_qwen3_next(tmp_path / "model"), 128  # vLLM makes blocks as large as the state: 128 tokens
    options = {**OPTIONS, "dtype": "bfloat16"}
    with engine(model, None, **{**options, "enable_prefix_caching": False, "max_num_batched_tokens": 640}) as without:
        plain = [without.ask([tokens])[0] for tokens in PROMPTS]
    disk = {"type": "local", "path": str(tmp_path / "disk"), "capacity": "64MiB"}
    stack = {**CPU, "mode": mode, **({"secondary": [disk]} if mode == "tiering" else {})}
    with engine(model, stack, **options) as first:
        assert wrong([first.ask([tokens])[0] for tokens in PROMPTS], plain) == []
        first.evict()
        answered, loaded = first.loaded(lambda: [cached_tokens(first, [tokens]) for tokens in PROMPTS])
        assert wrong([answers[0] for answers, _ in answered], plain) == []
        assert [cached for _, cached in answered] == [[held]] * 3
        assert loaded > 0
    if mode == "simple":
        return
    with engine(model, stack, **options) as second:
        answered, loaded = second.loaded(lambda: [cached_tokens(second, [tokens]) for tokens in PROMPTS])
        assert wrong([answers[0] for answers, _ in answered], plain) == []
        assert [cached for _, cached in answered] == [[held]] * 3
        assert second.tier("local")["read_bytes"] > 0
