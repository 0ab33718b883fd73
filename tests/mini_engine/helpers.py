"""Small engines and prompts for the tests of the mini engine."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from examples.mini_engine import Engine, EngineOptions, ModelConfig, Output, Request

torch.set_num_threads(1)  # the matrices are so small that a second thread would only spin

SMALL = ModelConfig(vocabulary=512, hidden=64, layers=4, heads=4, kv_heads=2, head_dim=16, feed_forward=128)
WINDOWED = replace(SMALL, sliding_window=20)


def options(**changes: Any) -> EngineOptions:
    """Return options for a small engine: 64 blocks of 8 tokens."""
    return replace(EngineOptions(model=SMALL, num_blocks=64, block_size=8, max_batch_tokens=48), **changes)


def prompt(seed: int, length: int, shared: int = 0) -> list[int]:
    """Return random tokens; prompts have their first ``shared`` tokens in common."""
    common = random.Random(-1)
    own = random.Random(seed)
    return [common.randrange(512) for _ in range(shared)] + [own.randrange(512) for _ in range(length - shared)]


def result(output: Output) -> tuple[list[int], list[int]]:
    """Return the tokens and the exact logits, which must depend on the prompt alone."""
    return output.tokens, output.logit_digests


def reference(tokens: Sequence[int], max_tokens: int = 8, **changes: Any) -> tuple[list[int], list[int]]:
    """Return the result of a prompt that a fresh engine without any cache computes alone, in one piece."""
    return _reference(
        tuple(tokens), max_tokens, options(max_batch_tokens=100_000, prefix_caching=False, **changes).model
    )


@functools.cache
def _reference(tokens: tuple[int, ...], max_tokens: int, model: ModelConfig) -> tuple[list[int], list[int]]:
    with Engine(options(model=model, max_batch_tokens=100_000, prefix_caching=False)) as engine:
        return result(engine.run([Request("alone", tokens, max_tokens)])["alone"])


def one_row(model: ModelConfig = SMALL, block_size: int = 8, factor: int = 1) -> int:
    """Return the bytes of a primary row: a block of the engine's largest group, in whole pages."""
    layers = max(len(group) for group in model.groups)
    return -(-layers * 2 * block_size * model.kv_heads * model.head_dim * 4 * factor // 4096) * 4096


def ask_all(
    engine: Engine, prompts: Sequence[Sequence[int]], name: str, max_tokens: int = 8, at_once: int = 2
) -> list[Output]:
    """Ask ``prompts``, ``at_once`` at a time; return the outputs in order."""
    outputs: dict[str, Output] = {}
    requests = [Request(f"{name} {number}", tokens, max_tokens) for number, tokens in enumerate(prompts)]
    for first in range(0, len(requests), at_once):
        outputs |= engine.run(requests[first : first + at_once])
    return [outputs[request.request_id] for request in requests]


def wrong_answers(
    outputs: Sequence[Output], prompts: Sequence[Sequence[int]], max_tokens: int = 8, **changes: Any
) -> list[int]:
    """Return the indexes of the prompts whose output differs in any bit."""
    pairs = zip(outputs, prompts, strict=True)
    return [
        number
        for number, (output, tokens) in enumerate(pairs)
        if result(output) != reference(tokens, max_tokens, **changes)
    ]
