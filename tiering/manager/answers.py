"""Checks of the answers of secondary tiers.

A tier may be anybody's code. An answer that its contract does not allow must neither raise in the scheduler's step nor
be taken for another answer. Each check costs one look at the type of the answer, not at each block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from numbers import Real
from operator import attrgetter, index
from typing import Any, Generic, TypeVar

import numpy as np

from tiering.api.descriptions import Described
from tiering.api.keys import OffloadKey
from tiering.api.manager import LOCAL, MEDIUM_CPU, MEDIUM_STORAGE, REMOTE, OffloadingEvent
from tiering.api.masking import shown
from tiering.api.request import OffloadPolicy, ReqContext, RequestOffloadingContext
from tiering.secondary.contract import MAX_ENGINES, MAX_EVENTS, SecondaryTierManager, StepEnd
from tiering.secondary.speeds import Speeds
from tiering.secondary.tier_stats import JOB_LATENCY_BUCKETS, TierStats

_T_co = TypeVar("_T_co", covariant=True)

MOST_DOCUMENTS = 128
"""Largest number of documents that are taken from a tier."""


class BreachError(Exception):
    """An answer of a tier that breaks its contract."""


PROCESS_ENDS = (KeyboardInterrupt, SystemExit)
"""Exceptions that end the process. Signal handlers raise them, and they are no fault of the tier."""

PLAIN = frozenset((tuple, list))
"""Types of sequences whose methods are Python's own."""


@dataclass(frozen=True, slots=True)
class Answer(Generic[_T_co]):
    """The answers that a method of a tier may give."""

    expected: str
    """Description of the allowed answers, for the log."""
    read: Callable[..., _T_co]
    """Function that converts an answer, and raises anything if the contract does not allow the answer.

    Its arguments are the answer and the arguments of the method.
    """


def text_of(value: object) -> str:
    """Return a short text that shows ``value`` on one line, also if its own methods raise."""
    try:
        return " ".join(shown(value).split())
    except PROCESS_ENDS:
        raise
    except BaseException:
        return f"a {type(value).__name__}"


def truth(answer: object, *_: object) -> bool:
    """Return a truth value as a bool.

    Raises:
        BreachError: ``answer`` is no truth value.
    """
    if answer is True or answer is False:
        return answer
    if isinstance(answer, np.bool_):
        return bool(answer)
    raise BreachError


def _prefix(answer: Any, keys: Sequence[OffloadKey], _: ReqContext) -> tuple[int, bool]:
    held, undecided = answer
    if type(held) is not int:
        held = index(held)
    if not 0 <= held <= len(keys):
        raise BreachError
    return held, truth(undecided)


def lookup(tier: SecondaryTierManager, keys: Sequence[OffloadKey], ctx: ReqContext) -> list[bool | None]:
    """Return the answers of a tier's ``lookup`` to each of ``keys``."""
    look = tier.lookup
    return [look(key, ctx) for key in keys]


def _each(answer: list[Any], *_: object) -> list[bool | None]:
    if _DECIDED.issuperset(map(type, answer)):
        return answer
    return [None if one is None else truth(one) for one in answer]


def _policy(answer: object, _: ReqContext) -> OffloadPolicy:
    if isinstance(answer, RequestOffloadingContext) and isinstance(answer.policy, OffloadPolicy):
        return answer.policy
    raise BreachError


def _seconds(answer: object, *_: object) -> float:
    if not isinstance(answer, (float, int, Real)):
        raise BreachError
    seconds = float(answer)
    if not seconds >= 0.0:
        raise BreachError
    return seconds


def _statistics(answer: object) -> dict[str, Any]:
    if not isinstance(answer, TierStats):
        raise BreachError
    fields: dict[str, Any] = dict(zip(TierStats.__slots__, attrgetter(*TierStats.__slots__)(answer), strict=True))
    latency = list(fields.pop("job_latency"))
    if len(latency) != len(JOB_LATENCY_BUCKETS) + 1:
        raise BreachError
    numbers = [*fields.values(), *latency]
    if not (_NUMBERS.issuperset(map(type, numbers)) and min(numbers) >= 0 and sum(numbers) < math.inf):
        fields, latency = {name: _number(value) for name, value in fields.items()}, list(map(_number, latency))
    return fields | {"job_latency": latency}


def _number(value: object) -> int | float:
    """Return a statistic as a plain number: reports cross processes, and Prometheus refuses other values."""
    if not isinstance(value, (float, int, Real)) or not 0.0 <= float(value) < math.inf:
        raise BreachError
    return int(value) if isinstance(value, (int, np.integer)) else float(value)


def _wanted(answer: Any) -> list[OffloadKey]:
    if isinstance(answer, (bytes, str)):
        raise BreachError
    # A generator has no length: it might never end. Nor need the iterator of a sequence of the tier's own.
    count = len(answer)
    return list(dict.fromkeys(islice(answer, count))) if count else []


