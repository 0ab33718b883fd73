"""The size advisor: a curve close to the exact one, low cost, one count per request, and its metrics."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from tiering import ModelIdentity, ReqContext, load_stack, open_manager
from tiering.advisor.advisor import FACTORS, FIELDS, SizeAdvisor, small_tier
from tiering.advisor.shards import HASH_BITS, HASHES, Shards
from tiering.connector.metrics import METRICS
from tiering.connector.stats import Increments
from tiering.replay.device import DeviceCache
from tiering.replay.generate import generate
from tiering.replay.trace import keys_of, mixed
from tiering.testing.keys import keys_of as small_keys

MODEL = ModelIdentity(name="m", weights="w", dtype="bfloat16", layout="test")


def zipf(count: int, distinct: int, seed: int = 0) -> list[int]:
    chosen = (np.random.default_rng(seed).pareto(0.6, count) * 20).astype(np.uint64) % np.uint64(distinct)
    return [int(number) for number in mixed(chosen) >> np.uint64(32)]


@pytest.mark.parametrize(
    ("capacity", "leads_on", "advice"),
    [
        (
            2 << 30,
            False,
            "brings nothing (2 GiB of CPU memory for 2 GiB of KV cache); set primary.inclusion: exclusive",
        ),
        (1 << 30, True, "brings nothing by itself: it only leads to the secondary tiers (1 GiB of CPU memory"),
        ((2 << 30) + 1, False, "only what an inclusive CPU tier is larger by than the GPU's own cache brings hits"),
        (3 << 30, False, None),
    ],
)
def test_an_inclusive_cpu_tier_that_mostly_repeats_the_engines_own_cache_gets_advice(
    capacity: int, leads_on: bool, advice: str | None
) -> None:
    said = small_tier(capacity, 2 << 30, leads_on=leads_on, exclusive=False)
    assert said is None if advice is None else advice in str(said)
    assert small_tier(capacity, 2 << 30, leads_on=leads_on, exclusive=True) is None


@pytest.mark.parametrize("known", [True, False])
def test_the_estimate_of_an_exclusive_tier_counts_the_engines_own_cache(known: bool) -> None:
    """Without the size of the engine's cache, the estimates are too low: the negative control."""
    device, rows = DeviceCache(400), 600
    advisor = SizeAdvisor({"cpu": rows})
    if known:
        advisor.exclude("cpu", 400)
    others: dict[float, OrderedDict[bytes, None]] = {factor: OrderedDict() for factor in (0.5, 1.0, 2.0)}
    hits, asked = dict.fromkeys(others, 0), 0
    for request in generate({"chat": 1.0, "documents": 0.3}, 1200, 4.0, 256, seed=5):
        keys = keys_of(request.hashes)
        wanted = keys[device.hits(keys) :]
        advisor.looked_up({}, wanted)
        asked += len(wanted)
        for factor, other in others.items():
            hits[factor] += next((at for at, key in enumerate(wanted) if key not in other), len(wanted))
        leaving = device.fill(keys)
        if leaving:
            advisor.stored(leaving)
        for factor, other in others.items():
            for key in keys:
                other.pop(key, None)
            other.update(dict.fromkeys(reversed(leaving)))
            while len(other) > factor * rows:
                other.popitem(last=False)
    estimates = advisor.estimates("cpu")
    errors = [abs(estimates[FIELDS[factor]] - count / asked) for factor, count in hits.items()]
    assert max(errors) < 0.04 if known else max(errors) > 0.08, errors


def test_the_estimate_is_exact_while_every_key_is_sampled() -> None:
    shards = Shards([1, 2, 3])
    for key in [1, 2, 3, 1, 2, 2, 4]:
        shards.access([key])
        shards.accesses += 1
    # Distances: 3 for the 1 after 2 and 3; 3 for the 2 after 3 and 1; 1 for the repeated 2.
    assert [shards.hit_rate(size) for size in (1, 2, 3)] == [pytest.approx(hits / 7) for hits in (1, 1, 3)]


def test_the_sample_keeps_its_size_and_its_threshold_falls() -> None:
    shards = Shards([100, 1000], sample=500)
    shards.access(zipf(50_000, 20_000))
    assert shards.keys == 500
    assert shards.threshold < HASHES // 5
    keys = shards.keys
    shards.access([shards.threshold, HASHES - 1])
    assert shards.keys == keys


