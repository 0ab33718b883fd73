"""The choice of a back end.

Back ends import their contract (:mod:`tiers.object.cloud`), which therefore does not choose among them.
"""

from __future__ import annotations

from tiers.object.bucket_options import BucketOptions
from tiers.object.cloud import Cloud


def make_cloud(options: BucketOptions) -> Cloud:
    """Return the back end for the scheme of a bucket's URL.

    Raises:
        ConfigError: a package that the back end needs is missing.
    """
    if options.scheme == "s3":
        from tiers.object.s3.cloud import S3Cloud

        return S3Cloud(options)
    if options.scheme == "az":
        from tiers.object.azure import AzureCloud

        return AzureCloud(options)
    from tiers.object.gcs import GcsCloud

    return GcsCloud(options)
