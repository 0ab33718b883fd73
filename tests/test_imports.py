"""The dependencies between the parts, and the imports that are allowed in each part.

Import-linter checks the layers in ``make lint``.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiering

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(path for package in ("tiering", "tiers") for path in (ROOT / package).rglob("*.py"))


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return the nodes of a file that the tests look at; each file is parsed once."""
    kinds = (ast.Import, ast.ImportFrom, ast.Attribute, ast.Assert)
    return tuple(node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds))


def imports(path: Path) -> Iterator[str]:
    """Return the modules that a file imports, anywhere in it."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative imports hide the arrows"
            yield node.module or ""


def targets(path: Path) -> Iterator[str]:
    """Return the modules that a file imports, with those that ``from package import module`` names."""
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom):
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (
                name if (ROOT / (name.replace(".", "/") + ".py")).is_file() else node.module or "" for name in names
            )
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def who_imports(package: str) -> set[str]:
    return {
        path.relative_to(ROOT).as_posix()
        for path in FILES
        if any(name == package or name.startswith(package + ".") for name in imports(path))
    }


def test_the_contracts_import_nothing_of_ours_but_the_errors() -> None:
    ours = {name for path in FILES if "api" in path.parts for name in imports(path) if name.startswith("tiering")}
    assert {name for name in ours if not name.startswith("tiering.api.")} == {"tiering.errors"}


def test_each_package_says_what_may_import_it_or_what_it_may_import() -> None:
    packages = [path.parent for path in FILES if path.name == "__init__.py" and path.parent != ROOT / "tiering"]
    framework = [path for path in packages if "tiers" not in path.parts and path.name != "vllm"]
    told = {path.name: ast.get_docstring(ast.parse((path / "__init__.py").read_text())) or "" for path in framework}
    assert [name for name, text in told.items() if not re.search(r"\b[Ii]mports?\b", text)] == []
    assert len(told) > 20


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions count, too: they hide a circle, and do not cut it."""
    modules = {path.relative_to(ROOT).as_posix().removesuffix(".py").replace("/", "."): path for path in FILES}
    graph = {
        name.removesuffix(".__init__"): {found.removesuffix(".__init__") for found in targets(path)}
        for name, path in modules.items()
    }

    # A module that imports none of the rest is in no circle, and neither is one that none of the rest imports.
    def free() -> set[str]:
        return {name for name in graph if not graph[name] & graph.keys() or not any(name in graph[n] for n in graph)}

    while outside := free():
        graph = {name: needed - {name} for name, needed in graph.items() if name not in outside}
    assert sorted(graph) == []


def test_the_framework_imports_no_medium() -> None:
    assert {path for path in who_imports("tiers") if path.startswith("tiering/")} == set()


def test_media_do_not_import_one_another() -> None:
    for path in FILES:
        package, *rest = path.relative_to(ROOT).parts
        if package == "tiers":
            medium = rest[0].removesuffix(".py")
            others = {name for name in imports(path) if name.startswith("tiers.") and name.split(".")[1] != medium}
            # Other parts than its tier may use this client, and shared media may be coordinated.
            others -= {"tiers.valkey.client"} | {name for name in others if name.startswith("tiers.coordination.")}
            assert others == set(), f"{path} imports {others}"


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        (
            "vllm",
            tuple(
                f"tiering/engines/{name}.py"
                for name in (
                    *("vllm/connector", "vllm/worker_side", "vllm/scheduler_side", "vllm/stats", "vllm/model"),
                    "vllm_tier/tier",
                )
            ),
        ),
        ("sglang", ("tiering/engines/sglang/backend.py",)),
        ("lmcache", ("tiering/engines/lmcache/adapter.py",)),
        (
            "torch",
            (
                "tiering/engines/vllm",
                "tiering/engines/sglang/pages.py",
                "tiering/connector/worker.py",
                "tiering/simple/worker.py",
                "tiering/copy/",
            ),
        ),
        ("torch.cuda", ("tiering/copy/cudart.py",)),
        ("triton", ("tiering/copy/kernel.py",)),
        ("valkey", ("tiers/valkey/client.py",)),
        ("mooncake", ("tiers/mooncake/",)),
        ("boto3", ("tiers/object",)),
        ("obstore", ("tiers/object",)),
        (
            "prometheus_client",
            ("tiering/connector/prometheus.py", "tiering/cli/metrics.py", "tiering/cli/service_metrics"),
        ),
        ("tiering.cli", ("tiering/cli/",)),
        ("click", ("tiering/cli/",)),
        ("rich", ("tiering/cli/",)),
        ("pickle", ()),
        ("marshal", ()),
        ("shelve", ()),
    ],
)
def test_only_its_one_place_imports(package: str, allowed: tuple[str, ...]) -> None:
    assert {path for path in who_imports(package) if not path.startswith(allowed or "-")} == set()


def test_only_the_cuda_copies_know_cuda() -> None:
    def uses(path: Path) -> bool:
        return any(isinstance(node, ast.Attribute) and node.attr == "cuda" for node in nodes(path))

    assert {path.relative_to(ROOT).as_posix() for path in FILES if uses(path)} <= {"tiering/copy/cudart.py"}


def test_conditions_of_production_are_typed_errors_and_not_asserts() -> None:
    def asserts(path: Path) -> list[int]:
        return [node.lineno for node in nodes(path) if isinstance(node, ast.Assert)]

    found = {path.relative_to(ROOT).as_posix(): asserts(path) for path in FILES if "testing" not in path.parts}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_the_library_is_imported_without_torch_media_and_services() -> None:
    names = "('torch', 'tiers', 'boto3', 'obstore', 'valkey', 'prometheus_client', 'tiering.machine.service')"
    code = f"import sys, tiering; print(*[m for m in {names} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_what_is_public_is_of_this_package() -> None:
    names = vars(tiering)["__all__"]
    assert len(names) > 60
    assert all(getattr(tiering, name).__module__.startswith("tiering") for name in names if name != "OffloadKey")


def test_all_errors_are_public() -> None:
    """Authors of tiers raise them, and callers of the library catch them."""
    named = {name for name, kind in vars(tiering.errors).items() if isinstance(kind, type) and name.endswith("Error")}
    assert named - set(vars(tiering)["__all__"]) == set()
    assert len(named) > 10


def test_the_version_is_the_distributions() -> None:
    assert f'version = "{tiering.__version__}"' in (ROOT / "pyproject.toml").read_text()


PUBLIC = ("tiering", "tiering.tier", "tiering.engines.vllm", "tiering.testing")
"""The modules that users may import; all others may move."""


def is_public(name: str) -> bool:
    return name in PUBLIC or name.startswith("tiering.testing.")


@pytest.mark.parametrize("folder", [".", "demo"])
def test_examples_import_public_names_only(folder: str) -> None:
    """The mini engine is not a user's example but an engine, which drives the halves of the connector."""
    found = {name for path in (ROOT / "examples" / folder).glob("*.py") for name in imports(path)}
    assert {name for name in found if name.split(".")[0] in {"tiering", "tiers"} and not is_public(name)} == set()


def test_documents_import_public_names_only() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")]
    blocks = [block for path in documents for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)]
    names = {match[1] for block in blocks for match in re.finditer(r"^\s*(?:from|import) (\S+)", block, re.MULTILINE)}
    assert {name for name in names if name.split(".")[0] in {"tiering", "tiers"} and not is_public(name)} == set()
    assert blocks
