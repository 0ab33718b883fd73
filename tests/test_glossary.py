"""The glossary is that of the code: its words are used, and the retired ones are no public names."""

from __future__ import annotations

import inspect
import re
from functools import cache
from pathlib import Path

import pytest

import tiering
import tiering.tier
from scripts import site
from tiering.connector.metrics import METRICS

ROOT = Path(__file__).resolve().parent.parent
GLOSSARY = ROOT / "docs" / "glossary.md"


def entries(heading: str) -> list[str]:
    """Return the first column of the table under a heading."""
    (text,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", GLOSSARY.read_text(), re.DOTALL | re.MULTILINE)
    first = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    return first[1:]


@cache
def prose() -> str:
    """Return the other documents and the code in lower case, with one space for each run of white space."""
    paths = [path for path in site.documents() if path not in {GLOSSARY, ROOT / "CHANGELOG.md"}]
    paths += [path for room in ("tiering", "tiers") for path in (ROOT / room).rglob("*.py")]
    return re.sub(r"\s+", " ", " ".join(path.read_text() for path in paths)).lower()


def public_names() -> set[str]:
    """Return the names that authors of tiers, users and operators meet."""
    names = {metric.name for metric in METRICS}
    for module in (tiering, tiering.tier):
        for name, value in vars(module).items():
            if name.startswith("_") or inspect.ismodule(value):
                continue
            members = dir(value)
            names |= {name, *(member for member in members if not member.startswith("_"))}
    return names


def words_of(name: str) -> str:
    """Return the words of a name in lower case, for ``GiveUp`` as for ``give_up``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_", " ", name).lower()


@pytest.mark.parametrize("heading", ["Nouns", "Verbs"])
def test_each_word_is_used(heading: str) -> None:
    words = entries(heading)
    assert [word for word in words if not re.search(rf"\b{re.escape(word.lower())}", prose())] == []
    assert len(words) == len(set(words))
    assert len(words) >= 12


def test_no_public_name_has_a_retired_word() -> None:
    retired = entries("Retired words")
    found = {
        name for name in public_names() for word in retired if re.search(rf"\b{re.escape(word)}\b", words_of(name))
    }
    assert found == set()
    assert len(retired) >= 5


def test_retired_words_are_replaced_by_words_of_the_glossary() -> None:
    (text,) = re.findall(r"^## Retired words\n(.*)", GLOSSARY.read_text(), re.DOTALL | re.MULTILINE)
    rows = [line.split("|")[2] for line in text.splitlines() if line.startswith("| ")][1:]
    written = {word for row in rows for word in re.findall(r"[a-z]+", row)} - {"or"}
    assert written <= set(entries("Verbs"))
