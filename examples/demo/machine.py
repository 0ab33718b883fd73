"""The service of the demonstration's machine, in a process of its own."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

START_SECONDS, END_SECONDS = 60.0, 30.0


@contextmanager
def serving(directory: Path, tier: dict[str, Any], cpu_bytes: int) -> Iterator[Path]:
    """Run ``kv-tiering serve`` with one tier, and yield the path of its socket.

    Raises:
        RuntimeError: the service does not listen in time.
    """
    stack = directory / "service.yaml"
    stack.write_text(yaml.safe_dump({"primary": {"capacity": cpu_bytes}, "secondary": [tier]}))
    # The path of a socket is short, wherever the demonstration runs.
    with tempfile.TemporaryDirectory(prefix="kv-demo-") as place, (directory / "service.log").open("wb") as log:
        path = Path(place) / "cache.sock"
        command = [sys.executable, "-m", "tiering.cli", "serve", str(stack), "--socket", str(path)]
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            _wait(path, process)
            yield path
        finally:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(path: Path, process: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + START_SECONDS
    while time.monotonic() < give_up and process.poll() is None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as trial:
            if trial.connect_ex(str(path)) == 0:
                return
        time.sleep(0.05)
    raise RuntimeError("the service of the machine does not listen; service.log has the reason")
