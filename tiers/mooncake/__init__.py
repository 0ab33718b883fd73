"""A memory pool by Mooncake Store: the memory of many machines, shared by their engines."""

from tiers.mooncake.client import MooncakeOptions
from tiers.mooncake.tier import MOONCAKE_TIER

__all__ = ["MOONCAKE_TIER", "MooncakeOptions"]
