"""Probes of a bucket: environment, permissions one by one, settings and block size.

The probes write and delete a few small objects below a prefix of their own. They change no setting of the bucket.
"""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError
from obstore.store import S3Store as ObjectClient

from tiering.api.masking import mask_text
from tiering.errors import PermanentStoreError, StoreError
from tiering.secondary.admin.contract import Finding, Severity
from tiers.object.admin import check_lifecycle, make_client
from tiers.object.credentials import CredentialSource
from tiers.object.faults import STORE_FAILURES, summary, translate
from tiers.object.options import S3Options, small_block_warning
from tiers.object.store import BLOCKS, DOCUMENTS, ObjectStore

SKEW_WARNING = 60.0
"""Difference of the clocks in seconds from which on a warning is given."""
SKEW_ERROR = 600.0
"""Difference of the clocks in seconds that is an error; services allow about 900 s."""

_PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
_AUTHORITIES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_SYSTEM = ("/etc/ssl/", "/etc/pki/")
"""Begin the paths of the system's own authorities, which the data path trusts in any case."""
_ATTEMPTS = 2

_PERMISSIONS = {
    "list": "s3:ListBucket on the bucket",
    "put": "s3:PutObject on the objects",
    "head": "s3:GetObject on the objects",
    "get": "s3:GetObject on the objects",
    "conditional put": "s3:PutObject on the objects",
    "delete": "s3:DeleteObject on the objects",
}


def probe_bucket(options: S3Options, block_bytes: int) -> Iterator[Finding]:
    """Yield findings about the bucket of a tier.

    Args:
        options: options of the tier.
        block_bytes: bytes of the largest block.
    """
    yield from _probe_environment(options)
    credentials = CredentialSource(options.profile)
    try:
        credentials()
        found = credentials.session().get_credentials()
    except StoreError as error:
        yield Finding(Severity.ERROR, "credentials", str(error), "give this process credentials as for boto3")
        return
    yield Finding(Severity.OK, "credentials", f"found by boto3 ({found.method})")
    store = ObjectStore(options.model_copy(update={"ttl": None, "install_lifecycle": False}), credentials)
    try:
        began = time.monotonic()
        store.open()
    except StoreError as error:
        yield Finding(Severity.ERROR, "list", str(error), _remedy("list", error))
        yield from _probe_settings(options, credentials, writes=False)
        return
    try:
        yield Finding(Severity.OK, "list", f"{options.location} answers in {1e3 * (time.monotonic() - began):.0f} ms")
        yield from _Permissions(options, store.requests.client).probe()
    finally:
        store.close()
    yield from _probe_settings(options, credentials, writes=options.admission != "none")
    small = small_block_warning(block_bytes)
    if small is not None and options.admission != "none":
        text, _, remedy = small.rpartition("; ")
        yield Finding(Severity.WARNING, "block size", text, remedy)


def _remedy(step: str, error: StoreError) -> str:
    if isinstance(error.__cause__, OSError) or error.temporary:
        return "look at endpoint_url, the network, the proxy variables and ca_file"
    return f"grant {_PERMISSIONS[step]}, and look at bucket, region, profile and prefix"


# -------------------------------------------------------------------------------------------------------- permissions


@dataclass(frozen=True, slots=True)
class _Permissions:
    """Probes what the credentials may do, on objects of their own."""

    options: S3Options
    client: ObjectClient

    def probe(self) -> Iterator[Finding]:
        name = f"{self.options.prefix}scratch-{secrets.token_hex(4)}/probe"
        content = secrets.token_bytes(64)
        put = self._step("put", lambda: obstore.put(self.client, name, content, use_multipart=False))
        yield put
        if put.severity is not Severity.OK:
            return
        try:
            yield self._step("head", lambda: obstore.head(self.client, name))
            yield self._step("get", lambda: self._read_back(name, content))
            if self.options.conditional_put:
                yield self._conditional(name)
        finally:
            deleted = self._step("delete", lambda: obstore.delete(self.client, [name]))
        if deleted.severity is Severity.OK and self._is_there(name):
            deleted = Finding(
                Severity.ERROR,
                "delete",
                "deleted objects are still there: the service ignores DeleteObjects",
                "set bulk_delete: false",
            )
        yield deleted

    def _step(self, step: str, run: Callable[[], object]) -> Finding:
        began = time.monotonic()
        for attempt in range(_ATTEMPTS):
            try:
                run()
            except STORE_FAILURES as failure:
                error = failure if isinstance(failure, StoreError) else translate(failure, step)
                if not error.temporary or attempt + 1 == _ATTEMPTS:
                    return self._refused(step, error)
            else:
                break
        return Finding(Severity.OK, step, f"allowed, {1e3 * (time.monotonic() - began):.0f} ms")

    def _refused(self, step: str, error: StoreError) -> Finding:
        if self.options.admission == "none" and step != "get":
            return Finding(Severity.INFO, step, f"{error}; admission is none, so the tier does not need it")
        remedy = "set bulk_delete: false, or " if step == "delete" and self.options.bulk_delete else ""
        return Finding(Severity.ERROR, step, str(error), f"{remedy}{_remedy(step, error)}")

    def _read_back(self, name: str, content: bytes) -> None:
        found = obstore.get(self.client, name).bytes().to_bytes()
        if found != content:
            raise PermanentStoreError(f"get: {len(found)} bytes came back that are not the {len(content)} written")

    def _conditional(self, name: str) -> Finding:
        try:
            obstore.put(self.client, name, b"another", use_multipart=False, mode="create")
        except AlreadyExistsError:
            return Finding(Severity.OK, "conditional put", "the service refuses to replace an object (If-None-Match)")
        except STORE_FAILURES as failure:
            error = translate(failure, "conditional put")
            return Finding(
                Severity.ERROR,
                "conditional put",
                str(error),
                "set conditional_put: false, or use a service that has it",
            )
        return Finding(
            Severity.WARNING,
            "conditional put",
            "the service ignores If-None-Match: engines that start at the same time may not share their blocks",
            "set conditional_put: false, and start the first engine of a model alone",
        )

    def _is_there(self, name: str) -> bool:
        try:
            obstore.head(self.client, name)
        except STORE_FAILURES:
            return False
        return True


