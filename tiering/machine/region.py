"""Rows of one engine that the service has made, with the claim to them and the record of their blocks."""

from __future__ import annotations

import json
import os
import select
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tiering.api.keys import OffloadKey
from tiering.machine.messages import MAX_KEYS, Kind, MessageError, Record
from tiering.machine.peer_rows import HeldBlock, PeerRows
from tiering.machine.peers import Peer, Stamp
from tiering.primary.memory.region import MAX_SIDES, PAGE

_LONGEST_NAME = 4096
MOST_PROCESSES = 512
"""Largest number of living processes that have mapped one region; a further one gets other rows."""

_NEVER = 1
"""Word that no complete row has."""

LOOK_ROWS, MOST_CHANGED = 1 << 18, 1 << 12
"""Largest number of rows that one look compares, and of those that it finds changed."""

_LOOK_PART = 1 << 15
"""Rows that are compared at once: their words fit into a core's cache."""


@dataclass(frozen=True, slots=True)
class RowsClaim:
    """The text of a claim."""

    name: str
    """Name that all processes of the engine use."""
    alike: str
    """Digest of the words in which engines agree whose blocks may be equal."""
    rows: int
    """Number of rows."""
    stride: int
    """Bytes from one row to the next."""
    sides: int
    """Number of claims of the engine."""
    tiers: int
    """Number of tiers that the engine uses."""

    @classmethod
    def of(cls, text: bytes) -> RowsClaim:
        """Return the claim in the text of a record.

        Raises:
            MessageError: it is none, or a number is beyond a bound.
        """
        try:
            found = cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            raise MessageError(f"the claim cannot be read: {error}") from error
        numbers = (found.rows, found.stride, found.sides, found.tiers)
        if not all(type(word) is int and 0 < word < 1 << 40 for word in numbers) or found.sides > MAX_SIDES:
            raise MessageError("a number of the claim is beyond its bounds")
        if not all(type(word) is str and len(word) <= _LONGEST_NAME for word in (found.name, found.alike)):
            raise MessageError("a word of the claim has the wrong type or length")
        if found.stride % PAGE:
            raise MessageError("the rows of the claim do not begin on pages")
        return found


