"""A memory pool on a Valkey or Redis server, shared by many engines."""

from tiers.valkey.definition import VALKEY_TIER
from tiers.valkey.valkey_options import ValkeyOptions

__all__ = ["VALKEY_TIER", "ValkeyOptions"]
