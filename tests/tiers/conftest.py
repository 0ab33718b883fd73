"""Servers that all tests of a module share, and one for a single test that may break it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from examples.valkey_server import ValkeyServer, serving
from tests.servers import Bucket, Endpoint
from tests.tiers.object.suites import BUCKET, Serve, Start


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    """A server that all tests of a module share, and leave in order."""
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def started() -> Iterator[Start]:
    """Function that returns a running service and a bucket, which all tests of a module share."""
    with ExitStack() as stack:

        @cache
        def start(serve: Serve) -> tuple[Endpoint, Bucket]:
            endpoint = stack.enter_context(serve())
            bucket = endpoint.make_bucket(BUCKET)
            stack.callback(bucket.close)
            return endpoint, bucket

        yield start


@pytest.fixture
def own_server() -> Iterator[ValkeyServer]:
    """A server for this test alone, which may kill it."""
    with serving() as running:
        yield running
