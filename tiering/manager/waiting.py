"""Waiting for the tiers without an engine's loop around: blocking and for asyncio, without spinning.

An engine never waits; it asks again at its next step.  A program that has no steps of its own lets these functions end
steps on its behalf (:meth:`~tiering.TieringOffloadingManager.on_schedule_end`) and sleep until an I/O side has news.
All of them run on the thread that drives the manager; the asyncio forms let the event loop of that thread go on, so
that many requests can wait at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from tiering.api.keys import OffloadKey
from tiering.api.manager import PrefixMatch
from tiering.api.request import ReqContext
from tiering.manager.manager import TieringOffloadingManager

LONGEST_SLEEP = 0.05
"""Longest sleep between two steps, in seconds: deadlines pass without news."""

SILENT_SLEEP = 0.005
"""The same where a tier does not announce what has ended, in seconds."""


def wait_for_prefix(
    manager: TieringOffloadingManager, keys: Sequence[OffloadKey], req_context: ReqContext, timeout: float | None = 30.0
) -> PrefixMatch:
    """Return how many leading ``keys`` are held, as soon as the answer cannot change any more.

    Blocks of slower tiers are promoted on the way, and are readable when the answer is final.

    Args:
        manager: the manager; steps are ended on the caller's behalf. keys: the blocks of a prompt, in their order.
        req_context: the request, which :meth:`~tiering.OffloadingManager.on_new_request` has been told of. timeout:
        seconds to wait at most (None: no limit).  The answer then may still be ``pending``, also where this thread
        itself
            has a store of these keys under way.

    """
    answer = _PrefixAnswer(manager, keys, req_context)
    _wait(manager, answer.step, timeout)
    return answer.match


async def wait_for_prefix_async(
    manager: TieringOffloadingManager, keys: Sequence[OffloadKey], req_context: ReqContext, timeout: float | None = 30.0
) -> PrefixMatch:
    """Return the same as :func:`wait_for_prefix`, and let the event loop run meanwhile."""
    answer = _PrefixAnswer(manager, keys, req_context)
    await _wait_async(manager, answer.step, timeout)
    return answer.match


def wait_until_idle(manager: TieringOffloadingManager, timeout: float | None = 30.0) -> bool:
    """Wait until no tier has work of this manager's left, e.g. until what was stored is on the slower tiers too.

    Args:
        manager: the manager; steps are ended on the caller's behalf.
        timeout: seconds to wait at most (None: no limit).

    Returns:
        True if nothing is left; False if the time was over before.

    """
    return _wait(manager, lambda: _is_idle(manager), timeout)


async def wait_until_idle_async(manager: TieringOffloadingManager, timeout: float | None = 30.0) -> bool:
    """Return the same as :func:`wait_until_idle`, and let the event loop run meanwhile."""
    return await _wait_async(manager, lambda: _is_idle(manager), timeout)


def _is_idle(manager: TieringOffloadingManager) -> bool:
    manager.on_schedule_end()
    return not manager.has_pending_work()


class _PrefixAnswer:
    """The last answer to one question."""

    def __init__(self, manager: TieringOffloadingManager, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self._manager = manager
        self._keys = keys
        self._req_context = req_context
        self.match = PrefixMatch(0, True)

    def step(self) -> bool:
        """Ask once, and end the step unless the answer is final.  Returns whether it is."""
        self.match = self._manager.match_prefix(self._keys, self._req_context)
        if self.match.pending:
            self._manager.on_schedule_end()
        return not self.match.pending


class _Steps:
    """Steps until one of them says that it was the last, or the time is over; the caller sleeps in between, as long as it is told.

    Each step sees everything that ended before it began, so that a caller misses nothing that is announced from then
    on.
    """

    def __init__(self, manager: TieringOffloadingManager, step: Callable[[], bool], timeout: float | None) -> None:
        self._step = step
        self._deadline = None if timeout is None else time.monotonic() + timeout
        announced = all(tier.announces_news for tier in manager.secondary_tiers)
        self._longest = LONGEST_SLEEP if announced else SILENT_SLEEP
        self.done = False

    def next_sleep(self) -> float | None:
        """Do one step.  Returns how long to sleep before the next one, in seconds; None if there is to be none."""
        self.done = self._step()
        if self.done:
            return None
        left = self._longest if self._deadline is None else self._deadline - time.monotonic()
        return None if left <= 0 else min(left, self._longest)


def _wait(manager: TieringOffloadingManager, step: Callable[[], bool], timeout: float | None) -> bool:
    steps, news = _Steps(manager, step, timeout), threading.Event()
    news.set()  # a second step follows at once: the first may have collected what ended before anybody listened
    with manager.news.listening(news.set):
        while (sleep := steps.next_sleep()) is not None:
            news.wait(sleep)
            # Cleared before the next step looks: what ends from here on is seen by that step, or wakes the sleep after
            # it.
            news.clear()
    return steps.done


async def _wait_async(manager: TieringOffloadingManager, step: Callable[[], bool], timeout: float | None) -> bool:
    steps, news, loop = _Steps(manager, step, timeout), asyncio.Event(), asyncio.get_running_loop()

    def wake() -> None:
        if not news.is_set():
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(news.set)

    news.set()  # as in _wait
    with manager.news.listening(wake):
        while (sleep := steps.next_sleep()) is not None:
            timer = loop.call_later(sleep, news.set)
            await news.wait()
            timer.cancel()
            news.clear()
    return steps.done
