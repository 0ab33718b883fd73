"""The conformance suite of tiers on a bucket whose machines are coordinated."""

from __future__ import annotations

import pytest

from examples.valkey_server import ValkeyServer
from tests.servers import moto_server
from tests.tiers.object.suites import FleetSuite
from tiering.testing.tier_tests import K


class TestCoordinatedTierOnMoto(FleetSuite):
    serve = staticmethod(moto_server)

    @pytest.fixture(autouse=True)
    def _coordinated(self, _medium: None, server: ValkeyServer) -> None:
        self.options = self.options.model_copy(update={"coordination": server.url})

    @pytest.mark.usefixtures("patience")
    def test_one_engine_loads_what_another_has_stored(self) -> None:
        """The directory denies a block until its upload was told; a notice then corrects the miss."""
        self.options = self.options.model_copy(update={"absent_ttl": 3600.0})
        one, two = self.make_rig().open(), self.make_rig().open()
        try:
            one.store(K[:6])
            two.wait(lambda: two.lookup(K[:8]) == 6)
            assert two.load(K[:6]) == K[:6]
        finally:
            one.close()
            two.close()
