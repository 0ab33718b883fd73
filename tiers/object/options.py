"""The options of the object store tier in a stack file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import field_validator, model_validator

from tiering.api.masking import mask_text
from tiering.api.units import Duration, FilePath
from tiering.secondary.options import BlockTierOptions, CompressionOptions, SharedOptions, TtlOptions

DAY = 86400.0
SMALL_BLOCK_BYTES = 4 << 20
"""Block size in bytes below which requests, not bytes, dominate an object store's cost and time."""

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_PREFIX_PART = re.compile(r"[A-Za-z0-9!_.*'()=-]+")
_NO_EVICTION = "a bucket is shared, and no engine sees all accesses; bound it with ttl, or with kv-tiering gc"
_NO_SECRETS = "secrets are not written into a stack; use the environment, a profile, or a role (boto3's chain)"


class S3Options(BlockTierOptions, SharedOptions, TtlOptions, CompressionOptions):
    """The options of the object store tier. Keys and secrets come from boto3's chain or ``profile`` only."""

    unsupported: ClassVar[Mapping[str, str]] = {
        "capacity": f"{_NO_EVICTION} by size",
        "high_watermark": _NO_EVICTION,
        "low_watermark": _NO_EVICTION,
        "eviction": _NO_EVICTION,
        "access_key_id": _NO_SECRETS,
        "secret_access_key": _NO_SECRETS,
        "session_token": _NO_SECRETS,
    }

    type: str = "s3"
    """The tier's type in a stack file."""
    bucket: str
    """The bucket's name. The bucket must exist."""
    prefix: str = ""
    """Begins every object's name, followed by a "/"; default empty. Several stacks can share a bucket."""
    endpoint_url: str | None = None
    """``http(s)://host[:port]`` of a service that is not AWS; default: AWS.

    The variable AWS_ENDPOINT_URL_S3 of the environment replaces the default.
    """
    region: str | None = None
    """The service's region; default: that of the profile or the environment, else us-east-1."""
    path_style: bool | None = None
    """True to use ``endpoint/bucket/name``, not ``bucket.endpoint/name``; default: True with an endpoint."""
    profile: str | None = None
    """A profile of the AWS configuration files; default: boto3's choice."""
    ca_file: FilePath | None = None
    """PEM file of certificate authorities to trust besides the system's; default none."""
    sse: Literal["none", "AES256", "aws:kms"] = "none"
    """Server-side encryption requested with every put; default none."""
    sse_kms_key_id: str | None = None
    """Id of the KMS key for ``sse: aws:kms``; default: the service's key."""
    check_existing: bool = True
    """Probe an object before its upload, and skip the upload if it is present; default True."""
    conditional_put: bool = True
    """Let the service refuse to replace an object (``If-None-Match: *``); default True.

    A block that is refused because it is there (412) counts as stored; after a conflict (409), a HEAD decides.
    """
    bulk_delete: bool = True
    """Delete up to 1,000 objects per request; default True.

    Set to false for services without DeleteObjects.
    """
    lookup_deadline: Duration = 0.25
    """Seconds that a lookup may stay undecided before the answer is no (default: 0.25).

    Each token at stake adds 50 µs, up to 5 s in all.
    """
    load_deadline: Duration | None = 2.0
    """Seconds that a request waits for a load (default: 2); stores have ``deadline``.

    Blocks that arrive later are misses. The blocks in front of them that arrived in time count.
    """
    connect_timeout: Duration = 5.0
    """Seconds within which a connection must be established; default 5."""
    request_timeout: Duration = 10.0
    """Seconds for one attempt, up to the last byte and at most ``deadline``; default 10."""
    install_lifecycle: bool = False
    """Write a missing lifecycle rule for ``ttl``; default False.

    Needs the permission s3:PutLifecycleConfiguration.
    """

    @field_validator("bucket")
    @classmethod
    def _check_bucket(cls, bucket: str) -> str:
        if not _BUCKET.fullmatch(bucket) or ".." in bucket:
            raise ValueError(f"{bucket!r} is not a bucket's name: 3 to 255 letters, digits, dots, dashes")
        return bucket

    @field_validator("prefix")
    @classmethod
    def _normalise_prefix(cls, prefix: str) -> str:
        if not prefix:
            return ""
        parts = prefix.removesuffix("/").split("/")
        if not all(_PREFIX_PART.fullmatch(part) and part not in {".", ".."} for part in parts):
            raise ValueError(
                f"{prefix!r} is not a prefix: parts of letters, digits and !_.*'()=- "
                "with a single / between them, none in front"
            )
        return "/".join(parts) + "/"

    @field_validator("endpoint_url")
    @classmethod
    def _check_endpoint(cls, endpoint: str | None) -> str | None:
        if endpoint is None:
            return None
        parts = urlsplit(endpoint)
        if (
            parts.scheme not in {"http", "https"}
            or not parts.hostname
            or parts.path.strip("/")
            or parts.query
            or parts.fragment
        ):
            raise ValueError("not an endpoint; write it like https://host or http://host:port, without bucket and path")
        if parts.username is not None or parts.password is not None:
            raise ValueError("an endpoint must not contain credentials; give them to boto3's chain")
        return endpoint.rstrip("/")

    @field_validator("ttl")
    @classmethod
    def _check_ttl(cls, ttl: float | None) -> float | None:
        if ttl is not None and ttl % DAY:
            raise ValueError("a bucket's lifecycle rule counts whole days; write it like 7d")
        return ttl

    @model_validator(mode="after")
    def _check_combinations(self) -> S3Options:
        if self.sse_kms_key_id is not None and self.sse != "aws:kms":
            raise ValueError("sse_kms_key_id needs sse: aws:kms")
        if self.install_lifecycle and self.ttl is None:
            raise ValueError("install_lifecycle needs a ttl")
        return self

    @property
    def ttl_days(self) -> int | None:
        """``ttl`` in days, or None."""
        return None if self.ttl is None else round(self.ttl / DAY)

    @property
    def endpoint(self) -> str | None:
        """``endpoint_url``, or the environment's endpoint; None for AWS itself."""
        return self.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")

    @property
    def uses_path_style(self) -> bool:
        """``path_style``, or its default."""
        return self.endpoint is not None if self.path_style is None else self.path_style

    @property
    def location(self) -> str:
        """The bucket, prefix and endpoint, as text for people."""
        return f"s3://{self.bucket}/{self.prefix}" + (mask_text(f" at {self.endpoint}") if self.endpoint else "")


def small_block_warning(block_bytes: int) -> str | None:
    """Return a warning if blocks of ``block_bytes`` bytes are small for an object store, else None."""
    if block_bytes >= SMALL_BLOCK_BYTES:
        return None
    return (
        f"blocks of {block_bytes / 1024:.0f} KiB are small for an object store; below {SMALL_BLOCK_BYTES >> 20} MiB, "
        "requests dominate cost and time; raise block_size in the extra configuration to send fewer requests"
    )
