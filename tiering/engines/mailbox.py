"""The thread that owns a manager, and the mailbox in front of it.

Engines that may call from several threads share this part: every call is a message to one thread, which ends the
manager's steps and sleeps until a message or a tier's announcement. A subclass defines what the messages do.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from tiering.api.manager import OffloadingEvent
from tiering.config.stack_file import StackConfig
from tiering.errors import ConfigError, TierUnavailableError
from tiering.manager.manager import TieringOffloadingManager
from tiering.manager.waiting import LONGEST_SLEEP, SILENT_SLEEP

PART_BYTES = 32 << 20
"""Largest number of bytes that are copied before messages are read again."""

ROOM_PATIENCE = 1.0
"""Seconds for which a store waits for rows of the manager, while the engine's memory stays in use."""

IDLE_SLEEP = 0.5
"""Longest sleep in seconds without jobs and lookups; tiers announce whatever else ends."""

STATS_SECONDS = 1.0
"""Shortest time in seconds between two readings of the statistics."""

JOIN_SECONDS = 5.0
"""Seconds beyond the stack's ``shutdown_deadline`` for which a stop waits."""


class ManagerMailbox(ABC):
    """The thread with the manager.

    Any thread may call the public methods. Only :meth:`stop` waits.

    Args:
        manager: the manager of the stack; the thread owns it from :meth:`start` on.
        engine: name of the part of the engine that the tiers are behind, for messages.
        logger: the engine's logger.
        patience: seconds for which :meth:`stop` waits for the thread: more than the manager's own deadline.
        on_events: takes the manager's events, on the thread; default: they are not read.
    """

    def __init__(
        self,
        manager: TieringOffloadingManager,
        engine: str,
        logger: logging.Logger,
        *,
        patience: float,
        on_events: Callable[[Sequence[OffloadingEvent]], object] | None = None,
    ) -> None:
        self.stats: Mapping[str, Any] = {}
        """Statistics of the manager, read every :data:`STATS_SECONDS`."""
        self.manager = manager
        """The manager; only this object's thread uses it."""
        self._engine = engine
        self._logger = logger
        self._patience = patience
        self._on_events = on_events
        announced = all(tier.traits.announces_news for tier in manager.secondary_tiers)
        self._longest = LONGEST_SLEEP if announced else SILENT_SLEEP
        self._mailbox: SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]]] = SimpleQueue()
        self._stats_at = 0.0
        self._ended = False
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="kv-tiering-manager", daemon=True)

    # ------------------------------------------------------------------------------------------- messages, any thread

    def start(self) -> None:
        """Start the thread.

        Raises:
            TierUnavailableError: no thread can be started.
        """
        try:
            self._thread.start()
        except RuntimeError as error:
            raise TierUnavailableError(f"{self._engine}: {error}; raise the limit on threads") from error

    @property
    def failed(self) -> bool:
        """True once the thread met an error of its own: all jobs fail, and all lookups miss."""
        return self._failed or not self._thread.is_alive()

    def stop(self) -> None:
        """End what was submitted, shut the manager down within its deadline, and end the thread.

        The engine's memory is not touched any more afterwards. May be called twice.
        """
        self._mailbox.put((self._stop, ()))
        if self._thread.is_alive():
            self._thread.join(self._patience)
        if self._thread.is_alive():
            self._logger.error("the thread %s did not end within %g s", self._thread.name, self._patience)

    # ------------------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        with self.manager.news.listening(self._wake):
            sleep = 0.0
            while not self._ended:
                try:
                    self._read_mail(sleep)
                    sleep = self._step()
                except Exception as error:
                    self._fail(error)
                    sleep = IDLE_SLEEP
        self._end_all()

    def _wake(self) -> None:
        self._mailbox.put((_nothing, ()))

    def _read_mail(self, sleep: float) -> None:
        with suppress(Empty):
            method, arguments = self._mailbox.get(timeout=sleep) if sleep else self._mailbox.get_nowait()
            while True:
                method(*arguments)
                method, arguments = self._mailbox.get_nowait()

    def _step(self) -> float:
        """End a step, and return the seconds until the next one; a message ends the sleep."""
        if self._ended or self._failed:
            return IDLE_SLEEP
        sleep = self._work()
        self.manager.on_schedule_end()  # submits the promotions that the lookups have begun
        if self._on_events is not None and (events := self.manager.take_events()):
            self._on_events(events)
        if (now := time.monotonic()) >= self._stats_at:
            self.stats, self._stats_at = self.manager.get_stats(), now + STATS_SECONDS
        if sleep == IDLE_SLEEP and self.manager.has_pending_work():
            return self._longest
        return sleep

    def _fail(self, error: Exception) -> None:
        """Take the tiers out of service after an error of this thread; the engine goes on without them."""
        if not self._failed:
            text = "the tiers behind %s are out of service until a restart: %s"
            self._logger.error(text, self._engine, error, exc_info=error)
        self._failed = True
        self._end_all()

    @abstractmethod
    def _work(self) -> float:
        """Do what is due, and return the longest sleep in seconds: :data:`IDLE_SLEEP` if nothing waits."""

    @abstractmethod
    def _end_all(self) -> None:
        """Fail all jobs, and answer all lookups with misses."""

    @abstractmethod
    def _stop(self) -> None:
        """End what was submitted, and shut the manager down; :attr:`_ended` is True afterwards."""


M = TypeVar("M", bound=ManagerMailbox)


def started(kind: Callable[..., M], stack: StackConfig, manager: TieringOffloadingManager, **words: Any) -> M:
    """Return the thread of a stack, which owns the manager; if that fails, the manager is shut down.

    Args:
        kind: class of the thread.
        stack: the stack.
        manager: its open manager.
        words: further arguments of ``kind``.

    Raises:
        ConfigError: a tier never loads as few blocks as a request may hold.
        TierUnavailableError: no thread can be started.
    """
    try:
        window = _window_of(stack, manager.primary_tier.num_rows)
        mailbox = kind(manager, window=window, patience=stack.shutdown_deadline + JOIN_SECONDS, **words)
        mailbox.start()
    except BaseException:
        manager.shutdown()
        raise
    return mailbox


def _window_of(stack: StackConfig, num_rows: int) -> int:
    """Return the number of rows that one request may hold.

    Raises:
        ConfigError: a tier never loads so few blocks at a time.
    """
    window = max(1, int(stack.primary.promotion_share * num_rows))
    for index, tier in enumerate(stack.secondary):
        least = getattr(tier, "min_prefix_blocks", 1)
        if least > window:
            raise ConfigError(
                f"secondary[{index}].min_prefix_blocks: {least} blocks do not fit into the {window} of {num_rows} rows "
                "for promoted blocks; raise primary.capacity or lower min_prefix_blocks"
            )
    return window


def _nothing() -> None:
    """Wake the thread up: a job or a task of a tier has ended."""
