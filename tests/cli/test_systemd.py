"""The messages of a service to systemd."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.machine.hosts import service_process
from tiering.cli.serve import UnitNotifier
from tiering.testing.clock import FakeClock


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(60.0)
        yield listener


def received(listener: socket.socket) -> list[bytes]:
    """Return the messages that have arrived."""
    listener.setblocking(False)
    found: list[bytes] = []
    try:
        while True:
            found.append(listener.recv(100))
    except BlockingIOError:
        return found


def test_a_sign_of_life_comes_in_a_third_of_the_watchdogs_time(systemd: socket.socket) -> None:
    clock = FakeClock()
    notifier = UnitNotifier({"NOTIFY_SOCKET": systemd.getsockname(), "WATCHDOG_USEC": "30000000"}, clock)
    notifier.ready()
    for _ in range(5):
        notifier.beat()
        clock.advance(5.0)
    assert received(systemd) == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1", b"WATCHDOG=1"]


def test_users_that_are_not_served_are_in_the_units_status(systemd: socket.socket) -> None:
    notifier = UnitNotifier({"NOTIFY_SOCKET": systemd.getsockname()})
    for troubles in ([], ["anna: it has failed"], ["anna: it has failed"], []):
        notifier.show(troubles)
    assert received(systemd) == [b"STATUS=not served: anna: it has failed", b"STATUS=all users are served"]


@pytest.mark.parametrize("words", [{}, {"WATCHDOG_USEC": ""}, {"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}])
def test_without_a_watchdog_of_this_process_there_is_no_sign(systemd: socket.socket, words: dict[str, str]) -> None:
    notifier = UnitNotifier({"NOTIFY_SOCKET": systemd.getsockname(), **words})
    notifier.beat()
    assert received(systemd) == []


def test_without_systemd_and_with_one_that_is_gone_nothing_happens(tmp_path: Path) -> None:
    UnitNotifier({}).ready()
    UnitNotifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready()


def test_an_abstract_address_is_reached() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0kv-tiering-test-{os.getpid()}")
        UnitNotifier({"NOTIFY_SOCKET": f"@kv-tiering-test-{os.getpid()}"}).ready()
        assert received(listener) == [b"READY=1"]


def test_a_running_service_is_ready_and_gives_signs(tmp_path: Path, systemd: socket.socket) -> None:
    environment = {"NOTIFY_SOCKET": systemd.getsockname(), "WATCHDOG_USEC": "300000"}
    with service_process(tmp_path, {"type": "memory", "capacity": "1MiB"}, environment=environment) as service:
        assert [systemd.recv(100) for _ in range(3)] == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1"]
        assert service.end() == 0
