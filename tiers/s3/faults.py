"""What an object store's failures mean: obstore's exceptions, turned into this project's temporary and permanent errors.

The type decides where it tells enough; otherwise the HTTP status; what is left (no connection, reset, time-out, a body
cut short) is the network's, hence temporary.
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
"""What obstore's functions raise; it uses built-in types for some failures."""

_STATUS = re.compile(r"status code: (\d{3})")
_TRY_AGAIN = frozenset({408, 409, 425, 429})
_REFUSED = "refused: wrong or expired credentials, or no permission (s3:GetObject, PutObject, DeleteObject and ListBucket are needed)"


def translate(error: Exception, doing: str) -> StoreError:
    """The :class:`StoreError` for ``error``, which obstore raised while ``doing`` something; chain it to ``error`` when raising."""
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
    """The status that the service answered with, where obstore tells it only in its text."""
    found = _STATUS.search(str(error).partition("\n\n")[0])
    return int(found[1]) if found else None


def summary(error: Exception) -> str:
    """The first paragraph of an exception's text, on one line and not too long; obstore adds pages for debugging."""
    line = mask_text(" ".join(str(error).partition("\n\n")[0].split()))
    return line if len(line) <= 300 else line[:297] + "..."
