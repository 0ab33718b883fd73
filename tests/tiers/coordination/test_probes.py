"""The check of a tier that a server coordinates: what it finds, and what it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from examples.valkey_server import ValkeyServer
from tests.cli.runner import kv_tiering
from tests.fake_s3 import FakeS3
from tests.tiers.coordination.fleet import Fleet, ready
from tests.tiers.valkey.tls import tls_in_front_of
from tiering.admin.records import Finding, Severity
from tiering.testing.tier_tests import K
from tiers.coordination import coordination
from tiers.coordination.probes import (
    GRANTS,
    MEMORY,
    PATTERNS,
    PERMISSIONS,
    SERVER,
    VERSION,
    memory_findings,
    probe_coordination,
    version_findings,
)
from tiers.object.bucket_options import S3Options
from tiers.valkey.client import ServerAddress, ValkeyClient

FLEET_DOC = Path(__file__).parents[3] / "docs" / "fleet.md"


def probe(url: str) -> dict[str, Finding]:
    return {finding.subject: finding for finding in probe_coordination(ServerAddress.parse(url))}


def as_user(server: ValkeyServer, client: ValkeyClient, monkeypatch: pytest.MonkeyPatch, *rules: str) -> str:
    """Make the server's user "engine" with these rules, and return the address."""
    client.call("ACL", "SETUSER", "engine", "reset", "on", ">swordfish", *rules)
    monkeypatch.setenv("VALKEY_PASSWORD", "swordfish")
    return server.url.replace("valkey://", "valkey://engine@")


def test_a_server_in_order_is_found_in_order_and_keeps_no_key(server: ValkeyServer, client: ValkeyClient) -> None:
    client.call("CONFIG", "SET", "maxmemory", "64mb", "maxmemory-policy", "volatile-ttl")
    found = probe(server.url)
    client.call("CONFIG", "SET", "maxmemory", "0")
    assert {subject: finding.severity for subject, finding in found.items()} == dict.fromkeys(
        (SERVER, VERSION, MEMORY, PERMISSIONS), Severity.OK
    )
    assert client.call("KEYS", "*") == []


def test_a_server_whose_certificate_an_authority_of_ones_own_has_signed_is_reached_with_its_file(
    fleet: Fleet, server: ValkeyServer, tmp_path: Path
) -> None:
    with tls_in_front_of(server.port, tmp_path) as (port, ca_file):
        address = f"valkeys://localhost:{port}"
        (refused,) = probe_coordination(ServerAddress.parse(address))
        assert (refused.subject, refused.severity) == (SERVER, Severity.WARNING)
        assert "coordination_ca_file" in (refused.remedy or "")
        accepted = next(probe_coordination(ServerAddress.parse(address), ca_file))
        assert accepted.severity is Severity.OK
        trusting = fleet.machine(whole=False, coordination=address, coordination_ca_file=str(ca_file))
        trusting.wait(lambda: ready(trusting))
        doubting = fleet.machine(whole=False, coordination=address)
        assert doubting.store(K[:2]) == K[:2]
        assert not ready(doubting)
        for machine in (trusting, doubting):
            assert machine.close()


def test_an_authority_without_tls_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    path.write_text("")
    for address in (None, "valkey://host"):
        with pytest.raises(ValueError, match="coordination_ca_file needs"):
            S3Options.model_validate({"bucket": "kv-cache", "coordination": address, "coordination_ca_file": str(path)})


