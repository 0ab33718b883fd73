"""``make setup`` installs with uv from where pip's configuration leads."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.uv_install import pips_configuration, variables

FILE = """\
[global]
index-url = https://mirror.example/simple
extra-index-url =
    https://one.example/simple
    https://two.example/simple
find-links = /wheels /more
trusted-host = mirror.example
quiet = 1
[install]
constraint = /etc/constraints.txt
[download]
index-url = https://download.example/simple
"""


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words of pip in its file alone."""
    file = tmp_path / "pip.conf"
    file.write_text(FILE)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONSTRAINT", "PIP_TRUSTED_HOST"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("configured")
def test_uv_has_the_places_of_pips_file() -> None:
    expected = {
        "UV_DEFAULT_INDEX": "https://mirror.example/simple",
        "UV_INDEX": "https://one.example/simple https://two.example/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_CONSTRAINT": "/etc/constraints.txt",
        "UV_INSECURE_HOST": "mirror.example",
    }
    found = variables(pips_configuration())
    assert {name: found.get(name) for name in expected} == expected


@pytest.mark.usefixtures("configured")
def test_a_variable_of_pip_goes_before_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://other.example/simple")
    found = variables(pips_configuration())
    assert found["UV_DEFAULT_INDEX"] == "https://other.example/simple"
    assert found["UV_FIND_LINKS"] == "/wheels,/more"


def test_make_setup_and_the_environment_of_vllm_install_with_this_module() -> None:
    root = Path(__file__).resolve().parent.parent
    for file in ("Makefile", "scripts/install_vllm_cpu.py"):
        text = (root / file).read_text()
        assert "scripts.uv_install" in text
        assert "uv pip install" not in text
