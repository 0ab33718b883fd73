"""One metric of the connector: a row of the table of metrics."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tiering.connector.stats import CONNECTOR, MANAGER, TIERS

TRANSFERS = "transfers"
"""Record of the workers' transfers between the GPU and the CPU tier."""

LABELS = {TRANSFERS: ("transfer_type",), TIERS: ("tier",), MANAGER: (), CONNECTOR: ()}
"""Labels of the metrics of each record, beside the labels of the engine."""


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

    record: str
    """Record of the reports that the metric is made from; :data:`LABELS` has the labels by record."""
    kind: MetricKind
    """Kind of the metric."""
    field: str
    """Field of the record."""
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

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", f"kv_tiering_{self.field}")

    @property
    def series(self) -> str:
        """Name of the metric in queries; a histogram's series append ``_bucket``, ``_sum`` or ``_count``."""
        return f"{self.name}_total" if self.kind is MetricKind.COUNTER else self.name

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the metric's labels, beside the labels of the engine."""
        return LABELS[self.record]
