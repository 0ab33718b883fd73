"""Credentials for obstore from boto3's chain.

The chain looks in the environment, the configuration files, SSO, web identity, and the container's or machine's role.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tiering import ConfigError, PermanentStoreError, StoreError

if TYPE_CHECKING:
    from obstore.store import S3Credential

logger = logging.getLogger("kv_tiering.object")

LIFETIME = datetime.timedelta(minutes=6)
"""Validity that is reported to obstore for an answer of the chain.

obstore calls again five minutes before the end of this time, that is once a minute. boto3 renews credentials at least
ten minutes before they expire, so an answer is still valid when a renewal that it caused is used.
"""

FIXED_SECONDS = 300.0
"""Seconds after which credentials without an expiry are looked up again: a file may have changed."""

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


@dataclass(frozen=True, slots=True, repr=False)
class _Keys:
    """Credentials that the chain found."""

    access_key: str
    secret_key: str
    token: str | None
    renewing: bool = field(compare=False)
    """True if boto3 renews these credentials before they expire."""
    found_at: float = field(compare=False)
    """Time of the lookup, in monotonic seconds."""


class CredentialSource:
    """A credential provider for obstore on top of boto3's chain. Any thread may call it.

    Only the first call waits for the chain. Later calls return the credentials that are known, and look for newer ones
    in the background. The representation never shows a secret.

    Args:
        profile: profile of the AWS configuration files; None: the chain's choice.
        clock: function that returns monotonic seconds.
    """

    def __init__(self, profile: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._profile = profile
        self._clock = clock
        self._lock = threading.Lock()
        """Guards the lookup; a thread may hold it for as long as the chain takes."""
        self._source: Any = None
        self._known: _Keys | None = None
        self._renewal: threading.Thread | None = None
        self.region: str | None = None
        """The chain's region; None before the first call."""

    def __repr__(self) -> str:
        return f"CredentialSource(profile={self._profile!r})"

    def session(self) -> Any:
        """Return a new boto3 session.

        Raises:
            PermanentStoreError: the profile does not exist.
        """
        boto3 = import_boto3()
        from botocore.exceptions import BotoCoreError

        try:
            return boto3.session.Session(profile_name=self._profile)
        except BotoCoreError as error:
            raise PermanentStoreError(
                f"AWS configuration: {error}; correct profile, AWS_PROFILE or ~/.aws/config"
            ) from error

    def __call__(self) -> S3Credential:
        """Return the present credentials.

        Raises:
            PermanentStoreError: the chain has no credentials.
        """
        known = self._known
        if known is None:
            known = self._find()
        elif known.renewing or self._clock() - known.found_at >= FIXED_SECONDS:
            self._renew()
        return {
            "access_key_id": known.access_key,
            "secret_access_key": known.secret_key,
            "token": known.token,
            "expires_at": datetime.datetime.now(datetime.UTC) + LIFETIME,
        }

    @property
    def has_token(self) -> bool:
        """True if the present credentials are temporary ones with a session token."""
        known = self._known
        return known is not None and bool(known.token)

    def drop(self) -> None:
        """Drop the kept credentials; the next call looks them up from the start of the chain."""
        with self._lock:
            self._source = self._known = None

    def rotated(self) -> bool:
        """Look the credentials up from the start of the chain, and return True if they have changed.

        Waits for the chain. If the chain fails, the known credentials stay.
        """
        before = self._known
        try:
            return self._find(afresh=True) != before
        except StoreError as error:
            logger.debug("credentials could not be looked up again: %s", error)
            return False

    def _renew(self) -> None:
        """Look for newer credentials in a thread that delays neither requests nor the end of the process."""
        if self._renewal is None or not self._renewal.is_alive():
            renewal = threading.Thread(target=self._renew_now, name="s3-credentials", daemon=True)
            try:
                renewal.start()
            except RuntimeError as error:
                logger.debug("no thread renews the credentials now; the next request tries again: %s", error)
            else:
                self._renewal = renewal

    def _renew_now(self) -> None:
        try:
            self._find()
        except StoreError as error:
            logger.warning("the credentials could not be renewed; the present ones are used on: %s", error)

    def _find(self, *, afresh: bool = False) -> _Keys:
        """Return what the chain finds now, and keep it.

        Args:
            afresh: begin at the start of the chain; default: False, credentials that boto3 renews are read again.

        Raises:
            PermanentStoreError: the chain has no credentials.
        """
        from botocore.credentials import RefreshableCredentials
        from botocore.exceptions import BotoCoreError

        with self._lock:
            try:
                credentials = None if afresh else self._source
                if credentials is None:
                    session = self.session()
                    self.region = session.region_name
                    credentials = session.get_credentials()
                    self._source = credentials if isinstance(credentials, RefreshableCredentials) else None
                frozen = None if credentials is None else credentials.get_frozen_credentials()
            except BotoCoreError as error:
                raise PermanentStoreError(
                    f"AWS credentials: {error}; correct the source that boto3's chain finds first"
                ) from error
            if frozen is None or not frozen.access_key or not frozen.secret_key:
                raise PermanentStoreError(
                    "no AWS credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                    "name a profile, or give this machine a role"
                )
            known = _Keys(frozen.access_key, frozen.secret_key, frozen.token, self._source is not None, self._clock())
            self._known = known
            return known
