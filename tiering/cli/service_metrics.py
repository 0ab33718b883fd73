"""The Prometheus endpoint of a machine's service: counts of it, of its tiers, and of each engine."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

from tiering.api.metric import Metric, MetricKind
from tiering.connector.metrics import ENGINES, METRICS, SERVICE, TIERS
from tiering.errors import ConfigError
from tiering.machine.counts import ServiceLook
from tiering.secondary.tier_stats import JOB_LATENCY_BUCKETS, TierStats

_log = logging.getLogger("kv_tiering.machine")

LOOK_SECONDS = 1.0
"""Seconds within which the service's thread must state its counts."""

IDLE_SECONDS = 5.0
"""Seconds for which a client of the endpoint may send nothing."""

_ADDRESS = re.compile(r"(?P<host>[\w.-]+|\[[\da-fA-F:]+\]):(?P<port>\d{1,5})", re.ASCII)
_OF_TIERS = ("namespace", "tier")


class ServiceCollector:
    """The metrics of a service, as prometheus_client collects them.

    Tiers have the names that engines give their metrics, so that a question about a tier has one answer.

    Args:
        look: function that returns the counts, within the seconds that it is given.
    """

    def __init__(self, look: Callable[[float], ServiceLook]) -> None:
        self._look = look

    def collect(self) -> Iterator[Any]:
        """Yield the metrics of this moment."""
        look = self._look(LOOK_SECONDS)
        for metric in METRICS:
            if metric.record == SERVICE:
                yield _family(metric, (), {(): look.service})
            elif metric.record == ENGINES:
                yield _family(metric, metric.labels, look.engines)
            elif metric.record == TIERS and metric.field in TierStats.__dataclass_fields__:
                yield _family(metric, _OF_TIERS, look.tiers)


def _family(metric: Metric, labels: Sequence[str], counts: Mapping[Any, object]) -> Any:
    """Return a metric with the field of ``counts``, which are given by the values of ``labels``."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    kinds = {
        MetricKind.COUNTER: CounterMetricFamily,
        MetricKind.GAUGE: GaugeMetricFamily,
        MetricKind.HISTOGRAM: HistogramMetricFamily,
    }
    family: Any = kinds[metric.kind](metric.name, metric.meaning, labels=labels)
    for values, record in counts.items():
        value = getattr(record, metric.field)
        if metric.kind is MetricKind.HISTOGRAM:
            bounds = [*map(str, JOB_LATENCY_BUCKETS), "+Inf"]
            buckets = list(zip(bounds, accumulate(value), strict=True))
            family.add_metric(values, buckets, getattr(record, f"{metric.field}_sum"))
        else:
            family.add_metric(values, value)
    return family


@contextmanager
def endpoint(address: str, look: Callable[[float], ServiceLook]) -> Iterator[int]:
    """Serve the metrics at ``address``, and yield the port.

    Args:
        address: host and port, like ``127.0.0.1:9400``; port 0 is a free one.
        look: as in :class:`ServiceCollector`.

    Raises:
        ConfigError: the address is none or cannot be listened on.
    """
    from prometheus_client import CollectorRegistry, start_http_server

    found = _ADDRESS.fullmatch(address)
    if found is None or int(found["port"]) >= 1 << 16:
        raise ConfigError(f"--metrics: {address!r} is no address; write it like 127.0.0.1:9400")
    registry = CollectorRegistry()
    registry.register(ServiceCollector(look))
    try:
        server, thread = start_http_server(int(found["port"]), found["host"].strip("[]"), registry)
    except OSError as error:
        raise ConfigError(f"--metrics: {address} cannot be listened on: {error.strerror or error}") from error
    # A client that sends nothing does not keep its thread.
    answering: Any = server
    answering.handle_error = lambda *_: _log.debug("a client of the metrics has gone", exc_info=True)
    handler: Any = server.RequestHandlerClass
    server.RequestHandlerClass = type("Handler", (handler,), {"timeout": IDLE_SECONDS})
    try:
        yield int(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
