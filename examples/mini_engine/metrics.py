"""The engine's Prometheus endpoint: what any engine needs to export the metrics of the tiers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from examples.mini_engine.engine import Engine
from tiering.api.keys import PRIMARY_TIER
from tiering.connector.prometheus import MetricClasses, OffloadPromMetrics

LABELS = {0: ("mini", "0")}
"""Values of the labels ``model_name`` and ``engine``, as vLLM has them."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Silent(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def metrics_endpoint(engine: Engine, port: int = 0) -> Iterator[str]:
    """Serve the metrics of ``engine`` on 127.0.0.1, and yield the address of the endpoint.

    Args:
        engine: the engine, with tiers; its steps update the metrics.
        port: port on 127.0.0.1; 0 (default): a free one.

    Raises:
        ConfigError: prometheus_client is not installed.
        ValueError: the engine has no tiers.
    """
    if engine.tiers is None:
        raise ValueError("an engine without a stack has no metrics of tiers")
    registry = CollectorRegistry()
    engine.tiers.metrics = OffloadPromMetrics(
        MetricClasses.default(registry),
        ("model_name", "engine"),
        LABELS,
        tiers=(PRIMARY_TIER, *engine.tiers.secondary_stats()),
        has_manager=True,
    )
    server = make_server("127.0.0.1", port, make_wsgi_app(registry), _Server, _Silent)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, name="metrics")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        engine.tiers.metrics = None
        server.shutdown()
        server.server_close()
        thread.join()
