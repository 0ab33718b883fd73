"""A copy handler that tests put before a real one."""

from __future__ import annotations

from collections.abc import Collection

from tiering.api.transfer import TransferSpec
from tiering.copy.contract import OffloadingHandler, TransferResult


class Wrapped(OffloadingHandler):
    """A handler that forwards every call to the real one; tests override single calls."""

    def __init__(self, inner: OffloadingHandler) -> None:
        self.inner = inner

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        return self.inner.transfer_async(job_id, spec)

    def get_finished(self) -> list[TransferResult]:
        return self.inner.get_finished()

    def wait(self, job_ids: Collection[int]) -> None:
        self.inner.wait(job_ids)

    def shutdown(self) -> None:
        self.inner.shutdown()
