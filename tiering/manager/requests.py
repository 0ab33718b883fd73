"""The manager's requests: their limits, their tiers, and the blocks that are kept for them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tiering.api.hints import KeptBlocks
from tiering.api.keys import PRIMARY_TIER, OffloadKey
from tiering.api.masking import shown, shown_name
from tiering.api.misses import LookupOutcome, Refusal
from tiering.api.request import OffloadPolicy, ReqContext
from tiering.api.request_policy import NEITHER, RequestPolicy, parse_request_policy
from tiering.errors import ConfigError
from tiering.manager.answers import POLICY
from tiering.manager.cascade_queue import RequestEnd
from tiering.manager.tier_state import TierState
from tiering.manager.tiers import SecondaryTiers
from tiering.manager.worth import Trial
from tiering.runtime.ratelimit import LimitedWarning
from tiering.secondary.agreement import EpochAgreement

_log = logging.getLogger("kv_tiering.manager")


@dataclass(slots=True, eq=False)
class Request:
    """One request, as the manager sees it."""

    ctx: ReqContext
    policy: RequestPolicy
    """The request's own limits on loads and stores."""
    tiers: list[TierState]
    """Secondary tiers that the request may use, fastest first."""
    wants_all: list[TierState]
    """Those of ``tiers`` that want all blocks of the request (the request-level policy)."""
    finished: bool = False
    refused: dict[OffloadKey, Refusal] = field(default_factory=dict)
    """Key → reason of the blocks that stay a miss for the request."""
    failed: dict[int, set[OffloadKey]] = field(default_factory=dict)
    """Per tier rank, keys that the tier reported as held and failed to load."""
    asked: set[OffloadKey] = field(default_factory=set)
    """Keys whose promotion is in flight and that the request waits for."""
    reserved: dict[OffloadKey, int] = field(default_factory=dict)
    """Key → row of the promoted blocks that are pinned for the request."""
    brought: dict[OffloadKey, int] = field(default_factory=dict)
    """Key → rank of the tier from which a block was promoted for the request."""
    advised: dict[int, int] = field(default_factory=dict)
    """Per KV-cache group, the number of looked-up keys that the size advisor has counted."""
    awaited: tuple[int, OffloadKey, int] | None = None
    """Length and last key of the prompt whose search waits for promotions in flight alone, and its hits.

    None if the last search found otherwise, or a promotion has ended since, or a reset has come.
    """
    undecided_since: float | None = None
    """Time of the request's first undecided lookup; None before."""
    load_since: float = 0.0
    """Time from which on the request waits for gated loads; no meaning while :attr:`load_by` is infinity."""
    load_by: float = math.inf
    """Time until which the request waits for gated loads: as long as computing their blocks takes."""
    load_queue: float = 0.0
    """Seconds for which it waits beyond :attr:`load_by` if the loads pay: computing has a queue, too."""
    arrived_at: float = -math.inf
    """Time at which the latest blocks for the request's next load have come from a gated tier."""
    is_cut: bool = False
    """True once the request has waited that long in vain; it loads nothing more from gated tiers."""
    gated: set[int] = field(default_factory=set)
    """Ranks of the tiers whose blocks the request computes because a load takes longer."""

    is_measured: bool = False
    """True if the request may become the trial of a tier's worth."""

    trial: Trial | None = None
    """The trial of a tier's worth that the request is; None: it is none."""

    released: Sequence[OffloadKey] = ()
    """Blocks that every tier evicts first once the request has ended."""

    kept: Sequence[KeptBlocks] = ()
    """Blocks before which every tier evicts others for a time once the request has ended."""

    is_early: bool = False
    """True while blocks are promoted for the request before it is looked up."""

    refused_since: float | None = None
    """Time since when the request's stores find no room; None while they find room."""

    def awaited_hits(self, keys: Sequence[OffloadKey], at_least: int) -> int | None:
        """Return the number of hits in ``keys`` while the request waits for promotions in flight alone.

        A search would give the same answer until one of the promotions has ended.

        Args:
            keys: the prompt that the request asks about.
            at_least: smallest useful number of hits.

        Returns:
            The number of hits; None if a search is needed.
        """
        awaited = self.awaited
        if awaited is None or not self.asked or awaited[0] != len(keys) or awaited[1] != keys[-1]:
            return None
        return awaited[2] if awaited[2] >= at_least else None

    def outcome_of(self, key: OffloadKey) -> LookupOutcome:
        """Return why the request does not load a block."""
        failed = tuple(state.name for state in self.tiers if key in self.failed.get(state.rank, ()))
        least = tuple((state.name, state.traits.min_prefix_blocks) for state in self.tiers)
        gated = tuple(state.name for state in self.tiers if state.rank in self.gated or not state.loads)
        control = next((state.name for state in self.tiers if self.is_control_of(state.rank)), "")
        return LookupOutcome(self.refused.get(key), failed, least, gated, control)

    def is_control_of(self, rank: int) -> bool:
        """Return True if the request shows the worth of a tier because that tier is not asked for it."""
        return self.trial is not None and self.trial.is_control and self.trial.rank == rank

    def wait_longer(self, now: float, seconds: float, queue: float) -> None:
        """Extend the wait for loads of gated tiers.

        Args:
            now: present time.
            seconds: time of computing the further blocks.
            queue: time of computing those that wait already, of all requests.
        """
        if self.load_by == math.inf:
            self.load_since, self.load_by, self.load_queue = now, now, 0.0
        self.load_by += seconds
        self.load_queue = max(self.load_queue, queue)

    def shorten_wait(self, seconds: float) -> None:
        """Let the wait for loads of gated tiers end ``seconds`` earlier, unless the loads pay by then."""
        self.load_by -= seconds
        self.load_queue += seconds

    def stretch_wait(self, factor: float) -> None:
        """Multiply the wait for loads of gated tiers, because computing takes that much longer than assumed."""
        if self.load_by < math.inf:
            self.load_by = self.load_since + factor * (self.load_by - self.load_since)
            self.load_queue *= factor

    def wait_undecided(self, now: float, patience: float) -> bool:
        """Begin the wait of undecided lookups at the first call, and return False once the wait is over.

        A tier that never decides must not hold up a request for ever.

        Args:
            now: current time, in seconds.
            patience: seconds to wait for a decision at present, counted from the request's first undecided lookup.
        """
        if self.undecided_since is None:
            self.undecided_since = now
        return now < self.undecided_since + patience


