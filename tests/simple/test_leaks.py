"""In random histories, references are held exactly while copies run, and all KV is right."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from examples.mini_engine.request import Request
from tests.simple.simulation import Simulation, tokens
from tiering.api.keys import make_offload_key

WINDOWS = [(None,), (None, 6), (5, None), (None, 9, None)]


class Machine(RuleBasedStateMachine):
    """Random requests with preemptions, aborts and resets; copies end late, in any order, or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.started: Simulation | None = None
        self.count = 0

    @property
    def sim(self) -> Simulation:
        """The simulation, which every run starts first."""
        assert self.started is not None
        return self.started

    @initialize(
        windows=st.sampled_from(WINDOWS),
        lazy=st.booleans(),
        world_size=st.integers(1, 2),
        cpu_blocks=st.sampled_from([1, 4, 16, 60]),
        gpu_blocks=st.sampled_from([34, 50]),
        budget=st.sampled_from([3, 8, 40]),
        interval=st.sampled_from([None, 0, 16]),
        within_step=st.booleans(),
    )
    def start(self, **options: Any) -> None:
        self.started = Simulation(**options)

    @rule(
        seed=st.integers(0, 3), length=st.integers(1, 30), shared=st.sampled_from([0, 8, 17]), answer=st.integers(1, 6)
    )
    def add(self, seed: int, length: int, shared: int, answer: int) -> None:
        self.count += 1
        self.sim.add(f"r{self.count}", tokens(seed, max(length, shared), shared), answer)

    @rule(which=st.integers(0, 10))
    def abort(self, which: int) -> None:
        alive = sorted(self.sim.scheduler.requests)
        if alive:
            self.sim.scheduler.abort(alive[which % len(alive)])

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.sim.step()
            self.sim.check_references()

    @rule(worker=st.integers(0, 1), which=st.integers(0, 5), fails=st.sampled_from([False, False, False, True]))
    def end_copy(self, worker: int, which: int, fails: bool) -> None:
        chosen = self.sim.workers[worker % len(self.sim.workers)]
        if chosen.copies:
            chosen.end(chosen.copies[which % len(chosen.copies)], fails=fails)

    @rule()
    def end_copies(self) -> None:
        self.sim.end_copies()

    @rule(really=st.integers(0, 5))
    def reset(self, really: int) -> None:
        if really == 0:
            self.sim.reset()
        elif really == 1:
            self.sim.reset_by_half()

    @invariant()
    def what_is_found_is_right(self) -> None:
        if self.started is not None:
            self.sim.check_contents()

    def teardown(self) -> None:
        if self.started is not None:
            self.sim.settle()
            self.sim.check_nothing_is_held()


Machine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
test_references_and_contents = Machine.TestCase


def walk(seed: int, requests: int) -> Simulation:
    """Run ``requests`` random requests with aborts, resets and failing copies; return the simulation."""
    dice = random.Random(seed)
    windows = dice.choice(WINDOWS)
    sim = Simulation(
        windows=windows,
        lazy=seed % 2 == 1,
        world_size=dice.choice([1, 2]),
        cpu_blocks=len(windows) * dice.choice([30, 60, 150]),
        gpu_blocks=len(windows) * dice.choice([16, 24]),
        budget=dice.choice([6, 20]),
        interval=0 if seed % 4 > 1 else None,
        within_step=seed % 8 > 3,
    )
    added = 0
    while added < requests or sim.scheduler.requests:
        event = dice.random()
        if added < requests and event < 0.4 and len(sim.scheduler.requests) < 8:
            sim.add(
                f"r{added}",
                tokens(dice.randrange(12), dice.randrange(17, 36), dice.choice([0, 8, 17])),
                dice.randrange(1, 12),
            )
            added += 1
        elif sim.scheduler.requests and event < 0.44:
            sim.scheduler.abort(dice.choice(sorted(sim.scheduler.requests)))
        elif event < 0.442:
            sim.reset()
        elif event < 0.445:
            sim.reset_by_half()
        for worker in sim.workers:
            for copy in list(worker.copies):
                if dice.random() < 0.5:
                    worker.end(copy, fails=dice.random() < 0.03)
        sim.step()
        sim.check_references()
    return sim


@pytest.mark.parametrize("seed", range(8))
def test_after_hundreds_of_requests_the_pools_are_what_they_were(seed: int) -> None:
    sim = walk(seed, 800)
    sim.settle()
    sim.check_nothing_is_held()
    loaded = [meta.within_step if seed > 3 else meta.load_gpu_blocks for meta in sim.metadata]
    assert any(loaded), f"seed {seed}: nothing was ever loaded"
    assert sum(len(meta.store_gpu_blocks) for meta in sim.metadata) > 100
    assert sum(request.preemptions for request in sim.finished) > 0


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_nothing_is_held_of_what_only_refusing_requests_had(seed: int) -> None:
    dice = random.Random(seed)
    windows = WINDOWS[seed // 2]
    sim = Simulation(lazy=seed % 2 == 1, windows=windows, gpu_blocks=len(windows) * 16, cpu_blocks=2000, budget=20)
    refusing: list[Request] = []
    for number in range(200):
        text = dice.randrange(12)
        policy = {"kv_tiering": {"store": False}} if text >= 6 else None
        request = Request(
            f"r{number}", tokens(text, dice.randrange(17, 36), 0 if policy else 8), dice.randrange(1, 12), policy
        )
        refusing += [request] if policy else []
        sim.scheduler.add(request)
        for _ in range(dice.randrange(1, 5)):
            sim.step()
            for worker in sim.workers:
                for copy in list(worker.copies):
                    if dice.random() < 0.5:
                        worker.end(copy, fails=dice.random() < 0.03)
    sim.settle()
    sim.check_nothing_is_held()
    refused = {
        make_offload_key(name, group) for one in refusing for name in one.block_hashes for group in range(len(windows))
    }
    assert not refused & sim.half.cpu_block_pool.cached.keys()
    assert sum(len(meta.store_gpu_blocks) for meta in sim.metadata) > 50
    assert sum(request.preemptions for request in refusing) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_after_thousands_of_requests_the_pools_are_what_they_were(seed: int) -> None:
    sim = walk(seed, 3000)
    sim.settle()
    sim.check_nothing_is_held()
