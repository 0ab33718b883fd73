"""Lives of an engine that other tests do not have: priorities, beams, aborts, sleep."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.models import write_llama, write_tokenizer
from tests.vllm.rig import NUM_BLOCKS, Answer, Engine, engine, prompt, wrong

PROMPTS = [prompt(seed) for seed in range(3)]
MANY = [prompt(seed, 130) for seed in range(50, 58)]
LENGTHY = 60
"""Tokens to generate for ``MANY``, so that not all of these requests fit at once."""
BEAMS = {"beam_width": 3, "max_tokens": 6}


def beams(running: Engine) -> list[tuple[list[int], float]]:
    """Return the beams of two prompts: their tokens and rounded scores."""
    from vllm.sampling_params import BeamSearchParams

    found = running.llm.beam_search(
        [{"prompt_token_ids": tokens} for tokens in PROMPTS[:2]], BeamSearchParams(**BEAMS, ignore_eos=True)
    )
    return [(beam.tokens, round(beam.cum_logprob, 3)) for output in found for beam in output.sequences]


def with_priorities(running: Engine, seed: int) -> list[Answer]:
    """Return the answers to ``MANY``, sent with random priorities, a step after one another."""
    dice, names = random.Random(seed), []
    for tokens in MANY:
        names += running.start([tokens], LENGTHY, priority=dice.randrange(4))
        running.step()
    return running.finish(names)


PRIORITY = {"scheduling_policy": "priority", "skip_tokenizer_init": False}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer, which vLLM needs for beams."""
    return write_tokenizer(write_llama(tmp_path_factory.mktemp("spoken")))


@pytest.fixture(scope="module")
def expected(llama: Path) -> tuple[list[Answer], list[Answer], Any]:
    with engine(llama, None, enable_prefix_caching=False, **PRIORITY) as plain:
        return plain.ask(PROMPTS), plain.ask(MANY, LENGTHY), beams(plain)


def stack(disk: Path) -> dict[str, Any]:
    local = {"type": "local", "path": str(disk), "capacity": "64MiB"}
    return {"primary": {"capacity": "64MiB"}, "secondary": [local]}


@pytest.fixture(scope="module", params=["before a restart", "after a restart"])
def tiered(
    request: pytest.FixtureRequest, llama: Path, expected: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    disk = tmp_path_factory.getbasetemp() / "life"
    with engine(llama, stack(disk), **PRIORITY) as running:
        yield running
        running.settle()
        assert running.free_blocks() == NUM_BLOCKS - 1


def test_requests_of_several_priorities_preempt_each_other(tiered: Engine, expected: Any) -> None:
    before = tiered.preempted
    for seed in range(3):
        answers, loaded = tiered.loaded(lambda seed=seed: with_priorities(tiered, seed))  # type: ignore[misc]
        assert wrong(answers, expected[1]) == []
        tiered.evict()
    assert loaded > 0
    assert tiered.preempted > before


def test_beams_are_the_same_from_a_tier(tiered: Engine, expected: Any) -> None:
    beams(tiered)
    tiered.evict()
    found, loaded = tiered.loaded(lambda: beams(tiered))
    assert found == expected[2]
    assert loaded > 0


def test_storms_of_aborts_leave_the_answers_of_others_right(tiered: Engine, expected: Any) -> None:
    dice = random.Random(7)
    for _ in range(12):
        tiered.ask(PROMPTS)
        tiered.evict()
        doomed, kept = tiered.start(MANY, LENGTHY), tiered.start(PROMPTS)
        for _ in range(dice.randrange(6)):
            tiered.step()
        dice.shuffle(doomed)
        while doomed:
            cut = dice.randrange(1, 4)
            tiered.llm.llm_engine.abort_request(doomed[:cut])
            del doomed[:cut]
            tiered.step()
        assert wrong(tiered.finish(kept), expected[0]) == []
    assert wrong(tiered.ask(MANY, LENGTHY), expected[1]) == []


@pytest.mark.parametrize("level", [0, 1, 2])
def test_an_engine_that_slept_answers_right(tiered: Engine, expected: Any, level: int) -> None:
    core = tiered.llm.llm_engine.engine_core.engine_core
    tiered.ask(PROMPTS)
    tiered.settle()
    core.pause_scheduler(mode="abort", clear_cache=level > 0)  # all of a sleep but the memory of a GPU
    core.resume_scheduler()
    answers, loaded = tiered.loaded(lambda: tiered.ask(PROMPTS))
    assert wrong(answers, expected[0]) == []
    assert loaded == 0  # level 0 keeps the engine's own cache, the others empty the tiers
