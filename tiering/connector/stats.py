"""What the connector's halves report for metrics: transfers of the workers, and counters of the tiers.  Crosses processes as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from tiering.connector.metadata import OffloadingOperationMetrics
from tiering.copy.base import TransferType

TIERS = "tiers"
"""The key of ``data`` that holds the tiers' counters; every other key is a transfer type."""


def transfer_type_name(transfer_type: TransferType) -> str:
    """``"gpu_to_cpu"`` or ``"cpu_to_gpu"``."""
    source, destination = transfer_type
    return f"{source}_to_{destination}"


class OffloadingConnectorStats:
    """Transfers since the last report, and the latest counters of each tier.

    ``data`` is plain dicts and lists: transfer type → list of ``{"op_size": bytes, "op_time": seconds}``, and under ``"tiers"``
    tier name → the fields of :class:`tiering.secondary.stats.TierStats` (cumulative: the latest report stands for all before).
    """

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data: dict[str, Any] = {} if data is None else data

    def record_transfer(self, num_bytes: int | None, time: float | None, transfer_type: TransferType | None) -> None:
        """Note one transfer; one whose size, time or type is not known is not recorded."""
        if num_bytes is None or time is None or transfer_type is None:
            return
        operation = dataclasses.asdict(OffloadingOperationMetrics(num_bytes, time))
        self.data.setdefault(transfer_type_name(transfer_type), []).append(operation)

    def record_tiers(self, tiers: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the tiers' counters as they are now: tier name → plain fields."""
        if tiers:
            self.data.setdefault(TIERS, {}).update({name: _plain_copy(fields) for name, fields in tiers.items()})

    def aggregate(self, other: OffloadingConnectorStats) -> Self:
        """Add ``other``, later or another worker's, to this; returns itself and shares nothing with ``other``."""
        for name, operations in other.data.items():
            if name == TIERS:
                self.record_tiers(operations)
            else:
                self.data.setdefault(name, []).extend(dict(operation) for operation in operations)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Per transfer type: ``<type>_total_bytes`` and ``<type>_total_time`` (seconds)."""
        totals: dict[str, int | float] = {}
        for name, operations in self.data.items():
            if name != TIERS:
                totals[f"{name}_total_bytes"] = sum(operation["op_size"] for operation in operations)
                totals[f"{name}_total_time"] = sum(operation["op_time"] for operation in operations)
        return totals

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not any(self.data.values())

    def reset(self) -> None:
        """Forget what was reported.  Data handed out before is not touched."""
        self.data = {}


def _plain_copy(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, list) else value for name, value in fields.items()}
