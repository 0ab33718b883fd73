"""The language of docstrings: short first lines that open with their subject; one style for arguments."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(
    path
    for room in ("tiering", "tiers", "benchmarks", "examples", "scripts", "tests")
    for path in (ROOT / room).rglob("*.py")
)
LONGEST = 100

OPENINGS = re.compile(r"(What|Whether|Whose|Of|Who|Which|How)\b")
"""Words that open a clause without its noun."""

TURNS = re.compile(
    r"\b(of which|of whom|of what|what of it|whereof|thereof|for which is|as many of which)\b"
    r"|\b(nobody|whoever|whichever|what follows)\b"
)
"""Turns of phrase whose noun the reader has to guess."""

LISTS = re.compile(r"(Args|Raises|Attributes):$")
"""Headings of the lists whose entries are ``name: meaning.``"""

CAPITALISED = re.compile(r"(A|[A-Z][a-z]+)\b(?!/)(?<!\bTrue)(?<!\bFalse)(?<!\bNone)(?<!\bMooncake)")
"""Ordinary first words that begin with a capital letter; acronyms and names are none."""


@cache
def docstrings(path: Path) -> tuple[tuple[int, str], ...]:
    """Return line and text of each docstring of a file, including those of attributes."""
    return tuple(
        (node.lineno, node.value.value.strip())
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    )


def test_first_lines_are_short_sentences() -> None:
    first = [(path, line, text.split("\n")[0]) for path in FILES for line, text in docstrings(path)]
    wrong = [f"{path}:{line}: {text}" for path, line, text in first if len(text) > LONGEST or OPENINGS.match(text)]
    assert wrong == []


def test_no_docstring_has_a_turn_without_its_noun() -> None:
    texts = [(path, line, text) for path in FILES for line, text in docstrings(path)]
    wrong = [f"{path}:{line}: {match[0]}" for path, line, text in texts for match in TURNS.finditer(text)]
    assert wrong == []


def entries(text: str) -> Iterator[str]:
    """Yield the entries of a docstring's lists, each in one line."""
    entry, listed = "", False
    for line in [*inspect.cleandoc(text).split("\n"), ""]:
        if listed and line.startswith(" " * 8):
            entry += " " + line.strip()
            continue
        if entry:
            yield entry
        listed = bool(LISTS.match(line)) or (listed and line.startswith("    "))
        entry = line.strip() if listed and line.startswith("    ") else ""


def wrong_entry(entry: str) -> bool:
    """Return True unless an entry is a name and its meaning, in lower case and with a period."""
    _, colon, meaning = entry.partition(": ")
    return not colon or bool(CAPITALISED.match(meaning)) or "(default:" in meaning or not meaning.endswith(".")


def test_arguments_are_described_in_one_style() -> None:
    wrong = [
        f"{path}:{line}: {entry}"
        for path in FILES
        for line, text in docstrings(path)
        for entry in entries(text)
        if wrong_entry(entry)
    ]
    assert wrong == []


def test_the_entries_of_a_list_are_found_with_their_further_lines() -> None:
    text = """Do it.

        Args:
            name: name of the tier, over
                two lines.
            size: bytes.

        Raises:
            OSError: the file is gone.

        Returns:
            Bytes: any.
        """
    assert list(entries(text)) == [
        "name: name of the tier, over two lines.",
        "size: bytes.",
        "OSError: the file is gone.",
    ]


@pytest.mark.parametrize(
    "meaning", ["name of the tier.", "True if it holds.", "GPU blocks; default: none.", "I/O side."]
)
def test_the_style_of_arguments_allows_names_and_acronyms(meaning: str) -> None:
    assert not wrong_entry(f"name: {meaning}")


@pytest.mark.parametrize(
    "meaning", ["The name.", "A name.", "Name of the tier.", "a name (default: none).", "the name"]
)
def test_the_style_of_arguments_forbids_capitals_and_open_ends(meaning: str) -> None:
    assert wrong_entry(f"name: {meaning}")


@pytest.mark.parametrize("text", ["Whether it holds.", "What was stored.", "Of the rows, those that are free."])
def test_the_rule_of_openings_finds_them(text: str) -> None:
    assert OPENINGS.match(text)
