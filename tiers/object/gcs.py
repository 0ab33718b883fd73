"""The back end for Google Cloud Storage. obstore finds and renews the credentials.

The chain looks in the environment for a token, a service account or application default credentials, then for those of
``gcloud``, and then asks for the machine's service account. The names of its variables are those of obstore.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from obstore.exceptions import BaseError
from obstore.store import GCSStore

from tiering.tier import Finding, Severity
from tiers.object.bucket_options import BucketOptions
from tiers.object.cloud import Cloud, client_options
from tiers.object.environment import EnvironmentSource, fingerprint, present_source
from tiers.object.faults import Cause, Dialect

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import GCSConfig

_KEYS = (
    "correct GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT in the environment, or give this machine a "
    "service account"
)
_NO_BUCKET = "no such bucket; create it, or correct url or endpoint_url"
_CODES: Mapping[str, tuple[Cause, str]] = {
    "AccessDenied": (
        Cause.PERMISSION,
        "no permission; the account needs the role Storage Object User on the bucket",
    ),
    "AuthenticationRequired": (Cause.KEYS, f"the request had no credentials; {_KEYS}"),
    "InvalidSecurity": (Cause.KEYS, f"the credentials are refused; {_KEYS}"),
    "ExpiredToken": (Cause.KEYS, f"the token has expired; {_KEYS}"),
    "UserProjectAccountProblem": (Cause.BUCKET, "the project's billing account is not in order"),
    "AccountProblem": (Cause.BUCKET, "the project's billing account is not in order"),
    "NoSuchBucket": (Cause.BUCKET, _NO_BUCKET),
}
_SOURCES = (
    EnvironmentSource("token", ("GOOGLE_BEARER_TOKEN",)),
    EnvironmentSource("service account", ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH"), is_file=True),
    EnvironmentSource("service account", ("GOOGLE_SERVICE_ACCOUNT_KEY",)),
    EnvironmentSource("application default credentials", ("GOOGLE_APPLICATION_CREDENTIALS",), is_file=True),
)
"""The sources of credentials, in obstore's order."""

_MD5 = re.compile(r'"?[0-9a-fA-F]{32}"?')
"""ETag of an object that was uploaded whole: the MD5 of its bytes."""
_BULK = 100
_LIFECYCLE = (
    "the rules of the bucket cannot be read with obstore, so ttl is not checked; add a rule that deletes {blocks}* "
    "at the age of {days} days: gcloud storage buckets update --lifecycle-file"
)


class GcsCloud(Cloud):
    """Google Cloud Storage, through its XML API. An object's version is its generation."""

    dialect = Dialect(_CODES, keys=_KEYS, bucket=_NO_BUCKET)
    permissions: ClassVar[Mapping[str, str]] = {
        "list": "storage.objects.list on the bucket",
        "put": "storage.objects.create on the bucket",
        "head": "storage.objects.get on the bucket",
        "get": "storage.objects.get on the bucket",
        "conditional put": "storage.objects.create on the bucket",
        "delete": "storage.objects.delete on the bucket",
        "delete one version": "storage.objects.delete on the bucket",
    }
    bulk = _BULK
    per_request = 1

    def __init__(self, options: BucketOptions) -> None:
        super().__init__(options)
        self._used = b""

    def prepare(self) -> None:
        """Nothing to look up: the first request finds the credentials."""

    def connect(self) -> GCSStore:
        return self._client({})

    def deleter(self, name: str, version: str) -> GCSStore:
        return self._client({"x-goog-if-generation-match": version})

    def version(self, meta: ObjectMeta) -> str:
        return meta["version"] or ""

    def digest(self, meta: ObjectMeta) -> str | None:
        tag = meta["e_tag"] or ""
        return tag.strip('"').lower() if _MD5.fullmatch(tag) else None

    def rotated(self) -> bool:
        return fingerprint(_SOURCES) != self._used

    def check_lifecycle(self, blocks: str, documents: str) -> str | None:
        return _LIFECYCLE.format(blocks=blocks, days=self.options.ttl_days)

    def probe_credentials(self) -> Iterator[Finding]:
        found = present_source(_SOURCES)
        text = "gcloud's, or the service account of this machine" if found is None else f"{found[0].text} ({found[1]})"
        yield Finding(Severity.OK, "credentials", text)

    def _client(self, headers: Mapping[str, str]) -> GCSStore:
        self._used = fingerprint(_SOURCES)
        config: GCSConfig = {}
        if self.options.endpoint is not None:
            config["base_url"] = self.options.endpoint
        try:
            return GCSStore(
                self.options.bucket,
                config=config,
                client_options=client_options(self.options, headers),
                retry_config={"max_retries": 0},
            )
        except (BaseError, ValueError) as error:
            raise self.dialect.translate(error, f"the credentials in the environment: {_KEYS}") from error
