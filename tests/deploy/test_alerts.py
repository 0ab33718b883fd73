"""The alert rules: each fires on the series of its fault, and is silent on all others."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.deploy.observed import ALERTS, CONFIG, ROOT, Rule, known_series, needs, rules, series_in
from tiering.api.metric import MetricKind
from tiering.connector.metrics import METRICS

RULES = {rule.name: rule for rule in rules()}
HOURS = 3
"""Length of the series in hours."""


@dataclass(frozen=True, slots=True)
class Case:
    """The series of a fault, and similar series that must not alert.

    Values are a minute apart, in promtool's notation.
    """

    fires: Mapping[str, str]
    quiet: Mapping[str, str]


STEADY = f"0+60x{60 * HOURS}"
"""A counter that grows by 1 a second."""
NONE = f"0x{60 * HOURS}"
"""A counter that stays at 0."""
ONE = f"1x{60 * HOURS}"
"""A gauge at 1."""

LATE = f"0x{60 * HOURS - 10} 1x10"
"""A series that grows from 0 to 1 ten minutes before the end."""
OLD = f"0x10 1x{60 * HOURS - 10}"
"""A series that grew from 0 to 1 long ago."""

CASES: Mapping[str, Case] = {
    "KVTieringCorruptBlocks": Case({"corrupt_blocks_total": LATE}, {"corrupt_blocks_total": OLD}),
    "KVTieringDeviceErrors": Case({"device_errors_total": LATE}, {"device_errors_total": OLD}),
    "KVTieringBlocksLost": Case({"blocks_lost_total": LATE}, {"blocks_lost_total": OLD}),
    "KVTieringTierBroken": Case({"tiers_out_of_service_total": OLD}, {"tiers_out_of_service_total": NONE}),
    "KVTieringTierOutOfService": Case(
        {"available": f"1x{60 * HOURS - 10} 0x10"}, {"available": f"1x{60 * HOURS - 3} 0x3"}
    ),
    "KVTieringTierNotWritable": Case({"writable": NONE, "available": ONE}, {"writable": NONE, "available": NONE}),
    "KVTieringBreakerOpen": Case({"breaker_state": f"2x{60 * HOURS}"}, {"breaker_state": ONE}),
    "KVTieringBreakerFlapping": Case(
        {"breaker_opened_total": f"0+0.1x{60 * HOURS}"}, {"breaker_opened_total": f"0+0.02x{60 * HOURS}"}
    ),
    "KVTieringPromotionsFailing": Case(
        {"promotions_total": STEADY, "promotions_failed_total": STEADY},
        {"promotions_total": STEADY, "promotions_failed_total": f"0+3x{60 * HOURS}"},
    ),
    "KVTieringCascadesFailing": Case(
        {"cascades_total": NONE, "cascades_failed_total": STEADY},
        {"cascades_total": STEADY, "cascades_failed_total": f"0+3x{60 * HOURS}"},
    ),
    "KVTieringCopiesFailing": Case(
        {"loads_failed_total": LATE, "stores_failed_total": NONE},
        {"loads_failed_total": OLD, "stores_failed_total": NONE},
    ),
    "KVTieringRowsStuck": Case({"rows_quarantined": ONE}, {"rows_quarantined": LATE}),
    "KVTieringRecoveringLong": Case({"recovering": ONE}, {"recovering": LATE}),
    "KVTieringStoresDropped": Case(
        {"stores_evicted_total": STEADY, "cascades_total": STEADY, "writable": ONE},
        {"stores_evicted_total": STEADY, "cascades_total": STEADY, "writable": NONE},
    ),
    "KVTieringTierTooSmall": Case(
        {"blocks": f"100x{60 * HOURS}", "evictions_total": STEADY},
        {"blocks": f"10000x{60 * HOURS}", "evictions_total": STEADY},
    ),
    "KVTieringNoRoomInCPUTier": Case({"stores_without_room_total": STEADY}, {"stores_without_room_total": LATE}),
    "KVTieringLoadsOverdue": Case(
        {"loads_overdue_total": NONE, "loads_too_long_total": STEADY},
        {"loads_overdue_total": OLD, "loads_too_long_total": OLD},
    ),
    "KVTieringLookupsLate": Case({"lookups_late_total": STEADY}, {"lookups_late_total": f"0+0.5x{60 * HOURS}"}),
    "KVTieringNoHits": Case(
        {"queries_total": STEADY, "hits_total": NONE, "blocks": ONE},
        {"queries_total": STEADY, "hits_total": f"0+1x{60 * HOURS}", "blocks": ONE},
    ),
    "KVTieringPrivateEpoch": Case({"private_epoch": ONE}, {"private_epoch": LATE}),
    "KVTieringRequestCost": Case(
        {f"requests_{kind}_total": f"0+36000x{60 * HOURS}" for kind in ("put", "list", "get", "head")},
        {f"requests_{kind}_total": STEADY for kind in ("put", "list", "get", "head")},
    ),
    "KVTieringSchedulerCost": Case(
        {"scheduler_seconds_total": f"0+6x{60 * HOURS}"}, {"scheduler_seconds_total": f"0+1x{60 * HOURS}"}
    ),
    "KVTieringTraceIncomplete": Case({"records_dropped_total": LATE}, {"records_dropped_total": OLD}),
    "KVTieringServiceUserAway": Case({"service_users_away": ONE}, {"service_users_away": f"0x{60 * HOURS - 1} 1x1"}),
    "KVTieringServiceHangs": Case({"service_responsive": NONE}, {"service_responsive": f"1x{60 * HOURS - 1} 0x1"}),
}
"""Series that fire each alert, and series that do not."""


ALSO = {("KVTieringTierNotWritable", "quiet"): ["KVTieringTierOutOfService"]}
"""Alerts that fire on the series of another one, rightly."""


def labels_of(series: str, instance: str) -> dict[str, str]:
    """Return the labels that vLLM's endpoint and a scrape give to a series."""
    (metric,) = [metric for metric in METRICS if metric.series == series]
    of_engine = {"job": instance, "instance": instance, "model_name": "m", "engine": "0"}
    return of_engine | {"tier": "s3"} if "tier" in metric.labels else of_engine


