"""Metrics as a scraper sees them: names, labels, buckets, and sums over several reports."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tests.connector.fakes import ids, make_scheduler, prompt, run_prompt
from tiering.advisor.advisor import FIELDS
from tiering.api.metric import MetricKind
from tiering.connector import prometheus
from tiering.connector.counters import SchedulerCounters
from tiering.connector.metrics import CONNECTOR, GAUGES, MANAGER, METRICS, SIZE_BUCKETS, TIERS, metrics_of
from tiering.connector.prometheus import (
    MetricClasses,
    OffloadPromMetrics,
    representative_seconds,
    unregister_tier_metrics,
)
from tiering.connector.stats import Increments, OffloadingConnectorStats
from tiering.errors import ConfigError
from tiering.manager.manager_stats import ManagerStats
from tiering.manager.worth import WORTH
from tiering.secondary.tier_stats import JOB_LATENCY_BUCKETS, TierStats


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> OffloadPromMetrics:
    return OffloadPromMetrics(MetricClasses.default(registry))


def names_of(record: str) -> list[str]:
    """Return the names of a record's counters."""
    return [metric.name for metric in metrics_of(record, MetricKind.COUNTER)]


def transfers(*sizes: int) -> dict[str, Any]:
    stats = OffloadingConnectorStats()
    for size in sizes:
        stats.record_transfer(size, 0.5, ("gpu", "cpu"))
    return stats.data


def tiers(**stats: TierStats) -> dict[str, Any]:
    reported = OffloadingConnectorStats()
    reported.record_labelled(TIERS, {name: fields.as_dict() for name, fields in stats.items()})
    return reported.data


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, {"engine": "0"} | labels)


def test_transfers_count_bytes_seconds_and_sizes(registry: CollectorRegistry, metrics: OffloadPromMetrics) -> None:
    metrics.observe(transfers(3_000_000, 50_000_000))
    metrics.observe(transfers(1))
    labels = {"transfer_type": "gpu_to_cpu"}
    assert value(registry, "vllm:kv_offload_total_bytes_total", **labels) == 53_000_001
    assert value(registry, "vllm:kv_offload_total_time_total", **labels) == 1.5
    assert value(registry, "vllm:kv_offload_size_count", **labels) == 3
    assert value(registry, "vllm:kv_offload_size_bucket", le="1e+06", **labels) == 1
    assert value(registry, "vllm:kv_offload_size_bucket", le="5e+06", **labels) == 2
    assert value(registry, "vllm:kv_offload_size_bucket", le="6e+07", **labels) == 3


def test_the_buckets_of_sizes_are_those_of_the_contract() -> None:
    assert SIZE_BUCKETS == (1e6, 5e6, 10e6, 20e6, 40e6, 60e6, 80e6, 100e6, 150e6, 200e6)


def test_engines_have_labels_of_their_own(registry: CollectorRegistry) -> None:
    labels = {0: ("m", "0"), 1: ("m", "1")}
    metrics = OffloadPromMetrics(MetricClasses.default(registry), ("model_name", "engine"), labels)
    metrics.observe(transfers(10), engine_idx=1)
    found = {"model_name": "m", "transfer_type": "gpu_to_cpu"}
    assert registry.get_sample_value("vllm:kv_offload_total_bytes_total", found | {"engine": "1"}) == 10
    assert registry.get_sample_value("vllm:kv_offload_total_bytes_total", found | {"engine": "0"}) is None


def test_an_engine_s_own_classes_are_used() -> None:
    made: list[tuple[str, str]] = []

    def of(kind: str, metric: Any) -> Any:
        def make(*, name: str, documentation: str, labelnames: list[str], **options: Any) -> Any:
            made.append((kind, name))
            return metric(name, documentation, labelnames, registry=None, **options)

        return make

    OffloadPromMetrics(MetricClasses(of("counter", Counter), of("gauge", Gauge), of("histogram", Histogram)))
    assert ("counter", "vllm:kv_offload_total_bytes") in made
    assert ("gauge", "kv_tiering_occupancy_bytes") in made
    assert ("histogram", "kv_tiering_job_latency_seconds") in made


def test_every_field_of_a_tier_s_stats_is_exported() -> None:
    exported = {metric.field for metric in METRICS if metric.record == TIERS} | {"job_latency_sum"}
    assert exported == {field.name for field in dataclasses.fields(TierStats)} | set(FIELDS.values()) | {
        metric.field for metric in WORTH
    }


