"""Agreement of the tiers of one manager on the common epochs of shared media.

A new common epoch says that no block stored before is ever served again. Such a block may survive on a machine that
did not notice: on a disk while its engine was off, in the rows while the medium could not be reached, or on another
shared medium. Each new epoch is therefore an invalidation with an identifier, the same on all media. A shared medium is
not used while it lacks an invalidation that the stack knows, and a disk records the invalidations that its blocks are
younger than. Before a shared tier enters a common epoch, it asks here if all blocks of the machine are young enough. If
not, the manager drops them first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

MEDIUM_BYTES = 16
"""Length of a medium's identifier in bytes."""


def medium_id(name: str) -> bytes:
    """Return the identifier under which the common epochs of the tier called ``name`` are recorded."""
    return hashlib.sha256(name.encode(errors="surrogatepass")).digest()[:MEDIUM_BYTES]


@dataclass(frozen=True, slots=True)
class MetEpoch:
    """A common epoch that a shared tier of this process has found on its medium."""

    epoch: bytes
    invalidations: tuple[bytes, ...] = ()
    """The invalidations that all blocks of the epoch are younger than; default: none.

    Without any, no block of the medium was ever invalidated.
    """
    history: Collection[bytes] = ()
    """All epochs that the medium has had; default: none is known."""
    durable: bool = False
    """True if the medium keeps its documents over a restart; default False."""
    unexplained: bool = False
    """True if the medium has lost documents that this process may not have known; default False."""


class EpochParty(Protocol):
    """A tier, as the other tiers of the manager ask and tell it about common epochs."""

    def compare(self, medium: bytes, met: MetEpoch) -> bool | None:
        """Return True if all blocks were stored in ``met``, False if some may be older, None if none can be."""

    def invalidated(self, *, dropped: bool) -> None:
        """React to an invalidation that the tiers of the manager did not know before.

        Args:
            dropped: True if the manager is dropping all older blocks at this moment.
        """


class EpochAgreement:
    """The common epochs that the tiers of one manager have met; owned by the scheduler's thread.

    All tiers of a manager share one instance.
    """

    __slots__ = ("_parties", "cold_starts", "emptied", "in_use", "known", "met")

    def __init__(self) -> None:
        self.met: Mapping[bytes, MetEpoch] = {}
        """The common epochs by medium. The mapping is replaced and never changed, so any thread may read it."""
        self.known: tuple[bytes, ...] = ()
        """All invalidations that a tier has found, oldest first; replaced and never changed."""
        self.in_use = False
        """True once a request has begun, so that the manager may hold blocks."""
        self.emptied: tuple[str, int] | None = None
        """Instance of a service, and a generation of its tiers: the rows were emptied after that began."""
        self.cold_starts: dict[str, str] = {}
        """Tier → what differs in the nearest blocks of others as it began empty; any thread may add one."""
        self._parties: list[EpochParty] = []

    def join(self, party: EpochParty) -> None:
        """Ask ``party`` from now on before a common epoch is entered, and tell it about invalidations."""
        self._parties.append(party)

    def vouched(self, name: str) -> bool:
        """Return True if another medium, which is durable, has all invalidations that the stack's media had.

        Any thread may call this method.
        """
        own = medium_id(name)
        return any(met.durable for medium, met in self.met.items() if medium != own)

    def admits(self, name: str, met: MetEpoch) -> bool:
        """Return True if a shared tier may enter the common epoch ``met``: no block of the machine is older.

        Args:
            name: name of the shared tier.
            met: the common epoch that the tier has found on its medium.
        """
        medium = medium_id(name)
        news = not set(met.invalidations).issubset(self.known)
        if medium in self.met:
            return not news and not met.unexplained
        answers = [party.compare(medium, met) for party in self._parties]
        if False in answers:
            return False
        # A disk that recorded this epoch at an earlier start proves that it has not moved since. Without such a record,
        # the blocks of this process may be older than the epoch.
        return not (self.in_use and True not in answers and (news or met.unexplained))

    def enter(self, name: str, met: MetEpoch, *, dropped: bool = False) -> None:
        """Record that a shared tier enters ``met``: no block is older, or the older ones are being dropped.

        Args:
            name: name of the shared tier.
            met: the common epoch.
            dropped: True if the manager is dropping all older blocks at this moment; default: False.
        """
        self.met = {**self.met, medium_id(name): met}
        self.learn(met.invalidations, dropped=dropped)

    def learn(self, invalidations: Iterable[bytes], *, dropped: bool = False) -> None:
        """Make all tiers leave blocks that may be older than one of ``invalidations``.

        Args:
            invalidations: invalidations that a tier has found.
            dropped: True if the manager is dropping all older blocks at this moment; default: False.
        """
        known = tuple(dict.fromkeys((*self.known, *invalidations)))
        if len(known) > len(self.known):
            self.known = known
            for party in self._parties:
                party.invalidated(dropped=dropped)
