"""Back ends whose credentials obstore takes from the environment, with the sources of each."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

from obstore.exceptions import BaseError

from tiering.tier import Finding, Severity
from tiers.object.bucket_options import BucketOptions
from tiers.object.cloud import Cloud

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Client

C = TypeVar("C", bound="Client")


@dataclass(frozen=True, slots=True)
class EnvironmentSource:
    """One way in which the environment gives credentials."""

    text: str
    """The kind of the credentials, for people."""
    variables: tuple[str, ...]
    """Variables that can give the credentials."""
    is_file: bool = False
    """True if a variable names a file with the credentials; default False."""


def present_source(sources: Sequence[EnvironmentSource]) -> tuple[EnvironmentSource, str] | None:
    """Return the first source that the environment has, and its variable; None if there is none."""
    found = ((source, name) for source in sources for name in source.variables if os.environ.get(name))
    return next(found, None)


def fingerprint(sources: Sequence[EnvironmentSource]) -> bytes:
    """Return a digest of all credentials in the environment, the contents of files included."""
    digest = hashlib.sha256()
    for source in sources:
        for name in source.variables:
            value = os.environ.get(name, "")
            digest.update(f"{name}={value}\n".encode(errors="surrogateescape"))
            if source.is_file and value:
                try:
                    digest.update(Path(value).read_bytes())
                except OSError:
                    digest.update(b"unreadable")
    return digest.digest()


class EnvironmentCloud(Cloud):
    """Back end whose credentials obstore finds and renews; the first request looks for them."""

    sources: ClassVar[Sequence[EnvironmentSource]]
    """Sources of credentials, in obstore's order."""
    keys: ClassVar[str]
    """Way to correct credentials that are refused."""
    machine: ClassVar[str]
    """Credentials without a source in the environment, for people."""
    lifecycle: ClassVar[str]
    """Text about rules for ``ttl``, which obstore cannot read, with the fields ``blocks`` and ``days``."""

    def __init__(self, options: BucketOptions) -> None:
        super().__init__(options)
        self._used = b""

    def prepare(self) -> None:
        """Nothing to look up."""

    def rotated(self) -> bool:
        return fingerprint(self.sources) != self._used

    def check_lifecycle(self, blocks: str, documents: str) -> str | None:
        return self.lifecycle.format(blocks=blocks, days=self.options.ttl_days)

    def probe_credentials(self) -> Iterator[Finding]:
        found = present_source(self.sources)
        text = self.machine if found is None else f"{found[0].text} ({found[1]})"
        yield Finding(Severity.OK, "credentials", text)

    def make(self, client: Callable[[], C]) -> C:
        """Return the client that a function makes with the credentials of the environment.

        Raises:
            PermanentStoreError: the options or the environment do not make a client.
        """
        self._used = fingerprint(self.sources)
        try:
            return client()
        except (BaseError, ValueError) as error:
            raise self.dialect.translate(error, f"the credentials in the environment: {self.keys}") from error