@pytest.mark.parametrize("sample", [40, 5000])
def test_a_prompt_at_once_counts_as_its_keys_one_by_one(sample: int) -> None:
    random = np.random.default_rng(5)
    prompts = [mixed(np.arange(start, start + 50, dtype=np.uint64)) >> np.uint64(32) for start in range(0, 400, 20)]
    random.shuffle(prompts)
    at_once, one_by_one = Shards([5, 20, 100], sample), Shards([5, 20, 100], sample)
    for step in range(600):
        known = max(1, step // 30)
        hashes = prompts[random.integers(known)][: random.integers(1, 50)].tolist()
        if random.random() < 0.3:
            hashes += random.choice(hashes, 3).tolist()
        if random.random() < 0.3:  # A new key may push out one that comes later in the same prompt.
            random.shuffle(hashes)
        counted = bool(random.random() < 0.8)
        at_once.access(hashes, counted=counted)
        for key in hashes:
            one_by_one.access([key], counted=counted)
    assert (at_once.keys, at_once.threshold) == (one_by_one.keys, one_by_one.threshold)
    assert at_once.weight == pytest.approx(one_by_one.weight)
    for size in (5, 20, 100):
        assert at_once.hit_rate(size) == pytest.approx(one_by_one.hit_rate(size), abs=1e-12)
    assert at_once.hit_rate(5) < at_once.hit_rate(20) < at_once.hit_rate(100)


def test_a_key_that_leaves_the_sample_within_a_prompt_is_not_counted() -> None:
    shards = Shards([1, 2, 3], sample=3)
    shards.access([10, 90, 20])
    shards.access([5, 10, 90, 20])  # The 5 pushes out the 90.
    assert (shards.keys, shards.threshold) == (3, 90)
    assert shards.weight == pytest.approx(3 + 1 + 2 * HASHES / 90)


@pytest.mark.parametrize("kind", ["chat", "documents", "agents", "system"])
def test_the_mean_error_is_at_most_one_point(kind: str) -> None:
    trace = list(generate({kind: 1.0}, 2500, 5.0, 128, seed=7))
    capacity = 6000
    advisor = SizeAdvisor({"cpu": capacity}, sample=8192)
    sizes = [int(capacity * factor) for factor in FACTORS]
    exact = Shards(sizes, 1 << 16)
    for request in trace:
        exact.add(request.hashes)
        advisor.looked_up({}, keys_of(request.hashes))
    estimates = advisor.estimates("cpu")
    errors = [abs(estimates[name] - exact.hit_rate(size)) for name, size in zip(FIELDS.values(), sizes, strict=True)]
    assert exact.distinct > 8192
    assert sum(errors) / len(errors) <= 0.01
    assert max(errors) <= 0.03


def test_a_request_that_asks_again_is_counted_once_and_what_grew_is_added() -> None:
    advisor, counted = SizeAdvisor({"cpu": 100}), dict[int, int]()
    keys = small_keys(*range(10))
    for _ in range(5):
        advisor.looked_up(counted, keys[:6])
    assert advisor.accesses == 6
    advisor.looked_up(counted, keys)
    advisor.looked_up(counted, small_keys(*range(4), group=1))
    advisor.looked_up(counted, [])
    assert advisor.accesses == 14


def test_stored_keys_are_recent_and_no_lookups() -> None:
    advisor = SizeAdvisor({"cpu": 4})
    keys = keys_of(mixed(np.arange(8, dtype=np.uint64)))
    advisor.stored(keys)
    assert (advisor.accesses, advisor.estimates("cpu")) == (0, {})
    advisor.looked_up({}, keys[6:])
    assert advisor.estimates("cpu")["estimated_hit_ratio_x1"] == 1.0


def test_keys_of_odd_lengths_are_sampled_alike() -> None:
    hashes = mixed(np.arange(4000, dtype=np.uint64))
    even = keys_of(hashes)
    results = []
    for keys in (even, [key + b"x" for key in even]):
        advisor = SizeAdvisor({"cpu": 1000}, sample=200)
        for _ in range(3):
            advisor.looked_up({}, keys)
        results.append(advisor.estimates("cpu"))
    assert results[0] == results[1]


def test_the_window_lets_old_accesses_count_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiering.advisor.advisor.WINDOW", 1000)
    advisor = SizeAdvisor({"cpu": 50})
    hot = keys_of(mixed(np.arange(20, dtype=np.uint64)))
    for _ in range(40):
        advisor.looked_up({}, hot)
    assert advisor.estimates("cpu")["estimated_hit_ratio_x1"] > 0.9
    for number in range(100):
        cold = keys_of(mixed(np.arange(1000 + 20 * number, 1020 + 20 * number, dtype=np.uint64)))
        advisor.looked_up({}, cold)
    assert advisor.estimates("cpu")["estimated_hit_ratio_x1"] < 0.25


# ---------------------------------------------------------------------------------------------------------- the manager


def prompts() -> Iterator[Sequence[bytes]]:
    for turn in range(30):
        yield small_keys(*range(turn % 6 * 10, turn % 6 * 10 + 8))


def run(advisor: bool) -> dict[str, dict[str, float]]:
    tiers = [{"type": "memory", "capacity": 32 * 5000}]
    stack = load_stack({"primary": {"capacity": 24 * 4096}, "secondary": tiers, "advisor": advisor})
    with open_manager(stack, 4096, MODEL) as manager:
        for number, keys in enumerate(prompts()):
            ctx = ReqContext(f"r{number}")
            manager.on_new_request(ctx)
            manager.match_prefix(keys, ctx)
            output = manager.prepare_store(keys, ctx)
            if output is not None and output.keys_to_store:
                manager.complete_store(output.keys_to_store, ctx)
            manager.on_request_finished(ctx)
            manager.on_schedule_end()
        stats = manager.get_stats()
        before = stats["primary"].get("estimated_hit_ratio_x1")
        manager.reset_cache()
        assert manager.get_stats()["primary"].get("estimated_hit_ratio_x1") == before
    return {"cpu": stats["primary"], **stats["tiers"]}


def test_the_statistics_have_the_estimates_of_every_tier_with_a_capacity() -> None:
    stats = run(advisor=True)
    for tier in ("cpu", "memory"):
        rates = [stats[tier][name] for name in FIELDS.values()]
        assert rates == sorted(rates)
    # 48 distinct blocks in turn: 24 rows hit nothing, twice as many hit all but the first round.
    assert stats["cpu"]["estimated_hit_ratio_x1"] == 0.0
    assert stats["cpu"]["estimated_hit_ratio_x2"] == pytest.approx(24 / 30)


def test_the_advisor_can_be_switched_off() -> None:
    stats = run(advisor=False)
    assert not any(name in fields for fields in stats.values() for name in FIELDS.values())


def test_the_estimates_are_gauges_and_metrics() -> None:
    increments = Increments()
    increments.take({"cpu": {"hits": 5, "estimated_hit_ratio_x2": 0.5}})
    assert increments.take({"cpu": {"hits": 7, "estimated_hit_ratio_x2": 0.25}}) == {
        "cpu": {"hits": 2, "estimated_hit_ratio_x2": 0.25}
    }
    assert set(FIELDS.values()) <= {metric.field for metric in METRICS}


@pytest.mark.parametrize("seed", [1, 4])
def test_too_few_sampled_keys_of_hot_prompts_do_not_count_as_hits_of_small_tiers(seed: int) -> None:
    rnd = random.Random(seed)
    hot = [[rnd.getrandbits(HASH_BITS) for _ in range(400)] for _ in range(5)]
    sizes = [1000, 2000, 4000, 16000]
    exact, sampled = Shards(sizes, sample=1 << 20), Shards(sizes, sample=2048)
    for number in range(600):
        for prompt in ([rnd.getrandbits(HASH_BITS) for _ in range(100)], hot[number % 5]):
            for shards in (exact, sampled):
                shards.accesses += len(prompt)
                shards.access([key for key in prompt if key < shards.threshold])
    assert sampled.weight < 0.995 * sampled.accesses
    rates = [exact.hit_rate(size) for size in sizes]
    assert rates == pytest.approx([0.0, 0.0, 0.79, 0.79], abs=0.01)
    assert [sampled.hit_rate(size) for size in sizes] == pytest.approx(rates, abs=0.005)
