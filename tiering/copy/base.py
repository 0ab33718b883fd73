"""Copies between the accelerator's KV cache and the primary rows: the handler contract, and the worker that holds the handlers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass

from tiering.base import LoadStoreSpec, TransferSpec

TransferType = tuple[str, str]
"""("gpu", "cpu") or ("cpu", "gpu")."""


@dataclass(frozen=True, slots=True)
class TransferResult:
    """A transfer has ended: bytes moved, seconds taken, and which way (None where not known)."""

    job_id: int
    success: bool
    transfer_size: int | None = None
    transfer_time: float | None = None
    transfer_type: TransferType | None = None


class OffloadingHandler(ABC):
    """Moves blocks one way.  Called from the engine's thread, which it never blocks but in :meth:`wait`."""

    @abstractmethod
    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Start a transfer.  False if it could not be started (nothing was moved, and no result will follow)."""

    @abstractmethod
    def get_finished(self) -> list[TransferResult]:
        """The transfers that have ended since the last call, each once, failed ones included."""

    @abstractmethod
    def wait(self, job_ids: Collection[int]) -> None:
        """Block until these transfers have ended (unknown ids are ignored).  Their results are still handed out."""

    def order_before_compute(self, job_ids: Collection[int]) -> None:
        """What the engine computes from here on runs after these transfers.  Without a device to order that, they are waited for."""
        self.wait(job_ids)

    def shutdown(self) -> None:
        """Wait for what is running and release threads, streams and pins.  May be called twice."""


class OffloadingWorker:
    """Holds handlers by (source spec class, destination spec class) and routes transfers to them."""

    def __init__(self) -> None:
        self._handlers: dict[tuple[type[LoadStoreSpec], type[LoadStoreSpec]], OffloadingHandler] = {}

    def register_handler(self, src_cls: type[LoadStoreSpec], dst_cls: type[LoadStoreSpec], handler: OffloadingHandler) -> None:
        """Use ``handler`` for transfers from ``src_cls`` to ``dst_cls``."""
        self._handlers[src_cls, dst_cls] = handler

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        """Start a transfer; False if there is no handler for it or the handler could not start it."""
        source, destination = spec
        handler = self._handlers.get((type(source), type(destination)))
        return handler is not None and handler.transfer_async(job_id, spec)

    def get_finished(self) -> list[TransferResult]:
        """The transfers of all handlers that have ended since the last call."""
        return [result for handler in self._unique() for result in handler.get_finished()]

    def wait(self, job_ids: Collection[int]) -> None:
        """Block until these transfers have ended."""
        for handler in self._unique():
            handler.wait(job_ids)

    def order_before_compute(self, job_ids: Collection[int]) -> None:
        """Let what the engine computes from here on run after these transfers."""
        for handler in self._unique():
            handler.order_before_compute(job_ids)

    def shutdown(self) -> None:
        """Shut all handlers down."""
        for handler in self._unique():
            handler.shutdown()

    def _unique(self) -> list[OffloadingHandler]:
        return list(dict.fromkeys(self._handlers.values()))
