"""The documents' examples work: their Python runs, their stacks are valid, their links lead somewhere."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from pydantic import BaseModel

import tiering
import tiering.tier
from examples import vllm_offline
from scripts import metric_tables, option_tables, site
from tests.cli.runner import kv_tiering
from tiering.api.request_policy import RequestPolicy, parse_request_policy
from tiering.config.registry import TIER_TYPES, tier_definition
from tiering.config.stack_file import PrimaryOptions, StackConfig, load_stack
from tiering.connector.metrics import METRICS
from tiering.replay.model import load_model

ROOT = Path(__file__).resolve().parent.parent
SERVER = ROOT / "examples" / "vllm_server.md"
DOCUMENTS = site.documents()


def blocks(path: Path, language: str) -> list[str]:
    """Return the blocks of code in a language, also those that are indented in a list."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(text) for _, text in found]


def examples(language: str) -> list[object]:
    found = [(path, number, text) for path in DOCUMENTS for number, text in enumerate(blocks(path, language))]
    return [pytest.param(text, id=f"{path.name}-{number}") for path, number, text in found]


@pytest.mark.parametrize("code", examples("python"))
def test_python_in_a_document_runs(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("text", examples("yaml"))
def test_a_stack_in_a_document_is_valid(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3_ENDPOINT", "http://127.0.0.1:9000")
    (tmp_path / "stack.yaml").write_text(text if "primary" in text else f"primary: {{capacity: 1GiB}}\n{text}")
    assert load_stack(tmp_path / "stack.yaml").primary.capacity > 0


def test_every_example_stack_is_listed() -> None:
    listed = (ROOT / "configs" / "README.md").read_text()
    assert [path.name for path in (ROOT / "configs").glob("*.yaml") if f"]({path.name})" not in listed] == []


def test_the_replay_model_in_the_sizing_document_is_valid(tmp_path: Path) -> None:
    (text,) = (text for text in blocks(ROOT / "docs" / "sizing.md", "text") if "kv_bytes_per_token" in text)
    (tmp_path / "model.yaml").write_text(text)
    assert load_model(tmp_path / "model.yaml", {}).kv_bytes_per_token == 320 << 10


def test_the_problems_that_the_readme_shows_are_those_of_such_a_stack(tmp_path: Path) -> None:
    (shown,) = (text for text in blocks(ROOT / "README.md", "text") if "problems" in text)
    (stack,) = (text for text in blocks(ROOT / "README.md", "text") if "evicton: lru" in text)
    (tmp_path / "stack.yaml").write_text(stack)
    done = kv_tiering("check", tmp_path / "stack.yaml")
    told = done.err.replace(f"{tmp_path}/", "").splitlines()
    assert len(told) == len(shown.splitlines())
    for line, expected in zip(told, shown.splitlines(), strict=True):
        assert line.startswith(expected.removesuffix("...")), line


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()) if "://" not in target]
    assert [target for target in targets if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("path", [ROOT / "README.md", SERVER], ids=lambda path: path.name)
def test_what_is_given_to_vllm_names_our_connector_and_a_stack(path: Path) -> None:
    given = [
        json.loads(text) for text in re.findall(r"--kv-transfer-config '(\{.*?\})'", path.read_text(), flags=re.DOTALL)
    ]
    assert given
    for config in given:
        known = vllm_offline.transfer_config(config["kv_connector_extra_config"]["config"])
        assert config.items() <= known.items()
        assert config.keys() >= known.keys() - {"kv_load_failure_policy"}
        stack = Path(known["kv_connector_extra_config"]["config"])
        assert stack.name == "stack.yaml" or load_stack(ROOT / stack).primary.capacity > 0


def test_the_connector_that_documents_name_is_there() -> None:
    known = vllm_offline.transfer_config("stack.yaml")
    package = importlib.import_module(known["kv_connector_module_path"])
    module = ast.parse((ROOT / "tiering" / "engines" / "vllm" / "connector.py").read_text())
    assert known["kv_connector"] in {node.name for node in module.body if isinstance(node, ast.ClassDef)}
    assert known["kv_connector"] in package.__all__


def test_the_stack_and_the_request_that_the_server_document_writes_are_valid() -> None:
    (inline,) = re.findall(r'^`(\{"primary": .*\})`', SERVER.read_text(), flags=re.MULTILINE)
    assert load_stack(json.loads(inline.replace("[...]", "[]"))).primary.capacity == 8 << 30
    (request,) = blocks(SERVER, "json")
    policy = parse_request_policy(json.loads(request)["kv_transfer_params"])
    assert (policy.load, policy.store, policy.tiers) == (True, False, frozenset({"local"}))


def test_the_request_words_that_the_server_document_leaves_out_are_none() -> None:
    words = set(re.findall(r"[`\"]([a-z_]+)[`\"]", SERVER.read_text()))
    assert {field.name for field in dataclasses.fields(RequestPolicy)} - words == set()


@pytest.mark.parametrize("path", option_tables.DOCUMENTS, ids=lambda path: path.name)
def test_the_tables_of_options_are_those_of_the_option_classes(path: Path) -> None:
    text = path.read_text()
    assert option_tables.render(text) == text, "python -m scripts.option_tables --write"


def test_every_table_of_options_is_in_a_document() -> None:
    named = [name for path in DOCUMENTS for name in re.findall(r"<!-- options: (\w+) -->", path.read_text())]
    assert sorted(named) == sorted(option_tables.TABLES)


def test_every_word_of_a_stack_is_documented() -> None:
    text = (ROOT / "docs" / "stack-file.md").read_text()
    words = set(re.findall(r"`([a-z_]+)`", text))
    assert sorted(_words() - words) == []


def test_the_tables_of_metrics_are_those_of_the_code() -> None:
    text = metric_tables.DOCUMENT.read_text()
    assert metric_tables.render(text) == text, "python -m scripts.metric_tables --write"


def test_every_record_of_metrics_has_a_table() -> None:
    named = re.findall(r"<!-- metrics: (\w+) -->", metric_tables.DOCUMENT.read_text())
    assert sorted(named) == sorted(metric_tables.RECORDS) == sorted({metric.record for metric in METRICS})


def _words() -> set[str]:
    models: list[type[BaseModel]] = [
        StackConfig,
        PrimaryOptions,
        *(tier_definition(kind).options for kind in TIER_TYPES),
    ]
    return {word for model in models for word in model.model_fields}


def quickstart(*arguments: str, code: str = "") -> str:
    """Return the output of the library example; ``code`` runs before it."""
    run = (
        f"{code}\nimport runpy, sys\nsys.argv[1:] = {list(arguments)!r}\n"
        "runpy.run_module('examples.library_quickstart', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", run], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_library_example_runs() -> None:
    assert "32 of 32 blocks came back, identical" in quickstart()


def test_the_library_example_stores_what_fits_of_a_prompt_that_is_larger_than_the_cpu_tier(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(
        "primary: {capacity: 1MiB, promotion_share: 1.0}\n"
        "secondary: [{type: memory, capacity: 8MiB, primary_share: 1.0}]\n"
    )
    printed = quickstart(str(tmp_path / "small.yaml"), "40")
    assert "10 of 40 blocks are stored" in printed
    assert "10 of 40 blocks came back, identical" in printed


NO_TORCH = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "vllm"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
"""


@pytest.mark.parametrize("stack", ["dev-memory", "cpu-nvme"])
def test_the_library_needs_no_torch(stack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"KV_CPU_CAPACITY": "64MiB", "KV_DISK_CAPACITY": "64MiB", "KV_DISK_PATH": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    assert "32 of 32 blocks came back, identical" in quickstart(str(ROOT / "configs" / f"{stack}.yaml"), code=NO_TORCH)


def test_the_programs_of_the_documents_pass_the_type_checker_as_a_users_would(tmp_path: Path) -> None:
    programs = []
    for number, code in enumerate(code for path in DOCUMENTS for code in blocks(path, "python")):
        programs.append(tmp_path / f"program_{number}.py")
        programs[-1].write_text(code)
    assert programs
    names = ", ".join(name for name in (*vars(tiering)["__all__"], *vars(tiering.tier)) if not name.startswith("_"))
    programs.append(tmp_path / "all_names.py")
    programs[-1].write_text(f"from tiering import *\nfrom tiering.tier import *\n\nprint({names})\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml")]
    command += [*map(str, programs), str(ROOT / "examples" / "library_quickstart.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout


NAMED_TEST = re.compile(r"`((?:tests/[\w/]+/)?test_\w+)(?:\.py)?`")
REASONS = ("Refused", "Not run: ", "None; ", "as the tiers", "[on an H100](../benchmarks", "[on an H200](../benchmarks")
"""Beginnings of cells without a test."""


@pytest.mark.parametrize(
    ("header", "folder", "columns"),
    [
        ("| Model or feature | Tiers | `mode: simple` | Restart from a tier |", "tests/vllm", slice(1, 4)),
        ("| What they require | Tests | Here |", "tests/connector", slice(2, 3)),
    ],
)
def test_each_cell_of_the_models_names_tests_that_exist_or_a_reason(header: str, folder: str, columns: slice) -> None:
    rows = SERVER.read_text().split(f"{header}\n")[1].split("\n\n")[0].splitlines()[1:]
    cells = [cell.strip() for row in rows for cell in row.strip("|").split("|")[columns]]
    assert len(cells) == len(rows) * len(range(*columns.indices(4)))
    bare = [cell for cell in cells if not (NAMED_TEST.search(cell) or cell.startswith(REASONS))]
    assert bare == []
    named = {name if "/" in name else f"{folder}/{name}" for cell in cells for name in NAMED_TEST.findall(cell)}
    assert len(named) > 5
    assert sorted(name for name in named if not (ROOT / f"{name}.py").is_file()) == []
