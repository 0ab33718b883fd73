"""Load handlers that report false success (negative controls), that are late, and that fail."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from tests.wrapped_handler import Wrapped
from tiering.api.transfer import CPULoadStoreSpec, TransferSpec
from tiering.copy.contract import OffloadingHandler, TransferResult


class CopyNothing(Wrapped):
    """A handler that reports every load as done and moves nothing."""

    def __init__(self, inner: OffloadingHandler) -> None:
        super().__init__(inner)
        self._claimed: list[TransferResult] = []

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        self._claimed.append(TransferResult(job_id, True, 1, 1e-6, ("cpu", "gpu")))
        return True

    def get_finished(self) -> list[TransferResult]:
        claimed, self._claimed = self._claimed, []
        return [*claimed, *self.inner.get_finished()]


class OneWrongBlock(Wrapped):
    """A handler that copies the last row of each load over its first row as well."""

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        source, destination = spec
        assert isinstance(source, CPULoadStoreSpec)
        rows = np.array(source.block_ids)
        rows[0] = rows[-1]
        return self.inner.transfer_async(job_id, (CPULoadStoreSpec(rows), destination))


class Late(Wrapped):
    """A handler that begins no copy before the engine waits for it, or :meth:`begin` is called."""

    def __init__(self, inner: OffloadingHandler) -> None:
        super().__init__(inner)
        self.held: dict[int, TransferSpec] = {}

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        self.held[job_id] = spec
        return True

    def begin(self, job_ids: Collection[int] | None = None) -> None:
        """Begin these copies; default: all."""
        for job_id in list(self.held) if job_ids is None else self.held.keys() & job_ids:
            assert self.inner.transfer_async(job_id, self.held.pop(job_id))

    def wait(self, job_ids: Collection[int]) -> None:
        self.begin(job_ids)
        self.inner.wait(job_ids)


class FailEverySecond(Wrapped):
    """A handler that fails every second load, starting with the first, after half of its bytes."""

    def __init__(self, inner: OffloadingHandler) -> None:
        super().__init__(inner)
        self.failed = 0
        self._seen = 0
        self._doomed: set[int] = set()

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        self._seen += 1
        if self._seen % 2:
            self._doomed.add(job_id)
            return OneWrongBlock.transfer_async(self, job_id, spec)  # type: ignore[arg-type]
        return self.inner.transfer_async(job_id, spec)

    def get_finished(self) -> list[TransferResult]:
        results = []
        for result in self.inner.get_finished():
            if result.job_id in self._doomed:
                self._doomed.discard(result.job_id)
                self.failed += 1
                results.append(TransferResult(result.job_id, False))
            else:
                results.append(result)
        return results


class EndsWhenLookedAt(Wrapped):
    """A handler that reports its transfers at the fifth look only."""

    def __init__(self, inner: OffloadingHandler) -> None:
        super().__init__(inner)
        self._looks = 0
        self._started: set[int] = set()

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        self._started.add(job_id)
        return self.inner.transfer_async(job_id, spec)

    def get_finished(self) -> list[TransferResult]:
        self._looks += bool(self._started)
        if self._looks < 5:
            return []
        self.inner.wait(self._started)
        return self.inner.get_finished()


class EndsAtOnce(Wrapped):
    """A handler whose transfers have ended when they have begun.

    Attributes:
        begun: number of transfers.
    """

    def __init__(self, inner: OffloadingHandler) -> None:
        super().__init__(inner)
        self.begun = 0

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        self.begun += 1
        started = self.inner.transfer_async(job_id, spec)
        self.inner.wait([job_id])
        return started
