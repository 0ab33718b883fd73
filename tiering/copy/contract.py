"""Contract of the copy handlers between GPU blocks and primary rows, and the worker that holds them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import NamedTuple

from tiering.api.transfer import LoadStoreSpec, TransferSpec
from tiering.errors import TieringError

TransferType = tuple[str, str]
"""("gpu", "cpu") or ("cpu", "gpu")."""


class TransferError(TieringError):
    """A transfer that does not fit the KV cache or the rows, or that must not fail and cannot be made."""


class TransferResult(NamedTuple):
    """The end of one transfer. A value that is not known is None."""

    job_id: int
    """Id that the transfer was started with."""
    success: bool
    """True if all bytes were moved."""
    transfer_size: int | None = None
    """Bytes moved."""
    transfer_time: float | None = None
    """Seconds from start to end."""
    transfer_type: TransferType | None = None
    """Medium of the source and of the destination; None (default): not reported."""


class OffloadingHandler(ABC):
    """Copies of blocks in one direction.

    The engine's thread calls all methods. Only :meth:`wait` and :meth:`shutdown` block that thread.
    """

    @abstractmethod
    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Start a transfer. False if it could not be started: no byte was moved, and no result follows."""

    def transfer_all_async(self, jobs: Sequence[tuple[int, TransferSpec]]) -> list[int]:
        """Start several transfers, as one submission where the device gains from it.

        Returns:
            The ids of the transfers that could not be started.
        """
        return [job_id for job_id, spec in jobs if not self.transfer_async(job_id, spec)]

    def transfer_at_once(self, jobs: Sequence[tuple[int, TransferSpec]]) -> Collection[int]:
        """Run small transfers in the caller's thread, where that costs less than another thread's help.

        All earlier work of the engine has ended, or the handler runs none of the transfers. Results are returned later.

        Returns:
            The ids of the transfers that were not run and are to be started; by default, those of all.
        """
        return [job_id for job_id, _ in jobs]

    def transfer_first(self, jobs: Sequence[tuple[int, TransferSpec]]) -> None:
        """Run transfers before all later work of the engine, which cannot do without them.

        Their results are returned later, as those of other transfers.

        Raises:
            TransferError: a transfer cannot be made.
        """
        if refused := self.transfer_all_async(jobs):
            raise TransferError(f"copy jobs {refused}, which the step needs, could not be started")
        self.order_before_compute([job_id for job_id, _ in jobs])

    @abstractmethod
    def get_finished(self) -> list[TransferResult]:
        """Return the transfers that have ended since the last call, each once, failed ones included."""

    @abstractmethod
    def wait(self, job_ids: Collection[int]) -> None:
        """Block until these transfers have ended. Unknown ids are ignored; results are still returned later."""

    def order_before_compute(self, job_ids: Collection[int]) -> None:
        """Run all later work of the engine after these transfers.

        A device orders the work on its streams. Without a device, this waits for the transfers.
        """
        self.wait(job_ids)

    def shutdown(self) -> None:
        """Wait for running transfers, then release threads, streams and pins. May be called twice."""


class OffloadingWorker:
    """Routes transfers to handlers by (source spec class, destination spec class)."""

    def __init__(self) -> None:
        self.handlers: dict[tuple[type[LoadStoreSpec], type[LoadStoreSpec]], OffloadingHandler] = {}
        """Handlers by the spec classes of source and destination."""

    def register_handler(
        self, src_cls: type[LoadStoreSpec], dst_cls: type[LoadStoreSpec], handler: OffloadingHandler
    ) -> None:
        """Use ``handler`` for transfers from ``src_cls`` to ``dst_cls``."""
        self.handlers[src_cls, dst_cls] = handler

    def transfer_all_async(self, jobs: Sequence[tuple[int, TransferSpec]]) -> list[int]:
        """Start several transfers, those of one handler together.

        Returns:
            The ids of the transfers that could not be started.
        """
        refused = []
        for handler, part in self._by_handler(jobs).items():
            refused += [job_id for job_id, _ in part] if handler is None else handler.transfer_all_async(part)
        return refused

    def transfer_at_once(self, jobs: Sequence[tuple[int, TransferSpec]]) -> set[int]:
        """Run small transfers now; see :meth:`OffloadingHandler.transfer_at_once`.

        Returns:
            The ids of the transfers that were not run and are to be started.
        """
        left = set[int]()
        for handler, part in self._by_handler(jobs).items():
            left.update([job_id for job_id, _ in part] if handler is None else handler.transfer_at_once(part))
        return left

    def _by_handler(
        self, jobs: Sequence[tuple[int, TransferSpec]]
    ) -> dict[OffloadingHandler | None, list[tuple[int, TransferSpec]]]:
        """Return the transfers by their handler; None: there is none."""
        by_handler: dict[OffloadingHandler | None, list[tuple[int, TransferSpec]]] = {}
        for job_id, spec in jobs:
            handler = self.handlers.get((type(spec[0]), type(spec[1])))
            by_handler.setdefault(handler, []).append((job_id, spec))
        return by_handler

    def transfer_first(self, jobs: Sequence[tuple[int, TransferSpec]]) -> None:
        """Run transfers before all later work of the engine; see :meth:`OffloadingHandler.transfer_first`.

        Raises:
            TransferError: a transfer cannot be made.
        """
        for handler, part in self._by_handler(jobs).items():
            if handler is None:
                raise TransferError(f"there are no copies for the copy jobs {[job_id for job_id, _ in part]}")
            handler.transfer_first(part)

    def get_finished(self) -> list[TransferResult]:
        """Return the transfers of all handlers that have ended since the last call."""
        return [result for handler in self._unique() for result in handler.get_finished()]

    def wait(self, job_ids: Collection[int]) -> None:
        """Block until these transfers have ended."""
        for handler in self._unique():
            handler.wait(job_ids)

    def order_before_compute(self, job_ids: Collection[int]) -> None:
        """Run all later work of the engine after these transfers."""
        for handler in self._unique():
            handler.order_before_compute(job_ids)

    def shutdown(self) -> None:
        """Shut all handlers down."""
        for handler in self._unique():
            handler.shutdown()

    def _unique(self) -> list[OffloadingHandler]:
        return list(dict.fromkeys(self.handlers.values()))
