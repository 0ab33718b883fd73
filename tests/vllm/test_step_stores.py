"""Small stores are made at the end of the step that computes their blocks, by the engine's own thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.rig import BLOCK, BLOCK_BYTES, Answer, Engine, answers_without_tiers, engine, prompt, wrong
from tests.wrapped_handler import Wrapped
from tiering.api.transfer import CPULoadStoreSpec, GPULoadStoreSpec, TransferSpec
from tiering.copy.contract import OffloadingHandler, TransferResult
from tiering.simple.worker import SimpleCPUOffloadWorker

PROMPTS = [prompt(seed, 120) for seed in range(950, 954)]
LONG = [prompt(seed, 6 * BLOCK + 20) for seed in range(960, 968)]
OUTPUTS = 60
STORE = GPULoadStoreSpec, CPULoadStoreSpec


class ClaimsNothing(Wrapped):
    """A handler that reports every store as made and copies nothing."""

    def __init__(self, inner: OffloadingHandler) -> None:
        super().__init__(inner)
        self._claimed: list[TransferResult] = []

    def transfer_at_once(self, jobs: Sequence[tuple[int, TransferSpec]]) -> list[int]:
        self._claimed += [TransferResult(job_id, True, 1, 1e-6, ("gpu", "cpu")) for job_id, _ in jobs]
        return []

    def get_finished(self) -> list[TransferResult]:
        claimed, self._claimed = self._claimed, []
        return [*claimed, *self.inner.get_finished()]


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[Answer]:
    return answers_without_tiers(llama, PROMPTS)


@pytest.fixture(scope="module")
def long_answers(llama: Path) -> list[Answer]:
    return answers_without_tiers(llama, LONG, OUTPUTS)


@pytest.fixture(params=["synchronous", "asynchronous", "simple", "simple, asynchronous"])
def tiered(request: pytest.FixtureRequest, llama: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr("tiering.copy.host._AT_ONCE_SECONDS", 1e3)  # however slow this machine is at present
    stack = {"mode": "simple" if "simple" in request.param else "tiering", "primary": {"capacity": "64MiB"}}
    with engine(llama, stack, async_scheduling="asynchronous" in request.param) as running:
        yield running


def stores_of(running: Engine) -> Any:
    """Return the handler of the stores."""
    return running.worker.worker_half.copies.handlers[STORE]


def submissions(running: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of stores of each submission to the threads."""
    stores, counted = stores_of(running), list[int]()
    start = stores._start

    def counting(orders: Sequence[Any]) -> Any:
        counted.append(len(orders))
        return start(orders)

    monkeypatch.setattr(stores, "_start", counting)
    return counted


def test_small_stores_end_with_their_step_and_come_back(
    tiered: Engine, expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = submissions(tiered, monkeypatch)
    tiered.start(PROMPTS)
    tiered.step()
    tiered.step()
    assert tiered.moved.get("gpu_to_cpu", 0) >= 2 * 3 * BLOCK_BYTES, "a step computes two prompts and stores them"
    while tiered.llm.llm_engine.has_unfinished_requests():
        tiered.step()
    tiered.evict()
    assert counted == [], "no thread took part"
    answers, loaded = tiered.loaded(lambda: tiered.ask(PROMPTS))
    assert wrong(answers, expected) == []
    assert loaded == len(PROMPTS) * 3 * BLOCK_BYTES


def test_stores_beyond_the_budget_are_left_to_the_threads(
    tiered: Engine, expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = submissions(tiered, monkeypatch)
    monkeypatch.setattr("tiering.copy.host._AT_ONCE_SECONDS", 0.0)
    monkeypatch.setattr(stores_of(tiered), "_most_at_once", BLOCK_BYTES)
    tiered.ask(PROMPTS)
    tiered.evict()
    assert counted, "three blocks are more than one"
    assert wrong(tiered.ask(PROMPTS), expected) == []


def test_requests_that_are_preempted_and_blocks_that_are_reused_at_once(
    tiered: Engine, long_answers: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = submissions(tiered, monkeypatch)
    assert wrong(tiered.ask(LONG, OUTPUTS), long_answers) == []
    assert tiered.preempted, "eight requests of nine blocks do not fit"
    assert counted == []
    tiered.evict()
    answers, loaded = tiered.loaded(lambda: tiered.ask(LONG, OUTPUTS))
    assert wrong(answers, long_answers) == []
    assert loaded >= len(LONG) * 6 * BLOCK_BYTES


def test_negative_control_a_store_that_was_not_made_shows(tiered: Engine, expected: list[Answer]) -> None:
    copies, stores = tiered.worker.worker_half.copies, stores_of(tiered)
    copies.register_handler(*STORE, ClaimsNothing(stores))
    tiered.ask(PROMPTS)
    tiered.settle()
    copies.register_handler(*STORE, stores)
    tiered.evict()
    assert wrong(tiered.ask(PROMPTS), expected) == [0, 1, 2, 3]


def test_negative_control_a_store_in_front_of_its_model_shows(
    tiered: Engine, expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    half = tiered.worker.worker_half
    if isinstance(half, SimpleCPUOffloadWorker):
        pytest.skip("mode simple stores what the steps before have computed")
    handle = half.handle_preemptions
    monkeypatch.setattr(half, "handle_preemptions", lambda step: (handle(step), half.prepare_store_kv(step)))
    tiered.ask(PROMPTS)
    tiered.evict()
    assert wrong(tiered.ask(PROMPTS), expected) == [0, 1, 2, 3]