class _UnknownNames:
    """Warnings about names of tiers that the stack does not have, one warning per name.

    The names come from clients and requests come by the thousand, so the number of warnings is bounded.
    """

    __slots__ = ("_known", "_warned")

    _MOST = 32
    """Largest number of names that are warned about."""

    def __init__(self, known: Sequence[str]) -> None:
        """Create the warnings for a stack whose tiers have the names ``known``, fastest first."""
        self._known = known
        self._warned: set[str] = set()

    def warn(self, req_id: str, names: Iterable[str]) -> None:
        """Warn about those of ``names`` that are unknown and were not warned about before."""
        for name in sorted(set(names).difference(self._known, self._warned)):
            if len(self._warned) < self._MOST:
                self._warned.add(name)
                _log.warning(
                    "request %s: kv_tiering.tiers: %s is not a tier of this stack and is ignored (logged once); "
                    "the tiers are %s",
                    shown_name(req_id),
                    shown(name),
                    ", ".join(self._known),
                )


class Requests:
    """The requests of one manager, by id."""

    def __init__(self, tiers: SecondaryTiers, agreement: EpochAgreement, clock: Callable[[], float]) -> None:
        """Create the requests of a manager.

        Args:
            tiers: the secondary tiers, which are informed of every request.
            agreement: records that a request has begun.
            clock: monotonic clock, in seconds.
        """
        self.known: dict[str, Request] = {}
        """The requests, by id. Only the methods of this class change the dictionary."""
        self._tiers = tiers
        self.agreement = agreement
        """The object by which the tiers agree on common epochs."""
        self._warn_late = LimitedWarning(_log, clock)
        self._unknown_names = _UnknownNames([PRIMARY_TIER, *(state.name for state in tiers.states)])

    def begin(self, ctx: ReqContext) -> Request:
        """Announce a request to the tiers that it may use, and return it.

        A request with invalid parameters neither loads nor stores; one warning reports it.
        """
        try:
            policy = parse_request_policy(ctx.kv_transfer_params)
        except ConfigError as error:
            _log.warning("request %s neither loads nor stores KV: %s", shown_name(ctx.req_id), error)
            policy = NEITHER
        names, tiers = policy.tiers, self._tiers.states
        if names is not None:
            tiers = [state for state in tiers if state.name in names]
            if len(tiers) < len(names):
                self._unknown_names.warn(ctx.req_id, names)
        request = Request(ctx, policy, tiers, [])
        for state in self._tiers.states:
            if state.queue.lane_of:
                state.queue.disown(ctx.req_id)
                self._tiers.end_requests(state)
        for state in tiers:
            if not state.in_service:
                continue
            if self._tiers.ask(state, POLICY, state.tier.on_new_request, ctx) is OffloadPolicy.REQUEST_LEVEL:
                request.wants_all.append(state)
        self.known[ctx.req_id] = request
        self.agreement.in_use = True
        return request

    def admit_late_load(self, ctx: ReqContext) -> bool:
        """Warn of a lookup of a request that is not announced or has finished, and return True if it may load.

        No end of such a request will come, so that nothing may be kept for it.
        """
        self.warn_of_late(ctx)
        try:
            return parse_request_policy(ctx.kv_transfer_params).load
        except ConfigError:
            return False

    def warn_of_late(self, ctx: ReqContext) -> None:
        """Warn, rate-limited, of a call for a request that is not announced or has finished."""
        self._warn_late(
            "request %s looks up or stores blocks before on_new_request or after on_request_finished: it finds only "
            "blocks of the CPU tier, and stores nothing",
            shown_name(ctx.req_id),
        )

    def end(self, request: Request) -> None:
        """Drop a finished request, and end it in its tiers, each once no cascade for it follows."""
        if self.known.get(request.ctx.req_id) is request:
            del self.known[request.ctx.req_id]
        end = RequestEnd(request.ctx, request.released, request.kept)
        for state in request.tiers:
            if state.in_service and not (state.queue.lane_of and state.queue.finish(end)):
                self._tiers.end_request(state, end)

    def drop_refusals(self) -> None:
        """Let all requests look for blocks anew, after a reset."""
        for request in self.known.values():
            request.refused.clear()
            request.failed.clear()
            request.asked.clear()
            request.awaited = None
            request.load_by = math.inf
