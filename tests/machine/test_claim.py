"""A refused claim of rows is logged with the reason, also if the service hung up before it was sent."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.machine.engines import GROUP_BYTES, model
from tiering.machine import claim
from tiering.machine.messages import Kind, Record, messages, pack
from tiering.machine.options import MachineOptions
from tiering.primary.memory.side import RegionSide


def test_the_reason_of_a_service_that_hung_up_at_once_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, hung_up = tmp_path / "cache.sock", threading.Event()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()

        def refuse() -> None:
            with listener.accept()[0] as connection:
                ((message, _),) = messages([pack(Record(Kind.REFUSED, text=b"engines of its own user"))], 0)
                connection.send(message)
            hung_up.set()

        def late(*arguments: Any) -> Any:
            assert hung_up.wait(60)
            return messages(*arguments)

        monkeypatch.setattr(claim, "messages", late)
        service = threading.Thread(target=refuse)
        service.start()
        options = MachineOptions(socket=str(path), tiers=["local"], keep_rows=True)
        assert claim.claim_rows(options, "engine", model(), GROUP_BYTES, (), 8, RegionSide()) is None
        service.join()
    assert "will not outlive this engine: engines of its own user" in caplog.text
