"""Directories that engines had before a service: one of each namespace is kept, the others go."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tiering import InUseError, StoreError
from tiering.tier import (
    EPOCHS,
    HEADER_BYTES,
    Adopted,
    Files,
    FrameHeader,
    namespace_of,
    parse_header,
    service_replica,
)
from tiers.local.checkpoint import CHECKPOINT_NAME
from tiers.local.layout import (
    DIRECTORY_MODE,
    FRESH,
    entries_of,
    parse_segment,
    replicas_in,
    tier_directory,
    used_bytes,
)
from tiers.local.lock import LOCK_NAME, DirectoryLock, owner_of

_DOCUMENTS = "documents"
_MOVING = f"moving{FRESH}"
"""Name of a file in a directory whose move has begun; the next call ends that move first."""

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
    directory that somebody holds stays. So does one of another user, who would have written what the service's own
    engines load, and could lead the removal to other files by a link. What another call or a service has changed since
    it was looked at stays. If the process is killed, the next call goes on: documents move last.

    Args:
        roots: directories of one engine each, or of several data-parallel ones.
        path: directory of the service's tier.
        files: file operations to use.
        dry_run: change nothing.

    Raises:
        OSError: a directory cannot be read, moved or removed.
    """
    found: list[_Old] = []
    places = [each for root in roots for each in (root.resolve(), *_replicas(root.resolve()))]
    for directory in dict.fromkeys(places):
        if (reason := _others(directory)) is not None:
            yield Adopted(str(directory), "", 0, f"stays: {reason}")
            continue
        namespace = _namespace(directory)
        if namespace is None or directory.resolve() == _target(path, namespace).resolve():
            continue
        if (owner := owner_of(directory)) is not None:
            yield Adopted(str(directory), namespace, 0, f"stays: in use by {owner}")
            continue
        with contextlib.suppress(FileNotFoundError):  # another call has moved or removed it
            found.append(_Old(directory, namespace, used_bytes(directory)))
    taken: set[str] = set()
    for old in sorted(found, key=lambda old: (not (old.directory / _MOVING).exists(), -old.nbytes)):
        target = _target(path, old.namespace)
        moves = old.namespace not in taken and _is_unused(target, files)
        fate = f"becomes {target}" if moves else "is removed"
        failure = None if (reason := _others(target)) is None else f"stays: {target}: {reason}"
        if failure is None and not dry_run:
            failure = _failure(old, target if moves else None, files)
        if failure is None:
            taken.add(old.namespace)  # not earlier: the others stay unless one of them has become the service's
        yield Adopted(str(old.directory), old.namespace, old.nbytes if failure is None else 0, failure or fate)


def _failure(old: _Old, target: Path | None, files: Files) -> str | None:
    """Move a directory, or remove it without a ``target``; return what became of it instead, or None."""
    try:
        if target is None:
            _remove(old, files)
        else:
            _move(old, target, files)
    except InUseError as error:
        return f"stays: {error}"
    except StoreError:
        if old.directory.exists():
            raise
        return "is gone: another call has moved or removed it"
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        files.unlink(old.directory / _MOVING)
        return f"stays: {target} is on another file system"
    return None


def _target(path: str, namespace: str) -> Path:
    return tier_directory(path, service_replica(namespace))


def _replicas(root: Path) -> list[Path]:
    return [tier_directory(str(root), name) for name in replicas_in(root)]


def _others(directory: Path) -> str | None:
    """Return why a directory may lead to files of somebody else; None if it is this user's, without links."""
    reason = None
    for path in (directory, directory / _DOCUMENTS):
        try:
            found = path.lstat()
        except PermissionError:
            break
        except (FileNotFoundError, NotADirectoryError):
            return None
        if stat.S_ISLNK(found.st_mode):
            return f"{path} is a symbolic link"
        if found.st_uid != os.geteuid():
            reason = f"it belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}"
    return reason


def _namespace(directory: Path) -> str | None:
    """Return the namespace whose epoch document was written last; None if there is none."""
    try:
        documents = [entry for entry in entries_of(directory / _DOCUMENTS) if entry.name.startswith(EPOCHS)]
        dated = sorted(((entry.stat(follow_symlinks=False).st_mtime, entry.name) for entry in documents), reverse=True)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return next((name for _, text in dated if (name := namespace_of(text)) is not None), None)


def _own_files(directory: Path) -> Iterator[str]:
    """Yield the names of the tier's files; what else is there belongs to somebody else, and stays."""
    for entry in entries_of(directory):
        if parse_segment(entry.name) or entry.name.startswith(_NAMES) or entry.name.endswith(FRESH):
            yield entry.name


def _is_unused(target: Path, files: Files) -> bool:
    """Return True if no service has stored a block there; one that has only been started has not."""
    if _namespace(target) is None:
        return True
    page = memoryview(bytearray(HEADER_BYTES))
    for entry in entries_of(target):
        if (shape := parse_segment(entry.name)) is None:
            continue
        fd = files.open(Path(entry.path), os.O_RDONLY)
        try:
            for slot in range(shape[1]):  # where there are blocks, one of the first slots has one
                if files.preadv(fd, [page], slot * shape[0]) == HEADER_BYTES and _is_block(page):
                    return False
        finally:
            files.close(fd)
    return True


def _is_block(page: memoryview) -> bool:
    return isinstance(parse_header(page), FrameHeader)


@contextlib.contextmanager
def _held(directory: Path, is_as_planned: Callable[[], bool]) -> Iterator[None]:
    """Hold a directory that is as it was when it was looked at.

    Raises:
        InUseError: another process has it, or has changed it meanwhile.
        StoreError: it cannot be locked, because it is gone for example.
    """
    lock = DirectoryLock(directory)
    lock.acquire()
    try:
        if not is_as_planned():
            raise InUseError(f"{directory} was changed meanwhile; repeat the command")
        yield
    finally:
        lock.release()


def _move(old: _Old, target: Path, files: Files) -> None:
    source = old.directory
    with contextlib.ExitStack() as held:
        held.enter_context(_held(source, lambda: _namespace(source) == old.namespace))
        target.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        held.enter_context(_held(target, lambda: _is_unused(target, files)))
        files.close(files.open(source / _MOVING, os.O_RDWR | os.O_CREAT))
        files.sync_directory(source)
        if _namespace(target) is not None:  # of a service that has stored nothing; documents go first, and come last
            _remove_files(target, files)
        for name in _own_files(source):
            if name == _MOVING:
                continue
            files.rename(source / name, target / name)
        files.sync_directory(target)
        with contextlib.suppress(FileNotFoundError):
            (target / _DOCUMENTS).rmdir()  # an empty one of a service that has stored nothing yet
        files.rename(source / _DOCUMENTS, target / _DOCUMENTS)
        files.sync_directory(target)
        files.unlink(source / _MOVING)
        _leave(source, files)


def _remove(old: _Old, files: Files) -> None:
    source = old.directory
    with _held(source, lambda: _namespace(source) == old.namespace):
        _remove_files(source, files)
        _leave(source, files)


def _remove_files(directory: Path, files: Files) -> None:
    for entry in entries_of(directory / _DOCUMENTS):
        files.unlink(Path(entry.path))
    (directory / _DOCUMENTS).rmdir()
    for name in _own_files(directory):
        files.unlink(directory / name)


def _leave(source: Path, files: Files) -> None:
    """Remove what is left of a directory; one with files of somebody else, or with replicas, stays."""
    files.unlink(source / LOCK_NAME)
    with contextlib.suppress(OSError):
        source.rmdir()
