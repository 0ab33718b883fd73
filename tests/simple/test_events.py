"""KV events of the simple scheduler that carry tokens, hash and parent."""

from __future__ import annotations

import pytest

from examples.mini_engine.request import Request
from tests.simple.simulation import BLOCK, BLOCK_BYTES, Simulation, groups_of, tokens
from tiering.api.engine import EngineConfig, KVCacheGroup
from tiering.connector.event_types import BlockRemoved, BlockStored, EngineEvents, KVCacheEvent
from tiering.connector.groups import offload_groups
from tiering.errors import ConfigError
from tiering.simple.cache_config import KVCacheConfig, KVCacheTensor
from tiering.simple.scheduler import SimpleCPUOffloadScheduler


def half_of(
    sim: Simulation, cpu_blocks: int, *, described: bool = True, lazy: bool = False
) -> SimpleCPUOffloadScheduler:
    """Return a scheduler half with events, for the engine of ``sim``."""
    groups = groups_of(sim.kv.windows)
    engine = EngineConfig((BLOCK,) * len(groups), BLOCK, groups, max_batch_tokens=16)
    layers = tuple(group.layer_names[0] for group in groups)
    cache = KVCacheConfig(sim.kv.num_blocks, (KVCacheTensor(sim.kv.num_blocks * BLOCK_BYTES, layers),), groups)
    return SimpleCPUOffloadScheduler(
        engine,
        cache,
        cpu_blocks * BLOCK_BYTES,
        lazy,
        enable_kv_cache_events=True,
        engine_events=EngineEvents(lambda name: name[:8]),
        self_describing_kv_events=described,
    )


def simulation(
    cpu_blocks: int = 32, windows: tuple[int | None, ...] = (None,), gpu_blocks: int = 24, budget: int = 16
) -> Simulation:
    sim = Simulation(gpu_blocks=gpu_blocks, windows=windows, budget=budget)
    sim.half = half_of(sim, cpu_blocks)
    sim.half.bind_gpu_block_pool(sim.pool)
    sim.scheduler.connector = sim.half
    return sim


def snapshots(sim: Simulation) -> int:
    return len(sim.half.events)


def removed(events: list[KVCacheEvent]) -> list[bytes | int]:
    return [name for event in events if isinstance(event, BlockRemoved) for name in event.block_hashes]


def check_described(events: list[KVCacheEvent], *requests: Request) -> None:
    """Check that each event has tokens, hash and parent of a block of one of ``requests``."""
    known: dict[bytes | int, tuple[bytes | None, list[int]]] = {}
    for request in requests:
        names = [name[:8] for name in request.block_hashes]
        for index, name in enumerate(names):
            text = list(request.all_token_ids[index * BLOCK : (index + 1) * BLOCK])
            known[name] = (names[index - 1] if index else None, text)
    for event in events:
        if isinstance(event, BlockStored):
            assert (event.parent_block_hash, event.token_ids) == known[event.block_hashes[0]]
            assert (event.block_size, event.medium, event.group_idx) == (BLOCK, "CPU", 0)
            assert event.kv_cache_spec_kind == "full_attention"


def test_a_stored_block_tells_its_tokens_and_its_parent() -> None:
    sim = simulation()
    request = sim.run("a", tokens(1, 9), 6)
    sim.settle()
    events = sim.half.take_events()
    assert [event.block_hashes for event in events] == [[name[:8]] for name in request.block_hashes[:3]]
    check_described(events, request)


def test_what_a_full_pool_took_late_or_again_is_described_too() -> None:
    sim = simulation(cpu_blocks=2, budget=40)
    request = sim.add("a", tokens(1, 17), 1)
    sim.settle()
    for _ in range(4):
        sim.step()
        sim.end_copies()
    events = sim.half.take_events()
    assert len([event for event in events if isinstance(event, BlockStored)]) == 4
    check_described(events, request)


