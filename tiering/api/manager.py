"""The contract of offloading managers and the values that their methods return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Self

if TYPE_CHECKING:
    from types import TracebackType
from tiering.api.descriptions import TierDescriptions
from tiering.api.hints import KeptBlocks
from tiering.api.keys import OffloadKey
from tiering.api.misses import LookupOutcome, Unstored
from tiering.api.request import ReqContext, RequestOffloadingContext
from tiering.api.transfer import BlockIDsLoadStoreSpec, LoadStoreSpec


class PrefixMatch(NamedTuple):
    """The result of :meth:`OffloadingManager.match_prefix`."""

    hits: int
    """Number of leading keys that are held."""
    pending: bool
    """True if the result may still change.

    Either a hit is not readable yet, or the first key after the hits is undecided.
    """


@dataclass(frozen=True, slots=True)
class PrepareStoreOutput:
    """The blocks to store and the rows to store them in."""

    keys_to_store: list[OffloadKey]
    """The keys that are not held yet, in the order of the call."""
    store_spec: BlockIDsLoadStoreSpec
    """The rows, one per entry of ``keys_to_store``."""
    evicted_keys: list[OffloadKey]
    """The keys that were evicted to make room."""


MEDIUM_CPU = "CPU"
"""Medium of host memory in events."""

MEDIUM_STORAGE = "STORAGE"
"""Medium in events of every tier that is slower than host memory."""

LOCAL = "LOCAL"
"""Locality in events of a medium that only this machine reaches."""

REMOTE = "REMOTE"
"""Locality in events of a medium that other machines reach as well."""

_event_orders = count()


@dataclass(frozen=True, slots=True)
class OffloadingEvent:
    """Blocks that became readable in a tier, or that are gone from the tier.

    Create the event at the moment its blocks come or go: creation orders all events of a process.
    """

    keys: list[OffloadKey]
    """Keys of the blocks that came or went together."""
    medium: str
    """:data:`MEDIUM_CPU` or :data:`MEDIUM_STORAGE`. Engines and routers know no other values."""
    locality: str
    """:data:`LOCAL` or :data:`REMOTE`."""
    tier: str
    """Name of the tier; :data:`~tiering.api.keys.PRIMARY_TIER` for the primary one."""
    removed: bool
    """True if the blocks are gone, False if they became readable."""
    order: int = field(default_factory=_event_orders.__next__, compare=False, repr=False)
    """Position of this event among all events of the process."""
    evicted: bool = field(default=False, compare=False)
    """True if the blocks are gone because the tier evicted them for room; default False."""
    others: int = field(default=0, compare=False)
    """Number of further blocks that the tier evicted, and that this engine has not announced; default 0."""


class OffloadingManager(ABC):
    """The index of offloaded blocks. Runs in the scheduler process, on the scheduler's thread.

    No method blocks except :meth:`reset_cache` and :meth:`shutdown`, which block up to a deadline. Keys are unique
    within a call. A row has a reference count:

    - -1: the row is being written, so it is neither readable nor evictable.
    - 0: the row is readable and evictable.
    - n > 0: n loads read the row, so it is not evictable.
    """

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Look up one block.

        Args:
            key: the key of the block.
            req_context: the request for which the block is looked up.

        Returns:
            True if the block is readable in the primary tier now. False if no tier holds the block, or it cannot be
            promoted. None if the caller should look up again later: a store or promotion is in flight, or a tier is
            still probing.
        """

    def match_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext, *, at_least: int = 1) -> PrefixMatch:
        """Look up a prefix; the batch form of :meth:`lookup`, with the same meaning.

        Args:
            keys: keys of consecutive blocks.
            req_context: the request that asks.
            at_least: smallest number of hits that is of use to the caller; default 1. The manager may skip promotions
                and report nothing as pending where fewer blocks could be loaded. Fewer hits than this number may
                not be readable yet, so callers must not load them.
        """
        pending = False
        for hits, key in enumerate(keys):
            answer = self.lookup(key, req_context)
            if answer is False:
                return PrefixMatch(hits, pending and hits >= at_least)
            pending = pending or answer is None
        return PrefixMatch(len(keys), pending)

    def lookup_each(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Sequence[bool | None]:
        """Return for each of ``keys`` whether a tier holds the block or has it in flight; None: not known.

        Unlike :meth:`lookup`, the call promotes nothing; a block that is held may turn out not to be loadable.
        Managers that cannot look without promoting may return None for every key (the default).

        Args:
            keys: keys of blocks, in any order.
            req_context: the request that asks.
        """
        return [None] * len(keys)

    def held(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrefixMatch:
        """Return how many leading ``keys`` any tier holds or has in flight, without promoting them.

        The answer is pending while a tier has not decided yet; the caller asks again after the end of a step. A block
        that is held may be evicted before it is loaded, or turn out to be damaged then. Managers that cannot look
        without promoting may leave the answer pending (the default).

        Args:
            keys: keys of consecutive blocks.
            req_context: the request that asks.
        """
        return PrefixMatch(0, True)

    def still_pending(self, req_context: ReqContext) -> bool:
        """Return True if the last lookup of a request was pending, and the same lookup would be pending now.

        Callers that repeat a lookup at every step may then skip it. After False, the lookup must be repeated.

        Args:
            req_context: the request that asks.
        """
        return False

    def wait_until(self, answered: Callable[[], bool], seconds: float) -> None:
        """Sleep until ``answered`` returns True, at most ``seconds``.

        By default, the call returns at once.

        Args:
            answered: repeats pending lookups, and returns True if their answers are known.
            seconds: longest sleep.
        """

    @abstractmethod
    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pin ``keys`` until :meth:`complete_load` and return their rows.

        Args:
            keys: keys of readable blocks.
            req_context: the request that loads the blocks.

        Raises:
            NotReadableError: some keys are not readable; no row was pinned.
        """

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext, used: bool = True) -> None:
        """Make the blocks of a prefix recent, its head more recent than its tail.

        Callers also touch blocks that the GPU already has. Unknown keys are ignored.

        Args:
            keys: the keys in the order of the prefix.
            req_context: the request that uses or has stored the blocks.
            used: True (default) to count a use. A request that has stored its prompt chunk by chunk passes False,
                because its tail is more recent than its head.
        """

    def complete_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Unpin the keys of a :meth:`prepare_load`. Unknown keys are ignored and counted.

        Across a reset, each load unpins the rows that :meth:`prepare_load` returned for it: a load that began before
        the reset never unpins a block that was stored afterwards with the same key. Loads of different requests may
        be completed in any order. If a request has several loads of the same key in flight, the oldest one ends: the
        caller completes them in the order in which it prepared them.

        Args:
            keys: keys whose load has ended, all or some of one :meth:`prepare_load`.
            req_context: the request that loaded the blocks.
        """

    @abstractmethod
    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, *, is_last: bool = False
    ) -> PrepareStoreOutput | None:
        """Reserve a row for each of ``keys`` that is not held yet.

        No key of this call is evicted to make room for another one. A block whose store by the same request was running
        at a reset gets no row until that store has ended.

        Args:
            keys: the keys in the order of the prefix.
            req_context: the request that stores the blocks.
            is_last: the caller will not offer these blocks again, so that the store must not wait. Default False.

        Returns:
            The reserved rows; or None, with nothing changed, if the tier has no room for all of them, or waits until
            slower tiers have taken more blocks. The caller may offer the blocks again at a later step.
        """

    def complete_store(self, keys: Sequence[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """Make stored blocks readable, or free their rows if the store failed.

        Keys that were readable before stay readable. Unknown keys are ignored and counted; a reset may have dropped
        them.

        Args:
            keys: the keys of a :meth:`prepare_store`.
            req_context: the request that stored them.
            success: False if the copy failed.
        """

    def complete_stores(self, stores: Sequence[tuple[Sequence[OffloadKey], ReqContext, bool]]) -> None:
        """Complete several stores, whose blocks slower tiers get together; see :meth:`complete_store`.

        Args:
            stores: the arguments of each call.
        """
        for keys, req_context, success in stores:
            self.complete_store(keys, req_context, success)

    def hold_exclusively(self, holds: Callable[[Sequence[OffloadKey]], Sequence[bool]] | None, blocks: int = 0) -> bool:
        """Return True if the primary tier prefers blocks that the engine's own cache does not hold.

        Args:
            holds: returns for each key whether the engine's cache holds the block now: cached, computed and trusted.
                None: the engine does not show its cache.
            blocks: number of blocks that the engine's cache has room for; 0 (default): unknown, copies are not bounded.
        """
        return False

    @property
    def stores_computed(self) -> bool:
        """True (default) if blocks are to be stored when they are computed, not only by late stores."""
        return True

    def engine_holds(self, keys: Sequence[OffloadKey]) -> None:
        """Let the rows of blocks that the engine's cache holds be evicted first; unknown keys are ignored."""

    def engine_dropped(self, keys: Sequence[OffloadKey]) -> int:
        """Process blocks that have left the engine's cache; return how many the primary tier lacks.

        Held ones become the most recent blocks, and are evicted first no more.
        """
        return 0

    def lacked(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """Return those of ``keys`` that the primary tier lacks; the call changes nothing. The default: all."""
        return keys

    def take_wanted(self) -> Sequence[OffloadKey]:
        """Return blocks that tiers want and that the primary tier lacks, each once.

        The engine's cache may hold them. They are stored as by :meth:`prepare_late_store`, with the context
        :data:`~tiering.api.request.WANTED_STORE`.
        """
        return ()

    def prepare_late_store(self, keys: Sequence[OffloadKey]) -> PrepareStoreOutput | None:
        """Reserve rows for blocks that are about to leave the engine's cache, as :meth:`prepare_store` does.

        Held blocks become the most recent ones, and are evicted first no more. No use is counted, and no tier is
        offered the blocks. The store ends with :meth:`complete_store` and the context
        :data:`~tiering.api.request.LATE_STORE`.

        Args:
            keys: the blocks, the one that leaves the cache last in front; it becomes the most recent.
        """
        return None

    def count_sources(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Mapping[str, int]:
        """Return the number of ``keys`` promoted for this request, by medium ("DISK", "OBJECT", ...).

        The call changes nothing.
        """
        return {}

    def count_tiers(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Mapping[str, int]:
        """Return the number of ``keys`` promoted for this request, by name of the tier."""
        return {}

    @property
    def gates_loads(self) -> bool:
        """True if the manager chooses between loading and computing, by :meth:`note_compute`; default False."""
        return False

    def note_compute(self, seconds: Sequence[float], *, others: float = 0.0, is_assumed: bool = False) -> None:
        """Note how long the engine takes to compute one block of each KV-cache group at present.

        Args:
            seconds: seconds of one block, by group: infinity for a group whose blocks are always loaded. Before the
                first call, all blocks are loaded.
            others: part by which other requests lengthen these seconds; default 0.
            is_assumed: True if nothing was measured yet. Requests that wait then follow the first measured seconds.
        """

    def measure_worth(self, req_context: ReqContext) -> None:
        """Let a request show what the loads from a tier save; the default does nothing.

        Sometimes, one tier is not asked for it. Call this method before the first lookup, and not for a request that
        has hints or limits.

        Args:
            req_context: the request, for which :meth:`note_first_token` follows unless the request ends before.
        """

    def note_scheduled(self, req_context: ReqContext) -> None:
        """Note that the step that is built now computes the rest of a request's prompt.

        The default does nothing.

        Args:
            req_context: the request, whose loads have ended, or end within the step.
        """

    def note_first_token(self, req_context: ReqContext, prefill_seconds: float) -> None:
        """Note that the first token of a request of :meth:`measure_worth` is there; the default does nothing.

        Args:
            req_context: the request.
            prefill_seconds: seconds that the engine took to compute its prompt, without those of other requests.
        """

    def lookup_outcome(self, key: OffloadKey, req_context: ReqContext) -> LookupOutcome | None:
        """Return why a request does not load the first block that it misses; None (default): not known.

        The call changes nothing.
        """
        return None

    def take_unstored(self) -> Sequence[Unstored]:
        """Return the blocks that secondary tiers did not take since the last call; the default has none."""
        return ()

    def cold_starts(self) -> Mapping[str, str]:
        """Return tier → what differs, of the tiers that have begun empty beside blocks of others.

        Any thread may call the method. The default has none.
        """
        return {}

    @abstractmethod
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Admit a request and return its policy.

        Called exactly once for each request, before any other call for that request.
        """

    def on_request_finished(
        self, req_context: ReqContext, released: Sequence[OffloadKey] = (), kept: Sequence[KeptBlocks] = ()
    ) -> None:
        """Release the state of a request. Called exactly once for each request, however the request ends.

        Args:
            req_context: the request.
            released: blocks that no session needs any more, in the order of a prefix; default: none. Every tier evicts
                them before all others, until they are used again.
            kept: blocks before which every tier evicts others for a time; default: none.
        """

    def promote_early(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Begin to promote what slower tiers hold of a prefix, before the engine looks its request up.

        Nothing waits for it. The default does nothing.

        Args:
            keys: the keys in the order of the prefix.
            req_context: the request; what was not begun when it ends is dropped.
        """

    def prefetch(
        self,
        keys: Sequence[OffloadKey],
        tenant: bytes,
        bytes_per_second: float,
        after: float = 0.0,
        *,
        has_holes: bool = False,
    ) -> None:
        """Begin to promote what slower tiers hold of some blocks, for no request; the default does nothing.

        Args:
            keys: the keys, in the order of a prefix.
            tenant: digest of the cache salt, whose prefetches the bound counts together.
            bytes_per_second: bytes per second that a tenant may prefetch.
            after: seconds until it begins, at the end of a step; default 0.
            has_holes: True to go on behind a block that no tier holds, as for the blocks of a session; default False.
        """

    @property
    def descriptions(self) -> TierDescriptions | None:
        """The part of a tier that keeps descriptions of its blocks; None (default): no tier keeps any."""
        return None

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events since the last call, in an order that a consumer can apply. Changes nothing else."""
        return ()

    def on_schedule_end(self) -> None:
        """End a step. Called once per step, also for steps without requests.

        If a new common epoch has begun on a shared medium, the manager drops all blocks here (:attr:`new_epochs`).
        """

    @property
    def new_epochs(self) -> int:
        """Number of times that the manager dropped all blocks because a new common epoch had begun.

        Changes only in :meth:`on_schedule_end`. The caller then treats its own blocks as after :meth:`reset_cache`.
        """
        return 0

    def has_pending_work(self) -> bool:
        """Return True while jobs are in flight whose end is expected; the engine must then keep stepping."""
        return False

    def reset_cache(self, revision: str | None = None) -> bool:
        """Drop all blocks: this process never again serves a block that was stored before the call.

        Blocks for a few milliseconds at most. On a shared medium, only this process changes its namespace; blocks of
        other engines stay.

        Args:
            revision: name of the weights from now on. All engines that give the same text share their blocks on shared
                media. Default None: only this process can load the blocks that it stores from now on.

        Returns:
            True if the reset also survives a restart. False if one of the tier's own media has not confirmed the reset
            yet; that tier serves no blocks until its medium has.
        """
        return True

    def get_stats(self) -> Mapping[str, Any]:
        """Return the counters since the start, as plain data."""
        return {}

    def shutdown(self) -> None:
        """Drain and release everything within a deadline. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.shutdown()
