"""Mooncake pools for tests: one for a module, and one for a single test that may break it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from examples.mooncake_pool import Master, Owner, serving
from tests.tiers.mooncake.pool import Raw

# Mooncake reads these settings once, when the first client of the process is made.
for _name, _value in (
    ("MC_RPC_TIMEOUT_MS", "1000"),
    ("MC_TCP_PROGRESS_TIMEOUT_SEC", "1"),
    ("MC_TCP_STATUS_TIMEOUT_SEC", "1"),
):
    os.environ.setdefault(_name, _value)


@pytest.fixture(scope="module")
def pool() -> Iterator[Master]:
    """A master with one owner of memory, which all tests of a module share and leave in order."""
    with serving() as (master, _):
        yield master


@pytest.fixture(scope="module")
def raw(pool: Master) -> Iterator[Raw]:
    """Access to the pool that does not go through the tier."""
    access = Raw(pool)
    yield access
    access.close()


@pytest.fixture
def own_pool() -> Iterator[tuple[Master, Owner]]:
    """A pool for this test alone, which may kill its processes."""
    with serving() as processes:
        yield processes
