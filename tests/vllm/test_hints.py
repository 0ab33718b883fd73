"""Hints in the real engine: a session that is over makes room before one that was used longer ago."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.rig import BLOCK_BYTES, Answer, Engine, answers_without_tiers, engine, prompt

KEPT, OVER, NEW = (prompt(seed) for seed in (70, 71, 72))
ROWS = 12
"""Rows of the CPU tier: room for two of the three prompts."""
OWN_FIELDS = importlib.util.find_spec("vllm.v1.kv_hints") is not None
RELEASE = {"action_type": "release", "payload": {}}


@pytest.fixture(scope="module")
def expected(llama: Path) -> Answer:
    return answers_without_tiers(llama, [KEPT])[0]


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


def count(running: Engine, record: str, name: str) -> int:
    return int(running.connector.scheduler_half.get_stats()[record][name])


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


class TestRelease:
    @pytest.fixture(scope="class")
    @classmethod
    def shared(cls, llama: Path, expected: Answer) -> Iterator[Engine]:
        with engine(llama, {"primary": {"capacity": ROWS * BLOCK_BYTES}}) as running:
            yield running

    @pytest.fixture
    def tiered(self, shared: Engine) -> Engine:
        """An engine that holds nothing."""
        shared.settle()
        assert shared.llm.reset_prefix_cache(reset_connector=True)
        return shared

    @pytest.mark.parametrize("ask", CARRIERS)
    def test_a_session_that_is_over_makes_room_before_one_that_was_used_longer_ago(
        self, tiered: Engine, expected: Answer, ask: Callable[[Engine, list[int], str, bool], None]
    ) -> None:
        before = count(tiered, "connector", "sessions_released")
        answer, blocks = life(tiered, ask, ends=True)
        assert (answer.matches(expected), blocks) == (True, 6)
        assert count(tiered, "connector", "sessions_released") == before + 1

    def test_without_the_hint_the_prompt_that_was_used_longest_ago_goes(self, tiered: Engine, expected: Answer) -> None:
        answer, blocks = life(tiered, by_parameters, ends=False)
        assert (answer.matches(expected), blocks) == (True, 0)


def fill(running: Engine, seed: int) -> None:
    """Let other prompts take more rows than the CPU tier has."""
    for number in range(4):
        running.ask([prompt(seed + number)], 1)
        running.settle()


def test_a_retained_prompt_stays_and_one_without_the_hint_goes(llama: Path, expected: Answer) -> None:
    stack = {"primary": {"capacity": 20 * BLOCK_BYTES}, "hints": {"retain": 0.5}}
    hint = {"kv_tiering": {"hints": [{"action_type": "Retain", "payload": {"seconds": 600}}]}}
    with engine(llama, stack) as running:
        for seed, params, blocks in ((300, None, 0), (400, hint, 6)):
            assert count(running, "manager", "blocks_retained") == 0
            running.ask([KEPT], 1, params)
            running.settle()
            fill(running, seed)
            running.evict()
            answers, loaded = running.loaded(lambda: running.ask([KEPT]))
            assert (answers[0].matches(expected), loaded // BLOCK_BYTES) == (True, blocks)
            fill(running, seed + 50)
            running.evict()
        assert count(running, "manager", "blocks_retained") == 6
        assert count(running, "connector", "hints_ignored") == 0


@pytest.mark.parametrize("on", [False, True])
def test_blocks_are_promoted_while_a_request_waits_in_the_queue_of_an_engine_without_a_free_slot(
    llama: Path, expected: Answer, on: bool
) -> None:
    stack = {
        "primary": {"capacity": 24 * BLOCK_BYTES, "promote_waiting": on},
        "secondary": [{"type": "memory", "capacity": "64MiB"}],
    }
    with engine(llama, stack, max_num_seqs=1) as running:
        running.ask([KEPT])
        running.settle()
        for seed in range(300, 304):  # together they need all rows
            running.ask([prompt(seed)], 1)
            running.settle()
        running.evict()
        names = running.start([NEW], max_tokens=120)
        running.step()
        names += running.start([KEPT])
        before = running.tier("memory")["read_bytes"]
        for _ in range(60):
            running.step()
            if running.tier("memory")["read_bytes"] > before:
                break
        promoted = running.tier("memory")["read_bytes"] > before
        assert promoted is on
        answers, loaded = running.loaded(lambda: running.finish(names))
        assert answers[1].matches(expected)
        assert loaded // BLOCK_BYTES == 6
