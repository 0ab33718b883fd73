"""The problems of a stack: the path of each wrong field, the reason, and the allowed values."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

from pydantic import BaseModel, ValidationError

from tiering.api.masking import MASK, is_secret, mask_text, masked, shown
from tiering.api.units import Strict
from tiering.config.words import descriptions
from tiering.errors import ConfigError
from tiering.secondary.options import TierOptions

FieldPath = tuple[str | int, ...]
"""Path of a field in the stack: ("secondary", 1, "capacity")."""

_LONGEST_WORD = 60
_CREDENTIAL = re.compile(r"access_?key|credential", re.IGNORECASE)
_ALLOWED = "allowed are "


@dataclass(frozen=True, slots=True)
class Problem:
    """A field of a stack file that is wrong, with the sentence that says why."""

    path: FieldPath
    """Path of the wrong field."""
    text: str
    """Description that follows the field's name in a message."""

    def under(self, prefix: FieldPath) -> Problem:
        """Return the same problem with ``prefix`` before its path."""
        return Problem((*prefix, *self.path), self.text)


class Problems(ValueError):
    """Several problems of one part of the stack, with paths relative to that part. Raised by validators."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        """The problems, in the order in which they were found."""
        super().__init__("; ".join(f"{path_text(problem.path)}: {problem.text}" for problem in self.problems))


def path_text(path: FieldPath) -> str:
    """Return ``path`` as text: ``secondary[1].capacity``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{_word(part)}" if text else _word(part)
    return text or "the stack"


def _word(word: str) -> str:
    return word if word.isprintable() and len(word) <= _LONGEST_WORD else shown(word)


def refuse(name: str, problems: Sequence[Problem], lines: Mapping[FieldPath, int] | None = None) -> NoReturn:
    """Raise one error that lists all problems, in the order of their lines.

    Args:
        name: name of the stack in the message.
        problems: the problems; duplicates are listed once.
        lines: line of each field, where known; default None.

    Raises:
        ConfigError: always.
    """
    known = lines or {}

    def line(path: FieldPath) -> int | None:
        return next((known[path[:end]] for end in range(len(path), 0, -1) if path[:end] in known), None)

    rows = [(line(problem.path), problem) for problem in dict.fromkeys(problems)]
    rows.sort(key=lambda row: row[0] or 0)
    texts = [
        f"{path_text(problem.path)}{'' if number is None else f' (line {number})'}: {problem.text}"
        for number, problem in rows
    ]
    listed: set[str] = set()
    for number, text in enumerate(texts):
        before, found, allowed = text.partition(_ALLOWED)
        if found and allowed in listed:
            texts[number] = before.rstrip("; ")
        listed.add(allowed)
    if len(texts) == 1:
        raise ConfigError(mask_text(f"{name}: {texts[0]}"))
    raise ConfigError(mask_text(f"{name}: {len(texts)} problems\n" + "\n".join(f"  {text}" for text in texts)))


def unknown_word(word: str, allowed: Sequence[str]) -> str:
    """Return the text for an unknown word.

    Args:
        word: the unknown word.
        allowed: the words that this part of the stack accepts.
    """
    if is_secret(word) or _CREDENTIAL.search(word):
        return (
            "unknown word, and credentials are not written into a stack: the s3 tier finds its own in the environment, "
            "a profile or the machine's role, as boto3 does; a custom tier reads them where its documentation says; "
            f"{_ALLOWED}{', '.join(allowed)}"
        )
    near = difflib.get_close_matches(word, allowed, n=1)
    return f"unknown word{f'; did you mean {near[0]}?' if near else ''}; {_ALLOWED}{', '.join(allowed)}"


