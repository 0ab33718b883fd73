"""Write the Grafana dashboard, ``deploy/grafana/kv-tiering.json``, from the list of its panels.

python -m scripts.dashboard          # fails if the dashboard is not current
python -m scripts.dashboard --write  # writes the dashboard
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scripts.dashboard_panels import ROWS, Panel

PATH = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "kv-tiering.json"
"""The file of the dashboard."""

SCHEMA_VERSION = 41
"""Version of the dashboard's schema: that of Grafana 11.6. Later versions of Grafana convert it."""

_WIDTH = 24
_HEIGHT = 8
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana stores it."""
    return {
        "uid": "kv-tiering",
        "title": "KV tiering",
        "description": "The tiers of KV-cache offloading: hits, traffic, capacity, faults, cost.",
        "tags": ["kv-tiering", "vllm"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "time": {"from": "now-6h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": list(_variables())},
        "panels": list(_panels()),
    }


def rendered() -> str:
    """Return the content of the dashboard's file."""
    return json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n"


def _variables() -> Iterator[dict[str, Any]]:
    yield {"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus"}
    queries = {
        "instance": ("Instance", "label_values(kv_tiering_queries_total, instance)"),
        "tier": ("Tier", 'label_values(kv_tiering_queries_total{instance=~"$instance"}, tier)'),
    }
    for name, (label, query) in queries.items():
        yield {
            "type": "query",
            "name": name,
            "label": label,
            "datasource": _SOURCE,
            "query": query,
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
        }
    prices = {"price_put": ("$ per million PUT and LIST", "5"), "price_get": ("$ per million GET and HEAD", "0.4")}
    for name, (label, price) in prices.items():
        yield {
            "type": "textbox",
            "name": name,
            "label": label,
            "query": price,
            "current": {"text": price, "value": price},
        }


def _panels() -> Iterator[dict[str, Any]]:
    number, top = 0, 0
    for title, panels in ROWS.items():
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": top, "w": _WIDTH, "h": 1},
            "panels": [],
        }
        top, left = top + 1, 0
        for panel in panels:
            number += 1
            if left + panel.width > _WIDTH:
                top, left = top + _HEIGHT, 0
            yield _panel(panel, number, {"x": left, "y": top, "w": panel.width, "h": _HEIGHT})
            left += panel.width
        top += _HEIGHT


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.most is not None:
        defaults["max"] = panel.most
    if panel.states:
        shown = {str(value): {"text": text, "color": colour} for value, (text, colour) in panel.states.items()}
        defaults["mappings"] = [{"type": "value", "options": shown}]
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "gridPos": place,
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": expression, "legendFormat": legend}
            for index, (legend, expression) in enumerate(panel.queries.items())
        ],
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _OPTIONS[panel.kind],
    }


_OPTIONS: Mapping[str, dict[str, Any]] = {
    "timeseries": {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "stat": {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "area",
        "justifyMode": "auto",
        "textMode": "value_and_name",
        "wideLayout": True,
        "showPercentChange": False,
        "percentChangeColorMode": "standard",
        "orientation": "auto",
    },
    "state-timeline": {
        "showValue": "never",
        "rowHeight": 0.9,
        "mergeValues": True,
        "alignValue": "left",
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "single", "sort": "none"},
    },
}


def main() -> int:
    """Check or write the dashboard, and return the exit status."""
    parser = argparse.ArgumentParser(description="Check the Grafana dashboard.")
    parser.add_argument("--write", action="store_true", help="write the dashboard")
    write = parser.parse_args().write
    if PATH.exists() and PATH.read_text() == rendered():
        return 0
    if write:
        PATH.write_text(rendered())
    sys.stdout.write(f"{PATH.name}: {'written' if write else 'not current; run with --write'}\n")
    return 0 if write else 1


if __name__ == "__main__":
    sys.exit(main())
