"""The mini engine over real stacks: outputs are bit-identical, and hits really come from the tiers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.mini_engine import Engine, Request
from examples.mini_engine.tiers import copy_nothing
from tests.mini_engine.helpers import SMALL, WINDOWED, ask_all, one_row, options, prompt, reference, wrong_answers

PROMPTS = [prompt(seed, 77, shared=16) for seed in range(6)]
STACKS = pytest.mark.parametrize("kind", ["cpu", "memory", "local"])


def stack(kind: str, path: Path, rows: int = 40, **words: Any) -> dict[str, Any]:
    """Return a stack of ``kind`` whose CPU tier has ``rows`` rows.

    With another tier, the prompts have more blocks than the CPU tier has rows.
    """
    primary = {"capacity": (100 if kind == "cpu" else rows) * one_row()}
    secondary = {
        "cpu": [],
        "memory": [{"type": "memory", "capacity": "16MiB"}],
        "local": [{"type": "local", "path": str(path / "local"), "capacity": "16MiB", "segment_size": "4MiB"}],
    }
    return {"primary": primary, "secondary": secondary[kind], **words}


def read_bytes(engine: Engine) -> int:
    """Return the number of bytes that the secondary tiers have read."""
    return sum(stats["read_bytes"] for stats in engine.tiers.secondary_stats().values()) if engine.tiers else 0


@STACKS
@pytest.mark.parametrize("kv_first", [False, True], ids=["blocks_first", "kv_first"])
def test_outputs_are_identical(kind: str, kv_first: bool, tmp_path: Path) -> None:
    with Engine(options(num_blocks=30, kv_first=kv_first, stack=stack(kind, tmp_path))) as engine:
        for turn in range(3):
            outputs = ask_all(engine, PROMPTS, f"turn {turn}")
            assert wrong_answers(outputs, PROMPTS) == []
            assert engine.settle()
        assert engine.loaded_bytes > 0
        assert (read_bytes(engine) > 0) == (kind != "cpu")
        assert len(engine.kv.pool.free) == 29


@STACKS
def test_the_comparison_fails_if_loads_copy_nothing(kind: str, tmp_path: Path) -> None:
    with Engine(options(num_blocks=30, stack=stack(kind, tmp_path)), replace_loads=copy_nothing) as engine:
        ask_all(engine, PROMPTS, "first")
        engine.settle()
        assert wrong_answers(ask_all(engine, PROMPTS, "second"), PROMPTS) != []


def test_turns_of_a_conversation_load_what_came_before(tmp_path: Path) -> None:
    histories = [list(tokens) for tokens in PROMPTS]
    with Engine(options(num_blocks=34, stack=stack("local", tmp_path))) as engine:
        for turn in range(3):
            outputs = ask_all(engine, histories, f"turn {turn}")
            assert wrong_answers(outputs, histories) == []
            for number, output in enumerate(outputs):
                histories[number] += [*output.tokens, *prompt(100 * turn + number, 11)]
        assert sum(output.loaded_tokens for output in outputs) > 0


def test_a_restarted_engine_is_warm_from_the_local_disk(tmp_path: Path) -> None:
    with Engine(options(num_blocks=64, stack=stack("local", tmp_path))) as engine:
        ask_all(engine, PROMPTS, "before")
    with Engine(options(num_blocks=64, stack=stack("local", tmp_path))) as engine:
        outputs = ask_all(engine, PROMPTS, "after")
        assert wrong_answers(outputs, PROMPTS) == []
        assert outputs[0].loaded_tokens == 72
        assert read_bytes(engine) > 0


def test_an_engine_with_other_weights_finds_nothing(tmp_path: Path) -> None:
    with Engine(options(num_blocks=64, stack=stack("local", tmp_path))) as engine:
        ask_all(engine, PROMPTS[:2], "before")
    other = replace(SMALL, seed=5)
    with Engine(options(num_blocks=64, model=other, stack=stack("local", tmp_path))) as engine:
        outputs = ask_all(engine, PROMPTS[:2], "after")
        assert wrong_answers(outputs, PROMPTS[:2], model=other) == []
        assert read_bytes(engine) == 0


def test_nothing_old_is_served_after_a_reset(tmp_path: Path) -> None:
    with Engine(options(num_blocks=30, stack=stack("local", tmp_path, reset_deadline="60s"))) as engine:
        ask_all(engine, PROMPTS, "old")
        assert engine.load_weights(1)
        new = replace(SMALL, seed=1)
        assert wrong_answers(ask_all(engine, PROMPTS, "new"), PROMPTS, model=new) == []
        assert wrong_answers(ask_all(engine, PROMPTS, "again"), PROMPTS, model=new) == []


def test_an_engine_that_restarts_with_its_first_weights_finds_nothing_of_later_ones(tmp_path: Path) -> None:
    with Engine(options(num_blocks=64, stack=stack("local", tmp_path))) as engine:
        engine.load_weights(1)
        ask_all(engine, PROMPTS, "other weights")
    with Engine(options(num_blocks=64, stack=stack("local", tmp_path))) as engine:
        assert wrong_answers(ask_all(engine, PROMPTS, "first weights"), PROMPTS) == []


@pytest.mark.parametrize("steps", [1, 3, 5, 8])
def test_nothing_old_is_served_after_a_reset_in_the_middle(steps: int, tmp_path: Path) -> None:
    new = replace(SMALL, seed=1)
    with Engine(options(num_blocks=30, stack=stack("memory", tmp_path, reset_deadline="60s"))) as engine:
        ask_all(engine, PROMPTS, "old")
        running = [Request(f"running {number}", tokens, 8) for number, tokens in enumerate(PROMPTS[:3])]
        for request in running:
            engine.add(request)
        for _ in range(steps):
            engine.step()
        unaffected = {request.request_id for request in running if request.output}
        assert engine.load_weights(1)
        assert engine.settle()
        for number, request in enumerate(running):
            if request.request_id not in unaffected:
                assert (request.output, request.logit_digests) == reference(PROMPTS[number], model=new)
        for turn in range(2):
            assert wrong_answers(ask_all(engine, PROMPTS, f"new {turn}"), PROMPTS, model=new) == []


def test_two_requests_share_blocks_that_are_loaded_once(tmp_path: Path) -> None:
    shared = [prompt(seed, 80, shared=64) for seed in (1, 2)]
    with Engine(options(num_blocks=30, stack=stack("cpu", tmp_path))) as engine:
        ask_all(engine, shared[:1], "first")
        ask_all(engine, [prompt(9, 150), prompt(8, 150)], "filler", at_once=1)
        before = engine.loaded_bytes
        assert wrong_answers(ask_all(engine, shared, "together"), shared) == []
        blocks = (engine.loaded_bytes - before) // engine.worker.cache.block_bytes
        assert 8 <= blocks <= 10


def test_a_stack_that_is_too_small_for_anything_only_costs_time(tmp_path: Path) -> None:
    with Engine(options(num_blocks=30, stack=stack("memory", tmp_path, rows=2))) as engine:
        for turn in range(2):
            assert wrong_answers(ask_all(engine, PROMPTS, f"turn {turn}"), PROMPTS) == []


def test_requests_may_opt_out_of_loading(tmp_path: Path) -> None:
    with Engine(options(num_blocks=30, stack=stack("cpu", tmp_path))) as engine:
        ask_all(engine, PROMPTS, "first")
        before = engine.loaded_bytes
        request = Request("private", PROMPTS[0], 8, kv_transfer_params={"kv_tiering": {"load": False}})
        output = engine.run([request])["private"]
        assert wrong_answers([output], PROMPTS[:1]) == []
        assert engine.loaded_bytes == before


@pytest.mark.parametrize("factor", [2, 4])
@pytest.mark.parametrize("kind", ["cpu", "memory"])
def test_large_offloaded_blocks_with_unaligned_starts(kind: str, factor: int, tmp_path: Path) -> None:
    words = {"primary": {"capacity": (60 if kind == "cpu" else 12) * one_row(factor=factor)}}
    settings = options(num_blocks=40, stack=stack(kind, tmp_path) | words, offload={"block_size": 8 * factor})
    unaligned = 0
    with Engine(settings) as engine:
        for length in range(60, 240, 12):
            tokens = [PROMPTS[0], prompt(length, length, shared=8), PROMPTS[1]]
            outputs = ask_all(engine, tokens, f"{length}", at_once=1)
            assert wrong_answers(outputs, tokens) == []
            unaligned += sum(
                output.loaded_tokens > 0 and output.gpu_hit_tokens % (8 * factor) > 0 for output in outputs
            )
        assert engine.loaded_bytes > 0
    assert unaligned > 0


@STACKS
@pytest.mark.parametrize("window", [16, 17, 20, 33])
@pytest.mark.parametrize("length", [77, 80])
def test_full_attention_and_a_window(kind: str, window: int, length: int, tmp_path: Path) -> None:
    model = replace(WINDOWED, sliding_window=window)
    tokens = [prompt(seed, length, shared=24) for seed in range(5)]
    sized = stack(kind, tmp_path) | {"primary": {"capacity": (300 if kind == "cpu" else 60) * one_row(model)}}
    with Engine(options(num_blocks=44, model=model, stack=sized)) as engine:
        for turn in range(3):
            assert wrong_answers(ask_all(engine, tokens, f"turn {turn}"), tokens, model=model) == []
        assert engine.loaded_bytes > 0
        assert engine.settle()
        assert len(engine.kv.pool.free) == 43
