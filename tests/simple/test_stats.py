"""The statistics of the simple scheduler."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from examples.mini_engine.request import Request
from tests.simple.simulation import BLOCK_BYTES, Simulation, tokens
from tiering.connector.metrics import TIERS
from tiering.connector.prometheus import MetricClasses, OffloadPromMetrics
from tiering.connector.stats import OffloadingConnectorStats
from tiering.secondary.tier_stats import TierStats


def cpu(sim: Simulation) -> dict[str, int]:
    return sim.half.get_stats()["tiers"]["cpu"]  # type: ignore[no-any-return]


def leave_the_gpu(sim: Simulation) -> None:
    """Overwrite the GPU's cache with another request's blocks."""
    for seed in range(10, 13):
        sim.run(f"filler {seed}", tokens(seed, 4 * (sim.kv.num_blocks - 3)), 1)
    sim.settle()


def test_blocks_asked_for_are_hits_or_misses() -> None:
    sim = Simulation(gpu_blocks=12, cpu_blocks=200)
    sim.run("first", tokens(1, 18), 1)
    assert (cpu(sim)["queries"], cpu(sim)["hits"], cpu(sim)["misses"]) == (4, 0, 4)
    leave_the_gpu(sim)
    before = cpu(sim)
    again = sim.run("again", [*tokens(1, 18)[:13], 49, 48, 47, 46, 45], 1)
    now = cpu(sim)
    assert again.loaded_tokens == 12
    assert {name: now[name] - before[name] for name in ("queries", "hits", "misses")} == {
        "queries": 4,
        "hits": 3,
        "misses": 1,
    }


def test_what_the_gpu_has_is_not_asked_for_and_nobody_is_asked_twice() -> None:
    sim = Simulation(gpu_blocks=12, cpu_blocks=200)
    sim.run("first", tokens(1, 17), 1)
    before = cpu(sim)
    sim.run("again", tokens(1, 17), 1)
    assert cpu(sim)["queries"] == before["queries"]
    request = Request("other", tokens(2, 9), 1)
    request.update_hashes(4)
    for _ in range(3):
        sim.half.get_num_new_matched_tokens(request, 0)
    assert cpu(sim)["queries"] == before["queries"] + 2


def test_the_block_that_the_last_token_ends_is_asked_for_too() -> None:
    sim = Simulation(gpu_blocks=12, cpu_blocks=200)
    sim.run("first", tokens(1, 16), 1)
    assert (cpu(sim)["queries"], cpu(sim)["misses"]) == (4, 4)


def test_a_request_that_may_not_load_asks_for_nothing() -> None:
    sim = Simulation()
    sim.scheduler.add(Request("a", tokens(1, 17), 1, {"kv_tiering": {"load": False}}))
    sim.settle()
    assert cpu(sim)["queries"] == 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_pool_is_told_with_the_bytes_of_all_workers(world_size: int) -> None:
    sim = Simulation(cpu_blocks=3, world_size=world_size)
    sim.run("a", tokens(1, 9), 1)
    sim.settle()
    size = world_size * BLOCK_BYTES
    assert (cpu(sim)["blocks"], cpu(sim)["occupancy_bytes"], cpu(sim)["capacity_bytes"]) == (2, 2 * size, 3 * size)
    assert (cpu(sim)["evictions"], cpu(sim)["available"]) == (0, 1)
    sim.run("b", tokens(2, 9), 1)
    sim.settle()
    assert (cpu(sim)["blocks"], cpu(sim)["evictions"]) == (3, 1)


def test_what_is_told_are_series_of_the_tier_cpu() -> None:
    registry = pytest.importorskip("prometheus_client").CollectorRegistry()
    sim = Simulation()
    sim.run("a", tokens(1, 9), 1)
    sim.settle()
    told: dict[str, Any] = sim.half.get_stats()["tiers"]
    assert set(told["cpu"]) <= {field.name for field in fields(TierStats)}
    stats = OffloadingConnectorStats()
    stats.record_labelled(TIERS, told)
    OffloadPromMetrics(MetricClasses.default(registry)).observe(stats.data)
    labels = {"engine": "0", "tier": "cpu"}
    assert registry.get_sample_value("kv_tiering_misses_total", labels) == 2
    assert registry.get_sample_value("kv_tiering_blocks", labels) == 2
    assert registry.get_sample_value("kv_tiering_available", labels) == 1


def test_loads_and_their_failures_are_counted_as_in_the_tiering_mode() -> None:
    sim = Simulation(gpu_blocks=12, cpu_blocks=200)
    sim.run("first", tokens(1, 18), 1)
    leave_the_gpu(sim)
    before = dict(sim.half.get_stats()["connector"])
    sim.add("again", tokens(1, 18), 1)
    while not any(copy.is_load for copy in sim.workers[0].copies):
        sim.step()
    for copy in list(sim.workers[0].copies):
        sim.workers[0].end(copy, fails=copy.is_load)
    sim.settle()
    now = sim.half.get_stats()["connector"]
    assert now["loads"] > before["loads"]
    assert now["loads_failed"] == before["loads_failed"] + 1
    assert now["hit_tokens"] > before["hit_tokens"]
    assert (now["hits_shrunk"], now["stores_failed"], now["jobs_active"], now["requests_active"]) == (0, 0, 0, 0)
    assert now["stores"] > 0
    assert now["scheduler_seconds"] > 0
