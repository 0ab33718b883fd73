"""The tier of vLLM's own tiering over a stand-in for vLLM, in every version from 0.27 to 0.33."""

from __future__ import annotations

import dataclasses
import inspect
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.engines.vllm_tier.double import FACTS, METHODS, CacheHitSource, Driver, Locality, installed, spec_of
from tests.thread_limit import ThreadLimit
from tiering.api.keys import make_offload_key
from tiering.engines.vllm.lookup import StartupError
from tiering.engines.vllm_tier import register
from tiering.engines.vllm_tier.interface import configurations
from tiering.errors import ConfigError, TierUnavailableError

BLOCK = 64 << 10
NEWEST = "0.33.0"
MEMORY = {"type": "memory", "capacity": "64MiB"}
MODULE = {"type": "KVTieringTier", "module_path": "tiering.engines.vllm_tier"}


def keys_of(number: int, group: int = 0, first: int = 0) -> list[bytes]:
    return [make_offload_key(index.to_bytes(32, "big"), group) for index in range(first, first + number)]


def words(**changed: Any) -> dict[str, Any]:
    return {"primary": {"capacity": "4MiB"}, "secondary": [MEMORY], "shutdown_deadline": "5s", **changed}


@contextmanager
def running(
    version: str = NEWEST, spec: Any = None, rows: int = 64, named: Mapping[str, Any] = MODULE, **changed: Any
) -> Iterator[Driver]:
    """Build the tier through the stand-in's factory, with random bytes in vLLM's rows."""
    with installed(version) as factory:
        register()
        memory = np.random.default_rng(0).integers(0, 256, (rows, BLOCK), np.uint8)
        tier = factory.create_secondary_tier({**named, **words(**changed)}, memory.data, spec or spec_of())
        try:
            yield Driver(tier, memory, FACTS[version])
        finally:
            tier.shutdown()
            tier.shutdown()


@pytest.mark.parametrize("version", FACTS)
def test_every_version_stores_and_loads(version: str) -> None:
    keys = keys_of(10)
    named = MODULE if version > "0.27.0" else {"type": "kv_tiering"}
    with running(version, named=named) as driver:
        ctx = driver.begin("stores")
        stored = driver.store(keys, range(10), ctx)
        driver.tier.on_request_finished(ctx)
        ctx = driver.begin("loads")
        assert driver.look_up([*keys, *keys_of(2, first=100)], ctx) == ["HIT"] * 10 + ["MISS"] * 2
        loaded = driver.load(keys, range(20, 30), ctx)
        assert np.array_equal(driver.rows[20:30], driver.rows[:10])
        for result in (stored, loaded):
            assert result.success
            assert result.successful_keys is None
            assert result.transfer_time >= 0
            assert getattr(result, "transfer_bytes", 10 * BLOCK) == 10 * BLOCK
        assert driver.tier.locality is Locality.LOCAL
        driver.tier.touch(keys, ctx)
        driver.tier.on_request_finished(ctx)


class Core:
    """vLLM's engine core, whose connector has the tier."""

    def __init__(self) -> None:
        self.model_executor = SimpleNamespace(collective_rpc=lambda method, timeout: [1])
        self.resets = 0
        self.scheduler: Any = None

    def start(self, stack: ExitStack) -> Driver:
        driver = stack.enter_context(running())
        self.scheduler = SimpleNamespace(connector=SimpleNamespace(reset_cache=lambda: self.reset_cache(driver)))
        return driver

    def reset_cache(self, driver: Driver) -> None:
        self.resets += 1
        driver.tier.drain_jobs()

    def collective_rpc(self, method: str) -> list[str]:
        return [method]

    def reset_prefix_cache(self) -> bool:
        return True


def test_new_weights_reset_the_connector_of_vllm_and_once_more_with_its_cache() -> None:
    """Requests between the two find blocks of the older weights in vLLM's cache, and store them again."""
    core, keys = Core(), keys_of(4)

    def found() -> list[str]:
        ctx = driver.begin("looks up")
        hits = driver.look_up(keys, ctx)
        driver.tier.on_request_finished(ctx)
        return hits

    def store() -> None:
        ctx = driver.begin("stores")
        driver.store(keys, range(4), ctx)
        driver.tier.on_request_finished(ctx)

    with ExitStack() as stack:
        driver = core.start(stack)
        store()
        assert core.reset_prefix_cache()
        assert (found(), core.resets) == (["HIT"] * 4, 0)
        core.collective_rpc("update_weights")
        assert (found(), core.resets) == (["MISS"] * 4, 1)
        store()
        assert found() == ["HIT"] * 4
        assert core.reset_prefix_cache()
        assert (found(), core.resets) == (["MISS"] * 4, 2)


