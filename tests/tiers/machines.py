"""Processes that stand for machines: each has a stack of its own, and all share a medium."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.patience import PATIENT

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def machine(path: Path, tier: Mapping[str, Any], work: str, count: int, **words: object) -> Iterator[int]:
    """Run a machine until the end of the context, and yield the number of blocks that it stored or loaded.

    Args:
        path: file for the machine's stack.
        tier: section of the stack with the shared medium.
        work: "store" or "load".
        count: number of blocks.
        words: further words of the stack.

    Raises:
        AssertionError: the machine did not end well.
    """
    path.write_text(yaml.safe_dump({"primary": {"capacity": "8MiB"}, "secondary": [{**PATIENT, **tier}], **words}))
    command = [sys.executable, "-m", "tests.tiers.pool_machine", str(path), work, str(count)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        answer = process.stdout.readline()
        assert answer, f"the machine ended with code {process.wait(60)}"
        yield int(answer)
    finally:
        process.communicate(timeout=60)
        assert process.returncode == 0
