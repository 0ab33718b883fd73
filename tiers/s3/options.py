"""What a stack file may say about an object store tier."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import field_validator, model_validator

from tiering.api.masking import mask_text
from tiering.api.units import Duration, FilePath
from tiering.secondary.options import TierOptions

DAY = 86400.0
SMALL_BLOCK_BYTES = 4 << 20
"""Below this, requests rather than bytes dominate what an object store costs, and how fast it is."""

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_PREFIX_PART = re.compile(r"[A-Za-z0-9!_.*'()=-]+")
_NOBODY_SEES_ALL = "a bucket is shared, and nobody sees all accesses; bound it with ttl, or with gc"


class S3Options(TierOptions):
    """The object store's words.  There is none for keys and secrets: they come from boto3's chain, or from ``profile``."""

    unsupported: ClassVar[Mapping[str, str]] = {
        "capacity": f"{_NOBODY_SEES_ALL} by size",
        "high_watermark": _NOBODY_SEES_ALL,
        "low_watermark": _NOBODY_SEES_ALL,
        "eviction": _NOBODY_SEES_ALL,
        "access_key_id": "secrets are not written into a stack; use the environment, a profile, or a role (boto3's chain)",
        "secret_access_key": "secrets are not written into a stack; use the environment, a profile, or a role (boto3's chain)",
        "session_token": "secrets are not written into a stack; use the environment, a profile, or a role (boto3's chain)",
    }

    type: str = "s3"
    bucket: str
    prefix: str = ""
    """Put before every object's name, a "/" after it: several stacks, and other data, can share a bucket."""
    endpoint_url: str | None = None
    """``http(s)://host[:port]`` of a service that is not AWS; without it, the environment's AWS_ENDPOINT_URL_S3, else AWS."""
    region: str | None = None
    """Without it, that of the profile or environment, else us-east-1."""
    path_style: bool | None = None
    """``endpoint/bucket/name`` rather than ``bucket.endpoint/name``; by default exactly when there is an endpoint."""
    profile: str | None = None
    """A profile of the AWS configuration files."""
    ca_file: FilePath | None = None
    """PEM file of certificate authorities to trust besides the system's."""
    sse: Literal["none", "AES256", "aws:kms"] = "none"
    """Server-side encryption asked for with every put."""
    sse_kms_key_id: str | None = None
    check_existing: bool = True
    """Ask (a cheap request) whether an object is there before it is uploaded; it is not uploaded again then."""
    conditional_put: bool = True
    """Let the service refuse to replace an object that is there (``If-None-Match: *``); it counts as stored."""
    bulk_delete: bool = True
    """Delete up to 1,000 objects per request; services without DeleteObjects need false."""
    present_ttl: Duration = 300.0
    """How long it is believed that an object that was seen is there."""
    absent_ttl: Duration = 10.0
    """How long it is believed that an object that was not there is still not there."""
    connect_timeout: Duration = 5.0
    request_timeout: Duration = 10.0
    """Of one attempt, until the last byte; at most the deadline."""
    install_lifecycle: bool = False
    """Write the bucket's lifecycle rule for ``ttl`` if it is missing (needs s3:PutLifecycleConfiguration)."""

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
                f"{prefix!r} is not a prefix: parts of letters, digits and !_.*'()=- with a single / between them, none in front"
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
            raise ValueError("an endpoint holds no credentials; they come from boto3's chain")
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
        """``endpoint_url``, or the environment's; None for AWS itself."""
        return self.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")

    @property
    def uses_path_style(self) -> bool:
        """``path_style``, or its default."""
        return self.endpoint is not None if self.path_style is None else self.path_style

    @property
    def location(self) -> str:
        """Where the blocks are, as text."""
        return f"s3://{self.bucket}/{self.prefix}" + (mask_text(f" at {self.endpoint}") if self.endpoint else "")


def small_block_warning(block_bytes: int) -> str | None:
    """What to say about blocks of ``block_bytes`` bytes in an object store, None if nothing."""
    if block_bytes >= SMALL_BLOCK_BYTES:
        return None
    return (
        f"blocks of {block_bytes / 1024:.0f} KiB are small for an object store: below about {SMALL_BLOCK_BYTES >> 20} MiB, "
        "requests dominate the bill and the time; a larger block_size in the extra configuration makes fewer of them"
    )
