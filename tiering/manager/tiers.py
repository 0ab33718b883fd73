"""The manager's side of the secondary tiers: their state, calls to them, resets and shutdown."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import index
from typing import Any, Self, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from tiering.api.descriptions import TierDescriptions
from tiering.api.keys import PRIMARY_TIER, OffloadKey
from tiering.api.manager import OffloadingEvent, Unstored
from tiering.api.masking import shown
from tiering.errors import ConfigError
from tiering.manager.answers import (
    PROCESS_ENDS,
    STATISTICS,
    STEP_END,
    TRUTH,
    Answer,
    BreachError,
    read_events,
    text_of,
    truth,
)
from tiering.manager.cascade_queue import CascadeQueue, RequestEnd
from tiering.manager.load_gate import LoadGate
from tiering.manager.manager_stats import ManagerStats
from tiering.manager.worth import Worth
from tiering.secondary.contract import (
    LoadOrCompute,
    SecondaryTierManager,
    StepEnd,
    TierHotKeys,
    TierIntake,
    TierTraits,
    TransferJob,
)

_log = logging.getLogger("kv_tiering.manager")

_T = TypeVar("_T")

_NOTHING = StepEnd()
_PLAIN = frozenset((tuple, list))


@dataclass(slots=True, eq=False)
class TierState:
    """One secondary tier, as the manager treats it."""

    tier: SecondaryTierManager
    rank: int
    """Position among the secondary tiers; 0 is the fastest."""
    name: str
    """Attribute of the tier; the attributes below, up to ``fill``, are among its traits."""
    medium: str
    load_deadline: float | None
    store_deadline: float | None
    max_load_blocks: int | None
    min_prefix_blocks: int
    loads: bool
    """False if no request loads from the tier."""
    gate: LoadGate | None
    """Chooses between loads from the tier and computing; None: no choice."""
    mixes_requests: bool
    fill: bool
    max_loading_rows: int
    """Largest number of primary rows that the tier's loads may hold."""
    settled_until: NDArray[np.float64]
    """Per primary row, the time until which uses of its block need not be reported to the tier.

    The tier holds the block until then, or has decided not to take it.
    """
    has: NDArray[np.bool_]
    """Per primary row, True if the tier has stored or loaded its block.

    The value has no meaning beyond ``settled_until``. A tier that has settled a block otherwise may have declined it.
    """
    intake: TierIntake | None
    """Part of the tier that chooses its blocks; tiers without one share the submission of a store."""
    hot_keys: TierHotKeys | None = None
    """Part of the tier that keeps the keys which engines use most."""
    worth: Worth | None = None
    """Measured worth of the tier; None: it is not measured."""
    descriptions: TierDescriptions | None = None
    """Part of the tier that keeps descriptions of its blocks."""
    queue: CascadeQueue = field(default_factory=CascadeQueue)
    """Readable blocks that wait for the tier's credit."""
    jobs: dict[int, TransferJob] = field(default_factory=dict)
    """Jobs that the tier has not reported, by number; the rows of its stores are pinned."""
    credit: float = 0.0
    """Number of blocks that may be submitted before the tier is called again."""
    queued_since: float = -math.inf
    """Time of the last pull, or at which an empty queue got blocks, on the manager's clock."""
    in_service: bool = True
    """True if the manager may call the tier and submit jobs to it."""
    resetting: bool = False
    """True if the tier is out of service only until its medium has confirmed a reset."""
    loading_rows: int = 0
    """Primary rows that the tier's loads hold, overdue loads included; at most ``max_loading_rows``."""
    cascading_rows: int = 0
    """Primary rows of the cascades that were submitted; a row counts once for each of them."""
    cascade_ended: float = -math.inf
    """Time at which the last cascade to the tier ended, on the manager's clock."""

    @classmethod
    def of(cls, tier: SecondaryTierManager, rank: int, num_rows: int) -> Self:
        """Return the state of a tier that is in service and holds nothing.

        Args:
            tier: the tier.
            rank: position among the secondary tiers; 0 is the fastest.
            num_rows: number of primary rows.

        Raises:
            ConfigError: an attribute of the tier has a value that its contract does not allow.
        """
        traits = _attribute(tier, tier, "traits", "a TierTraits", partial(_instance, TierTraits))
        share = _attribute(tier, traits, "primary_share", "a number from 0 to 1", _share)
        return cls(
            tier,
            rank,
            name=_attribute(tier, tier, "name", "a text", partial(_instance, str)),
            medium=_attribute(tier, traits, "medium", "a text", partial(_instance, str)),
            load_deadline=_attribute(tier, traits, "load_deadline", "a positive number of seconds or None", _limit),
            store_deadline=_attribute(tier, traits, "store_deadline", "a positive number of seconds or None", _limit),
            max_load_blocks=_attribute(
                tier, traits, "max_load_blocks", "a positive whole number or None", _optional_count
            ),
            min_prefix_blocks=_attribute(tier, traits, "min_prefix_blocks", "a positive whole number", _count),
            loads=(rule := _attribute(tier, traits, "load_or_compute", "auto, always or never", _rule)) != "never",
            gate=LoadGate() if rule == "auto" else None,
            mixes_requests=_attribute(tier, traits, "mixes_requests", "True or False", truth),
            fill=_attribute(tier, traits, "fill", "True or False", truth),
            max_loading_rows=max(1, int(share * num_rows)),
            settled_until=np.zeros(num_rows),
            has=np.zeros(num_rows, np.bool_),
            intake=_attribute(tier, traits, "intake", "a TierIntake or None", partial(_part, TierIntake)),
            hot_keys=_attribute(tier, traits, "hot_keys", "a TierHotKeys or None", partial(_part, TierHotKeys)),
            descriptions=_attribute(
                tier, traits, "descriptions", "a TierDescriptions or None", partial(_part, TierDescriptions)
            ),
        )

    def deadline(self, now: float) -> float:
        """Return the time by which a load that is submitted at ``now`` should have ended."""
        limit = self.load_deadline
        return math.inf if limit is None else now + limit


