"""Meaning of a server's errors, and of a lost connection, as errors of :mod:`tiering.errors`."""

from __future__ import annotations

from tiering.api.masking import mask_text
from tiering.errors import (
    OutOfSpaceError,
    PermanentStoreError,
    StoreError,
    TemporaryStoreError,
    WritesRefusedError,
)

_CLUSTER = "the server is a node of a cluster; clusters are not supported, name a single server"

_REFUSALS: dict[str, tuple[type[StoreError], str]] = {
    "NOREPLICAS": (WritesRefusedError, "too few replicas are connected, so the server takes no writes"),
    "MISCONF": (WritesRefusedError, "the server cannot write its snapshot, so it takes no writes"),
    "MASTERDOWN": (TemporaryStoreError, "the replica has lost its primary"),
    "BUSY": (TemporaryStoreError, "the server runs a long script"),
    "TRYAGAIN": (TemporaryStoreError, "the server asks to try again"),
    "MOVED": (PermanentStoreError, _CLUSTER),
    "CLUSTERDOWN": (PermanentStoreError, _CLUSTER),
}
"""Error codes for which valkey-py has no exception of its own, with their meaning."""


class UnknownScriptError(TemporaryStoreError):
    """The server lacks a script: it was restarted empty, or its scripts were flushed."""


def is_refusal(error: BaseException) -> bool:
    """Return True if ``error`` is the server's whole reply, so that the connection can be used again."""
    from valkey.exceptions import ResponseError

    return isinstance(error, ResponseError)


def translate(error: Exception, doing: str) -> StoreError | None:
    """Return the :class:`StoreError` for an exception of valkey-py; None for any other exception.

    Args:
        error: the exception.
        doing: the command, and the server; ends the message.
    """
    from valkey import exceptions as known

    text = mask_text(str(error))
    if isinstance(error, known.AuthenticationError):
        return PermanentStoreError(f"wrong user or password, or none given: {text} ({doing})")
    if isinstance(error, known.NoPermissionError):
        return PermanentStoreError(f"no permission; extend the user's access list: {text} ({doing})")
    if isinstance(error, known.OutOfMemoryError):
        return OutOfSpaceError(f"out of memory; blocks that are held are still served: {text} ({doing})")
    if isinstance(error, known.ReadOnlyError):
        return WritesRefusedError(f"the server is a read-only replica; name the primary: {text} ({doing})")
    if isinstance(error, known.BusyLoadingError):
        return TemporaryStoreError(f"the server is still loading its data ({doing})")
    if isinstance(error, known.NoScriptError):
        return UnknownScriptError(f"the server lacks a script, and could not load it: {text} ({doing})")
    if isinstance(error, known.ResponseError):
        kind, meaning = _REFUSALS.get(text.split(" ")[0], (PermanentStoreError, "refused"))
        return kind(f"{meaning}: {text} ({doing})")
    if isinstance(error, known.TimeoutError):
        return TemporaryStoreError(f"no answer within the time-out: {text} ({doing})")
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return PermanentStoreError(
            f"TLS: the certificate is refused; name its authority with ca_file: {text} ({doing})"
        )
    if isinstance(error, (known.ValkeyError, OSError)) and not isinstance(error, known.DataError):
        return TemporaryStoreError(f"no connection: {text} ({doing})")
    return None
