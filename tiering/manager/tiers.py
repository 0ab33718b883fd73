"""The manager's side of the secondary tiers: calls to them, resets and shutdown."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from tiering.api.keys import PRIMARY_TIER, OffloadKey
from tiering.api.manager import OffloadingEvent
from tiering.api.masking import shown
from tiering.api.misses import Unstored
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
)
from tiering.manager.cascade_queue import RequestEnd
from tiering.manager.manager_stats import ManagerStats
from tiering.manager.tier_state import TierState
from tiering.manager.worth import Worth
from tiering.secondary.contract import (
    SecondaryTierManager,
    StepEnd,
)

_log = logging.getLogger("kv_tiering.manager")

_T = TypeVar("_T")

_NOTHING = StepEnd()
_NO_ANSWER = object()


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


def _deadlines(clock: Callable[[], float], seconds: float, turns: int) -> Iterator[float]:
    """Yield the end of each of ``turns`` of tiers that share ``seconds``, when the turn begins.

    Each turn gets an equal part of the time that is left, so that a tier that hangs cannot use up the others' parts.
    """
    end = clock() + seconds
    for left in range(turns, 0, -1):
        now = clock()
        yield now + max(0.0, end - now) / left


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
        given: object = _NO_ANSWER
        try:
            given = method(*arguments)
            return answer.read(given, *arguments)
        except BaseException as error:
            if given is _NO_ANSWER or isinstance(error, PROCESS_ENDS):
                self.fail_raising(state, method, error)
            else:
                self.fail(state, f"its {_name(method)} returned {text_of(given)} instead of {answer.expected}")
            return None

    def note_unstored(self, state: TierState, keys: Sequence[OffloadKey], taken: Sequence[OffloadKey] = ()) -> None:
        """Note that a tier took only ``taken`` of ``keys``; the sequences do not change any more."""
        if self.unstored is not None:
            self.unstored.append(Unstored(state.name, keys, taken))

    def report_unstored(self, state: TierState, keys: Sequence[OffloadKey]) -> None:
        """Report to a tier that ``keys`` left its queue unstored, and end requests without further blocks."""
        self.note_unstored(state, keys)
        if keys and state.in_service:
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
        """Take a tier whose ``method`` has raised ``error``, the present exception, out of service.

        Exceptions that end the process are raised again: they are no fault of the tier.
        """
        if isinstance(error, PROCESS_ENDS):
            raise error
        self.fail(state, f"its {_name(method)} raised {text_of(error)}", exc_info=True)

    def fail_reading(
        self, state: TierState, method: Callable[..., object], given: object, error: BaseException
    ) -> None:
        """Take a tier out of service because the elements that its ``method`` has ``given`` cannot be read.

        ``error`` is the present exception: a :class:`BreachError`, or one that the method or its answer has raised.
        """
        if isinstance(error, BreachError):
            self.fail(state, f"its {_name(method)} returned {error}")
        elif hasattr(type(given), "__iter__") or isinstance(error, PROCESS_ENDS):
            self.fail_raising(state, method, error)
        else:
            self.fail(state, f"its {_name(method)} returned {text_of(given)}, which has no elements")

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
        return self.ask(state, STEP_END, state.tier.on_schedule_end) or _NOTHING

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
        deadlines = _deadlines(self._clock, seconds, len(self.states))
        confirmed = [
            self._reset(state, state.tier.reset, deadline, revision)
            for state, deadline in zip(reversed(self.states), deadlines, strict=True)
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
            drain: function that lets a tier end its jobs until a time. If the function raises, as it may behind a call
                that an interrupt has ended, the tier is shut down with its queued blocks.

        Returns:
            True if every tier has stopped to use the primary rows.
        """
        stopped = True
        for state, deadline in zip(self.states, _deadlines(self._clock, seconds, len(self.states)), strict=True):
            try:
                drain(state, deadline)
            except Exception:
                _log.exception("tier %s: blocks that waited for it at shutdown were not stored", state.name)
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
            except BaseException as error:
                self.fail_reading(state, method, given, error)
        return events


def _name(method: Callable[..., object]) -> object:
    return getattr(method, "__name__", method)
