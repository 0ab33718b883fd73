"""Rows that outlive engines, which the service makes and hands to the next engine.

A region's life::

                claim             all connections end        all processes dead, and a claim that is alike
    (none) ---------------> in use ----------------------> left ------------------------------------------> in use
                               ^ claims of other                 |
                               | processes by this name          | a process lives on, or no claim comes in time
                                                                 v
                                                              closed

An engine reports which rows hold which blocks. A digest of each is computed here, and counts if the row's word is even
and the same before and after. The next engine gets a row only if the word is still that one and the digest fits. The
record also has a stamp: weights and generations of the namespace's tiers. Rows of another stamp never count.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from tiering.api.keys import GROUP_BYTES, OffloadKey
from tiering.api.units import format_bytes
from tiering.errors import ConfigError, RegionError
from tiering.machine.claim import WORD_BYTES
from tiering.machine.messages import Kind, MessageError, Record
from tiering.machine.options import PEERS_TIER
from tiering.machine.peer_rows import HeldBlock, PeerRows
from tiering.machine.peers import Peer, present_stamp, stamp_of
from tiering.machine.region import Region, RowsClaim
from tiering.machine.rows import check_rows
from tiering.primary.memory.filelock import try_lock, unlock
from tiering.primary.memory.region import PAGE, make_sealed
from tiering.primary.memory.room import available_bytes
from tiering.runtime.pool import ThreadPool

_log = logging.getLogger("kv_tiering.machine")

MOST_REGIONS = 64
"""Largest number of regions of all users, in use or left."""

LEAVE_SECONDS = 10.0
"""Seconds within which the processes of an engine must end after it has left its rows."""

MOST_PENDING = 1 << 16
"""Rows of one region that wait for their digest, beyond which reports are dropped; or all of its rows."""

PART = 64
"""Rows whose digests are computed in one piece of work."""

PARTS_AHEAD = 4
"""Pieces of work of one region that run at the same time before it is handed over."""

LOOK_SECONDS = 0.1
"""Seconds between two looks for rows that their engines have used for other blocks."""

_Found = list[tuple[int, HeldBlock]]


class Regions:
    """The regions of a service; its thread calls all methods.

    Args:
        pool: threads that compute digests.
        wake: function that wakes the service's thread, from any thread.
        clock: function that returns monotonic seconds.
        most_bytes: largest number of bytes of the rows of one engine.
        keep_seconds: seconds for which the rows of an engine that has ended wait for the next one.
        peers: all connections of the service.
        most: largest number of regions.
    """

    def __init__(
        self,
        pool: ThreadPool,
        wake: Callable[[], None],
        clock: Callable[[], float],
        most_bytes: int,
        keep_seconds: float,
        peers: Mapping[int, Peer],
        most: int = MOST_REGIONS,
    ) -> None:
        self._pool = pool
        self._wake = wake
        self._clock = clock
        self._most_bytes = most_bytes
        self._keep_seconds = keep_seconds
        self._peers = peers
        self._most = most
        self._regions: list[Region] = []
        self._named: dict[str, Region] = {}
        self._of: dict[Peer, Region] = {}
        self._done: deque[tuple[Region, int, bool, int, _Found]] = deque()
        self._look_due = 0.0
        self.handed_over = 0
        """Number of rows that later engines were given."""

    def __contains__(self, peer: Peer) -> bool:
        """Return True if rows are claimed over this connection."""
        return peer in self._of

    def __len__(self) -> int:
        return len(self._regions)

    @property
    def left(self) -> int:
        """Number of regions whose engine has ended."""
        return sum(region.left_at is not None for region in self._regions)

    def counts(self) -> dict[str, int]:
        """Return the counts of :class:`~tiering.machine.counts.ServiceCounts` that concern regions."""
        return {
            "service_kept_regions": len(self),
            "service_left_regions": self.left,
            "service_kept_bytes": sum(region.claim.rows * region.claim.stride for region in self._regions),
            "service_kept_blocks": sum(len(region.entries) for region in self._regions),
            "service_inherited_blocks": self.handed_over,
        }

    def claim(self, peer: Peer, text: bytes) -> tuple[int, int]:
        """Return the descriptors of rows and words for a process that claims rows.

        Raises:
            TieringError: there is no room, or the claim breaks the protocol.
        """
        claim = self._checked(text)
        region = self._named.get(claim.name)
        if region is None or not region.takes(claim):
            region = self._named[claim.name] = self._free(claim) or self._make(claim)
        region.add_process(peer)
        self._take_in(peer, region)
        return region.fd, region.words_fd

    def show(self, peer: Peer, text: bytes, fds: Sequence[int]) -> None:
        """Let engines find the blocks in rows that an earlier service has made.

        No later engine gets these rows. Processes that have mapped them may be unknown here, so that nothing proves
        their death. A load needs no such proof: it compares words and digest.

        Args:
            peer: the connection of the process that reports blocks.
            text: text of the claim.
            fds: descriptors of rows and words, which the caller closes.

        Raises:
            TieringError: the rows are shown already, or break the protocol.
        """
        claim = self._checked(text)
        if len(fds) != 2 or len(self._regions) >= self._most:
            raise MessageError(f"rows were shown with {len(fds)} descriptors, beside {len(self._regions)} others")
        sizes = claim.rows * claim.stride, claim.rows * WORD_BYTES
        for fd, nbytes in zip(fds, sizes, strict=True):
            check_rows(fd, nbytes, sealed=True)
        found = os.fstat(fds[0])
        file = found.st_dev, found.st_ino
        if any(region.file == file for region in self._regions):
            raise MessageError("rows were shown that the service has already")
        maps = [mmap.mmap(fd, nbytes, prot=mmap.PROT_READ) for fd, nbytes in zip(fds, sizes, strict=True)]
        rows = np.frombuffer(maps[0], np.uint8).reshape(claim.rows, claim.stride)
        words = np.frombuffer(maps[1], np.uint64)
        region = Region(claim, os.dup(fds[0]), os.dup(fds[1]), rows, words, file, unproved=True)
        self._regions.append(region)
        self._take_in(peer, region)

    def _take_in(self, peer: Peer, region: Region) -> None:
        region.peers.append(peer)
        region.left_at = None
        self._of[peer] = region

    def _checked(self, text: bytes) -> RowsClaim:
        """Return the claim in a text.

        Raises:
            TieringError: it breaks the protocol, or its rows are too large.
        """
        claim = RowsClaim.of(text)
        if (nbytes := claim.rows * claim.stride) > self._most_bytes:
            raise ConfigError(
                f"the engine's CPU tier has {format_bytes(nbytes)}, and primary.capacity in the service's stack "
                f"allows {format_bytes(self._most_bytes)}; raise it there"
            )
        return claim

    def _free(self, claim: RowsClaim) -> Region | None:
        """Return a region that an engine like this one has left, without its traces; None if there is none."""
        shape = (claim.alike, claim.rows, claim.stride)
        for region in self._regions:
            old = region.claim
            if (old.alike, old.rows, old.stride) == shape and self._is_free(region):
                self._unname(region)
                region.drop_processes()
                region.claim, region.keeper = claim, None
                os.pwrite(region.fd, bytes(PAGE), claim.rows * claim.stride)
                region.offer = deque(reversed(region.entries)) if region.entries else None
                _log.info("rows of an engine that has ended go to the next; %d are recorded", len(region.entries))
                return region
        return None

    def _is_free(self, region: Region) -> bool:
        """Return True if nothing touches the rows any more: no process, and no job of a tier of the service."""
        if not region.is_left() or any(peer.file == region.file for peer in self._peers.values()):
            return False
        if not try_lock(region.fd, 0, 0):
            return False  # a child that a process forked has the rows, and would keep the next engine from joining them
        unlock(region.fd, 0, 0)
        return True

    def _make(self, claim: RowsClaim) -> Region:
        nbytes = claim.rows * claim.stride
        for region in list(self._regions):
            # The machine need not have room for rows of another capacity too, nor for those of other models.
            is_short = (available_bytes() or nbytes) < nbytes
            if (region.claim.alike == claim.alike or is_short) and self._is_free(region):
                self._close(region, at_once=True)
        if len(self._regions) >= self._most:
            raise RegionError(f"the service has {self._most} regions of rows of this user already")
        fds: list[int] = []
        try:
            fds.append(make_sealed("kv-tiering-kept", nbytes + PAGE))
            fds.append(make_sealed("kv-tiering-kept", claim.rows * WORD_BYTES))
            rows = np.frombuffer(mmap.mmap(fds[0], nbytes), np.uint8).reshape(claim.rows, claim.stride)
            words = np.frombuffer(mmap.mmap(fds[1], claim.rows * WORD_BYTES, prot=mmap.PROT_READ), np.uint64)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        found = os.fstat(fds[0])
        region = Region(claim, fds[0], fds[1], rows, words, (found.st_dev, found.st_ino))
        self._regions.append(region)
        return region

    def leave(self, peer: Peer) -> None:
        """End the claim of a process, which may live on."""
        region = self._of.pop(peer, None)
        if region is not None:
            region.peers.remove(peer)
            if not region.peers:
                region.left_at, region.offer = self._clock(), None
                region.drop_early()

    def step(self) -> None:
        """Take digests, hand rows over, and close regions that no engine has claimed in time."""
        while self._done:
            region, era, verified, number, found = self._done.popleft()
            if verified:
                region.verifying -= 1
            else:
                region.pending -= number
            if era != region.era:
                continue
            if verified:
                self._hand_over(region, found)
            elif region.is_reported():
                region.note(found, _peer_rows(region))
        for region in self._regions:
            if region.early:
                with suppress(MessageError):
                    self._record(region)
        now = self._clock()
        if now >= self._look_due:
            self._look_due = now + LOOK_SECONDS
            for region in self._regions:
                region.forget_changed()
        for region in list(self._regions):
            if region.offer is not None:
                self._verify(region)
            if region.left_at is None or now < region.left_at + min(LEAVE_SECONDS, self._keep_seconds):
                continue
            if now >= region.left_at + self._keep_seconds or not self._is_free(region):
                self._close(region)

    def close(self) -> None:
        """Close all regions; engines that have mapped one keep it."""
        for region in list(self._regions):
            self._close(region, at_once=True)

    def _close(self, region: Region, *, at_once: bool = False) -> None:
        """Free the rows, in another thread if it may: the kernel takes seconds for tens of GiB."""
        region.empty()
        self._regions.remove(region)
        self._unname(region)
        region.drop_processes()
        held: list[object] = [region.rows, region.words]
        region.rows, region.words = np.empty((0, PAGE), np.uint8), np.empty(0, np.uint64)
        handles = region.fd, region.words_fd

        def free() -> None:
            held.clear()
            for handle in handles:
                os.close(handle)

        if at_once:  # the next rows need the room
            free()
        else:
            self._pool.run(free, lambda _: free())

    def _unname(self, region: Region) -> None:
        """Take the name of its engine from a region; a later one may have it by now."""
        if self._named.get(region.claim.name) is region:
            del self._named[region.claim.name]

    def take(self, peer: Peer, record: Record) -> None:
        """Record the blocks in some rows, once their digests are known.

        Raises:
            MessageError: the record breaks the protocol.
        """
        region = self._of[peer]
        if record.kind != Kind.HELD:
            raise MessageError(f"an engine sent a record of kind {record.kind} about its rows")
        region.keeper = region.keeper or peer
        if region.keeper is not peer:
            raise MessageError("two processes of an engine report its rows")
        if not record.keys:
            return
        rows = record.rows
        text = WORD_BYTES * len(rows)
        if not rows or max(rows) >= region.claim.rows or len({*rows}) < len(rows) or len(record.text) < text:
            raise MessageError("a report has rows beyond those of its engine, one row twice, or none")
        if region.pending + len(rows) <= max(MOST_PENDING, region.claim.rows):
            region.pending += len(rows)
            region.early.append(record)
            self._record(region)

    def _record(self, region: Region) -> None:
        """Begin with the digests of reported blocks, once all tiers have accepted the rows.

        An engine's consent to a new epoch comes over the connections of its tiers, its report over another one, and
        the engine reports each block once. A row that was taken meanwhile has another word.

        Raises:
            MessageError: a report has keys of unknown groups, and is dropped.
        """
        stamp = stamp_of(self._peers, region.file, region.claim.tiers)
        if stamp is None or region.offer is not None:
            return
        groups, stride = stamp[0].groups, stamp[0].rows.stride
        if stamp != region.stamp:
            region.empty()
            region.stamp = stamp
        while region.early:
            record = region.early.popleft()
            rows = record.rows
            region.pending -= len(rows)
            if stride != region.claim.stride or any(_group(key) >= len(groups) for key in record.keys):
                raise MessageError("a report has keys of unknown groups")
            if stamp[1].encode() == record.text[WORD_BYTES * len(rows) :]:
                region.pending += len(rows)
                words = np.frombuffer(record.text, np.uint64, len(rows)).tolist()
                held = list(zip(rows, record.keys, words, strict=True))
                for first in range(0, len(held), PART):
                    self._compute(region, groups, held[first : first + PART])

    def _compute(self, region: Region, groups: tuple[int, ...], held: Sequence[tuple[int, OffloadKey, int]]) -> None:
        """Compute the digests of rows, without which a report does not count."""
        era, memory, words = region.era, region.rows, region.words

        def done(found: _Found) -> None:
            self._done.append((region, era, False, len(held), found))
            self._wake()

        self._pool.run(lambda: done(_digests(memory, words, groups, held)), lambda _: done([]))

    def _verify(self, region: Region) -> None:
        """Verify further rows for the engine that has claimed the region."""
        stamp = stamp_of(self._peers, region.file, region.claim.tiers)
        if stamp is None or region.keeper is None or region.offer is None:
            return
        if stamp != region.stamp:
            region.empty()
            return
        groups = stamp[0].groups
        while region.offer and region.verifying < PARTS_AHEAD and not region.keeper.behind:
            rows = [region.offer.popleft() for _ in range(min(PART, len(region.offer)))]
            entries = [(row, region.entries[row]) for row in rows if row in region.entries]
            self._check(region, groups, entries)
        if not region.offer and not region.verifying:
            region.offer = None

    def _check(self, region: Region, groups: tuple[int, ...], entries: _Found) -> None:
        era, memory, words = region.era, region.rows, region.words
        region.verifying += 1

        def done(found: _Found) -> None:
            self._done.append((region, era, True, len(entries), found))
            self._wake()

        def work() -> None:
            held = [(row, entry.key, entry.word) for row, entry in entries]
            good = dict(_digests(memory, words, groups, held))
            done([(row, entry) for row, entry in entries if row in good and good[row].digest == entry.digest])

        self._pool.run(work, lambda _: done([]))

    def _hand_over(self, region: Region, found: _Found) -> None:
        """Send verified rows to the engine."""
        if region.keeper is not None and found:
            text = np.array([entry.word for _, entry in found], np.uint64).tobytes()
            keys, rows = [entry.key for _, entry in found], [row for row, _ in found]
            region.keeper.send(Record(Kind.KEPT, text=text, keys=keys, rows=rows))
            self.handed_over += len(found)


def _peer_rows(region: Region) -> PeerRows | None:
    """Return the tier by which other engines may find the blocks of a region; None if there is none."""
    if region.stamp is None or (hosted := region.stamp[0].tiers.get(PEERS_TIER)) is None:
        return None
    is_present = region.stamp == present_stamp(region.stamp[0], hosted.weights)
    return hosted.tier if is_present and isinstance(hosted.tier, PeerRows) else None


def _group(key: OffloadKey) -> int:
    return int.from_bytes(key[-GROUP_BYTES:], "big")


def _digests(
    memory: NDArray[np.uint8],
    words: NDArray[np.uint64],
    groups: tuple[int, ...],
    held: Sequence[tuple[int, OffloadKey, int]],
) -> _Found:
    """Return the entries of those rows that were complete and have not changed meanwhile."""
    found: _Found = []
    for row, key, word in held:
        if word % 2 == 0 and int(words[row]) == word:
            digest = xxh3_128_digest(memory[row, : groups[_group(key)]].data)
            if int(words[row]) == word:
                found.append((row, HeldBlock(key, word, digest)))
    return found
