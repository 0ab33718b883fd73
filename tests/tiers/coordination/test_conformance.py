"""The conformance suite of tiers on a bucket whose machines are coordinated."""

from __future__ import annotations

import pytest

from examples.valkey_server import ValkeyServer
from tests.servers import moto_server
from tests.tiers.object.suites import FleetSuite


class TestCoordinatedTierOnMoto(FleetSuite):
    serve = staticmethod(moto_server)

    @pytest.fixture(autouse=True)
    def _coordinated(self, _medium: None, server: ValkeyServer) -> None:
        self.options = self.options.model_copy(update={"coordination": server.url})
