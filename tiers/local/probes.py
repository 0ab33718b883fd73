"""Probes of a local tier's directory: file system, room, permissions and limits."""

from __future__ import annotations

import errno
import os
import resource
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from tiering import ConfigError
from tiering.tier import Files, Finding, Severity, format_bytes
from tiers.local.checkpoint import CHECKPOINT_NAME
from tiers.local.device import probe_direct
from tiers.local.layout import DIRECTORY_MODE, SegmentGeometry, replicas_in, used_bytes
from tiers.local.local_options import LocalOptions
from tiers.local.lock import LOCK_NAME, owner_of
from tiers.local.segments import MAX_OPEN

_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "9p"})
_MEMORY = frozenset({"tmpfs", "ramfs"})
_GOOD = frozenset({"ext4", "xfs"})
_USABLE = 0.95
"""Share of the free space that a capacity may take: file systems keep some for themselves."""
_SPARE_FILES = 256
"""Open files that an engine needs besides the segments."""


_RIGHTS = "give the engine's user rwx on the directory and x on those above it, or choose another path"
_ROOM = "free some space, or raise the quota"
_REMEDIES = {errno.EACCES: _RIGHTS, errno.EPERM: _RIGHTS, errno.ENOSPC: _ROOM, errno.EDQUOT: _ROOM}


def probe_directory(options: LocalOptions, directory: Path, block_bytes: int, files: Files) -> Iterator[Finding]:
    """Yield findings about the directory of a local tier. A directory in use is only read.

    Args:
        options: options of the tier.
        directory: directory of the tier.
        block_bytes: bytes of the largest block.
        files: file operations.
    """
    try:
        geometry = SegmentGeometry.plan(options.capacity, block_bytes, options.segment_size)
        text = f"{format_bytes(options.capacity)} hold {geometry.num_slots:,} blocks of {format_bytes(block_bytes)}"
        yield Finding(Severity.OK, "capacity", text)
    except ConfigError as error:
        text = str(error)
        remedy = "raise the capacity (a unit may be missing: 8GiB, not 8), or lower the size of a block"
        yield Finding(Severity.ERROR, "capacity", text, remedy)
        return
    existing = directory
    try:
        existing, wrong = nearest_existing(directory)
        if wrong is not None:
            yield wrong
            return
        if existing != directory:
            yield Finding(Severity.INFO, "directory", f"{directory} does not exist yet; the engine creates it")
        yield from _probe_existing(options, directory, existing, files, geometry.least_capacity)
    except OSError as error:
        text = f"{existing} cannot be used: {error.strerror or error}"
        yield Finding(Severity.ERROR, "directory", text, _REMEDIES.get(error.errno or 0, "choose another path"))


def nearest_existing(directory: Path) -> tuple[Path, Finding | None]:
    """Return ``directory`` or the nearest directory above it that exists.

    The finding is the reason why nothing can be made there: a file, or a link that leads nowhere. It is None if there
    is no such reason.

    Raises:
        OSError: the path cannot be looked at.
    """
    existing = directory
    while not existing.exists():
        if existing.is_symlink():
            text = f"{existing} is a symbolic link that leads nowhere"
            return existing, Finding(Severity.ERROR, "directory", text, "correct the link")
        existing = existing.parent
    if not existing.is_dir():
        text = f"{existing} is not a directory"
        return existing, Finding(Severity.ERROR, "directory", text, "choose another path, or remove the file")
    return existing, None


def _probe_existing(
    options: LocalOptions, directory: Path, existing: Path, files: Files, least: int
) -> Iterator[Finding]:
    if existing == directory:
        yield from _probe_entries(directory)
    owner = owner_of(directory) if existing == directory else None
    if owner is not None:
        yield Finding(Severity.INFO, "owner", f"in use by {owner}; the directory was only read")
    yield from _probe_rights(directory, existing)
    yield from _probe_file_system(existing)
    yield from _probe_room(options, directory, existing, files, least)
    yield from _probe_open_files()
    if os.access(existing, os.W_OK | os.X_OK):
        yield from _probe_direct(directory, existing, files, live=owner is not None)
    if existing == directory and (names := ", ".join(replicas_in(directory))):
        yield Finding(Severity.INFO, "replicas", f"data-parallel replicas have subdirectories here: {names}")


def _probe_entries(directory: Path) -> Iterator[Finding]:
    """Yield findings about what stands in the place of the tier's files, and cannot be opened as such."""
    for severity, effect, paths in (
        (Severity.ERROR, "no engine can own the directory", [directory / LOCK_NAME]),
        (Severity.WARNING, "its blocks are not used", sorted(directory.glob("slots-*"))),
        (Severity.WARNING, "a start reads the headers of all blocks instead", [directory / CHECKPOINT_NAME]),
    ):
        wrong = [(path, reason) for path in paths if (reason := _unusable(path))]
        if wrong:
            path, reason = wrong[0]
            more = f" (and {len(wrong) - 1:,} more)" if len(wrong) > 1 else ""
            remedy = f"remove {path.name}, or give it back to the user"
            yield Finding(severity, "files", f"{path} {reason}{more}: {effect}", remedy)


