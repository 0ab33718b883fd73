"""The documents build as a site; links lead somewhere, and no page needs another host."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml

from scripts import site

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "scripts.site", str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    yield directory
    shutil.rmtree(directory)


def references(page: Path) -> set[str]:
    """Return what a page links to, shows or loads."""
    found = re.findall(r'<(?:a|img|link|script)\b[^>]*?\b(?:href|src)="([^"]*)"', page.read_text())
    return set(map(unescape, found))


def test_every_document_is_a_page_and_every_page_is_in_the_menu(built: Path) -> None:
    documents = {path.relative_to(ROOT) for path in site.documents()}
    expected = {path.with_suffix(".html").as_posix().replace("README.html", "index.html") for path in documents}
    assert [page for page in expected if not (built / page).is_file()] == []
    menu = set(re.findall(r"[\w/-]+\.md", yaml.safe_dump(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])))
    assert {path.as_posix() for path in documents} == menu


def test_links_of_the_pages_lead_to_files_of_the_site(built: Path) -> None:
    lost = [
        (page.name, reference)
        for page in built.rglob("*.html")
        if page.name != "404.html"
        for reference in references(page)
        if "://" not in reference and not reference.startswith(("#", "data:", "mailto:"))
        if not (page.parent / unquote(reference.partition("#")[0])).exists()
    ]
    assert lost == []


def test_a_page_loads_nothing_from_another_host(built: Path) -> None:
    for page in built.rglob("*.html"):
        text = page.read_text()
        assert re.findall(r'<(?:img|script)\b[^>]*\bsrc="(?:https?:)?//[^"]*"', text) == []
        assert re.findall(r'<link\b[^>]*rel="(?:stylesheet|preconnect)"[^>]*href="(?:https?:)?//[^"]*"', text) == []


def test_a_link_that_leads_nowhere_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text("[there](page.md), [a host](https://example.org), [nowhere](gone.md)\n")
    with pytest.raises(ValueError, match=r"page\.md: the link gone\.md leads to no file"):
        site.linked(tmp_path / "page.md")
