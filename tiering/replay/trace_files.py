"""The files of a recorded trace, which one process appends to, within a bound on their size."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

_NAME = re.compile(r"trace-.+-\d+-\d+\.jsonl")
"""Names of trace files; other files in the directory are never removed."""

PARTS = 8
"""Number of files that the largest size is divided into; the oldest one is removed for a new one."""


class TraceFiles:
    """Files ``trace-HOST-PROCESS-NUMBER.jsonl`` in a directory, readable by their owner only.

    A file is always new, so no two processes ever write to one file. It is created for its first line. A line that
    could not be written leaves no part of itself behind. After SIGKILL, the last line may be incomplete.

    Files of processes that have ended stay until the directory needs the room. Before a new file begins, the files that
    were written longest ago are removed, those of other processes included. A process whose file was removed begins
    another.

    Args:
        directory: the directory; created if it does not exist.
        max_bytes: largest size of the files of this object together; a single longer line is still written.
        max_total: largest size of all trace files in the directory together.
        header: first line of each file.
    """

    def __init__(self, directory: Path, max_bytes: int, max_total: int, header: bytes) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._max_total = max_total
        self._header = header
        host = re.sub(r"[^\w.-]", "_", os.uname().nodename)
        self._name = f"trace-{host}-{os.getpid()}"
        self._number = 0
        self._file: int | None = None
        self._size = 0
        self._older: list[tuple[Path, int]] = []
        self._path = directory

    def append(self, line: bytes) -> None:
        """Append a line; a new file is begun if the present one is long enough or has been removed.

        Raises:
            OSError: the line was not written.
        """
        if self._file is not None:
            if not _is_linked(self._file):
                self.close()
            elif self._size + len(line) > self._max_bytes // PARTS:
                self._older.append((self._path, self._size))
                self.close()
        if self._file is None:
            self._begin(len(line))
        if self._size == 0:
            line = self._header + line
        self._write(line)

    def close(self) -> None:
        """Close the present file; the next line begins another."""
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)

    def _begin(self, length: int) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = max(self._max_bytes // PARTS, len(self._header) + length)
        while self._older and sum(size for _, size in self._older) + part > self._max_bytes:
            self._older[0][0].unlink(missing_ok=True)
            del self._older[0]
        self._make_room(self._max_total - part)
        while self._file is None:
            self._number += 1
            self._path = self._directory / f"{self._name}-{self._number}.jsonl"
            try:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            except FileExistsError:
                continue
        self._size = 0

    def _make_room(self, size: int) -> None:
        """Remove the trace files that were written longest ago, until those left have at most ``size`` bytes."""
        found: list[tuple[float, str, int]] = []
        with os.scandir(self._directory) as entries:
            for entry in entries:
                if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        found.append((status.st_mtime, entry.path, status.st_size))
        left = sum(length for _, _, length in found)
        for _, path, length in sorted(found):
            if left <= size:
                break
            Path(path).unlink(missing_ok=True)
            left -= length

    def _write(self, data: bytes) -> None:
        file = self._file
        if file is None:
            raise OSError("no file is open")
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(file, left) :]
        except OSError:
            try:
                os.ftruncate(file, self._size)
            except OSError:
                self._older.append((self._path, self._size))
                self.close()
            raise
        self._size += len(data)


def _is_linked(file: int) -> bool:
    """Return False if the file was removed, by another process or on another machine."""
    try:
        return os.fstat(file).st_nlink > 0
    except OSError:
        return False
