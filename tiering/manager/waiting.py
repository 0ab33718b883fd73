"""Functions that wait for the tiers in a program without an engine loop, blocking or in asyncio.

An engine never waits; it looks up again at its next step. A program without steps of its own calls these functions.
They end steps on its behalf (:meth:`~tiering.TieringOffloadingManager.on_schedule_end`) and sleep until an I/O side
announces a finished job. All of them run on the thread that drives the manager. The asyncio forms let the event loop of
that thread run meanwhile, so that many requests can wait at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from tiering.api.keys import OffloadKey
from tiering.api.manager import PrefixMatch
from tiering.api.request import ReqContext
from tiering.manager.manager import TieringOffloadingManager
from tiering.runtime.news import Steps

LONGEST_SLEEP = 0.05
"""Longest sleep between two steps, in seconds; deadlines pass without an announcement."""

SILENT_SLEEP = 0.005
"""Longest sleep, in seconds, if at least one tier does not announce its finished jobs."""


def wait_for_prefix(
    manager: TieringOffloadingManager, keys: Sequence[OffloadKey], req_context: ReqContext, timeout: float | None = 30.0
) -> PrefixMatch:
    """Return how many leading ``keys`` are held, as soon as the answer is final.

    Blocks of slower tiers are promoted on the way, and are readable when the answer is final.

    Args:
        manager: the manager; its steps are ended on the caller's behalf.
        keys: the blocks of a prompt, in their order.
        req_context: the request, already announced by :meth:`~tiering.OffloadingManager.on_new_request`.
        timeout: longest wait in seconds; default: 30; None: no limit.

    Returns:
        The match. It is still ``pending`` if the timeout passed first. A store of these keys that the calling thread
        itself has not completed keeps the answer pending until then.

    """
    answer = _PrefixAnswer(manager, keys, req_context)
    _wait(manager, answer.step, timeout)
    return answer.match


async def wait_for_prefix_async(
    manager: TieringOffloadingManager, keys: Sequence[OffloadKey], req_context: ReqContext, timeout: float | None = 30.0
) -> PrefixMatch:
    """Return the result of :func:`wait_for_prefix`, and let the event loop run meanwhile."""
    answer = _PrefixAnswer(manager, keys, req_context)
    await _wait_async(manager, answer.step, timeout)
    return answer.match


def wait_until_idle(manager: TieringOffloadingManager, timeout: float | None = 30.0) -> bool:
    """Wait until no tier has a job of this manager left, e.g. until the slower tiers have all stores.

    Args:
        manager: the manager; its steps are ended on the caller's behalf.
        timeout: longest wait in seconds; default: 30; None: no limit.

    Returns:
        True if no job is left; False if the timeout passed first.

    """
    return _wait(manager, lambda: _is_idle(manager), timeout)


async def wait_until_idle_async(manager: TieringOffloadingManager, timeout: float | None = 30.0) -> bool:
    """Return the result of :func:`wait_until_idle`, and let the event loop run meanwhile."""
    return await _wait_async(manager, lambda: _is_idle(manager), timeout)


def _is_idle(manager: TieringOffloadingManager) -> bool:
    manager.on_schedule_end()
    return not manager.has_pending_work()


class _PrefixAnswer:
    """A repeated prefix match, and its latest answer."""

    def __init__(self, manager: TieringOffloadingManager, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        self._manager = manager
        self._keys = keys
        self._req_context = req_context
        self.match = PrefixMatch(0, True)

    def step(self) -> bool:
        """Match once, and end the step unless the answer is final. Return True if the answer is final."""
        self.match = self._manager.match_prefix(self._keys, self._req_context)
        if self.match.pending:
            self._manager.on_schedule_end()
        return not self.match.pending


def _steps(manager: TieringOffloadingManager, step: Callable[[], bool], timeout: float | None) -> Steps:
    announced = all(tier.traits.announces_news for tier in manager.secondary_tiers)
    return Steps(step, timeout, LONGEST_SLEEP if announced else SILENT_SLEEP)


def _wait(manager: TieringOffloadingManager, step: Callable[[], bool], timeout: float | None) -> bool:
    return manager.news.wait(_steps(manager, step, timeout))


async def _wait_async(manager: TieringOffloadingManager, step: Callable[[], bool], timeout: float | None) -> bool:
    steps, news, loop = _steps(manager, step, timeout), asyncio.Event(), asyncio.get_running_loop()

    def wake() -> None:
        if not news.is_set():
            with contextlib.suppress(RuntimeError):  # The loop was closed, so no coroutine waits any more.
                loop.call_soon_threadsafe(news.set)

    news.set()  # as in News.wait
    with manager.news.listening(wake):
        while (sleep := steps.next_sleep()) is not None:
            timer = loop.call_later(sleep, news.set)
            await news.wait()
            timer.cancel()
            news.clear()
    return steps.done
