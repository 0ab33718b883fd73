"""Clients of the object store: their configuration, and where session tokens may go."""

from __future__ import annotations

import ipaddress
import logging
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit

from obstore.store import S3Store

from tiering import PermanentStoreError
from tiering.tier import mask_text
from tiers.object.bucket_options import S3Words
from tiers.object.cloud import NO_RETRIES, client_options, verification
from tiers.object.s3.credentials import DEFAULT_REGION, CredentialSource

if TYPE_CHECKING:
    from obstore.store import S3Config

logger = logging.getLogger("kv_tiering.object")


def connect(options: S3Words, credentials: CredentialSource, *, if_match: str | None = None) -> S3Store:
    """Return a new client, with connections of its own.

    Args:
        options: the tier's options.
        credentials: source of credentials.
        if_match: ETag that every object must have for a request of this client; default: any.

    Raises:
        PermanentStoreError: the file of authorities cannot be read.
    """
    config: S3Config = {
        "region": options.region or credentials.region or DEFAULT_REGION,
        "unsigned_payload": True,
        "virtual_hosted_style_request": not options.uses_path_style,
        # obstore has no conditional deletion, and its bulk deletion has no condition per object.
        "disable_bulk_delete": not options.bulk_delete or if_match is not None,
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
        client_options=client_options(options, None if if_match is None else {"if-match": if_match}),
        retry_config=NO_RETRIES,
        credential_provider=credentials,
    )


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
    from botocore.awsrequest import AWSRequest
    from botocore.exceptions import BotoCoreError, HTTPClientError
    from botocore.httpsession import URLLib3Session
    from botocore.utils import get_environ_proxies

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
