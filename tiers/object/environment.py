"""The credentials that obstore takes from the environment: their sources and their changes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class EnvironmentSource:
    """One way in which the environment gives credentials."""

    text: str
    """The kind of the credentials, for people."""
    variables: tuple[str, ...]
    """Variables that can give the credentials."""
    is_file: bool = False
    """True if a variable names a file with the credentials; default False."""

    def variable(self) -> str | None:
        """Return the variable that gives the credentials; None if none is set."""
        return next((name for name in self.variables if os.environ.get(name)), None)


def present_source(sources: Sequence[EnvironmentSource]) -> tuple[EnvironmentSource, str] | None:
    """Return the first source that the environment has, and its variable; None if there is none."""
    for source in sources:
        variable = source.variable()
        if variable is not None:
            return source, variable
    return None


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
