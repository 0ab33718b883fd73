"""The cached prompt tokens by tier, for each request's response and as counters per tenant.

Planned are the tokens that the engine counts as cached when it first schedules a request. Arrived are those of them
whose load did not fail. Tokens that a preempted request finds or loads again count no more. A load that fails from some
token on takes the tokens of the slowest tiers first, because these lie behind the others in nearly all prompts.

A tenant is a cache salt. It is named by a keyed hash, so that the names in metrics do not show the salts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from tiering.api.keys import PRIMARY_TIER

MOST_TENANTS = 64
"""Largest number of tenants with counters of their own."""

ENGINE = "engine"
"""Name of the engine's own prefix cache among the tiers."""

NO_TENANT, OTHERS = "none", "other"
"""Name of requests without a salt, and of the tenants beyond the largest number."""


@dataclass(slots=True, eq=False)
class Cached:
    """The cached tokens of one request, as planned when it first got GPU blocks."""

    tiers: dict[str, int]
    """Tokens by name of the tier, fastest first."""
    generation: int
    """Generation of the request (:attr:`~tiering.connector.requests.RequestState.generation`)."""
    filled: int = field(init=False)
    """Leading tokens of the prompt whose load has not failed, at most the planned ones."""

    def __post_init__(self) -> None:
        self.filled = sum(self.tiers.values())

    def load_failed(self, invalid_from: int, generation: int) -> None:
        """Note that a load of a generation did not fill the tokens from ``invalid_from`` on."""
        if generation == self.generation:
            self.filled = min(self.filled, invalid_from)

    def arrived(self) -> dict[str, int]:
        """Return the tokens by name of the tier whose load did not fail."""
        left, tiers = self.filled, dict[str, int]()
        for name, tokens in self.tiers.items():
            tiers[name] = min(left, tokens)
            left -= tiers[name]
        return tiers


def planned(found: int, external: int, promoted: Mapping[str, int]) -> dict[str, int]:
    """Return the tokens of one request by tier.

    Args:
        found: tokens that the engine's own cache holds.
        external: tokens that are loaded.
        promoted: those of them that secondary tiers held, by name; they may count a block that is loaded in part.
    """
    tiers, left = {ENGINE: found, PRIMARY_TIER: 0}, external
    for name, tokens in promoted.items():
        tiers[name] = min(left, tokens)
        left -= tiers[name]
    tiers[PRIMARY_TIER] = left
    return tiers


class CachedTokens:
    """The counters of one engine.

    Args:
        key: key of the hashes that name the tenants, 64 bytes at most.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._tenants: set[str] = set()
        self._totals: dict[str, dict[str, int]] = {}

    def count(self, cached: Cached, salt: str | None) -> dict[str, Any]:
        """Count the tokens of a request that has ended, and return what its response reports.

        Args:
            cached: the tokens.
            salt: cache salt of the request; None: it has none.
        """
        tenant, arrived = self._tenant(salt), cached.arrived()
        for tier, tokens in cached.tiers.items():
            if tokens:
                totals = self._totals.setdefault(f"{tenant} {tier}", {"cached_tokens": 0, "cached_tokens_arrived": 0})
                totals["cached_tokens"] += tokens
                totals["cached_tokens_arrived"] += arrived[tier]
        by_tier = {tier: tokens for tier, tokens in cached.tiers.items() if tokens}
        return {
            "cached_tokens": sum(by_tier.values()),
            "arrived_tokens": cached.filled,
            "cached_tokens_by_tier": by_tier,
        }

    def totals(self) -> dict[str, dict[str, int]]:
        """Return the counters; each name has a tenant and a tier, with a space in between."""
        return {name: dict(counters) for name, counters in self._totals.items()}

    def _tenant(self, salt: str | None) -> str:
        if not salt:
            return NO_TENANT
        name = blake2b(salt.encode("utf-8", "surrogatepass"), key=self._key, digest_size=6).hexdigest()
        if name not in self._tenants and len(self._tenants) < MOST_TENANTS:
            self._tenants.add(name)
        return name if name in self._tenants else OTHERS
