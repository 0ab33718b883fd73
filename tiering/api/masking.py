"""The masking of secrets in messages: by field name, by the form of a value, and by known values.

Reading a stack records its secrets. From then on all errors and log lines of this project mask these secrets, also in
texts from custom tiers and client libraries.
"""

from __future__ import annotations

import base64
import logging
import re
import traceback
from collections.abc import Mapping, Set
from itertools import takewhile
from pathlib import PurePath
from urllib.parse import quote, unquote

from pydantic import BaseModel, SecretBytes, SecretStr

MASK = "***"
"""Text that stands for a secret in messages."""

_SHOWN = 60
_READ = 4 * _SHOWN
"""Characters of a value that :func:`shown` reads. The texts inside a list share twice as many."""

_PER_VALUE = 8
"""Characters that a value inside a list or mapping counts for, besides its own."""

_LONGEST_LINE = 16_384
"""Characters of a log record that are searched for secrets and logged; the rest is left out."""

_LONGEST_SECRET = 4096
"""Characters before the cut of a long log record that are left out too: a secret could begin there."""

_TOKEN = r"(?<!per_)token(?!s|iz|_?(?:ids|count|budget|limit))|(?:auth|access|session|bearer|refresh)_?tokens"
"""Pattern of credentials' names; ``max_tokens``, ``bytes_per_token`` and ``tokenizer`` are none."""
_SECRET_WORD = re.compile(
    rf"secret|passw|pwd|{_TOKEN}|credential|private|salt|signature|access_?key|account_?key|api_?key|(^|_)key(_id)?$",
    re.IGNORECASE,
)
# All repetitions are bounded, so that searching an untrusted text does not take time quadratic in its length.
_USER = re.compile(
    r"""(?<=//)(?:[^/\s'"<>]{1,256}|[^/\s'"<>:]{0,64}:[^\s'"<>]{0,256})(?=@)"""
    r"""|(?<![\w/.])[\w.+-]{1,64}:[^\s'"<>@/]{1,256}(?=@[\w\[])"""
)
"""User and password before a host, with or without a scheme.

The pattern also matches passwords with a slash; a slash should be quoted and often is not.
"""
_PAIR = re.compile(
    r"""(?<![\w.-])([\w.-]{0,32}"""
    rf"""(?:secret|{_TOKEN}|signature|credential|passw|pwd|account_?key|access_?key|api_?key)"""
    r"""[\w.-]{0,32})=([^&;,\s'"<>]+)""",
    re.IGNORECASE,
)
"""``password=...`` in the query of a URL, or in the text that names a database."""
_QUERY = re.compile(r"""(?<=[?&])([^=&?\s'"]{0,32}key[^=&?\s'"]{0,32})=([^&\s'"<>]+)""", re.IGNORECASE)

_SHORTEST = 4
"""Minimum length of a secret that is masked by value, in characters.

Shorter secrets are masked in their field only.
"""

_PLAIN = re.compile(r"[0-9.]{1,7}[a-z]{0,3}|true|false|none|null|auto", re.IGNORECASE)
"""Values too common to search for in texts, such as the number of ``max_tokens``.

They are masked in their field only.
"""

_MOST_CHARACTERS = 256 << 10
"""Maximum length of all remembered spellings together. A typical stack has a few hundred characters."""


class _Learnt:
    """The known secrets, in each spelling that a message may contain."""

    def __init__(self) -> None:
        self._written: dict[str, None] = {}
        self._characters = 0
        self.longest_first: tuple[str, ...] = ()
        """The spellings in the order in which texts are searched for them."""

    def add(self, secret: str) -> None:
        for written in (secret, unquote(secret), quote(secret, safe=""), repr(secret)[1:-1]):
            if len(written) >= _SHORTEST and written.strip("*") and not _PLAIN.fullmatch(written):
                if written in self._written:
                    del self._written[written]  # the newest spellings are kept longest
                    self._characters -= len(written)
                self._written[written] = None
                self._characters += len(written)
        while self._characters > _MOST_CHARACTERS and len(self._written) > 1:
            oldest = next(iter(self._written))
            self._characters -= len(oldest)
            del self._written[oldest]
        self.longest_first = tuple(sorted(self._written, key=len, reverse=True))


_learnt = _Learnt()


def is_secret(word: object) -> bool:
    """Return True if a field named ``word`` holds a secret."""
    return isinstance(word, str) and _SECRET_WORD.search(word) is not None


def masked(word: object, value: object) -> object:
    """Return ``value`` of the field ``word`` with secrets masked, also in nested fields.

    Models become mappings.
    """
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
        return masked(word, str(value))
    return value


