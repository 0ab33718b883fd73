"""Tiers of object stores for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import pytest

from tests.fake_s3 import FakeS3
from tests.patience import PATIENT
from tiering.api.namespace import Namespace
from tiering.testing.tier_rig import TierRig
from tiers.object import S3_TIER, S3Options
from tiers.object.definition import ObjectTier

BLOCK_BYTES = 64 << 10
FAST: Mapping[str, object] = {
    "breaker": {"failures": 2, "probe_after": "10ms", "probe_max": "50ms"},
    "retries": {"attempts": 3, "backoff": "1ms"},
    "absent_ttl": "20ms",
    **PATIENT,
}
"""Options with which a tier notices the end of an outage at once."""

Make: TypeAlias = Callable[..., TierRig]
"""Function that returns an unopened tier; takes options, and the class of the rig as ``kind``."""


def make_rig(fake: FakeS3, kind: type[TierRig] = TierRig, **words: object) -> TierRig:
    """Return an unopened tier on the fake server; ``words`` are options."""
    chosen = {"bucket": fake.bucket, "endpoint_url": fake.endpoint, "prefix": "prod", **FAST, **words}
    return kind(lambda context: S3_TIER.build(S3Options.model_validate(chosen), context), group_bytes=(BLOCK_BYTES,))


def tier_of(rig: TierRig) -> ObjectTier:
    """Return the rig's tier."""
    if not isinstance(rig.tier, ObjectTier):
        raise TypeError(f"{rig.tier} is no object store tier")
    return rig.tier


def namespace_of(rig: TierRig) -> Namespace:
    """Return the namespace in the epoch that the rig's tier is in."""
    namespace = tier_of(rig).namespace
    if namespace is None:
        raise RuntimeError("the tier is in no epoch")
    return namespace


def look_for_epoch(rig: TierRig) -> None:
    """Make the tier's next look for a new common epoch due now."""
    tier_of(rig)._life._watch.due = 0.0


def block_names(fake: FakeS3) -> list[str]:
    """Return the names of all block objects on the server."""
    return fake.names("/blocks/")


def lines(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    """Return the log lines that contain ``part``."""
    return [record.getMessage() for record in caplog.records if part in record.getMessage()]