@pytest.mark.parametrize("version", FACTS)
def test_every_method_has_the_parameters_of_the_contract(version: str) -> None:
    with installed(version) as factory:
        kind = factory.get_tier_class(MODULE)
        for name, names in METHODS.items():
            given = inspect.signature(getattr(kind, name)).parameters
            assert tuple(word for word in given if word != "self") == names


def test_blocks_leave_vllms_memory_and_come_back_in_parts_of_a_small_memory() -> None:
    keys = keys_of(300)
    with running(rows=600, primary={"capacity": "1MiB"}) as driver:
        ctx = driver.begin("stores")
        for start in range(0, 300, 30):
            assert driver.store(keys[start : start + 30], range(start, start + 30), ctx).success
        driver.tier.on_request_finished(ctx)
        ctx = driver.begin("loads")
        assert driver.promote(keys, range(300, 600), ctx) == keys
        assert np.array_equal(driver.rows[300:], driver.rows[:300])
        driver.tier.on_request_finished(ctx)


def test_blocks_that_another_request_has_loaded_do_not_hold_up_the_rest_of_a_prompt() -> None:
    keys = keys_of(30)
    with running(primary={"capacity": "1MiB"}) as driver:
        ctx = driver.begin("stores")
        driver.store(keys, range(30), ctx)
        driver.tier.on_request_finished(ctx)
        first, second = driver.begin("first"), driver.begin("second")
        shared = keys[:8]  # as many as one request may hold
        for ctx in (second, first):
            driver.until(lambda ctx=ctx: {driver.tier.lookup(key, ctx).name for key in shared} == {"HIT"})
        for key in keys[8:]:
            driver.tier.lookup(key, second)
        assert driver.load(shared, range(30, 38), first).success
        assert driver.promote(keys[8:], range(38, 60), second) == keys[8:]
        assert np.array_equal(driver.rows[30:60], driver.rows[:30])
        for ctx in (first, second):
            driver.tier.on_request_finished(ctx)


def test_a_block_that_left_before_its_load_is_a_miss_and_the_others_arrive() -> None:
    keys = keys_of(4)
    with running() as driver:
        ctx = driver.begin("stores")
        driver.store(keys, range(4), ctx)
        before = driver.rows.copy()
        result = driver.load([*keys[:2], *keys_of(1, first=50), *keys[2:]], range(10, 15), ctx)
        assert not result.success
        assert set(result.successful_keys) == set(keys)
        assert np.array_equal(driver.rows[12], before[12])
        assert np.array_equal(driver.rows[[10, 11, 13, 14]], before[:4])
        assert driver.tier.lookup(keys_of(1, first=50)[0], ctx).name in {"RETRY", "MISS"}
        driver.tier.on_request_finished(ctx)


def test_a_drain_ends_every_job_and_no_older_block_is_found_afterwards() -> None:
    keys = keys_of(20)
    with running() as driver:
        ctx = driver.begin()
        driver.store(keys[:10], range(10), ctx)
        numbers = [driver.submit(keys[10:], range(10, 20), ctx, load=False)]
        numbers += [driver.submit(keys[:10], range(20, 30), ctx, load=True)]
        driver.tier.lookup(keys[0], ctx)
        driver.tier.drain_jobs()
        found = {result.job_id for result in driver.tier.get_finished_jobs()}
        assert set(numbers) <= found | set(driver.results)
        after = driver.rows.copy()
        assert set(driver.look_up(keys, ctx)) == {"MISS"}
        assert np.array_equal(driver.rows, after)
        driver.tier.on_request_finished(ctx)


def test_a_request_that_was_open_at_a_reset_stores_nothing_any_more_and_the_next_one_does() -> None:
    keys = keys_of(4)
    with running() as driver:
        old = driver.begin("computed with the old weights")
        driver.tier.drain_jobs()
        assert not driver.store(keys, range(4), old).success
        new = driver.begin("new")
        assert driver.look_up(keys, new) == ["MISS"] * 4
        assert driver.store(keys, range(4), new).success
        driver.tier.on_request_finished(old)
        again = driver.begin(old.req_id)
        assert driver.store(keys_of(4, first=50), range(4), again).success
        for ctx in (new, again):
            driver.tier.on_request_finished(ctx)


