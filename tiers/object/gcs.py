"""The back end for Google Cloud Storage. obstore finds and renews the credentials.

The chain looks in the environment for a token, a service account or application default credentials, then for those of
``gcloud``, and then takes the machine's service account. The names of its variables are those of obstore.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from obstore.store import GCSStore

from tiers.object.cloud import NO_RETRIES, client_options, md5_tag
from tiers.object.environment import EnvironmentCloud, EnvironmentSource
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

_BULK = 100
_LIFECYCLE = (
    "the rules of the bucket cannot be read with obstore, so ttl is not checked; add a rule that deletes {blocks}* "
    "at the age of {days} days: gcloud storage buckets update --lifecycle-file"
)


class GcsCloud(EnvironmentCloud):
    """Google Cloud Storage, through its XML API. An object's version is its generation."""

    dialect = Dialect(_CODES, keys=_KEYS, bucket=_NO_BUCKET)
    permissions: ClassVar[Mapping[str, str]] = {
        "list": "storage.objects.list on the bucket",
        **dict.fromkeys(("head", "get"), "storage.objects.get on the bucket"),
        **dict.fromkeys(("put", "conditional put"), "storage.objects.create on the bucket"),
        **dict.fromkeys(("delete", "delete one version"), "storage.objects.delete on the bucket"),
    }
    sources, keys, lifecycle = _SOURCES, _KEYS, _LIFECYCLE
    machine = "gcloud's, or the service account of this machine"
    bulk = _BULK
    per_request = 1
    condition = "x-goog-if-generation-match"

    def connect(self, headers: Mapping[str, str] | None = None) -> GCSStore:
        config: GCSConfig = {} if self.options.endpoint is None else {"base_url": self.options.endpoint}
        bucket, words = self.options.bucket, client_options(self.options, headers)
        return self.make(lambda: GCSStore(bucket, config=config, client_options=words, retry_config=NO_RETRIES))

    def version(self, meta: ObjectMeta) -> str:
        return meta["version"] or ""

    def digest(self, meta: ObjectMeta) -> str | None:
        return md5_tag(meta)
