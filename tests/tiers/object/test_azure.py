"""The object tier on Azure Blob Storage: the conformance suites on Azurite, and what only Azure has."""

from __future__ import annotations

import pytest

from tests.servers import azurite
from tests.tiers.object.suites import FleetSuite, RealStoreSuite


@pytest.mark.azurite
class TestStoreOnAzurite(RealStoreSuite):
    serve = staticmethod(azurite)


@pytest.mark.azurite
class TestTierOnAzurite(FleetSuite):
    serve = staticmethod(azurite)
