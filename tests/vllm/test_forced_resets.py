"""Resets of vLLM's own cache while requests run and wait for loads, in all modes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.handlers import Late
from tests.vllm.rig import NUM_BLOCKS, Answer, Engine, answers_without_tiers, engine, prompt, wrong
from tests.vllm.server import until

PROMPTS = [prompt(seed) for seed in range(3)]
NEW = [prompt(seed, 250) for seed in range(20, 22)]
LONG = [prompt(30, 600)]
"""A prompt that needs more than half of the GPU's blocks."""
CPU: dict[str, Any] = {"primary": {"capacity": "64MiB"}}
MODES: dict[str, dict[str, Any]] = {
    "tiering": CPU,
    "eager": {**CPU, "mode": "simple"},
    "lazy": {**CPU, "mode": "simple", "lazy_offload": True},
}


@pytest.fixture(scope="module")
def answers(llama: Path) -> list[Answer]:
    return answers_without_tiers(llama, [*PROMPTS, *NEW, *LONG])


@pytest.fixture(scope="module")
def expected(answers: list[Answer]) -> list[Answer]:
    return answers[:-1]


@pytest.fixture(scope="module")
def long_answer(answers: list[Answer]) -> list[Answer]:
    return answers[-1:]


@pytest.fixture(scope="module", params=list(MODES))
def tiered(request: pytest.FixtureRequest, llama: Path, answers: list[Answer]) -> Iterator[Engine]:
    with engine(llama, MODES[request.param]) as running:
        yield running
        running.settle()
        assert running.free_blocks() == NUM_BLOCKS - 1


def waiting(running: Engine) -> int:
    """Return the number of requests that wait for a load."""
    return sum(one.status.name == "WAITING_FOR_REMOTE_KVS" for one in running.scheduler.requests.values())


@contextmanager
def late_loads(running: Engine, **fields: Any) -> Iterator[tuple[Late, list[str]]]:
    """Requests for ``PROMPTS`` that wait for late loads; yields the loads and the names of the requests."""
    running.ask(PROMPTS)
    running.evict()
    with running.loads_through(Late) as loads:
        names = running.start(PROMPTS, **fields)
        running.step()
        assert waiting(running) == len(PROMPTS)
        assert loads.held
        try:
            yield loads, names
        finally:
            loads.begin()


@pytest.mark.parametrize("tiers_too", [False, True])
def test_a_forced_reset_ends_waits_and_late_loads_write_nothing_into_the_blocks_of_others(
    tiered: Engine, expected: list[Answer], tiers_too: bool
) -> None:
    with late_loads(tiered) as (loads, names):
        assert tiered.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=tiers_too)
        assert tiered.free_blocks() == NUM_BLOCKS - 1
        others = tiered.start(NEW)  # they get the blocks that the loads are to fill
        tiered.step()
        loads.begin()
        assert wrong(tiered.finish([*names, *others]), expected) == []


def test_requests_that_were_loaded_but_not_scheduled_start_over_too(tiered: Engine, expected: list[Answer]) -> None:
    with late_loads(tiered) as (loads, names):
        loads.begin()

        def loaded() -> bool:
            tiered.step()
            return bool(tiered.scheduler.finished_recving_kv_req_ids)

        until(loaded, 60, "the end of a load")
        assert tiered.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        assert wrong(tiered.finish(names), expected[: len(PROMPTS)]) == []


def test_a_forced_reset_after_an_abort_of_waiting_requests(tiered: Engine, expected: list[Answer]) -> None:
    with late_loads(tiered) as (loads, names):
        tiered.llm.llm_engine.abort_request(names[:2])
        assert waiting(tiered) == 1
        assert tiered.llm.reset_prefix_cache(reset_running_requests=True)
        assert tiered.free_blocks() == NUM_BLOCKS - 1
        loads.begin()
        assert wrong(tiered.finish(names[2:]), expected[2 : len(PROMPTS)]) == []
    assert wrong(tiered.ask([*PROMPTS, *NEW]), expected) == []


def test_a_request_that_fills_the_gpu_starts_over_as_well(tiered: Engine, long_answer: list[Answer]) -> None:
    tiered.ask(LONG)
    tiered.evict()
    with tiered.loads_through(Late) as loads:
        names = tiered.start(LONG)
        tiered.step()
        assert waiting(tiered) == 1
        assert tiered.llm.reset_prefix_cache(reset_running_requests=True)
        loads.begin()
        assert wrong(tiered.finish(names), long_answer) == []


def test_a_plain_reset_is_refused_while_a_request_runs_and_ends_no_wait(tiered: Engine, expected: list[Answer]) -> None:
    with late_loads(tiered) as (loads, names):
        others = tiered.start([prompt(40)], 20)  # in no tier, so it runs
        tiered.step()
        assert not tiered.llm.reset_prefix_cache()
        assert waiting(tiered) == len(PROMPTS)
        loads.begin()
        answers, loaded = tiered.loaded(lambda: tiered.finish(names))
        assert wrong(answers, expected[: len(PROMPTS)]) == []
        assert loaded > 0
        tiered.finish(others)