def _step_end(answer: object) -> StepEnd:
    if answer is None:
        return StepEnd()
    if not isinstance(answer, StepEnd):
        raise BreachError
    if type(answer) is StepEnd:
        wanted, rest, superseded, _ = answer
        if type(wanted) in PLAIN and not wanted and type(rest) is float and rest >= 0.0 and superseded is False:
            return answer  # as in most steps
    return StepEnd(_wanted(answer.wanted), _seconds(answer.rest), truth(answer.superseded), truth(answer.reset_done))


def _positions(answer: Any, keys: Sequence[OffloadKey], *_: object) -> Sequence[int]:
    """Return the positions of the admitted keys; a tier that admits all of them returns None."""
    if answer is None:
        return range(len(keys))
    if len(answer) > len(keys):
        raise BreachError
    positions = list(map(index, answer))
    if any(at >= after for at, after in pairwise([-1, *positions, len(keys)])):
        raise BreachError
    return positions


def _credit(answer: object, wanted: int, _: float) -> int:
    """Return how many of ``wanted`` blocks may be submitted; a tier that takes all returns None."""
    if answer is None:
        return wanted
    if not isinstance(answer, (int, np.integer)) or isinstance(answer, bool) or answer < 0:
        raise BreachError
    return min(int(answer), wanted)


def _list_of(kind: type, most: int, answer: Any, *_: object) -> list[Any] | None:
    """Return up to ``most`` items, which are of ``kind``; None: not known yet."""
    if answer is None:
        return None
    items = list(islice(answer, most))
    if not all(isinstance(item, kind) for item in items):
        raise BreachError
    return items


def _speeds(answer: Any, *_: object) -> list[Speeds] | None:
    """Return the speeds, if there are any; None: not known yet."""
    found: list[Speeds] | None = _list_of(Speeds, 1, answer)
    if found and not all(isinstance(value, float) and 0.0 <= value < math.inf for value in found[0]):
        raise BreachError
    return found


POSITIONS = Answer("None or ascending positions of the keys that it was asked for", _positions)
CREDIT = Answer("None or a whole number of blocks", _credit)
TRUTH = Answer("True or False", truth)
EACH = Answer("True, False or None for a key", _each)
PREFIX = Answer("a PrefixAnswer for the keys that it was asked for", _prefix)
POLICY = Answer("a RequestOffloadingContext", _policy)
SECONDS = Answer("a number of seconds", _seconds)
STEP_END = Answer("None or a StepEnd", _step_end)
STATISTICS = Answer("TierStats with finite numbers", _statistics)
HOT_KEYS = Answer("None or, for each engine, runs of keys", partial(_list_of, Sequence, MAX_ENGINES))
"""The keys are not checked (:func:`checked_run`)."""
SPEEDS = Answer("None or the speeds that it has read, positive numbers of seconds", _speeds)
DOCUMENTS = Answer("None or the documents that it has read", partial(_list_of, Described, MOST_DOCUMENTS))


def checked_run(run: Any, start: int, count: int) -> list[OffloadKey]:
    """Return up to ``count`` keys of a run of hot keys, from ``start`` on.

    Raises:
        BreachError: the run has something else than keys.
    """
    keys = list(run[start : start + count])
    if not _BYTES.issuperset(map(type, keys)):
        raise BreachError
    return keys


_MEDIA = frozenset((MEDIUM_CPU, MEDIUM_STORAGE))
_LOCALITIES = frozenset((LOCAL, REMOTE))
_BYTES = frozenset((bytes,))
_NUMBERS = frozenset((int, float))
_DECIDED = frozenset((bool, type(None)))


def read_events(given: Iterable[object], tier: str) -> Iterator[OffloadingEvent]:
    """Yield the events that a tier has returned.

    Args:
        given: what the tier has returned as its events.
        tier: name of the tier.

    Raises:
        BreachError: one of them is no event of the tier, or there are more than allowed: an iterator that never ends
            must not be followed.
    """
    for number, event in enumerate(given):
        if number == MAX_EVENTS:
            raise BreachError(f"more than {MAX_EVENTS:,} events at once")
        yield read_event(event, tier)


def read_event(event: object, tier: str) -> OffloadingEvent:
    """Return an event of a tier, checked and unchanged.

    Args:
        event: what a tier has returned as an event.
        tier: name of the tier.

    Raises:
        BreachError: consumers of events do not understand the event, or it is another tier's; the text shows it.
    """
    if (
        isinstance(event, OffloadingEvent)
        and event.medium in _MEDIA
        and event.locality in _LOCALITIES
        and event.tier == tier
        and type(event.order) is int
        and type(event.removed) is bool
        and type(event.evicted) is bool
        and type(event.keys) in (list, tuple)
        and _BYTES.issuperset(map(type, event.keys))
    ):
        return event
    raise BreachError(f"{text_of(event)} instead of an event of its own")
