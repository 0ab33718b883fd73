"""Agreement of the tiers of one manager on the common epochs of shared media.

A new common epoch says that no block stored before is ever served again. Such a block may survive on a machine that
did not notice: on a disk while its engine was off, or in the rows while the medium could not be reached. Each tier with
a medium of its own therefore records the common epochs in which its blocks were stored. Before a shared tier enters a
common epoch, it asks here if all blocks of the machine belong to that epoch. If not, the manager drops them first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
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
    """Identifier of the epoch."""
    never_moved: bool = False
    """True if the epoch is the first one of its namespace; default False.

    No block was ever invalidated then.
    """


class EpochParty(Protocol):
    """A holder of blocks that may be older than a common epoch."""

    def compare(self, medium: bytes, met: MetEpoch) -> bool | None:
        """Return True if all blocks were stored in ``met``, False if some may be older, None if none can be."""


class EpochAgreement:
    """The common epochs that the tiers of one manager have met; owned by the scheduler's thread.

    All tiers of a manager share one instance.
    """

    __slots__ = ("_parties", "in_use", "met")

    def __init__(self) -> None:
        self.met: Mapping[bytes, MetEpoch] = {}
        """The common epochs by medium. The mapping is replaced and never changed, so any thread may read it."""
        self.in_use: Callable[[], bool] = lambda: False
        """Function that returns True once the manager may hold blocks; default: the manager holds none."""
        self._parties: list[EpochParty] = []

    def join(self, party: EpochParty) -> None:
        """Ask ``party`` from now on before a common epoch is entered."""
        self._parties.append(party)

    def meet(self, name: str, met: MetEpoch) -> bool:
        """Return True if a shared tier may enter the common epoch ``met``: no block of the machine is older.

        Args:
            name: name of the shared tier.
            met: the common epoch that the tier has found on its medium.
        """
        medium = medium_id(name)
        known = self.met.get(medium)
        if known is not None:
            return known.epoch == met.epoch
        answers = [party.compare(medium, met) for party in self._parties]
        if False in answers:
            return False
        # A disk that recorded this epoch at an earlier start proves that it has not moved since. Without such a record,
        # the blocks of this process may be older than the epoch.
        if self.in_use() and True not in answers and not met.never_moved:
            return False
        self.enter(name, met)
        return True

    def enter(self, name: str, met: MetEpoch) -> None:
        """Record that a shared tier enters ``met``: no block is older, or the older ones are being dropped."""
        self.met = {**self.met, medium_id(name): met}
