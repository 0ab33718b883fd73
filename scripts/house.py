"""Count lines, rooms and the arrows between them, the contract of a tier, and dependencies.

    python -m scripts.house

The lines are those of ``tiering/`` and ``tiers/`` as they are formatted, at a width of 120. Those of features that came
after 23 November 2026, when the goal was set, are counted apart, as far as they have modules of their own: the rest is
more than what existed then, by what these features added to older modules.
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
from itertools import chain
from pathlib import Path

from tiering.connector.metrics import METRICS
from tiering.tier import SecondaryTierManager, StepEnd, TierIntake, TierStats, TierTraits

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("tiering", "tiers")
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}

FEATURES: dict[str, tuple[str, ...]] = {
    "one cache per machine": (
        *("tiering/machine/*", "tiering/cli/serve.py", "tiering/cli/service_metrics.py"),
        *("tiering/config/io_process.py", "tiering/config/other_process.py"),
    ),
    "other engines, and stacks inside vLLM's tiering": (
        *("tiering/engines/lmcache/*", "tiering/engines/sglang/*", "tiering/engines/vllm_tier/*"),
        *("tiering/engines/__init__.py", "tiering/engines/exchange.py", "tiering/engines/mailbox.py"),
        *("tiering/config/inline.py", "tiering/cli/transfer_config.py", "tiering/copy/tensors.py"),
        "tiering/manager/prompts.py",
    ),
    "every model and layout": (
        *("tiering/connector/handed_states.py", "tiering/connector/hit_ends.py", "tiering/connector/variants.py"),
        *("tiering/copy/heads.py", "tiering/copy/kernel.py", "tiering/engines/vllm/heads.py"),
        *("tiering/engines/vllm/kept_groups.py", "tiering/engines/vllm/stages.py"),
    ),
    "load or compute": (
        *("tiering/connector/prefill.py", "tiering/manager/load_gate.py", "tiering/manager/worth.py"),
        "tiering/manager/engine_queue.py",
        *("tiering/manager/kept_speeds.py", "tiering/epochs/speeds.py", "tiering/secondary/speeds.py"),
        *("tiering/runtime/hardware.py", "tiering/runtime/linear_cost.py", "tiering/runtime/shortest.py"),
        "tiering/runtime/time_share.py",
    ),
    "misses explained, cached tokens": (
        *("tiering/explain/*", "tiering/connector/misses.py", "tiering/connector/cached_tokens.py"),
        *("tiering/cli/why.py", "tiering/replay/misses.py"),
    ),
    "descriptions for routers": (
        *("tiering/connector/described_runs.py", "tiering/connector/run_codec.py", "tiering/epochs/described.py"),
        "tiering/api/descriptions.py",
    ),
    "exclusive CPU tier": (
        *("tiering/connector/engine_cache.py", "tiering/connector/free_queue.py", "tiering/manager/exclusive.py"),
        *("tiering/manager/late_copies.py", "tiering/replay/device.py"),
    ),
    "hints of sessions": (
        *("tiering/api/hints.py", "tiering/connector/hints.py", "tiering/manager/early.py"),
        *("tiering/manager/sessions.py", "tiering/table/kept_rows.py", "tiering/table/marks.py"),
        *("tiering/replay/hints.py", "tiering/replay/optimum.py"),
    ),
    "warm start, rows prepared beside the start": (
        *("tiering/manager/warm_start.py", "tiering/epochs/hot_keys.py", "tiering/secondary/hot_prefixes.py"),
        *("tiering/block_tier/hint_documents.py", "tiering/primary/memory/preparation.py"),
        "tiering/primary/memory/side.py",
    ),
    "small hits within the step": ("tiering/connector/step_loads.py",),
}
"""Modules of each feature that came after 23 November 2026, by the patterns of their paths."""


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


def lines_of_features() -> dict[str, int]:
    """Return the number of lines in the modules of each feature.

    Raises:
        ValueError: a pattern names no module, or two features have the same one.
    """
    found: dict[str, int] = {}
    seen: set[Path] = set()
    for feature, patterns in FEATURES.items():
        modules = [sorted(ROOT.glob(pattern if pattern.endswith(".py") else f"{pattern}.py")) for pattern in patterns]
        if not all(modules) or not seen.isdisjoint(chain(*modules)):
            raise ValueError(f"{feature}: a pattern has no module of its own")
        seen.update(chain(*modules))
        found[feature] = sum(path.read_text().count("\n") for path in chain(*modules))
    return found


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
    lines, features = sum(text.count("\n") for text in texts.values()), lines_of_features()
    yield "lines", f"{lines:,}"
    yield "without modules of later features", f"{lines - sum(features.values()):,}"
    for feature, count in features.items():
        yield f"  {feature}", f"{count:,}"
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
        sys.stdout.write(f"{name:50} {value}\n")


if __name__ == "__main__":
    main()
