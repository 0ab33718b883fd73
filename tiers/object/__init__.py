"""The object store tier: blocks in a bucket of any cloud, shared by many engines.

One store serves all clouds; :mod:`tiers.object.cloud` is the contract of their back ends.
"""

from tiers.object.bucket_options import ObjectOptions, S3Options, small_block_warning
from tiers.object.definition import OBJECT_TIER, S3_TIER

__all__ = ["OBJECT_TIER", "S3_TIER", "ObjectOptions", "S3Options", "small_block_warning"]