def test_every_counter_of_every_configured_tier_exists_at_0_from_the_start(registry: CollectorRegistry) -> None:
    labels = {0: ("m", "0"), 1: ("m", "1")}
    classes = MetricClasses.default(registry)
    OffloadPromMetrics(classes, ("model_name", "engine"), labels, tiers=("cpu", "local", "s3"), has_manager=True)
    for engine in ("0", "1"):
        told = {"model_name": "m", "engine": engine}
        for name in names_of(TIERS):
            for tier in ("cpu", "local", "s3"):
                assert registry.get_sample_value(f"{name}_total", told | {"tier": tier}) == 0, name
        for name in names_of(MANAGER) + names_of(CONNECTOR):
            assert registry.get_sample_value(f"{name}_total", told) == 0, name
        assert registry.get_sample_value("kv_tiering_available", told | {"tier": "local"}) is None, (
            "nobody has said so yet"
        )


def test_a_tier_that_was_not_told_of_has_all_counters_from_its_first_report(
    registry: CollectorRegistry, metrics: OffloadPromMetrics
) -> None:
    metrics.observe(tiers(own=TierStats(hits=1)))
    assert value(registry, "kv_tiering_corrupt_blocks_total", tier="own") == 0


def test_without_a_manager_its_counters_are_absent(registry: CollectorRegistry, metrics: OffloadPromMetrics) -> None:
    assert value(registry, "kv_tiering_stores_without_room_total") is None


def test_every_field_of_the_manager_s_stats_is_exported() -> None:
    exported = {metric.field for metric in METRICS if metric.record == MANAGER}
    assert exported == {field.name for field in dataclasses.fields(ManagerStats)}
    exported = {metric.field for metric in METRICS if metric.record == CONNECTOR} | {"queried_blocks", "hit_blocks"}
    assert exported == {field.name for field in dataclasses.fields(SchedulerCounters)}


def test_no_field_is_a_gauge_in_one_record_and_a_counter_in_another() -> None:
    assert not {metric.field for metric in METRICS if metric.kind is not MetricKind.GAUGE} & GAUGES


def test_the_default_of_a_field_is_of_the_kind_of_its_unit() -> None:
    assert (TierStats().read_seconds, TierStats().available, TierStats().hits) == (0.0, 1, 0)
    assert isinstance(TierStats().read_seconds, float)


def test_the_table_of_metrics_tells_metrics_apart() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.meaning.strip(), metric.name
        assert bool(metric.buckets) is (metric.kind is MetricKind.HISTOGRAM), metric.name


def test_what_the_manager_and_the_connector_count_is_exported(
    registry: CollectorRegistry, metrics: OffloadPromMetrics
) -> None:
    scheduler, manager = make_scheduler()
    increments, stats = Increments(), ManagerStats(rows=8)
    for refused in (2, 5):
        stats.stores_without_room, stats.rows_free = refused, 8 - refused
        reported = OffloadingConnectorStats()
        manager.refuse_stores = True
        run_prompt(scheduler, prompt(24, f"r{refused}"), ids(6))
        current = {"manager": stats.as_dict(), "connector": scheduler.get_stats()["connector"]}
        for name, fields in increments.take(current).items():
            reported.record(name, fields)
        metrics.observe(OffloadingConnectorStats().aggregate(reported).data)
    assert value(registry, "kv_tiering_stores_without_room_total") == 5
    assert value(registry, "kv_tiering_rows_free") == 3
    assert value(registry, "kv_tiering_stores_refused_total") == 2
    assert set(reported.reduce()) == set()


def test_counters_go_up_by_what_each_report_brings(registry: CollectorRegistry, metrics: OffloadPromMetrics) -> None:
    metrics.observe(tiers(local=TierStats(hits=5, read_bytes=100)))
    metrics.observe(tiers(local=TierStats()))
    metrics.observe(tiers(local=TierStats(hits=3)))
    assert value(registry, "kv_tiering_hits_total", tier="local") == 8
    assert value(registry, "kv_tiering_read_bytes_total", tier="local") == 100


def test_reports_that_go_to_several_front_ends_are_counted_once_in_all(registry: CollectorRegistry) -> None:
    other = CollectorRegistry()
    front_ends = [OffloadPromMetrics(MetricClasses.default(registry)), OffloadPromMetrics(MetricClasses.default(other))]
    increments, stats = Increments(), TierStats()
    for number in range(7):
        stats.hits += number
        stats.observe_job(0.02)
        reported = OffloadingConnectorStats()
        reported.record_labelled(TIERS, increments.take({"local": stats.as_dict()}))
        front_ends[number % 2].observe(reported.data)
    for name, total in [("kv_tiering_hits_total", 21), ("kv_tiering_job_latency_seconds_count", 7)]:
        assert sum(value(each, name, tier="local") or 0 for each in (registry, other)) == total