def test_the_command_reports_the_server_and_a_stack_without_it_still_passes(
    bucket: FakeS3, own_server: ValkeyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "stack.yaml"
    tier = {"type": "s3", "bucket": bucket.bucket, "endpoint_url": bucket.endpoint, "coordination": own_server.url}
    path.write_text(yaml.safe_dump({"primary": {"capacity": "8MiB"}, "secondary": [tier]}))

    def check() -> tuple[int, dict[str, dict[str, str]]]:
        done = kv_tiering("check", path, "--tier", "s3", "--json", "--block-bytes", "64KiB")
        return done.code, {item["subject"]: item for item in json.loads(done.out)["findings"]}

    server = ValkeyClient(ServerAddress.parse(own_server.url), connect_timeout=10.0, timeout=10.0)
    code, found = check()
    assert (code, found[SERVER]["severity"], found[PERMISSIONS]["severity"]) == (0, "ok", "ok")
    assert found["round trip"]["severity"] == "ok"
    assert server.call("KEYS", "*") == []
    server.call("CONFIG", "SET", "requirepass", "swordfish")
    server.close()
    for password in (None, "salmon"):
        if password is not None:
            monkeypatch.setenv("VALKEY_PASSWORD", password)
        code, found = check()
        assert (code, found[SERVER]["severity"], PERMISSIONS in found) == (0, "warning", False)
        assert "wrong user or password" in found[SERVER]["text"]
        assert "VALKEY_PASSWORD" in found[SERVER]["remedy"]
    own_server.kill()
    code, found = check()
    assert (code, found[SERVER]["severity"], found["round trip"]["severity"]) == (0, "warning", "ok")
    assert "no connection" in found[SERVER]["text"]
    assert "start the server" in found[SERVER]["remedy"]


def test_the_documented_permissions_suffice(
    server: ValkeyServer, client: ValkeyClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert GRANTS in " ".join(FLEET_DOC.read_text().split())
    found = probe(as_user(server, client, monkeypatch, *PATTERNS.split(), *GRANTS.split()))
    assert found[PERMISSIONS].severity is Severity.OK
    assert (found[VERSION].severity, "INFO" in found[VERSION].remedy) == (Severity.INFO, True)
    assert client.call("KEYS", "*") == []


@pytest.mark.parametrize("missing", [*GRANTS.split(), *PATTERNS.split()])
def test_each_missing_permission_is_found(
    missing: str, server: ValkeyServer, client: ValkeyClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = [rule for rule in (*PATTERNS.split(), *GRANTS.split()) if rule != missing]
    found = probe(as_user(server, client, monkeypatch, *rules))
    finding = found[SERVER if missing == "+ping" else PERMISSIONS]
    assert finding.severity is Severity.WARNING
    assert "no permission" in finding.text
    assert "access list" in finding.remedy or missing in finding.remedy


@pytest.mark.parametrize(
    ("maxmemory", "policy", "severity", "part"),
    [
        ("0", "noeviction", Severity.INFO, "no maxmemory"),
        ("67108864", "noeviction", Severity.WARNING, "evicts nothing"),
        ("67108864", "allkeys-lru", Severity.WARNING, "may evict the directory"),
        ("67108864", "volatile-random", Severity.WARNING, "may evict the directory"),
        ("67108864", "volatile-lru", Severity.OK, "volatile-lru"),
    ],
)
def test_memory_and_eviction(maxmemory: str, policy: str, severity: Severity, part: str) -> None:
    (found,) = memory_findings({"maxmemory": maxmemory, "maxmemory_policy": policy, "used_memory": "1048576"})
    assert (found.severity, part in found.text) == (severity, True)
    assert bool(found.remedy) == (severity is not Severity.OK)


@pytest.mark.parametrize(
    ("facts", "severity", "part"),
    [
        ({"redis_version": "4.0.14"}, Severity.WARNING, "too old"),
        ({"redis_version": "7.2.4", "role": "slave"}, Severity.WARNING, "replica"),
        ({"redis_version": "7.2.4", "cluster_enabled": "1"}, Severity.WARNING, "cluster"),
        ({"redis_version": "10.0.1"}, Severity.OK, "redis 10.0.1"),
        ({"redis_version": "7.2.4", "valkey_version": "9.0.1"}, Severity.OK, "valkey 9.0.1"),
    ],
)
def test_version_and_role(facts: dict[str, str], severity: Severity, part: str) -> None:
    (found,) = version_findings(facts)
    assert (found.severity, part in found.text) == (severity, True)


def test_a_server_that_is_too_slow_for_engines_is_named(
    server: ValkeyServer, client: ValkeyClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordination, "TIMEOUT_SECONDS", 0.0)
    assert probe(server.url)[SERVER].severity is Severity.WARNING
