"""Credentials for obstore from boto3's chain.

The chain looks in the environment, the configuration files, SSO, web identity, and the container's or machine's role.
"""

from __future__ import annotations

import datetime
import threading
from typing import TYPE_CHECKING, Any

from tiering.errors import ConfigError, PermanentStoreError

if TYPE_CHECKING:
    from obstore.store import S3Credential

LIFETIME = datetime.timedelta(minutes=10)
"""Validity that is reported to obstore for an answer of the chain.

obstore asks again five minutes before the end of this time. With five minutes or less it would ask at every request.
boto3 renews credentials at least ten minutes before they expire, so the reported validity is correct.
"""

DEFAULT_REGION = "us-east-1"
"""The region if neither the options nor the chain name one."""


def import_boto3() -> Any:
    """Return the ``boto3`` module.

    Raises:
        ConfigError: boto3 is not installed.
    """
    try:
        import boto3
    except ImportError as error:
        raise ConfigError(
            "the s3 tier needs boto3 for credentials and administration; "
            "install kv-tiering with its extra s3 (in a clone: pip install '.[s3]')"
        ) from error
    return boto3


class CredentialSource:
    """A credential provider for obstore on top of boto3's chain. Any thread may call it.

    Credentials that boto3 renews are kept between calls. Fixed credentials are looked up at each call, so that a
    rotated file is noticed. The representation never shows a secret.

    Args:
        profile: Profile of the AWS configuration files (default with None: the chain's choice).
    """

    def __init__(self, profile: str | None) -> None:
        self._profile = profile
        self._lock = threading.Lock()
        self._renewing: Any = None
        self.region: str | None = None
        """The chain's region; None before the first call."""

    def __repr__(self) -> str:
        return f"CredentialSource(profile={self._profile!r})"

    def session(self) -> Any:
        """Return a new boto3 session.

        Raises:
            PermanentStoreError: The profile does not exist.
        """
        boto3 = import_boto3()
        from botocore.exceptions import BotoCoreError

        try:
            return boto3.session.Session(profile_name=self._profile)
        except BotoCoreError as error:
            raise PermanentStoreError(f"AWS configuration: {error}") from error

    def __call__(self) -> S3Credential:
        """Return the present credentials.

        Raises:
            PermanentStoreError: The chain has no credentials.
        """
        from botocore.credentials import RefreshableCredentials
        from botocore.exceptions import BotoCoreError

        with self._lock:
            try:
                credentials = self._renewing
                if credentials is None:
                    session = self.session()
                    self.region = session.region_name
                    credentials = session.get_credentials()
                    if isinstance(credentials, RefreshableCredentials):
                        self._renewing = credentials
                frozen = None if credentials is None else credentials.get_frozen_credentials()
            except BotoCoreError as error:
                raise PermanentStoreError(f"AWS credentials: {error}") from error
        if frozen is None or not frozen.access_key or not frozen.secret_key:
            raise PermanentStoreError(
                "no AWS credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                "name a profile, or give this machine a role"
            )
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.datetime.now(datetime.UTC) + LIFETIME,
        }

    def forget(self) -> None:
        """Drop the kept credentials; the next call looks them up from the start of the chain."""
        with self._lock:
            self._renewing = None
