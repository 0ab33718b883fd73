"""The tiers of one namespace, which all its engines share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Protocol

from tiering.api.namespace import Namespace, service_replica
from tiering.block_tier.tier import BlockTier
from tiering.errors import TieringError
from tiering.machine.engine_jobs import Engine, EngineJob
from tiering.machine.hosted import HostedTier
from tiering.machine.messages import MessageError
from tiering.machine.options import PEERS_TIER
from tiering.machine.peer_rows import PeerRows
from tiering.machine.presence import PresenceTable
from tiering.machine.rows import RowSpace
from tiering.machine.words import START, UNKNOWN_EPOCH, revision_of
from tiering.runtime.news import News
from tiering.runtime.pool import ThreadPool
from tiering.secondary.agreement import EpochAgreement
from tiering.secondary.contract import SecondaryTierManager, TierContext

_log = logging.getLogger("kv_tiering.machine")

CLOSE_AGAIN = 10.0
"""Seconds between two attempts to close the tiers of a namespace that opens them again."""

_CLOSE_SECONDS = 2.0

TierBuilder = Callable[[TierContext], SecondaryTierManager]
"""Function that returns a tier that is not open."""


def own_replica(namespace: Namespace) -> str:
    """Return the name of a replica that no other namespace has."""
    return service_replica(namespace.directory)


def is_shared(tier: SecondaryTierManager) -> bool:
    """Return True if other machines use the medium, so that its common epochs count."""
    return tier.index.shared if isinstance(tier, BlockTier) else not isinstance(tier, PeerRows)


def _epoch(tier: SecondaryTierManager) -> str:
    """Return the epoch that a shared tier is in, as text."""
    namespace = tier.namespace if isinstance(tier, BlockTier) else None
    return UNKNOWN_EPOCH if namespace is None else namespace.fingerprint.hex()


def _latest(hosted: HostedTier) -> Engine:
    """Return the engine of a tier that was reset last; it has engines."""
    return max(hosted.engines, key=lambda engine: engine.reset_at)


def _load_held(hosted: HostedTier, job: EngineJob, positions: Sequence[int], held: list[int]) -> None:
    """Let a tier load those of some blocks that it may hold, and note their positions in ``held``."""
    blind = is_shared(hosted.tier)
    held += [position for position in positions if blind or hosted.tier.lookup(job.keys[position], job.request)]
    if held:
        hosted.load(job, held)


class Member(Engine, Protocol):
    """One connection of an engine, as its namespace uses it."""

    hosted: HostedTier | None
    """The tier that the engine uses."""


class HostedNamespace:
    """The tiers of one namespace, and the rows of its engines; the service's thread calls all methods.

    Args:
        namespace: the namespace, in no epoch.
        groups: bytes of a block, per KV-cache group.
        stride: bytes from one row to the next.
        builders: function that builds each tier, by the tier's name, fastest first.
        copiers: threads that copy blocks between rows.
        wake: function that wakes the service's thread, from any thread.
        clock: function that returns monotonic seconds.
        generations: source of numbers of generations, which never returns one twice.
        replica: replica whose directories the tiers use, or None.
    """

    def __init__(
        self,
        namespace: Namespace,
        groups: tuple[int, ...],
        stride: int,
        builders: Mapping[str, TierBuilder],
        copiers: ThreadPool,
        wake: Callable[[], None],
        clock: Callable[[], float],
        generations: Iterator[int],
        replica: str | None,
    ) -> None:
        self.name = namespace.directory[:8]
        """Name in the log and in metrics."""
        self.namespace = namespace
        """The namespace, in no epoch."""
        self.groups = groups
        """Bytes of a block, per KV-cache group."""
        self.rows = RowSpace(stride)
        """The rows of all its engines."""
        self.tiers: dict[str, HostedTier] = {}
        """The tiers by name, fastest first."""
        self.broken: set[str] = set()
        """Names of the tiers that broke their contract."""
        self.peers: list[Member] = []
        """The connections of its engines."""
        self.presence: dict[str, PresenceTable] = {}
        """The blocks of each tier whose medium is not shared, for the engines to read."""
        self._builders = builders
        self._copiers = copiers
        self._wake = wake
        self._clock = clock
        self._generations = generations
        self._replica = replica
        self._news = ExitStack()
        self._close_due = 0.0

    def build(self, weights: str) -> None:
        """Build all tiers of a namespace for engines with the state ``weights``, and begin to open them.

        Nothing waits for a medium here: other namespaces are served meanwhile.

        Raises:
            TieringError: a tier cannot be built; none is open.
        """
        news, agreement = News(), EpochAgreement()
        agreement.in_use = True  # engines may hold blocks that are older than what a medium says
        private = weights != START and revision_of(weights) is None
        tiers: dict[str, HostedTier] = {}
        generation = next(self._generations)
        with ExitStack() as undo:
            undo.enter_context(news.listening(self._wake))
            for name, build in self._builders.items():
                context = TierContext(
                    name=name,
                    primary_view=self.rows.array.data,
                    group_bytes=self.groups,
                    namespace=self.namespace,
                    clock=self._clock,
                    replica=self._replica,
                    revision=revision_of(weights),
                    news=news,
                    agreement=agreement,
                )
                tier = build(context)
                undo.callback(tier.shutdown, self._clock())
                if isinstance(tier, BlockTier | PeerRows) and not is_shared(tier):
                    self._note_blocks(name, tier)
                state = START if private else weights
                tiers[name] = HostedTier(
                    tier,
                    self.rows.array,
                    self.groups,
                    self._copiers,
                    self._wake,
                    self._clock,
                    state,
                    generation,
                )
            for name, hosted in tiers.items():
                hosted.reports.cold_start = partial(agreement.cold_starts.get, name)
                if PEERS_TIER in tiers:
                    hosted.pass_on = partial(self._pass_on, name)
                hosted.tier.open(self._clock())
            undo.pop_all()
            self._news.enter_context(news.listening(self._wake))
        self.tiers = tiers
        self.broken.clear()

    def _note_blocks(self, name: str, tier: BlockTier | PeerRows) -> None:
        """Let engines read the blocks of a new tier; the file is that of the tier of this name before it."""
        if name in self.presence:
            self.presence[name].clear()
        else:
            try:
                self.presence[name] = PresenceTable(name)
            except (OSError, TieringError) as error:
                _log.warning("tier %s: engines send a message for what they could read: %s", name, error)
                return
        tier.note_blocks(self.presence[name])

    def close(self) -> None:
        """Give the memory back, after the tiers were closed."""
        self.rows.close()
        for table in self.presence.values():
            table.close()

    def guarded(self, hosted: HostedTier, method: Callable[[], object]) -> None:
        """Call a method that calls a tier, and take a tier that raises out of service until a restart."""
        try:
            method()
        except MessageError:
            raise
        except Exception:
            name = next(name for name, tier in self.tiers.items() if tier is hosted)
            _log.exception("tier %s of namespace %s is out of service", name, self.name)
            self.broken.add(name)
            hosted.fail()

    def step(self) -> None:
        """Run a step of each tier."""
        shared = [_epoch(hosted.tier) for hosted in self.tiers.values() if is_shared(hosted.tier)]
        epoch = "?" if "?" in shared else ",".join(shared)
        for name, hosted in self.tiers.items():
            if name not in self.broken:
                hosted.epoch = epoch
                self.guarded(hosted, hosted.step)
        if any(hosted.superseded for hosted in self.tiers.values()):
            _log.warning("namespace %s has a new common epoch; all engines drop their blocks", self.name)
            generation = next(self._generations)
            for name, hosted in self.tiers.items():
                if name not in self.broken:
                    self.guarded(hosted, partial(hosted.follow, generation))
        self._settle()

    def _settle(self) -> None:
        """Let tiers whose engines have gone serve the engines with other weights."""
        left = [
            hosted
            for name, hosted in self.tiers.items()
            if name not in self.broken
            and hosted.engines
            and all(engine.weights != hosted.weights for engine in hosted.engines)
        ]
        for hosted in left:
            latest = _latest(hosted)
            if latest.weights != START:
                self.guarded(hosted, partial(hosted.move, latest))
        used = any(peer.hosted is not None and peer.weights == peer.hosted.weights for peer in self.peers)
        waiting = any(_latest(hosted).weights == START for hosted in left)
        now, first = self._clock(), not self._close_due
        if self.broken or now < self._close_due or not all(hosted.idle for hosted in self.tiers.values()):
            return
        if first and (used or not waiting):
            return
        # A tier cannot go back to the epoch of its start; one that is opened again can. A hung medium delays the other
        # namespaces once: later attempts wait for nothing.
        self._close_due = now + CLOSE_AGAIN
        if self.close_tiers(now + _CLOSE_SECONDS * first):
            self._close_due = 0.0
            self._news = ExitStack()
            try:
                self.build(START)
            except TieringError as error:
                _log.error("the tiers of namespace %s cannot be built: %s", self.name, error)
                self.broken.update(self.tiers)
                return
            for peer in self.peers:
                peer.hosted, peer.generation = self.tiers[peer.tier], -1
                peer.hosted.engines.append(peer)

    def _pass_on(self, last: str, job: EngineJob, positions: Sequence[int]) -> Sequence[int]:
        """Let the next tier load blocks that were not in other engines' rows any more.

        A tier whose medium is shared tries without being asked first: the answer would take as long as the read.

        Args:
            last: name of the tier that could not load the blocks.
            job: job that wants them.
            positions: their positions in it.

        Returns:
            The positions of the blocks that no further tier may hold, or all if the job is not one for others' rows.
        """
        if job.engine.tier != PEERS_TIER:
            return positions
        names = list(self.tiers)
        behind = names[names.index(last) + 1 :] if last != PEERS_TIER else names
        for name in behind:
            hosted = self.tiers[name]
            if not positions or name in self.broken or name == PEERS_TIER or not hosted.attached(job.engine):
                continue
            taken: list[int] = []
            self.guarded(hosted, partial(_load_held, hosted, job, positions, taken))
            positions = [position for position in positions if position not in taken]
        return positions

    def fail(self) -> None:
        """Serve no engine any more; those that are not told wait for the deadlines of their loads."""
        for hosted in self.tiers.values():
            hosted.fail()

    def close_tiers(self, deadline: float) -> bool:
        """Close all tiers, and return True if nothing touches the engines' rows any more."""
        for name, tier in self.tiers.items():
            _log.info("tier %s: %d blocks were copied from the read of another engine", name, tier.reads_saved)
        for name, tier in self.tiers.items():
            if name not in self.broken:
                self.guarded(tier, partial(tier.hints.publish, self._clock()))
        closed = [tier.tier.shutdown(deadline) for tier in self.tiers.values()]
        self._news.close()
        return all(closed)
