"""The time that the connector takes on the scheduler's thread."""

from __future__ import annotations

import functools
from collections.abc import Callable
from time import perf_counter
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from tiering.connector.completions import SchedulerCounters

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class _Counting(Protocol):
    _counters: SchedulerCounters


Counting = TypeVar("Counting", bound=_Counting)


def counts_seconds(
    method: Callable[Concatenate[Counting, Parameters], Result],
) -> Callable[Concatenate[Counting, Parameters], Result]:
    """Return ``method`` with its duration added to ``scheduler_seconds``.

    Methods with this decorator must not call each other. ``build_connector_meta``, which every step calls, adds its
    duration itself: the decorator's call would be about a fifth of a step in which nothing happens.
    """

    @functools.wraps(method)
    def timed(half: Counting, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        began = perf_counter()
        try:
            return method(half, *args, **kwargs)
        finally:
            half._counters.scheduler_seconds += perf_counter() - began

    return timed
