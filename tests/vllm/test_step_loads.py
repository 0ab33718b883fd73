"""Small hits are loaded within the step in which vLLM finds their request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.handlers import CopyNothing, Late, OneWrongBlock
from tests.vllm.rig import BLOCK, Answer, Engine, answers_without_tiers, engine, prompt, wrong
from tests.wrapped_handler import Wrapped
from tiering.api.transfer import CPULoadStoreSpec, GPULoadStoreSpec, TransferSpec
from tiering.copy.contract import TransferError, TransferResult
from tiering.simple.scheduler import SimpleCPUOffloadScheduler

PROMPTS = [prompt(seed, 120) for seed in range(900, 904)]
CACHED = 120 // BLOCK * BLOCK
WHOLE = prompt(910, 4 * BLOCK)
STEM = prompt(911, 4 * BLOCK)
FORK = [STEM + prompt(seed, 20) for seed in (912, 913)]
NEW = [prompt(seed, 7 * BLOCK + 10) for seed in range(920, 925)]


def within_steps(running: Engine) -> int:
    """Return the number of loads that ran within the step of their request."""
    return int(running.connector.scheduler_half.get_stats()["connector"]["loads_within_step"])


def measure(running: Engine) -> None:
    """Have loads measured, and hold so much to be fast that their number cannot matter."""
    first = prompt(899)
    running.ask([first])
    running.evict()
    running.ask([first])
    running.settle()
    loads = running.step_loads
    assert within_steps(running) == 1, "the first small hit is measured"
    assert loads._budget > 0
    loads.measure(1_000_000, 1.0)


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[Answer]:
    return answers_without_tiers(llama, [*PROMPTS, WHOLE, *FORK, *NEW])


class Broken(Wrapped):
    """A handler whose transfers fail."""

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        return False


class FailsLater(CopyNothing):
    """A handler whose transfers turn out to have failed."""

    def get_finished(self) -> list[TransferResult]:
        return [result._replace(success=False) for result in super().get_finished()]


@pytest.mark.parametrize("mode", ["tiering", "simple"])
@pytest.mark.parametrize("handler", [Broken, FailsLater])
def test_a_load_that_cannot_be_made_ends_the_engine(llama: Path, handler: Any, mode: str) -> None:
    with engine(llama, {"mode": mode, "primary": {"capacity": "64MiB"}}) as running:
        measure(running)
        running.ask(PROMPTS)
        running.evict()
        copies = running.worker.worker_half.copies
        kind = CPULoadStoreSpec, GPULoadStoreSpec
        copies.register_handler(*kind, handler(copies.handlers[kind]))
        with pytest.raises(TransferError, match="step"):
            running.ask(PROMPTS[:1])
        if mode == "tiering":
            running.connector.scheduler_half._misses.shut_down()


@pytest.fixture(scope="module", params=["synchronous", "asynchronous", "simple", "simple, asynchronous", "lazy"])
def tiered(request: pytest.FixtureRequest, llama: Path, expected: list[Answer]) -> Iterator[Engine]:
    stack: dict[str, Any] = {"primary": {"capacity": "64MiB"}}
    if request.param in {"simple", "simple, asynchronous", "lazy"}:
        stack |= {"mode": "simple", "lazy_offload": request.param == "lazy"}
    with engine(llama, stack, async_scheduling="asynchronous" in request.param) as running:
        measure(running)
        yield running


@pytest.fixture
def evicted(tiered: Engine) -> Engine:
    """The engine, whose tier holds all prompts, and its own cache none."""
    tiered.ask([*PROMPTS, WHOLE, *FORK])
    tiered.evict()
    tiered.scheduled.clear()
    return tiered


def test_a_small_hit_takes_no_step_of_its_own(evicted: Engine, expected: list[Answer]) -> None:
    before = within_steps(evicted)
    answers, loaded = evicted.loaded(lambda: evicted.ask(PROMPTS[:1]))
    assert wrong(answers, expected[:1]) == []
    assert loaded
    assert within_steps(evicted) == before + 1
    assert evicted.scheduled[0] == 120 - CACHED, "the first step computes what the tier does not hold"
    assert evicted.scheduled[:8].count(0) == 0


def test_many_small_hits_at_once(evicted: Engine, expected: list[Answer]) -> None:
    before = within_steps(evicted)
    assert wrong(evicted.ask(PROMPTS), expected[:4]) == []
    assert within_steps(evicted) == before + 4
    assert evicted.scheduled[0] == 4 * (120 - CACHED)
    evicted.settle()
    assert evicted.connector.scheduler_half.get_stats()["connector"]["jobs_active"] == 0


def test_two_requests_with_one_prefix_in_one_step(evicted: Engine, expected: list[Answer]) -> None:
    before = within_steps(evicted)
    assert wrong(evicted.ask(FORK), expected[5:7]) == []
    assert within_steps(evicted) == before + 1, "the second one finds the blocks in vLLM's cache"
    assert evicted.scheduled[0] == 40


def test_a_whole_prompt_is_loaded_beside_the_step(evicted: Engine, expected: list[Answer]) -> None:
    before = within_steps(evicted)
    assert wrong(evicted.ask([WHOLE]), expected[4:5]) == []
    assert within_steps(evicted) == before, "a token is left to compute"


def test_hits_beyond_the_budget_wait(evicted: Engine, expected: list[Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    loads = evicted.step_loads
    monkeypatch.setattr(loads, "_budget", CACHED // BLOCK)
    monkeypatch.setattr(loads, "measure", lambda blocks, seconds: None)
    before = within_steps(evicted)
    running = evicted.start([prompt(930, 40)], 40)
    for _ in range(3):
        evicted.step()
    names = evicted.start(PROMPTS[:2])
    assert wrong(evicted.finish(names), expected[:2]) == []
    assert within_steps(evicted) == before + 1, "a step has room for one of them beside a request that runs"
    evicted.finish(running)


def test_a_burst_begins_in_one_step(evicted: Engine, expected: list[Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    """No request runs that the copies delay, and one run of the model serves all."""
    loads = evicted.step_loads
    monkeypatch.setattr(loads, "_budget", CACHED // BLOCK)
    monkeypatch.setattr(loads, "measure", lambda blocks, seconds: None)
    before = within_steps(evicted)
    assert wrong(evicted.ask(PROMPTS), expected[:4]) == []
    assert within_steps(evicted) == before + 4
    assert evicted.scheduled[0] == 4 * (120 - CACHED)


@pytest.mark.parametrize("lie", [CopyNothing, OneWrongBlock])
def test_negative_control_what_was_not_loaded_rightly_shows(evicted: Engine, expected: list[Answer], lie: Any) -> None:
    before = within_steps(evicted)
    is_one_copy = isinstance(evicted.connector.scheduler_half, SimpleCPUOffloadScheduler)
    with evicted.loads_through(lie, within_steps=True):
        wrong_ones = wrong(evicted.ask(PROMPTS), expected[:4])
    assert wrong_ones == ([0] if is_one_copy and lie is OneWrongBlock else [0, 1, 2, 3])
    assert within_steps(evicted) == before + 4
    assert evicted.llm.reset_prefix_cache()


def test_blocks_that_are_being_stored_are_loaded_into_afterwards(tiered: Engine, expected: list[Answer]) -> None:
    """A store reads its blocks when the step waits for it, which has given them to a request with a hit."""
    tiered.ask(PROMPTS)
    tiered.evict()
    copies = tiered.worker.worker_half.copies
    kind = GPULoadStoreSpec, CPULoadStoreSpec
    store = copies.handlers[kind]
    copies.register_handler(*kind, late := Late(store))
    try:
        for tokens in NEW:  # each is stored when its blocks are given away
            tiered.ask([tokens], max_tokens=1)
        before = within_steps(tiered)
        assert tiered.llm.reset_prefix_cache()
        assert wrong(tiered.ask(PROMPTS), expected[:4]) == []
        assert within_steps(tiered) > before
        late.begin()
        tiered.settle()
    finally:
        copies.register_handler(*kind, store)
    tiered.evict()
    assert wrong(tiered.ask(NEW), expected[7:]) == []
