"""Opening a medium on the I/O side: the store, the namespace's parameters, and the reset epoch kept beside the blocks."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from tiering.block_store import BlockStore
from tiering.errors import PermanentStoreError
from tiering.namespace import FIRST_EPOCH, Namespace
from tiering.secondary.nearest import tell_nearest

logger = logging.getLogger("kv_tiering.tier")


def epoch_document(namespace: Namespace) -> str:
    """The name of the document that holds the epoch of ``namespace``."""
    return f"epoch-{namespace.directory}"


def private_epoch(epoch: bytes) -> bytes:
    """The epoch document's content for an ``epoch`` that a reset began.

    Only the process that was reset may use it: what it computes after a reset (other weights, say) is not what the namespace's
    parameters, which were taken at its start, describe.  Without the mark (16 bytes) any process with these parameters may.
    """
    return epoch + _PRIVATE


PARAMETERS = "namespace-"
"""How the names of documents with a namespace's parameters begin."""


def parameters_document(namespace: Namespace) -> str:
    """The name of the document that holds the readable parameters of ``namespace``."""
    return f"{PARAMETERS}{namespace.directory}.json"


_PRIVATE = b"reset"
_THREAD_RETRY_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Entered:
    """The medium is open in the epoch of ``namespace``; ``previous`` is the one it replaced, None if none was."""

    namespace: Namespace
    previous: Namespace | None = None


class Medium:
    """A store and the namespace it is used in.  Called on the I/O side, by one thread at a time.

    ``writes``: whether the tier stores anything; one that does not must do with a medium that only reads, until a reset.
    """

    def __init__(self, name: str, store: BlockStore, namespace: Namespace, *, writes: bool = True) -> None:
        self._name = name
        self._store = store
        self._namespace = namespace
        self._writes = writes
        self._opened = False

    def enter(self, new_epoch: bytes | None) -> Entered:
        """Open the store unless it is open, check the parameters, and find the epoch, or begin ``new_epoch`` (a reset), durably.

        An epoch that another process began by a reset is its own: a fresh one begins then, for this process and later ones.
        Raises :class:`tiering.errors.StoreError`; may be called again then.
        """
        if not self._opened:
            self._store.open()
            self._opened = True
        self._check_parameters()
        document = epoch_document(self._namespace)
        stored = self._store.read_document(document)
        epoch, private = _parse_epoch(stored)
        if epoch is None:
            logger.warning("tier %s: document %s is damaged; a new epoch begins, older blocks are foreign", self._name, document)
        current = self._namespace.with_epoch(epoch or FIRST_EPOCH)
        if new_epoch is not None:
            self._store.write_document(document, private_epoch(new_epoch))
            return Entered(self._namespace.with_epoch(new_epoch), None if current.epoch == new_epoch else current)
        if epoch is not None and not private:
            return Entered(current)
        # Blocks of the private epoch are not reclaimed: on a shared medium the process that was reset may be alive.
        fresh = self._namespace.next_epoch()
        self._store.write_document(document, fresh.epoch)
        return Entered(fresh)

    def close(self, timeout: float) -> None:
        """Close the store, waiting at most ``timeout`` seconds: a medium that hangs must not hold up the process."""

        def close() -> None:
            try:
                self._store.close()
            except Exception:
                logger.exception("tier %s: closing its store failed", self._name)

        end = time.monotonic() + max(timeout, 0.0)
        while True:
            thread = threading.Thread(target=close, name=f"kv-{self._name}-close", daemon=True)
            try:
                thread.start()
                break
            except RuntimeError as error:
                # The process may have no more threads for the moment; the tier's own have just ended.
                if time.monotonic() >= end:
                    logger.error("tier %s: its store is left to the end of the process: %s", self._name, error)
                    return
            time.sleep(_THREAD_RETRY_SECONDS)
        thread.join(max(end - time.monotonic(), 0.0))
        if thread.is_alive():
            logger.error("tier %s: its store did not close in time; it is left to the end of the process", self._name)

    def _check_parameters(self) -> None:
        """A fingerprint that stands for two sets of parameters would mix two models' blocks: refuse."""
        document = parameters_document(self._namespace)
        expected = self._namespace.parameters.encode()
        stored = self._store.read_document(document)
        if stored is None:
            tell_nearest(self._name, self._store, self._namespace.parameters, PARAMETERS)
            if self._writes:
                self._store.write_document(document, expected)
        elif bytes(stored) != expected:
            raise PermanentStoreError(
                f"document {document} holds other parameters than this engine's under the same fingerprint: it is damaged, or not ours; "
                "inspect it, and remove it (and the blocks of this namespace) if it is not needed"
            )


def _parse_epoch(document: bytes | None) -> tuple[bytes | None, bool]:
    """The epoch that a document names (None: it is damaged), and whether it is private."""
    if document is None:
        return FIRST_EPOCH, False
    epoch, mark = bytes(document[: len(FIRST_EPOCH)]), bytes(document[len(FIRST_EPOCH) :])
    if len(epoch) != len(FIRST_EPOCH) or mark not in (b"", _PRIVATE):
        return None, False
    return epoch, mark == _PRIVATE
