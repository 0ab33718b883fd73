"""A process of one engine for the I/O of its secondary tiers (``io: process``).

It is the service of a machine (:mod:`tiering.machine`) for this engine alone, at an address that no other engine has.
The kernel kills it when the engine's process ends. If it ends first, the engine runs without its tiers until another
one has started.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tiering.api.masking import guard_logs
from tiering.config.registry import tier_definition
from tiering.machine.link import PROOF_SECONDS
from tiering.machine.namespaces import TierBuilder
from tiering.machine.options import MACHINE_TYPE, MachineTierOptions
from tiering.machine.service import MachineService
from tiering.machine.tier import MachineTier
from tiering.medium.chore import Backoff
from tiering.secondary.contract import TierContext
from tiering.secondary.options import TierOptions

_log = logging.getLogger("kv_tiering.machine")

FIRST_RESTART, LONGEST_RESTART = 0.5, 30.0
"""Seconds before the first and between the later restarts; the wait doubles."""

STEADY_SECONDS = 60.0
"""Seconds after which an end of the process counts as its first again."""

MOST_RESTARTS = 10
"""Number of ends in a row after which the process is not started again."""

_STOP = signal.SIGUSR1
_START = """
import ctypes, json, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
order = json.loads(sys.stdin.readline())
if os.getppid() != order["parent"]: os._exit(1)
sys.path[:] = order["path"]
from tiering.config.io_process import serve_engine
sys.exit(serve_engine(order))
"""
"""Program of the process; prctl(PR_SET_PDEATHSIG) lets the kernel kill it with the engine."""


def builders(tiers: Iterable[TierOptions]) -> dict[str, TierBuilder]:
    """Return the function that builds each tier of a service, by name."""
    return {options.tier_name: partial(tier_definition(options.type).build, options) for options in tiers}


def words_of(options: TierOptions) -> dict[str, Any]:
    """Return the words of a tier as plain data, from which :func:`options_of` makes the same options."""
    return options.model_dump(mode="json", include=options.model_fields_set | {"type"})


def options_of(words: Mapping[str, Any]) -> TierOptions:
    """Return the options of a tier."""
    return tier_definition(words["type"]).options.model_validate(words)


def serve_engine(order: Mapping[str, Any]) -> int:
    """Serve the tiers that ``order`` names, until the engine sends SIGUSR1 or ends."""
    logging.basicConfig(level=order["level"], format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    guard_logs()
    service = MachineService(
        Path("io"),
        builders(map(options_of, order["tiers"])),
        most_bytes=sys.maxsize,
        shutdown_seconds=order["shutdown_seconds"],
        replica_of=lambda _: order["replica"],
    )

    def stop(*_: object) -> None:
        if not service.stopping:  # the engine may send the signal again
            service.stop()

    signal.signal(_STOP, stop)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # systemd and terminals end the engine as well, which has stores left
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    listener.bind(order["address"])
    listener.listen()
    service.listen(listener)
    os.write(1, b"r")
    os.dup2(2, 1)  # nothing reads standard output any more
    return 0 if service.run() else 1


class IoProcess:
    """Starts the process, starts it again after its end, and ends it with the last tier.

    Args:
        tiers: options of the tiers.
        replica: name that tells data-parallel engines of one machine apart.
        shutdown_seconds: seconds that the end of the process may take.
    """

    def __init__(self, tiers: tuple[TierOptions, ...], replica: str | None, shutdown_seconds: float) -> None:
        self.address = f"\0kv-tiering-{secrets.token_hex(16)}"
        """Address of the process, in the abstract namespace: it leaves no file."""
        self.restarts = 0
        """Number of starts after the first."""
        self._order = {
            "address": self.address,
            "tiers": [*map(words_of, tiers)],
            "replica": replica,
            "shutdown_seconds": shutdown_seconds,
            "level": _log.getEffectiveLevel(),
        }
        self._shutdown_seconds = shutdown_seconds
        self._users = len(tiers)
        self._child: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._tried = threading.Event()
        # The kernel kills the process with the thread that has started it.
        self._thread = threading.Thread(target=self._run, name="kv-io-process", daemon=True)

    def start(self, seconds: float) -> None:
        """Start the process, and wait at most ``seconds`` for it."""
        try:
            self._thread.start()
        except (RuntimeError, MemoryError) as error:
            _log.error("io: process: no thread can be started (%s); the engine runs without secondary tiers", error)
            return
        self._tried.wait(seconds)

    def tier(self, options: TierOptions, context: TierContext) -> MachineTier:
        """Return the engine's side of a tier."""
        deadlines = {word: getattr(options, word) for word in ("lookup_deadline",) if hasattr(options, word)}
        words = MachineTierOptions(
            type=MACHINE_TYPE,
            name=options.tier_name,
            socket="io",
            load_deadline=getattr(options, "longest_load", 30.0),
            primary_share=getattr(options, "primary_share", 0.5),
            **deadlines,
        )
        return MachineTier(context, words, self)

    def leave(self, seconds: float) -> bool:
        """End the process with the last tier, or if no time is left, and return True if it is dead."""
        self._users -= 1
        return (self._users <= 0 or seconds <= 0) and self.close(seconds)

    def close(self, seconds: float | None = None) -> bool:
        """End the process, by force if it takes too long, and return True if it is dead.

        Args:
            seconds: longest time until then; default: that of a shutdown.
        """
        self._stopping.set()
        if self._thread.ident is None:
            return True
        if (child := self._child) is not None:
            child.send_signal(_STOP)
        self._thread.join(self._shutdown_seconds if seconds is None else max(PROOF_SECONDS, seconds))
        if self._thread.is_alive() and (child := self._child) is not None:
            _log.warning("io: process: some I/O did not end in time; the process is killed")
            child.kill()
            self._thread.join(PROOF_SECONDS)
        return not self._thread.is_alive()

    # ------------------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        waits = Backoff(FIRST_RESTART, LONGEST_RESTART, jitter=0.0)
        while True:
            begun = time.monotonic()
            reason = self._serve()
            self._tried.set()
            if self._stopping.is_set():
                return
            if time.monotonic() > begun + STEADY_SECONDS:
                waits.succeeded()
            wait, ends = waits.failed(), waits.failures
            if ends > MOST_RESTARTS:
                _log.error("io: process: %s, %d times in a row; the engine runs without secondary tiers", reason, ends)
                return
            _log.warning("io: process: %s; the engine runs without secondary tiers until the next start", reason)
            if self._stopping.wait(wait):
                return
            self.restarts += 1

    def _serve(self) -> str:
        """Start the process, and return the reason of its end."""
        try:
            # -P: a json.py in the engine's working directory is not Python's.
            command = [sys.executable, "-P", "-c", _START]
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except (OSError, ValueError, TypeError, MemoryError) as error:
            return f"it cannot be started: {error}"
        self._child = child
        if self._stopping.is_set():
            child.send_signal(_STOP)
        if child.stdin is not None and child.stdout is not None:
            try:
                with child.stdin as pipe:  # one line: a child that the engine forks meanwhile keeps the pipe open
                    pipe.write(json.dumps({**self._order, "parent": os.getpid(), "path": sys.path}).encode() + b"\n")
            except OSError as error:
                _log.debug("io: process: it has not read its order: %s", error)
            with child.stdout as pipe:
                if pipe.read(1):
                    self._tried.set()
        code = child.wait()
        return f"it has ended with code {code}" if code >= 0 else f"it was ended by signal {-code}"
