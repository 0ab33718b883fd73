"""Names: one class per name, and no file name that says nothing of its room."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(path for package in ("tiering", "tiers") for path in (ROOT / package).rglob("*.py"))
COMMON = ("stats.py", "requests.py", "options.py", "contract.py", "jobs.py", "room.py")


def test_no_public_class_has_the_name_of_another() -> None:
    nodes = [node for path in FILES for node in ast.walk(ast.parse(path.read_text()))]
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef) and not node.name.startswith("_"))
    assert {name: count for name, count in names.items() if count > 1} == {}


def test_no_common_file_name_is_used_more_than_twice() -> None:
    names = Counter(path.name for path in FILES)
    assert {name: names[name] for name in COMMON if names[name] > 2} == {}
