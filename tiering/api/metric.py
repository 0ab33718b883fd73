"""The declaration of a metric, at the field of the statistics that holds its value.

Exporters, documents and the dashboard are made from these declarations. A declared field is a plain attribute with a
default, so counting costs no more than without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

_METRICS = "metrics"


class MetricKind(Enum):
    """The kind of a metric, as Prometheus names it."""

    COUNTER = "counter"
    """A number that only grows; Prometheus appends ``_total`` to the name."""
    GAUGE = "gauge"
    """A present value."""
    HISTOGRAM = "histogram"
    """Observations, counted by buckets."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric."""

    kind: MetricKind
    """Kind of the metric."""
    unit: str
    """Unit: "bytes", "seconds", "flag" (1 or 0), "state" (a number), or the things counted."""
    meaning: str
    """Meaning of the metric in one line, which Prometheus shows as its help."""
    action: str
    """Conclusion or action of an operator when the metric moves: complete sentences, as Markdown."""
    name: str = ""
    """Name of the metric; default: ``kv_tiering_`` and the field."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets; empty for other kinds."""
    combined: str = "sum"
    """Function that combines the values of several replicas: sum, avg, max or min; default: sum."""
    is_trouble: bool = False
    """True for counters of losses and faults, which ``kv-tiering top`` lists; default: False."""
    field: str = ""
    """Field of the record; default: the field with the declaration."""
    record: str = ""
    """Record of the reports that the metric is made from; empty in a declaration."""
    labels: tuple[str, ...] = ()
    """Names of the metric's labels, beside the labels of the engine; empty in a declaration."""

    @property
    def series(self) -> str:
        """Name of the metric in queries; a histogram's series append ``_bucket``, ``_sum`` or ``_count``."""
        return f"{self.name}_total" if self.kind is MetricKind.COUNTER else self.name


def declared(*metrics: Metric) -> Mapping[str, tuple[Metric, ...]]:
    """Return the metadata of a dataclass's field from whose value ``metrics`` are made."""
    return {_METRICS: metrics}


def counter(unit: str, meaning: str, action: str, *, is_trouble: bool = False) -> Any:
    """Return a field with a counter that begins at 0; :class:`Metric` has the parameters."""
    metric = Metric(MetricKind.COUNTER, unit, meaning, action, is_trouble=is_trouble)
    return field(default=0.0 if unit == "seconds" else 0, metadata=declared(metric))


def gauge(unit: str, meaning: str, action: str, *, combined: str = "sum", default: int = 0) -> Any:
    """Return a field with a gauge that begins at ``default``; :class:`Metric` has the other parameters."""
    metric = Metric(MetricKind.GAUGE, unit, meaning, action, combined=combined)
    return field(default=default, metadata=declared(metric))


def declared_metrics(statistics: type) -> Iterator[Metric]:
    """Yield the metrics of a dataclass in the order of its fields."""
    for each in fields(statistics):
        for metric in each.metadata.get(_METRICS, ()):
            yield replace(metric, field=each.name, name=metric.name or f"kv_tiering_{each.name}")
