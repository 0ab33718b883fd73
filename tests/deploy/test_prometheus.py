"""The dashboard and the alerts on a real Prometheus, which scrapes an engine, well and in trouble."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.mini_engine import Engine
from examples.mini_engine.metrics import metrics_endpoint
from tests.deploy.prometheus import UNMEASURED, empty, expressions, prometheus
from tests.mini_engine.chaos_tier import ChaosTier
from tests.mini_engine.helpers import ask_all, one_row, options, prompt
from tests.patience import PATIENT
from tests.servers import moto_server
from tiering.cli.metrics import fetch, parse
from tiering.testing.chaos import Fault
from tiering.testing.clock import until

PROMPTS = [prompt(seed, 100) for seed in range(6)]
BUCKET = "metrics"


class Driver:
    """Asks an engine its prompts again and again, so that every scrape finds something new."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.rounds = 0

    def ask(self) -> None:
        """Ask known prompts, which are loaded, and a new one, which is stored."""
        self.rounds += 1
        prompts = [*PROMPTS, prompt(1000 + self.rounds, 100)]
        ask_all(self.engine, prompts, f"round {self.rounds}", max_tokens=1, at_once=3)

    def until(self, holds: Callable[[], bool], timeout: float = 120.0) -> bool:
        """Ask until ``holds()``."""

        def asked() -> bool:
            self.ask()
            return holds()

        return until(asked, timeout)


def test_every_expression_has_a_value_and_no_alert_fires_while_an_engine_runs_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with moto_server() as s3:
        for name, value in s3.environment().items():
            monkeypatch.setenv(name, value)
        s3.make_bucket(BUCKET)
        disk = {"type": "local", "path": str(tmp_path / "disk"), "capacity": "64MiB", "durability": "none"}
        bucket = {"type": "s3", "bucket": BUCKET, "endpoint_url": s3.endpoint, **PATIENT}
        explain = {"socket": str(tmp_path / "why.sock")}
        stack: dict[str, Any] = {"primary": {"capacity": 64 * one_row()}, "secondary": [disk, bucket]}
        with (
            Engine(options(stack=stack | {"explain": explain, "report_cached": True})) as engine,
            metrics_endpoint(engine) as url,
            prometheus(url, tmp_path) as server,
        ):
            driver, named = Driver(engine), expressions("1m")
            driver.ask()
            engine.settle()
            assert driver.until(lambda: set(empty(server, named)) == UNMEASURED), empty(server, named)
            assert server.broken_rules() == {}
            assert server.firing() == set()
            sample = parse(fetch(url, 5.0), 0.0)
            hits = {tier: values["hits"] for tier, values in sample.tiers.items()}
            assert until(lambda: server.values("kv_tiering_hits_total", "tier") == hits)
            assert hits.keys() == {"cpu", "local", "s3"}


@pytest.mark.timeout(600)  # on a machine that does other work, rounds take long
def test_faults_that_are_provoked_fire_their_alerts_and_no_others(tmp_path: Path) -> None:
    chaos_type = "tests.mini_engine.chaos_tier:CHAOS_TIER"
    common = {"type": chaos_type, "seed": 0, "capacity": "1GiB"}  # never full, however many rounds a fast machine makes
    broken = {
        **common,
        "breaker": {"failures": 3, "probe_after": "50ms", "probe_max": "100ms"},
        "retries": {"attempts": 1},
    }
    # Ten blocks a second, fewer than any machine computes.
    narrow = {**common, "name": "narrow", "puts": {"DELAY": 1.0}, "delay": 0.1, "max_inflight": 1}
    stack: dict[str, Any] = {"primary": {"capacity": 64 * one_row()}, "secondary": [broken, narrow]}
    with Engine(options(stack=stack)) as engine, metrics_endpoint(engine) as url, prometheus(url, tmp_path) as server:
        driver, expected = Driver(engine), {"KVTieringStoresDropped"}
        chaos = ChaosTier.built["CHAOS_TIER"].chaos
        assert driver.until(lambda: server.values("kv_tiering_promotions_total", "tier").get("CHAOS_TIER", 0) > 100)
        assert driver.until(lambda: expected == server.firing()), server.firing()

        expected.add("KVTieringCorruptBlocks")
        chaos.inject(Fault.BIT_FLIP, gets=1)
        assert driver.until(lambda: expected <= server.firing()), server.firing()
        assert server.firing() == expected

        while_open = {"KVTieringBreakerOpen", "KVTieringTierOutOfService"}
        chaos.inject(Fault.PERMANENT, gets=100_000)
        assert driver.until(lambda: while_open <= server.firing()), server.firing()
        # Requests start over while promotions fail, so that stores may find no row in a tier of 64.
        assert server.firing() - expected - while_open <= {"KVTieringPromotionsFailing", "KVTieringNoRoomInCPUTier"}
        chaos.heal()
        assert driver.until(lambda: not while_open & server.firing()), server.firing()
        assert server.broken_rules() == {}
