"""The options of the object store tier in a stack file, and the names of objects after their prefix."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, TypeAlias, cast
from urllib.parse import urlsplit

from pydantic import AfterValidator, field_validator, model_validator

from tiering.tier import BlockTierOptions, CompressionOptions, Duration, FilePath, SharedOptions, TtlOptions, mask_text
from tiers.valkey.client import ServerAddress, known_address

BLOCKS = "blocks/"
"""Begins the names of block objects."""
DOCUMENTS = "documents/"
"""Begins the names of documents."""
SUSPECTS = "suspect-"
"""Begins the names of the documents that note an object which a machine reads corrupt."""
SETTLEMENTS = "settled-"
"""Begins the names of the documents by which the fleet counts the corrupt objects that it deletes."""
IDENTITY = "bucket-id"
"""Name of the document that holds the bucket's identifier; a successor has a number behind it."""

DAY = 86400.0
SMALL_BLOCK_BYTES = 4 << 20
"""Block size in bytes below which requests, not bytes, dominate an object store's cost and time."""

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_PREFIX_PART = re.compile(r"[A-Za-z0-9!_.*'()=-]+")
_NO_EVICTION = "a bucket is shared, and no engine sees all accesses; bound it with ttl, or with kv-tiering gc"
_NO_SECRETS = "secrets are not written into a stack; use the environment, a profile, or a role (the cloud's own chain)"
_NO_ENDPOINT = "not an endpoint; write it like https://host or http://host:port, without bucket and path"
_ACCOUNT = re.compile(r"[a-z0-9]{3,24}")
_URL = re.compile(r"(s3|gs|az)://([^/?#]*)(?:/([^?#]*))?")

Scheme: TypeAlias = Literal["s3", "gs", "az"]
"""Scheme of a bucket's URL: S3 and its protocol, Google Cloud Storage, Azure Blob Storage."""

_ENDPOINTS: Mapping[Scheme, tuple[str, ...]] = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
"""Variables of the environment that name an endpoint; the first one that is set counts."""


def _bucket(name: str) -> str:
    if not _BUCKET.fullmatch(name) or ".." in name:
        hint = "; an address is written as type: object with url" if "://" in name else ""
        raise ValueError(f"{name!r} is not a bucket's name: 3 to 255 letters, digits, dots, dashes{hint}")
    return name


def _prefix(prefix: str) -> str:
    if not prefix:
        return ""
    parts = prefix.removesuffix("/").split("/")
    if not all(_PREFIX_PART.fullmatch(part) and part not in {".", ".."} for part in parts):
        raise ValueError(
            f"{prefix!r} is not a prefix: parts of letters, digits and !_.*'()=- "
            "with a single / between them, none in front"
        )
    reserved = {name.removesuffix("/") for name in (BLOCKS, DOCUMENTS)} & set(parts)
    if reserved:
        raise ValueError(
            f"{prefix!r} has the part {min(reserved)!r}, which names the objects of a stack: a stack with a shorter "
            "prefix would take these objects for its own; choose another name for this part"
        )
    return "/".join(parts) + "/"


