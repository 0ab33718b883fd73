"""Probes of a bucket's settings through boto3: its clock, versioning and lifecycle rules."""

from __future__ import annotations

import contextlib
import datetime
import email.utils
from collections.abc import Iterator, Mapping
from typing import Any

from tiering import PermanentStoreError
from tiering.tier import Finding, Severity
from tiers.object.bucket_options import S3Words
from tiers.object.cloud import NO_TTL
from tiers.object.faults import OBJECT_LOCK, summary
from tiers.object.names import BLOCKS, DOCUMENTS
from tiers.object.s3.credentials import CredentialSource
from tiers.object.s3.lifecycle import check_lifecycle, make_client

SKEW_WARNING = 60.0
"""Difference of the clocks in seconds from which on a warning is given."""
SKEW_ERROR = 600.0
"""Difference of the clocks in seconds that is an error; services allow about 900 s."""


def probe_settings(options: S3Words, credentials: CredentialSource, *, writes: bool) -> Iterator[Finding]:
    """Yield findings about the clocks of this machine and the service, versioning and lifecycle rules.

    Args:
        options: the tier's options.
        credentials: source of the credentials for boto3.
        writes: True if the tier stores blocks.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        client = make_client(options, credentials)
    except (BotoCoreError, PermanentStoreError) as error:
        yield Finding(Severity.WARNING, "settings", f"the bucket's settings cannot be read: {summary(error)}")
        return
    with contextlib.closing(client):
        try:
            answer = client.head_bucket(Bucket=options.bucket)
        except ClientError as error:
            answer = error.response
        except BotoCoreError:
            return
        skew = clock_skew(answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}))
        if skew is not None:
            yield _skew_finding(skew)
        if not writes:
            return
        read_only = options.model_copy(update={"install_lifecycle": False})
        names = (f"{options.prefix}{BLOCKS}", f"{options.prefix}{DOCUMENTS}")
        problem = check_lifecycle(read_only, credentials, *names)
        try:
            versioning = client.get_bucket_versioning(Bucket=options.bucket).get("Status", "Disabled")
        except (BotoCoreError, ClientError) as error:
            yield Finding(Severity.INFO, "versioning", f"cannot be read: {summary(error)}")
        else:
            yield _versioning_finding(versioning, cleaned=options.ttl is not None and problem is None)
        yield from _object_lock_findings(client, options.bucket)
    yield _lifecycle_finding(options, problem)


def clock_skew(headers: Mapping[str, Any], now: datetime.datetime | None = None) -> float | None:
    """Return the seconds by which this machine's clock is ahead of the service's; None if not known.

    Args:
        headers: headers of an answer, by lower-case name.
        now: this machine's time; default: now.
    """
    try:
        date = email.utils.parsedate_to_datetime(str(headers["date"]))
    except (KeyError, ValueError):
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=datetime.UTC)
    return ((now or datetime.datetime.now(datetime.UTC)) - date).total_seconds()


def _skew_finding(skew: float) -> Finding:
    text = f"this machine is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the service"
    if abs(skew) < SKEW_WARNING:
        return Finding(Severity.OK, "clock", text)
    severity = Severity.ERROR if abs(skew) >= SKEW_ERROR else Severity.WARNING
    return Finding(severity, "clock", text, "set the clock by NTP: services refuse signatures that are 15 minutes off")


def _versioning_finding(versioning: str, *, cleaned: bool) -> Finding:
    if versioning == "Enabled" and cleaned:
        return Finding(Severity.OK, "versioning", "enabled, and lifecycle rules remove old versions")
    if versioning == "Enabled":
        text = "the bucket keeps every version: deleted and expired blocks stay and cost money"
        remedy = "suspend versioning, or let lifecycle rules remove noncurrent versions and delete markers"
        return Finding(Severity.WARNING, "versioning", text, remedy)
    return Finding(Severity.OK, "versioning", f"{versioning.lower()}")


def _object_lock_findings(client: Any, bucket: str) -> Iterator[Finding]:
    """Yield a finding if the bucket has object lock; an error of the service counts as none."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        found = client.get_object_lock_configuration(Bucket=bucket).get("ObjectLockConfiguration", {})
    except (BotoCoreError, ClientError):
        return
    if found.get("Rule", {}).get("DefaultRetention"):
        text, _, remedy = OBJECT_LOCK.partition("; ")
        yield Finding(Severity.ERROR, "object lock", text, remedy)
    elif found.get("ObjectLockEnabled") == "Enabled":
        text = "enabled, without a default retention: blocks can be stored, and old versions stay and cost money"
        yield Finding(Severity.WARNING, "object lock", text, "use a bucket without object lock for a cache")


def _lifecycle_finding(options: S3Words, problem: str | None) -> Finding:
    if options.ttl is None:
        return NO_TTL
    if problem is None:
        return Finding(Severity.OK, "lifecycle", f"a rule removes blocks after {options.ttl_days} days or sooner")
    if options.install_lifecycle and "no lifecycle rule" in problem:
        return Finding(Severity.INFO, "lifecycle", "a rule for ttl is missing; the engine writes it at its start")
    text, _, remedy = problem.partition("; ")
    return Finding(Severity.WARNING, "lifecycle", text, remedy or "allow reading the lifecycle rules")
