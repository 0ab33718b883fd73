"""The metrics that a run exports are those of the table, one row each."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from examples.mini_engine import Engine
from examples.mini_engine.metrics import metrics_endpoint
from tests.mini_engine.helpers import ask_all, one_row, options, prompt
from tiering.api.metric import Metric
from tiering.cli.metrics import Sample, parse
from tiering.cli.top import Look
from tiering.connector.metrics import METRICS


def stack(disk: Path) -> dict[str, Any]:
    """Return a stack whose CPU tier holds a part of the prompts, and whose disk holds all."""
    row = one_row()
    return {
        "primary": {"capacity": 48 * row},
        "secondary": [{"type": "local", "path": str(disk), "capacity": 1 << 21, "durability": "none"}],
        "explain": {"socket": str(disk / "why.sock")},
        "report_cached": True,
    }


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of an endpoint after a run that loads from every tier."""
    prompts = [prompt(seed, 100) for seed in range(8)]
    with Engine(options(stack=stack(tmp_path_factory.mktemp("tier")))) as engine, metrics_endpoint(engine) as url:
        for name in ("first", "again"):
            ask_all(engine, prompts, name, max_tokens=2)
        assert engine.settle()
        engine.step()
        with urllib.request.urlopen(url, timeout=10) as reply:
            text = reply.read().decode()
    return str(text)


def families(text: str) -> dict[str, Any]:
    """Return the families of an endpoint's text, without prometheus_client's times of creation."""
    found = text_string_to_metric_families(text)
    return {family.name: family for family in found if not family.name.endswith("_created")}


def test_every_exported_family_has_exactly_one_row(scraped: str) -> None:
    rows = [metric.name for metric in METRICS]
    assert sorted(set(families(scraped)) - set(rows)) == []
    assert len(rows) == len(set(rows))


@pytest.mark.parametrize(
    "metric",
    [metric for metric in METRICS if not metric.name.startswith(("kv_tiering_service_", "kv_tiering_engine_"))],
    ids=lambda metric: metric.name,
)
def test_every_row_of_an_engine_is_exported_with_its_type_labels_and_help(metric: Metric, scraped: str) -> None:
    family = families(scraped)[metric.name]
    assert (family.type, family.documentation) == (metric.kind.value, metric.meaning)
    if metric.field.startswith("worth_"):
        assert not family.samples, "no worth is measured of a tier that is always loaded"
        return
    assert family.samples, "a run exports the metric"
    ignored = {"model_name", "engine", "le"}
    assert {label for sample in family.samples for label in sample.labels} - ignored == set(metric.labels)
    assert any(sample.name.startswith(metric.series) for sample in family.samples)


def test_the_run_has_moved_blocks_between_all_tiers(scraped: str) -> None:
    sample = parse(scraped, 0.0)
    assert all(sample.tiers["local"][word] > 0 for word in ("hits", "read_bytes", "written_bytes", "cascades"))
    assert all(sample.manager[word] > 0 for word in ("hit_tokens", "loads", "stores", "scheduler_seconds"))
    assert all(sample.offloaded[kind] > 0 for kind in ("gpu_to_cpu", "cpu_to_gpu"))
    assert {"requests_active", "jobs_active"} <= sample.manager.keys()


def test_top_shows_the_run(scraped: str) -> None:
    shown = {row.tier: row for row in Look(Sample(0.0), parse(scraped, 0.0), ["cpu", "local"]).rows()}
    assert [row.state for row in shown.values()] == ["up", "up"]
    assert shown["local"].hits != "-"
    assert shown["local"].troubles == ""
