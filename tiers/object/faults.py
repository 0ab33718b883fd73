"""Translation of obstore's exceptions into store errors that name the cause first.

The service's error code decides, then the HTTP status, then the exception's type. Every other failure (no connection,
reset, time-out, truncated body) is the network's, hence temporary.
"""

from __future__ import annotations

import contextlib
import enum
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    InvalidPathError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)

from tiering import OutOfSpaceError, PermanentStoreError, StoreError, TemporaryStoreError
from tiering.tier import mask_text

STORE_FAILURES = (BaseError, OSError, ValueError, TypeError)
"""The exceptions that obstore's functions raise; some failures come as built-in types."""

CONDITION_UNKNOWN = frozenset({400, 501})
"""Answers of services without conditional deletion."""

_REQUEST_ERRORS = (InvalidPathError, NotSupportedError, UnknownConfigurationKeyError, TypeError, ValueError)
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>\s*([A-Za-z0-9.]+)\s*</Code>")
_URL = re.compile(r"Error performing [A-Z]+ [a-z]+://(?:[^/\s@]*@)?([^/\s?]+)")
_QUERY = re.compile(r"(?<=[^\s?])\?[^\s?=]+=[^\s)]*")
"""Query of a URL, which may hold a signature."""
_DNS_ERROR = re.compile(r"error: \"([^\"]*lookup[^\"]*|[^\"]*name[^\"]*)\"", re.IGNORECASE)
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(?:Other\(\s*OtherError\(\s*)?(\w+)")
_MAX_TEXT = 300
_LOCKED = re.compile(r"\bobject lock\b", re.IGNORECASE)
"""Words of an answer that names object lock, whose error code is that of any invalid request.

They cannot match a URL, which has no blanks.
"""
_TRY_AGAIN = frozenset({408, 409, 425, 429})
_TOKEN_REQUEST = "Error performing token request"
_METADATA_HOST = "//169.254.169.254/"


class Cause(enum.Enum):
    """Cause of a failure, in the classes that an operator treats differently."""

    SPACE = "space"
    """The service takes no more bytes: a quota, a full disk, a limit on sizes."""
    KEYS = "keys"
    """The credentials are wrong or have expired."""
    PERMISSION = "permission"
    """The credentials are valid, and lack a permission."""
    BUCKET = "bucket"
    """There is no such bucket."""
    REQUEST = "request"
    """The service does not accept such a request."""
    PASSING = "passing"
    """A failure that may pass: throttling, time-outs, the network."""


SPACE = "out of space or over a quota; blocks that are held are still served"
"""Text about a service that takes no more bytes."""
CLOCK = "this machine's clock is wrong by more than 15 minutes; set it (NTP)"
"""Text about a refused signature of another time."""
THROTTLED = "the service throttles requests"
"""Text about a service that wants fewer requests."""
OBJECT_LOCK = (
    "the bucket has object lock with a default retention, which refuses uploads without a checksum and keeps what was "
    "deleted; use a bucket without object lock, or remove its default retention"
)
"""Text about a bucket whose objects are locked."""

_COMMON_CODES: Mapping[str, tuple[Cause, str]] = {
    "QuotaExceeded": (Cause.SPACE, SPACE),
    "EntityTooLarge": (Cause.SPACE, "the service takes no object of this size; lower block_size, or raise its limit"),
    "RequestTimeTooSkewed": (Cause.KEYS, CLOCK),
    "RequestExpired": (Cause.KEYS, CLOCK),
    "SlowDown": (Cause.PASSING, THROTTLED),
}
_STATUSES: Mapping[int, tuple[Cause, str]] = {
    403: (Cause.KEYS, "refused: wrong or expired credentials, no permission, or a wrong clock on this machine"),
    413: (Cause.SPACE, "the service or a proxy takes no object of this size; lower block_size, or raise its limit"),
    429: (Cause.PASSING, THROTTLED),
    503: (Cause.PASSING, "the service is overloaded or throttles requests"),
    507: (Cause.SPACE, SPACE),
}


@dataclass(frozen=True, slots=True)
class RequestFault:
    """A failed request."""

    cause: Cause
    status: int | None
    """HTTP status; None if there was no answer."""
    code: str | None
    """The service's error code; None if there was none."""
    host: str | None
    """Host and port that the request went to; None if not known."""
    text: str
    """The cause in words; the remedy, if there is one, follows the first semicolon."""

    @property
    def remedy(self) -> str:
        """Next step for the operator; empty if the text has none."""
        return self.text.partition("; ")[2]

    def __str__(self) -> str:
        known = " ".join(str(part) for part in (self.status, self.code) if part is not None)
        host = f"from {self.host}" if known and self.host else self.host or ""
        head = " ".join(part for part in (known, host) if part)
        return f"{head}: {self.text}" if head else self.text


class Dialect:
    """The failures of one cloud: the meaning of its error codes, with the remedies.

    Args:
        codes: error code of the service → cause and text.
        keys: the way to correct credentials that are refused.
        bucket: text about a bucket that does not exist.
        present: error codes that mean "the object is there already".
    """

    def __init__(
        self,
        codes: Mapping[str, tuple[Cause, str]],
        *,
        keys: str,
        bucket: str,
        present: Collection[str] = (),
    ) -> None:
        self._codes = {**_COMMON_CODES, **codes}
        self._statuses = {**_STATUSES, 401: (Cause.KEYS, f"refused; {keys}"), 404: (Cause.BUCKET, bucket)}
        self._keys = keys
        self._present = frozenset(present)

    def diagnose(self, error: BaseException) -> RequestFault:
        """Return the fault that ``error``, an exception of obstore, stands for."""
        message = str(error)
        first = message.partition("\n\n")[0]
        status, known, url = http_status(error), error_code(error), _URL.search(first)
        host = mask_text(url[1]) if url else None

        def fault(cause: Cause, text: str) -> RequestFault:
            return RequestFault(cause, status, known, host, text)

        if _TOKEN_REQUEST in first:
            return fault(*self._token_failure(first, status))
        if _LOCKED.search(first):
            return fault(Cause.REQUEST, OBJECT_LOCK)
        if known in self._codes:
            return fault(*self._codes[known])
        if status in self._statuses:
            return fault(*self._statuses[status])
        if isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
            return fault(*self._statuses[403])
        if isinstance(error, FileNotFoundError):
            return fault(*self._statuses[404])
        if isinstance(error, (PreconditionError, AlreadyExistsError)) or status in _TRY_AGAIN:
            return fault(Cause.PASSING, "another request for the same object was under way" if status == 409 else first)
        if isinstance(error, _REQUEST_ERRORS):
            return fault(Cause.REQUEST, summary(error))
        if status is not None:
            refused = status == 501 or 300 <= status < 500
            return fault(Cause.REQUEST if refused else Cause.PASSING, summary(error, after_status=True))
        if "BareRedirect" in message:
            return fault(Cause.REQUEST, "a redirect to nowhere: wrong region or endpoint; set region to the bucket's")
        return fault(Cause.PASSING, _network(message) or summary(error))

    def translate(self, error: Exception, doing: str) -> StoreError:
        """Return the :class:`StoreError` that stands for ``error``. Chain it to ``error`` when raising.

        Args:
            error: an exception that obstore raised.
            doing: the operation that failed, with the object; ends the message.
        """
        fault = self.diagnose(error)
        text = f"{fault} ({doing})"
        if fault.cause is Cause.PASSING:
            return TemporaryStoreError(text)
        return OutOfSpaceError(text) if fault.cause is Cause.SPACE else PermanentStoreError(text)

    @contextlib.contextmanager
    def translated(self, doing: str) -> Iterator[None]:
        """Raise each exception of obstore in the context as the StoreError for it (:meth:`translate`)."""
        try:
            yield
        except STORE_FAILURES as error:
            raise self.translate(error, doing) from error

    def is_present(self, error: AlreadyExistsError) -> bool:
        """Return True if ``error``, of a conditional put, means that the object is there.

        Otherwise another request for the object was under way, and may have failed.
        """
        return http_status(error) == 412 or error_code(error) in self._present

    def _token_failure(self, message: str, status: int | None) -> tuple[Cause, str]:
        """Return cause and text of a failed request for a token, which precedes the requests for objects."""
        if _METADATA_HOST in message:
            return Cause.PASSING, f"no credentials in the environment, and none from this machine's role; {self._keys}"
        passing = status is None or status >= 500 or status in _TRY_AGAIN
        return (Cause.PASSING if passing else Cause.KEYS), f"the request for an access token failed; {self._keys}"


def _network(message: str) -> str | None:
    """Return the reason why no answer came, as text; None if the exception has none."""
    if "TooManyOpenFiles" in message or "Too many open files" in message:
        return "this process has too many open files; raise the limit (ulimit -n, docker: --ulimit nofile)"
    if "dns error" in message:
        found = _DNS_ERROR.search(message)
        reason = f" ({found[1].rpartition(': ')[2]})" if found else ""
        return f"DNS: the host's name has no address{reason}; correct endpoint_url or the resolver"
    if certificate := _CERTIFICATE.search(message):
        return (
            f"TLS: the certificate is refused ({certificate[1]}); name its authority with ca_file, or correct the host"
        )
    if "ConnectionRefused" in message:
        return "connection refused: no server listens there; correct endpoint_url, or start the server"
    if "NetworkUnreachable" in message or "HostUnreachable" in message:
        return "no route to the host; check the network"
    if "kind: Timeout" in message or "TimedOut" in message:
        return "no answer within the time-out (request_timeout, connect_timeout)"
    if "rustls" in message.lower() or "InvalidMessage" in message or "CorruptMessage" in message:
        return "TLS: the server has no TLS here; correct the scheme or port of endpoint_url"
    if "IncompleteBody" in message or "UnexpectedEof" in message:
        return "the body ended early"
    if "IncompleteMessage" in message or "ConnectionReset" in message or "BrokenPipe" in message:
        return "the connection was reset before an answer"
    return None


def http_status(error: BaseException) -> int | None:
    """Return the HTTP status of the answer, found in the exception's text; None if there is none."""
    found = _STATUS.search(str(error).partition("\n\n")[0])
    return int(found[1]) if found else None


def error_code(error: BaseException) -> str | None:
    """Return the service's error code, found in the exception's text; None if there is none."""
    found = _CODE.search(str(error).partition("\n\n")[0])
    return found[1] if found else None


def summary(error: BaseException, *, after_status: bool = False) -> str:
    """Return the first paragraph of an exception's text on one line of at most 300 characters.

    Secrets and the queries of URLs are masked. The later paragraphs, obstore's debugging output, are left out.

    Args:
        error: the exception.
        after_status: leave out everything up to the HTTP status; default: False.
    """
    text = _QUERY.sub("?***", str(error).partition("\n\n")[0])
    if after_status:
        text = _STATUS.split(text)[-1].strip(" :")
    line = mask_text(" ".join(text.split()))
    return line if len(line) <= _MAX_TEXT else line[: _MAX_TEXT - 3] + "..."