def test_gauges_are_as_reported_last(registry: CollectorRegistry, metrics: OffloadPromMetrics) -> None:
    metrics.observe(tiers(local=TierStats(occupancy_bytes=500, breaker_state=2)))
    metrics.observe(tiers(local=TierStats(occupancy_bytes=300, breaker_state=0)))
    assert value(registry, "kv_tiering_occupancy_bytes", tier="local") == 300
    assert value(registry, "kv_tiering_breaker_state", tier="local") == 0


def test_tiers_and_engines_are_counted_apart(registry: CollectorRegistry, metrics: OffloadPromMetrics) -> None:
    metrics.observe(tiers(local=TierStats(hits=1), s3=TierStats(hits=10)))
    metrics.observe(tiers(local=TierStats(hits=100)), engine_idx=1)
    metrics.observe(tiers(local=TierStats(hits=2)))
    assert value(registry, "kv_tiering_hits_total", tier="local") == 3
    assert value(registry, "kv_tiering_hits_total", tier="s3") == 10
    assert value(registry, "kv_tiering_hits_total", tier="local", engine="1") == 100


def test_the_job_latency_histogram_has_the_counts_and_the_sum(
    registry: CollectorRegistry, metrics: OffloadPromMetrics
) -> None:
    seconds = [0.0005, 0.003, 0.003, 0.2, 45.0]
    for jobs in (seconds[:2], seconds[2:]):
        stats = TierStats()
        for job in jobs:
            stats.observe_job(job)
        metrics.observe(tiers(local=stats))
    assert value(registry, "kv_tiering_job_latency_seconds_count", tier="local") == 5
    assert value(registry, "kv_tiering_job_latency_seconds_bucket", tier="local", le="0.001") == 1
    assert value(registry, "kv_tiering_job_latency_seconds_bucket", tier="local", le="0.005") == 3
    assert value(registry, "kv_tiering_job_latency_seconds_bucket", tier="local", le="30.0") == 4
    assert value(registry, "kv_tiering_job_latency_seconds_sum", tier="local") == pytest.approx(sum(seconds), rel=0.01)


@given(st.lists(st.floats(1e-5, 200.0), min_size=1, max_size=50))
def test_representatives_lie_in_their_buckets_and_add_up(seconds: list[float]) -> None:
    stats = TierStats()
    for job in seconds:
        stats.observe_job(job)
    values = representative_seconds(stats.job_latency, stats.job_latency_sum)
    again = TierStats()
    for count, representative in zip(stats.job_latency, values, strict=True):
        for _ in range(count):
            again.observe_job(representative)
    assert again.job_latency == stats.job_latency
    if not stats.job_latency[-1]:
        assert again.job_latency_sum == pytest.approx(stats.job_latency_sum, rel=0.01, abs=1e-4)


def test_fields_of_a_newer_or_older_version_do_no_harm(
    registry: CollectorRegistry, metrics: OffloadPromMetrics
) -> None:
    metrics.observe({"tiers": {"local": {"hits": 1, "unheard_of": 7}}})
    metrics.observe({"tiers": {"local": {"hits": 2, "job_latency": [1]}}})
    assert value(registry, "kv_tiering_hits_total", tier="local") == 3
    assert value(registry, "kv_tiering_job_latency_seconds_count", tier="local") is None


def test_units_are_in_the_names(registry: CollectorRegistry, metrics: OffloadPromMetrics) -> None:
    metrics.observe(tiers(local=TierStats()))
    for metric in METRICS:
        assert metric.name.startswith(("kv_tiering_", "vllm:kv_offload_"))
        if metric.unit in {"bytes", "seconds"} and metric.record == TIERS:
            assert metric.name.endswith(f"_{metric.unit}")
    assert b"kv_tiering_job_latency_seconds" in generate_latest(registry)
    assert JOB_LATENCY_BUCKETS[-1] == 30.0


def test_a_missing_client_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[metrics\]'"):
        prometheus.OffloadPromMetrics()


def test_an_engine_after_another_may_register_the_same_series(registry: CollectorRegistry) -> None:
    OffloadPromMetrics(MetricClasses.default(registry)).observe({"tiers": {"local": {"hits": 3}}})
    kept = Gauge("kept", "not of the tiers", registry=registry)
    kept.set(1)
    unregister_tier_metrics(registry)
    assert value(registry, "kv_tiering_hits_total", tier="local") is None
    assert registry.get_sample_value("kept") == 1
    for name in names_of(TIERS):
        Counter(name, "of the next engine", registry=registry)