@dataclass(slots=True, eq=False)
class Region:
    """Rows of one engine, and the record of their blocks."""

    claim: RowsClaim
    """The last claim."""
    fd: int
    """Memory of the rows and a page; sealed against a change of its size."""
    words_fd: int
    """Memory of the words; sealed."""
    rows: NDArray[np.uint8]
    """The rows."""
    words: NDArray[np.uint64]
    """A word per row, which the engine changes."""
    file: tuple[int, int]
    """Device and inode of the rows' memory, by which the tiers' connections of its engine are found."""
    peers: list[Peer] = field(default_factory=list)
    """The open connections of the claims."""
    processes: dict[int, int] = field(default_factory=dict)
    """Descriptors of the processes that have mapped the rows and may live, with their numbers or 0."""
    unproved: bool = False
    """True if the kernel gives no descriptor of some process."""
    keeper: Peer | None = None
    """The connection that reports blocks; None before the first report."""
    left_at: float | None = None
    """Time at which the last connection has ended; None while one is open."""
    stamp: Stamp | None = None
    """Stamp of the recorded blocks; None if there are none."""
    entries: dict[int, HeldBlock] = field(default_factory=dict)
    """The recorded blocks by row, the most recent ones last."""
    peer_rows: PeerRows | None = None
    """The tier by which other engines find the recorded blocks; None if there is none."""
    recorded: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    """The word of each row that has a recorded block, as it was reported; an odd one for the others."""
    looked: int = 0
    """Row at which the next look begins."""
    era: int = 0
    """Number that changes whenever the record is emptied."""
    early: deque[Record] = field(default_factory=deque)
    """Reports that wait until all tiers have accepted the rows, and all are handed over."""
    pending: int = 0
    """Rows of these reports, and those whose digest is being computed."""
    offer: deque[int] | None = None
    """Rows to verify for the engine that has claimed the region; None: nothing is to be handed over."""
    verifying: int = 0
    """Pieces of work that verify rows at the moment."""

    def __post_init__(self) -> None:
        self.recorded = np.full(len(self.words), _NEVER, np.uint64)

    def empty(self) -> None:
        """Drop the record; the cost does not depend on the number of its blocks."""
        if self.peer_rows is not None:
            self.peer_rows.drop_all(self, self.entries)
        self.entries = {}
        self.recorded.fill(_NEVER)
        self.stamp = self.offer = self.peer_rows = None
        self.era += 1

    def drop_early(self) -> None:
        """Drop the reports of an engine that has ended."""
        while self.early:
            self.pending -= len(self.early.popleft().rows)

    def note(self, found: Sequence[tuple[int, HeldBlock]], peer_rows: PeerRows | None) -> None:
        """Record the blocks of some rows, and let other engines find them by ``peer_rows``."""
        self.forget([row for row, _ in found])
        self.peer_rows = peer_rows or self.peer_rows
        for row, block in found:
            self.entries[row] = block  # the most recent ones are the last
            self.recorded[row] = block.word
            if peer_rows is not None:
                peer_rows.note(self, row, block.key)

    def forget(self, rows: Sequence[int]) -> None:
        """Drop the record of some rows."""
        for row in rows:
            if (block := self.entries.pop(row, None)) is not None:
                self.recorded[row] = _NEVER
                if self.peer_rows is not None:
                    self.peer_rows.forget(self, row, block.key)

    def forget_changed(self) -> None:
        """Drop the record of rows whose content does not count any more, as far as one look finds them.

        Each look goes on where the one before ended.
        """
        if not self.entries:
            return
        rows, left = len(self.words), MOST_CHANGED
        for _ in range(0, min(LOOK_ROWS, rows), _LOOK_PART):
            first, end = self.looked, min(rows, self.looked + _LOOK_PART)
            recorded = self.recorded[first:end]
            changed = recorded != self.words[first:end]
            changed &= recorded & np.uint64(1) == 0
            found = (first + np.flatnonzero(changed)[:left]).tolist()
            self.forget(found)
            left -= len(found)
            if not left:
                self.looked = found[-1] + 1
                return
            self.looked = end if end < rows else 0

    def copied(self, keys: Sequence[OffloadKey]) -> None:
        """Send the engine the keys of blocks that another engine has got from its rows."""
        if self.keeper is not None and self.keeper in self.peers and not self.keeper.behind:
            for first in range(0, len(keys), MAX_KEYS):
                self.keeper.send(Record(Kind.COPIED, keys=keys[first : first + MAX_KEYS]))

    def takes(self, claim: RowsClaim) -> bool:
        """Return True if a process with this claim may map the rows beside those that have mapped them."""
        is_open = self.peers and len(self.peers) < claim.sides
        return bool(is_open and self.claim == claim and len(self.processes) < min(2 * claim.sides, MOST_PROCESSES))

    def add_process(self, peer: Peer) -> None:
        """Note that the process of a connection maps the rows; one descriptor per process is kept."""
        self._drop_dead()
        self.unproved |= peer.pidfd < 0
        if peer.pidfd >= 0 and not (peer.pid and peer.pid in self.processes.values()):
            self.processes[os.dup(peer.pidfd)] = peer.pid

    def drop_processes(self) -> None:
        """Close all descriptors of processes."""
        while self.processes:
            os.close(self.processes.popitem()[0])

    def _drop_dead(self) -> None:
        for pidfd in [*filter(_is_dead, self.processes)]:
            del self.processes[pidfd]
            os.close(pidfd)

    def is_left(self) -> bool:
        """Return True if all processes that have mapped the rows are dead."""
        if self.peers or self.unproved:
            return False
        self._drop_dead()
        return not self.processes

    def is_reported(self) -> bool:
        """Return True if the process that reports blocks lives.

        The rows have had the reported bytes so far: processes that survive it may write without changing the words.
        """
        return self.keeper is not None and self.keeper.pidfd >= 0 and not _is_dead(self.keeper.pidfd)


def _is_dead(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
