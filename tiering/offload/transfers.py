"""The figures of one transfer, and the plain data that statistics are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OffloadingOperationMetrics:
    """Bytes and seconds of one operation."""

    op_size: int
    op_time: float


StatsData = Mapping[str, object]