def _attribute(tier: SecondaryTierManager, owner: object, name: str, expected: str, read: Callable[[Any], _T]) -> _T:
    """Return an attribute of a tier or of its traits.

    Args:
        tier: the tier.
        owner: the object with the attribute.
        name: name of the attribute.
        expected: description of the allowed values.
        read: function that converts the value, and raises anything if the value is not allowed.

    Raises:
        ConfigError: the attribute does not exist, or its value is not allowed.
    """
    value: object = None
    try:
        value = getattr(owner, name)
        return read(value)
    except Exception as error:
        raise ConfigError(
            f"a {type(tier).__name__}, which is a secondary tier: its attribute {name} is {text_of(value)}, "
            f"but must be {expected}"
        ) from error


def _check_names(names: Sequence[str]) -> None:
    """Refuse names that requests, events and metrics could not distinguish.

    Raises:
        ConfigError: two secondary tiers have the same name, or one has the name of the primary tier.
    """
    taken = {PRIMARY_TIER: "the primary tier"}
    for rank, name in enumerate(names):
        if name in taken:
            raise ConfigError(
                f"secondary_tiers[{rank}] has the name {shown(name)}, which is the name of {taken[name]}: each tier "
                "must have a name of its own"
            )
        taken[name] = f"secondary_tiers[{rank}]"


def _instance(kind: type[_T], value: object) -> _T:
    if not isinstance(value, kind):
        raise BreachError
    return value


def _part(kind: type[_T], value: object) -> _T | None:
    return None if value is None else _instance(kind, value)


def _share(value: float) -> float:
    if not 0.0 <= value <= 1.0:
        raise BreachError
    return float(value)


def _limit(value: float | None) -> float | None:
    if value is None:
        return None
    if not value > 0.0:
        raise BreachError
    return float(value)


def _rule(value: str) -> str:
    if value not in get_args(LoadOrCompute):
        raise BreachError
    return value


def _count(value: int) -> int:
    if not index(value) > 0:
        raise BreachError
    return index(value)


def _optional_count(value: int | None) -> int | None:
    return None if value is None else _count(value)


class _Shares:
    """A span of time that is divided among tiers, which take turns.

    Each turn gets an equal part of the time that is left, so that a tier that hangs cannot use up the others' parts.
    """

    __slots__ = ("_clock", "_deadline", "_turns")

    def __init__(self, clock: Callable[[], float], seconds: float, turns: int) -> None:
        """Start the span now.

        Args:
            clock: monotonic clock, in seconds.
            seconds: length of the whole span.
            turns: number of tiers that share the span.
        """
        self._clock = clock
        self._deadline = clock() + seconds
        self._turns = turns

    def next_deadline(self) -> float:
        """Begin the next turn and return the time at which it must end."""
        now = self._clock()
        deadline = now + max(0.0, self._deadline - now) / self._turns
        self._turns -= 1
        return deadline


