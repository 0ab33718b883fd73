"""Contract of the copy handlers between GPU blocks and primary rows, and the worker that holds them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import NamedTuple

from tiering.api.transfer import LoadStoreSpec, TransferSpec

TransferType = tuple[str, str]
"""("gpu", "cpu") or ("cpu", "gpu")."""


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

        Args:
            jobs: job id and transfer of each.

        Returns:
            The ids of the transfers that could not be started.
        """
        return [job_id for job_id, spec in jobs if not self.transfer_async(job_id, spec)]

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
        by_handler: dict[OffloadingHandler, list[tuple[int, TransferSpec]]] = {}
        for job_id, spec in jobs:
            source, destination = spec
            handler = self.handlers.get((type(source), type(destination)))
            if handler is None:
                refused.append(job_id)
            else:
                by_handler.setdefault(handler, []).append((job_id, spec))
        for handler, part in by_handler.items():
            refused += handler.transfer_all_async(part)
        return refused

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
