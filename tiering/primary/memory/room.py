"""The check that a region fits into memory, with the name of the limit to raise if it does not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tiering.api.units import format_bytes
from tiering.errors import RegionError

_UNLIMITED = 1 << 60
"""Smallest number that means "no limit" in cgroup v1."""


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(stat: Path) -> int:
    """Return the bytes of page cache that the kernel can drop. Shared memory is not among them."""
    try:
        fields = dict(line.split(" ", 1) for line in stat.read_text().splitlines() if " " in line)
    except OSError:
        return 0
    prefix = "total_" if "total_inactive_file" in fields else ""
    return sum(int(fields.get(prefix + name, 0)) for name in ("inactive_file", "active_file"))


def _memory_groups(proc: Path, sysfs: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield (directory, limit file, usage file) of this process's memory cgroup and of all its ancestors."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, usage = sysfs, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, usage = sysfs / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield root.joinpath(*parts[:depth]), limit, usage


def cgroup_free_bytes(proc: Path = Path("/proc"), sysfs: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes that the memory cgroups (v2 and v1) still allow this process; None without a limit.

    Page cache counts as free.

    Args:
        proc: mount point of procfs.
        sysfs: mount point of the cgroup file system.
    """
    free: int | None = None
    for directory, limit_name, usage_name in _memory_groups(proc, sysfs):
        limit, usage = _number(directory / limit_name), _number(directory / usage_name)
        if limit is None or usage is None or limit >= _UNLIMITED:
            continue
        here = max(0, limit - max(0, usage - _reclaimable(directory / "memory.stat")))
        free = here if free is None else min(free, here)
    return free


def available_bytes(proc: Path = Path("/proc")) -> int | None:
    """Return ``MemAvailable`` of the machine in bytes, or None if the kernel does not report it."""
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def check_room(
    nbytes: int, directory: Path | None, *, proc: Path = Path("/proc"), sysfs: Path = Path("/sys/fs/cgroup")
) -> None:
    """Check that the file system, the memory cgroups and the machine have room for a region.

    Args:
        nbytes: size of the region in bytes.
        directory: directory of the region's file; None for an anonymous region.
        proc: mount point of procfs.
        sysfs: mount point of the cgroup file system.

    Raises:
        RegionError: there is not enough room; the message names the limit to raise.
    """
    need = format_bytes(nbytes)
    if directory is not None:
        stat = os.statvfs(directory)
        free = stat.f_bavail * stat.f_frsize
        if free < nbytes:
            raise RegionError(
                f"{directory} has {format_bytes(free)} free, the primary tier needs {need}: "
                "give the container more shared memory (docker: --shm-size; "
                f"Kubernetes: an emptyDir with medium: Memory mounted at {directory}; "
                f"elsewhere: mount -o remount,size=... {directory}), or lower primary.capacity"
            )
    allowed = cgroup_free_bytes(proc, sysfs)
    if allowed is not None and allowed < nbytes:
        raise RegionError(
            f"the memory limit of this container or service leaves {format_bytes(allowed)}, "
            f"the primary tier needs {need}: raise the limit "
            "(docker: --memory; Kubernetes: resources.limits.memory; systemd: MemoryMax), or lower primary.capacity"
        )
    available = available_bytes(proc)
    if available is not None and available < nbytes:
        raise RegionError(
            f"the machine has {format_bytes(available)} of memory available, the primary tier needs {need}: "
            "lower primary.capacity"
        )
