"""Credentials from boto3's whole chain (environment, files, SSO, web identity, container, instance), handed to obstore."""

from __future__ import annotations

import datetime
import threading
from typing import TYPE_CHECKING, Any

from tiering.errors import ConfigError, PermanentStoreError

if TYPE_CHECKING:
    from obstore.store import S3Credential

LIFETIME = datetime.timedelta(minutes=10)
"""What obstore is told of how long an answer holds; it asks again five minutes ahead (at every request if this were five or less).

boto3 renews what expires at least ten minutes ahead, so that this is true.
"""

DEFAULT_REGION = "us-east-1"


def import_boto3() -> Any:
    """The ``boto3`` module.  Raises :class:`ConfigError` if it is not installed."""
    try:
        import boto3
    except ImportError as error:
        raise ConfigError(
            "the s3 tier needs boto3 for credentials and administration; install kv-tiering with its extra s3 (in a clone: pip install '.[s3]')"
        ) from error
    return boto3


class CredentialSource:
    """obstore's credential provider over boto3's chain.  May be called from any thread.

    Credentials that boto3 renews are asked for at each call; fixed ones are looked up anew, so that a rotated file is
    noticed.  Never prints what it holds.
    """

    def __init__(self, profile: str | None) -> None:
        self._profile = profile
        self._lock = threading.Lock()
        self._renewing: Any = None
        self.region: str | None = None
        """The chain's region, known after the first call."""

    def __repr__(self) -> str:
        return f"CredentialSource(profile={self._profile!r})"

    def session(self) -> Any:
        """A new boto3 session.  Raises :class:`PermanentStoreError` if the profile does not exist."""
        boto3 = import_boto3()
        from botocore.exceptions import BotoCoreError

        try:
            return boto3.session.Session(profile_name=self._profile)
        except BotoCoreError as error:
            raise PermanentStoreError(f"AWS configuration: {error}") from error

    def __call__(self) -> S3Credential:
        """Present credentials.  Raises :class:`PermanentStoreError` if the chain has none."""
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
                "no AWS credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, name a profile, or give this machine a role"
            )
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.datetime.now(datetime.UTC) + LIFETIME,
        }

    def forget(self) -> None:
        """Look the chain up from its start at the next call."""
        with self._lock:
            self._renewing = None
