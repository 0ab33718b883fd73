"""Translation of obstore's exceptions into temporary and permanent store errors.

The exception's type decides where it is specific enough, then the HTTP status. Every other failure (no connection,
reset, time-out, truncated body) is the network's, hence temporary.
"""

from __future__ import annotations

import re

from obstore.exceptions import (
    BaseError,
    GenericError,
    InvalidPathError,
    NotSupportedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)

from tiering.api.masking import mask_text
from tiering.errors import PermanentStoreError, StoreError, TemporaryStoreError

STORE_FAILURES = (BaseError, OSError, ValueError, TypeError)
"""The exceptions that obstore's functions raise; some failures come as built-in types."""

_STATUS = re.compile(r"status code: (\d{3})")
_TRY_AGAIN = frozenset({408, 409, 425, 429})
_REFUSED = (
    "refused: wrong or expired credentials, or no permission "
    "(s3:GetObject, PutObject, DeleteObject and ListBucket are needed)"
)


def translate(error: Exception, doing: str) -> StoreError:
    """Return the :class:`StoreError` that stands for ``error``. Chain it to ``error`` when raising.

    Args:
        error: An exception that obstore raised.
        doing: The operation that failed; begins the message.
    """
    text = f"{doing}: {summary(error)}"
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
        return PermanentStoreError(f"{doing}: {_REFUSED}: {summary(error)}")
    if isinstance(error, (InvalidPathError, NotSupportedError, UnknownConfigurationKeyError, TypeError, ValueError)):
        return PermanentStoreError(text)
    if isinstance(error, FileNotFoundError):
        return PermanentStoreError(f"{doing}: no such bucket: {summary(error)}")
    if isinstance(error, GenericError):
        status = http_status(error)
        if status in {401, 403}:
            return PermanentStoreError(f"{doing}: {_REFUSED}: {summary(error)}")
        if status == 404:
            return PermanentStoreError(f"{doing}: no such bucket: {summary(error)}")
        if status == 501 or (status is not None and 300 <= status < 500 and status not in _TRY_AGAIN):
            return PermanentStoreError(text)
    return TemporaryStoreError(text)


def http_status(error: Exception) -> int | None:
    """Return the HTTP status of the answer, found in the exception's text; None if there is none."""
    found = _STATUS.search(str(error).partition("\n\n")[0])
    return int(found[1]) if found else None


def summary(error: Exception) -> str:
    """Return the first paragraph of an exception's text on one line of at most 300 characters.

    Secrets are masked. The later paragraphs, obstore's debugging output, are left out.
    """
    line = mask_text(" ".join(str(error).partition("\n\n")[0].split()))
    return line if len(line) <= 300 else line[:297] + "..."