def _endpoint(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    if (
        parts.scheme not in {"http", "https"}
        or not parts.hostname
        or parts.query
        or parts.fragment
        or (parts.path.strip("/") and not _ACCOUNT.fullmatch(parts.path.strip("/")))
    ):
        raise ValueError(_NO_ENDPOINT)
    if parts.username is not None or parts.password is not None:
        raise ValueError("an endpoint must not contain credentials; give them to the cloud's own chain")
    default = ":443" if parts.scheme == "https" else ":80"
    return f"{parts.scheme}://{parts.netloc.lower().removesuffix(default)}{parts.path.rstrip('/')}"


def _url(url: str) -> str:
    found = _URL.fullmatch(url)
    if found is None:
        raise ValueError("not a URL of an object store; write it like s3://bucket/prefix, gs://... or az://...")
    if "@" in found[2] or ":" in found[2]:
        raise ValueError("the URL must contain the bucket only; account and endpoint_url are words of their own")
    return f"{found[1]}://{_bucket(found[2])}/{_prefix(found[3] or '')}"


def _account(account: str) -> str:
    if not _ACCOUNT.fullmatch(account):
        raise ValueError(f"{account!r} is not a storage account's name: 3 to 24 lower-case letters and digits")
    return account


class BucketOptions(BlockTierOptions, SharedOptions, TtlOptions, CompressionOptions):
    """The options that all clouds have. Secrets come from the cloud's own chain only."""

    unsupported: ClassVar[Mapping[str, str]] = {
        "capacity": f"{_NO_EVICTION} by size",
        "high_watermark": _NO_EVICTION,
        "low_watermark": _NO_EVICTION,
        "eviction": _NO_EVICTION,
        "access_key_id": _NO_SECRETS,
        "secret_access_key": _NO_SECRETS,
        "session_token": _NO_SECRETS,
        "account_key": _NO_SECRETS,
        "sas_token": _NO_SECRETS,
        "service_account_key": _NO_SECRETS,
    }

    endpoint_url: Annotated[str, AfterValidator(_endpoint)] | None = None
    """``http(s)://host[:port]`` of a service that is not the cloud's own; default: the cloud's own.

    A variable of the environment replaces the default: AWS_ENDPOINT_URL_S3, GOOGLE_BASE_URL or AZURE_STORAGE_ENDPOINT.
    For ``az://``, the name of the account may follow after a slash, as emulators need it.
    """
    ca_file: FilePath | None = None
    """PEM file of certificate authorities to trust besides the system's; default none."""
    check_existing: bool = True
    """Probe an object before its upload, and skip the upload if it is present; default True.

    With ``conditional_put``, blocks that a lookup has just found absent are uploaded without this probe.
    """
    conditional_put: bool = True
    """Let the service refuse to replace an object; default True.

    A block that is refused because it is there counts as stored; after another conflict, a HEAD decides.
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
    coordination: Annotated[str, AfterValidator(known_address)] | None = None
    """Address of a server that coordinates the machines, like ``valkey://host``; default none.

    The server is Valkey or Redis. Its password comes from the environment. Everything works without the server, with
    more requests.
    """

    coordination_ca_file: FilePath | None = None
    """PEM file of the authorities that may sign the certificate of that server; default: the system's.

    The address must begin with ``valkeys://`` or ``rediss://``.
    """

    renew_after: Duration | None = None
    """Age at which a block in use is renewed; default: half of ``ttl``, if any.

    The block is copied onto itself, so that its age counts from then on. One process renews at most eight blocks per
    second, heads of prefixes first.
    """

    if TYPE_CHECKING:  # S3Options has fields with these names, ObjectOptions takes both from its URL

        @property
        def bucket(self) -> str:
            """The bucket's (container's) name."""

        @property
        def prefix(self) -> str:
            """Begins every object's name; empty, or with a "/" at its end."""

    @field_validator("ttl")
    @classmethod
    def _check_ttl(cls, ttl: float | None) -> float | None:
        if ttl is not None and ttl % DAY:
            raise ValueError("a bucket's lifecycle rule counts whole days; write it like 7d")
        return ttl

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.scheme != "az" and self.endpoint_url is not None and urlsplit(self.endpoint_url).path:
            raise ValueError(_NO_ENDPOINT)
        if self.coordination_ca_file is not None and (
            self.coordination is None or not ServerAddress.parse(self.coordination).tls
        ):
            raise ValueError("coordination_ca_file needs a word coordination that begins with valkeys:// or rediss://")
        if self.renew_after is not None and self.ttl is not None and self.renew_after >= self.ttl:
            raise ValueError("renew_after is not below ttl: blocks in use would expire before they are renewed")
        return self

    @property
    def scheme(self) -> Scheme:
        """Scheme of the bucket's URL, which names the cloud."""
        return "s3"

    @property
    def ttl_days(self) -> int | None:
        """``ttl`` in days, or None."""
        return None if self.ttl is None else round(self.ttl / DAY)

    @property
    def renewal_age(self) -> float | None:
        """``renew_after``, or its default; None for a tier that renews nothing."""
        if self.admission == "none":
            return None
        return self.renew_after if self.renew_after is not None or self.ttl is None else self.ttl / 2

    @property
    def endpoint(self) -> str | None:
        """``endpoint_url``, or the environment's endpoint; None for the cloud's own."""
        named = (os.environ.get(name) for name in _ENDPOINTS[self.scheme])
        return self.endpoint_url or next(filter(None, named), None)

    @property
    def location(self) -> str:
        """The bucket, prefix and endpoint, as text for people. The same place has the same text."""
        return f"{self.scheme}://{self.bucket}/{self.prefix}" + self._at_endpoint()

    def with_prefix(self, prefix: str) -> Self:
        """Return these options with another prefix, which ends with a "/"."""
        return self.model_copy(update={"prefix": prefix})

    def _at_endpoint(self) -> str:
        return mask_text(f" at {self.endpoint}") if self.endpoint else ""


