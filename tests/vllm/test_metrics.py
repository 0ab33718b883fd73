"""The dashboard and the alerts on a real Prometheus that scrapes vLLM's server."""

from __future__ import annotations

from pathlib import Path

from tests.deploy.observed import needs
from tests.deploy.prometheus import UNMEASURED, empty, expressions, prometheus
from tests.vllm.rig import BLOCK_BYTES, prompt
from tests.vllm.server import serve
from tiering.testing.clock import until

PROMPTS = [prompt(seed) for seed in range(6)]
"""More than the GPU's blocks and the CPU tier hold."""

WITHOUT_VALUE = UNMEASURED | {"Cost of requests, dollars a day: {{tier}}"}
"""Expressions that are rightly without a value: a stack without an object store costs nothing."""


def test_every_expression_has_a_value_and_no_alert_fires_while_vllm_runs_well(llama: Path, tmp_path: Path) -> None:
    needs("prometheus")  # before the server, whose start takes a while
    tier = {"type": "local", "path": str(tmp_path / "disk"), "capacity": "64MiB", "durability": "none"}
    explain = {"socket": str(tmp_path / "why.sock")}
    stack = {"primary": {"capacity": 24 * BLOCK_BYTES}, "secondary": [tier], "explain": explain, "report_cached": True}
    (tmp_path / "prometheus").mkdir()
    with serve(llama, stack, tmp_path / "log") as server:
        address = f"http://127.0.0.1:{server.port}/metrics"
        with prometheus(address, tmp_path / "prometheus") as observer:
            named, rounds = expressions("1m"), 0

            def asked() -> bool:
                """Load from the disk, store anew, and load from the CPU tier."""
                nonlocal rounds
                rounds += 1
                for tokens in (*PROMPTS, prompt(1000 + rounds), PROMPTS[0]):
                    server.ask([tokens], 1)
                server.reset()
                server.ask([PROMPTS[0]], 1)
                return set(empty(observer, named)) == WITHOUT_VALUE

            assert until(asked, 60), empty(observer, named)
            assert observer.broken_rules() == {}
            assert observer.firing() == set()
