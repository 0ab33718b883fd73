"""The object store tier: blocks in a bucket of any cloud, shared by many engines.

One store serves all clouds; :mod:`tiers.object.cloud` is the contract of their back ends.
"""

from tiers.object.definition import OBJECT_TIER, S3_TIER
from tiers.object.options import ObjectOptions, S3Options, small_block_warning

__all__ = ["OBJECT_TIER", "S3_TIER", "ObjectOptions", "S3Options", "small_block_warning"]
