"""What the documents show works: their Python runs, their stacks are valid, their links lead somewhere."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tiering.config import TIER_TYPES, PrimaryOptions, StackConfig, load_stack, tier_definition
from tiering.manager_stats import ManagerStats
from tiering.secondary.stats import TierStats

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *sorted((ROOT / "docs").glob("*.md"))]


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def examples(language: str) -> list[object]:
    found = [(path, number, text) for path in DOCUMENTS for number, text in enumerate(blocks(path, language))]
    return [pytest.param(text, id=f"{path.name}-{number}") for path, number, text in found]


@pytest.mark.parametrize("code", examples("python"))
def test_python_in_a_document_runs(code):
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("text", examples("yaml"))
def test_a_stack_in_a_document_is_valid(text, tmp_path, monkeypatch):
    monkeypatch.setenv("S3_ENDPOINT", "http://127.0.0.1:9000")
    (tmp_path / "stack.yaml").write_text(text if "primary" in text else f"primary: {{capacity: 1GiB}}\n{text}")
    assert load_stack(tmp_path / "stack.yaml").primary.capacity > 0


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(path):
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()) if "://" not in target]
    assert [target for target in targets if not (path.parent / target).exists()] == []


def test_every_word_of_a_stack_is_documented():
    text = (ROOT / "docs" / "stack-file.md").read_text()
    words = set(re.findall(r"`([a-z_]+)`", text))
    assert sorted(_words() - words) == []


def test_every_number_that_is_counted_is_documented():
    words = set(re.findall(r"`([a-z_]+)`", (ROOT / "docs" / "operations.md").read_text()))
    counted = {field.name for record in (TierStats, ManagerStats) for field in dataclasses.fields(record)}
    assert sorted(counted - words) == []


def _words() -> set[str]:
    models = [StackConfig, PrimaryOptions, *(tier_definition(kind).options for kind in TIER_TYPES)]
    return {word for model in models for word in model.model_fields}


def test_the_library_example_runs():
    command = [sys.executable, "-m", "examples.library_quickstart"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "32 of 32 blocks came back, identical" in done.stdout
