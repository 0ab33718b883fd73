"""Processes that start at the same time get one socket each, or the reason."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from tiering.errors import ConfigError
from tiering.runtime import door


def test_of_two_services_that_start_at_one_instant_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both see the socket of a killed service; the second must not remove that of the first."""
    path = tmp_path / "cache.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(os.fspath(path))
    waits, bound, refused = threading.Event(), threading.Event(), []

    def start() -> None:
        try:
            door.bind_socket(path).close()
        except ConfigError as error:
            refused.append(str(error))

    second = threading.Thread(target=start)
    remove = door._remove_left

    def remove_while_another_starts(removed: Path, kind: socket.SocketKind) -> None:
        remove(removed, kind)
        if threading.current_thread() is not second:
            second.start()
            waits.wait(10.0)

    def pause(_: float) -> None:
        waits.set()
        bound.wait(10.0)

    monkeypatch.setattr(door, "_remove_left", remove_while_another_starts)
    monkeypatch.setattr("tiering.runtime.door.time.sleep", pause)
    first = door.bind_socket(path)
    bound.set()
    second.join(10.0)
    assert len(refused) == 1
    assert "another process listens there" in refused[0]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.connect(os.fspath(path))
    first.close()


def test_a_lock_that_is_not_released_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiering.runtime.door.time.sleep", lambda _: None)
    with door._alone(tmp_path), pytest.raises(ConfigError, match="another process keeps it locked"):
        door.bind_socket(tmp_path / "cache.sock")
    door.bind_socket(tmp_path / "cache.sock").close()
