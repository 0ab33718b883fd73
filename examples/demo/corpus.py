"""Real text for the conversations: modules of the interpreter's library, and questions about them."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pydoc
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

MODULES = (
    *(
        "textwrap",
        "heapq",
        "shlex",
        "queue",
        "graphlib",
        "calendar",
        "difflib",
        "configparser",
        "contextlib",
        "functools",
    ),
    *("dataclasses", "csv", "statistics", "fractions", "tokenize", "gettext", "string", "tempfile", "pprint", "shutil"),
)


@dataclass(frozen=True, slots=True)
class Document:
    """A module: its name, its text, and the public names that one can ask about."""

    name: str
    text: str
    subjects: tuple[str, ...]


def documents(count: int) -> list[Document]:
    """Return the first ``count`` modules that can be found; raise ValueError if there are fewer."""
    found = [document for document in _find() if len(document.text) > 4000 and len(document.subjects) > 3]
    if len(found) < count:
        message = (
            f"only {len(found)} of the modules {', '.join(MODULES)} were found in this interpreter, {count} are needed"
        )
        raise ValueError(message)
    return found[:count]


def question(document: Document, number: int) -> str:
    """Return the ``number``-th question about ``document``."""
    subject = document.subjects[number % len(document.subjects)]
    forms = (
        "What does {module}.{subject} do, and when would I use it?",
        "Which errors can {module}.{subject} raise, and why?",
        "Show me an example of {module}.{subject} with its result.",
        "How would you test {module}.{subject}?",
    )
    return forms[number % len(forms)].format(module=document.name, subject=subject)


def _find() -> Iterator[Document]:
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        if spec is None:
            continue
        if spec.origin is not None and spec.origin.endswith(".py") and Path(spec.origin).is_file():
            text = Path(spec.origin).read_text(encoding="utf-8")
        else:  # The interpreter comes without sources; the module's documentation serves as text.
            text = pydoc.plain(pydoc.text.document(import_module(name)))
        yield Document(name, text, _subjects(name, text))


def _subjects(name: str, text: str) -> tuple[str, ...]:
    try:
        nodes = ast.parse(text).body
    except SyntaxError:
        members = inspect.getmembers(import_module(name), inspect.isroutine)
        return tuple(member for member, _ in members if not member.startswith("_"))
    kinds = (ast.FunctionDef, ast.ClassDef)
    return tuple(node.name for node in nodes if isinstance(node, kinds) and not node.name.startswith("_"))
