"""The metrics of a running engine: fetched, and summed over its replicas."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tiering.advisor.advisor import FIELDS
from tiering.api.masking import mask_text
from tiering.connector.metrics import ENGINES, METRICS, SERVICE
from tiering.errors import ConfigError, PermanentStoreError, TemporaryStoreError

PREFIX = "kv_tiering_"
"""Begins the names of this project's metrics."""
OFFLOADED = "vllm:kv_offload_total_bytes"
"""Name of the metric of bytes that moved between the accelerator and the CPU tier."""
_WORST = {metric.field: {"max": max, "min": min}.get(metric.combined) for metric in METRICS}
_OF_ENGINES = frozenset(metric.field for metric in METRICS if metric.record == ENGINES)
_ESTIMATES = {field: factor for factor, field in FIELDS.items()}
_MOST_BYTES = 64 << 20
_OTHERS = frozenset(("cause", "tenant"))
"""Labels of metrics that are not those of a tier: causes of misses, and tenants' cached tokens."""


@dataclass(slots=True)
class Sample:
    """The metrics at one moment. Replicas are added up; of their states, the worst counts.

    Estimates of the size advisor are not added up: each replica has its own.
    """

    at: float
    """Time of the sample in monotonic seconds."""
    tiers: dict[str, dict[str, float]] = field(default_factory=dict)
    """Value by name of the tier and name of the metric without prefix and ``_total``."""
    latency: dict[str, dict[float, float]] = field(default_factory=dict)
    """Jobs per upper bound in seconds, cumulated, by name of the tier."""
    estimates: dict[str, dict[float, list[float]]] = field(default_factory=dict)
    """Estimated hit rates, one per replica, by name of the tier and multiple of its capacity."""
    manager: dict[str, float] = field(default_factory=dict)
    """Values of the metrics without the label ``tier``."""
    engines: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)
    """Values of the metrics of a service's engines, by engine and tier."""
    offloaded: dict[str, float] = field(default_factory=dict)
    """Bytes by type of transfer ("gpu_to_cpu", "cpu_to_gpu")."""


def metrics_url(url: str) -> str:
    """Return the address of the metrics of an engine whose address is ``url``.

    Raises:
        ConfigError: ``url`` is not an http address.
    """
    try:
        parts = urlsplit(url)
        known = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets without their other half, or a port that is no number
        known = False
    if not known:
        raise ConfigError(f"{mask_text(url)!r} is not an address; write it like http://127.0.0.1:8000/metrics")
    return url if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/metrics"


def fetch(url: str, timeout: float) -> str:
    """Return the text at ``url``.

    Args:
        url: address of the metrics.
        timeout: seconds to wait for the answer.

    Raises:
        TemporaryStoreError: the engine does not answer.
        PermanentStoreError: the address has no metrics.
    """
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            return str(answer.read(_MOST_BYTES).decode(errors="replace"))
    except urllib.error.HTTPError as error:
        raise PermanentStoreError(
            f"{mask_text(url)} answers {error.code} {error.reason}; give the address of the engine's metrics"
        ) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        text = getattr(reason, "strerror", None) or reason
        raise TemporaryStoreError(
            f"{mask_text(url)} does not answer ({text}); start the engine, or give the address of its server"
        ) from error


def parse(text: str, at: float) -> Sample:
    """Return the sample in ``text``, in Prometheus' text format.

    Args:
        text: the engine's metrics.
        at: time of the sample in monotonic seconds.

    Raises:
        PermanentStoreError: ``text`` has no metrics of this project.
    """
    from prometheus_client.parser import text_string_to_metric_families

    sample = Sample(at)
    try:
        for family in text_string_to_metric_families(text):
            for name, labels, value, *_ in family.samples:
                _add(sample, name, labels, value)
    except ValueError as error:
        raise PermanentStoreError(f"the answer is not in Prometheus' text format: {error}") from error
    if not sample.tiers and f"{SERVICE}_connections" not in sample.manager:
        raise PermanentStoreError(
            f"the engine's metrics hold none that begin with {PREFIX}: is the connector configured, and has the engine "
            "served a request?"
        )
    return sample


def _add(sample: Sample, name: str, labels: Mapping[str, str], value: float) -> None:
    if name.startswith(OFFLOADED):
        kind = labels.get("transfer_type", "")
        sample.offloaded[kind] = sample.offloaded.get(kind, 0.0) + value
    if not name.startswith(PREFIX) or name.endswith("_created") or not labels.keys().isdisjoint(_OTHERS):
        return
    word = name.removeprefix(PREFIX).removesuffix("_total")
    tier = labels.get("tier")
    if tier is None:
        sample.manager[word] = sample.manager.get(word, 0.0) + value
    elif word in _OF_ENGINES:
        _merge(sample.engines.setdefault((labels["engine"], tier), {}), word, value)
    elif word == "job_latency_seconds_bucket":
        bounds = sample.latency.setdefault(tier, {})
        bound = float(labels["le"])
        bounds[bound] = bounds.get(bound, 0.0) + value
    elif word in _ESTIMATES:
        sample.estimates.setdefault(tier, {}).setdefault(_ESTIMATES[word], []).append(value)
    else:
        _merge(sample.tiers.setdefault(tier, {}), word, value)


def _merge(values: dict[str, float], word: str, value: float) -> None:
    worst = _WORST.get(word)
    values[word] = worst(values.get(word, value), value) if worst else values.get(word, 0.0) + value


def quantile(bounds: Mapping[float, float], before: Mapping[float, float], share: float) -> float | None:
    """Return the upper bound of the bucket with the job at ``share``; None if there was no job.

    Args:
        bounds: cumulated jobs per upper bound.
        before: the same at an earlier sample.
        share: position of the job among all, 0 to 1.
    """
    counts = [(bound, bounds[bound] - before.get(bound, 0.0)) for bound in sorted(bounds)]
    total = counts[-1][1] if counts else 0.0
    return next((bound for bound, count in counts if total > 0 and count >= share * total), None)