def test_a_load_from_a_medium_that_hangs_is_a_miss_at_the_tiers_deadline_and_no_job(
    gate: Callable[[str], threading.Event],
) -> None:
    keys = keys_of(60)
    tier = {**MEMORY, "load_deadline": "0.2s"}
    with running(primary={"capacity": "1MiB"}, secondary=[tier], shutdown_deadline="0.1s") as driver:
        ctx = driver.begin("stores")
        driver.store(keys, range(60), ctx)  # more than the memory has rows, so the first ones are in the tier only
        driver.until(lambda: driver.tier._thread.stats["tiers"]["memory"]["blocks"] == 60)
        driver.tier.on_request_finished(ctx)
        called = gate("get_one")
        before = driver.rows.copy()
        ctx = driver.begin("loads")
        assert set(driver.look_up(keys[:4], ctx)) == {"MISS"}
        assert called.is_set()
        driver.tier.drain_jobs()
        assert np.array_equal(driver.rows, before)
        driver.tier.on_request_finished(ctx)


def test_stores_to_a_medium_that_hangs_end_and_nothing_waits_for_it(gate: Callable[[str], threading.Event]) -> None:
    with running(shutdown_deadline="0.1s") as driver:
        called = gate("put_one")
        ctx = driver.begin()
        results = [driver.store(keys_of(8, first=start), range(8), ctx) for start in range(0, 64, 8)]
        assert called.is_set()
        assert len(results) == 8
        driver.tier.drain_jobs()
        driver.tier.on_request_finished(ctx)


def test_calls_may_come_from_two_threads_one_at_a_time() -> None:
    keys = keys_of(8)
    with running() as driver:
        ctx = driver.begin("stores")
        driver.store(keys, range(8), ctx)
        lock = threading.Lock()
        found: list[str] = []

        def poll() -> None:
            with lock:
                other = driver.begin("peer")
            while not found or "RETRY" in found:
                with lock:
                    found[:] = [driver.tier.lookup(key, other).name for key in keys]
            with lock:
                driver.tier.on_request_finished(other)

        thread = threading.Thread(target=poll)
        thread.start()
        while thread.is_alive():
            with lock:
                driver.step()
        thread.join()
        assert found == ["HIT"] * 8
        driver.tier.on_request_finished(ctx)


def test_an_error_of_the_thread_fails_jobs_and_lookups_and_nothing_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys = keys_of(4)
    with running() as driver:
        ctx = driver.begin()

        def fail(*_: Any, **__: Any) -> Any:
            raise ValueError("a defect")

        monkeypatch.setattr(type(driver.tier._thread.manager), "prepare_store", fail)
        assert driver.store(keys, range(4), ctx).successful_keys == ()
        assert "a defect" in caplog.text
        assert driver.look_up(keys, ctx) == ["MISS"] * 4
        assert not driver.store(keys, range(4), ctx).success
        driver.tier.drain_jobs()
        driver.tier.on_request_finished(ctx)
        driver.until(lambda: not driver.tier._thread._lookups)
        assert not driver.tier._thread._stores


def test_a_request_whose_name_another_one_takes_again_does_not_end_it(
    gate: Callable[[str], threading.Event],
) -> None:
    keys = keys_of(16)
    with running(primary={"capacity": "1MiB"}, shutdown_deadline="0.1s") as driver:
        called = gate("put_one")
        other = driver.begin("fills the memory")
        driver.store(keys, range(16), other)
        driver.until(called.is_set)
        ctx = driver.begin("name")
        late = driver.submit(keys_of(1, first=50), [0], ctx, load=False)  # waits for room, and the end behind it
        driver.tier.on_request_finished(ctx)
        again = driver.begin("name")
        driver.until(lambda: late in driver.results)
        driver.tier.drain_jobs()
        assert set(driver.tier._thread.manager._known) >= {"name"}
        assert not driver.tier._thread.manager._known["name"].finished
        for one in (other, again):
            driver.tier.on_request_finished(one)


def test_a_thread_that_cannot_start_is_an_error_of_the_start(thread_limit: ThreadLimit) -> None:
    thread_limit.reach("kv-tiering-manager")
    with installed(NEWEST) as factory, pytest.raises(TierUnavailableError, match="can't start new thread"):
        factory.create_secondary_tier({**MODULE, **words()}, np.zeros((4, BLOCK), np.uint8).data, spec_of())
    assert thread_limit.refused == ["kv-tiering-manager"]


def test_a_forked_child_misses_and_touches_nothing() -> None:
    keys = keys_of(4)
    with running() as driver:
        ctx = driver.begin()
        driver.store(keys, range(4), ctx)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                assert driver.tier.lookup(keys[0], ctx).name == "MISS"
                number = driver.submit(keys, range(4), ctx, load=True)
                (result,) = [one for one in driver.tier.get_finished_jobs() if one.job_id == number]
                assert not result.success
                driver.tier.drain_jobs()
                driver.tier.shutdown()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert set(driver.look_up(keys, ctx)) == {"HIT"}
        driver.tier.on_request_finished(ctx)


