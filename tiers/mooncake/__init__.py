"""A memory pool by Mooncake Store: the memory of many machines, shared by their engines."""

from tiers.mooncake.definition import MOONCAKE_TIER
from tiers.mooncake.mooncake_options import MooncakeOptions

__all__ = ["MOONCAKE_TIER", "MooncakeOptions"]
