"""Hints in the real engine: a session that is over makes room before one that was used longer ago."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.rig import BLOCK_BYTES, Answer, Engine, engine, prompt

KEPT, OVER, NEW = (prompt(seed) for seed in (70, 71, 72))
ROWS = 12
"""Rows of the CPU tier: room for two of the three prompts."""
OWN_FIELDS = importlib.util.find_spec("vllm.v1.kv_hints") is not None
RELEASE = {"action_type": "release", "payload": {}}


@pytest.fixture(scope="module")
def expected(llama: Path) -> Answer:
    with engine(llama, None, enable_prefix_caching=False) as plain:
        return plain.ask([KEPT])[0]


@pytest.fixture
def tiered(llama: Path) -> Iterator[Engine]:
    with engine(llama, {"primary": {"capacity": ROWS * BLOCK_BYTES}}) as running:
        yield running


def by_parameters(running: Engine, tokens: list[int], session: str, is_last: bool) -> None:
    hints = {"hints": [RELEASE]} if is_last else {}
    running.ask([tokens], params={"kv_tiering": {"session_id": session, **hints}})


def by_own_fields(running: Engine, tokens: list[int], session: str, is_last: bool) -> None:
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    demote: Any = KvHintAction(action_id="1", action_type="Demote", action_version="1", payload={})
    envelope: Any = KvHintsEnvelope(protocol_version="1", message_id="m", actions=[demote])
    hints = {"kv_hints": envelope} if is_last else {}
    running.finish(running.start([tokens], session_id=session, **hints))


CARRIERS = [
    by_parameters,
    pytest.param(by_own_fields, marks=pytest.mark.skipif(not OWN_FIELDS, reason="vLLM 0.32 brought the fields")),
]


def life(running: Engine, ask: Callable[[Engine, list[int], str, bool], None], *, ends: bool) -> tuple[Answer, int]:
    """Return the answer to KEPT after other sessions, and the number of its blocks from the CPU tier."""
    ask(running, KEPT, "kept", False)
    running.settle()
    ask(running, OVER, "over", False)
    running.settle()
    ask(running, OVER, "over", ends)
    running.settle()
    ask(running, NEW, "new", False)
    running.evict()
    answers, loaded = running.loaded(lambda: running.ask([KEPT]))
    return answers[0], loaded // BLOCK_BYTES


@pytest.mark.parametrize("ask", CARRIERS)
def test_a_session_that_is_over_makes_room_before_one_that_was_used_longer_ago(
    tiered: Engine, expected: Answer, ask: Callable[[Engine, list[int], str, bool], None]
) -> None:
    answer, blocks = life(tiered, ask, ends=True)
    assert (answer.matches(expected), blocks) == (True, 6)
    assert tiered.connector.scheduler_half.get_stats()["connector"]["sessions_released"] == 1


def test_without_the_hint_the_prompt_that_was_used_longest_ago_goes(tiered: Engine, expected: Answer) -> None:
    answer, blocks = life(tiered, by_parameters, ends=False)
    assert (answer.matches(expected), blocks) == (True, 0)
