"""The warm start of a manager: what it promotes, what it waits for, and what a lie costs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tiering.api.keys import OffloadKey
from tiering.api.request import ReqContext
from tiering.errors import RegionError
from tiering.manager.manager import TieringOffloadingManager
from tiering.manager.warm_start import VAIN_RUNS, WarmStartLimits
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.primary.memory.region import SharedRegion
from tiering.secondary import hot_prefixes
from tiering.secondary.contract import TierHotKeys
from tiering.secondary.hot_prefixes import PUBLISH_SECONDS, REFRESH_SECONDS
from tiering.testing.clock import FakeClock
from tiering.testing.fake_tier import FakeTier
from tiering.testing.keys import keys_of

K = keys_of(*range(100))
ROW_BYTES = 16


class FakeHotKeys(TierHotKeys):
    """Hot keys that a test chooses.

    Attributes:
        engines: what the engines have published; None: not known yet.
        published: what the manager has published.
    """

    def __init__(self, engines: Any = ()) -> None:
        self.engines = engines
        self.published: list[list[list[OffloadKey]]] = []

    def publish(self, chains: Sequence[Sequence[OffloadKey]]) -> None:
        self.published.append([list(chain) for chain in chains])

    def gather(self) -> Any:
        return self.engines


class World:
    """A manager that starts warm from fake tiers, whose loads end when a test says so."""

    def __init__(
        self, engines: Any = (), *, held: Sequence[OffloadKey] = K, rows: int = 64, blocks: int = 64, **words: Any
    ) -> None:
        self.clock = FakeClock()
        self.hot = FakeHotKeys(engines)
        self.tier = FakeTier(held=set(held), max_load_blocks=words.pop("max_load_blocks", None))
        self.tier.traits = replace(self.tier.traits, hot_keys=self.hot)
        memory = words.pop("memory", None) or np.zeros((rows, ROW_BYTES), np.uint8).data
        self.primary = CPUPrimaryTierOffloadingManager(memory)
        limits = WarmStartLimits(blocks * ROW_BYTES, words.pop("seconds", 60.0), words.pop("bandwidth", 1e9))
        self.manager = TieringOffloadingManager(
            self.primary, [self.tier], clock=self.clock, promotion_share=1.0, warm_start=limits, **words
        )

    def step(self, count: int = 1, *, ends: bool = True) -> None:
        """End steps; unless ``ends`` is False, all loads end after each."""
        for _ in range(count):
            self.manager.on_schedule_end()
            if ends:
                self.tier.finish_all()
            self.clock.advance(0.01)

    def readable(self) -> list[OffloadKey]:
        return [key for key in K if key in self.primary.readable]

    def stat(self, name: str) -> int:
        return int(self.manager.get_stats()["manager"][name])

    def request(self, req_id: str, **params: Any) -> ReqContext:
        ctx = ReqContext(req_id, {"kv_tiering": params} if params else None)
        self.manager.on_new_request(ctx)
        return ctx


@pytest.mark.parametrize("fails", [False, True])
def test_the_time_begins_when_the_rows_are_prepared(fails: bool) -> None:
    """An idle engine steps until then, but not for rows that cannot be prepared."""
    memory, go = SharedRegion.create(64, 4096), threading.Event()

    def prepare(is_over: Callable[[], bool]) -> None:
        assert go.wait(60)
        if fails:
            raise RegionError("there is no memory")

    memory.preparation.begin(prepare)
    world = World([[K[:3]]], memory=memory, blocks=64 * 256, seconds=1.0)
    world.step(500)
    assert (world.readable(), world.manager.has_pending_work()) == ([], True)
    go.set()
    for thread in threading.enumerate():
        if thread.name == "kv-tiering-prepare":
            thread.join(60)
    world.step(4)
    assert world.readable() == ([] if fails else K[:3])
    world.clock.advance(2.0)
    world.step(2)
    assert not world.manager.has_pending_work()
    world.manager.shutdown()


def test_blocks_are_in_the_cpu_tier_before_a_request_asks() -> None:
    world = World([[K[:3], K[3:5]]])
    world.step(4)
    assert world.readable() == K[:5]
    ctx = world.request("first")
    assert world.manager.match_prefix(K[:5], ctx).hits == 5
    assert (world.stat("warm_start_blocks"), world.stat("warm_start_engines")) == (5, 1)


def test_without_the_word_nothing_is_gathered_published_or_promoted() -> None:
    world = World([[K[:3]]])
    plain = TieringOffloadingManager(world.primary, [world.tier], clock=world.clock)
    ctx = ReqContext("r")
    plain.on_new_request(ctx)
    plain.touch(K[:3], ctx)
    for _ in range(3):
        plain.on_schedule_end()
    plain.shutdown()
    assert (world.readable(), world.hot.published, world.tier.loads) == ([], [], [])


def test_without_published_keys_nothing_is_promoted_and_the_warm_start_is_over() -> None:
    world = World()
    world.step(2)
    assert (world.readable(), world.tier.asked, world.manager.has_pending_work()) == ([], [], False)


def test_no_batch_begins_while_a_request_waits_for_its_promotion() -> None:
    world = World(None)
    ctx = world.request("waits")
    assert world.manager.match_prefix(K[50:52], ctx).pending
    world.hot.engines = [[K[:3]]]
    world.step(3, ends=False)
    assert [job.keys for job in world.tier.loads] == [tuple(K[50:52])]
    world.tier.finish_all()
    world.step(2)
    assert world.readable() == [*K[:3], *K[50:52]]


def test_a_request_gets_the_blocks_that_a_warm_start_is_loading_for_it() -> None:
    world = World([[K[:3]]])
    world.step(ends=False)
    ctx = world.request("joins")
    assert world.manager.match_prefix(K[:3], ctx).pending
    assert len(world.tier.loads) == 1
    world.tier.finish_all()
    world.step()
    assert world.manager.match_prefix(K[:3], ctx) == (3, False)
    assert world.stat("rows_reserved") == 3
    world.manager.on_request_finished(ctx)
    assert world.stat("rows_reserved") == 0


def test_engines_take_turns_so_that_a_liar_gets_its_share_at_most() -> None:
    honest, liar = [K[n : n + 1] for n in range(8)], [K[n : n + 1] for n in range(50, 90)]
    world = World([liar, honest], blocks=8)
    world.step(20)
    assert world.readable() == [*K[:4], *K[50:54]]


def test_blocks_that_two_engines_published_are_loaded_once() -> None:
    world = World([[K[:4]], [K[:4], K[4:6]]])
    world.step(8)
    assert world.readable() == K[:6]
    assert world.stat("warm_start_blocks") == 6


def test_keys_that_no_tier_holds_cost_a_bounded_number_of_lookups() -> None:
    world = World([[[key] for key in keys_of(*range(1000, 2000))]])
    world.step(20)
    assert len(world.tier.asked) == VAIN_RUNS
    assert (world.stat("warm_start_blocks"), world.stat("warm_start_missing")) == (0, VAIN_RUNS)
    assert not world.manager.has_pending_work()


def test_loads_that_all_fail_end_the_warm_start_too() -> None:
    world = World([[[key] for key in K]])
    for _ in range(60):
        world.step(ends=False)
        for job in list(world.tier.loads):
            world.tier.finish(job, success=False)
    assert world.stat("warm_start_missing") == VAIN_RUNS
    assert world.readable() == []


def test_a_run_ends_at_the_first_block_that_no_tier_holds() -> None:
    world = World([[K[:6], K[10:12]]], held=[*K[:3], *K[4:12]])
    world.step(8)
    assert world.readable() == [*K[:3], *K[10:12]]


def test_no_block_is_evicted_for_a_warm_start() -> None:
    world = World([[[key] for key in K[10:30]]], rows=8)
    ctx = world.request("r")
    output = world.manager.prepare_store(K[:4], ctx)
    assert output is not None
    world.manager.complete_store(output.keys_to_store, ctx)
    world.step(20)
    assert world.readable() == [*K[:4], *K[10:14]]
    assert world.stat("evicted_blocks") == 0


def test_the_hottest_blocks_are_evicted_last() -> None:
    world = World([[K[:4], K[4:8]]], rows=8)
    world.step(8)
    assert world.readable() == K[:8]
    ctx = world.request("r")
    for key in K[50:54]:
        output = world.manager.prepare_store([key], ctx)
        assert output is not None
        world.manager.complete_store(output.keys_to_store, ctx)
    assert world.readable() == [*K[:4], *K[50:54]]


def test_no_more_is_loaded_than_the_bytes_allow() -> None:
    world = World([[[key] for key in K]], blocks=5)
    world.step(30)
    assert len(world.readable()) == 5


def test_the_bandwidth_holds_and_a_batch_is_a_tenth_of_a_second() -> None:
    world = World([[K]], bandwidth=100.0 * ROW_BYTES)
    world.step(15)
    assert world.readable() == K[:20]
    world.step(10)
    assert world.readable() == K[:30]


def test_nothing_begins_after_its_time() -> None:
    world = World([[[key] for key in K]], seconds=0.045)
    world.step(30)
    assert 0 < len(world.readable()) <= 5
    assert not world.manager.has_pending_work()


def test_a_tier_that_knows_nothing_yet_is_asked_again_and_keeps_an_idle_engine_for_ten_seconds_only() -> None:
    world = World(None)
    world.step()
    assert world.manager.has_pending_work()
    world.clock.advance(10.0)
    assert not world.manager.has_pending_work()
    world.hot.engines = [[K[:3]]]
    world.step(3)
    assert world.readable() == K[:3]


def test_an_undecided_lookup_is_repeated_for_a_while_and_then_a_miss() -> None:
    world = World([[K[:3], K[3:5]]])
    world.tier.unknown.add(K[0])
    world.step(3)
    assert world.readable() == []
    world.clock.advance(10.0)
    world.step(3)
    assert world.readable() == K[3:5]


def test_a_load_that_never_ends_holds_one_batch_and_no_request() -> None:
    world = World([[K[:3], K[3:6]]])
    world.step(5, ends=False)
    assert [job.keys for job in world.tier.loads] == [tuple(K[:3])]
    ctx = world.request("r")
    assert world.manager.match_prefix(K[90:91], ctx).pending
    world.step(ends=False)
    (_, job) = world.tier.loads
    world.tier.finish(job)
    assert world.manager.match_prefix(K[90:91], ctx) == (1, False)


def test_a_reset_drops_the_batch_and_gathers_anew() -> None:
    world = World([[K[:3], K[3:6]]])
    world.step(ends=False)
    world.manager.reset_cache()
    world.tier.finish_all()
    world.tier.held.update(K[20:22])
    world.hot.engines = [[K[20:22]]]
    world.step(4)
    assert world.readable() == K[20:22]


@pytest.mark.parametrize("engines", [7, [7], [[7]], [[["text"]]], [["text"]], [[[b"key", None]]]])
def test_a_tier_that_returns_something_else_is_out_of_service(engines: Any) -> None:
    world = World(engines)
    world.step(3)
    assert world.stat("tiers_out_of_service") == 1


def test_what_requests_used_is_published_30_seconds_after_the_first_use_and_at_the_shutdown() -> None:
    """An engine that has just started would replace what its earlier life published by one prefix."""
    world = World()
    world.clock.advance(10 * PUBLISH_SECONDS)
    ctx = world.request("r")
    world.manager.touch(K[:3], ctx)
    world.step()
    world.clock.advance(0.9 * PUBLISH_SECONDS)
    world.manager.touch(K[3:5], ctx)
    world.step()
    assert world.hot.published == []
    world.clock.advance(0.1 * PUBLISH_SECONDS)
    world.step()
    assert world.hot.published == [[K[:3], K[3:5]]]
    world.manager.touch(K[5:7], ctx)
    world.step()
    assert len(world.hot.published) == 1
    world.manager.shutdown()
    assert world.hot.published[1:] == [[K[:3], K[3:5], K[5:7]]]


def test_what_has_not_changed_is_published_again_before_it_expires() -> None:
    world = World()
    world.manager.touch(K[:3], world.request("r"))
    world.step()
    world.clock.advance(PUBLISH_SECONDS)
    world.step()
    assert len(world.hot.published) == 1
    world.clock.advance(REFRESH_SECONDS)
    world.step()
    assert len(world.hot.published) == 2


@pytest.mark.parametrize("params", [{"store": False}, {"tiers": ["fake"]}])
def test_prefixes_that_a_request_may_not_store_everywhere_are_not_published(params: dict[str, Any]) -> None:
    world = World()
    world.manager.touch(K[:3], world.request("r", **params))
    world.manager.touch(K[3:5], ReqContext("unknown"))
    world.manager.shutdown()
    assert world.hot.published == []


def test_refreshed_blocks_that_no_request_used_are_not_published() -> None:
    world = World()
    world.manager.touch(K[:3], world.request("r"), False)
    world.manager.shutdown()
    assert world.hot.published == []


def test_the_prefixes_used_last_are_kept_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_prefixes, "MOST_USES", 10)
    world = World()
    ctx = world.request("r")
    for start in (0, 4, 8):
        world.manager.touch(K[start : start + 4], ctx)
    world.manager.touch(K[20:90], ctx)
    world.manager.shutdown()
    assert world.hot.published == [[K[20:30]]]


def test_a_reset_drops_what_was_used_because_its_blocks_are_foreign_now() -> None:
    world = World()
    world.manager.touch(K[:3], world.request("r"))
    world.step()
    world.manager.reset_cache()
    world.clock.advance(PUBLISH_SECONDS)
    world.step()
    world.manager.shutdown()
    assert world.hot.published == []


def test_steps_rest_once_the_warm_start_is_over() -> None:
    world = World([[K[:3]]])
    world.tier.resting = 1.0
    world.step(8)
    calls = len(world.tier.calls("on_schedule_end"))
    world.step(5)
    assert len(world.tier.calls("on_schedule_end")) == calls
