"""Any S3-compatible object store as a tier: shared by many engines, it is how a cache outgrows one machine."""

from tiers.s3.definition import S3_TIER
from tiers.s3.options import S3Options, small_block_warning

__all__ = ["S3_TIER", "S3Options", "small_block_warning"]
