"""Settings of a bucket through boto3: lifecycle rules, versioning and the clock."""

from __future__ import annotations

import contextlib
import datetime
import email.utils
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tiering import PermanentStoreError
from tiering.tier import HOT, Finding, Severity
from tiers.object.bucket_options import BLOCKS, DOCUMENTS, S3Words
from tiers.object.cloud import NO_TTL, verification
from tiers.object.faults import OBJECT_LOCK, summary
from tiers.object.s3.credentials import DEFAULT_REGION, CredentialSource

RULE_PREFIX = "kv-tiering "
"""Begins the ids of this tier's lifecycle rules; the prefix of the expiring objects completes an id."""
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


def make_client(options: S3Words, credentials: CredentialSource) -> Any:
    """Return a boto3 S3 client for administration.

    Raises:
        PermanentStoreError: the profile does not exist.
    """
    session = credentials.session()
    timeout = min(options.request_timeout, options.deadline)
    return session.client(
        "s3",
        endpoint_url=options.endpoint,
        region_name=options.region or session.region_name or DEFAULT_REGION,
        verify=verification(options),
        config=Config(
            s3={"addressing_style": "path" if options.uses_path_style else "virtual"},
            retries={"total_max_attempts": 2, "mode": "standard"},
            connect_timeout=min(options.connect_timeout, timeout),
            read_timeout=timeout,
        ),
    )


def check_lifecycle(options: S3Words, credentials: CredentialSource, blocks: str, documents: str) -> str | None:
    """Return a problem of the bucket's lifecycle rules, as text; None if ``ttl`` is enforced correctly.

    With ``install_lifecycle``, a missing rule is written first. Errors of the service are returned, not raised.

    Args:
        options: the tier's options; without ``ttl`` nothing is checked.
        credentials: source of the credentials for boto3.
        blocks: prefix of all block objects.
        documents: prefix of all documents; no rule may let them expire.
    """
    days = options.ttl_days
    if days is None:
        return None
    try:
        client = make_client(options, credentials)
    except (BotoCoreError, PermanentStoreError) as error:
        return f"ttl: the lifecycle rules of the bucket cannot be read: {summary(error)}"
    try:
        rules = _read_rules(client, options.bucket)
        problem = _missing(rules, blocks, days, versioned=_keeps_versions(client, options.bucket))
        if problem is not None and not options.install_lifecycle:
            return f"ttl: {problem}; set install_lifecycle: true, or add the rule yourself"
        expires_hot = any(_expires(rule, f"{documents}{HOT}", 1) for rule in rules)
        if options.install_lifecycle and (problem is not None or not expires_hot):
            ours = _rules(blocks, documents, days)
            rules = [rule for rule in rules if rule.get("ID") not in {own["ID"] for own in ours}] + ours
            client.put_bucket_lifecycle_configuration(Bucket=options.bucket, LifecycleConfiguration={"Rules": rules})
        if any(_expires(rule, documents, None) for rule in rules):
            return (
                f"a lifecycle rule of this bucket lets {documents}* expire, and a lost epoch document makes blocks "
                "from before a reset readable again; restrict that rule to other prefixes"
            )
    except (BotoCoreError, ClientError) as error:
        return (
            f"ttl: the lifecycle rules of the bucket cannot be read or written, so ttl may not hold: {summary(error)}"
        )
    finally:
        client.close()
    return None


def _read_rules(client: Any, bucket: str) -> list[dict[str, Any]]:
    try:
        return list(client.get_bucket_lifecycle_configuration(Bucket=bucket).get("Rules", ()))
    except ClientError as error:
        if error.response["Error"]["Code"] == "NoSuchLifecycleConfiguration":
            return []
        raise


def _keeps_versions(client: Any, bucket: str) -> bool:
    """Return True if the bucket keeps old versions; a suspended bucket keeps those from before."""
    try:
        return client.get_bucket_versioning(Bucket=bucket).get("Status") in {"Enabled", "Suspended"}
    except ClientError:
        return False  # no permission, or no such call: the bucket counts as one without versions


def _missing(rules: Sequence[dict[str, Any]], blocks: str, days: int, *, versioned: bool) -> str | None:
    """Return the reason why ``rules`` do not enforce an age of ``days`` days; None if they do."""
    if not any(_expires(rule, blocks, days) for rule in rules):
        return f"no lifecycle rule removes {blocks}* after {days} days or sooner, so blocks stay forever"
    if not versioned:
        return None
    applied = [rule for rule in rules if _covers(rule, blocks)]
    if not any("NoncurrentDays" in rule.get("NoncurrentVersionExpiration", {}) for rule in applied):
        return f"the bucket keeps versions, and no lifecycle rule removes noncurrent versions of {blocks}*"
    if not any(rule.get("Expiration", {}).get("ExpiredObjectDeleteMarker") for rule in applied):
        return f"the bucket keeps versions, and no lifecycle rule removes the delete markers of {blocks}*"
    return None


def _rules(blocks: str, documents: str, days: int) -> list[dict[str, Any]]:
    """Return this tier's rules: blocks and hot keys expire; old versions and markers go everywhere.

    A rule that counts days cannot remove delete markers as well, so these have rules of their own.
    """
    own: dict[str, Any] = {"Status": "Enabled", "NoncurrentVersionExpiration": {"NoncurrentDays": 1}}
    expiry = {
        "ID": f"{RULE_PREFIX}{blocks}",
        "Filter": {"Prefix": blocks},
        "Expiration": {"Days": days},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
    }
    hot = {
        "ID": f"{RULE_PREFIX}{documents}{HOT}",
        "Filter": {"Prefix": f"{documents}{HOT}"},
        "Expiration": {"Days": 1},
    }
    markers = [
        {
            "ID": f"{RULE_PREFIX}markers {prefix}",
            "Filter": {"Prefix": prefix},
            "Expiration": {"ExpiredObjectDeleteMarker": True},
        }
        for prefix in (blocks, documents)
    ]
    return [own | rule for rule in (expiry, hot, *markers)]


def _covers(rule: dict[str, Any], prefix: str) -> bool:
    """Return True if ``rule`` applies to everything under ``prefix``."""
    chosen = rule.get("Filter", {})
    if rule.get("Status") != "Enabled" or set(chosen) - {"Prefix"}:
        return False
    return prefix.startswith(chosen.get("Prefix", rule.get("Prefix", "")))


def _expires(rule: dict[str, Any], prefix: str, days: int | None) -> bool:
    """Return True if ``rule`` removes everything under ``prefix``, within ``days`` days if given."""
    found = rule.get("Expiration", {}).get("Days")
    return _covers(rule, prefix) and found is not None and (days is None or found <= days)
