"""Two machines, as processes, that load each other's blocks from one server."""

from __future__ import annotations

from pathlib import Path

from examples.valkey_server import ValkeyServer
from tests.tiers.machines import machine

COUNT = 24


def test_two_machines_load_each_others_blocks(own_server: ValkeyServer, tmp_path: Path) -> None:
    tier = {"type": "valkey", "url": own_server.url}
    with machine(tmp_path / "one.yaml", tier, "store", COUNT) as stored:
        assert stored == COUNT
        with machine(tmp_path / "two.yaml", tier, "load", COUNT + 8) as loaded:
            assert loaded == COUNT
