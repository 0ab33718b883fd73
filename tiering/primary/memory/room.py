"""Is there room for a region of so many bytes, and if not, which limit must be raised?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tiering.errors import RegionError

_UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a huge number."""


def format_bytes(nbytes: int) -> str:
    """``nbytes`` for people, e.g. ``"1.5 GiB"``."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(stat: Path) -> int:
    """Bytes of page cache that the kernel drops before it refuses memory (shared memory is not among them)."""
    try:
        fields = dict(line.split(" ", 1) for line in stat.read_text().splitlines() if " " in line)
    except OSError:
        return 0
    prefix = "total_" if "total_inactive_file" in fields else ""
    return sum(int(fields.get(prefix + name, 0)) for name in ("inactive_file", "active_file"))


def _memory_groups(proc: Path, sysfs: Path) -> Iterator[tuple[Path, str, str]]:
    """(directory, limit file, usage file) of this process's memory cgroup and of all above it."""
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
    """What the memory cgroups (v2 and v1) still allow this process, page cache counted as free; None without a limit."""
    free: int | None = None
    for directory, limit_name, usage_name in _memory_groups(proc, sysfs):
        limit, usage = _number(directory / limit_name), _number(directory / usage_name)
        if limit is None or usage is None or limit >= _UNLIMITED:
            continue
        here = max(0, limit - max(0, usage - _reclaimable(directory / "memory.stat")))
        free = here if free is None else min(free, here)
    return free


def available_bytes(proc: Path = Path("/proc")) -> int | None:
    """``MemAvailable`` of the machine, None where the kernel does not tell."""
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
    """Raise :class:`RegionError` unless ``nbytes`` fit: in ``directory`` (None: no file system), the cgroup and the machine."""
    need = format_bytes(nbytes)
    if directory is not None:
        stat = os.statvfs(directory)
        free = stat.f_bavail * stat.f_frsize
        if free < nbytes:
            raise RegionError(
                f"{directory} has {format_bytes(free)} free, the primary tier needs {need}: give the container more shared memory "
                f"(docker: --shm-size; Kubernetes: an emptyDir with medium: Memory mounted at {directory}; elsewhere: "
                f"mount -o remount,size=... {directory}), or lower primary.capacity"
            )
    allowed = cgroup_free_bytes(proc, sysfs)
    if allowed is not None and allowed < nbytes:
        raise RegionError(
            f"the memory limit of this container or service leaves {format_bytes(allowed)}, the primary tier needs {need}: raise it "
            "(docker: --memory; Kubernetes: resources.limits.memory; systemd: MemoryMax), or lower primary.capacity"
        )
    available = available_bytes(proc)
    if available is not None and available < nbytes:
        raise RegionError(
            f"the machine has {format_bytes(available)} of memory available, the primary tier needs {need}: lower primary.capacity"
        )