def test_what_was_forgotten_and_stored_again_is_described_again() -> None:
    sim = simulation(cpu_blocks=8, gpu_blocks=40)
    asked = [sim.add("long", tokens(1, 12), 40)]
    for _ in range(4):
        sim.step()
        sim.end_copies()
    asked += [sim.run("other", tokens(2, 17), 1), sim.run("third", tokens(3, 13), 1)]
    for _ in range(6):
        sim.step()
        sim.end_copies()
    sim.settle()
    events = sim.half.take_events()
    check_described(events, *asked)
    names = [name for event in events if isinstance(event, BlockStored) for name in event.block_hashes]
    assert len(names) > len(set(names)), "no block was stored again"
    assert snapshots(sim) == len(sim.half.cpu_block_pool.cached)


def test_snapshots_go_with_their_blocks() -> None:
    sim = simulation(cpu_blocks=4)
    first = sim.run("a", tokens(1, 17), 1)
    sim.settle()
    assert removed(sim.half.take_events()) == []
    sim.run("b", tokens(2, 17), 1)
    sim.settle()
    assert set(removed(sim.half.take_events())) == {name[:8] for name in first.block_hashes[:4]}
    assert snapshots(sim) == 4


def test_a_store_that_failed_leaves_neither_event_nor_snapshot() -> None:
    sim = simulation()
    sim.add("a", tokens(1, 9), 6)
    while not sim.workers[0].copies:
        sim.step()
    assert snapshots(sim) == 2
    sim.workers[0].end(sim.workers[0].copies[0], fails=True)
    sim.step()
    assert sim.half.take_events() == []
    assert snapshots(sim) == 0


def test_a_reset_removes_what_was_held_and_forgets_what_was_being_stored() -> None:
    sim = simulation(budget=8)
    request = sim.add("a", tokens(1, 30), 8)
    for end_copies in (False, True, False, False):  # two blocks are held, the other two are being stored
        if end_copies:
            sim.end_copies()
        sim.step()
    while not sim.half.cpu_block_pool.cached:
        sim.end_copies()
        sim.step()
    assert sim.half.cpu_block_pool.pending
    held = len(sim.half.cpu_block_pool.cached)
    sim.half.reset_cache()
    events = sim.half.take_events()
    check_described(events, request)
    assert len(removed(events)) == held
    assert snapshots(sim) == 0
    sim.settle()
    assert sim.half.take_events() == []


def test_blocks_of_windows_are_described_too() -> None:
    sim = simulation(windows=(None, 6), gpu_blocks=40)
    sim.run("a", tokens(1, 9), 1)
    sim.settle()
    told = {
        (event.group_idx, bool(event.token_ids)) for event in sim.half.take_events() if isinstance(event, BlockStored)
    }
    assert told == {(0, True), (1, True)}


def test_nothing_is_kept_for_events_that_do_not_describe_themselves() -> None:
    sim = simulation()
    sim.half = half_of(sim, 32, described=False)
    sim.half.bind_gpu_block_pool(sim.pool)
    sim.scheduler.connector = sim.half
    sim.run("a", tokens(1, 9), 1)
    assert snapshots(sim) == 0
    sim.settle()
    assert [event.token_ids for event in sim.half.take_events() if isinstance(event, BlockStored)] == [[], []]


def test_in_the_lazy_mode_events_cannot_describe_themselves() -> None:
    with pytest.raises(ConfigError, match=r"self_describing_kv_events.*lazy_offload"):
        half_of(Simulation(), 32, lazy=True)


def test_a_block_of_several_hashes_tells_all_of_them() -> None:
    groups = (
        KVCacheGroup(("a",), 8),
        KVCacheGroup(("b",), 4, 6, "sliding_window"),
        KVCacheGroup(("c",), 16, None, "mamba"),
    )
    full, window, state = offload_groups(groups, 4)
    assert (full.hash_block_size_factor, full.offloaded_block_size, full.is_full) == (2, 8, True)
    assert (window.window_blocks, window.kv_event_group_spec) == (2, ("sliding_window", 6))
    assert (state.group_idx, state.window_blocks) == (2, 1)