def problems_of(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """Return the errors that pydantic found in a ``model`` as problems of ours, without secrets."""
    found: list[Problem] = []
    for item in error.errors(include_url=False):
        path: FieldPath = tuple(item["loc"])
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, Problems):
            found += [problem.under(path) for problem in cause.problems]
        elif item["type"] == "extra_forbidden":
            found.append(Problem(path, unknown_word(str(path[-1]), allowed_words(_model_at(model, path[:-1])))))
        elif item["type"] == "string_type" and isinstance(item["input"], (int, float)):
            text = shown(item["input"])
            kind = f"{text.lower()}, a truth value" if isinstance(item["input"], bool) else f"{text}, a number"
            found.append(
                Problem(path, f"is {MASK if _in_secret(path) else kind}, and must be a text; write it in quotes")
            )
        elif item["type"] in {"literal_error", "bool_parsing", "bool_type"} and (choice := _choice(model, path)):
            word, allowed = choice
            found.append(Problem(word, f"{_shown(word, item['input'])} is not allowed: it should be {allowed}"))
        elif item["type"] == "missing":
            found.append(Problem(path, "is missing, and has no default"))
        elif item["type"] in {"model_type", "model_attributes_type", "dict_type"}:
            words = ", ".join(allowed_words(_model_at(model, path)))
            given = "is empty; it must be" if item["input"] is None else f"{_shown(path, item['input'])} is not"
            example = "; write it like {capacity: 8GiB}" if path == ("primary",) else ""
            found.append(Problem(path, f"{given} a mapping of {words}{example}"))
        elif isinstance(cause, Exception):
            found.append(Problem(path, str(masked("", str(cause))).removeprefix(f"{path[-1] if path else None}: ")))
        elif item["type"] == "tuple_type":
            example = "[{type: local, path: /var/cache/kv, capacity: 500GiB}]"
            found.append(Problem(path, f"{_shown(path, item['input'])} is not a list; write it like {example}"))
        elif item["type"] == "string_pattern_mismatch":
            text = descriptions(_model_at(model, path[:-1]) or model).get(str(path[-1]), "")
            meaning = text.partition("; default")[0].replace("``", "").rstrip(".")
            found.append(Problem(path, f"{_shown(path, item['input'])} is not allowed: {meaning}"))
        elif item["type"] == "float_parsing":
            found.append(Problem(path, f"{_shown(path, item['input'])} is not a number; write it like 0.9"))
        else:
            text = item["msg"].replace("Input should", "it should", 1)
            found.append(Problem(path, f"{_shown(path, item['input'])} is not allowed: {text[0].lower()}{text[1:]}"))
    return found


def _choice(model: type[BaseModel], path: FieldPath) -> tuple[FieldPath, str] | None:
    """Return the path of the word with a choice of values, and these values as text; None for other words.

    For a word that takes a literal or a truth value, pydantic reports both as problems, below the word.
    """
    owner = next((owner for end in (1, 2) if (owner := _model_at(model, path[:-end])) is not None), None)
    word = next((part for part in path[-2:] if owner is not None and part in owner.model_fields), None)
    if owner is None or word is None:
        return None
    kinds = [owner.model_fields[str(word)].annotation]
    kinds += typing.get_args(kinds[0])
    values = [repr(value) for kind in kinds if typing.get_origin(kind) is Literal for value in typing.get_args(kind)]
    values += ["true", "false"] if bool in kinds else []
    allowed = f"{', '.join(values[:-1])} or {values[-1]}" if len(values) > 1 else "".join(values)
    return path[: path.index(word) + 1], allowed


def allowed_words(model: type[BaseModel] | None) -> list[str]:
    """Return the words that a part of the stack accepts."""
    if model is None:
        return []
    refused: Mapping[str, str] = model.unsupported if issubclass(model, TierOptions) else {}
    return [word for word in model.model_fields if word not in refused]


def _model_at(model: type[BaseModel], path: FieldPath) -> type[BaseModel] | None:
    found: type[BaseModel] | None = model
    for part in path:
        if found is None or not isinstance(part, str) or part not in found.model_fields:
            return None
        annotation = found.model_fields[part].annotation
        candidates = [annotation, *typing.get_args(annotation)]
        found = next((kind for kind in candidates if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
    return found


def _in_secret(path: FieldPath) -> bool:
    return any(is_secret(part) for part in path)


def _shown(path: FieldPath, value: object) -> str:
    return MASK if _in_secret(path) else shown(value)


def changed(part: Strict) -> set[str]:
    """Return the words of ``part`` whose values are not the defaults."""
    return {word for word, value in part if value != type(part).model_fields[word].default}


def refused(part: Strict, words: Iterable[str], text: str, where: FieldPath = ()) -> list[Problem]:
    """Return a problem for each of ``words`` whose value in ``part`` is not the default.

    Args:
        part: a part of the stack.
        words: the words that it must leave out.
        text: description of each problem.
        where: path of the part; default: that of the stack.
    """
    given = changed(part)
    return [Problem((*where, word), text) for word in words if word in given]


def repeated(values: Iterable[str | None]) -> list[tuple[int, int, str]]:
    """Return (index, earlier index, value) for each repeated value; None never counts as repeated."""
    first: dict[str, int] = {}
    found: list[tuple[int, int, str]] = []
    for index, value in enumerate(values):
        if value is None:
            continue
        if value in first:
            found.append((index, first[value], value))
        first.setdefault(value, index)
    return found
