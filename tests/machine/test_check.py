"""``check`` on both sides of the service."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from tests.cli.runner import kv_tiering
from tests.machine.hosts import service_in_thread
from tiering.machine.peer_rows import PeerRows

MEMORY = {"type": "memory", "name": "local", "capacity": "16MiB"}


def findings(tmp_path: Path, *tiers: str) -> tuple[int, dict[str, dict[str, str]]]:
    stack = tmp_path / "engine.yaml"
    machine = {"socket": str(tmp_path / "cache.sock"), "tiers": list(tiers), "keep_rows": "peers" in tiers}
    stack.write_text(yaml.safe_dump({"primary": {"capacity": "64MiB"}, "machine": machine}))
    done = kv_tiering("check", stack, "--json", "--block-bytes", "64KiB")
    return done.code, {
        found["tier"]: found for found in json.loads(done.out)["findings"] if found["subject"] == "service"
    }


def test_a_service_that_answers_is_checked_by_name(tmp_path: Path) -> None:
    with service_in_thread(tmp_path / "cache.sock", MEMORY):
        code, found = findings(tmp_path, "local", "s3")
    assert code == 1
    assert found["local"]["severity"] == "ok"
    assert found["s3"]["severity"] == "error"
    assert "has no tier s3; it has local" in found["s3"]["text"]


def test_other_engines_rows_are_checked_as_a_tier(tmp_path: Path) -> None:
    with service_in_thread(tmp_path / "cache.sock", MEMORY, peers=PeerRows):
        code, found = findings(tmp_path, "peers", "local")
    assert code == 0
    assert found["peers"]["severity"] == "ok"


def test_a_service_that_is_away_is_a_warning(tmp_path: Path) -> None:
    code, found = findings(tmp_path, "local")
    assert code == 0
    assert found["local"]["severity"] == "warning"
    assert "start it with kv-tiering serve" in found["local"]["remedy"]


def test_what_is_stored_is_listed_from_the_stack_of_the_service(tmp_path: Path) -> None:
    findings(tmp_path, "local")
    done = kv_tiering("inspect", tmp_path / "engine.yaml")
    assert done.code == 1
    assert "give the command the service's stack instead" in done.out + done.err


def test_serve_refuses_the_stack_of_an_engine(tmp_path: Path) -> None:
    findings(tmp_path, "local")
    done = kv_tiering("serve", tmp_path / "engine.yaml", "--socket", tmp_path / "cache.sock")
    assert done.code == 2
    assert "belongs into the stacks of the engines" in done.err
