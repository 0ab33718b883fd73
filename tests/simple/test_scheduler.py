"""The orders of the simple scheduler, and the steps in which it gives them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from examples.mini_engine.request import Request
from examples.mini_engine.simple import MirroredPool
from tests.simple.simulation import BLOCK, BLOCK_BYTES, Simulation, groups_of, make_scheduler, tokens
from tiering.api.engine import EngineConfig, KVCacheGroup
from tiering.api.keys import make_offload_key
from tiering.connector.event_types import BlockRemoved, BlockStored
from tiering.connector.protocols import EngineRequest
from tiering.errors import ConfigError
from tiering.simple.block_pool import CPUBlockPool
from tiering.simple.cache_config import KVCacheConfig, KVCacheTensor, derive_cpu_config
from tiering.simple.lazy import LazyStores
from tiering.simple.metadata import NOT_HELD, SimpleCPUOffloadWorkerMetadata
from tiering.simple.scheduler import SimpleCPUOffloadScheduler


def cached(sim: Simulation, request: Request, group: int = 0) -> list[int]:
    """Return the indexes of the blocks of ``request`` that the CPU pool holds."""
    pool = sim.half.cpu_block_pool
    return [index for index, name in enumerate(request.block_hashes) if make_offload_key(name, group) in pool.cached]


def stored(sim: Simulation) -> int:
    """Return the number of blocks whose store was ordered."""
    return sum(len(meta.store_gpu_blocks) for meta in sim.metadata)


def engine(groups: tuple[KVCacheGroup, ...], **changes: object) -> EngineConfig:
    return EngineConfig((BLOCK,) * len(groups), BLOCK, groups, **changes)  # type: ignore[arg-type]


def cache(groups: tuple[KVCacheGroup, ...], num_blocks: int = 10) -> KVCacheConfig:
    return KVCacheConfig(num_blocks, (KVCacheTensor(num_blocks * BLOCK_BYTES, ("layer0",)),), groups)


def step_of(*req_ids: str) -> SimpleNamespace:
    """Return a step in which each of these requests computes one token, without new blocks."""
    nothing = SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set(), num_computed_tokens=[])
    return SimpleNamespace(
        preempted_req_ids=set(),
        scheduled_new_reqs=[],
        scheduled_cached_reqs=nothing,
        num_scheduled_tokens=dict.fromkeys(req_ids, 1),
        finished_req_ids=set(),
    )


# -------------------------------------------------------------------------------------------------------- configuration


def test_the_cpu_pool_has_the_groups_and_tensors_of_the_gpu_for_as_many_blocks_as_it_holds() -> None:
    groups = groups_of((None, 6))
    gpu = KVCacheConfig(10, (KVCacheTensor(1000, ("a", "b")), KVCacheTensor(500, ("c",))), groups)
    cpu = derive_cpu_config(gpu, 4500)
    assert (cpu.num_blocks, cpu.kv_cache_groups) == (30, groups)
    assert cpu.kv_cache_tensors == (KVCacheTensor(3000, ("a", "b")), KVCacheTensor(1500, ("c",)))


def test_the_cpu_pool_has_at_least_one_block() -> None:
    assert derive_cpu_config(cache(groups_of((None,))), 1).num_blocks == 1


@pytest.mark.parametrize(
    ("groups", "changes", "capacity", "said"),
    [
        (groups_of((5,)), {}, 1000, "full attention"),
        (groups_of((None,)), {"context_parallel_size": 2}, 1000, "context-parallel"),
        (groups_of((None,)), {}, 0, "cpu_capacity_bytes"),
        ((KVCacheGroup(("layer0",), 6),), {}, 1000, "hash block size 4"),
        ((KVCacheGroup(("layer0",), 4, None, "sliding_window"),), {}, 1000, "sliding_window None"),
        (
            (*groups_of((None,)), KVCacheGroup(("state",), 4, None, "mamba")),
            {"enable_prefix_caching": False},
            1000,
            "state-space",
        ),
    ],
)
def test_an_engine_that_cannot_be_served_is_refused(
    groups: tuple[KVCacheGroup, ...], changes: dict[str, object], capacity: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        SimpleCPUOffloadScheduler(engine(groups, **changes), cache(groups), capacity)


@pytest.mark.parametrize(
    "kind",
    [
        "encoder_only_attention",
        "cross_attention",
        "unknown",
        "Full_Attention",
        "a later kind",
    ],
)
def test_a_kind_of_group_that_is_not_known_is_refused_by_name(kind: str) -> None:
    groups = (*groups_of((None,)), KVCacheGroup(("layer1",), BLOCK, None, kind))
    with pytest.raises(ConfigError, match=rf"group 1 \({kind}\).*only full_attention"):
        SimpleCPUOffloadScheduler(engine(groups), cache(groups), 1000)


@pytest.mark.parametrize(
    ("kind", "window"), [("mla_attention", None), ("sink_full_attention", None), ("full_attention", 8)]
)
def test_all_blocks_of_a_prefix_matter_whatever_full_attention_is_called(kind: str, window: int | None) -> None:
    groups = (KVCacheGroup(("layer0",), BLOCK, window, kind), KVCacheGroup(("layer1",), BLOCK, 5, "sliding_window_mla"))
    half = SimpleCPUOffloadScheduler(engine(groups), cache(groups), 1000)
    assert half.measure is half.groups[0]
    assert [group.skipped_blocks(16) for group in half.groups] == [0, 3]


def test_lazy_offloading_without_prefix_caching_is_refused() -> None:
    groups = groups_of((None,))
    with pytest.raises(ConfigError, match="prefix caching"):
        SimpleCPUOffloadScheduler(engine(groups, enable_prefix_caching=False), cache(groups), 1000, lazy_offload=True)


def test_nothing_is_stored_before_the_gpu_pool_is_bound() -> None:
    sim = Simulation()
    sim.half._gpu = None
    sim.run("a", tokens(1, 20))
    assert stored(sim) == 0
    sim.half.bind_gpu_block_pool(sim.pool)
    sim.run("b", tokens(2, 20))
    assert stored(sim) > 0


# ---------------------------------------------------------------------------------------------------------------- eager


def test_confirmed_blocks_are_stored_in_the_step_after_they_were_computed_and_once() -> None:
    sim = Simulation(budget=8)
    sim.add("a", tokens(1, 16), 8)
    for expected in ([], [0, 1], [2, 3], []):
        sim.step()
        meta = sim.metadata[-1]
        ids = [block.block_id for block in sim.kv._tables["a"].blocks[0]]
        assert meta.store_gpu_blocks == [ids[index] for index in expected]


def test_placeholders_are_not_confirmed() -> None:
    half = make_scheduler(10, 10)
    pool = MirroredPool(10)
    half.bind_gpu_block_pool(pool)
    request = Request("a", tokens(1, 12))
    request.update_hashes(BLOCK)
    held = pool.take(3)
    seen = SimpleNamespace(
        **{name: getattr(request, name) for name in ("request_id", "block_hashes", "num_tokens", "kv_transfer_params")},
        num_computed_tokens=12,
        num_output_placeholders=1,
    )
    half.on_new_request(seen)
    half.update_state_after_alloc(seen, SimpleNamespace(get_block_ids=lambda: ([block.block_id for block in held],)), 0)
    output = step_of("a")
    assert half.build_connector_meta(output).store_gpu_blocks == [block.block_id for block in held[:2]]
    seen.num_output_placeholders = 0
    assert half.build_connector_meta(output).store_gpu_blocks == [held[2].block_id]


def test_the_last_full_block_of_a_request_that_finishes_is_stored() -> None:
    sim = Simulation()
    request = sim.run("a", tokens(1, 9), max_tokens=8)  # the KV of 16 tokens exists at the end
    sim.settle()
    assert request.num_computed_tokens == 16
    assert cached(sim, request) == [0, 1, 2, 3]


def test_of_a_request_that_is_aborted_what_was_computed_is_stored() -> None:
    sim = Simulation(budget=8)
    request = sim.add("a", tokens(1, 30), 8)
    sim.step()
    sim.scheduler.abort("a")
    sim.settle()
    assert cached(sim, request) == [0, 1]
    sim.check_nothing_is_held()


def test_what_a_full_pool_could_not_take_is_stored_later() -> None:
    sim = Simulation(cpu_blocks=3, budget=20)
    request = sim.add("a", tokens(1, 20), 12)
    sim.step()
    sim.step()
    assert len(sim.metadata[-1].store_gpu_blocks) == 3
    sim.step()
    assert sim.metadata[-1].store_event == -1
    sim.end_copies()
    sim.step()
    sim.step()
    assert len(sim.metadata[-1].store_gpu_blocks) == 2
    sim.end_copies()
    sim.step()
    assert {3, 4} <= set(cached(sim, request))


def test_what_a_full_pool_could_not_take_of_a_finished_request_is_stored_later() -> None:
    sim = Simulation(cpu_blocks=2, budget=40)
    request = sim.add("a", tokens(1, 17), 1)
    sim.step()  # the request ends with four full blocks; the CPU pool has room for two
    assert not sim.scheduler.requests
    sim.step()
    assert len(sim.metadata[-1].store_gpu_blocks) == 2
    sim.end_copies()
    sim.step()
    sim.step()
    sim.end_copies()
    sim.step()
    assert cached(sim, request) == [2, 3]


def test_what_is_left_of_a_finished_request_is_not_stored_once_its_gpu_blocks_are_reused() -> None:
    sim = Simulation(cpu_blocks=2, gpu_blocks=8, budget=40)
    request = sim.add("a", tokens(1, 17), 1)
    sim.step()
    sim.step()
    other = sim.add("b", tokens(2, 20), 1)  # reuses the GPU blocks of "a"; no copy has ended yet
    for _ in range(6):
        sim.step()
        sim.check_contents()
        sim.end_copies()
    sim.settle()
    assert sim.half.get_stats()["tiers"]["cpu"]["stores_dropped"] == 2
    assert set(cached(sim, request)) <= {0, 1}
    assert other.output
    sim.check_nothing_is_held()


def test_a_block_that_the_cpu_pool_forgets_while_its_request_runs_is_stored_again() -> None:
    sim = Simulation(cpu_blocks=8, gpu_blocks=40, budget=16)
    long = sim.add("long", tokens(1, 12), 40)
    while not cached(sim, long):
        sim.step()
        sim.end_copies()
    sim.run("other", tokens(2, 17), 1)
    sim.run("third", tokens(3, 13), 1)
    missing = {0, 1, 2} - set(cached(sim, long))
    assert missing, "the pool never forgot a block of the running request"
    for _ in range(6):
        sim.step()
        sim.end_copies()
    assert {0, 1, 2} <= set(cached(sim, long))
    sim.settle()
    sim.check_nothing_is_held()


def test_a_pool_smaller_than_what_runs_does_not_copy_in_circles() -> None:
    sim = Simulation(cpu_blocks=4, gpu_blocks=40, budget=16)
    sim.add("a", tokens(1, 24), 40)
    for _ in range(40):
        sim.step()
        sim.end_copies()
    assert stored(sim) <= 24 // BLOCK + 40 // BLOCK + 1


def test_a_block_is_stored_once_for_two_requests_that_share_it() -> None:
    sim = Simulation(gpu_blocks=40, budget=40)
    text = tokens(1, 17)
    for name in ("a", "b"):
        sim.add(name, text, 1)
    sim.settle()
    assert stored(sim) == 4


def test_window_blocks_that_the_engine_took_back_are_not_stored_from_the_wrong_block() -> None:
    sim = Simulation(windows=(None, 5), gpu_blocks=16, budget=24)
    for name in range(6):
        sim.run(f"r{name}", tokens(name, 23), 3)
    sim.settle()
    sim.check_nothing_is_held()
    assert stored(sim) > 40


@pytest.mark.parametrize(("interval", "windows"), [(None, 10), (0, 3), (16, 6)])
def test_of_a_prompt_windows_are_stored_as_the_engine_keeps_them(interval: int | None, windows: int) -> None:
    sim = Simulation(windows=(None, 9), gpu_blocks=40, cpu_blocks=60, budget=48, interval=interval)
    sim.run("a", tokens(1, 41), 1)
    sim.settle()
    assert stored(sim) == 10 + windows


def test_of_a_state_only_the_blocks_that_the_engine_has_named_are_stored() -> None:
    groups = (*groups_of((None,)), KVCacheGroup(("state",), BLOCK, None, "mamba"))
    half = SimpleCPUOffloadScheduler(engine(groups), cache(groups), 1000)
    pool = MirroredPool(10)
    half.bind_gpu_block_pool(pool)
    request = Request("a", tokens(1, 12))
    request.update_hashes(BLOCK)
    request.num_computed_tokens = 12
    full, states = [[block.block_id for block in pool.take(3)] for _ in range(2)]
    pool.name(
        pool.blocks[states[1]], (1, request.block_hashes[1])
    )  # the other blocks hold running states: their content changes
    half.on_new_request(request)
    half.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: (full, states)), 0)
    assert half.build_connector_meta(step_of("a")).store_gpu_blocks == [*full, states[1]]


def test_a_request_may_say_that_nothing_is_stored_or_loaded_for_it() -> None:
    sim = Simulation(gpu_blocks=8)
    request = Request("a", tokens(1, 17), 1, {"kv_tiering": {"store": False}})
    sim.scheduler.add(request)
    sim.settle()
    assert stored(sim) == 0
    sim.run("b", tokens(1, 17), 1)
    sim.run("filler", tokens(2, 26), 1)
    again = Request("c", tokens(1, 17), 1, {"kv_tiering": {"load": False}})
    sim.scheduler.add(again)
    sim.settle()
    assert stored(sim) > 0
    assert again.loaded_tokens == 0
    assert again.gpu_hit_tokens < 16


def test_nothing_is_loaded_for_a_request_whose_whole_prompt_must_be_computed() -> None:
    class Scored(Request):
        skip_reading_prefix_cache = True

    sim = Simulation(gpu_blocks=8)
    sim.run("a", tokens(1, 17), 1)
    sim.run("filler", tokens(2, 26), 1)
    for kind in (Scored, Request):
        request = kind(kind.__name__, tokens(1, 17), 1)
        request.update_hashes(BLOCK)
        assert sim.half.get_num_new_matched_tokens(request, 0) == ((16, True) if kind is Request else (0, False))


# ----------------------------------------------------------------------------------------------------------------- lazy


def test_lazy_stores_nothing_that_is_in_use() -> None:
    sim = Simulation(lazy=True, gpu_blocks=30)
    sim.add("a", tokens(1, 20), 12)
    for _ in range(6):
        sim.step()
        sim.end_copies()
    assert stored(sim) == 0


def test_lazy_stores_what_was_given_back_and_once() -> None:
    sim = Simulation(lazy=True, gpu_blocks=12, cpu_blocks=40)
    request = sim.run("a", tokens(1, 20), 2)
    sim.settle()
    for _ in range(5):
        sim.step()
        sim.end_copies()
    assert cached(sim, request) == [0, 1, 2, 3, 4]
    assert stored(sim) == 5


@pytest.mark.parametrize(
    ("windows", "target"), [((None,), 2 * 4), ((None, 9), 2 * (4 + 4)), ((None, None, 4), 2 * (4 + 4 + 2))]
)
def test_the_target_covers_what_two_steps_can_use_up(windows: tuple[int | None, ...], target: int) -> None:
    assert make_scheduler(10, 10, windows, lazy=True, budget=16).lazy.target == target


def test_the_target_of_a_state_is_two_blocks_a_step() -> None:
    groups = (*groups_of((None,)), KVCacheGroup(("state",), BLOCK, None, "mamba"))
    half = SimpleCPUOffloadScheduler(engine(groups, max_batch_tokens=16), cache(groups), 1000, True)
    assert half.lazy.target == 2 * (4 + 2)


def walked() -> tuple[LazyStores, MirroredPool]:
    """Return a walk over six named blocks of the free queue.

    The first two blocks are offloaded; the cursor stands on the second.
    """
    gpu, cpu = MirroredPool(7), CPUBlockPool(20)
    for block in gpu.blocks[1:]:
        gpu.name(block, (0, b"%d" % block.block_id))
    blocks = cpu.get_new_blocks([make_offload_key(b"1", 0), make_offload_key(b"2", 0)])
    cpu.publish(blocks)
    lazy = LazyStores(cpu, target=2)
    assert lazy.offers(gpu, 10) == []
    assert lazy.cursor is gpu.blocks[2]
    return lazy, gpu


def test_the_walk_goes_on_behind_the_cursor() -> None:
    lazy, gpu = walked()
    assert [offer[1] for offer in lazy.offers(gpu, 10)] == [3, 4]


def test_a_cursor_with_references_starts_over() -> None:
    lazy, gpu = walked()
    gpu.touch([gpu.blocks[2]])
    assert [offer[1] for offer in lazy.offers(gpu, 10)] == [3]


def test_a_cursor_that_was_used_and_is_back_at_the_other_end_starts_over() -> None:
    lazy, gpu = walked()
    gpu.touch([gpu.blocks[2]])
    lazy.handed_out([[2]])
    gpu.free_blocks([gpu.blocks[2]])
    assert [offer[1] for offer in lazy.offers(gpu, 10)] == [3]


def test_what_is_just_being_stored_is_not_offloaded_twice() -> None:
    cpu, gpu = CPUBlockPool(20), MirroredPool(3)
    for block in gpu.blocks[1:]:  # two blocks with the same content: engines may have such blocks
        block.block_hash = make_offload_key(b"same", 0)
    lazy = LazyStores(cpu, target=1)
    offers = lazy.offers(gpu, 10)
    cpu.get_new_blocks([offer[0] for offer in offers])
    gpu.touch([gpu.blocks[offer[1]] for offer in offers])
    assert [offer[1] for offer in offers] == [1]
    assert lazy.offers(gpu, 10) == []


def test_what_the_cpu_pool_has_forgotten_is_not_offloaded_again_until_the_engine_uses_it() -> None:
    lazy, gpu = walked()
    (chosen, _) = lazy.offers(gpu, 10)
    lazy.cursor = gpu.blocks[2]
    assert [offer[1] for offer in lazy.offers(gpu, 10)] == []
    lazy.handed_out([[chosen[1]]])
    lazy.cursor = gpu.blocks[2]
    assert lazy.offers(gpu, 10) == [chosen]


def test_lazy_stops_when_the_cpu_pool_is_taken_up_by_copies() -> None:
    sim = Simulation(lazy=True, gpu_blocks=20, cpu_blocks=3)
    sim.add("a", tokens(1, 21), 1)
    while sim.scheduler.requests:
        sim.step()
    sim.step()
    assert len(sim.half.cpu_block_pool.pending) == 3
    sim.step()
    assert sim.metadata[-1].store_event == -1
    sim.settle()
    sim.check_nothing_is_held()


def test_a_lazy_store_that_failed_is_made_again() -> None:
    sim = Simulation(lazy=True, gpu_blocks=12, cpu_blocks=40)
    request = sim.add("a", tokens(1, 12), 1)
    while not sim.workers[0].copies:
        sim.step()
    for copy in list(sim.workers[0].copies):
        sim.workers[0].end(copy, fails=True)
    sim.step()
    assert cached(sim, request) == []
    sim.run("b", tokens(2, 4), 1)
    sim.settle()
    assert cached(sim, request) == [0, 1, 2]


def with_policy(sim: Simulation, name: str, text: list[int], **policy: object) -> Request:
    """Run a request with this store policy, then let the lazy walk pass over all free blocks."""
    request = Request(name, text, 1, {"kv_tiering": policy})
    sim.scheduler.add(request)
    sim.settle()
    for _ in range(8):
        sim.step()
        sim.end_copies()
    return request


def test_lazy_stores_nothing_of_a_request_that_refuses_it_but_goes_on_behind_it() -> None:
    sim = Simulation(lazy=True, gpu_blocks=20, cpu_blocks=40, budget=40)
    refusing = with_policy(sim, "a", tokens(1, 17), store=False)
    other = with_policy(sim, "b", tokens(2, 17))
    assert cached(sim, refusing) == []
    assert cached(sim, other) == [0, 1, 2, 3]


def test_lazy_stores_nothing_at_or_behind_max_store_tokens() -> None:
    sim = Simulation(lazy=True, gpu_blocks=20, cpu_blocks=40, budget=6)
    request = with_policy(sim, "a", tokens(1, 25), max_store_tokens=11)
    assert cached(sim, request) == [0, 1]


def test_lazy_stores_nothing_of_what_a_refusing_request_answers() -> None:
    sim = Simulation(lazy=True, gpu_blocks=20, cpu_blocks=40, budget=6)
    request = Request("a", tokens(1, 6), 14, {"kv_tiering": {"store": False}})
    sim.scheduler.add(request)
    sim.settle()
    with_policy(sim, "b", tokens(2, 6))
    assert cached(sim, request) == []


def test_lazy_stores_what_a_refusing_request_has_only_found() -> None:
    sim = Simulation(lazy=True, gpu_blocks=40, cpu_blocks=40, budget=40)
    text = tokens(1, 24)
    willing = sim.add("willing", text[:13], 40)
    sim.step()
    refusing = with_policy(sim, "refusing", text, store=False)
    assert refusing.gpu_hit_tokens == 12
    assert willing.output
    assert cached(sim, refusing) == [0, 1, 2]


def test_lazy_stores_what_was_refused_once_a_request_that_lets_it_has_found_it() -> None:
    sim = Simulation(lazy=True, gpu_blocks=40, cpu_blocks=40, budget=40)
    text = tokens(1, 24)
    refusing = with_policy(sim, "refusing", text, store=False)
    willing = with_policy(sim, "willing", text[:13])
    assert willing.gpu_hit_tokens == 12
    assert cached(sim, refusing) == [0, 1, 2]


def test_lazy_stores_what_a_willing_request_fills_in_a_block_that_was_refused() -> None:
    sim = Simulation(lazy=True, gpu_blocks=8, cpu_blocks=40, budget=40)
    with_policy(sim, "refusing", tokens(1, 24), store=False)
    willing = with_policy(sim, "willing", tokens(2, 24))
    assert cached(sim, willing) == [0, 1, 2, 3, 4, 5]


def test_what_is_refused_stays_refused_over_a_reset() -> None:
    sim = Simulation(lazy=True, gpu_blocks=20, cpu_blocks=40, budget=40)
    refusing = with_policy(sim, "a", tokens(1, 17), store=False)
    sim.half.reset_cache()  # the tiers alone: the engine keeps its own blocks
    other = with_policy(sim, "b", tokens(2, 17))
    assert cached(sim, refusing) == []
    assert cached(sim, other) == [0, 1, 2, 3]


# ------------------------------------------------------------------------------------------------- loads, events, reset


def evicted_from_the_gpu(sim: Simulation, length: int = 20) -> Request:
    """Return a request whose blocks are in the CPU pool only."""
    request = sim.run("first", tokens(1, length), 1)
    sim.settle()
    for seed in range(10, 13):
        sim.run(f"filler {seed}", tokens(seed, 4 * (sim.kv.num_blocks // len(sim.kv.windows) - 3)), 1)
    sim.settle()
    return request


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
@pytest.mark.parametrize("lazy", [False, True])
def test_what_has_left_the_gpu_is_loaded(windows: tuple[int | None, ...], lazy: bool) -> None:
    sim = Simulation(windows=windows, lazy=lazy, gpu_blocks=12 * len(windows), cpu_blocks=200)
    evicted_from_the_gpu(sim)
    again = sim.run("again", tokens(1, 20), 1)
    assert again.loaded_tokens + again.gpu_hit_tokens == 20
    assert again.loaded_tokens >= 12
    sim.settle()
    sim.check_nothing_is_held()


def test_what_the_gpu_has_is_not_loaded_again() -> None:
    sim = Simulation(gpu_blocks=12, cpu_blocks=200)
    evicted_from_the_gpu(sim)
    sim.run("beginning", tokens(1, 20)[:9], 1)
    sim.metadata.clear()
    again = sim.run("again", tokens(1, 20), 1)
    assert (again.gpu_hit_tokens, again.loaded_tokens) == (8, 12)
    assert sum(len(meta.load_gpu_blocks) for meta in sim.metadata) == 3


def test_asking_again_changes_nothing() -> None:
    sim = Simulation(gpu_blocks=12, cpu_blocks=200)
    evicted_from_the_gpu(sim)
    request = Request("again", tokens(1, 20), 1)
    request.update_hashes(BLOCK)
    before = list(sim.half.cpu_block_pool.victims())
    answers = {sim.half.get_num_new_matched_tokens(request, 0) for _ in range(3)}
    assert answers == {(20, True)}
    assert len(sim.half.cpu_block_pool.refs) == 0
    assert sorted(before) == sorted(sim.half.cpu_block_pool.victims())


def test_a_hit_that_has_shrunk_is_reported_block_by_block_and_computed() -> None:
    sim = Simulation(gpu_blocks=12, cpu_blocks=200)
    request = evicted_from_the_gpu(sim)
    pool = sim.half.cpu_block_pool
    ask = sim.half.get_num_new_matched_tokens

    def ask_and_shrink(request: EngineRequest, computed: int) -> tuple[int | None, bool]:
        answer = ask(request, computed)
        pool.cached.pop(make_offload_key(request.block_hashes[2], 0), None)
        return answer

    sim.half.get_num_new_matched_tokens = ask_and_shrink  # type: ignore[method-assign, assignment]
    again = sim.add("again", tokens(1, 20), 1)
    sim.step()
    assert sim.metadata[-1].load_cpu_blocks.count(NOT_HELD) == 1
    sim.settle()
    assert (again.loaded_tokens, again.output) == (8, request.output)


def test_of_a_request_that_is_aborted_while_it_loads_nothing_is_stored() -> None:
    sim = Simulation(gpu_blocks=12, cpu_blocks=200)
    request = evicted_from_the_gpu(sim)
    key = make_offload_key(request.block_hashes[2], 0)
    ask, pool = sim.half.get_num_new_matched_tokens, sim.half.cpu_block_pool

    def ask_and_shrink(request: EngineRequest, computed: int) -> tuple[int | None, bool]:
        answer = ask(request, computed)
        pool.cached.pop(key, None)
        return answer

    sim.half.get_num_new_matched_tokens = ask_and_shrink  # type: ignore[method-assign, assignment]
    sim.add("again", tokens(1, 20), 1)
    sim.step()
    sim.scheduler.abort("again")  # the request's computed tokens include tokens that no load has filled
    sim.settle()
    assert key not in pool.cached
    sim.check_contents()


def test_a_load_that_no_step_has_carried_is_dropped_with_its_request() -> None:
    sim = Simulation(gpu_blocks=12, cpu_blocks=200)
    evicted_from_the_gpu(sim)
    request = Request("again", tokens(1, 20), 1)
    request.update_hashes(BLOCK)
    assert sim.half.get_num_new_matched_tokens(request, 0) == (20, True)
    blocks = sim.pool.take(5)
    sim.half.update_state_after_alloc(
        request, SimpleNamespace(get_block_ids=lambda: ([b.block_id for b in blocks],)), 20
    )
    assert [block.ref_cnt for block in blocks] == [2] * 5
    assert sim.half.request_finished(request, [block.block_id for block in blocks]) == (False, None)
    assert [block.ref_cnt for block in blocks] == [1] * 5
    assert not sim.half.has_pending_work()
    sim.pool.free_blocks(blocks)
    sim.step()
    assert sim.metadata[-1].load_event == -1
    sim.check_nothing_is_held()


def test_an_aborted_load_keeps_its_references_until_it_ends() -> None:
    sim = Simulation(gpu_blocks=12, cpu_blocks=200)
    evicted_from_the_gpu(sim)
    sim.add("again", tokens(1, 20), 1)
    sim.step()
    assert sim.metadata[-1].load_event_to_reqs == {sim.metadata[-1].load_event: ["again"]}
    sim.scheduler.abort("again")
    for _ in range(3):
        sim.step()
        sim.check_references()
    assert len(sim.half.cpu_block_pool.refs) > 0
    sim.settle()
    sim.check_nothing_is_held()


def test_a_store_becomes_visible_when_all_workers_have_completed_it() -> None:
    sim = Simulation(world_size=2)
    request = sim.add("a", tokens(1, 9), 6)
    while not sim.workers[0].copies:
        sim.step()
    for worker in sim.workers:
        assert cached(sim, request) == []
        worker.end(worker.copies[0])
        sim.step()
    assert cached(sim, request) == [0, 1]


def test_a_store_that_failed_on_one_worker_never_becomes_visible() -> None:
    sim = Simulation(world_size=2)
    request = sim.add("a", tokens(1, 9), 1)
    while not sim.workers[0].copies:
        sim.step()
    sim.workers[0].end(sim.workers[0].copies[0])
    sim.workers[1].end(sim.workers[1].copies[0], fails=True)
    sim.step()
    assert cached(sim, request) == []
    assert sim.half.get_stats()["connector"]["stores_failed"] == 1
    sim.settle()
    sim.check_nothing_is_held()


def test_reports_of_unknown_events_are_ignored() -> None:
    sim = Simulation()
    sim.run("a", tokens(1, 12))
    report = SimpleCPUOffloadWorkerMetadata({99: 1, 98: 1}, {98})
    sim.half.update_connector_output(
        SimpleNamespace(finished_recving={"nobody"}, invalid_block_ids=set(), kv_connector_worker_meta=report)
    )
    sim.settle()
    sim.check_nothing_is_held()


def test_a_preemption_asks_the_workers_to_flush() -> None:
    sim = Simulation(gpu_blocks=14, max_running=4)
    for name in range(3):
        sim.add(f"r{name}", tokens(name, 12), 12)
    while not sim.metadata or not sim.metadata[-1].need_flush:
        sim.step()
    preempted = sim.metadata.pop()
    assert all(not meta.need_flush for meta in sim.metadata)
    assert preempted.need_flush
    sim.settle()
    sim.check_nothing_is_held()


def test_after_a_reset_nothing_old_is_found_nor_stored() -> None:
    sim = Simulation(budget=8)
    running = sim.add("a", tokens(1, 30), 8)
    sim.step()
    sim.step()
    sim.half.reset_cache()  # the tiers alone: the engine keeps its own blocks, which are older than the reset
    before = stored(sim)
    for _ in range(4):
        sim.step()
        sim.end_copies()
    assert cached(sim, running) == []
    assert stored(sim) == before


def test_events_tell_consumers_what_is_held() -> None:
    groups = groups_of((None,))
    half = SimpleCPUOffloadScheduler(engine(groups), cache(groups), 2 * BLOCK_BYTES, enable_kv_cache_events=True)
    pool = half.cpu_block_pool
    names = [make_offload_key(bytes([number]) * 32, 0) for number in range(3)]
    for name in names:
        blocks = pool.get_new_blocks([name])
        pool.publish(blocks)
        pool.free_blocks(blocks)
    kinds = [type(event) for event in half.take_events()]
    assert kinds == [BlockStored, BlockStored, BlockRemoved, BlockStored]
