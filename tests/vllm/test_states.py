"""Models with states beside full attention, whose states vLLM hands over at the borders of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.handlers import CopyNothing, FailEverySecond
from tests.vllm.models import STATE_BLOCK, write_granite
from tests.vllm.rig import Answer, Engine, answers_without_tiers, engine, prompt, wrong
from tests.wrapped_handler import Wrapped
from tiering.api.transfer import CPULoadStoreSpec, GPULoadStoreSpec, TransferSpec
from tiering.copy.contract import OffloadingHandler

PROMPTS = [prompt(seed, 200) for seed in range(3)]
HELD = 200 // STATE_BLOCK * STATE_BLOCK
"""Tokens of the longest possible hit of a prompt."""
WHOLE = PROMPTS[0][:HELD]
"""A prompt of whole blocks."""
OPTIONS: dict[str, Any] = {
    "block_size": STATE_BLOCK,
    "max_num_batched_tokens": STATE_BLOCK,  # vLLM's CPU kernel returns no states from the middle of a chunk
    "num_gpu_blocks_override": 60,
    "enable_prefix_caching": True,
}
CPU = {"primary": {"capacity": "64MiB"}}


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_granite(tmp_path_factory.mktemp("granite"))


def plain_answers(model: Path, prompts: list[list[int]] = PROMPTS) -> list[Answer]:
    """Return the answers of an engine without connector, each computed from its first token on."""
    return answers_without_tiers(
        model, prompts, block_size=STATE_BLOCK, max_num_batched_tokens=640, num_gpu_blocks_override=60
    )


@pytest.fixture(scope="module")
def plain(granite: Path) -> list[Answer]:
    return plain_answers(granite, [*PROMPTS, WHOLE])


@pytest.fixture(scope="module")
def expected(plain: list[Answer]) -> list[Answer]:
    return plain[:3]


@pytest.fixture(scope="module")
def whole(plain: list[Answer]) -> Answer:
    return plain[3]


@pytest.fixture(scope="module")
def tiered(granite: Path, expected: list[Answer]) -> Iterator[Engine]:
    with engine(granite, CPU, **OPTIONS) as running:
        yield running
        running.settle()
        assert running.free_blocks() == 59


def cached_tokens(running: Engine, prompts: list[list[int]]) -> tuple[list[Answer], list[int]]:
    """Return the answers, and the number of tokens of each prompt that were not computed."""
    from tests.vllm.rig import _answer, _greedy

    outputs = running.llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], _greedy(8), use_tqdm=False)
    return [_answer(output.outputs[0]) for output in outputs], [output.num_cached_tokens for output in outputs]


def state_group(running: Engine) -> int:
    return next(int(group.group_idx) for group in running.connector.scheduler_half.groups if group.is_state)


def test_a_hit_takes_the_attention_and_one_state_of_each_group(tiered: Engine, expected: list[Answer]) -> None:
    assert wrong(tiered.ask(PROMPTS), expected) == []
    tiered.evict()
    (answers, cached), loaded = tiered.loaded(lambda: cached_tokens(tiered, PROMPTS))
    assert wrong(answers, expected) == []
    assert cached == [HELD] * 3
    sizes = tiered.connector._spec.group_bytes
    blocks = [HELD // STATE_BLOCK if group.is_full else 1 for group in tiered.connector.scheduler_half.groups]
    assert loaded == 3 * sum(size * count for size, count in zip(sizes, blocks, strict=True))
    assert sizes[state_group(tiered)] == (3 * 288 + 8 * 32 * 16) * 4, "the padding of a state is not moved"


def test_two_requests_with_one_prefix_in_one_step_both_get_the_hit(tiered: Engine, expected: list[Answer]) -> None:
    tiered.ask(PROMPTS)
    tiered.evict()
    answers, cached = cached_tokens(tiered, [PROMPTS[0], PROMPTS[0]])
    assert wrong(answers, [expected[0]] * 2) == []
    assert cached == [HELD] * 2


def test_a_prompt_that_ends_where_a_state_does_gets_the_next_shorter_hit(tiered: Engine, whole: Answer) -> None:
    tiered.ask(PROMPTS)
    tiered.ask([WHOLE])
    tiered.evict()
    answers, cached = cached_tokens(tiered, [WHOLE])
    assert wrong(answers, [whole]) == []
    assert cached == [HELD - STATE_BLOCK]


def test_a_failed_load_is_computed(tiered: Engine, expected: list[Answer]) -> None:
    tiered.ask(PROMPTS)
    tiered.evict()
    with tiered.loads_through(FailEverySecond) as handler:
        assert wrong(tiered.ask(PROMPTS), expected) == []
        assert handler.failed > 0
    tiered.evict()
    assert wrong(tiered.ask(PROMPTS), expected) == []


def test_after_a_reset_nothing_from_before_is_loaded(tiered: Engine, expected: list[Answer]) -> None:
    tiered.ask(PROMPTS)
    tiered.evict()
    assert tiered.llm.reset_prefix_cache(reset_connector=True)
    (answers, cached), loaded = tiered.loaded(lambda: cached_tokens(tiered, PROMPTS))
    assert wrong(answers, expected) == []
    assert (cached, loaded) == ([0] * 3, 0)
    tiered.evict()
    answers, cached = cached_tokens(tiered, PROMPTS)
    assert wrong(answers, expected) == []
    assert cached == [HELD] * 3


class OtherState(Wrapped):
    """A handler that loads the states of the first load it sees into all later requests."""

    states: list[int] | None = None

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        source, destination = spec
        assert isinstance(source, CPULoadStoreSpec)
        assert isinstance(destination, GPULoadStoreSpec)
        rows = source.block_ids.tolist()
        assert list(destination.group_sizes) == [1, 1, HELD // STATE_BLOCK], "two states come before the attention"
        self.states = self.states or rows[:2]
        return self.inner.transfer_async(job_id, (CPULoadStoreSpec(self.states + rows[2:]), destination))


@pytest.mark.parametrize(("lie", "differ"), [(OtherState, [1, 2]), (CopyNothing, [0, 1, 2])])
def test_negative_control_another_state_shows(
    tiered: Engine, expected: list[Answer], lie: Callable[[OffloadingHandler], Any], differ: list[int]
) -> None:
    tiered.ask(PROMPTS)
    tiered.evict()
    with tiered.loads_through(lie):
        answers = [tiered.ask([tokens], params={"kv_tiering": {"store": False}})[0] for tokens in PROMPTS]
    assert wrong(answers, expected) == differ
    tiered.evict()
    assert wrong(tiered.ask(PROMPTS), expected) == []


def test_negative_control_a_state_of_one_step_later_shows(
    tiered: Engine, expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tiered.llm.reset_prefix_cache(reset_connector=True)
    handed = tiered.connector.scheduler_half._handed
    plan = handed.plan
    held: dict[str, Any] = {}

    def later(output: Any, states: Any) -> Any:
        now, shown = output.kv_connector_block_state, dict(held)
        held.clear()
        held.update(now.boundary_state_offloads)
        now.boundary_state_offloads = {
            name: [(group, now.resolve_block_ids(name)[group][-1], tokens) for group, _, tokens in offers]
            for name, offers in shown.items()
            if name in output.num_scheduled_tokens
        }
        return plan(output, states)

    with monkeypatch.context() as patch:
        patch.setattr(handed, "plan", later)
        assert wrong([tiered.ask([tokens])[0] for tokens in PROMPTS], expected) == []
        tiered.evict()
        answers, cached = cached_tokens(tiered, PROMPTS)
    assert cached == [HELD] * 3
    assert wrong(answers, expected) == [0, 1, 2]
    assert tiered.llm.reset_prefix_cache(reset_connector=True)


def test_attention_without_its_state_is_no_hit(
    tiered: Engine, expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tiered.llm.reset_prefix_cache(reset_connector=True)
    with monkeypatch.context() as patch:
        patch.setattr(tiered.connector.scheduler_half._handed, "plan", lambda output, states: {})
        assert wrong(tiered.ask(PROMPTS), expected) == []
    tiered.evict()
    (answers, cached), loaded = tiered.loaded(lambda: cached_tokens(tiered, PROMPTS))
    assert wrong(answers, expected) == []
    assert (cached, loaded) == ([0] * 3, 0)
