"""Packages: the source distribution contains all files for its tests, and documented installs work."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]

NOT_SHIPPED = {".dockerignore", ".ci/run", ".gitignore", ".pre-commit-config.yaml"}
"""Files of the repository that work only on a clone, and that no test needs."""


def test_the_source_distribution_has_every_file_that_the_repository_has(monkeypatch: pytest.MonkeyPatch) -> None:
    egg_info = pytest.importorskip("setuptools.command.egg_info")
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    monkeypatch.chdir(ROOT)
    manifest = egg_info.FileList()
    for line in (ROOT / "MANIFEST.in").read_text().splitlines():
        if line and not line.startswith("#"):
            manifest.process_template_line(line)
    shipped = {Path(name).as_posix() for name in manifest.files}
    by_itself = re.compile(r"(tiering|tiers)/.*(\.py|py\.typed)|kv_tiering\.py|pyproject\.toml|README\.md|LICENSE")
    assert [name for name in listed if name not in shipped | NOT_SHIPPED and not by_itself.fullmatch(name)] == []
    assert not any("__pycache__" in name for name in shipped)


def test_torch_is_installed_only_where_it_is_asked_for() -> None:
    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[\[<>=!~ ]", requirement)[0] for requirement in requirements}

    extras = PROJECT["optional-dependencies"]
    assert "torch" not in names(PROJECT["dependencies"])
    assert names(extras["torch"]) == {"torch"}
    assert "torch" in re.findall(r"\w+", extras["dev"][0])
    assert "vllm" in names(extras["vllm"])


def test_what_documents_say_to_install_can_be_installed() -> None:
    told = [
        word for path in DOCUMENTS for word in re.findall(r"pip install (?:--\S+ )*'?([^'\s]+)'?", path.read_text())
    ]
    assert told
    extras = PROJECT["optional-dependencies"].keys()
    for what in told:
        match = re.fullmatch(r"\.(?:\[([\w,]+)\])?", what)
        assert match, f"pip install {what}: only a clone can be installed, there is no release"
        assert set((match[1] or "").split(",")) - {""} <= extras


@pytest.mark.parametrize("package", ["tiering", "tiers"])
def test_types_are_shipped(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert settings[package] == ["py.typed"]