@pytest.mark.parametrize("seed", range(4))
def test_a_random_life_never_loads_other_bytes_than_were_stored(seed: int) -> None:
    dice = random.Random(seed)
    rows = np.random.default_rng(seed).integers(0, 256, (40, BLOCK), np.uint8)
    keys = keys_of(40) + keys_of(8, group=1)
    content = {key: np.random.default_rng(number).integers(0, 256, BLOCK, np.uint8) for number, key in enumerate(keys)}
    with running(spec=spec_of(2), secondary=[{**MEMORY, "capacity": "2MiB"}]) as driver:
        driver.rows[: len(rows)] = rows
        for turn in range(40):
            ctx, start = driver.begin(f"r{turn}"), dice.randrange(len(keys) - 8)
            chosen = keys[start : start + dice.randrange(1, 8)]
            kind = dice.random()
            if kind < 0.45:
                for number, key in enumerate(chosen):
                    driver.rows[number] = content[key]
                driver.store(chosen, range(len(chosen)), ctx)
            elif kind < 0.95:
                for number, key in enumerate(driver.promote(chosen, range(20, 20 + len(chosen)), ctx)):
                    assert np.array_equal(driver.rows[20 + number], content[key])
            else:
                driver.tier.drain_jobs()
                assert set(driver.look_up(chosen, ctx)) == {"MISS"}
            driver.tier.on_request_finished(ctx)


def test_a_mixed_stack_has_no_common_place_and_the_dictionary_may_name_one(tmp_path: Path) -> None:
    pool = {"type": "valkey", "url": "valkey://127.0.0.1:1"}
    with running(secondary=[MEMORY, pool], open_deadline="0.1s", shutdown_deadline="0.1s") as driver:
        assert driver.tier.locality is None
        assert driver.tier.cache_hit_source is CacheHitSource.EXTERNAL_UNSPECIFIED
    with running(secondary=[MEMORY], locality="REMOTE") as driver:
        assert driver.tier.locality is Locality.REMOTE


def test_a_model_of_which_nothing_is_known_uses_no_tier_that_outlives_the_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    local = {"type": "local", "path": str(tmp_path), "capacity": "64MiB", "segment_size": "4MiB"}
    with running(secondary=[local], open_deadline="0.1s", shutdown_deadline="0.1s") as driver:
        assert "vLLM's configuration is not found" in caplog.text
        ctx = driver.begin("stores")
        driver.store(keys_of(4), range(4), ctx)
        driver.until(lambda: bool(driver.tier._thread.stats))
        assert not driver.tier._thread.stats["tiers"]["local"]["writable"]
        driver.tier.on_request_finished(ctx)


def test_counters_are_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiering.engines.mailbox.STATS_SECONDS", 0.0)
    with running() as driver:
        defined = type(driver.tier).build_metric_definitions({**MODULE, **words()})
        ctx = driver.begin()
        driver.store(keys_of(8), range(8), ctx)
        seen: dict[Any, float] = {}

        def report() -> bool:
            values = {} if (stats := driver.tier.get_stats()) is None else stats.values
            assert {name for name, _ in values} <= set(defined)
            for name, value in values.items():
                seen[name] = seen.get(name, 0) + value if name[0] == "kv_tiering_cascades" else value
            return seen.get(("kv_tiering_cascades", ("memory",)), 0) >= 8

        driver.until(report)
        driver.step()
        report()
        assert seen["kv_tiering_cascades", ("memory",)] == 8
        driver.tier.on_request_finished(ctx)


def test_the_front_end_refuses_a_wrong_dictionary() -> None:
    with installed(NEWEST) as factory, pytest.raises(StartupError, match="did you mean secondary"):
        factory.get_tier_class(MODULE).build_metric_definitions({**MODULE, **words(secundary=[])})


def test_a_prefix_that_no_tier_would_load_is_refused() -> None:
    with installed(NEWEST) as factory, pytest.raises(ConfigError, match="min_prefix_blocks: 40 blocks do not fit"):
        factory.create_secondary_tier(
            {**MODULE, **words(secondary=[{**MEMORY, "min_prefix_blocks": 40}])},
            np.zeros((4, BLOCK), np.uint8).data,
            spec_of(),
        )


def test_vllms_configuration_is_found_among_the_callers_and_the_spec_comes_first() -> None:
    found: list[tuple[Any, Any]] = []

    def build(spec: Any) -> None:
        found.append(configurations(spec, inspect.currentframe()))

    def connector(vllm_config: str, kv_cache_config: str, spec: Any) -> None:
        assert vllm_config
        assert kv_cache_config
        build(spec)

    connector("configuration", "caches", spec_of())
    connector("configuration", "caches", dataclasses.make_dataclass("Spec", [("vllm_config", str)])("of the spec"))
    assert found == [("configuration", "caches"), ("of the spec", "caches")]
