"""The counts of a service: of itself, and of each engine at each tier."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from tiering.api.metric import MetricKind, counter, declared_metrics, gauge
from tiering.secondary.tier_stats import TierStats

_log = logging.getLogger("kv_tiering.machine")

_OWN = {"queries", "hits", "misses", "promotions", "promotions_failed", "promotions_active", "cascades"}
_OWN |= {"cascades_failed", "cascades_active", "stores_dropped", "stores_evicted", "loads_overdue", "lookups_late"}
_OWN |= {"job_latency", "job_latency_sum", "available", "writable", "io_restarts"}
_MEDIUM = frozenset(field.name for field in fields(TierStats)) - _OWN
"""Statistics of the medium, which are the same for all engines."""

_PLAIN = {name: getattr(TierStats(), name) for name in _MEDIUM}
_COUNTERS = {each.field for each in declared_metrics(TierStats) if each.kind is MetricKind.COUNTER} & _MEDIUM

COLD_START = "cold_start"
"""Word beside the statistics of a tier that began empty: what differs in the nearest blocks of others."""

EngineOfTier = tuple[str, str, str]
"""Name of an engine, of its namespace and of its tier."""


@dataclass(slots=True)
class EngineCounts:
    """Counts of the connections of one engine at one tier, since it connected."""

    engine_connections: int = gauge("connections", "Connections of the engine", "One per tier that its stack names.")
    engine_attached: int = gauge(
        "flag",
        "1 if blocks of the engine and of the tier may meet",
        "0: another engine was reset, or this one has not emptied its rows for a new epoch yet; it has no hits.",
        combined="min",
    )
    engine_rows: int = gauge("rows", "Rows of the engine that the service maps", "The engine's `primary.capacity`.")
    engine_rows_busy: int = gauge(
        "rows",
        "Rows of the engine in jobs that have not ended",
        "If it stays high while the engine's loads do not grow, the medium hangs.",
    )
    engine_stores_waiting: int = gauge(
        "blocks", "Blocks of the engine that wait for the tier to take stores", "The tier is slower than its engines."
    )
    engine_lookups_waiting: int = gauge(
        "lookups", "Lookups of the engine that the medium has not answered", "A slow bucket, if it stays high."
    )
    engine_loaded_blocks: int = counter(
        "blocks", "Blocks that the service has loaded into the engine's rows", "Which engine profits."
    )
    engine_stored_blocks: int = counter(
        "blocks", "Blocks that the service has stored from the engine's rows", "Which engine fills the tier."
    )
    engine_failed_blocks: int = counter(
        "blocks",
        "Blocks of the engine that were not loaded or stored",
        "Declined stores are among them; `promotions_failed` and `cascades_failed` have the tier's part.",
    )
    engine_shared_reads: int = counter(
        "blocks",
        "Blocks for which the engine waited for another engine's read",
        "Reads that the medium was spared.",
    )
    engine_messages_received: int = counter("messages", "Messages from the engine", "At most some per step.")
    engine_messages_sent: int = counter("messages", "Messages to the engine", "Answers, results and states.")


@dataclass(slots=True)
class ServiceCounts:
    """Counts of a service as a whole."""

    service_responsive: int = gauge(
        "flag", "1 if the service's thread has answered within a second", "0: it hangs; engines run without tiers."
    )
    service_users_away: int = gauge(
        "users",
        "Further users that are not served, because their thread hangs or has failed",
        "The log names the user, and where its thread is; the others are served.",
    )
    service_connections: int = gauge(
        "connections",
        "Connections, those of claimed rows included",
        "At 256, or at a user's equal part of them, more are refused.",
    )
    service_refusals: int = counter(
        "connections",
        "Connections that were refused, or ended because of a damaged message",
        "The log has the reason: another user or version, other block sizes, or too large a CPU tier.",
        is_trouble=True,
    )
    service_orphaned_rows: int = gauge(
        "rows",
        "Rows of engines that have gone, in jobs that have not ended",
        "Their memory is freed once the medium answers; if it stays high, the medium hangs.",
    )
    service_kept_regions: int = gauge(
        "regions", "CPU tiers that the service has made, in use or left", "Only with `machine.keep_rows`."
    )
    service_left_regions: int = gauge(
        "regions", "Those whose engine has ended", "They wait for the next engine for the time of `--keep-rows`."
    )
    service_kept_bytes: int = gauge("bytes", "Bytes of the CPU tiers that the service has made", "Memory of machines.")
    service_kept_blocks: int = gauge(
        "blocks", "Blocks that are recorded in them", "0 for long: not all tiers of the engines are in service."
    )
    service_inherited_blocks: int = counter(
        "blocks", "Blocks that later engines were given in rows of an earlier one", "Warm restarts."
    )


@dataclass(frozen=True, slots=True)
class ServiceLook:
    """The counts of a service at one moment."""

    service: ServiceCounts
    tiers: Mapping[tuple[str, str], TierStats] = field(default_factory=dict)
    """Statistics of each tier, of all engines together, by namespace and name."""
    engines: Mapping[EngineOfTier, EngineCounts] = field(default_factory=dict)
    """Counts of each engine at each tier."""


def joined(looks: Sequence[ServiceLook]) -> ServiceLook:
    """Return the counts of several users' services as those of one.

    The first one alone decides whether it responds: no other user can make an operator's probe restart the service.
    """
    words = (word.name for word in fields(ServiceCounts))
    counts = {word: sum(getattr(look.service, word) for look in looks) for word in words}
    counts["service_responsive"] = looks[0].service.service_responsive
    tiers = {place: stats for look in looks for place, stats in look.tiers.items()}
    engines = {place: found for look in looks for place, found in look.engines.items()}
    return ServiceLook(ServiceCounts(**counts), tiers, engines)


class Medium:
    """The statistics of a medium, as a service sent them last; its counters go on when they start again.

    Args:
        tier: name of the tier.
        cold_starts: gets what differs in the nearest blocks of others, if the tier began empty in the service.
    """

    def __init__(self, tier: str, cold_starts: dict[str, str]) -> None:
        self._tier = tier
        self._cold_starts = cold_starts
        self._fields: dict[str, float] = {}
        self._ended: dict[str, float] = {}
        """Counters of earlier processes of the service, summed."""

    def take(self, text: bytes) -> None:
        """Take statistics that a service has sent."""
        try:
            words = json.loads(text)
            new = {name: type(_PLAIN[name])(value) for name, value in words.items() if name in _PLAIN}
        except (ValueError, TypeError, AttributeError) as error:
            _log.debug("the service's statistics cannot be read: %s", error)
            return
        if differs := words.get(COLD_START):
            self._cold_starts[self._tier] = "".join(filter(str.isprintable, str(differs)))
        before = self._fields
        if any(new.get(name, 0) < before.get(name, 0) for name in _COUNTERS):
            for name in _COUNTERS:
                self._ended[name] = self._ended.get(name, 0) + before.get(name, 0)
        self._fields = new

    def added_to(self, stats: TierStats) -> TierStats:
        """Return ``stats`` after those of the medium have been set."""
        for name, value in self._fields.items():
            setattr(stats, name, value + self._ended.get(name, 0))
        return stats
