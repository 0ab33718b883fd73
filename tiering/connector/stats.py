"""Reports for metrics: transfers of the workers, and counters of tiers, manager and connector.

Reports are plain data, because they cross process borders.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from tiering.connector.metrics import CONNECTOR, GAUGES, LABELLED, MANAGER
from tiering.copy.contract import TransferType

RECORDS = (MANAGER, CONNECTOR)
"""Keys of ``data`` with one record of counters each.

All keys except these and those of :data:`~tiering.connector.metrics.LABELLED` are transfer types.
"""

StatsData = Mapping[str, object]
"""Statistics as plain data, by name of the record."""


def transfer_type_name(transfer_type: TransferType) -> str:
    """Return ``"gpu_to_cpu"`` or ``"cpu_to_gpu"``."""
    source, destination = transfer_type
    return f"{source}_to_{destination}"


class Increments:
    """Converter from counters since the start to increments since the previous report.

    Several processes may receive an engine's reports, each report one of them. Only increments add up across processes.
    """

    def __init__(self) -> None:
        self._before: dict[str, Mapping[str, Any]] = {}

    def take(self, records: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return ``records`` with counters replaced by increments; gauges stay unchanged.

        If a tier was opened again, its counters restart from 0 and are returned in full.

        Args:
            records: present fields of each tier or record, by its name.
        """
        new = {name: _increase(fields, self._before.get(name, {})) for name, fields in records.items()}
        self._before = {name: _plain_copy(fields) for name, fields in records.items()}
        return new


class OffloadingConnectorStats:
    """Transfers and counters since the last report.

    Args:
        data: content of the report; default: empty.
    """

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        self.data: dict[str, Any] = {} if data is None else data
        """Plain dicts and lists; counters are increments, gauges are present values.

        - Each transfer type: a list of ``{"op_size": bytes, "op_time": seconds}``, one per transfer.
        - ``"tiers"``: the fields of :class:`tiering.secondary.tier_stats.TierStats` by tier name.
        - ``"misses"``: the fields of :class:`tiering.connector.metrics.MissCounters` by cause and tier.
        - ``"cached"``: the fields of :class:`tiering.connector.metrics.CachedCounters` by tenant and tier.
        - ``"manager"``: the fields of :class:`tiering.manager.manager_stats.ManagerStats`.
        - ``"connector"``: the fields of the scheduler half's counters.
        """

    def record_transfer(self, num_bytes: int | None, time: float | None, transfer_type: TransferType | None) -> None:
        """Record one transfer; ignore a transfer whose size, time or type is not known.

        Args:
            num_bytes: bytes that were moved.
            time: duration in seconds.
            transfer_type: source and destination.
        """
        if num_bytes is None or time is None or transfer_type is None:
            return
        operation = {"op_size": num_bytes, "op_time": time}
        self.data.setdefault(transfer_type_name(transfer_type), []).append(operation)

    def record_labelled(self, record: str, parts: Mapping[str, Mapping[str, Any]]) -> None:
        """Add the fields of each part of a record, by the values of its labels.

        Counters are increments (:class:`Increments`).
        """
        for name, fields in parts.items():
            known = self.data.setdefault(record, {})
            known[name] = _added(fields, known.get(name, {}))

    def record(self, name: str, fields: Mapping[str, Any]) -> None:
        """Add the fields of the record ``name``, one of :data:`RECORDS`; counters are increments."""
        self.data[name] = _added(fields, self.data.get(name, {}))

    def aggregate(self, other: OffloadingConnectorStats) -> Self:
        """Add a later report, or another worker's report, to this one; return this one.

        The result shares no data with ``other``.
        """
        for name, operations in other.data.items():
            if name in LABELLED:
                self.record_labelled(name, operations)
            elif name in RECORDS:
                self.record(name, operations)
            else:
                self.data.setdefault(name, []).extend(dict(operation) for operation in operations)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return ``<type>_total_bytes`` and ``<type>_total_time`` (seconds) of each transfer type."""
        totals: dict[str, int | float] = {}
        for name, operations in self.data.items():
            if name not in LABELLED and name not in RECORDS:
                totals[f"{name}_total_bytes"] = sum(operation["op_size"] for operation in operations)
                totals[f"{name}_total_time"] = sum(operation["op_time"] for operation in operations)
        return totals

    def is_empty(self) -> bool:
        """Return True if there is nothing to report."""
        return not any(self.data.values())

    def reset(self) -> None:
        """Forget all recorded data; data that was handed out before is not changed."""
        self.data = {}


def _increase(fields: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``fields`` less the counters of ``before``, or unchanged if the counters started again."""
    result: dict[str, Any] = {}
    for name, value in fields.items():
        then = None if name in GAUGES else before.get(name)
        if type(value) is list:
            result[name] = value[:] if then is None else [now - past for now, past in zip(value, then, strict=True)]
        elif then is None:
            result[name] = value
        elif value < then:
            return _plain_copy(fields)
        else:
            result[name] = value - then
    return result


def _added(fields: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``fields`` with the counters of ``others`` added."""
    result = _plain_copy(fields)
    for name, other in others.items():
        if name in GAUGES or name not in fields:
            continue
        if isinstance(other, list):
            result[name] = [mine + theirs for mine, theirs in zip(fields[name], other, strict=True)]
        else:
            result[name] = fields[name] + other
    return result


def _plain_copy(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value[:] if type(value) is list else value for name, value in fields.items()}
