"""Snapshots in the cache of the Hugging Face hub, and the content of their blobs.

A snapshot is a directory of links to blobs. A blob's name is the hash of its content: SHA-256, or git's SHA-1 for small
files. A program that writes through a link changes a blob.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from pathlib import Path

_SHA256, _GIT_SHA1 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")
"""Names of blobs."""


def snapshot_of(repository: str, commit: str, cache: str | None) -> Path | None:
    """Return the directory of a commit in the cache, or None if there is none.

    Args:
        repository: name of the repository.
        commit: its commit.
        cache: directory of the cache; None: the hub library's own.
    """
    directory = _directory_of(repository, cache)
    snapshot = None if directory is None else directory / "snapshots" / commit
    return snapshot if snapshot is not None and snapshot.is_dir() else None


def newest_commit(repository: str) -> str | None:
    """Return a repository's newest commit by the hub library's own cache, or None if there is none.

    Raises:
        OSError: the cache cannot be read.
    """
    directory = _directory_of(repository, None)
    try:
        return None if directory is None else (directory / "refs" / "main").read_text()
    except FileNotFoundError:
        return None


def _directory_of(repository: str, cache: str | None) -> Path | None:
    if cache is None:
        try:
            cache = str(importlib.import_module("huggingface_hub.constants").HF_HUB_CACHE)
        except ImportError:
            return None
    return Path(cache) / f"models--{repository.replace('/', '--')}"


def is_as_downloaded(file: Path) -> bool:
    """Return True if ``file`` is a link to a blob of the cache that has the content of its name.

    The whole blob is read. That it has the content of its name does not tell to which commit it belongs.
    """
    blob = file.resolve()
    if not file.is_symlink() or blob.parent.name != "blobs":
        return False
    with blob.open("rb") as stream:
        if _SHA256.fullmatch(blob.name):
            return hashlib.file_digest(stream, "sha256").hexdigest() == blob.name
        content = stream.read() if _GIT_SHA1.fullmatch(blob.name) else b""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest() == blob.name
