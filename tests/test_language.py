"""The language of docstrings: first lines are short sentences that open with their subject."""

from __future__ import annotations

import ast
import re
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


@pytest.mark.parametrize("text", ["Whether it holds.", "What was stored.", "Of the rows, those that are free."])
def test_the_rule_of_openings_finds_them(text: str) -> None:
    assert OPENINGS.match(text)