class S3Words(BucketOptions):
    """Options that only S3 has, and services with its protocol."""

    region: str | None = None
    """The service's region; default: that of the profile or the environment, else us-east-1."""
    path_style: bool | None = None
    """True to use ``endpoint/bucket/name``, not ``bucket.endpoint/name``; default: True with an endpoint."""
    profile: str | None = None
    """A profile of the AWS configuration files; default: boto3's choice."""
    sse: Literal["none", "AES256", "aws:kms"] = "none"
    """Server-side encryption requested with every put; default none."""
    sse_kms_key_id: str | None = None
    """Id of the KMS key for ``sse: aws:kms``; default: the service's key."""
    bulk_delete: bool = True
    """Delete up to 1,000 objects per request; default True.

    Set to false for services without DeleteObjects.
    """
    install_lifecycle: bool = False
    """Write a missing lifecycle rule for ``ttl``; default False.

    Needs the permission s3:PutLifecycleConfiguration.
    """

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.sse_kms_key_id is not None and self.sse != "aws:kms":
            raise ValueError("sse_kms_key_id needs sse: aws:kms")
        if self.install_lifecycle and self.ttl is None:
            raise ValueError("install_lifecycle needs a ttl")
        return self

    @property
    def uses_path_style(self) -> bool:
        """``path_style``, or its default."""
        return self.endpoint is not None if self.path_style is None else self.path_style


class S3Options(S3Words):
    """The options of ``type: s3``, which names its bucket and prefix by words of their own."""

    type: str = "s3"
    """The tier's type in a stack file."""
    bucket: Annotated[str, AfterValidator(_bucket)]
    """The bucket's name. The bucket must exist."""
    prefix: Annotated[str, AfterValidator(_prefix)] = ""
    """Begins every object's name, followed by a "/"; default empty. Several stacks can share a bucket."""


class ObjectOptions(S3Words):
    """The options of ``type: object``, whose ``url`` names the cloud, the bucket and the prefix."""

    type: str = "object"
    """The tier's type in a stack file."""
    url: Annotated[str, AfterValidator(_url)]
    """``s3://bucket/prefix``, ``gs://bucket/prefix`` or ``az://container/prefix``. The bucket must exist.

    The prefix may be empty. Several stacks can share a bucket.
    """
    account: Annotated[str, AfterValidator(_account)] | None = None
    """Storage account of an ``az://`` URL; default: the variable AZURE_STORAGE_ACCOUNT_NAME."""

    @model_validator(mode="after")
    def _check_cloud(self) -> Self:
        foreign = {"account"} if self.scheme != "az" else set()
        if self.scheme != "s3":
            foreign.update(S3Words.model_fields.keys() - BucketOptions.model_fields.keys())
        for word in sorted(foreign & self.model_fields_set):
            if getattr(self, word) != type(self).model_fields[word].default:
                raise ValueError(f"{word} is a word for {'az' if word == 'account' else 's3'}:// only")
        if self.scheme == "az" and self.account_name is None:
            raise ValueError("an az:// URL needs the storage account: set account, or AZURE_STORAGE_ACCOUNT_NAME")
        return self

    @property
    def scheme(self) -> Scheme:
        return self._parts[0]

    @property
    def bucket(self) -> str:
        """The bucket's (container's) name."""
        return self._parts[1]

    @property
    def prefix(self) -> str:
        """Begins every object's name; empty, or with a "/" at its end."""
        return self._parts[2]

    @property
    def tier_name(self) -> str:
        """``name``, or by default the URL's scheme: the same as for ``type: s3``."""
        return self.name or self.scheme

    @property
    def account_name(self) -> str | None:
        """``account``, or the environment's storage account."""
        return self.account or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME") or None

    @property
    def location(self) -> str:
        if self.scheme != "az":
            return super().location
        return f"az://{self.bucket}/{self.prefix} of account {self.account_name}" + self._at_endpoint()

    def with_prefix(self, prefix: str) -> Self:
        return self.model_copy(update={"url": f"{self.scheme}://{self.bucket}/{prefix}"})

    @property
    def _parts(self) -> tuple[Scheme, str, str]:
        scheme, _, rest = self.url.partition("://")
        bucket, _, prefix = rest.partition("/")
        return cast("Scheme", scheme), bucket, prefix


def without_ttl(options: BucketOptions) -> BucketOptions:
    """Return ``options`` for administration: opening a store does not look at lifecycle rules."""
    return options.model_copy(update={"ttl": None, "renew_after": None, "install_lifecycle": False})


def small_block_warning(block_bytes: int) -> str | None:
    """Return a warning if blocks of ``block_bytes`` bytes are small for an object store, else None."""
    if block_bytes >= SMALL_BLOCK_BYTES:
        return None
    return (
        f"blocks of {block_bytes / 1024:.0f} KiB are small for an object store; below {SMALL_BLOCK_BYTES >> 20} MiB, "
        "requests dominate cost and time; raise block_size in the extra configuration to send fewer requests"
    )
