"""A machine's service for the disk of an engine of ``vllm_overhead``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tiering.machine.link import greet
from tiering.machine.words import Greeting
from tiering.testing.clock import until

_START_SECONDS = 120.0


@contextmanager
def machine_service(directory: Path, tier: Mapping[str, Any], capacity: int) -> Iterator[tuple[Path, int]]:
    """Run a service with one tier; yield its socket and its process.

    Args:
        directory: directory for the socket and the stack.
        tier: words of the tier.
        capacity: bytes of the CPU tier of the engine.
    """
    directory.mkdir(mode=0o700)
    path, stack = directory / "s", directory / "service.yaml"
    stack.write_text(yaml.safe_dump({"primary": {"capacity": capacity}, "secondary": [dict(tier)]}))
    process = subprocess.Popen(
        [sys.executable, "-m", "tiering.cli", "serve", str(stack), "--socket", str(path)], stderr=subprocess.DEVNULL
    )

    def answers() -> bool:
        try:
            greet(str(path), Greeting("").text(), ()).close()
        except OSError:
            return False
        return True

    try:
        if not until(lambda: process.poll() is not None or answers(), _START_SECONDS) or process.poll() is not None:
            raise RuntimeError("the service of a machine does not start")
        yield path, process.pid
    finally:
        process.terminate()
        process.wait()
