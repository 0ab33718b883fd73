"""The engine's results depend on the prompt alone, to the last bit of the logits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from examples.mini_engine import Engine, ModelConfig, Request
from tests.mini_engine.helpers import SMALL, WINDOWED, options, prompt, reference, result

MODELS = pytest.mark.parametrize("model", [SMALL, WINDOWED], ids=["full", "windowed"])


@MODELS
@pytest.mark.parametrize("chunk", [1, 5, 8, 21, 64])
def test_chunked_prefill_does_not_change_a_bit(model: ModelConfig, chunk: int) -> None:
    tokens = prompt(1, 75)
    with Engine(options(model=model, max_batch_tokens=chunk)) as engine:
        assert result(engine.run([Request("a", tokens, 8)])["a"]) == reference(tokens, model=model)


@MODELS
def test_batching_does_not_change_a_bit(model: ModelConfig) -> None:
    prompts = [prompt(seed, length, shared=16) for seed, length in enumerate((17, 40, 33, 64, 90))]
    with Engine(options(model=model, num_blocks=200)) as engine:
        outputs = engine.run([Request(str(number), tokens, 8) for number, tokens in enumerate(prompts)])
    for number, tokens in enumerate(prompts):
        assert result(outputs[str(number)]) == reference(tokens, model=model)


@MODELS
@pytest.mark.parametrize("common", [8, 31, 64, 80])
def test_a_cached_prefix_does_not_change_a_bit(model: ModelConfig, common: int) -> None:
    first, second = prompt(1, 80, shared=common), prompt(2, 80, shared=common)
    with Engine(options(model=model)) as engine:
        engine.run([Request("first", first, 8)])
        output = engine.run([Request("second", second, 8)])["second"]
    assert output.gpu_hit_tokens == min(common, 79) // 8 * 8
    assert result(output) == reference(second, model=model)


@MODELS
def test_a_conversation_reuses_its_own_answers(model: ModelConfig) -> None:
    tokens = prompt(3, 50)
    with Engine(options(model=model)) as engine:
        for turn in range(3):
            output = engine.run([Request(f"turn {turn}", tokens, 8)])[f"turn {turn}"]
            assert result(output) == reference(tokens, model=model)
            tokens = tokens + output.tokens + prompt(turn, 13)
        assert output.gpu_hit_tokens > 50


@MODELS
def test_preemption_does_not_change_a_bit(model: ModelConfig) -> None:
    prompts = [prompt(seed, 60) for seed in range(4)]
    blocks = 24 if model.sliding_window is None else 44
    with Engine(options(model=model, num_blocks=blocks, max_batch_tokens=64)) as engine:
        outputs = engine.run([Request(str(number), tokens, 24) for number, tokens in enumerate(prompts)])
        assert len(engine.kv.pool.free) == blocks - 1
    assert sum(output.preemptions for output in outputs.values()) > 0
    for number, tokens in enumerate(prompts):
        assert result(outputs[str(number)]) == reference(tokens, 24, model=model)


def test_both_layouts_of_the_kv_cache_agree() -> None:
    tokens = prompt(4, 70)
    with Engine(options(kv_first=True)) as engine:
        assert result(engine.run([Request("a", tokens, 8)])["a"]) == reference(tokens)


def test_a_window_that_covers_everything_is_full_attention() -> None:
    tokens = prompt(5, 70)
    wide = replace(SMALL, sliding_window=1000)
    assert reference(tokens, model=wide) == reference(tokens)


def test_a_window_hides_what_lies_before_it() -> None:
    tokens = prompt(5, 70)
    assert reference(tokens, model=WINDOWED) != reference(tokens)


@MODELS
def test_stale_memory_in_reused_blocks_does_not_show(model: ModelConfig) -> None:
    tokens = prompt(6, 61)
    with Engine(options(model=model, num_blocks=24, prefix_caching=False)) as engine:
        for tensor in engine.worker.cache.tensors:
            tensor.fill_(1e3)
        assert result(engine.run([Request("a", tokens, 8)])["a"]) == reference(tokens, model=model)


@pytest.mark.parametrize("block", range(8))
def test_one_wrong_block_changes_what_is_said(block: int) -> None:
    tokens = prompt(7, 71)
    request = Request("again", tokens, 16)
    with Engine(options()) as engine:
        right = engine.run([Request("first", tokens, 16)])["first"]
        request.update_hashes(8)
        number = engine.kv.pool.cached[0, request.block_hashes[block]].block_id
        for tensor in engine.worker.cache.tensors:
            tensor[number] = 0
        wrong = engine.run([request])["again"]
    assert wrong.gpu_hit_tokens == 64
    assert wrong.tokens != right.tokens
    assert all(one != other for one, other in zip(wrong.logit_digests, right.logit_digests, strict=True))


@pytest.mark.parametrize("position", [0, 7, 30, 55, 70])
def test_every_token_of_the_context_matters(position: int) -> None:
    tokens = prompt(8, 71)
    changed = [(token + 1) % 512 if index == position else token for index, token in enumerate(tokens)]
    right, wrong = reference(tokens, 16), reference(changed, 16)
    assert not set(right[1]) & set(wrong[1])
    assert right[0] != wrong[0]


def test_other_weights_say_other_things_and_nothing_old_is_used() -> None:
    tokens = prompt(9, 71)
    with Engine(options()) as engine:
        engine.run([Request("old", tokens, 8)])
        assert engine.load_weights(1)
        output = engine.run([Request("new", tokens, 8)])["new"]
    assert output.gpu_hit_tokens == 0
    assert result(output) == reference(tokens, model=replace(SMALL, seed=1))


def test_weights_that_change_in_the_middle_restart_what_is_running() -> None:
    tokens = prompt(10, 71)
    with Engine(options(max_batch_tokens=16)) as engine:
        request = Request("a", tokens, 8)
        engine.add(request)
        engine.step()
        engine.step()
        engine.load_weights(1)
        while engine.scheduler.has_work():
            engine.step()
    assert (request.output, request.logit_digests) == reference(tokens, model=replace(SMALL, seed=1))
