"""The Grafana dashboard: current, of Grafana's schema, and on metrics that exist."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from grafana_foundation_sdk.cog import encoder, plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from scripts import dashboard as script
from scripts.dashboard_panels import ROWS
from tests.deploy.observed import DASHBOARD, dashboard, filled, known_series, queries, series_in
from tiering.connector.metrics import METRICS

NOT_SHOWN = {
    "kv_tiering_estimated_hit_ratio_x0_25": "the panel shows four of the seven estimates",
    "kv_tiering_estimated_hit_ratio_x8": "the panel shows four of the seven estimates",
    "kv_tiering_estimated_hit_ratio_x16": "the panel shows four of the seven estimates",
    "kv_tiering_misses_total": "the hit rate says it",
    "kv_tiering_breaker_opened_total": "the panel of breakers shows each time",
    "kv_tiering_coordinated": "0 also for tiers without a coordination, where it says nothing",
    "kv_tiering_cascades_total": "bytes written say it",
    "kv_tiering_descriptions_refused_total": "for routers",
    "kv_tiering_descriptions_written_total": "for routers",
    "kv_tiering_evicted_blocks_total": "the same as the evictions of the tier cpu",
    "kv_tiering_ignored_completions_total": "a normal trace of a reset",
    "kv_tiering_misreported_jobs_total": "the tier goes out of service, which is shown",
    "kv_tiering_promotions_adopted_total": "of interest for load_deadline only",
    "kv_tiering_promotions_dropped_total": "normal",
    "kv_tiering_promotions_overdue_total": "loads_overdue of the tiers is shown",
    "kv_tiering_requests_total": "requests are shown by kind",
    "kv_tiering_rows": "fixed",
    "kv_tiering_slots_retired": "device errors are shown",
    "kv_tiering_snapshots_dropped_total": "for routers",
    "kv_tiering_snapshots_restored_total": "for routers",
    "kv_tiering_loads_total": "tokens and bytes are shown",
    "kv_tiering_loads_within_step_total": "tokens and bytes are shown",
    "kv_tiering_stores_total": "bytes are shown",
    "kv_tiering_engine_connections": "one per tier of a running engine",
    "kv_tiering_engine_rows": "fixed",
    "kv_tiering_engine_messages_received_total": "a matter of steps",
    "kv_tiering_engine_messages_sent_total": "a matter of steps",
    "kv_tiering_service_kept_regions": "the blocks in them are shown",
    "kv_tiering_service_kept_bytes": "the blocks in them are shown",
    "kv_tiering_service_inherited_blocks_total": "shown as the engine's inherited blocks",
    "kv_tiering_requests_recorded_total": "of interest while a trace is recorded",
    "kv_tiering_records_dropped_total": "of interest while a trace is recorded",
    "vllm:kv_offload_total_time_total": "bytes are shown",
    "vllm:kv_offload_size": "bytes are shown",
}
"""Series of the table that no panel has, and why."""


def through_grafanas_schema(stored: dict[str, Any]) -> Any:
    """Return the dashboard after Grafana's own types have read and written it."""
    plugins.register_default_plugins()
    return json.loads(encoder.JSONEncoder().encode(Dashboard.from_json(stored)))


def lost(stored: Any, kept: Any, path: str = "") -> list[str]:
    """Return the places of ``stored`` that ``kept`` lacks or has with another value."""
    if isinstance(stored, dict) and isinstance(kept, dict):
        return [
            place
            for key, value in stored.items()
            for place in (lost(value, kept[key], f"{path}.{key}") if key in kept else [f"{path}.{key}"])
        ]
    if isinstance(stored, list) and isinstance(kept, list) and len(stored) == len(kept):
        pairs = enumerate(zip(stored, kept, strict=True))
        return [place for index, (one, other) in pairs for place in lost(one, other, f"{path}[{index}]")]
    return [] if stored == kept else [path]


def test_the_dashboard_is_that_of_its_script() -> None:
    assert DASHBOARD.read_text() == script.rendered(), "python -m scripts.dashboard --write"


def test_grafanas_schema_keeps_every_word_of_it() -> None:
    assert lost(dashboard(), through_grafanas_schema(dashboard())) == []


@pytest.mark.parametrize("word", ["targts", "unkown"])
def test_a_word_that_the_schema_lacks_would_be_lost(word: str) -> None:
    changed = dashboard()
    changed["panels"][1][word] = 1
    assert lost(changed, through_grafanas_schema(changed)) == [f".panels[1].{word}"]


def test_panels_have_a_place_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    numbers = [panel["id"] for panel in dashboard()["panels"]]
    assert len(numbers) == len(set(numbers))


def test_queries_use_metrics_of_the_table_and_the_dashboards_variables() -> None:
    variables = {variable["name"] for variable in dashboard()["templating"]["list"]} | {"__rate_interval"}
    found = list(queries())
    assert len(found) > 60
    for query in found:
        assert series_in(query.expression), query
        assert series_in(query.expression) <= known_series(), query
        assert query.variables <= variables, query
        assert "$" not in filled(query.expression, "1m")


def test_legends_name_labels_that_their_expression_keeps() -> None:
    for query in queries():
        for label in re.findall(r"{{(\w+)}}", query.legend):
            assert re.search(rf"by \([^)]*\b{label}\b", query.expression), query


def test_every_metric_is_shown_or_left_out_for_a_reason() -> None:
    shown = {series for query in queries() for series in series_in(query.expression)}
    missing = {metric.series for metric in METRICS if not shown & {metric.series, f"{metric.series}_bucket"}}
    assert missing == set(NOT_SHOWN)


def test_panels_say_what_they_show() -> None:
    titles = [panel.title for panels in ROWS.values() for panel in panels]
    assert all(panel.text.endswith(".") for panels in ROWS.values() for panel in panels)
    assert len(titles) > 25
