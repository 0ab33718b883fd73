"""The policy of a request reaches every part, from the engine to the last tier."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from examples.mini_engine import Engine, Output, Request
from tests.mini_engine.helpers import one_row, options, prompt, reference, result

TOKENS = prompt(1, 77)
MEMORY = {"type": "memory", "capacity": "16MiB"}


@pytest.fixture
def engine() -> Iterator[Engine]:
    """An engine with two secondary tiers and no prefix cache on the GPU: every hit comes from the tiers."""
    stack = {
        "primary": {"capacity": 100 * one_row()},
        "secondary": [{**MEMORY, "name": "near"}, {**MEMORY, "name": "far"}],
    }
    with Engine(options(stack=stack, prefix_caching=False)) as made:
        yield made


def ask(engine: Engine, name: str, **wishes: Any) -> Output:
    """Ask the same prompt again, check the answer, and run until nothing is in flight."""
    output = engine.run([Request(name, TOKENS, 8, kv_transfer_params={"kv_tiering": wishes} if wishes else None)])[name]
    assert result(output) == reference(TOKENS)
    assert engine.settle()
    return output


def blocks(engine: Engine) -> dict[str, int]:
    """Return the number of blocks that each secondary tier holds."""
    assert engine.tiers is not None
    return {name: stats["blocks"] for name, stats in engine.tiers.secondary_stats().items()}


def test_by_default_all_is_stored_everywhere_and_loaded(engine: Engine) -> None:
    assert ask(engine, "first").loaded_tokens == 0
    assert blocks(engine) == {"near": 9, "far": 9}
    assert ask(engine, "second").loaded_tokens == 72


def test_nothing_is_stored_of_a_request_that_says_so(engine: Engine) -> None:
    ask(engine, "first", store=False)
    assert blocks(engine) == {"near": 0, "far": 0}
    assert ask(engine, "second").loaded_tokens == 0


def test_nothing_is_loaded_for_a_request_that_says_so(engine: Engine) -> None:
    ask(engine, "first")
    assert ask(engine, "second", load=False).loaded_tokens == 0


def test_only_the_leading_tokens_are_stored(engine: Engine) -> None:
    ask(engine, "first", max_store_tokens=27)
    assert blocks(engine) == {"near": 3, "far": 3}
    assert ask(engine, "second").loaded_tokens == 24


def test_only_the_leading_tokens_are_loaded(engine: Engine) -> None:
    ask(engine, "first")
    assert ask(engine, "second", max_load_tokens=39).loaded_tokens == 32


@pytest.mark.parametrize(
    ("tiers", "held"),
    [(["far"], {"near": 0, "far": 9}), ([], {"near": 0, "far": 0}), (["unknown"], {"near": 0, "far": 0})],
)
def test_only_the_named_tiers_get_blocks(engine: Engine, tiers: list[str], held: dict[str, int]) -> None:
    ask(engine, "first", tiers=tiers)
    assert blocks(engine) == held
    assert ask(engine, "second").loaded_tokens == 72, "the CPU tier is no secondary tier"


@pytest.mark.parametrize("wishes", [{"tiers": 5}, {"lod": True}, {"max_load_tokens": "all"}])
def test_a_wrong_wish_does_not_stop_the_engine(engine: Engine, wishes: dict[str, Any]) -> None:
    ask(engine, "first", **wishes)
    assert blocks(engine) == {"near": 0, "far": 0}
