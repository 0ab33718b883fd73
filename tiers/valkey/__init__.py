"""A memory pool on a Valkey or Redis server, shared by many engines."""

from tiers.valkey.tier import VALKEY_TIER, ValkeyOptions

__all__ = ["VALKEY_TIER", "ValkeyOptions"]
