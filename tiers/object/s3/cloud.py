"""The S3 back end."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from tiering import PermanentStoreError, TemporaryStoreError
from tiering.tier import Finding, Severity
from tiers.object.bucket_options import BucketOptions, S3Words
from tiers.object.cloud import Cloud, md5_tag
from tiers.object.faults import SPACE, Cause, Dialect, summary
from tiers.object.s3.client import check_token, connect
from tiers.object.s3.credentials import CredentialSource
from tiers.object.s3.lifecycle import check_lifecycle, make_client
from tiers.object.s3.settings import probe_settings

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore as Client
    from obstore.store import S3Store

_CORRECT_KEYS = "correct the keys that boto3's chain finds (environment, profile, role)"
_KEYS = f"wrong access key or secret key, of another service or withdrawn; {_CORRECT_KEYS}"
_EXPIRED = "the temporary credentials have expired or are not valid here; renew them, or give this machine a role"
_REGION = "wrong region or endpoint; set region to that of the bucket"
_NO_BUCKET = "no such bucket; create it, or correct bucket or endpoint_url"
_CODES: Mapping[str, tuple[Cause, str]] = {
    "XMinioAdminBucketQuotaExceeded": (Cause.SPACE, SPACE),
    "XMinioStorageFull": (Cause.SPACE, SPACE),
    "InvalidAccessKeyId": (Cause.KEYS, _KEYS),
    "SignatureDoesNotMatch": (Cause.KEYS, _KEYS),
    "AuthorizationHeaderMalformed": (Cause.REQUEST, "wrong region; set region to that of the bucket"),
    "PermanentRedirect": (Cause.REQUEST, _REGION),
    "ExpiredToken": (Cause.KEYS, _EXPIRED),
    "InvalidToken": (Cause.KEYS, _EXPIRED),
    "TokenRefreshRequired": (Cause.KEYS, _EXPIRED),
    "AccessDenied": (
        Cause.PERMISSION,
        "no permission; the keys need s3:GetObject, PutObject, DeleteObject and ListBucket",
    ),
    "NoSuchBucket": (Cause.BUCKET, _NO_BUCKET),
}


class S3Cloud(Cloud):
    """S3 and services with its protocol. boto3's chain finds the credentials.

    Args:
        options: the tier's options.
        credentials: source of credentials; default: boto3's chain with the options' profile.
    """

    dialect = Dialect(_CODES, keys=_CORRECT_KEYS, bucket=_NO_BUCKET)
    permissions: ClassVar[Mapping[str, str]] = {
        "list": "s3:ListBucket on the bucket",
        "put": "s3:PutObject on the objects",
        "head": "s3:GetObject on the objects",
        "get": "s3:GetObject on the objects",
        "conditional put": "s3:PutObject on the objects",
        "delete": "s3:DeleteObject on the objects",
    }
    options: S3Words

    def __init__(self, options: BucketOptions, credentials: CredentialSource | None = None) -> None:
        if not isinstance(options, S3Words):
            raise TypeError(f"{options!r} has no options of S3")
        super().__init__(options)
        self._credentials = CredentialSource(options.profile) if credentials is None else credentials
        self.per_request = 1000 if options.bulk_delete else 1
        self._copies_lock = threading.Lock()
        self._copies: Any = None
        """boto3's client for copies, made when it is needed first."""

    def prepare(self) -> None:
        self._credentials.drop()
        self._credentials()
        check_token(self.options, self._credentials)

    def connect(self) -> S3Store:
        return connect(self.options, self._credentials)

    def deleter(self, name: str, version: str) -> S3Store:
        return connect(self.options, self._credentials, if_match=version)

    def renew(self, client: Client, name: str) -> None:
        """Copy an object onto itself.

        boto3 sends the request: S3 refuses a copy onto itself that changes nothing, and obstore's changes nothing.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        with self._copies_lock:
            if self._copies is None:
                self._copies = make_client(self.options, self._credentials)
            copies = self._copies
        words: dict[str, str] = {} if self.options.sse == "none" else {"ServerSideEncryption": self.options.sse}
        if self.options.sse_kms_key_id is not None:
            words["SSEKMSKeyId"] = self.options.sse_kms_key_id
        bucket = self.options.bucket
        try:
            source = {"Bucket": bucket, "Key": name}
            copies.copy_object(Bucket=bucket, Key=name, CopySource=source, MetadataDirective="REPLACE", **words)
        except ClientError as error:
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            if status == 404:
                return  # the object has gone meanwhile
            kind = TemporaryStoreError if status in {409, 412, 429} or status >= 500 else PermanentStoreError
            raise kind(f"{summary(error)} (copy {name})") from error
        except BotoCoreError as error:
            raise TemporaryStoreError(f"{summary(error)} (copy {name})") from error

    def close(self) -> None:
        with self._copies_lock:
            copies, self._copies = self._copies, None
        if copies is not None:
            copies.close()

    def digest(self, meta: ObjectMeta) -> str | None:
        # The ETag of an object that KMS encrypts is no MD5.
        return None if self.options.sse == "aws:kms" else md5_tag(meta)

    def rotated(self) -> bool:
        return self._credentials.rotated()

    def check_lifecycle(self, blocks: str, documents: str) -> str | None:
        return check_lifecycle(self.options, self._credentials, blocks, documents)

    def probe_credentials(self) -> Iterator[Finding]:
        self._credentials()
        found = self._credentials.session().get_credentials()
        yield Finding(Severity.OK, "credentials", f"found by boto3 ({found.method})")

    def probe_settings(self, *, writes: bool) -> Iterator[Finding]:
        yield from probe_settings(self.options, self._credentials, writes=writes)
