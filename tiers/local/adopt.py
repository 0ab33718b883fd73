"""Directories that engines had before a service: one of each namespace is kept, the others go."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tiering import InUseError
from tiering.tier import EPOCHS, Adopted, Files, namespace_of, service_replica
from tiers.local.checkpoint import CHECKPOINT_NAME
from tiers.local.layout import (
    DIRECTORY_MODE,
    FRESH,
    REPLICA_PREFIX,
    entries_of,
    parse_segment,
    tier_directory,
    used_bytes,
)
from tiers.local.lock import LOCK_NAME, DirectoryLock, owner_of

_DOCUMENTS = "documents"
_NAMES = (CHECKPOINT_NAME, "written-")
"""Beginnings of the names of the tier's files beside segments."""


@dataclass(frozen=True, slots=True)
class _Old:
    """A directory that an engine had, and the namespace that used it last."""

    directory: Path
    namespace: str
    nbytes: int


def adopt(roots: Iterable[Path], path: str, files: Files, *, dry_run: bool) -> Iterator[Adopted]:
    """Yield what becomes of the directories at and below ``roots`` that engines had, and let that happen.

    The fullest of each namespace becomes that of the service, with its blocks. Files are renamed, none is copied. A
    directory that somebody holds stays. If the process is killed, the next call goes on: documents move last.

    Args:
        roots: directories of one engine each, or of several data-parallel ones.
        path: directory of the service's tier.
        files: file operations to use.
        dry_run: change nothing.

    Raises:
        OSError: a directory cannot be read, moved or removed.
    """
    found: list[_Old] = []
    for directory in [each for root in roots for each in (root, *sorted(root.glob(f"{REPLICA_PREFIX}*")))]:
        namespace = _namespace(directory)
        if namespace is None or directory.resolve() == _target(path, namespace).resolve():
            continue
        if (owner := owner_of(directory)) is not None:
            yield Adopted(str(directory), namespace, 0, f"stays: in use by {owner}")
        else:
            found.append(_Old(directory, namespace, used_bytes(directory)))
    taken: set[str] = set()
    for old in sorted(found, key=lambda old: -old.nbytes):
        target = _target(path, old.namespace)
        moves = old.namespace not in taken and _namespace(target) is None
        taken.add(old.namespace)
        fate = f"becomes {target}" if moves else "is removed"
        if not dry_run:
            try:
                if moves:
                    _move(old.directory, target, files)
                else:
                    _remove(old.directory, files)
            except InUseError as error:
                fate = f"stays: {error}"
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                fate = f"stays: {target} is on another file system"
        yield Adopted(str(old.directory), old.namespace, old.nbytes, fate)


def _target(path: str, namespace: str) -> Path:
    return tier_directory(path, service_replica(namespace))


def _namespace(directory: Path) -> str | None:
    """Return the namespace whose epoch document was written last; None if there is none."""
    try:
        documents = [entry for entry in entries_of(directory / _DOCUMENTS) if entry.name.startswith(EPOCHS)]
    except (FileNotFoundError, NotADirectoryError):
        return None
    dated = sorted(((entry.stat().st_mtime, entry.name) for entry in documents), reverse=True)
    return next((name for _, text in dated if (name := namespace_of(text)) is not None), None)


def _own_files(directory: Path) -> Iterator[str]:
    """Yield the names of the tier's files; what else is there belongs to somebody else, and stays."""
    for entry in entries_of(directory):
        if parse_segment(entry.name) or entry.name.startswith(_NAMES) or entry.name.endswith(FRESH):
            yield entry.name


@contextlib.contextmanager
def _held(directory: Path) -> Iterator[None]:
    lock = DirectoryLock(directory)
    lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _move(source: Path, target: Path, files: Files) -> None:
    target.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
    with _held(source), _held(target):
        for name in _own_files(source):
            files.rename(source / name, target / name)
        files.sync_directory(target)
        with contextlib.suppress(FileNotFoundError):
            (target / _DOCUMENTS).rmdir()  # an empty one of a service that has stored nothing yet
        files.rename(source / _DOCUMENTS, target / _DOCUMENTS)
        files.sync_directory(target)
        _leave(source, files)


def _remove(source: Path, files: Files) -> None:
    with _held(source):
        for name in _own_files(source):
            files.unlink(source / name)
        for entry in entries_of(source / _DOCUMENTS):
            files.unlink(Path(entry.path))
        (source / _DOCUMENTS).rmdir()
        _leave(source, files)


def _leave(source: Path, files: Files) -> None:
    """Remove what is left of a directory; one with files of somebody else, or with replicas, stays."""
    files.unlink(source / LOCK_NAME)
    with contextlib.suppress(OSError):
        source.rmdir()
