"""States inside of blocks: with ``--prefix-match-unit``, hits end at the last match unit of a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.vllm.handlers import FailEverySecond
from tests.vllm.models import write_granite
from tests.vllm.rig import Answer, Engine, engine, prompt, wrong
from tests.vllm.test_states import CPU, OPTIONS, cached_tokens, plain_answers
from tests.wrapped_handler import Wrapped
from tiering.api.transfer import CPULoadStoreSpec, GPULoadStoreSpec, TransferSpec

UNIT = 16
PROMPTS = [prompt(seed, 216) for seed in range(3, 6)]
TAIL = 216 // UNIT * UNIT
"""End of the prompts' tails: 16 tokens into their last block."""
LONGER = [tokens + prompt(60 + number, 80) for number, tokens in enumerate(PROMPTS)]
"""Later turns of the same sessions."""


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_granite(tmp_path_factory.mktemp("granite"))


@pytest.fixture(scope="module")
def plain(granite: Path) -> list[Answer]:
    return plain_answers(granite, [*PROMPTS, *LONGER])


@pytest.fixture(scope="module")
def expected(plain: list[Answer]) -> list[Answer]:
    return plain[:3]


@pytest.fixture(scope="module")
def tiered(granite: Path, expected: list[Answer]) -> Iterator[Engine]:
    with engine(granite, CPU, **OPTIONS, prefix_match_unit=UNIT) as running:
        yield running
        running.settle()
        assert running.free_blocks() == 59


def ask_evicted(running: Engine, prompts: list[list[int]]) -> tuple[list[Answer], list[int]]:
    """Return the answers when the GPU holds nothing, and the tokens of each prompt that were not computed."""
    running.evict()
    return cached_tokens(running, prompts)


def test_hits_end_at_the_tail_of_the_same_prompt_and_of_a_longer_one(tiered: Engine, plain: list[Answer]) -> None:
    assert wrong(tiered.ask(PROMPTS), plain[:3]) == []
    for prompts, right in ((PROMPTS, plain[:3]), (LONGER, plain[3:])):
        answers, cached = ask_evicted(tiered, prompts)
        assert wrong(answers, right) == []
        assert cached == [TAIL] * 3
    answers, cached = ask_evicted(tiered, [PROMPTS[0], PROMPTS[0], LONGER[0]])
    assert wrong(answers, [plain[0], plain[0], plain[3]]) == []
    assert cached == [TAIL, TAIL, 288], "the longer prompts have tails of their own, of the same attention block too"


def test_a_tail_that_the_gpu_holds_beside_one_of_the_tiers_is_right(tiered: Engine, plain: list[Answer]) -> None:
    tiered.ask(PROMPTS)
    tiered.settle()
    answers, cached = cached_tokens(tiered, LONGER)
    assert wrong(answers, plain[3:]) == []
    assert min(cached) >= TAIL


def end_at_the_tail(running: Engine, tokens: list[int]) -> None:
    """Let a client go away between the step that ends at the tail and the next one."""
    names = running.start([tokens])
    (request,) = running.scheduler.requests.values()
    while request.num_computed_tokens < TAIL:
        running.step()
    assert request.num_computed_tokens == TAIL
    running.llm.llm_engine.abort_request(names)
    assert not running.scheduler.requests


def test_a_tail_at_which_a_request_ends_is_stored(tiered: Engine, plain: list[Answer]) -> None:
    assert tiered.llm.reset_prefix_cache(reset_connector=True)
    for tokens in PROMPTS:
        end_at_the_tail(tiered, tokens)
    for prompts, right in ((PROMPTS, plain[:3]), (LONGER, plain[3:])):
        answers, cached = ask_evicted(tiered, prompts)
        assert wrong(answers, right) == []
        assert cached == [TAIL] * 3


def test_negative_control_another_state_at_the_end_of_a_request_shows(tiered: Engine, expected: list[Answer]) -> None:
    assert tiered.llm.reset_prefix_cache(reset_connector=True)
    manager, handed = tiered.scheduler.kv_cache_manager, list[Any]()
    finalize = manager.finalize_partial_tail_offloads

    def first(request: Any) -> Any:
        handed.append(finalize(request))
        return handed[0]

    with mock.patch.object(manager, "finalize_partial_tail_offloads", first):
        for tokens in PROMPTS:
            end_at_the_tail(tiered, tokens)
    assert all(handed), "vLLM hands all three tails over"
    answers, cached = ask_evicted(tiered, PROMPTS)
    assert cached == [TAIL] * 3
    assert wrong(answers, expected) == [1, 2]
    assert tiered.llm.reset_prefix_cache(reset_connector=True)


def test_a_failed_load_is_computed(tiered: Engine, expected: list[Answer]) -> None:
    tiered.ask(PROMPTS)
    tiered.evict()
    with tiered.loads_through(FailEverySecond) as handler:
        assert wrong(tiered.ask(PROMPTS), expected) == []
        assert handler.failed > 0
    assert wrong(ask_evicted(tiered, PROMPTS)[0], expected) == []


class OtherTail(Wrapped):
    """A handler that loads parts of the first load it sees into all later requests."""

    states = slice(0, 0)
    attention = slice(0, 0)
    first: list[int] | None = None

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        source, destination = spec
        assert isinstance(source, CPULoadStoreSpec)
        assert isinstance(destination, GPULoadStoreSpec)
        assert list(destination.group_sizes) == [1, 1, 4], "two states, three whole attention blocks, and the tail"
        rows = source.block_ids.tolist()
        self.first = self.first or rows
        rows[self.states], rows[self.attention] = self.first[self.states], self.first[self.attention]
        return self.inner.transfer_async(job_id, (CPULoadStoreSpec(rows), destination))


class OtherState(OtherTail):
    states = slice(0, 2)


class OtherAttention(OtherTail):
    attention = slice(5, 6)


class LastWholeBlock(OtherTail):
    """A handler that loads the whole block before the tail in place of the tail."""

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        rows = spec[0].block_ids.tolist()  # type: ignore[attr-defined]
        return self.inner.transfer_async(job_id, (CPULoadStoreSpec([*rows[:5], rows[4]]), spec[1]))


@pytest.mark.parametrize(
    ("lie", "differ"), [(OtherTail, []), (OtherState, [1, 2]), (OtherAttention, [1, 2]), (LastWholeBlock, [0, 1, 2])]
)
def test_negative_control_a_wrong_tail_shows(
    tiered: Engine, expected: list[Answer], lie: type[Wrapped], differ: list[int]
) -> None:
    tiered.ask(PROMPTS)
    tiered.evict()
    with tiered.loads_through(lie):
        answers = [tiered.ask([tokens], params={"kv_tiering": {"store": False}})[0] for tokens in PROMPTS]
    assert wrong(answers, expected) == differ
    assert wrong(ask_evicted(tiered, PROMPTS)[0], expected) == []
