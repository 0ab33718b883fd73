"""Service of a tier: opens its medium in the background at the start, after outages and after resets."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tiering.epochs.opener import Opener
from tiering.epochs.state import Entered, Target
from tiering.errors import InUseError, TieringError
from tiering.medium.chore import Backoff, Chore
from tiering.medium.side import IoSide
from tiering.secondary.contract import TierContext
from tiering.secondary.options import BreakerOptions

logger = logging.getLogger("kv_tiering.tier")


IN_USE_SECONDS = 0.5
"""Approximate seconds until a medium that another process uses is tried again.

A try is cheap, and the other process may end at any time.
"""


class TierService(Chore):
    """Opens the medium and enters epochs; owned by the scheduler's thread, works on the I/O side.

    A failure is logged once per outage.

    Args:
        context: environment of the tier.
        opener: opens the medium, and enters epochs.
        io: I/O side that runs the attempts.
        options: lengths of the waits between attempts.
        on_entered: function that the scheduler's thread calls each time an epoch has been entered.
    """

    in_service: bool
    """True if the medium is open and the present epoch will also hold after a restart."""

    def __init__(
        self,
        context: TierContext,
        opener: Opener,
        io: IoSide,
        options: BreakerOptions,
        on_entered: Callable[[Entered], None],
    ) -> None:
        super().__init__("open", io, context.clock, self._attempt, Backoff(options.probe_after, options.probe_max))
        self._name = context.name
        self._opener = opener
        self._on_entered = on_entered
        self._target: Target | None = None
        self._repeating = False
        """True if the running attempt follows at once on one that failed for the same reset."""
        self._stopped = False
        self._suspended = False
        self._overtaken = False
        """True if the running attempt began before the tier left the medium: its result does not count."""
        self.in_service = False
        self.error: BaseException | None = None
        """Reason why the last attempt failed; None if none has failed."""

    def _attempt(self) -> None:
        """Start an attempt to open the medium, or to enter an epoch, unless there is nothing to do."""
        if self.in_service or self._stopped or self._suspended:
            return
        target = self._target
        self.run(lambda: self._opener.enter(target), self._ended)

    def leave(self, target: Target) -> None:
        """Leave the present epoch for that of ``target`` (a reset).

        A medium that only this tier writes is out of service until the blocks stored before are foreign to every later
        process. On a shared medium only this process moves, so nothing needs to be written.
        """
        if self._opener.shared and self.in_service:
            self._on_entered(Entered(target.namespace))
            return
        self.in_service = False
        # An epoch that is not entered yet is as new as this one: nothing was stored since.
        held = self._target
        if held is None or held.revision != target.revision or (target.private and not held.private):
            self._target = target
        self.start()

    def again(self) -> None:
        """Leave service until the medium has been opened again, in the epoch that it has from now on."""
        self.in_service = False
        self._target = None
        self._overtaken = self.running
        self.start()

    def suspend(self) -> None:
        """Leave service until :meth:`resume`, because the medium is not the one that was opened."""
        self.in_service = False
        self._suspended = True
        self._overtaken = self.running

    def resume(self, target: Target | None) -> None:
        """Open the closed store again, and enter the epoch of ``target``.

        If ``target`` is None, the tier enters the epoch of the blocks on the medium.
        """
        self._suspended = False
        self._target = self._target or target
        self._opener.forget()
        self.start()

    def stop(self) -> None:
        """Leave service for good; the result of an attempt that still runs does not count."""
        self._stopped = True
        self.in_service = False

    def _ended(self, entered: Entered | None, error: BaseException | None) -> None:
        repeated, self._repeating = self._repeating, False
        overtaken, self._overtaken = self._overtaken, False
        if self._stopped or self._suspended:
            return
        if overtaken and error is None:
            self.start()
            return
        target = self._target
        if entered is None:
            if target is not None and not repeated:
                # Callers wait for a reset, and a passing failure must not make it fail.
                self._repeating = True
                self.start()
                return
            self._failed(error)
        elif target is not None and entered.namespace.epoch != target.namespace.epoch:
            self.start()
        else:
            if self.failures:
                logger.info("tier %s: in service again after %d failed attempts", self._name, self.failures)
            self.succeeded()
            self._target = None
            self.in_service = True
            self._on_entered(entered)

    def _failed(self, error: BaseException | None) -> None:
        self.error = error
        if not self.failures:
            logger.error(
                "tier %s: not in service: %s; unless it is required at the start, the engine runs without it, "
                "and it comes back by itself when this is put right",
                self._name,
                error,
                exc_info=None if isinstance(error, TieringError) else error,
            )
        self.failed(IN_USE_SECONDS if isinstance(error, InUseError) else float("inf"))