# ------------------------------------------------------------------------------------------------------------ settings


def _probe_environment(options: S3Options) -> Iterator[Finding]:
    proxies = [f"{name}={os.environ[name]}" for name in _PROXIES if os.environ.get(name)]
    if proxies:
        without = os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or "nothing"
        yield Finding(
            Severity.INFO,
            "proxy",
            mask_text(f"{', '.join(proxies)}; without it: {without}"),
            "add the endpoint's host to NO_PROXY if it can be reached directly: a proxy costs bandwidth",
        )
    plain = (options.endpoint or "").startswith("http://")
    bundles = [name for name in _AUTHORITIES if not os.environ.get(name, _SYSTEM[0]).startswith(_SYSTEM)]
    if bundles and options.ca_file is None and not plain:
        yield Finding(
            Severity.WARNING,
            "certificates",
            f"{', '.join(bundles)} is set, and the data path does not read it",
            f"set ca_file: {os.environ[bundles[0]]}",
        )
    if options.ca_file is not None and not os.access(options.ca_file, os.R_OK):
        yield Finding(Severity.ERROR, "certificates", f"ca_file {options.ca_file} cannot be read", "correct the path")
    if plain:
        yield Finding(Severity.INFO, "encryption", "the endpoint is plain http: blocks cross the network unencrypted")


def _probe_settings(options: S3Options, credentials: CredentialSource, *, writes: bool) -> Iterator[Finding]:
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
        try:
            versioning = client.get_bucket_versioning(Bucket=options.bucket).get("Status", "Disabled")
        except (BotoCoreError, ClientError) as error:
            yield Finding(Severity.INFO, "versioning", f"cannot be read: {summary(error)}")
        else:
            yield _versioning_finding(versioning)
    yield from _probe_lifecycle(options, credentials)


def clock_skew(headers: Mapping[str, Any], now: datetime.datetime | None = None) -> float | None:
    """Return the seconds by which this machine's clock is ahead of the service's; None if not known.

    Args:
        headers: headers of an answer, by lower-case name.
        now: this machine's time (default: now).
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


def _versioning_finding(versioning: str) -> Finding:
    if versioning == "Enabled":
        return Finding(
            Severity.WARNING,
            "versioning",
            "the bucket keeps every version: deleted and expired blocks stay and cost money",
            "suspend versioning, or let a lifecycle rule remove noncurrent versions",
        )
    return Finding(Severity.OK, "versioning", f"{versioning.lower()}")


def _probe_lifecycle(options: S3Options, credentials: CredentialSource) -> Iterator[Finding]:
    if options.ttl is None:
        yield Finding(
            Severity.INFO,
            "lifecycle",
            "no ttl: blocks stay until they are removed",
            "set ttl, or run kv-tiering gc regularly",
        )
        return
    read_only = options.model_copy(update={"install_lifecycle": False})
    problem = check_lifecycle(read_only, credentials, f"{options.prefix}{BLOCKS}", f"{options.prefix}{DOCUMENTS}")
    if problem is None:
        yield Finding(Severity.OK, "lifecycle", f"a rule removes blocks after {options.ttl_days} days or sooner")
    elif options.install_lifecycle and "no lifecycle rule" in problem:
        yield Finding(Severity.INFO, "lifecycle", "the rule for ttl is missing; the engine writes it at its start")
    else:
        text, _, remedy = problem.partition("; ")
        yield Finding(Severity.WARNING, "lifecycle", text, remedy or "allow reading the lifecycle rules")
