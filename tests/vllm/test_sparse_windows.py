"""Windows of a Gemma that are stored sparsely (vLLM: ``--prefix-cache-retention-interval``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.models import WINDOW, write_gemma
from tests.vllm.rig import BLOCK, Answer, Engine, answers_without_tiers, engine, prompt, wrong
from tests.vllm.test_states import cached_tokens
from tests.vllm.test_windows import LAYERS, PAGE, WINDOW_BLOCKS
from tests.wrapped_handler import Wrapped
from tiering.api.transfer import CPULoadStoreSpec, GPULoadStoreSpec, TransferSpec

pytest.importorskip("vllm.v1.core.kv_cache_coordinator")

SHARED = prompt(70, 300)
PARTING = [SHARED + prompt(71 + number, 100) for number in range(3)]
"""Prompts that part inside of a block: they have nine blocks in common."""
COMMON = 300 // BLOCK * BLOCK
OPTIONS: dict[str, Any] = {"num_gpu_blocks_override": 80}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def expected(gemma: Path) -> list[Answer]:
    return answers_without_tiers(gemma, PARTING, **OPTIONS)


@pytest.fixture(scope="module")
def turn(gemma: Path, expected: list[Answer]) -> tuple[list[int], Answer]:
    """The second turn of a conversation whose first answer has 40 tokens, and the answer to it."""
    (first,) = answers_without_tiers(gemma, PARTING[:1], 40, **OPTIONS)
    tokens = [*PARTING[0], *first.tokens, *prompt(80, 50)]
    (second,) = answers_without_tiers(gemma, [tokens], **OPTIONS)
    return tokens, second


@pytest.fixture(scope="module", params=["tiering", "simple"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def sparse(gemma: Path, expected: list[Answer], turn: object, mode: str) -> Iterator[Engine]:
    stack: dict[str, Any] = {"primary": {"capacity": "64MiB"}, "mode": mode}
    if mode == "tiering":
        stack["offload_prompt_only"] = False
    with engine(gemma, stack, prefix_cache_retention_interval=0, **OPTIONS) as running:
        yield running


def asked(running: Engine, tokens: list[int]) -> tuple[Answer, int]:
    """Return the answer to a prompt that the GPU does not hold, and its tokens that were not computed."""
    running.evict()
    answers, cached = cached_tokens(running, [tokens])
    return answers[0], cached[0]


class OtherWindow(Wrapped):
    """A handler that loads the last window of each hit from the block before."""

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        source, destination = spec
        assert isinstance(source, CPULoadStoreSpec)
        assert isinstance(destination, GPULoadStoreSpec)
        rows = source.block_ids.copy()
        rows[-1] = rows[-2]
        return self.inner.transfer_async(job_id, (CPULoadStoreSpec(rows), destination))


@pytest.mark.parametrize(
    ("interval", "windows"), [(None, len(PARTING[0]) // BLOCK), (0, WINDOW_BLOCKS + 1), (128, 3 * WINDOW_BLOCKS + 1)]
)
def test_what_is_stored_of_a_prompt(gemma: Path, expected: list[Answer], interval: int | None, windows: int) -> None:
    assert WINDOW_BLOCKS * BLOCK >= WINDOW - 1
    with engine(
        gemma, {"primary": {"capacity": "64MiB"}}, prefix_cache_retention_interval=interval, **OPTIONS
    ) as running:
        running.ask(PARTING[:1])
        running.settle()
        assert running.moved["gpu_to_cpu"] == LAYERS * PAGE * (len(PARTING[0]) // BLOCK + windows)
        answer, cached = asked(running, PARTING[1])
        assert answer.matches(expected[1])
        assert cached == {None: COMMON, 0: 0, 128: 256}[interval]


def test_the_third_of_prompts_that_part_has_a_hit_where_they_part(
    sparse: Engine, expected: list[Answer], mode: str
) -> None:
    """The CPU tier shows where they part, or vLLM's own cache. In mode simple, only the latter is in time."""
    sparse.ask(PARTING[:1])
    if mode == "tiering":
        sparse.evict()
    answers, cached = cached_tokens(sparse, PARTING[1:2])
    assert (wrong(answers, expected[1:2]), cached) == ([], [0])
    answer, found = asked(sparse, PARTING[2])
    assert answer.matches(expected[2])
    assert found == COMMON
    for tokens, right in zip(PARTING, expected, strict=True):
        answer, found = asked(sparse, tokens)
        assert answer.matches(right)
        assert found == len(tokens) // BLOCK * BLOCK


def test_negative_control_another_window_shows(sparse: Engine, expected: list[Answer]) -> None:
    sparse.ask(PARTING)
    sparse.evict()
    with sparse.loads_through(OtherWindow):
        answers = sparse.ask(PARTING, params={"kv_tiering": {"store": False}})
    sparse.evict()
    assert wrong(answers, expected) == [0, 1, 2]


def test_a_conversation_goes_on_behind_its_last_answer(sparse: Engine, turn: tuple[list[int], Answer]) -> None:
    tokens, right = turn
    sparse.ask(PARTING[:1], 40)
    answer, cached = asked(sparse, tokens)
    assert answer.matches(right)
    assert cached == (len(PARTING[0]) + 39) // BLOCK * BLOCK
