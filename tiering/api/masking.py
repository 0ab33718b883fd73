"""What must not be printed: secrets in a configuration, by the name of the field, the form of the value, and by value.

Secrets of a stack are learnt when it is read.  From then on they are masked wherever our errors and log lines would
show them, also in what a tier of one's own or a client library says.
"""

from __future__ import annotations

import base64
import logging
import re
import traceback
from collections.abc import Mapping
from pathlib import PurePath
from urllib.parse import quote, unquote

from pydantic import BaseModel, SecretBytes, SecretStr

MASK = "***"

_MASKED = re.compile(r"\*{3}|\*{10}|.*://\*{3}@.*")
_SHOWN = 60

_SECRET_WORD = re.compile(
    r"secret|passw|pwd|token|credential|private|salt|signature|access_?key|account_?key|api_?key|(^|_)key(_id)?$",
    re.IGNORECASE,
)
# All repetitions are bounded: texts come from outside, and a search must not take time that grows with the square of
# their length.
_USER = re.compile(
    r"""(?<=//)(?:[^/\s'"<>]{1,256}|[^/\s'"<>:]{0,64}:[^\s'"<>]{0,256})(?=@)"""
    r"""|(?<![\w/.])[\w.+-]{1,64}:[^\s'"<>@/]{1,256}(?=@[\w\[])"""
)
"""User and password before a host, with a scheme or without; passwords with a slash, which should be quoted and often are not."""
_PAIR = re.compile(
    r"""(?<![\w.-])([\w.-]{0,32}(?:secret|token|signature|credential|passw|pwd|account_?key|access_?key|api_?key)[\w.-]{0,32})"""
    r"""=([^&;,\s'"<>]+)""",
    re.IGNORECASE,
)
"""``password=...`` in the query of a URL, or in the text that names a database."""
_QUERY = re.compile(r"""(?<=[?&])([^=&?\s'"]{0,32}key[^=&?\s'"]{0,32})=([^&\s'"<>]+)""", re.IGNORECASE)

_SHORTEST = 4
"""Secrets of fewer characters are masked where they stand, but not searched for: every text would hold them."""

_PLAIN = re.compile(r"[0-9.]{1,7}[a-z]{0,3}|true|false|none|null|auto", re.IGNORECASE)
"""Values of words such as max_tokens that no text can do without; they too are masked only where they stand."""

_MOST = 256
"""Ways of writing secrets that are remembered; a stack has a few."""


class _Learnt:
    """The secrets that were learnt, as they may be written.  ``longest_first``: the order in which texts are searched for them."""

    def __init__(self) -> None:
        self._written: dict[str, None] = {}
        self.longest_first: tuple[str, ...] = ()

    def add(self, secret: str) -> None:
        for written in (secret, unquote(secret), quote(secret, safe=""), repr(secret)[1:-1]):
            if len(written) >= _SHORTEST and written.strip("*") and not _PLAIN.fullmatch(written):
                self._written[written] = None
        while len(self._written) > _MOST:
            del self._written[next(iter(self._written))]
        self.longest_first = tuple(sorted(self._written, key=len, reverse=True))


_learnt = _Learnt()


def is_secret(word: object) -> bool:
    """Whether a field of this name holds a secret."""
    return isinstance(word, str) and _SECRET_WORD.search(word) is not None


def masked(word: object, value: object) -> object:
    """``value`` of the field ``word`` as it may be printed, nested fields included; models become mappings."""
    if isinstance(value, (SecretStr, SecretBytes)):
        return MASK if value.get_secret_value() else ""
    if is_secret(word) and isinstance(value, (str, bytes, int, float)) and not isinstance(value, bool):
        return MASK if value else value
    if isinstance(value, str):
        return mask_text(value)
    if isinstance(value, BaseModel):
        value = dict(value)
    if isinstance(value, Mapping):
        return {key: masked(word if is_secret(word) else key, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [masked(word, item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    return value


def is_masked(text: str) -> bool:
    """Whether ``text`` is what a printed configuration shows in place of a secret, ours or pydantic's."""
    return _MASKED.fullmatch(text) is not None


def shown(value: object) -> str:
    """``value`` as an error message quotes it: masked, on one line, and short."""
    if isinstance(value, (str, bytes)):
        value = value[: 4 * _SHOWN]
    try:
        text = repr(masked("", value))
    except ValueError:  # Python writes no integers of more than 4,300 digits
        text = f"a {type(value).__name__} with a number of very many digits"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


# ------------------------------------------------------------------------------------------------------------- by value


def mask_text(text: str) -> str:
    """``text`` without what looks like a secret, and without the secrets that were learnt."""
    for secret in _learnt.longest_first:
        text = text.replace(secret, MASK)
    text = _USER.sub(MASK, text)
    return _QUERY.sub(rf"\1={MASK}", _PAIR.sub(rf"\1={MASK}", text))


def learn(word: object, value: object) -> None:
    """Remember the secrets in ``value`` of the field ``word``: all of it where the word names a secret, else what looks like one."""
    if isinstance(value, (SecretStr, SecretBytes)):
        value, word = value.get_secret_value(), "secret"
    if isinstance(value, bytes):
        value = value.decode(errors="backslashreplace")
    if not isinstance(value, str):
        return
    value = value.encode(errors="backslashreplace").decode()  # as errors show bytes that are no text
    if is_secret(word):
        _learnt.add(value)
    for match in _USER.finditer(value):
        _learnt.add(match[0])
        _learnt.add(match[0].partition(":")[2])
        _learnt.add(base64.b64encode(match[0].encode()).decode())
    # A whole value is one address: its password may hold spaces and quotes too, which end an address within a text.
    whole = re.search(r"//[^/:@]*:(.+)@", value, re.DOTALL)
    if whole is not None:
        _learnt.add(whole[1])
    for match in (*_PAIR.finditer(value), *_QUERY.finditer(value)):
        _learnt.add(match[2])


def shows_secret(error: BaseException) -> bool:
    """Whether the traceback of ``error``, with all errors that led to it, would show a secret."""
    text = "".join(traceback.format_exception(error))
    return mask_text(text) != text


def safe_cause(error: Exception) -> Exception | None:
    """``error`` as the cause of another one, or None if its traceback would show a secret."""
    return None if shows_secret(error) else error


class _SecretFilter(logging.Filter):
    """Masks the text of a record, and of the traceback that it carries."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            message = record.getMessage()
        except (TypeError, ValueError, KeyError):
            return True  # arguments that do not fit their format: handlers report it in their own way
        safe = mask_text(message)
        if safe != message:
            record.msg, record.args = safe, None
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and shows_secret(error):
            record.exc_text = mask_text("".join(traceback.format_exception(error))).rstrip()
            record.exc_info = None
        return True


_filter = _SecretFilter()


def guard_logs() -> None:
    """Mask secrets in what the loggers of this project write from now on.  Filters are not inherited: each logger has its own."""
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.partition(".")[0] == "kv_tiering" and isinstance(logger, logging.Logger):
            logger.addFilter(_filter)
