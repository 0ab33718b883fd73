"""Build the documents as a site: ``python -m scripts.site [DESTINATION]``, by default ``build/site``.

The Markdown files, and all files of the repository that they link to, are copied into one directory with the paths that
they have in the repository. So a link is the same in the repository and on the site, and mkdocs checks all of them.
Needs the packages of the extra ``docs``.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "build" / "site-pages"
"""Directory that mkdocs reads, as ``mkdocs.yml`` names it."""
SITE = ROOT / "build" / "site"
"""Directory of the finished site."""

_LINK = re.compile(r"\]\(([^)#\s]+)")
_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def documents() -> list[Path]:
    """Return all Markdown files of the site."""
    named = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "configs/README.md", "examples/vllm_server.md")
    guides = sorted((ROOT / "docs").rglob("*.md"))
    return [*(ROOT / name for name in named), *guides, ROOT / "benchmarks" / "RESULTS.md"]


def linked(path: Path) -> set[Path]:
    """Return the files of the repository that a document links to.

    Raises:
        ValueError: a link leads to nothing, to a directory, or out of the repository.
    """
    found = set()
    for target in _LINK.findall(_FENCE.sub("", path.read_text())):
        if ":" in target:
            continue
        file = Path(os.path.normpath(path.parent / target))
        if not file.is_file() or ROOT not in file.parents:
            raise ValueError(f"{path.relative_to(ROOT)}: the link {target} leads to no file of the repository")
        found.add(file)
    return found


def collect(paths: Iterable[Path], pages: Path) -> None:
    """Copy documents and the files that they link to, at their paths in the repository.

    Args:
        paths: the documents.
        pages: directory for the copies; emptied first.
    """
    shutil.rmtree(pages, ignore_errors=True)
    documents = list(paths)
    wanted = {*documents, ROOT / "docs" / "site.css"}.union(*map(linked, documents))
    for path in sorted(wanted):
        copy = pages / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def build(site: Path) -> int:
    """Build the site in the directory ``site``; return the exit status of mkdocs, which warnings make 1."""
    collect(documents(), PAGES)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=quiet, check=False).returncode


def main() -> int:
    """Build the site, and return the exit status."""
    parser = argparse.ArgumentParser(description="Build the documents as a site.")
    parser.add_argument("destination", nargs="?", type=Path, default=SITE, help="directory (default: build/site)")
    destination: Path = parser.parse_args().destination
    status = build(destination.resolve())
    if status == 0:
        sys.stdout.write(f"{destination}/index.html\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
