"""A native client in this process that a test makes hang or fail; it notices calls after its end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


class FakeNative:
    """Stands for ``MooncakeDistributedStore``.

    Args:
        told: list to which all clients of a test append what happens to them.
    """

    def __init__(self, told: list[str]) -> None:
        self.told = told
        self.setup_code = 0
        self.register_code = 0
        self.get_codes: Callable[[Sequence[str]], list[int]] = lambda names: [-704] * len(names)
        self.ended = threading.Event()

    def _alive(self) -> None:
        assert not self.ended.is_set(), "a call after the client's end crashes the process"

    def setup(self, *words: object) -> int:
        self.told.append("setup")
        return self.setup_code

    def register_buffer(self, address: int, size: int) -> int:
        self._alive()
        self.told.append(f"register {size}")
        return self.register_code

    def batch_get_into_multi_buffers(
        self, names: Sequence[str], addresses: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]
    ) -> list[int]:
        self._alive()
        codes = self.get_codes(names)
        self._alive()
        self.told.append("get")
        return codes

    def get_size(self, name: str) -> int:
        self._alive()
        return -704

    def batch_is_exist(self, names: Sequence[str]) -> list[int]:
        self._alive()
        return [0] * len(names)

    def close(self) -> int:
        self._alive()
        self.ended.set()
        self.told.append("close")
        return 0
