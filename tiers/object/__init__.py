"""The object store tier: blocks in any S3-compatible bucket, shared by many engines."""

from tiers.object.definition import S3_TIER
from tiers.object.options import S3Options, small_block_warning

__all__ = ["S3_TIER", "S3Options", "small_block_warning"]
