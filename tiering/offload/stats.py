"""What the connector's halves report for metrics: transfers of the workers, and counters of the tiers.  Crosses processes as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from tiering.copy.contract import TransferType
from tiering.manager.stats import MANAGER_GAUGES
from tiering.offload.transfers import OffloadingOperationMetrics
from tiering.secondary.stats import GAUGES

TIERS = "tiers"
"""The key of ``data`` that holds the tiers' counters."""

MANAGER = "manager"
"""The key of ``data`` that holds the manager's counters."""

CONNECTOR = "connector"
"""The key of ``data`` that holds the counters of the connector's scheduler half."""

RECORDS = (MANAGER, CONNECTOR)
"""The keys of ``data`` with one record of counters each.  Every key beside these and :data:`TIERS` is a transfer type."""

_GAUGES = GAUGES | MANAGER_GAUGES | {"jobs_active", "requests_active"}


def transfer_type_name(transfer_type: TransferType) -> str:
    """``"gpu_to_cpu"`` or ``"cpu_to_gpu"``."""
    source, destination = transfer_type
    return f"{source}_to_{destination}"


class Increments:
    """Turns counters, which run from the start, into what is new since the report before.

    Several processes may take in an engine's reports, each report one of them: only increments add up there.
    """

    def __init__(self) -> None:
        self._before: dict[str, Mapping[str, Any]] = {}

    def take(self, records: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """``records``: name of a tier or of :data:`RECORDS` → its fields as they are now.  Gauges stay as they are.

        A tier whose counters have started again from zero (it was opened anew) has all of them as increments.
        """
        new = {}
        for name, fields in records.items():
            before = self._before.get(name, {})
            new[name] = _plain_copy(fields) if _started_again(fields, before) else _combined(fields, before, -1)
        self._before = {name: _plain_copy(fields) for name, fields in records.items()}
        return new


class OffloadingConnectorStats:
    """Transfers, and what has happened in each tier, since the last report.

    ``data`` is plain dicts and lists: transfer type → list of ``{"op_size": bytes, "op_time": seconds}``; under
    ``"tiers"`` tier name → fields of :class:`tiering.secondary.stats.TierStats`; and under ``"manager"`` and
    ``"connector"`` the fields of these. Counters say what is new, gauges how things are.
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
        """Add what is new of the tiers: tier name → plain fields, of counters the increments (:class:`Increments`)."""
        for name, fields in tiers.items():
            known = self.data.setdefault(TIERS, {})
            known[name] = _combined(fields, known.get(name, {}), 1)

    def record(self, name: str, fields: Mapping[str, Any]) -> None:
        """Add what is new of the record ``name``, one of :data:`RECORDS`."""
        self.data[name] = _combined(fields, self.data.get(name, {}), 1)

    def aggregate(self, other: OffloadingConnectorStats) -> Self:
        """Add ``other``, later or another worker's, to this; returns itself and shares nothing with ``other``."""
        for name, operations in other.data.items():
            if name == TIERS:
                self.record_tiers(operations)
            elif name in RECORDS:
                self.record(name, operations)
            else:
                self.data.setdefault(name, []).extend(dict(operation) for operation in operations)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Per transfer type: ``<type>_total_bytes`` and ``<type>_total_time`` (seconds)."""
        totals: dict[str, int | float] = {}
        for name, operations in self.data.items():
            if name != TIERS and name not in RECORDS:
                totals[f"{name}_total_bytes"] = sum(operation["op_size"] for operation in operations)
                totals[f"{name}_total_time"] = sum(operation["op_time"] for operation in operations)
        return totals

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not any(self.data.values())

    def reset(self) -> None:
        """Forget what was reported.  Data handed out before is not touched."""
        self.data = {}


def _started_again(fields: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    return any(
        now < before[name]
        for name, now in fields.items()
        if name in before and name not in _GAUGES and not isinstance(now, list)
    )


def _combined(fields: Mapping[str, Any], others: Mapping[str, Any], sign: int) -> dict[str, Any]:
    """``fields``, their counters with those of ``others`` added (``sign`` 1) or taken away (-1)."""
    result = _plain_copy(fields)
    for name in fields.keys() & others.keys() - _GAUGES:
        value, other = fields[name], others[name]
        if isinstance(value, list):
            result[name] = [mine + sign * theirs for mine, theirs in zip(value, other, strict=True)]
        else:
            result[name] = value + sign * other
    return result


def _plain_copy(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, list) else value for name, value in fields.items()}