def test_every_alert_has_a_case_and_a_row_in_the_document() -> None:
    assert set(CASES) == set(RULES)
    text = (ROOT / "docs" / "operations.md").read_text()
    assert re.findall(r"^\| `(KVTiering\w+)` \|", text, flags=re.MULTILINE) == list(RULES)


def test_rules_use_metrics_of_the_table_and_say_what_to_do() -> None:
    for rule in RULES.values():
        assert series_in(rule.expression) <= known_series(), rule.name
        assert rule.labels.keys() == {"severity"}
        assert rule.labels["severity"] in {"critical", "warning", "info"}
        assert rule.annotations["description"].endswith("."), rule.name


@pytest.mark.parametrize(("check", "path"), [("rules", ALERTS), ("config", CONFIG)], ids=["rules", "configuration"])
def test_promtool_accepts(check: str, path: Path) -> None:
    done = subprocess.run(
        [needs("promtool"), "check", check, str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def shown(text: str, labels: Mapping[str, str]) -> str:
    """Return an annotation with the values of labels in it."""
    return re.sub(r"{{ \$labels\.(\w+) }}", lambda found: labels.get(found[1], ""), text)


def expected(rule: Rule, instance: str) -> dict[str, object]:
    """Return the alert that promtool must find."""
    labels = labels_of(min(series_in(rule.expression)), instance)
    if rule.name == "KVTieringRequestCost":
        labels = {"job": instance, "tier": "s3"}
    if rule.name == "KVTieringNoHits":
        del labels["tier"]
    annotations = {name: shown(text, labels) for name, text in rule.annotations.items()}
    return {"exp_labels": labels | rule.labels, "exp_annotations": annotations}


def inputs(series: Mapping[str, str], instance: str) -> list[dict[str, str]]:
    """Return the series of one engine in promtool's form."""
    found = []
    for name, values in series.items():
        full = f"kv_tiering_{name}"
        labels = ",".join(f'{label}="{value}"' for label, value in labels_of(full, instance).items())
        found.append({"series": f"{full}{{{labels}}}", "values": values})
    return found


def promtool(
    series: list[dict[str, str]], alerts: Mapping[str, list[dict[str, object]]], directory: Path
) -> subprocess.CompletedProcess[str]:
    """Compare the alerts after all samples of ``series`` with ``alerts``, in one of promtool's unit tests."""
    checks = [{"eval_time": f"{HOURS}h", "alertname": name, "exp_alerts": found} for name, found in alerts.items()]
    test = {"interval": "1m", "input_series": series, "alert_rule_test": checks}
    path = directory / "tests.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": [test]}))
    command = [needs("promtool"), "test", "rules", str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_each_alert_fires_on_its_fault_and_on_no_other_engine(tmp_path: Path) -> None:
    series: list[dict[str, str]] = []
    alerts: dict[str, list[dict[str, object]]] = {name: [] for name in RULES}
    for name, case in CASES.items():
        for kind, values in (("fires", case.fires), ("quiet", case.quiet)):
            series += inputs(values, f"{name} {kind}")
            for alert in [name] * (kind == "fires") + ALSO.get((name, kind), []):
                alerts[alert].append(expected(RULES[alert], f"{name} {kind}"))
    done = promtool(series, alerts, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_alert_that_fires_is_told_from_one_that_is_silent(tmp_path: Path) -> None:
    done = promtool(inputs(CASES["KVTieringRowsStuck"].fires, "one"), {"KVTieringRowsStuck": []}, tmp_path)
    assert done.returncode != 0


def test_no_alert_fires_while_all_is_well(tmp_path: Path) -> None:
    good = {
        "available": ONE,
        "writable": ONE,
        "service_responsive": ONE,
        "blocks": f"1e6x{60 * HOURS}",
        "evictions_total": STEADY,
    }
    busy = (
        "queries",
        "hits",
        "promotions",
        "cascades",
        "read_bytes",
        "written_bytes",
        "requests_get",
        "stores_declined",
    )
    growing = {f"{name}_total": STEADY for name in busy}
    rest = {
        metric.series.removeprefix("kv_tiering_"): NONE
        for metric in METRICS
        if metric.kind is not MetricKind.HISTOGRAM and metric.series.startswith("kv_tiering_")
    }
    done = promtool(inputs(rest | growing | good, "one"), {name: [] for name in RULES}, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
