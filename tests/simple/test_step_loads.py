"""Small hits are loaded within the step in which they are found, also without tiers."""

from __future__ import annotations

from typing import Any

import pytest

from examples.mini_engine.request import Request
from tests.simple.simulation import BLOCK, FakeWorker, Simulation, tokens
from tests.simple.test_leaks import walk
from tiering.api.keys import make_offload_key
from tiering.connector.protocols import EngineRequest
from tiering.connector.step_loads import STEP_SECONDS
from tiering.connector.variants import Variant
from tiering.errors import TieringError

PROMPT = tokens(1, 22)


def evicted(blocks: int = 1000, **options: Any) -> Simulation:
    """Return a simulation whose CPU pool alone has the prompt.

    Args:
        blocks: number of blocks that may be loaded within a step; 0: nothing was measured.
    """
    windows = options.get("windows", (None,))
    sim = Simulation(gpu_blocks=12 * len(windows), cpu_blocks=200, within_step=True, **options)
    sim.run("first", PROMPT, 1)
    for seed in range(10, 13):
        sim.run(f"filler {seed}", tokens(seed, 35), 1)
    sim.settle()
    sim.metadata.clear()
    if blocks:
        sim.half.step_loads.measure(blocks, STEP_SECONDS)
    return sim


def loads_within_step(sim: Simulation) -> int:
    return int(sim.half.get_stats()["connector"]["loads_within_step"])


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
@pytest.mark.parametrize("lazy", [False, True])
def test_a_hit_is_loaded_and_computed_in_one_step(windows: tuple[int | None, ...], lazy: bool) -> None:
    sim = evicted(windows=windows, lazy=lazy)
    again = sim.add("again", PROMPT, 1)
    assert sim.step().num_scheduled_tokens == {"again": 2}
    assert again.loaded_tokens == 20
    (meta,) = sim.metadata
    assert meta.within_step is not None
    assert meta.load_gpu_blocks == []
    assert loads_within_step(sim) == 1
    sim.settle()
    sim.check_nothing_is_held()


def test_the_blocks_of_a_load_are_referenced_until_all_workers_have_reported_it() -> None:
    sim = evicted(world_size=2)
    sim.run("again", PROMPT, 1)
    again = sim.add("and again", tokens(1, 24), 1)
    sim.pool.reset()
    sim.step()
    event, gpu_blocks, cpu_blocks = sim.metadata[-1].within_step or (0, [], [])
    sim.scheduler.abort(again.request_id)
    for worker in sim.workers:
        assert all(sim.half.cpu_block_pool.refs[block] == 1 for block in cpu_blocks)
        assert all(sim.pool.blocks[block].ref_cnt == 1 for block in gpu_blocks)
        assert sim.half.has_pending_work()
        (load,) = [copy for copy in worker.copies if copy.is_within_step]
        assert load.event == event
        worker.end(load)
        sim.step()
        sim.check_references()
    assert not any(sim.half.cpu_block_pool.refs[block] for block in cpu_blocks)
    sim.settle()
    sim.check_nothing_is_held()


def test_a_token_is_left_to_compute() -> None:
    sim = evicted()
    sim.run("again", PROMPT[:20], 1)
    assert loads_within_step(sim) == 0
    assert any(meta.load_gpu_blocks for meta in sim.metadata)


def test_the_first_small_hit_is_measured_and_the_loads_of_a_step_share_its_budget() -> None:
    sim = evicted(0)
    sim.run("again", PROMPT, 1)
    assert loads_within_step(sim) == 1
    sim.settle()
    assert sim.half.step_loads._budget == 8 * 5, "eight times the blocks of the load"
    sim.half.step_loads._budget = 1  # while no request runs, 8 blocks
    sim.pool.reset()
    requests = [sim.add(name, PROMPT[:21], 1) for name in "ab"]
    sim.step()
    assert loads_within_step(sim) == 2
    sim.settle()
    assert [request.loaded_tokens for request in requests] == [20, 20]
    sim.check_nothing_is_held()


def test_requests_with_an_adapter_wait() -> None:
    sim = evicted()
    request = Request("again", PROMPT, 1)
    request.update_hashes(BLOCK)
    sim.half.on_new_request(request)
    assert sim.half.get_num_new_matched_tokens(request, 0) == (20, False)
    sim.half.states["again"].variant = Variant()
    assert not sim.half.step_loads.fits(sim.half.states["again"], 0, 20)


def test_a_block_that_is_lost_ends_the_engine_rather_than_be_computed_with() -> None:
    sim = evicted()
    ask, pool = sim.half.get_num_new_matched_tokens, sim.half.cpu_block_pool

    def ask_and_shrink(request: EngineRequest, computed: int) -> tuple[int | None, bool]:
        answer = ask(request, computed)
        pool.cached.pop(make_offload_key(request.block_hashes[2], 0), None)
        return answer

    sim.half.get_num_new_matched_tokens = ask_and_shrink  # type: ignore[method-assign, assignment]
    sim.add("again", PROMPT, 1)
    with pytest.raises(TieringError, match="4 of 5 blocks that a step needs"):
        sim.step()


def test_a_reset_lets_a_load_within_the_step_end() -> None:
    sim = evicted()
    sim.add("again", PROMPT, 1)
    sim.step()
    sim.reset()
    sim.check_references()
    sim.settle()
    sim.check_nothing_is_held()
    assert sim.run("new", PROMPT, 1).loaded_tokens == 0


def test_blocks_given_up_during_the_load_are_drained_and_given_back_once() -> None:
    sim = evicted()
    sim.add("again", PROMPT, 1)
    sim.step()
    assert sim.metadata[-1].within_step is not None
    blocks = set(sim.metadata[-1].within_step[1])
    assert blocks <= sim.half.copied_blocks()
    sim.half.give_up_blocks([])
    assert not sim.half.copied_blocks() & blocks
    sim.under_way.clear()
    sim.step()
    assert sim.metadata[-1].need_drain


def test_a_worker_that_loads_nothing_within_the_step_gives_wrong_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeWorker, "fills_within_step", False)
    with pytest.raises(AssertionError):
        walk(4, 800)
