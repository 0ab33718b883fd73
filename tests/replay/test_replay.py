"""Replays whose hits, times and bytes can be checked by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import pytest

from tests.replay.traces import BLOCK_BYTES, BLOCK_TOKENS, request
from tiering.advisor.shards import Shards
from tiering.config.stack_file import load_stack
from tiering.errors import ConfigError
from tiering.medium.side import IoTask
from tiering.replay.generate import generate
from tiering.replay.model import MediumModel, ReplayModel
from tiering.replay.replay import Replay
from tiering.replay.result import ReplayResult, Times
from tiering.replay.trace import TraceRequest

MODEL = ReplayModel(prefill_tokens_per_second=100.0, device_bytes_per_second=100 * BLOCK_BYTES)
DISK = {"type": "local", "path": "/nowhere/kv", "capacity": 1000 * 1024 * 1100}


def replayed(
    requests: Iterable[TraceRequest], rows: int, *tiers: dict[str, Any], model: ReplayModel = MODEL, **primary: Any
) -> ReplayResult:
    stack = load_stack({"primary": {"capacity": rows * BLOCK_BYTES, **primary}, "secondary": list(tiers)})
    return Replay(stack, BLOCK_TOKENS, BLOCK_BYTES, model).run(requests)


def hits(result: ReplayResult) -> dict[str, int]:
    return {tier.name: tier.hit_blocks for tier in result.tiers}


def test_a_prompt_that_comes_again_is_loaded_and_the_rest_is_computed() -> None:
    result = replayed([request(0, range(8)), request(100, [*range(8), 90, 91])], 100)
    assert hits(result) == {"cpu": 8}
    assert (result.blocks, result.computed_tokens, result.hit_rate) == (18, 80 + 20, 8 / 18)
    # 80 tokens at 100 a second; then 8 blocks loaded at 100 a second, and 20 tokens computed.
    assert result.ttft_mean == pytest.approx((0.8 + 0.08 + 0.2) / 2)
    assert result.ttft_mean_without == pytest.approx((0.8 + 1.0) / 2)
    assert result.device_seconds_saved == pytest.approx(0.8)
    assert result.trace_seconds == 100


def test_the_last_token_is_always_computed() -> None:
    result = replayed([request(0, range(8)), request(100, range(8))], 100)
    assert result.computed_tokens == 80 + 1


def test_a_prompt_is_not_there_before_it_has_been_computed() -> None:
    assert hits(replayed([request(0, range(8)), request(0.5, range(8))], 100)) == {"cpu": 0}
    assert hits(replayed([request(0, range(8)), request(0.9, range(8))], 100)) == {"cpu": 8}


def test_blocks_that_left_the_primary_tier_come_from_the_disk_in_the_modelled_time() -> None:
    slow = MediumModel(read_bytes_per_second=10 * BLOCK_BYTES, write_bytes_per_second=10 * BLOCK_BYTES, latency=0.5)
    model = MODEL.model_copy(update={"tiers": {"local": slow}})
    trace = [request(0, range(8)), request(100, range(50, 58)), request(200, range(8))]
    result = replayed(trace, 8, DISK, model=model, promotion_share=1.0)
    # primary_share is a half by default: four blocks of eight are loaded at once, and the other four after them.
    assert hits(result) == {"cpu": 0, "local": 8}
    assert result.ttft_mean == pytest.approx((0.8 + 0.8 + 2 * 0.5 + 0.8 + 0.08 + 0.01) / 3, abs=0.1)
    share = {**DISK, "primary_share": 1.0}
    result = replayed(trace, 8, share, model=model, promotion_share=1.0)
    assert hits(result) == {"cpu": 0, "local": 8}
    # The latency, and 8 blocks at 10 a second; then 8 blocks to the accelerator, and the last token.
    assert result.ttft_mean == pytest.approx((0.8 + 0.8 + 0.5 + 0.8 + 0.08 + 0.01) / 3)
    local = result.tiers[1]
    assert (local.bytes_written, local.bytes_read) == (16 * BLOCK_BYTES, 8 * BLOCK_BYTES)
    assert (local.requests, local.blocks_at_end) == (24, 16)


def test_a_bucket_is_probed_once_and_its_blocks_expire() -> None:
    trace = [request(0, range(8)), request(100, range(50, 66)), request(4000, range(8))]
    bucket: dict[str, Any] = {"type": "s3", "bucket": "kv-cache"}
    assert hits(replayed(trace, 16, bucket)) == {"cpu": 0, "s3": 8}
    assert hits(replayed(trace, 16, {**bucket, "ttl": "1d"})) == {"cpu": 0, "s3": 8}
    late = [*trace[:2], request(90_000, range(8))]
    assert hits(replayed(late, 16, {**bucket, "ttl": "1d"})) == {"cpu": 0, "s3": 0}


def test_a_medium_that_is_too_slow_drops_stores() -> None:
    slow = MediumModel(read_bytes_per_second=BLOCK_BYTES, write_bytes_per_second=BLOCK_BYTES, latency=0.01)
    model = MODEL.model_copy(update={"tiers": {"local": slow}})
    trace = [request(number / 10, range(number * 100, number * 100 + 50)) for number in range(20)]
    result = replayed(trace, 120, DISK, model=model)
    assert result.tiers[1].blocks_dropped > 500
    assert result.tiers[1].bytes_written < 500 * BLOCK_BYTES


def test_a_slow_tier_whose_stores_wait_keeps_no_rows_from_the_others() -> None:
    """The bucket writes a block a second: all rows would soon wait for it."""
    slow = MediumModel(read_bytes_per_second=BLOCK_BYTES, write_bytes_per_second=BLOCK_BYTES, latency=0.01)
    model = MODEL.model_copy(update={"tiers": {"s3": slow}})
    trace = [request(3 * number, range(100 * (number % 10), 100 * (number % 10) + 20)) for number in range(60)]
    alone = replayed(trace, 60, DISK, model=model)
    bucket: dict[str, Any] = {"type": "s3", "bucket": "kv-cache", "deadline": "1h"}
    both = replayed(trace, 60, DISK, bucket, model=model)
    assert hits(both)["local"] > 0.9 * hits(alone)["local"] > 500
    assert both.tiers[2].blocks_dropped > 100
    assert 0 < both.tiers[2].blocks_at_end < 200


def test_a_store_without_room_is_offered_once_more_when_it_may_take_rows() -> None:
    slow = MediumModel(read_bytes_per_second=BLOCK_BYTES, write_bytes_per_second=BLOCK_BYTES, latency=0.01)
    model = MODEL.model_copy(update={"tiers": {"local": slow}})
    # The second prompt is computed while eight of the first one's ten blocks wait for the disk.
    trace = [request(0, range(10)), request(1, range(50, 60)), request(2.5, range(50, 60))]
    result = replayed(trace, 10, {**DISK, "deadline": "1h", "max_inflight": 1}, model=model)
    assert result.stores_without_room >= 1
    assert hits(result)["cpu"] >= 5


def test_a_saturated_tier_is_told_by_the_result_and_not_by_the_log(caplog: pytest.LogCaptureFixture) -> None:
    slow = MediumModel(read_bytes_per_second=BLOCK_BYTES, write_bytes_per_second=1000 * BLOCK_BYTES, latency=0.01)
    model = MODEL.model_copy(update={"tiers": {"s3": slow}})
    bucket = {"type": "s3", "bucket": "kv-cache", "load_deadline": "2s", "breaker": {"failures": 1}}
    trace = [request(30 * number, range(50 * (number % 4), 50 * (number % 4) + 20)) for number in range(20)]
    result = replayed(trace, 40, bucket, model=model)
    tier = result.tiers[1]
    assert tier.loads_overdue > 0
    assert 0 < tier.seconds_out_of_service < result.trace_seconds
    assert not caplog.records


@pytest.mark.parametrize(("speed", "served"), [(2, 8), (0.05, 0)])
def test_a_tier_that_is_slower_than_computing_is_left_out(speed: float, served: int) -> None:
    disk = MediumModel(
        read_bytes_per_second=int(speed * 10 * BLOCK_BYTES), write_bytes_per_second=1000 * BLOCK_BYTES, latency=0.01
    )
    model = MODEL.model_copy(update={"tiers": {"local": disk}})
    trace = [request(100 * number, range(8 * (number % 3), 8 * (number % 3) + 8)) for number in range(12)]
    chosen, always, never = (
        replayed(trace, 16, {**DISK, "load_or_compute": rule}, model=model) for rule in ("auto", "always", "never")
    )
    assert hits(always)["local"] == 9 * 8
    assert hits(never)["local"] == 0
    if served:
        assert hits(chosen) == hits(always)
    else:
        # The first load shows how slow the disk is: its request waits as long as computing takes.
        assert hits(chosen)["local"] < 8
        assert chosen.ttft_mean <= never.ttft_mean + 0.9 / 12
        assert chosen.ttft_mean < always.ttft_mean / 5


def test_second_touch_writes_only_what_comes_again() -> None:
    trace = [request(100 * n, [*range(4), *range(100 * n + 10, 100 * n + 14)]) for n in range(5)]
    everything = replayed(trace, 1000, DISK).tiers[1]
    twice = replayed(trace, 1000, {**DISK, "admission": "second_touch"}).tiers[1]
    assert everything.bytes_written == (4 + 5 * 4) * BLOCK_BYTES
    assert twice.bytes_written == 4 * BLOCK_BYTES


def test_the_engines_own_cache_comes_first() -> None:
    model = MODEL.model_copy(update={"device_cache": 4 * BLOCK_BYTES})
    result = replayed([request(0, range(8)), request(100, range(8))], 100, model=model)
    assert hits(result) == {"device": 4, "cpu": 4}
    assert result.ttft_mean_without == pytest.approx((0.8 + 0.4) / 2)


def test_a_prompt_larger_than_the_primary_tier_is_stored_in_part() -> None:
    result = replayed([request(0, range(100)), request(100, range(100))], 30)
    assert hits(result) == {"cpu": 25}
    assert result.stores_without_room > 0


def test_lru_through_the_manager_follows_the_exact_curve() -> None:
    trace = list(generate({"chat": 1.0, "system": 1.0}, 1500, 5.0, BLOCK_TOKENS * 20, seed=3))
    rooms = [300, 1000, 3000]
    cache = Shards(rooms, 1 << 16)
    for item in trace:
        cache.add(item.hashes)
    fast = ReplayModel(prefill_tokens_per_second=1e9)
    for room in rooms:
        result = replayed(trace, room, model=fast)
        assert result.hit_rate == pytest.approx(cache.hit_rate(room), abs=0.02)


@pytest.mark.parametrize("eviction", ["lru", "arc"])
def test_every_replay_ends_with_all_requests_done(eviction: str) -> None:
    tiers = [{**DISK, "capacity": 100 * 1100 * 1024}, {"type": "s3", "bucket": "kv-cache"}]
    trace = list(generate({"agents": 1.0}, 400, 20.0, 500, seed=1))
    stack = load_stack({"primary": {"capacity": 60 * BLOCK_BYTES, "eviction": eviction}, "secondary": tiers})
    replay = Replay(stack, 500, BLOCK_BYTES, ReplayModel())
    result = replay.run(trace)
    stats = replay.stack.manager.get_stats()["manager"]
    assert (result.requests, stats["jobs_in_flight"], stats["tiers_out_of_service"]) == (400, 0, 0)
    assert result.blocks == sum(len(item.hashes) for item in trace)
    assert 0 < result.hit_rate <= 1


def test_equal_traces_give_equal_results() -> None:
    runs = [replayed(generate({"chat": 1.0}, 200, 5.0, 50, seed=2), 200, DISK) for _ in range(2)]
    one, other = (run.as_dict() | {"seconds": 0} for run in runs)
    assert one == other


@pytest.mark.parametrize("bandwidth", [2, 20, 2000])
def test_a_medium_that_is_too_slow_is_out_of_service_for_a_while(bandwidth: int) -> None:
    medium = MediumModel(
        read_bytes_per_second=bandwidth * BLOCK_BYTES, write_bytes_per_second=bandwidth * BLOCK_BYTES, latency=0.05
    )
    model = MODEL.model_copy(update={"tiers": {"local": medium, "s3": medium}})
    disk = {**DISK, "capacity": 150 * 1100 * 1024, "deadline": "2s"}
    bucket = {"type": "s3", "bucket": "kv-cache", "ttl": "1d", "min_prefix_blocks": 2}
    trace = generate({"agents": 1.0, "chat": 1.0}, 400, 2.0, 100, seed=4)
    result = replayed(trace, 60, disk, bucket, model=model)
    assert (result.tiers[2].seconds_out_of_service > 10) == (bandwidth == 2)


def test_dollars_follow_from_capacity_time_and_requests() -> None:
    model = MODEL.model_copy(update={"device_dollars_per_hour": 3600.0, "primary_dollars_per_gib_month": 2.0})
    result = replayed([request(0, range(8)), request(730 * 3600, range(8))], 1024, model=model)
    assert result.dollars_saved_per_month == pytest.approx(0.79)
    assert result.dollars_per_month == pytest.approx(2.0)
    assert result.net_dollars_per_month == pytest.approx(0.79 - 2.0)


def test_a_stack_without_room_for_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"primary\.capacity"):
        Replay(load_stack({"primary": {"capacity": 1000}}), BLOCK_TOKENS, BLOCK_BYTES, MODEL)
    with pytest.raises(ConfigError, match=r"secondary\[0\].capacity"):
        replayed([], 10, {**DISK, "capacity": 1000})
    with pytest.raises(ConfigError, match="mode"):
        Replay(load_stack({"primary": {"capacity": "1GiB"}, "mode": "simple"}), BLOCK_TOKENS, BLOCK_BYTES, MODEL)


def test_quantiles_lie_between_the_shortest_and_the_longest_time() -> None:
    times = Times()
    times.add(0.631)
    assert times.quantile(0.01) == times.quantile(0.99) == times.mean == 0.631


def test_quantiles_are_within_two_percent() -> None:
    times = Times()
    for value in itertools.chain(range(1, 1000), [0]):
        times.add(value / 100)
    assert times.quantile(0.5) == pytest.approx(5.0, rel=0.02)
    assert times.quantile(0.99) == pytest.approx(9.9, rel=0.02)
    assert (times.quantile(0.0001), Times().quantile(0.5)) == (0.0, 0.0)
    assert times.mean == pytest.approx(4.995)


def test_a_look_for_a_new_epoch_at_a_random_time_is_no_event() -> None:
    stack = load_stack({"primary": {"capacity": 8 * BLOCK_BYTES}, "secondary": [{"type": "s3", "bucket": "kv-cache"}]})
    io = Replay(stack, BLOCK_TOKENS, BLOCK_BYTES, MODEL).stack.tiers[0].io
    ended: list[object] = []
    io.run(IoTask("epoch", lambda: "none", lambda found, error: ended.append((found, error))))
    assert ended == [("none", None)]
    assert (io.next_answer(), io.next_end()) == (math.inf, math.inf)


def test_the_causes_of_a_replay_sum_to_its_computed_tokens() -> None:
    trace = [
        request(0, range(8)),
        request(10, [*range(4), 90, 91]),
        request(20, range(100, 108)),
        request(30, range(8)),
        request(40, range(100, 108)),
    ]
    stack = {"primary": {"capacity": 9 * BLOCK_BYTES}, "explain": {}}
    result = Replay(load_stack(stack), BLOCK_TOKENS, BLOCK_BYTES, MODEL).run(trace)
    assert result.causes is not None
    assert sum(result.causes.values()) == result.computed_tokens
    assert list(result.causes) == ["new", "evicted cpu", "diverged"]
    assert result.causes["new"] == 2 * 80
    assert result.causes["diverged"] == 20


@pytest.mark.parametrize(
    "words", [{}, {"admission": "second_touch"}, {"min_prefix_blocks": 3, "load_or_compute": "auto"}]
)
def test_the_causes_of_a_long_replay_sum_to_its_computed_tokens(words: dict[str, Any]) -> None:
    trace = list(generate({"chat": 1.0}, 300, 5.0, BLOCK_TOKENS * 20, seed=1))
    stack = load_stack({"primary": {"capacity": 300 * BLOCK_BYTES}, "secondary": [DISK | words], "explain": {}})
    explained = Replay(stack, BLOCK_TOKENS * 20, BLOCK_BYTES, MODEL).run(trace)
    assert explained.causes is not None
    assert sum(explained.causes.values()) == explained.computed_tokens
    plain = load_stack({"primary": {"capacity": 300 * BLOCK_BYTES}, "secondary": [DISK | words]})
    assert Replay(plain, BLOCK_TOKENS * 20, BLOCK_BYTES, MODEL).run(trace).computed_tokens == explained.computed_tokens
