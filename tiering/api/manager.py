"""The contract of offloading managers, and the values that they answer with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Self

if TYPE_CHECKING:
    from types import TracebackType
from tiering.api.keys import OffloadKey
from tiering.api.request import ReqContext, RequestOffloadingContext
from tiering.api.transfer import BlockIDsLoadStoreSpec, LoadStoreSpec


class PrefixMatch(NamedTuple):
    """Answer of :meth:`OffloadingManager.match_prefix`.

    ``hits``: how many leading keys are held.  ``pending``: the answer may still change (one of those is not readable
    yet, or the first key after them is undecided).
    """

    hits: int
    pending: bool


@dataclass(frozen=True, slots=True)
class PrepareStoreOutput:
    """What to store, and where.  ``store_spec`` is co-indexed with ``keys_to_store``."""

    keys_to_store: list[OffloadKey]
    store_spec: BlockIDsLoadStoreSpec
    evicted_keys: list[OffloadKey]


MEDIUM_CPU = "CPU"
"""The medium of host memory in events."""

MEDIUM_STORAGE = "STORAGE"
"""The medium of everything slower than host memory in events."""

LOCAL = "LOCAL"
"""Locality in events of a medium that only this machine reaches."""

REMOTE = "REMOTE"
"""Locality in events of a medium that other machines reach as well."""

_event_orders = count()


@dataclass(frozen=True, slots=True)
class OffloadingEvent:
    """Blocks became readable in a tier (``removed`` False) or are gone from it (True).

    Make an event when its blocks come or go: all events of a process are ordered by their making.
    """

    keys: list[OffloadKey]
    """The blocks."""
    medium: str
    """:data:`MEDIUM_CPU` or :data:`MEDIUM_STORAGE`; engines and routers know no other words."""
    locality: str
    """:data:`LOCAL` or :data:`REMOTE`."""
    tier: str
    """The tier's name; :data:`PRIMARY_TIER` for the primary one."""
    removed: bool
    """True if the blocks are gone."""
    order: int = field(default_factory=_event_orders.__next__, compare=False, repr=False)
    """Position of this event among all events of the process."""


class OffloadingManager(ABC):
    """Keeps track of offloaded blocks.  Runs in the scheduler process, on the scheduler's thread.

    Nothing blocks, but :meth:`reset_cache` and :meth:`shutdown`, up to a deadline.  Reference count of a row: -1 being
    written (not readable, not evictable), 0 readable and evictable, n > 0 n readers.  Keys are unique within a call.
    """

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """True: readable in the primary tier now.  False: not held anywhere, or cannot be brought in.

        None: ask again later (being written, being promoted, or a tier does not know yet).
        """

    def match_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext, *, at_least: int = 1) -> PrefixMatch:
        """The batch form of :meth:`lookup`, with the same meaning: how many leading keys are held, and whether that may change.

        ``at_least``: fewer hits are of no use to the caller: nothing need be brought in or waited for that would not
        make as many.
        """
        pending = False
        for hits, key in enumerate(keys):
            answer = self.lookup(key, req_context)
            if answer is False:
                return PrefixMatch(hits, pending and hits >= at_least)
            pending = pending or answer is None
        return PrefixMatch(len(keys), pending)

    @abstractmethod
    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Protect ``keys`` from eviction until :meth:`complete_load` and say where they are.

        Raises :class:`tiering.errors.NotReadableError`, with nothing pinned, unless all are readable.
        """

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """Mark ``keys``, a prefix in its order, as recently used, the head more recently than the tail.

        Also for blocks that the accelerator already has; unknown keys are ignored.
        """

    def complete_load(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        """End the protection that :meth:`prepare_load` gave.  Unknown keys are ignored and counted."""

    @abstractmethod
    def prepare_store(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Take a row for each of ``keys`` that is not held yet.  All or nothing: None, and nothing changed, if there is no room.

        A key of this call that is already held is never evicted to make room for it.
        """

    def complete_store(self, keys: Sequence[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """Make what was stored readable; or, without success, free what was still being written.

        Keys that were readable before stay so.  Unknown keys (a reset came between) are ignored and counted.
        """

    def count_sources(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Mapping[str, int]:
        """Of ``keys``, how many were brought in from elsewhere for this request, by medium ("DISK", "OBJECT", ...).  Changes nothing."""
        return {}

    @abstractmethod
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Called exactly once for each request, before any other call for it."""

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Called exactly once for each request, when it ends for whatever reason."""

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Hand out the events since the last call, in an order that a consumer can apply.  Changes nothing else."""
        return ()

    def on_schedule_end(self) -> None:
        """The end of a step; called once per step, also without requests."""

    def has_pending_work(self) -> bool:
        """True while jobs are in flight: the engine must keep stepping."""
        return False

    def reset_cache(self, revision: str | None = None) -> bool:
        """Forget everything: this process never serves again what was stored before.  Waits for a few milliseconds at most.

        True if that is certain also after a restart.  False if a medium of our own could not confirm it yet: its tier
        serves nothing until it has.  On a medium that is shared, only this process moves, and nothing that others
        stored is removed. ``revision`` names the weights from now on: all engines that give the same text share their
        blocks on shared media.  Without it (the default) what is stored from now on is for this process alone.
        """
        return True

    def get_stats(self) -> Mapping[str, Any]:
        """What happened since the start, as plain data."""
        return {}

    def shutdown(self) -> None:
        """Drain and release everything, within a deadline.  May be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.shutdown()
