"""Tiers of object stores for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import pytest

from tests.fake_s3 import FakeS3
from tiering.testing.tier_rig import TierRig
from tiers.s3 import S3_TIER, S3Options

BLOCK_BYTES = 64 << 10
FAST: Mapping[str, object] = {
    "breaker": {"failures": 2, "probe_after": "10ms", "probe_max": "50ms"},
    "retries": {"attempts": 3, "backoff": "1ms"},
    "absent_ttl": "20ms",
}
"""Options with which a tier notices the end of trouble at once."""

Make: TypeAlias = Callable[..., TierRig]
"""Returns a tier that is not open yet; takes options, and the class of the rig as ``kind``."""


def make_rig(fake: FakeS3, kind: type[TierRig] = TierRig, **words: object) -> TierRig:
    """A tier on the fake server that is not open yet; ``words`` are options."""
    chosen = {"bucket": fake.bucket, "endpoint_url": fake.endpoint, "prefix": "prod", **FAST, **words}
    return kind(lambda context: S3_TIER.build(S3Options.model_validate(chosen), context), group_bytes=(BLOCK_BYTES,))


def block_names(fake: FakeS3) -> list[str]:
    """The names of all block objects on the server."""
    with fake.lock:
        return [name for name in fake.objects if "/blocks/" in name]


def lines(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    """The log lines that contain ``part``."""
    return [record.getMessage() for record in caplog.records if part in record.getMessage()]
