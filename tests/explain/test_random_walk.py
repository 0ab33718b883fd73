"""Planted causes are found: at least 99.9% of the tokens, each token once."""

from __future__ import annotations

import pytest

from tests.explain.walk import right_share

REQUESTS = 50
"""Requests of one walk, which share an explainer."""


def test_the_causes_of_2000_requests_are_found() -> None:
    assert right_share(range(40), REQUESTS) >= 0.999


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_causes_of_100000_requests_are_found() -> None:
    assert right_share(range(1000, 3000), REQUESTS) >= 0.999
