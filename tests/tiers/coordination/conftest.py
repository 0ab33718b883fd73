"""A bucket, a server that coordinates, and machines that share both."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from examples.valkey_server import ValkeyServer
from tests.fake_s3 import FakeS3
from tests.tiers.coordination.fleet import Fleet
from tiering.testing.tier_rig import PATIENCE_SECONDS
from tiers.coordination import coordinated, coordination
from tiers.valkey.client import ServerAddress, ValkeyClient


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for an answer of the server for as long as it takes on a busy machine.

    Otherwise machines do without a server that is slow, and stores begin without an answer to their claims.
    """
    monkeypatch.setattr(coordination, "TIMEOUT_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(coordinated, "CLAIM_SECONDS", PATIENCE_SECONDS)


@pytest.fixture
def client(server: ValkeyServer) -> Iterator[ValkeyClient]:
    """Connections to the shared server, which is empty."""
    connected = ValkeyClient(ServerAddress.parse(server.url), connect_timeout=10.0, timeout=10.0)
    connected.call("FLUSHALL")
    yield connected
    connected.close()


@pytest.fixture
def fleet(bucket: FakeS3, server: ValkeyServer, client: ValkeyClient) -> Iterator[Fleet]:
    """Machines on the bucket that the shared server coordinates."""
    with Fleet(bucket, server).running() as machines:
        yield machines


@pytest.fixture
def own_fleet(bucket: FakeS3, own_server: ValkeyServer) -> Iterator[Fleet]:
    """Machines on the bucket, with a server that the test may kill."""
    with Fleet(bucket, own_server).running() as machines:
        yield machines
