"""Access to a Mooncake pool that does not go through the tier: whole values, by Mooncake's own client."""

from __future__ import annotations

from examples.mooncake_pool import Master
from tiers.mooncake import MooncakeOptions
from tiers.mooncake.client import load


class Raw:
    """A client of a pool.

    Args:
        master: the pool's master.
    """

    def __init__(self, master: Master) -> None:
        self._native = load(MooncakeOptions(master=master.address))()
        code = self._native.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master.address)
        assert code == 0

    def close(self) -> None:
        self._native.close()

    def read(self, name: str) -> bytes | None:
        return bytes(self._native.get(name)) or None

    def write(self, name: str, data: bytes) -> None:
        """Replace a value; Mooncake has no empty values, so an empty one is none."""
        self.delete(name)
        if data:
            assert self._native.put(name, data) == 0

    def delete(self, name: str) -> None:
        self._native.remove(name, True)

    def exists(self, name: str) -> bool:
        return bool(self._native.is_exist(name) == 1)