def _unusable(path: Path) -> str:
    """Return the reason why a file of the tier cannot be opened; empty if it can, or is absent.

    On a read-only file system, files are only read.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return ""
    if not stat.S_ISREG(mode):
        return "is no plain file"
    needed = os.R_OK if os.statvfs(path).f_flag & os.ST_RDONLY else os.R_OK | os.W_OK
    return "" if os.access(path, needed) else f"may not be read and written by user {os.geteuid()}"


def _probe_rights(directory: Path, existing: Path) -> Iterator[Finding]:
    if os.statvfs(existing).f_flag & os.ST_RDONLY:
        text = f"the file system of {existing} is read-only; blocks are served and none are stored"
        remedy = "remount it read-write; Linux also remounts a failing disk read-only (see the kernel's log)"
        yield Finding(Severity.ERROR, "writable", text, remedy)
    elif not os.access(existing, os.W_OK | os.X_OK):
        text = f"user {os.geteuid()} may not write in {existing}"
        remedy = f"chown or chmod {existing} for the engine's user, or choose another path"
        yield Finding(Severity.ERROR, "writable", text, remedy)
    else:
        yield Finding(Severity.OK, "writable", f"user {os.geteuid()} may write in {existing}")
    mode = stat.S_IMODE(existing.stat().st_mode)
    if existing == directory and mode & (stat.S_IWGRP | stat.S_IWOTH):
        text = f"other users may write in {directory} (mode {mode:03o}), and could remove or replace blocks"
        yield Finding(Severity.WARNING, "permissions", text, f"chmod go-w {directory}")


def _probe_file_system(existing: Path) -> Iterator[Finding]:
    kind, device = file_system(existing)
    text = f"{kind} on {device}"
    if kind in _NETWORK or kind.startswith("fuse."):
        text = f"{text}: a network file system; locks, O_DIRECT and latency are not those of a disk"
        remedy = "use a local disk; for a medium that machines share, use the s3 tier"
        yield Finding(Severity.WARNING, "file system", text, remedy)
    elif kind in _MEMORY:
        yield Finding(
            Severity.WARNING, "file system", f"{text}: memory, not a disk", "use a disk, or raise primary.capacity"
        )
    elif kind == "overlay":
        text = f"{text}: the container's own layer, which is slow and is lost with the container"
        yield Finding(Severity.WARNING, "file system", text, "mount a volume on NVMe (ext4 or xfs) there")
    else:
        yield Finding(Severity.OK if kind in _GOOD else Severity.INFO, "file system", text)


def _probe_room(options: LocalOptions, directory: Path, existing: Path, files: Files, least: int) -> Iterator[Finding]:
    """Yield the finding about the room on the disk; ``least`` is the smallest capacity that holds a block."""
    room = os.statvfs(existing)
    size, free = files.size_of_disk(existing), room.f_bavail * room.f_frsize
    used = used_bytes(directory) if existing == directory else 0
    text = (
        f"{format_bytes(free)} free, {format_bytes(used)} used by the tier, capacity {format_bytes(options.capacity)}"
    )
    most = int((free + used) * _USABLE)
    lower = f"lower capacity to at most {format_bytes(most)}, or " if most >= least else ""
    if size == 0:
        kind, _ = file_system(existing)
        yield Finding(
            Severity.ERROR, "free space", f"{existing} is on {kind}, which stores no files", "choose a path on a disk"
        )
    elif size < options.capacity:
        text = f"{text}: the whole file system has only {format_bytes(size)}"
        yield Finding(Severity.ERROR, "free space", text, f"{lower}use a larger disk")
    elif free + used < options.capacity:
        # With room for no block at all, the tier stores nothing.
        text = f"{text}: the disk is full before eviction begins"
        yield Finding(Severity.WARNING if lower else Severity.ERROR, "free space", text, f"{lower}free some space")
    else:
        yield Finding(Severity.OK, "free space", text)


def _probe_open_files() -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < MAX_OPEN + _SPARE_FILES:
        text = f"the limit is {soft}; the tier keeps up to {MAX_OPEN} files open"
        remedy = "raise it: ulimit -n 65536 (docker: --ulimit nofile=65536; systemd: LimitNOFILE)"
        yield Finding(Severity.WARNING, "open files", text, remedy)


def _probe_direct(directory: Path, existing: Path, files: Files, *, live: bool) -> Iterator[Finding]:
    """Try O_DIRECT on a segment, or on a file in a directory that is removed again."""
    found = sorted(directory.glob("slots-*")) if existing == directory else []
    segment = next((path for path in found if not _unusable(path)), None)
    if segment is not None:
        direct = probe_direct(files, directory, segment, read_only=live)
    elif live:
        return
    else:
        trial = existing / f".kv-tiering-scratch-{secrets.token_hex(4)}"
        trial.mkdir(mode=DIRECTORY_MODE)
        try:
            direct = probe_direct(files, trial, None)
        finally:
            trial.rmdir()
    if direct:
        yield Finding(Severity.OK, "O_DIRECT", "the file system takes it; the page cache stays free")
    else:
        text = "the file system declines it; reads and writes go through the page cache and cost more CPU"
        yield Finding(Severity.WARNING, "O_DIRECT", text, "use ext4 or xfs on a local disk")


def file_system(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> tuple[str, str]:
    """Return type and device of the file system of ``path``; ("unknown", "?") if not known."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    found = ("unknown", "?")
    longest = -1
    resolved = path.resolve()
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        fields, _, rest = line.partition(" - ")
        words = fields.split()
        kind, source = rest.split()[:2]
        point = Path(words[4].encode().decode("unicode_escape"))
        same = words[2] == wanted or kind in {"btrfs", "overlay"}
        if same and resolved.is_relative_to(point) and len(point.parts) > longest:
            found, longest = (kind, source), len(point.parts)
    return found
