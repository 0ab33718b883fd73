"""The best buy of a replay, beside a model of cost and benefit that shares no code with it."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.replay.traces import write_mooncake
from tiering.replay.model import ReplayModel
from tiering.replay.readers import Trace
from tiering.replay.report import advice, label, table
from tiering.replay.study import Study, run_study
from tiering.replay.sweep import parse_axis, points

MIB, GIB = 1 << 20, 1 << 30
EVERY = 10.0
TTL_DAYS = 7
SIZES = (128 * MIB, 256 * MIB, 512 * MIB, GIB)
DISK = 16 * GIB
STACK = {
    "primary": {"capacity": "128MiB"},
    "secondary": [
        {"type": "local", "path": "/nowhere/kv", "capacity": "16GiB"},
        {"type": "s3", "bucket": "kv-cache", "ttl": f"{TTL_DAYS}d"},
    ],
}


def prompts_of(seed: int) -> list[list[int]]:
    """Return prompts of 60 sessions in random order: each is that of its session, with some blocks more."""
    chance = random.Random(seed)
    sessions = [[10_000 * (session + 1) + block for block in range(12)] for session in range(60)]
    prompts = []
    for _ in range(400):
        session = sessions[min(int(chance.expovariate(0.06)), 59)]
        session += [session[-1] + 1 + block for block in range(chance.randrange(2))]
        prompts.append(list(session))
    return prompts


def expected(prompts: Sequence[Sequence[int]], cpu: int, disk: bool, bucket: bool) -> tuple[float, dict[str, float]]:
    """Return the net dollars a month, and the share of the blocks that each tier serves.

    A cache with least recently used eviction, in front of a disk and a bucket that keep all blocks.
    """
    held: OrderedDict[int, None] = OrderedDict()
    behind: set[int] = set()
    hits = {"cpu": 0, "behind": 0}
    for prompt in prompts:
        for block in prompt:
            if block in held:
                hits["cpu"] += 1
            elif block in behind:
                hits["behind"] += 1
            else:
                break
        for block in reversed(prompt):
            held[block] = None
            held.move_to_end(block)
        while len(held) > cpu // MIB:
            held.popitem(last=False)
        if disk or bucket:
            behind.update(prompt)
    total, days = sum(map(len, prompts)), (len(prompts) - 1) * EVERY / 86400
    a_month = 730 / 24 / days
    net = sum(hits.values()) * 512 / 20_000 / 3600 * 2.5 * a_month - cpu / GIB * 2.0
    served = {"cpu": hits["cpu"] / total}
    if disk:
        served["local"] = hits["behind"] / total
        net -= DISK / GIB * 0.08
    if bucket:
        served["s3"] = 0.0 if disk else hits["behind"] / total
        net -= len(behind) / days * TTL_DAYS * MIB / GIB * 0.023
        net -= len(behind) / 1e6 * 5.0 * a_month
        net -= 0.0 if disk else hits["behind"] / 1e6 * 0.4 * a_month
    return net, served


@pytest.fixture(name="prompts", scope="module")
def make_prompts() -> list[list[int]]:
    return prompts_of(5)


@pytest.fixture(name="study", scope="module")
def make_study(prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Study:
    path = write_mooncake(tmp_path_factory.mktemp("trace") / "t.jsonl", prompts, every_ms=int(EVERY * 1000))
    axes = [parse_axis("primary.capacity=128MiB..1GiB")]
    return run_study(Trace([path]), points(STACK, axes), ReplayModel(), MIB)


def test_every_stack_nets_what_an_independent_model_says_and_the_best_buy_is_its_best(
    study: Study, prompts: list[list[int]]
) -> None:
    nets = {}
    for result, (size, tiers) in zip(
        study.results, ((size, tiers) for tiers in ("local+s3", "s3", "local", "none") for size in SIZES), strict=True
    ):
        assert result.settings["secondary"] == tiers
        net, served = expected(prompts, size, "local" in tiers, "s3" in tiers)
        nets[size, tiers] = net
        assert {tier.name: tier.hit_rate for tier in result.tiers} == pytest.approx(served, abs=0.04)
        assert result.net_dollars_per_month == pytest.approx(net, abs=1.0)
    size, tiers = max(nets, key=lambda stack: nets[stack])
    assert study.pays
    assert study.best.settings == {"primary.capacity": f"{size // MIB}MiB", "secondary": tiers}
    assert study.as_dict()["best_buy"] == study.best.settings
    assert "s3" not in tiers


def test_a_bucket_is_paid_for_what_one_ttl_writes_and_not_for_what_the_trace_leaves(study: Study) -> None:
    bucket = study.results[0].tiers[-1]
    assert bucket.bytes_paid == pytest.approx(bucket.bytes_written / study.results[0].trace_seconds * TTL_DAYS * 86400)
    assert bucket.dollars_per_month > bucket.bytes_paid / GIB * 0.023 > 100 * bucket.bytes_written / GIB * 0.023


def test_the_causes_name_the_stack_whose_tokens_they_explain(study: Study) -> None:
    results = [replace(result, causes={"new": result.computed_tokens}) for result in study.results]
    (line,) = (line for line in advice(replace(study, results=results)) if "new 100.0%" in line)
    assert line == f"Of the {study.best.computed_tokens:,} prompt tokens that {label(study.best)} computes: new 100.0%."


def test_a_tier_that_costs_more_than_its_hits_save_is_told_beside_the_stack_without_it(study: Study) -> None:
    (line,) = (line for line in advice(study) if line.startswith("The tier s3 costs"))
    assert "more than the $0 that its hits save (0.0% of the blocks): without it, the net saving is" in line
    assert not any(line.startswith("The tier local costs") for line in advice(study))
    idle = [replace(tier, dollars_per_month=9.0, dollars_saved_per_month=0.0) for tier in study.results[0].tiers]
    plain = [replace(result, tiers=idle, settings={"secondary": "local+s3"}) for result in study.results[:1]]
    cheap = [replace(tier, dollars_per_month=0.3, dollars_saved_per_month=0.2) for tier in study.results[0].tiers]
    alike = replace(study, results=[replace(plain[0], tiers=cheap)])
    assert not any(line.startswith("The tier") for line in advice(alike)), "both are $0"
    told = [line for line in advice(replace(study, results=plain)) if line.startswith("The tier cpu costs")]
    assert [line.split(", more")[0] for line in told] == ["The tier cpu costs $9 a month in the stack with local+s3"]
    assert "without it" not in told[0]


def test_a_stack_with_a_longer_tail_is_no_buy(study: Study) -> None:
    results = [replace(result, ttft_p99=1.1 * result.ttft_p99_without) for result in study.results]
    told = replace(study, results=results)
    assert not told.pays
    assert told.as_dict()["best_buy"] is None
    assert any(line.startswith("Buy none of the 16 stacks") for line in advice(told))
    single = replace(study, results=[replace(results[-1], settings={})])
    assert any(line.startswith("This stack lets requests wait longer") for line in advice(single))


def test_stacks_that_cost_more_than_they_save_are_no_buy(study: Study) -> None:
    told = replace(study, results=[replace(result, dollars_per_month=1e6) for result in study.results])
    assert not told.pays
    assert "costs more than it saves" in "".join(advice(told))


def test_a_shorter_tail_for_a_little_money_is_told(study: Study) -> None:
    best = replace(study.best, ttft_p99=2.46, ttft_p99_without=4.45, dollars_saved_per_month=100.0)
    quick = replace(best, ttft_p99=0.6, dollars_saved_per_month=38.0)
    told = [line for line in advice(replace(study, results=[best, quick])) if "less of net saving" in line]
    (line,) = told
    assert line.startswith("For $62 a month less of net saving, ")
    assert line.endswith("from 2.46 s to 600 ms.")


def test_a_primary_tier_that_is_no_larger_than_the_accelerators_cache_is_told(study: Study) -> None:
    def told(cache: int | None) -> list[str]:
        changed = study.model.model_copy(update={"device_cache": cache})
        return [line for line in advice(replace(study, model=changed)) if "the accelerator's own" in line.lower()]

    assert "--device-cache. An inclusive CPU tier that is smaller than that cache brings nothing" in told(None)[0]
    assert told(MIB) == []


@pytest.mark.parametrize("inclusion", ["inclusive", "exclusive"])
def test_an_exclusive_cpu_tier_is_recommended_where_it_pays(tmp_path: Path, inclusion: str) -> None:
    """Prompts of 100 blocks in turn: neither cache holds the four of them, and both together do."""
    trace = Trace(
        [write_mooncake(tmp_path / "trace", [[*range(999 * (n % 4), 999 * (n % 4) + 100)] for n in range(80)])]
    )
    model = ReplayModel(device_cache=250 * MIB, prefill_tokens_per_second=100_000.0)
    stack = {"primary": {"capacity": 250 * MIB, "inclusion": inclusion}}

    def told(*sweeps: str) -> str:
        study = run_study(trace, points(stack, [parse_axis(sweep) for sweep in sweeps]), model, MIB)
        return "\n".join(line for line in advice(study) if "primary.inclusion" in line)

    alone = told()
    assert ("so by itself it brings nothing. With primary.inclusion: exclusive, the two hit like" in alone) is (
        inclusion == "inclusive"
    )
    both = told("primary.inclusion=inclusive,exclusive")
    assert both.startswith("With primary.inclusion: exclusive, the tiers and the accelerator's own cache serve 9"), both
    assert " of the blocks, and 0.0% with inclusive. Of 100 prompt blocks, " in both


def test_the_table_ends_without_tiers(study: Study) -> None:
    head, rows = table(study)
    assert {len(row) for row in rows} == {len(head)}
    assert (len(rows), rows[-1][0], rows[-1][-3:]) == (17, "without tiers", ["$0", "$0", "$0"])
