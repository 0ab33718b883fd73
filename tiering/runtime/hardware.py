"""The kind of this machine: its processors and accelerators, on which the speed of an engine depends."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

MOST_DEVICES = 64
"""Largest number of accelerators that are looked at."""


@cache
def hardware(proc: Path = Path("/proc")) -> str:
    """Return a text that machines of one kind have in common.

    Args:
        proc: the directory of the kernel's files; default: ``/proc``.
    """
    processor = next(_values(proc / "cpuinfo", "model name"), platform.machine())
    devices = sorted((proc / "driver" / "nvidia" / "gpus").glob("*/information"))[:MOST_DEVICES]
    models = Counter(next(_values(device, "Model"), "") for device in devices)
    return "; ".join(
        [f"{os.cpu_count()} {processor}", *(f"{count} {model}" for model, count in sorted(models.items()))]
    )


def _values(file: Path, name: str) -> Iterator[str]:
    """Yield the values of the lines ``name: value`` of a file; none if it cannot be read."""
    try:
        with file.open(errors="replace") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() == name:
                    yield value.strip()
    except OSError:
        return
