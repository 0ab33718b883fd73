"""State of coordination in one namespace and epoch: notices to be sent, and notices that have arrived."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tiering.tier import OffloadKey, Place
from tiers.coordination.directory import Directory, cut, digests_of
from tiers.valkey.client import ValkeyClient, Word

MAX_UNSENT = 1 << 16
"""Maximum number of stored blocks that wait to be announced, and of watched blocks.

Beyond the bound, the oldest is dropped.
"""

MAX_BATCH = 128
"""Maximum number of blocks in one command; the server runs one command at a time."""

SETTLE_SECONDS = 5.0
"""Seconds that another machine may take to announce a block that it has uploaded."""

_MAX_CLAIMS = 16


@dataclass(slots=True, eq=False)
class Claim:
    """A claim to upload blocks, so that no other machine uploads them at the same time."""

    places: Sequence[Place]
    granted: Sequence[bool] | None = None
    """True for each block that this machine shall upload; None (default): no answer yet.

    Any thread may set it.
    """
    dropped: set[Place] = field(default_factory=set)
    """Places whose blocks will not be uploaded. The scheduler's thread adds to it.

    A thread that grants one of them releases that claim; the thread sets ``granted`` before it looks.
    """


@dataclass(slots=True)
class Inbox:
    """Notices of other machines for the scheduler's thread, which other threads add."""

    stored: deque[OffloadKey] = field(default_factory=deque)
    """Watched blocks that another machine has stored."""
    touched: deque[OffloadKey] = field(default_factory=deque)
    """Declined blocks that another machine has declined before: this was their second touch in the fleet."""

    def take(self) -> tuple[Sequence[OffloadKey], Sequence[OffloadKey]]:
        """Return the stored and the touched blocks so far."""
        if not self.stored and not self.touched:
            return (), ()
        return _taken(self.stored), _taken(self.touched)


@dataclass(slots=True)
class Queue:
    """Notices for the server, which other threads add and the sending thread takes."""

    stored: deque[Place] = field(default_factory=deque)
    """Places that hold blocks now."""
    released: deque[Place] = field(default_factory=deque)
    """Places whose claims end."""
    claims: deque[Claim] = field(default_factory=deque)
    """Claims without an answer."""
    watched: deque[tuple[OffloadKey, Place]] = field(default_factory=deque)
    """Blocks that this machine is interested in."""
    declined: deque[tuple[OffloadKey, Place]] = field(default_factory=deque)
    """Blocks that admission has declined."""

    def waiting(self) -> bool:
        """Return True if there is something to send."""
        return bool(self.stored or self.released or self.claims or self.watched or self.declined)

    def drop_late(self) -> None:
        """Drop the notices that are of no use after an outage: their stores have begun without an answer."""
        self.claims.clear()
        self.declined.clear()
        self.released.clear()