class SecondaryTiers:
    """The secondary tiers of one manager, in service or not.

    A tier breaks its contract if it raises, returns what its contract does not allow, or reports a job that is not its
    own. Such a tier is logged, counted and taken out of service until a restart.
    """

    def __init__(
        self,
        tiers: Sequence[SecondaryTierManager],
        num_rows: int,
        stats: ManagerStats,
        clock: Callable[[], float],
        on_failed: Callable[[TierState], None],
        controls: int | None = None,
    ) -> None:
        """Create the states of a manager's tiers; all are in service.

        Args:
            tiers: the tiers, fastest first.
            num_rows: number of primary rows.
            stats: the manager's counters.
            clock: monotonic clock, in seconds.
            on_failed: function that is called when a tier was taken out of service until a restart.
            controls: seed of the measurement of the worth of tiers with a gate; default: it is not measured.

        Raises:
            ConfigError: two tiers have one name, or an attribute has a value that the contract of tiers does not allow.
        """
        self.states = [TierState.of(tier, rank, num_rows) for rank, tier in enumerate(tiers)]
        """All tiers, fastest first."""
        _check_names([state.name for state in self.states])
        for state in self.states:
            if controls is not None and state.gate is not None:
                state.worth = Worth(state.name, controls, clock())
        self.unstored: list[Unstored] | None = None
        """Blocks that tiers did not take since they were taken from here; None: none are kept."""
        self._stats = stats
        self._clock = clock
        self._on_failed = on_failed

    def call(self, state: TierState, method: Callable[..., object], *arguments: object) -> None:
        """Call a method of a tier whose answer has no meaning; if it raises, take the tier out of service."""
        try:
            method(*arguments)
        except PROCESS_ENDS:
            raise
        except BaseException as error:
            self.fail_raising(state, method, error)

    def ask(self, state: TierState, answer: Answer[_T], method: Callable[..., object], *arguments: object) -> _T | None:
        """Call a method of a tier and return its answer.

        If the method raises, or its contract does not allow the answer, take the tier out of service and return None.

        Args:
            state: the tier.
            answer: what the method may return.
            method: the method.
            arguments: arguments of the method.
        """
        try:
            given = method(*arguments)
        except PROCESS_ENDS:
            raise
        except BaseException as error:
            self.fail_raising(state, method, error)
            return None
        return self.read(state, answer, method, given, *arguments)

    def read(
        self, state: TierState, answer: Answer[_T], method: Callable[..., object], given: object, *arguments: object
    ) -> _T | None:
        """Return what a ``method`` of a tier has ``given``, as :meth:`ask` does."""
        try:
            return answer.read(given, *arguments)
        except PROCESS_ENDS:
            raise
        except BaseException:
            self.fail(state, f"its {_name(method)} returned {text_of(given)} instead of {answer.expected}")
            return None

    def note_unstored(self, state: TierState, keys: Sequence[OffloadKey], taken: Sequence[OffloadKey] = ()) -> None:
        """Note that a tier took only ``taken`` of ``keys``; the sequences do not change any more."""
        if self.unstored is not None:
            self.unstored.append(Unstored(state.name, keys, taken))

    def report_unstored(self, state: TierState, keys: Sequence[OffloadKey]) -> None:
        """Report to a tier that ``keys`` left its queue unstored, and end requests without further blocks."""
        self.note_unstored(state, keys)
        if keys and state.in_service and state.intake is not None:
            self.call(state, state.intake.not_stored, tuple(keys))
        self.end_requests(state)

    def end_requests(self, state: TierState) -> None:
        """End the finished requests whose last block has left a tier's queue, in the tier too."""
        ended, state.queue.ended = state.queue.ended, []
        for end in ended:
            self.end_request(state, end)

    def end_request(self, state: TierState, end: RequestEnd) -> None:
        """End a request in a tier: no cascade for it follows."""
        if state.in_service:
            self.call(state, state.tier.on_request_finished, end.ctx, end.released, end.kept)

    def fail_raising(self, state: TierState, method: Callable[..., object], error: BaseException) -> None:
        """Take a tier whose ``method`` has raised ``error``, the present exception, out of service."""
        self.fail(state, f"its {_name(method)} raised {text_of(error)}", exc_info=True)

    def fail_reading(
        self, state: TierState, method: Callable[..., object], given: object, error: BaseException
    ) -> None:
        """Take a tier out of service because the elements that its ``method`` has ``given`` cannot be read.

        ``error`` is the present exception: a :class:`BreachError`, or one that the method or its answer has raised.
        """
        if isinstance(error, BreachError):
            self.fail(state, f"its {_name(method)} returned {error}")
        elif not hasattr(type(given), "__iter__"):
            self.fail(state, f"its {_name(method)} returned {text_of(given)}, which has no elements")
        else:
            self.fail_raising(state, method, error)

    def fail(self, state: TierState, reason: str, *, exc_info: bool = False) -> None:
        """Take a tier out of service until a restart, because it broke its contract.

        Args:
            state: the tier.
            reason: the breach, for the log.
            exc_info: True to log the traceback of the current exception; default False.
        """
        if state.in_service or state.resetting:
            state.in_service = state.resetting = False
            self._stats.tiers_out_of_service += 1
            _log.error("tier %s is out of service until a restart: %s", state.name, reason, exc_info=exc_info)
            self._on_failed(state)

    def end_step(self, state: TierState) -> StepEnd:
        """End the step of a tier, and return its state; the default state if the tier breaks its contract."""
        method = state.tier.on_schedule_end
        try:
            end = method()
        except PROCESS_ENDS:
            raise
        except BaseException as error:
            self.fail_raising(state, method, error)
            return _NOTHING
        if type(end) is StepEnd:
            wanted, rest, superseded, _ = end
            # Most steps end here, without a further call.
            if type(wanted) in _PLAIN and not wanted and type(rest) is float and rest >= 0.0 and superseded is False:
                return end
        return self.read(state, STEP_END, method, end) or _NOTHING

    def end_reset(self, state: TierState) -> None:
        """Return a tier to service if its medium has confirmed the reset by the end of this step.

        The tier may need steps to complete its reset, for example to find that its directory is gone.
        """
        if self.end_step(state).reset_done is True and state.resetting:
            state.in_service, state.resetting = True, False
            _log.warning("tier %s has completed its reset and is in service again", state.name)

    def reset(self, seconds: float, revision: str | None) -> bool:
        """Reset all tiers.

        The slowest tier comes first: shared media need no time, and leave their share to the disks.

        Args:
            seconds: time that all resets may take together.
            revision: name of the weights from now on, or None.

        Returns:
            True if all media have confirmed the reset.
        """
        shares = _Shares(self._clock, seconds, len(self.states))
        confirmed = [
            self._reset(state, state.tier.reset, shares.next_deadline(), revision) for state in reversed(self.states)
        ]
        return all(confirmed)

    def follow(self, deadline: float) -> None:
        """Let all tiers leave the blocks stored before, because a new common epoch has begun in one of them.

        Tiers that do not confirm until ``deadline`` return to service in a later step. The primary tier is empty, so
        that no block is offered that a tier may want.
        """
        for state in self.states:
            self._reset(state, state.tier.reset, deadline, None, True)
            if state.in_service and self.end_step(state).superseded:
                self.fail(state, "it did not enter the new common epoch that it reported")

    def _reset(self, state: TierState, reset: Callable[..., object], *arguments: object) -> bool:
        if self.ask(state, TRUTH, reset, *arguments):
            if state.resetting:
                state.in_service, state.resetting = True, False
            return True
        if state.in_service or state.resetting:
            state.in_service, state.resetting = False, True
            _log.error(
                "tier %s is out of service until its medium has confirmed the reset: its old blocks are not served any "
                "more, but a restart before then could find them again",
                state.name,
            )
        return False

    def shut_down(self, seconds: float, drain: Callable[[TierState, float], None]) -> bool:
        """Drain and shut down all tiers.

        Args:
            seconds: time that all tiers may take together.
            drain: function that lets a tier end its jobs until a time.

        Returns:
            True if every tier has stopped to use the primary rows.
        """
        shares = _Shares(self._clock, seconds, len(self.states))
        stopped = True
        for state in self.states:
            deadline = shares.next_deadline()
            drain(state, deadline)
            stopped = bool(self.ask(state, TRUTH, state.tier.shutdown, deadline)) and stopped
        return stopped

    def end_service(self) -> None:
        """Take all tiers out of service uncounted and unlogged, because they were shut down."""
        for state in self.states:
            state.in_service = state.resetting = False

    def stats(self) -> dict[str, dict[str, Any]]:
        """Return the statistics of each tier that has some, by the tier's name."""
        tiers = {}
        for state in self.states:
            fields = self.ask(state, STATISTICS, state.tier.get_stats)
            if fields is not None:
                if (gate := state.gate) is not None:
                    worth, closed = state.worth, not gate.pays
                    if worth is not None:
                        closed = closed or worth.closed
                        fields |= {"controls": worth.controls, **worth.fields()}
                    fields |= {"loads_gated": gate.gated, "loads_cut": gate.cut, "gate_closed": int(closed)}
                tiers[state.name] = fields
        return tiers

    def take_events(self) -> list[OffloadingEvent]:
        """Return the events of all tiers since the last call; those of each tier are in the tier's order."""
        events: list[OffloadingEvent] = []
        for state in self.states:
            given: Iterable[object] = ()
            method = state.tier.take_events
            try:
                given = method()
                # What a generator returned before it raised counts.
                events.extend(read_events(given, state.name))
            except PROCESS_ENDS:
                raise
            except BaseException as error:
                self.fail_reading(state, method, given, error)
        return events


def _name(method: Callable[..., object]) -> object:
    return getattr(method, "__name__", method)
