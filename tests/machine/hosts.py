"""Services for tests, in a thread of this process or in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tiering.config.io_process import builders
from tiering.config.stack_file import load_stack
from tiering.machine.namespaces import TierBuilder
from tiering.machine.service import MachineService
from tiering.testing.clock import until

PATIENCE = 60.0


def stack_of(*tiers: Mapping[str, Any], capacity: str = "64MiB", **words: Any) -> dict[str, Any]:
    """Return the stack of a service with ``tiers``."""
    return {"primary": {"capacity": capacity}, "secondary": [dict(tier) for tier in tiers], **words}


@contextmanager
def service_in_thread(path: Path, *tiers: Mapping[str, Any], **more: TierBuilder) -> Iterator[MachineService]:
    """Run a service with ``tiers`` in a thread of this process."""
    config = load_stack(stack_of(*tiers))
    service = MachineService(path, {**builders(config.secondary), **more}, most_bytes=1 << 30)
    service.listen()
    thread = threading.Thread(target=service.run, name="kv-test-service")
    thread.start()
    try:
        yield service
    finally:
        service.stop()
        thread.join(PATIENCE)
    assert not thread.is_alive()


class ServiceProcess:
    """A service in a process of its own, as ``kv-tiering serve`` starts it."""

    def __init__(self, directory: Path, stack: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> None:
        self.socket = directory / "cache.sock"
        self._stack = directory / "service.yaml"
        self._stack.write_text(yaml.safe_dump(dict(stack)))
        self._log = directory / "service.log"
        self._environment = {**os.environ, **(environment or {})}
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tiering.cli", "serve", str(self._stack), "--socket", str(self.socket)],
                stdout=log,
                stderr=log,
                env=self._environment,
            )

    def wait_for_socket(self) -> ServiceProcess:
        """Return once the service listens."""

        assert until(lambda: "serving" in self.log or self.process.poll() is not None, PATIENCE), self.log
        assert self.process.poll() is None, self.log
        return self

    @property
    def log(self) -> str:
        """The service's log so far."""
        return self._log.read_text()

    def restart(self) -> None:
        """Start the service again, after its end."""
        self.process.wait(PATIENCE)
        self._log.write_text("")
        self.process = self._start()
        self.wait_for_socket()

    def kill(self) -> None:
        """End the service without a chance to do anything."""
        self.process.kill()

    def end(self) -> int:
        """End the service as an operator does, and return its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(PATIENCE)


@contextmanager
def service_process(
    directory: Path, *tiers: Mapping[str, Any], environment: Mapping[str, str] | None = None, **words: Any
) -> Iterator[ServiceProcess]:
    """Run ``kv-tiering serve`` with ``tiers``."""
    service = ServiceProcess(directory, stack_of(*tiers, **words), environment)
    try:
        yield service.wait_for_socket()
    finally:
        if service.process.poll() is None:
            service.process.kill()
        service.process.wait(PATIENCE)
