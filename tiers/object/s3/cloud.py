"""The S3 back end."""

from __future__ import annotations

import ipaddress
import logging
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urljoin, urlsplit

from botocore.awsrequest import AWSRequest
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
from botocore.httpsession import URLLib3Session
from botocore.utils import get_environ_proxies
from obstore.store import S3Store

from tiering import PermanentStoreError, TemporaryStoreError
from tiering.tier import Finding, Severity, mask_text
from tiers.object.bucket_options import BucketOptions, S3Words
from tiers.object.cloud import NO_RETRIES, Cloud, client_options, md5_tag, verification
from tiers.object.faults import SPACE, Cause, Dialect, summary
from tiers.object.s3.credentials import DEFAULT_REGION, CredentialSource
from tiers.object.s3.settings import check_lifecycle, make_client, probe_settings

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore as Client
    from obstore.store import S3Config

logger = logging.getLogger("kv_tiering.object")

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

    def connect(self, headers: Mapping[str, str] | None = None) -> S3Store:
        options = self.options
        config: S3Config = {
            "region": options.region or self._credentials.region or DEFAULT_REGION,
            "unsigned_payload": True,
            "virtual_hosted_style_request": not options.uses_path_style,
            # obstore has no conditional deletion, and its bulk deletion has no condition per object.
            "disable_bulk_delete": not options.bulk_delete or headers is not None,
        }
        endpoint = options.endpoint
        if endpoint is not None:
            if not options.uses_path_style:
                parts = urlsplit(endpoint)
                endpoint = f"{parts.scheme}://{options.bucket}.{parts.netloc}"
            config["endpoint"] = config["aws_endpoint_url_s3"] = endpoint
        if options.sse != "none":
            config["server_side_encryption"] = options.sse
        if options.sse_kms_key_id is not None:
            config["sse_kms_key_id"] = options.sse_kms_key_id
        return S3Store(
            options.bucket,
            config=config,
            client_options=client_options(options, headers),
            retry_config=NO_RETRIES,
            credential_provider=self._credentials,
        )

    def renew(self, client: Client, name: str) -> None:
        """Copy an object onto itself.

        boto3 sends the request: S3 refuses a copy onto itself that changes nothing, and obstore's changes nothing.
        """
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


def check_token(options: S3Words, credentials: CredentialSource) -> None:
    """Check where the session token of temporary credentials would go.

    Without a token or an endpoint, nothing is checked. obstore follows redirects, and its HTTP client sends the header
    with the token on to the other host (the signature is left out). obstore has no option against this, so one request
    without credentials finds out whether the endpoint redirects. Redirects that begin later are not noticed. A token
    over plain HTTP is warned about, unless the host is this machine.

    Raises:
        PermanentStoreError: the endpoint redirects to another host.
    """
    endpoint = options.endpoint
    if endpoint is None or not credentials.has_token:
        return
    parts = urlsplit(endpoint)
    if parts.scheme == "http" and not _is_loopback(parts.hostname or ""):
        logger.warning(
            "%s: the session token of temporary credentials is sent over plain HTTP, where others can read and use it; "
            "use https",
            options.location,
        )
    target = _redirection(options, f"{endpoint}/{options.bucket}")
    if target is not None and urlsplit(target).netloc != parts.netloc:
        raise PermanentStoreError(
            f"{parts.netloc} redirects to {mask_text(urlsplit(target).netloc)}, and the session token of temporary "
            "credentials would be sent there; if that host is right, set endpoint_url to it"
        )


def _redirection(options: S3Words, url: str) -> str | None:
    """Return the address to which ``url`` redirects; None if it does not, or does not answer."""
    session = URLLib3Session(
        verify=verification(options),
        proxies=get_environ_proxies(url),
        timeout=min(options.connect_timeout, options.request_timeout, options.deadline),
    )
    try:
        answer = session.send(AWSRequest(method="GET", url=url).prepare())
        location = answer.headers.get("Location")
        return urljoin(url, location) if 300 <= answer.status_code < 400 and location else None
    except (BotoCoreError, HTTPClientError, ValueError) as error:
        logger.debug("%s was not tried for redirects: %s", options.location, error)
        return None
    finally:
        session.close()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
