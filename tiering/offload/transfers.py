"""Measurements of one transfer, and the plain data of statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OffloadingOperationMetrics:
    """Measurements of one transfer."""

    op_size: int
    """Bytes that were moved."""
    op_time: float
    """Duration in seconds."""


StatsData = Mapping[str, object]
"""Statistics as plain data, by name of the record."""
