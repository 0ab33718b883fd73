"""Contract of a back end: the part of the object store tier that differs between clouds."""

from __future__ import annotations

import os
import re
import ssl
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import obstore

from tiering import PermanentStoreError
from tiering.tier import Finding, Severity
from tiers.object.bucket_options import BLOCKS, DOCUMENTS, BucketOptions
from tiers.object.faults import Dialect

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ClientConfig, RetryConfig
    from obstore.store import ObjectStore as Client

AUTHORITIES = ("AWS_CA_BUNDLE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
"""Variables of the environment that name a PEM file of authorities; the first one that is set counts."""

NO_TTL = Finding(
    Severity.INFO,
    "lifecycle",
    "no ttl: blocks stay until they are removed",
    "set ttl, or run kv-tiering gc STACK --yes every day",
)

NO_RETRIES: RetryConfig = {"max_retries": 0}
"""Retries of a client: none, because a layer above retries."""

_MD5 = re.compile("[0-9a-fA-F]{32}")


class Cloud(ABC):
    """Clients, credentials, error codes and administration of one cloud. Any thread may call."""

    dialect: ClassVar[Dialect]
    """Meaning of the service's failures."""
    permissions: ClassVar[Mapping[str, str]]
    """Permission that each step of a check needs: list, put, head, get, conditional put, delete."""
    bulk: int = 1000
    """Maximum number of names in one call of a deletion; default 1,000."""
    per_request: int = 1000
    """Maximum number of objects that one request deletes; default 1,000."""
    condition: ClassVar[str] = "if-match"
    """Header with the version that a request is for; default "if-match"."""

    def __init__(self, options: BucketOptions) -> None:
        self.options = options

    @abstractmethod
    def prepare(self) -> None:
        """Look up the credentials from the start of their chain.

        Raises:
            StoreError: there are no credentials, or they must not be sent to this endpoint.
        """

    @abstractmethod
    def connect(self, headers: Mapping[str, str] | None = None) -> Client:
        """Return a new client, with connections of its own.

        Args:
            headers: headers of every request; default: none.

        Raises:
            PermanentStoreError: the options or the environment do not make a client.
        """

    def deleter(self, name: str, version: str) -> Client:
        """Return a new client whose deletion of ``name`` has the condition that the object is this version.

        Raises:
            PermanentStoreError: there can be no such client.
            Exception: one of :data:`tiers.object.faults.STORE_FAILURES`, as obstore raised it.
        """
        return self.connect({self.condition: version})

    def version(self, meta: ObjectMeta) -> str:
        """Return the text that names one version of an object, by default the ETag; empty if there is none."""
        return meta["e_tag"] or ""

    def digest(self, meta: ObjectMeta) -> str | None:
        """Return the MD5 of an object's bytes in hexadecimal; None (default) if there is none."""
        return None

    def renew(self, client: Client, name: str) -> None:
        """Copy an object onto itself, so that its age counts from now on.

        Raises:
            StoreError: the object cannot be copied.
            Exception: one of :data:`tiers.object.faults.STORE_FAILURES`, as obstore raised it.
        """
        obstore.copy(client, name, name)

    def close(self) -> None:
        """Release what the back end holds besides clients of obstore. May be called twice."""

    def rotated(self) -> bool:
        """Look the credentials up again after a refusal, and return True if they have changed.

        The default is False: a new client would send the same credentials.
        """
        return False

    def check_lifecycle(self, blocks: str, documents: str) -> str | None:
        """Return a problem of the bucket's rules for ``ttl``, as text; None if there is none.

        Args:
            blocks: prefix of all block objects.
            documents: prefix of all documents; no rule may let them expire.
        """
        return None

    @abstractmethod
    def probe_credentials(self) -> Iterator[Finding]:
        """Yield findings about the credentials.

        Raises:
            StoreError: there are no credentials.
        """

    def probe_settings(self, *, writes: bool) -> Iterator[Finding]:
        """Yield findings about the bucket's settings, as far as they can be read.

        The default yields what removes old blocks.

        Args:
            writes: True if the tier stores blocks.
        """
        if not writes:
            return
        if self.options.ttl is None:
            yield NO_TTL
            return
        prefix = self.options.prefix
        text, _, remedy = (self.check_lifecycle(f"{prefix}{BLOCKS}", f"{prefix}{DOCUMENTS}") or "").partition("; ")
        if text:
            yield Finding(Severity.INFO, "lifecycle", text, remedy)


def md5_tag(meta: ObjectMeta) -> str | None:
    """Return the ETag of an object if it is an MD5, as of an object that was uploaded whole; else None."""
    tag = (meta["e_tag"] or "").strip('"')
    return tag.lower() if _MD5.fullmatch(tag) else None


def client_options(options: BucketOptions, headers: Mapping[str, str] | None = None) -> ClientConfig:
    """Return the HTTP options of a client. Proxies come from the environment by themselves.

    Args:
        options: the tier's options.
        headers: headers of every request; default: none.

    Raises:
        PermanentStoreError: the file of authorities cannot be read.
    """
    timeout = min(options.request_timeout, options.deadline)
    config: ClientConfig = {
        # With https, the client also refuses redirects to plain HTTP.
        "allow_http": (options.endpoint or "").startswith("http://"),
        "connect_timeout": timedelta(seconds=min(options.connect_timeout, timeout)),
        "timeout": timedelta(seconds=timeout),
    }
    if headers:
        config["default_headers"] = dict(headers)
    found = authorities(options)
    if found is not None:
        word, path = found
        try:
            config["root_certificate"] = path.read_bytes()
        except OSError as error:
            raise PermanentStoreError(f"{word} {path} cannot be read ({error}); correct the path") from error
    return config


def authorities(options: BucketOptions) -> tuple[str, Path] | None:
    """Return the file of authorities with the name of its word or variable; None: no file is named.

    ``ca_file`` counts before the environment's variables (:data:`AUTHORITIES`).
    """
    if options.ca_file is not None:
        return "ca_file", options.ca_file
    return next(((name, Path(os.environ[name])) for name in AUTHORITIES if os.environ.get(name)), None)


def verification(options: BucketOptions) -> str | bool:
    """Return the ``verify`` argument for boto3, with which it trusts the data path's authorities."""
    found = authorities(options)
    return str(found[1]) if found is not None else ssl.get_default_verify_paths().cafile or True
