"""Probes of a bucket: environment, permissions one by one, settings and block size.

The probes write and delete a few small objects below a prefix of their own. They change no setting of the bucket.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import AlreadyExistsError

from tiering import PermanentStoreError, StoreError
from tiering.tier import Finding, Severity, mask_text
from tiers.object.bucket_options import BucketOptions, small_block_warning, without_ttl
from tiers.object.cloud import Cloud, authorities
from tiers.object.clouds import make_cloud
from tiers.object.faults import CONDITION_UNKNOWN, STORE_FAILURES, Cause, http_status
from tiers.object.store import ObjectStore

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client

_PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
_ATTEMPTS = 2
_OVERLOADED = frozenset({429, 503})
_REMEDIES = {
    Cause.SPACE: "raise the quota or the limit",
    Cause.BUCKET: "correct the words that name the bucket",
    Cause.REQUEST: "correct the words that name the bucket, its region and its endpoint",
    Cause.PASSING: "look at endpoint_url, the network, the proxy variables and ca_file",
}
"""Remedies of failures whose text has none."""


def probe_bucket(options: BucketOptions, block_bytes: int) -> Iterator[Finding]:
    """Yield findings about the bucket of a tier."""
    yield from _probe_environment(options)
    cloud, writes = make_cloud(options), options.admission != "none"
    try:
        yield from cloud.probe_credentials()
    except StoreError as error:
        text, _, remedy = str(error).partition("; ")
        yield Finding(
            Severity.ERROR, "credentials", text, remedy or "give this process credentials by the cloud's chain"
        )
        return
    store = ObjectStore(without_ttl(options), cloud)
    try:
        began = time.monotonic()
        store.open()
    except StoreError as error:
        yield Finding(Severity.ERROR, "list", *_explained(cloud, "list", error))
        yield from cloud.probe_settings(writes=False)
        return
    try:
        yield Finding(Severity.OK, "list", f"{options.location} answers in {1e3 * (time.monotonic() - began):.0f} ms")
        yield from _Permissions(cloud, store.requests.client).probe()
    finally:
        store.close()
    yield from cloud.probe_settings(writes=writes)
    small = small_block_warning(block_bytes)
    if small is not None and writes:
        text, _, remedy = small.rpartition("; ")
        yield Finding(Severity.WARNING, "block size", text, remedy)


def _explained(cloud: Cloud, step: str, error: StoreError) -> tuple[str, str]:
    """Return the text and the one remedy of a step that failed: what the cause needs, and nothing else."""
    answer = error.__cause__
    if not isinstance(answer, STORE_FAILURES):
        text, _, remedy = str(error).partition("; ")
        return text, remedy
    fault = cloud.dialect.diagnose(answer)
    text = str(error).replace(f"; {fault.remedy}", "", 1) if fault.remedy else str(error)
    grant = f"grant {cloud.permissions[step]}"
    if fault.cause is Cause.PERMISSION:
        return text, grant
    if fault.cause is Cause.KEYS and not fault.remedy:
        # A refusal without a reason: once a step was allowed, the credentials themselves are right.
        return text, f"correct the credentials or the clock, or {grant}" if step == "list" else grant
    if fault.cause is Cause.PASSING and fault.status in _OVERLOADED:
        return text, "try again; if it lasts, ask the service for more requests per second"
    return text, fault.remedy or _REMEDIES.get(fault.cause, "")


@dataclass(frozen=True, slots=True)
class _Permissions:
    """Probes what the credentials may do, on objects of their own."""

    cloud: Cloud
    client: Client

    @property
    def options(self) -> BucketOptions:
        return self.cloud.options

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
            yield self._version(f"{name}-version")
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
            error: StoreError
            try:
                run()
                break
            except StoreError as failure:
                error = failure
            except STORE_FAILURES as failure:
                error = self.cloud.dialect.translate(failure, step)
                error.__cause__ = failure
            if not error.temporary or attempt + 1 == _ATTEMPTS:
                return self._refused(step, error)
        return Finding(Severity.OK, step, f"allowed, {1e3 * (time.monotonic() - began):.0f} ms")

    def _refused(self, step: str, error: StoreError) -> Finding:
        if self.options.admission == "none" and step != "get":
            return Finding(Severity.INFO, step, f"{error}; admission is none, so the tier does not need it")
        text, remedy = _explained(self.cloud, step, error)
        deletes_many = step == "delete" and self.options.scheme == "s3" and self.cloud.per_request > 1
        other = "set bulk_delete: false, or " if deletes_many else ""
        return Finding(Severity.ERROR, step, text, f"{other}{remedy}")

    def _read_back(self, name: str, content: bytes) -> None:
        found = obstore.get(self.client, name).bytes().to_bytes()
        if found != content:
            raise PermanentStoreError(
                f"get: {len(found)} bytes came back that are not the {len(content)} written; "
                "look for a proxy or a cache between this machine and the service"
            )

    def _conditional(self, name: str) -> Finding:
        try:
            obstore.put(self.client, name, b"another", use_multipart=False, mode="create")
        except AlreadyExistsError:
            return Finding(Severity.OK, "conditional put", "the service refuses to replace an object (If-None-Match)")
        except STORE_FAILURES as failure:
            error = self.cloud.dialect.translate(failure, "conditional put")
            text = str(error)
            remedy = "set conditional_put: false, or use a service that has it"
            return Finding(Severity.ERROR, "conditional put", text, remedy)
        text = "the service ignores If-None-Match: engines that start at the same time may not share their blocks"
        remedy = "set conditional_put: false, and start the first engine of a model alone"
        return Finding(Severity.WARNING, "conditional put", text, remedy)

    def _version(self, name: str) -> Finding:
        """Return the finding about a deletion that has a condition, which corrupt blocks need."""

        def run() -> None:
            obstore.put(self.client, name, b"x", use_multipart=False)
            version = self.cloud.version(obstore.head(self.client, name))
            try:
                obstore.delete(self.cloud.deleter(name, version), name)
            except STORE_FAILURES as error:
                obstore.delete(self.client, name)
                if http_status(error) not in CONDITION_UNKNOWN:
                    raise

        found = self._step("delete one version", run)
        if found.severity is not Severity.ERROR:
            return found
        text = f"{found.text}; corrupt objects are not deleted, and their blocks get second names"
        return Finding(Severity.WARNING, found.subject, text, found.remedy)

    def _is_there(self, name: str) -> bool:
        try:
            obstore.head(self.client, name)
        except STORE_FAILURES:
            return False
        return True


def _probe_environment(options: BucketOptions) -> Iterator[Finding]:
    proxies = [f"{name}={os.environ[name]}" for name in _PROXIES if os.environ.get(name)]
    if proxies:
        without = os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or "nothing"
        text = mask_text(f"{', '.join(proxies)}; without it: {without}")
        remedy = "add the endpoint's host to NO_PROXY if it can be reached directly: a proxy costs bandwidth"
        yield Finding(Severity.INFO, "proxy", text, remedy)
    plain = (options.endpoint or "").startswith("http://")
    found = None if plain else authorities(options)
    if found is not None:
        word, path = found
        if not os.access(path, os.R_OK):
            yield Finding(Severity.ERROR, "certificates", f"{word} {path} cannot be read", "correct the path")
        elif word != "ca_file":
            yield Finding(Severity.INFO, "certificates", f"{word} names the authorities that are trusted: {path}")
    if plain:
        yield Finding(Severity.INFO, "encryption", "the endpoint is plain http: blocks cross the network unencrypted")
