"""A real Prometheus for tests: on loopback, in its own directory, with the alert rules of ``deploy/``."""

from __future__ import annotations

import json
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from tests.deploy.observed import ALERTS, CONFIG, filled, needs, queries, rules, series_in
from tiering.testing.clock import until

SCRAPE = "250ms"
"""Interval between two scrapes, and between two evaluations of the rules."""

_START_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running Prometheus."""

    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an expression's present value."""
        found: list[dict[str, Any]] = self._call("query", query=expression)["result"]
        return found

    def value(self, expression: str) -> float | None:
        """Return the value of an expression with one series; None if it has none."""
        found = self.query(expression)
        return float(found[0]["value"][1]) if found else None

    def values(self, name: str, label: str) -> dict[str, float]:
        """Return the values of a metric's series by one of their labels."""
        return {series["metric"][label]: float(series["value"][1]) for series in self.query(name)}

    def firing(self) -> set[str]:
        """Return the names of the alerts that fire."""
        return {alert["labels"]["alertname"] for alert in self._call("alerts")["alerts"] if alert["state"] == "firing"}

    def broken_rules(self) -> dict[str, str]:
        """Return the error of each rule whose evaluation failed, by the rule's name."""
        groups = self._call("rules")["groups"]
        return {rule["name"]: rule["lastError"] for group in groups for rule in group["rules"] if rule.get("lastError")}

    def _call(self, path: str, **words: str) -> dict[str, Any]:
        data = urllib.parse.urlencode(words).encode() or None
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}", data, timeout=10) as reply:
                found: dict[str, Any] = json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{words}: {error.read().decode()}") from error
        return found


@contextmanager
def prometheus(metrics: str, directory: Path) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes the address ``metrics``; skip the test where none is installed.

    The configuration is that of ``deploy/``, with another target and short intervals. The rules have no ``for``, so
    that a test needs to wait for no minutes.
    """
    program, address = needs("prometheus"), urlsplit(metrics)
    config = yaml.safe_load(CONFIG.read_text())
    config["global"] = {"scrape_interval": SCRAPE, "scrape_timeout": SCRAPE, "evaluation_interval": SCRAPE}
    config["scrape_configs"][0] |= {"static_configs": [{"targets": [address.netloc]}], "metrics_path": address.path}
    alerts = yaml.safe_load(ALERTS.read_text())
    for group in alerts["groups"]:
        for rule in group["rules"]:
            rule.pop("for", None)
    (directory / "alerts.yaml").write_text(yaml.safe_dump(alerts))
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        program,
        f"--config.file={directory / 'prometheus.yaml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    server = Prometheus(f"http://127.0.0.1:{port}")
    try:
        assert until(lambda: _is_ready(server, process, directory / "log"), _START_SECONDS), (
            "Prometheus does not answer"
        )
        yield server
    finally:
        process.terminate()
        process.wait(20)


def _is_ready(server: Prometheus, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    try:
        with urllib.request.urlopen(f"{server.url}/-/ready", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def expressions(window: str) -> dict[str, str]:
    """Return every expression of the dashboard and of the alert rules, by a name for people.

    A rule's expression is that on the left of its last comparison, which has a value while all is well.
    """
    found = [(f"{query.panel}: {query.legend}", filled(query.expression, window)) for query in queries()]
    shown = dict(found)
    assert len(shown) == len(found), "titles tell panels apart"
    alerts = {rule.name: measured(rule.expression) for rule in rules()}
    return shown | alerts


def measured(expression: str) -> str:
    """Return a rule's expression without its comparisons with numbers."""
    for operator in (
        " > 0.1",
        " > 0.05",
        " > 50",
        " > 100",
        " > 10",
        " > 3",
        " > 0",
        " == 0",
        " == 1",
        " == 2",
        " < 600",
    ):
        expression = expression.replace(operator, "")
    return expression


def empty(server: Prometheus, named: dict[str, str]) -> list[str]:
    """Return the names of the expressions that have no value."""
    return sorted(name for name, expression in named.items() if not server.query(expression))


def _of_service(expression: str) -> bool:
    return all(series.startswith(("kv_tiering_service_", "kv_tiering_engine_")) for series in series_in(expression))


UNMEASURED = {f"Measured worth: {{{{tier}}}} {word}" for word in ("prefill", "prefill ±", "waiting", "waiting ±", "N")}
UNMEASURED |= {name for name, expression in expressions("1m").items() if _of_service(expression)}
"""Expressions without a value at an engine that always loads; a service has an endpoint of its own."""
