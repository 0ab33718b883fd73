"""Transfer statistics: records, sums, and the transfer to another process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tiering.connector.metrics import TIERS
from tiering.connector.reports import STATS_INTERVAL, TierReports
from tiering.connector.stats import Increments, OffloadingConnectorStats
from tiering.secondary.tier_stats import TierStats
from tiering.testing.clock import FakeClock

STORE, LOAD = ("gpu", "cpu"), ("cpu", "gpu")


def stats_of(*transfers: tuple[int, float, tuple[str, str]]) -> OffloadingConnectorStats:
    stats = OffloadingConnectorStats()
    for transfer in transfers:
        stats.record_transfer(*transfer)
    return stats


def test_transfers_are_recorded_by_type() -> None:
    stats = stats_of((100, 0.5, STORE), (200, 0.25, STORE), (7, 0.125, LOAD))
    assert stats.data == {
        "gpu_to_cpu": [{"op_size": 100, "op_time": 0.5}, {"op_size": 200, "op_time": 0.25}],
        "cpu_to_gpu": [{"op_size": 7, "op_time": 0.125}],
    }


@pytest.mark.parametrize("transfer", [(None, 1.0, STORE), (1, None, STORE), (1, 1.0, None)])
def test_transfers_without_size_time_or_type_are_not_recorded(transfer: tuple[int, float, tuple[str, str]]) -> None:
    stats = stats_of(transfer)
    assert stats.is_empty()
    assert stats.data == {}


def test_reduce_adds_up_bytes_and_seconds() -> None:
    assert stats_of((100, 0.5, STORE), (200, 0.25, STORE), (7, 0.125, LOAD)).reduce() == {
        "gpu_to_cpu_total_bytes": 300,
        "gpu_to_cpu_total_time": 0.75,
        "cpu_to_gpu_total_bytes": 7,
        "cpu_to_gpu_total_time": 0.125,
    }


def test_aggregate_adds_and_returns_itself() -> None:
    stats = stats_of((1, 1.0, STORE))
    assert stats.aggregate(stats_of((2, 2.0, STORE), (3, 3.0, LOAD))) is stats
    assert stats.reduce()["gpu_to_cpu_total_bytes"] == 3
    assert stats.reduce()["cpu_to_gpu_total_bytes"] == 3


def test_aggregate_shares_nothing_with_the_other() -> None:
    stats, other = OffloadingConnectorStats(), stats_of((1, 1.0, STORE))
    other.record_labelled(TIERS, {"local": TierStats().as_dict()})
    stats.aggregate(other)
    stats.record_transfer(2, 2.0, STORE)
    stats.data["gpu_to_cpu"][0]["op_size"] = 99
    stats.data["tiers"]["local"]["hits"] = 99
    stats.data["tiers"]["local"]["job_latency"][0] = 99
    assert other.data["gpu_to_cpu"] == [{"op_size": 1, "op_time": 1.0}]
    assert other.data["tiers"] == {"local": TierStats().as_dict()}


def test_what_is_new_of_a_tier_adds_up_and_its_gauges_are_as_told_last() -> None:
    stats, later = OffloadingConnectorStats(), OffloadingConnectorStats()
    stats.record_labelled(
        TIERS, {"local": TierStats(hits=1, blocks=9, job_latency_sum=0.5).as_dict(), "s3": TierStats(hits=5).as_dict()}
    )
    more = TierStats(hits=3, blocks=4)
    more.observe_job(0.25)
    later.record_labelled(TIERS, {"local": more.as_dict()})
    stats.aggregate(later).aggregate(later)
    local, s3 = stats.data["tiers"]["local"], stats.data["tiers"]["s3"]
    assert (local["hits"], local["blocks"], local["job_latency_sum"], sum(local["job_latency"])) == (7, 4, 1.0, 2)
    assert s3["hits"] == 5


class TestIncrements:
    def test_are_what_is_new_since_the_time_before(self) -> None:
        increments, stats = Increments(), TierStats(hits=5, blocks=7)
        stats.observe_job(0.5)
        assert increments.take({"local": stats.as_dict()}) == {"local": stats.as_dict()}
        stats.hits, stats.blocks = 8, 6
        stats.observe_job(0.5)
        stats.observe_job(100)
        new = increments.take({"local": stats.as_dict()})["local"]
        assert (new["hits"], new["blocks"], new["job_latency_sum"], sum(new["job_latency"])) == (3, 6, 100.5, 2)
        assert increments.take({"local": stats.as_dict()})["local"]["hits"] == 0

    def test_of_a_tier_that_comes_later_are_all_that_it_has_counted(self) -> None:
        increments = Increments()
        increments.take({"local": {"hits": 5}})
        assert increments.take({"local": {"hits": 5}, "s3": {"hits": 2}}) == {"local": {"hits": 0}, "s3": {"hits": 2}}

    def test_of_counters_that_have_started_again_are_all_that_they_count_now(self) -> None:
        increments = Increments()
        increments.take({"local": {"hits": 5, "misses": 1, "job_latency": [3, 1]}})
        again = {"hits": 2, "misses": 2, "job_latency": [1, 0]}
        assert increments.take({"local": again}) == {"local": again}

    def test_share_nothing_with_what_they_were_taken_from(self) -> None:
        increments, fields = Increments(), {"job_latency": [1, 2]}
        new = increments.take({"local": fields})
        fields["job_latency"][0] = 5
        assert new == {"local": {"job_latency": [1, 2]}}
        assert increments.take({"local": fields}) == {"local": {"job_latency": [4, 0]}}


def test_tiers_alone_are_worth_a_report_and_are_no_transfers() -> None:
    stats = OffloadingConnectorStats()
    stats.record_labelled(TIERS, {})
    assert stats.is_empty()
    stats.record_labelled(TIERS, {"local": TierStats().as_dict()})
    assert not stats.is_empty()
    assert stats.reduce() == {}


def test_reset_leaves_what_was_handed_out() -> None:
    stats = stats_of((1, 1.0, STORE))
    handed_out = stats.data
    stats.reset()
    assert stats.is_empty()
    assert handed_out == {"gpu_to_cpu": [{"op_size": 1, "op_time": 1.0}]}


def test_data_crosses_processes_as_it_is() -> None:
    stats = stats_of((1, 1.0, STORE))
    stats.record_labelled(TIERS, {"local": TierStats(hits=2).as_dict()})
    assert OffloadingConnectorStats(json.loads(json.dumps(stats.data))).data == stats.data


def test_reports_are_due_at_intervals_and_whenever_the_engine_is_idle() -> None:
    clock = FakeClock()
    reports = TierReports(OffloadingConnectorStats, clock=clock)
    assert [reports.is_due(busy=True) for _ in range(2)] == [True, False]
    assert reports.is_due(busy=False)
    clock.advance(STATS_INTERVAL)
    assert reports.is_due(busy=True)


def test_a_report_has_what_was_added_since_the_one_before_of_every_record() -> None:
    reports = TierReports(OffloadingConnectorStats)
    current: dict[str, Any] = {
        "tiers": {"local": {"hits": 3, "blocks": 5}},
        "manager": {"resets": 1},
        "connector": {"loads": 2},
    }
    assert reports.take({}) is None
    first = reports.take({**current, "primary": {"blocks": 1}})
    assert first is not None
    assert first.data == current
    current["tiers"]["local"]["hits"] = 10
    second = reports.take(current)
    assert second is not None
    assert second.data["tiers"] == {"local": {"hits": 7, "blocks": 5}}
    assert second.data["connector"] == {"loads": 0}
