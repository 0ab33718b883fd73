"""The parts of a manager of tiers, created once for all its subjects."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from tiering.advisor.advisor import SizeAdvisor
from tiering.api.descriptions import Described, Description, TierDescriptions
from tiering.api.inert_manager import InertManager
from tiering.api.keys import OffloadKey
from tiering.api.manager import OffloadingManager
from tiering.manager.answers import DOCUMENTS, MOST_DOCUMENTS, TRUTH
from tiering.manager.early import EarlyPromotions
from tiering.manager.jobs import TierJobs
from tiering.manager.kept_speeds import KeptSpeeds
from tiering.manager.manager_stats import ManagerStats
from tiering.manager.open_lookups import OpenLookups
from tiering.manager.prefix_search import PrefixSearch
from tiering.manager.promotions import Promotions
from tiering.manager.requests import Requests
from tiering.manager.reservations import Reservations
from tiering.manager.rest import Rest
from tiering.manager.row_broker import RowBroker
from tiering.manager.tier_state import TierState
from tiering.manager.tiers import SecondaryTiers
from tiering.manager.warm_start import WarmStart, WarmStartLimits
from tiering.primary.manager import CPUPrimaryTierOffloadingManager
from tiering.runtime.forks import inert_in_children
from tiering.runtime.news import News
from tiering.runtime.owner import OwnerThread
from tiering.secondary.agreement import EpochAgreement
from tiering.secondary.contract import SecondaryTierManager

_T = TypeVar("_T")


class GuardedDescriptions(TierDescriptions):
    """The descriptions of a tier, which goes out of service if its part raises or breaks its contract.

    Args:
        tiers: the secondary tiers.
        state: the tier.
        part: the tier's part.
    """

    def __init__(self, tiers: SecondaryTiers, state: TierState, part: TierDescriptions) -> None:
        self._tiers = tiers
        self._state = state
        self._part = part
        self.tier = state.name
        self.slots = min(max(2, part.slots), MOST_DOCUMENTS)

    @property
    def writing(self) -> bool:
        """True while the tier writes documents."""
        return self._part.writing

    @classmethod
    def of(cls, tiers: SecondaryTiers) -> GuardedDescriptions | None:
        """Return the descriptions of the first tier that keeps any; None without one."""
        for state in tiers.states:
            if state.traits.descriptions is not None:
                return cls(tiers, state, state.traits.descriptions)
        return None

    def write(self, documents: Sequence[Description]) -> bool:
        return self._state.in_service and bool(self._tiers.ask(self._state, TRUTH, self._part.write, documents))

    def gather(self, read: Callable[[bytes], _T]) -> Sequence[Described[_T]] | None:
        if not self._state.in_service:
            return None
        return self._tiers.ask(self._state, DOCUMENTS, self._part.gather, read)


class ManagerParts(OffloadingManager):
    """The parts that the methods of a manager of tiers use; all belong to the scheduler's thread.

    The methods are in classes by subject, which are one object: a step would pay for calls from one object to another.
    """

    def __init__(
        self,
        primary_tier: CPUPrimaryTierOffloadingManager,
        secondary_tiers: Sequence[SecondaryTierManager] | None = None,
        enable_events: bool = False,
        *,
        clock: Callable[[], float] = time.monotonic,
        promotion_share: float = 0.5,
        reservation_deadline: float = 30.0,
        reset_deadline: float = 0.05,
        shutdown_deadline: float = 30.0,
        keep_secondary: bool = False,
        news: News | None = None,
        agreement: EpochAgreement | None = None,
        one_thread: bool = True,
        advisor: SizeAdvisor | None = None,
        exclusive: bool = False,
        warm_start: WarmStartLimits | None = None,
        controls: int | None = None,
    ) -> None:
        """Create the manager; the tiers are opened by :meth:`open_tier`.

        Args:
            primary_tier: the CPU tier.
            secondary_tiers: the tiers behind it, fastest first; default: none.
            enable_events: collect the events of all tiers for :meth:`take_events`; default: False.
            clock: monotonic clock, in seconds.
            promotion_share: largest share of the primary rows that promotions and reservations may hold together.
            reservation_deadline: seconds for which a promoted block waits to be loaded before it may be evicted.
            reset_deadline: seconds for which the engine waits until all media have confirmed a reset.
            shutdown_deadline: longest duration of :meth:`shutdown`, in seconds.
            keep_secondary: a reset without a revision empties the primary tier only; default: False.
            news: the object on which tiers announce finished jobs; default: one of the manager's own.
            agreement: the object by which the tiers agree on common epochs, as in their contexts. By default, blocks in
                the rows are not compared with a common epoch that a tier finds late.
            one_thread: the first thread that uses the manager owns it. Other threads get a :class:`WrongThreadError`
                until :meth:`hand_over`. If False, the caller ensures that no two threads use the manager at the same
                time.
            advisor: estimates the hit rates at other capacities of the tiers; default: none.
            exclusive: prefer blocks that the engine's own cache does not hold, if the engine shows it; default: False.
            warm_start: bounds of the promotions of blocks that engines used before this start; default: none, and
                this engine publishes nothing either.
            controls: seed of the choice of requests that show what the loads from tiers with a gate save; default: none
                are chosen.
        """
        self._clock = clock
        self.news = news or News()
        """Announcements of finished jobs; :mod:`tiering.manager.waiting` listens to them."""
        self._owner = OwnerThread(enabled=one_thread)
        self.primary_tier = primary_tier
        primary_tier.attach(self._before_reset)
        self.secondary_tiers: tuple[SecondaryTierManager, ...] = tuple(secondary_tiers or ())
        self._readable = primary_tier.readable
        self._enable_events = enable_events
        self._reset_deadline = reset_deadline
        self._shutdown_deadline = shutdown_deadline
        self._keep_secondary = keep_secondary
        self._stats = ManagerStats()
        rows = primary_tier.num_rows
        self._reservations = Reservations(primary_tier, self._stats, clock, reservation_deadline)
        self._tiers = SecondaryTiers(self.secondary_tiers, rows, self._stats, clock, self._on_failed, controls)
        self._states = self._tiers.states
        self._call = self._tiers.call
        self._broker = RowBroker(primary_tier, self._tiers, self._stats, clock)
        self._promotions = Promotions(
            primary_tier, self._reservations, self._broker, self._stats, clock, max(1, int(promotion_share * rows))
        )
        self._waiters = self._promotions.waiters
        self._waits = self._waiters.waits
        self._jobs = TierJobs(
            primary_tier, self._tiers, self._promotions, self._reservations, self._broker, self._stats, clock
        )
        self._search = PrefixSearch(primary_tier, self._promotions, self._tiers, clock)
        self._gates = self._search.gates
        self._open_lookups = OpenLookups(
            self.news, all(tier.traits.announces_news for tier in self.secondary_tiers), clock
        )
        kept_speeds = KeptSpeeds(self._tiers, self._search, partial(self.note_compute, is_assumed=True), clock)
        self._kept_speeds = kept_speeds if kept_speeds.gathering else None
        self._rest = Rest(self.news)
        self._requests = Requests(self._tiers, agreement or EpochAgreement(), clock)
        self._known = self._requests.known
        self._early = EarlyPromotions(
            self._search, self._promotions, self._requests, self.on_request_finished, self._stats, clock
        )
        self._warm = None
        if warm_start is not None:
            self._warm = WarmStart(warm_start, primary_tier, self._promotions, self._tiers, self._stats, clock)
        self._descriptions = GuardedDescriptions.of(self._tiers) if enable_events else None
        self._shut_down = False
        self._advisor = advisor
        self._exclusive = exclusive
        self._is_exclusive = False
        """True if the engine shows which blocks its own cache holds, and the primary tier prefers others."""
        self._further_copies = 0.0
        """Copies that an exclusive tier may make for each of an inclusive one's, in addition; 0: any number."""
        self._missing: dict[OffloadKey, TierState] | None = None
        """Blocks that a tier wants and the primary tier lacks, with the tier; None: they are not looked for."""
        self._wanting: dict[OffloadKey, TierState] = {}
        """Blocks that are being stored because a tier wants them, with the tier."""
        inert_in_children(self, InertManager)

    def _enter(self) -> None:
        """Refuse a second thread, and end the rest of the tiers; frequent methods have these lines inline."""
        self._owner.claim()
        self._rest.until = None

    def _on_failed(self, state: TierState) -> None:
        """Expect nothing from a tier that is out of service until a restart, and nothing for it."""
        self._promotions.fail_all(state)
        self._jobs.late_copies.clear()
        self._stats.queued_retired += self._broker.empty(state)

    def _before_reset(self) -> None:
        """Drop all promotions and queued blocks, because the primary table is about to be emptied."""
        self._promotions.drop_queued()
        self._jobs.collect()
        self._stats.queued_reset += self._jobs.drop_all()
        self._jobs.late_copies.clear()
        self._promotions.reset(self._jobs.running_promotions())
        self._requests.drop_refusals()
        self._early.clear()
