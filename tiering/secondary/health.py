"""Whether a medium answers again after its breaker has opened: asked in the background, so that no request has to find out."""

from __future__ import annotations

from tiering.block_store import BlockStore
from tiering.errors import OutOfSpaceError, TemporaryStoreError
from tiering.secondary.io_side import IoSide
from tiering.secondary.layers.breaker import Breaker, BreakerState
from tiering.secondary.messages import IoTask

HEALTH_DOCUMENT = "health"
_PROOF = b"written to see whether the medium answers\n"


class HealthCheck:
    """Probes a medium through its documents whenever the breaker lets a probe through; one probe at a time.

    ``writes``: whether the tier stores anything, so that a medium that only reads is no use to it.
    """

    def __init__(self, store: BlockStore, io: IoSide, *, writes: bool) -> None:
        self._store = store
        self._io = io
        self._writes = writes
        self._running = False

    def tick(self) -> None:
        """Scheduler's thread: start a probe if one is due."""
        breaker = self._io.breaker
        if breaker.state is not BreakerState.CLOSED and not self._running and breaker.allows():
            self._running = True
            self._io.run(IoTask("health", lambda: self._probe(breaker), self._ended, background=True))

    def _probe(self, breaker: Breaker) -> None:
        if not breaker.admit():
            return
        try:
            if self._writes:
                self._store.write_document(HEALTH_DOCUMENT, _PROOF)
            elif self._store.read_document(HEALTH_DOCUMENT) not in {None, _PROOF}:
                raise TemporaryStoreError(f"document {HEALTH_DOCUMENT} is not what was written")
        except OutOfSpaceError:
            # It answers, and what it holds can be read.
            breaker.record_success()
            return
        except BaseException as error:
            breaker.record_failure(error)
            raise
        breaker.record_success()

    def _ended(self, result: object, error: BaseException | None) -> None:
        # The breaker has been told, and has logged it.
        self._running = False
