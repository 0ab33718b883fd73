"""Snapshots in the cache of the Hugging Face hub, and whether they are what the hub library wrote.

A snapshot is a directory of links to blobs. A blob's name is the hash of its content: SHA-256, or git's SHA-1 for small
files. Whoever writes through a link changes a blob, which then no longer is what the snapshot's commit says.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_SNAPSHOT = re.compile(r"/models--[^/]+/snapshots/([0-9a-f]{40})(?:/(.+))?$")
"""A path in the cache: the commit, and the path within its snapshot."""
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""The name of a blob."""


def commit_of(place: Path) -> tuple[str, str | None] | None:
    """Return the commit of a path in the cache, and the path within its snapshot; None: not in a cache."""
    found = _SNAPSHOT.search(place.as_posix())
    return None if found is None else (found[1], found[2])


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


def is_as_downloaded(snapshot: Path, files: Iterable[Path]) -> bool:
    """Return True if all files are links of the hub library to blobs that have the content of their names.

    A regular file, or a link to another place, was put there by hand. Only blobs that are younger than their links are
    read, because the library makes a link after its blob is complete. A new owner or mode makes a blob younger, too.

    Args:
        snapshot: a path below the directory "snapshots" of a repository.
        files: the files to look at.
    """
    snapshots = next(parent for parent in snapshot.parents if parent.name == "snapshots")
    blobs = (snapshots.parent / "blobs").resolve()
    changed: set[Path] = set()
    for link in files:
        blob = link.resolve()
        if not link.is_symlink() or blob.parent != blobs or not _BLOB.fullmatch(blob.name):
            return False
        made, found = link.lstat(), blob.stat()
        if found.st_mtime_ns > made.st_mtime_ns or found.st_ctime_ns > made.st_ctime_ns:
            changed.add(blob)
    with ThreadPoolExecutor(4, thread_name_prefix="kv-tiering-blobs") as pool:
        return all(pool.map(_has_content_of_its_name, changed))


def _has_content_of_its_name(blob: Path) -> bool:
    with blob.open("rb") as stream:
        if len(blob.name) == 64:
            return hashlib.file_digest(stream, "sha256").hexdigest() == blob.name
        content = stream.read()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest() == blob.name
