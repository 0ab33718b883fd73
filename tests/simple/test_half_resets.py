"""Resets that leave the engine's own cache as it is: in both modes its blocks are not stored."""

from __future__ import annotations

import pytest

from tests.simple.simulation import Simulation, tokens
from tests.simple.test_scheduler import cached

LAZY = pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])


def beside_a_running_one(lazy: bool) -> Simulation:
    """Reset the CPU pool while a request runs and the prompt "old" is in the engine's cache."""
    sim = Simulation(gpu_blocks=40, cpu_blocks=400, lazy=lazy, budget=40)
    sim.run("old", tokens(1, 24), 1)
    sim.add("running", tokens(2, 12), 40)
    sim.step()
    sim.reset_by_half()
    return sim


def end(sim: Simulation) -> None:
    """End all requests and use up the GPU's blocks, so that the lazy mode stores all that it may store."""
    sim.settle()
    for number in range(6):
        sim.run(f"filler {number}", tokens(100 + number, 30), 1)
    sim.settle()
    sim.check_nothing_is_held()


@LAZY
def test_what_was_in_the_engines_cache_is_not_stored_nor_what_is_computed_on_top_of_it(lazy: bool) -> None:
    sim = beside_a_running_one(lazy)
    longer = sim.run("longer", [*tokens(1, 24), *tokens(3, 16)], 1)
    assert longer.gpu_hit_tokens == 24
    end(sim)
    assert cached(sim, longer) == []


@LAZY
def test_nor_what_the_running_request_has_computed_since(lazy: bool) -> None:
    sim = beside_a_running_one(lazy)
    running = sim.scheduler.requests["running"]
    end(sim)
    assert len(running.block_hashes) > 10
    assert cached(sim, running) == []


@LAZY
def test_what_is_computed_since_is_stored(lazy: bool) -> None:
    sim = beside_a_running_one(lazy)
    new = sim.run("new", tokens(4, 24), 1)
    also = sim.run("also", [*tokens(4, 24), *tokens(5, 16)], 1)
    assert also.gpu_hit_tokens == 24
    end(sim)
    assert cached(sim, new) == list(range(6))
    assert cached(sim, also) == list(range(10))


@LAZY
def test_old_blocks_are_stored_once_they_are_computed_anew(lazy: bool) -> None:
    sim = beside_a_running_one(lazy)
    end(sim)
    again = sim.run("again", tokens(1, 24), 1)
    assert again.gpu_hit_tokens == again.loaded_tokens == 0
    end(sim)
    assert cached(sim, again) == list(range(6))
