"""Write the tables of metrics into the document of metrics, from the declarations in the code.

The document marks the place of each table with ``<!-- metrics: RECORD -->`` and ``<!-- end of metrics -->``, where
RECORD is one of :data:`RECORDS`. All columns come from :data:`tiering.connector.metrics.METRICS`.

    python -m scripts.metric_tables          # fails if a table is not current
    python -m scripts.metric_tables --write  # writes the tables
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from tiering.api.metric import Metric
from tiering.connector.metrics import (
    CACHED,
    CONNECTOR,
    ENGINES,
    MANAGER,
    METRICS,
    MISSES,
    SERVICE,
    TIERS,
    TRANSFERS,
)

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
"""Document with the tables."""

RECORDS = (TIERS, MANAGER, MISSES, CACHED, CONNECTOR, TRANSFERS, SERVICE, ENGINES)
"""Records of metrics; each record has a table."""

_REGION = re.compile(r"(<!-- metrics: (\w+) -->\n).*?(<!-- end of metrics -->)", re.DOTALL)
_HEAD = ("metric", "type", "labels", "unit", "meaning", "when it moves")


def render(text: str) -> str:
    """Return a document's ``text`` with current tables.

    Raises:
        ValueError: a region names no record.
    """
    return _REGION.sub(lambda found: f"{found[1]}{_table(found[2])}\n{found[3]}", text)


def _table(record: str) -> str:
    if record not in RECORDS:
        raise ValueError(f"there is no record {record!r} of metrics; records are {', '.join(RECORDS)}")
    rows = [_row(metric) for metric in METRICS if metric.record == record]
    return "\n".join(f"| {' | '.join(row)} |" for row in [_HEAD, ("---",) * len(_HEAD), *rows])


def _row(metric: Metric) -> tuple[str, ...]:
    labels = ", ".join(f"`{label}`" for label in metric.labels) or "none"
    return (
        f"`{metric.series}`",
        metric.kind.value,
        labels,
        metric.unit,
        f"{metric.meaning}.",
        metric.action,
    )


def main() -> int:
    """Check or write the tables, and return the exit status."""
    parser = argparse.ArgumentParser(description="Check the document's tables of metrics.")
    parser.add_argument("--write", action="store_true", help="write the tables")
    write = parser.parse_args().write
    text = DOCUMENT.read_text()
    if render(text) == text:
        return 0
    if write:
        DOCUMENT.write_text(render(text))
    sys.stdout.write(f"{DOCUMENT.name}: {'written' if write else 'not current; run with --write'}\n")
    return 0 if write else 1


if __name__ == "__main__":
    sys.exit(main())