def holds_mask(text: str) -> bool:
    """Return True if ``text`` holds the mask of a printed configuration, ours or pydantic's.

    Such a text must not be read as a value: two different secrets would become one.
    """
    return MASK in text


def shown(value: object) -> str:
    """Return ``value`` as error messages quote it: masked, on one line, and short."""
    try:
        text = repr(masked("", _cut(value, [2 * _READ])))
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        text = f"a {type(value).__name__} with a number of very many digits"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def shown_name(name: object) -> str:
    """Return ``name``, such as a request's id, as messages show it: as it is if it is short and printable."""
    return name if isinstance(name, str) and name.isprintable() and len(name) <= _SHOWN else shown(name)


def _cut(value: object, left: list[int]) -> object:
    """Return the beginning of a text or of nested plain data, and other values as they are.

    Args:
        value: the value.
        left: one number, the characters that may still be read; each value takes its part.
    """
    left[0] -= _PER_VALUE
    if isinstance(value, (str, bytes)):
        text = value[: max(min(_READ, left[0]), 0)]
        left[0] -= len(text)
        return text
    if isinstance(value, Mapping):
        items = takewhile(lambda _: left[0] > 0, value.items())
        return {_cut(key, left) if isinstance(key, str) else key: _cut(item, left) for key, item in items}
    if isinstance(value, (list, tuple, Set)):
        return [_cut(item, left) for item in takewhile(lambda _: left[0] > 0, value)]
    return value


# ------------------------------------------------------------------------------------------------------------- by value


def mask_text(text: str) -> str:
    """Return ``text`` with known secrets, and parts that look like secrets, masked."""
    for secret in _learnt.longest_first:
        text = text.replace(secret, MASK)
    text = _USER.sub(MASK, text)
    return _QUERY.sub(rf"\1={MASK}", _PAIR.sub(rf"\1={MASK}", text))


def record_secrets(word: object, value: object) -> None:
    """Record the secrets in a value, which all messages mask from now on.

    Args:
        word: name of the field. If the name suggests a secret, the whole value is one; otherwise only the parts of the
            value that look like secrets are remembered.
        value: the field's value.
    """
    if isinstance(value, (SecretStr, SecretBytes)):
        value, word = value.get_secret_value(), "secret"
    if isinstance(value, bytes):
        value = value.decode(errors="backslashreplace")
    if not isinstance(value, str):
        return
    value = value.encode(errors="backslashreplace").decode()  # errors show undecodable bytes in this form
    if is_secret(word):
        _learnt.add(value)
    for match in _USER.finditer(value):
        _learnt.add(match[0])
        _learnt.add(match[0].partition(":")[2])
        _learnt.add(base64.b64encode(match[0].encode()).decode())
    # A value that is one URL as a whole may have spaces and quotes in its password; within a text they end the URL.
    whole = re.search(r"//[^/:@]*:(.+)@", value, re.DOTALL)
    if whole is not None:
        _learnt.add(whole[1])
    for match in (*_PAIR.finditer(value), *_QUERY.finditer(value)):
        _learnt.add(match[2])


def shows_secret(error: BaseException) -> bool:
    """Return True if the traceback of ``error``, its causes included, would show a secret."""
    text = "".join(traceback.format_exception(error))
    return mask_text(text) != text


def safe_cause(error: Exception) -> Exception | None:
    """Return ``error`` for use as a cause, or None if its traceback would show a secret."""
    return None if shows_secret(error) else error


class _MaskedLine:
    """The text of a log record, masked and of bounded length."""

    def __init__(self, text: str) -> None:
        self.text = mask_text(text[: _LONGEST_LINE + _LONGEST_SECRET])
        if len(text) > _LONGEST_LINE + _LONGEST_SECRET:
            # The cut may have split a secret, which is not masked then.
            self.text = f"{self.text[:-_LONGEST_SECRET]}... ({len(text)} characters)"
        self.changed = self.text != text


class _SecretFilter(logging.Filter):
    """A filter that masks the text of a log record and of its traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            message = _MaskedLine(record.getMessage())
        except (TypeError, ValueError, KeyError):
            return True  # the arguments do not fit the format; the handlers report such a record themselves
        if message.changed:
            record.msg, record.args = message.text, None
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            shown_error = _MaskedLine("".join(traceback.format_exception(error)))
            if shown_error.changed:
                record.exc_text, record.exc_info = shown_error.text.rstrip(), None
        return True


_filter = _SecretFilter()


def guard_logs() -> None:
    """Mask secrets in the output of all existing loggers of this project.

    Filters are not inherited, so each logger gets its own.
    """
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.partition(".")[0] == "kv_tiering" and isinstance(logger, logging.Logger):
            logger.addFilter(_filter)
