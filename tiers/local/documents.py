"""The documents beside the blocks: small files that are replaced atomically and removed durably."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tiering import OutOfSpaceError, PermanentStoreError, TemporaryStoreError
from tiering.tier import Files, fresh_name, store_error, store_errors
from tiers.local.layout import DIRECTORY_MODE, REPLICA_PREFIX
from tiers.local.lock import DirectoryLock

logger = logging.getLogger("kv_tiering.local")

_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,127}")
_MOST_BYTES = 1 << 20


class Documents:
    """The documents of one directory. Methods that read or write them raise :class:`StoreError`.

    Args:
        directory: the tier's directory.
        files: file operations to use.
        lock: the lock by which this process owns the directory.
    """

    def __init__(self, directory: Path, files: Files, lock: DirectoryLock) -> None:
        self._directory = directory
        self._path = directory / "documents"
        self._files = files
        self._lock = lock
        self._opened: tuple[int, int] | None = None
        """Device and inode of the directory of documents that :meth:`opened` found or this object made."""
        self._guard = threading.Lock()
        """Held while the directory of documents is made, so that no inspection takes it for a stranger's."""
        self._dropped_one = False
        """True if a segment was dropped for a document and no document has been written since."""

    def make(self) -> None:
        """Create the directory of documents and those above it, durably and for the owner only.

        Raises:
            OSError: a directory cannot be created.
        """
        lost = not self._path.is_dir() and any(self._directory.glob("slots-*"))
        self._make_directory(self._path)
        if lost:
            logger.warning(
                "%s is missing: blocks that were stored in %s before are not used", self._path, self._directory
            )

    def _make_directory(self, path: Path) -> None:
        if path.is_dir():
            return
        self._make_directory(path.parent)
        path.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
        self._files.sync_directory(path.parent)

    def opened(self) -> None:
        """Note which directory of documents is in place: from now on, another one is not used."""
        self._opened = self._found()

    def moved(self) -> str | None:
        """Return the reason why the documents are not those that were opened, or None."""
        with self._guard:
            found = self._found()
            if found is None or found == self._opened:
                return None
        return f"holds another directory {self._path.name} than the one that was opened"

    def _found(self) -> tuple[int, int] | None:
        """Return the device and inode of the directory of documents; None if it is missing."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def _require_opened(self) -> None:
        """Raise TemporaryStoreError unless documents are still in the directory that was opened.

        Another directory at the path may give way to the opened one again, with the documents that it held.
        """
        moved = self._lock.moved() or self.moved()
        if moved is not None:
            raise TemporaryStoreError(f"{self._directory} {moved}")

    def read(self, name: str) -> bytes | None:
        """Return a document; None if there is none of this name."""
        return self._read(self._path_of(name))

    def _read(self, path: Path) -> bytes | None:
        try:
            return bytes(self._files.read_all(path, _MOST_BYTES))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise store_error(error, f"cannot read {path}") from error

    def write(self, name: str, data: bytes, drop_one: Callable[[], bool]) -> None:
        """Replace a document atomically and durably.

        Args:
            name: name of the document.
            data: the new content.
            drop_one: function that frees space on a full disk, and returns True if it could. The tier needs its
                documents to enter service.
        """
        path = self._path_of(name)
        with store_errors(f"cannot write {path}"):
            self._require_opened()
            if not self._path.is_dir():
                # Another process has removed the directory of documents. If the tier's directory is gone too, this call
                # fails.
                with self._guard:
                    self._path.mkdir(mode=DIRECTORY_MODE)
                    self._opened = self._found()
                self._files.sync_directory(self._directory)
            try:
                self._files.replace(path, [data])
            except OSError as error:
                # If a dropped segment did not help, another one would not help either.
                if not isinstance(store_error(error, ""), OutOfSpaceError) or self._dropped_one:
                    raise
                self._dropped_one = drop_one()
                if not self._dropped_one:
                    raise
                self._files.replace(path, [data])
            self._dropped_one = False

    def names(self, prefix: str) -> list[str]:
        """Return the names of the documents that begin with ``prefix``; none without a directory of documents.

        What a process was writing when it was killed is no document.
        """
        with store_errors(f"cannot list {self._path}"):
            return _names_in(self._path, prefix)

    def beside(self, prefix: str) -> dict[str, Callable[[], bytes | None]]:
        """Return functions that read such documents of other replicas, by directory and name.

        They have directories beside the tier's. A service has a replica for each namespace.
        """
        root, found = self._directory.parent, dict[str, Callable[[], bytes | None]]()
        if self._directory.name.startswith(REPLICA_PREFIX):
            with store_errors(f"cannot list {root}"):
                for path in sorted(root.glob(f"{REPLICA_PREFIX}*/{self._path.name}")):
                    for name in _names_in(path, prefix) if path != self._path else ():
                        found[f"{path.parent.name}/{name}"] = partial(self._read, path / name)
        return found

    def remove(self, name: str) -> None:
        """Make a document's content unreadable, durably."""
        path = self._path_of(name)
        with store_errors(f"cannot remove {path}"):
            # Also afterwards: the directory may be taken away in between.
            self._require_opened()
            remove_durably(self._files, path)
            self._require_opened()

    def _path_of(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise PermanentStoreError(f"{name!r} cannot name a document; allowed are a-z, 0-9, '.' and '-'")
        return self._path / name


def _names_in(directory: Path, prefix: str) -> list[str]:
    """Return the names of the documents in ``directory``, without what a killed process was writing."""
    fresh = fresh_name(directory / "name").suffix
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    return [name for name in names if name.startswith(prefix) and _NAME.fullmatch(name) and not name.endswith(fresh)]


def remove_durably(files: Files, path: Path) -> None:
    """Make the content of ``path`` unreadable, also after a loss of power. An absent file needs nothing.

    Three ways without need of disk space are tried in turn: remove the file, overwrite it in place, rename its
    directory.

    Raises:
        OSError: all three ways failed; the error is that of the first.
    """
    ways: list[Callable[[Files, Path], None]] = [_unlink, _overwrite, _rename_directory]
    refusal: OSError | None = None
    for way in ways:
        try:
            way(files, path)
        except OSError as error:
            refusal = refusal or error
        else:
            if refusal is not None:
                logger.warning("%s could not be removed (%s) and was overwritten or renamed instead", path, refusal)
            return
    if refusal is not None:
        raise refusal


def _unlink(files: Files, path: Path) -> None:
    files.unlink(path)
    with contextlib.suppress(FileNotFoundError):
        files.sync_directory(path.parent)


def _overwrite(files: Files, path: Path) -> None:
    fd = files.open(path, os.O_WRONLY | os.O_NOFOLLOW)
    try:
        files.write_all(fd, memoryview(bytes(os.fstat(fd).st_size)), 0)
        files.fdatasync(fd)
    finally:
        files.close(fd)


def _rename_directory(files: Files, path: Path) -> None:
    files.rename(path.parent, path.parent.with_name(f"{path.parent.name}-given-up-{secrets.token_hex(4)}"))
    files.sync_directory(path.parent.parent)
