"""The messages of a service to systemd, which started it: it is ready, and it runs."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress


class UnitNotifier:
    """Sends what a unit of the type ``notify`` expects; without such a unit, nothing.

    Args:
        environment: variables of the process.
        clock: function that returns monotonic seconds.
    """

    def __init__(
        self, environment: Mapping[str, str] = os.environ, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        self._clock = clock
        period = environment.get("WATCHDOG_USEC", "") if self._is_meant(environment) else ""
        self._seconds = int(period) / 3e6 if period.isdecimal() else 0.0
        """Time between two signs of life, a third of the watchdog's; 0: there is no watchdog."""
        self._due = 0.0

    @staticmethod
    def _is_meant(environment: Mapping[str, str]) -> bool:
        return environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())

    def ready(self) -> None:
        """Send that the service takes connections."""
        self._send("READY=1")

    def beat(self) -> None:
        """Send a sign of life, if one is due."""
        if self._seconds and (now := self._clock()) >= self._due:
            self._due = now + self._seconds
            self._send("WATCHDOG=1")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        # An address with @ is in the kernel's abstract namespace, which begins with a zero byte.
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as peer, suppress(OSError):
            peer.setblocking(False)
            peer.sendto(text.encode(), address)