@dataclass(slots=True, eq=False)
class Scope:
    """All state about one namespace and epoch; another epoch has a new one."""

    directory: Directory
    announce: Callable[[], object]
    """Function that wakes up callers that wait for news."""
    on_absent: Callable[[Sequence[Place]], object]
    """Function that receives granted places which a complete directory denies."""
    queue: Queue = field(default_factory=Queue)
    """Notices that wait to be sent."""
    inbox: Inbox = field(default_factory=Inbox)
    """Notices of other machines that have arrived."""
    interests: OrderedDict[bytes, OffloadKey] = field(default_factory=OrderedDict)
    """Watched keys by digest. The sending thread writes; the receiving thread only looks keys up."""
    overflowed: bool = False
    """True if the directory lacks stored blocks that will not be announced."""
    incomplete: bool = True
    """True if the directory may lack blocks, and should be filled."""
    suspects: deque[tuple[float, Place]] = field(default_factory=deque)
    """Blocks that the directory denied although the medium has them, each with the time to look again."""
    missed: bool = False
    """True if notices about watched blocks may have been missed."""
    clock: Callable[[], float] = time.monotonic
    """Function that returns monotonic seconds."""

    def store(self, places: Sequence[Place]) -> None:
        """Queue stored blocks, and drop the oldest beyond the bound."""
        stored = self.queue.stored
        stored.extend(places)
        if len(stored) > MAX_UNSENT:
            self.overflowed = True
            for _ in range(len(stored) - MAX_UNSENT):
                stored.popleft()

    def receive(self, content: bytes) -> None:
        """Process a notice about stored blocks; those of this machine, and strangers' texts, are passed over."""
        own = self.directory.owner
        if content[: len(own)] != own:
            self._report(self.inbox.stored, [self.interests.get(digest) for digest in cut(content[len(own) :])])

    def suspect(self, places: Sequence[Place]) -> None:
        """Look later if the directory still denies blocks that the medium has. Any thread may call.

        A block that another machine has just uploaded is in the medium a little before it is in the directory.
        """
        due = self.clock() + SETTLE_SECONDS
        self.suspects.extend((due, place) for place in places)

    def judge(self) -> None:
        """Add the suspects that are due, and record that the directory lacks blocks if it still denies one.

        Raises:
            StoreError: the server does not answer.
        """
        due: list[Place] = []
        while self.suspects and self.suspects[0][0] <= self.clock() and len(due) < MAX_BATCH:
            due.append(self.suspects.popleft()[1])
        if due and not all(self.directory.answers(digests_of(due))[1]):
            self.store(due)
            self.overflowed = True

    def look_again(self) -> None:
        """Look all watched blocks up, because notices may have been missed.

        Raises:
            StoreError: the server does not answer.
        """
        digests = list(self.interests)
        for at in range(0, len(digests), MAX_BATCH):
            batch = digests[at : at + MAX_BATCH]
            self._report_held(batch, self.directory.answers(b"".join(batch))[1])

    def send(self, client: ValkeyClient) -> None:
        """Send one batch in one round trip. Notices that cannot be sent still wait.

        Raises:
            StoreError: the server does not answer, or refuses a command.
        """
        queue, directory = self.queue, self.directory
        stored, released = list(islice(queue.stored, MAX_BATCH)), list(islice(queue.released, MAX_BATCH))
        taken, declined = list(islice(queue.claims, _MAX_CLAIMS)), list(islice(queue.declined, MAX_BATCH))
        claims = [claim for claim in taken if not claim.dropped.issuperset(claim.places)]
        watched = self._watch()
        commands: list[tuple[Word, ...]] = []
        if stored:
            digests = digests_of(stored)
            commands += [directory.add(digests), directory.notify(digests), directory.release(digests)]
        if released:
            commands.append(directory.release(digests_of(released)))
        sent = len(commands)
        if watched:
            # Such a block may have been stored before it was watched.
            commands.append(directory.look(b"".join(watched)))
        if declined:
            commands.append(directory.touch(digests_of([place for _, place in declined])))
        for claim in claims:
            digests = digests_of(claim.places)
            commands += [directory.claim(digests), directory.look(digests)]
        replies = iter(client.replies(commands)[sent:])
        if watched:
            self._report_held(watched, Directory.flags(next(replies), 1 + len(watched))[1:])
        if declined:
            touched = Directory.flags(next(replies), len(declined))
            self._report(
                self.inbox.touched, [key if again else None for (key, _), again in zip(declined, touched, strict=True)]
            )
        for claim in claims:
            self._grant(claim, next(replies), next(replies))
        _drop(queue.stored, len(stored))
        _drop(queue.released, len(released))
        _drop(queue.claims, len(taken))
        _drop(queue.declined, len(declined))

    def _watch(self) -> list[bytes]:
        """Note which blocks this machine is interested in, and return their digests."""
        watched = self.queue.watched
        entries = [watched.popleft() for _ in range(min(len(watched), MAX_BATCH))]
        digests = list(cut(digests_of([place for _, place in entries])))
        for (key, _), digest in zip(entries, digests, strict=True):
            self.interests[digest] = key
            self.interests.move_to_end(digest)
        while len(self.interests) > MAX_UNSENT:
            self.interests.popitem(last=False)
        return digests

    def _grant(self, claim: Claim, reply: object, looked: object) -> None:
        """Answer a claim. Granted blocks that a complete directory denies need no look before their upload."""
        granted = Directory.flags(reply, len(claim.places))
        complete, *held = Directory.flags(looked, 1 + len(claim.places))
        if complete:
            answers = zip(claim.places, granted, held, strict=True)
            self.on_absent([place for place, grant, there in answers if grant and not there])
        else:
            self.incomplete = True
        claim.granted = granted
        # The scheduler's thread drops places first and looks at the answer then, so one of both releases each claim.
        self.queue.released.extend(
            place for place, grant in zip(claim.places, granted, strict=True) if grant and place in claim.dropped
        )
        self.announce()

    def _report_held(self, digests: Sequence[bytes], held: Sequence[bool]) -> None:
        answers = zip(digests, held, strict=True)
        self._report(self.inbox.stored, [self.interests.get(digest) for digest, there in answers if there])

    def _report(self, box: deque[OffloadKey], keys: Sequence[OffloadKey | None]) -> None:
        known = [key for key in keys if key is not None]
        if known:
            box.extend(known)
            self.announce()


def _taken(box: deque[OffloadKey]) -> list[OffloadKey]:
    return [box.popleft() for _ in range(len(box))]


def _drop(notices: deque[object] | deque[Claim] | deque[tuple[OffloadKey, Place]] | deque[Place], count: int) -> None:
    for _ in range(min(count, len(notices))):
        notices.popleft()
