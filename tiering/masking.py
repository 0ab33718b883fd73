"""What must not be printed: secrets in a configuration, by the name of the field or the form of the value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath

from pydantic import BaseModel, SecretBytes, SecretStr

MASK = "***"

_MASKED = re.compile(r"\*{3}|\*{10}|.*://\*{3}@.*")
_SHOWN = 60

_SECRET_WORD = re.compile(r"secret|passw|token|credential|private|salt|signature|access_key|api_key|(^|_)key(_id)?$", re.IGNORECASE)
_URL_USER = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_URL_QUERY = re.compile(r"(?<=[?&])([^=&\s]*(?:secret|token|signature|credential|key|password)[^=&\s]*)=[^&\s]*", re.IGNORECASE)


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
        return _URL_QUERY.sub(rf"\1={MASK}", _URL_USER.sub(MASK, value))
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
