"""Count lines, rooms and the arrows between them, the contract of a tier, and dependencies.

    python -m scripts.house

The lines are those of ``tiering/`` and ``tiers/`` as they are formatted, at a width of 120.
"""

from __future__ import annotations

import ast
import inspect
import io
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tiering.connector.metrics import METRICS
from tiering.tier import SecondaryTierManager, StepEnd, TierIntake, TierStats, TierTraits

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("tiering", "tiers")
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def sources() -> Iterator[Path]:
    """Yield the modules of both packages."""
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def code_lines(text: str) -> int:
    """Return the number of lines with code: no blank ones, comments and docstrings."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found - docstrings)


def room_of(name: str) -> str:
    """Return the room of a module: the first two parts of its dotted name."""
    return ".".join(name.split(".")[:2])


def arrows() -> Counter[tuple[str, str]]:
    """Return the number of imports from room to room."""
    found: Counter[tuple[str, str]] = Counter()
    for path in sources():
        here = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if name.split(".")[0] in PACKAGES and room_of(name) != here:
                    found[here, room_of(name)] += 1
    return found


def methods(kind: type) -> int:
    """Return the number of public methods that a class defines."""
    return len([name for name, value in vars(kind).items() if inspect.isfunction(value) and not name.startswith("_")])


def attributes(kind: type) -> int:
    """Return the number of public attributes that a class declares."""
    return len([name for name in kind.__annotations__ if not name.startswith("_")])


def rows() -> Iterator[tuple[str, str]]:
    """Yield each quantity with its value."""
    texts = {path: path.read_text() for path in sources()}
    found = arrows()
    rooms = {room for pair in found for room in pair}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: words for name, words in project["optional-dependencies"].items() if name not in {"dev", "docs"}}
    yield "lines", f"{sum(text.count(chr(10)) for text in texts.values()):,}"
    yield "lines of code", f"{sum(map(code_lines, texts.values())):,}"
    yield "files", str(len(texts))
    yield "files of more than 500 lines", str(sum(text.count("\n") > 500 for text in texts.values()))
    yield "rooms, arrows between them", f"{len(rooms)}, {len(found)}"
    yield "contract of a tier: methods", str(methods(SecondaryTierManager))
    yield "methods of its part that is optional", str(methods(TierIntake))
    yield (
        "attributes, traits, fields of a step",
        ", ".join(map(str, map(attributes, (SecondaryTierManager, TierTraits, StepEnd)))),
    )
    yield "metrics, fields of TierStats", f"{len(METRICS)}, {len(TierStats.__dataclass_fields__)}"
    yield "dependencies", ", ".join(project["dependencies"])
    for name, words in extras.items():
        yield f"with the extra {name}", ", ".join(words)


def main() -> None:
    """Print the table."""
    for name, value in rows():
        sys.stdout.write(f"{name:42} {value}\n")


if __name__ == "__main__":
    main()
