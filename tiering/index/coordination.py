"""Contract of coordination: notices between the machines of a fleet about one shared medium.

Every notice is a hint. A block is served only after it was loaded and verified; a wrong hint costs requests. While
coordination does not answer, the tier works as without it, and nothing waits for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tiering.api.keys import OffloadKey
from tiering.medium.block_store import Place, StoreProbe

CLAIM_SECONDS = 0.1
"""Seconds for which a store waits at most for the answer to its claim before it begins without."""


@dataclass(slots=True, eq=False)
class Claim:
    """A claim to upload blocks, so that no other machine uploads them at the same time."""

    places: Sequence[Place]
    """Places of the blocks."""
    granted: Sequence[bool] | None = None
    """True for each block that this machine shall upload; None (default): no answer yet.

    Any thread may set it.
    """
    dropped: set[Place] = field(default_factory=set)
    """Places whose blocks will not be uploaded. The scheduler's thread adds to it.

    A thread that grants one of them releases that claim; the thread sets ``granted`` before it looks.
    """


class Heard(NamedTuple):
    """The notices of other machines that concern this one."""

    stored: Sequence[OffloadKey]
    """Watched blocks that another machine has stored."""
    touched: Sequence[OffloadKey]
    """Declined blocks that another machine has declined before: this was their second touch in the fleet."""


class Coordination(ABC):
    """Coordination of the machines that share one medium.

    The scheduler's thread calls all methods but :meth:`ask`, which I/O threads call. None but :meth:`ask` and
    :meth:`close` may block, and no method raises because of the service.
    """

    @property
    @abstractmethod
    def ready(self) -> bool:
        """True while the service answers."""

    @property
    @abstractmethod
    def lapse_seconds(self) -> float:
        """Seconds after which the claim of a machine that has died is open to others."""

    @abstractmethod
    def enter(self, place_prefix: str) -> None:
        """Coordinate the blocks below ``place_prefix`` (a namespace and epoch) from now on, and no others."""

    @abstractmethod
    def leave(self) -> None:
        """Coordinate no new blocks until :meth:`enter`; queued notices are still sent."""

    @abstractmethod
    def ask(self, probe: Callable[[Sequence[Place]], StoreProbe], places: Sequence[Place]) -> StoreProbe:
        """Return which of ``places`` hold a block, from the service or, in doubt, from the medium.

        Args:
            probe: looks at the medium.
            places: places of blocks.
        """

    @abstractmethod
    def claim(self, claim: Claim) -> None:
        """Claim the upload of blocks; the claim is answered later, or never."""

    @abstractmethod
    def stored(self, places: Sequence[Place]) -> None:
        """Notify the fleet that ``places`` hold blocks now."""

    @abstractmethod
    def released(self, places: Sequence[Place]) -> None:
        """Release claims on blocks that are not uploaded after all."""

    @abstractmethod
    def watch(self, keys: Sequence[OffloadKey], places: Sequence[Place]) -> None:
        """Report in :meth:`take` if another machine stores one of these blocks."""

    @abstractmethod
    def declined(self, keys: Sequence[OffloadKey], places: Sequence[Place]) -> None:
        """Count a touch of blocks that admission has declined; :meth:`take` reports second touches."""

    @abstractmethod
    def take(self) -> Heard | None:
        """Return the notices since the last call; None if there are none."""

    @abstractmethod
    def close(self, timeout: float) -> bool:
        """End all threads within ``timeout`` seconds, and return True if none runs."""


@dataclass(slots=True)
class Inbox:
    """Notices for the scheduler's thread, which other threads add."""

    stored: deque[OffloadKey] = field(default_factory=deque)
    """Watched blocks that were stored."""
    touched: deque[OffloadKey] = field(default_factory=deque)
    """Declined blocks at their second touch."""

    def take(self) -> Heard | None:
        """Return the notices so far; None if there are none."""
        if not self.stored and not self.touched:
            return None
        return Heard(_drain(self.stored), _drain(self.touched))

    def clear(self) -> None:
        """Drop all notices."""
        self.stored.clear()
        self.touched.clear()


def _drain(notices: deque[OffloadKey]) -> list[OffloadKey]:
    return [notices.popleft() for _ in range(len(notices))]
