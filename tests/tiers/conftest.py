"""Valkey servers for tests: one for a module, and one for a single test that may break it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from examples.valkey_server import ValkeyServer, serving


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    """A server that all tests of a module share, and leave in order."""
    with serving() as running:
        yield running


@pytest.fixture
def own_server() -> Iterator[ValkeyServer]:
    """A server for this test alone, which may kill it."""
    with serving() as running:
        yield running
