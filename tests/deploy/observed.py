"""The dashboard and the alert rules as data: their expressions and the series in them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tiering.api.metric import MetricKind
from tiering.connector.metrics import METRICS

ROOT = Path(__file__).resolve().parent.parent.parent
DASHBOARD = ROOT / "deploy" / "grafana" / "kv-tiering.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"
CONFIG = ROOT / "deploy" / "prometheus" / "prometheus.yaml"

_SERIES = re.compile(r"\b((?:kv_tiering_|vllm:)\w+)")


@dataclass(frozen=True, slots=True)
class Rule:
    """One alert rule."""

    name: str
    expression: str
    labels: dict[str, str]
    annotations: dict[str, str]
    minutes: float = 0.0
    """Minutes for which the expression must hold."""


@dataclass(frozen=True, slots=True)
class Query:
    """One query of the dashboard."""

    panel: str
    legend: str
    expression: str
    variables: frozenset[str] = field(default_factory=frozenset)
    """Names of the template variables in the expression."""


def rules() -> list[Rule]:
    """Return the alert rules."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    units = {"m": 1.0, "h": 60.0}
    return [
        Rule(
            rule["alert"],
            rule["expr"],
            rule["labels"],
            rule["annotations"],
            float(rule["for"][:-1]) * units[rule["for"][-1]] if "for" in rule else 0.0,
        )
        for group in groups
        for rule in group["rules"]
    ]


def dashboard() -> dict[str, Any]:
    """Return the dashboard as it is stored."""
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def queries() -> Iterator[Query]:
    """Yield the queries of all panels."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            words = frozenset(re.findall(r"\$(\w+)", target["expr"]))
            yield Query(panel["title"], target["legendFormat"], target["expr"], words)


def filled(expression: str, window: str) -> str:
    """Return an expression as Grafana sends it, for all instances and tiers at the default prices.

    Args:
        expression: the expression.
        window: value of ``$__rate_interval``.
    """
    values = {"__rate_interval": window, "instance": ".*", "tier": ".*", "price_put": "5", "price_get": "0.4"}
    return re.sub(r"\$(\w+)", lambda found: values[found[1]], expression)


def series_in(expression: str) -> set[str]:
    """Return the names of the series in an expression."""
    return set(_SERIES.findall(expression.replace("vllm[:_]", "vllm:")))


def known_series() -> set[str]:
    """Return the names of all series that the metrics of the table have."""
    return {
        f"{metric.series}{suffix}"
        for metric in METRICS
        for suffix in (("_bucket", "_sum", "_count") if metric.kind is MetricKind.HISTOGRAM else ("",))
    }


def needs(program: str) -> str:
    """Return the path of ``program``; skip the test where Debian's package prometheus is not installed."""
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"{program} is not installed; apt-get install --no-install-recommends prometheus")
    return found
