"""Deadlines of tiers in tests, which a busy machine meets as well."""

from __future__ import annotations

from collections.abc import Mapping

from tiering.testing.tier_rig import PATIENCE_SECONDS

PATIENT: Mapping[str, float] = {"lookup_deadline": PATIENCE_SECONDS, "load_deadline": PATIENCE_SECONDS}
"""Options of a tier on a shared medium whose lookups and loads wait for the medium.

By default, an answer that takes longer than 0.1 to 2 seconds is a miss.
"""
