"""The report of a study: what it says about buying, and how it writes values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.replay.traces import write_mooncake
from tiering.replay.model import ReplayModel
from tiering.replay.readers import Trace
from tiering.replay.report import advice, dollars, seconds
from tiering.replay.study import Study, run_study
from tiering.replay.sweep import parse_axis, points

STACK = {"primary": {"capacity": "64MiB"}, "secondary": [{"type": "local", "path": "/cache", "capacity": "1GiB"}]}


@pytest.fixture(name="study")
def make_study(tmp_path: Path) -> Study:
    prompts = [[*range(turn % 7 * 10, turn % 7 * 10 + 5 + turn // 7)] for turn in range(60)]
    trace = Trace([write_mooncake(tmp_path / "t.jsonl", prompts)])
    axes = [parse_axis("primary.capacity=32MiB..128MiB"), parse_axis("primary.eviction=lru,arc")]
    return run_study(trace, points(STACK, axes), ReplayModel(kv_bytes_per_token=2048), 1 << 20)


@pytest.mark.parametrize("slower", [{"ttft_mean": 3.0}, {"ttft_p99": 7.45}])
def test_the_best_buy_says_why_stacks_that_save_more_do_not_count(study: Study, slower: dict[str, Any]) -> None:
    fast, slow = study.results[:2]
    times: dict[str, Any] = {"ttft_mean": 1.0, "ttft_mean_without": 2.0, "ttft_p99": 4.0, "ttft_p99_without": 4.45}
    fast = replace(fast, **times, dollars_saved_per_month=100.0, dollars_per_month=0.0)
    slow = replace(slow, **(times | slower), dollars_saved_per_month=200.0, dollars_per_month=0.0)
    assert not any("would save more money" in line for line in advice(replace(study, results=[fast])))
    told = replace(study, results=[fast, slow])
    assert told.best is fast
    assert any(line.startswith("1 of the stacks would save more money") for line in advice(told))


def test_the_reuse_bounds_what_one_stack_serves(tmp_path: Path) -> None:
    trace = Trace([write_mooncake(tmp_path / "t.jsonl", [[1, 2], [1, 2]])])
    study = run_study(trace, points({"primary": {"capacity": "64MiB"}}, []), ReplayModel(), 1 << 20)
    assert study.best.hit_rate == 0.5 == study.reuse
    assert any("50.0% of the 4 prompt blocks" in line for line in advice(study))


def test_the_best_stack_does_not_slow_the_first_token_down(study: Study) -> None:
    good = [
        result
        for result in study.results
        if result.ttft_mean <= result.ttft_mean_without and result.ttft_p99 <= 1.02 * result.ttft_p99_without
    ]
    assert good
    assert study.best in good
    assert study.best.net_dollars_per_month == max(result.net_dollars_per_month for result in good)


def test_the_curve_rises_to_the_reuse_of_the_trace(study: Study) -> None:
    rates = [point.lru for point in study.curve]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(study.reuse)
    assert all(result.hit_rate <= study.reuse for result in study.results)


def test_values_are_written_as_people_write_them() -> None:
    assert [seconds(2.5), seconds(0.25), seconds(0)] == ["2.5 s", "250 ms", "0 s"]
    assert [dollars(1234.4), dollars(-12), dollars(-0.2)] == ["$1,234", "-$12", "$0"]
