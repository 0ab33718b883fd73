"""The conformance suite, for a tier of the service as an engine uses it."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.machine.hosts import service_in_thread
from tests.medium.named_memory import RawMemory
from tiering.machine.link import ServiceSocket
from tiering.machine.messages import MAX_MESSAGE
from tiering.machine.options import MACHINE_TYPE, MachineTierOptions
from tiering.machine.tier import MACHINE_TIER
from tiering.medium.block_store import Place
from tiering.secondary.contract import SecondaryTierManager, TierContext
from tiering.testing.tier_rig import TierRig
from tiering.testing.tier_tests import TierTests
from tiers.memory import drop_medium, shared_medium


def machine_tier(context: TierContext, socket: Path, **words: object) -> SecondaryTierManager:
    """Return the tier of the context's name, through the service at ``socket``."""
    options = MachineTierOptions.model_validate(
        {"type": MACHINE_TYPE, "name": context.name, "socket": str(socket), **words}
    )
    return MACHINE_TIER.build(options, context)


class TestMachineTierOverMemory(RawMemory, TierTests):
    @pytest.fixture(autouse=True)
    def _service(self, tmp_path: Path) -> Iterator[None]:
        self.memory = shared_medium("machine")
        self._socket = tmp_path / "cache.sock"
        tier = {"type": "memory", "name": "conformance", "capacity": "16MiB", "share": "machine"}
        with service_in_thread(self._socket, tier):
            yield
        drop_medium("machine")

    def make_rig(self, model: str = "model-a") -> TierRig:
        return TierRig(self.make_tier, group_bytes=self.group_bytes, model=model, shares_rows=True)

    def make_tier(self, context: TierContext) -> SecondaryTierManager:
        return machine_tier(context, self._socket)

    def raw_places(self) -> Sequence[Place]:
        return list(self.memory.frames)


def test_a_message_that_cannot_be_sent_ends_the_connection() -> None:
    """Its jobs would never be reported; the end of the connection lets the service report them."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection = ServiceSocket(ours)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    theirs.settimeout(5.0)
    assert connection.send(bytes(MAX_MESSAGE))
    assert theirs.recv(MAX_MESSAGE) == b""
    connection.close()
    theirs.close()
